"""The launcher of the container: its command lines, and its life with the real Triton server on scripted models."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trtspec.triton import launch
from trtspec.triton.backend import assemble_backend_dir
from trtspec.triton.client import Client
from trtspec.triton.repository import ENGINE_MODELS
from trtspec.triton.server import LocalServer, find_tritonserver
from trtspec.trtllm.placement import LOAD_ORDER

ENGINES = ["tensorrt_llm_draft", "tensorrt_llm"]


def command(*words: str) -> list[str]:
    options = launch.options_parser().parse_args(words)
    return launch.server_command(options, "secret", [*ENGINES, "tensorrt_llm_bls"])


def test_one_process_without_mpi() -> None:
    words = command()
    assert words[0] == "tritonserver" and "mpirun" not in words
    assert {"--model-repository=/models", "--model-control-mode=explicit", "--disable-auto-complete-config"} < {*words}
    assert not any(word.startswith("--load-model") for word in words), "models are loaded one after another"
    guarded = "model-repository,shared-memory,trace,logging:trtspec-control=secret"
    assert f"--http-restricted-api={guarded}" in words and f"--grpc-restricted-protocol={guarded}" in words


def test_an_engine_over_four_gpus_has_four_ranks() -> None:
    words = command("--ranks", "4")
    assert words[:4] == ["mpirun", "--allow-run-as-root", "-n", "1"] and words.count("tritonserver") == 4
    ranks = " ".join(words).split(" : ")
    assert all(f"shm-region-prefix-name=rank{index}_" in rank for index, rank in enumerate(ranks))
    for rank in ranks[1:]:
        assert "--load-model=tensorrt_llm " in rank and "tensorrt_llm_bls" not in rank
        assert "--allow-http=false --allow-grpc=false --allow-metrics=false" in rank and "secret" not in rank


def test_orchestrators() -> None:
    spawning = command("--orchestrator", "spawn", "--num-gpus", "2")
    assert spawning[:5] == ["mpirun", "--allow-run-as-root", "-n", "1", "tritonserver"]
    assert spawning.count("tritonserver") == 1, "the backend spawns the others"
    assert {"--cuda-memory-pool-byte-size=0:0", "--cuda-memory-pool-byte-size=1:0"} < {*spawning}
    ranks = " ".join(command("--orchestrator", "ranks", "--ranks", "3")).split(" : ")
    assert len(ranks) == 3 and "--load-model" not in ranks[0]
    assert all("--load-model=tensorrt_llm_draft --load-model=tensorrt_llm " in rank for rank in ranks[1:])


def test_the_llm_api_starts_its_ranks_with_its_own_launcher() -> None:
    assert command("--llmapi")[0] == "tritonserver"
    split = command("--llmapi", "--ranks", "8")
    assert split[:6] == ["mpirun", "--allow-run-as-root", "-n", "8", "trtllm-llmapi-launch", "tritonserver"]


def test_the_order_of_loading_is_that_of_the_plan() -> None:
    assert [*launch.ENGINE_MODELS] == [ENGINE_MODELS.get(role, f"tensorrt_llm_{role}") for role in LOAD_ORDER]


@pytest.mark.parametrize(
    "options",
    [(), ("--ranks", "2"), ("--orchestrator", "spawn"), ("--orchestrator", "ranks", "--ranks", "2")],
)
def test_triton_knows_every_option(options: tuple[str, ...]) -> None:
    done = subprocess.run([find_tritonserver(), "--help"], capture_output=True, text=True, timeout=60)
    known = set(re.findall(r"^  (--[a-z-]+)", done.stdout + done.stderr, flags=re.MULTILINE))
    assert "--model-repository" in known
    used = {word.partition("=")[0] for word in command(*options) if word.startswith("--")}
    assert used - known == ({"--allow-run-as-root"} if options else set())  # mpirun's


def test_dry_run_shows_no_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tensorrt_llm_bls", "tensorrt_llm", "tensorrt_llm_draft", "ensemble"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").touch()
    assert launch.main(["--dry-run", "--repository", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "trtspec-control=KEY" in first
    assert second == "then load: tensorrt_llm_draft tensorrt_llm ensemble tensorrt_llm_bls"
    assert launch.main(["--dry-run", "--repository", str(tmp_path / "ensemble")]) == 1
    assert "no model here" in capsys.readouterr().err


class Stuck(http.server.BaseHTTPRequestHandler):
    """A double of a server that never answers a probe in time, or `full`, refuses it at once; `grows`: it answers
    others meanwhile.

    Its pipeline, or its LLM API, takes the probes, and Triton counts them.
    """

    grows = full = taken_by_target = False
    asked = taken = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        count = self.asked if self.grows else 7
        taken = self.taken if "/tensorrt_llm/" not in self.path or self.taken_by_target else 0
        stats = [{"inference_stats": {"success": {"count": each}}} for each in (count, count + taken)]
        body = json.dumps({"model_stats": stats}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        type(self).taken += 1
        if self.full:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b'{"error": "too many requests: 8 texts are waiting; expected fewer than 8"}')
            return
        time.sleep(0.3)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("full", [False, True], ids=["too late", "full"])
@pytest.mark.parametrize(("grows", "ends"), [(False, "does not answer any more"), (True, "the server ended")])
def test_a_busy_server_is_not_a_dead_one(monkeypatch: pytest.MonkeyPatch, grows: bool, ends: str, full: bool) -> None:
    monkeypatch.setattr(launch, "PROBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(launch, "_FULL_WAIT_S", 0.05)
    handler = type("Handler", (Stuck,), {"grows": grows, "full": full})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as stuck:
        thread = threading.Thread(target=stuck.serve_forever)
        thread.start()
        process = subprocess.Popen(["sleep", "1.5"])
        try:
            words = ["--http-port", str(stuck.server_address[1]), "--watch-period", "0.01"]
            with pytest.raises(launch.LaunchFailed, match=ends):
                launch._watch(process, launch.options_parser().parse_args(words))
        finally:
            process.kill()
            process.wait()
            stuck.shutdown()
            thread.join()


@pytest.mark.parametrize("llmapi", [False, True])
def test_a_probe_that_was_taken_is_no_answer(monkeypatch: pytest.MonkeyPatch, llmapi: bool) -> None:
    monkeypatch.setattr(launch, "PROBE_TIMEOUT_S", 0.05)
    handler = type("Handler", (Stuck,), {"taken_by_target": llmapi})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as stuck:
        thread = threading.Thread(target=stuck.serve_forever)
        thread.start()
        process = subprocess.Popen(["sleep", "10"])
        try:
            words = ["--http-port", str(stuck.server_address[1]), "--watch-period", "0.01", *["--llmapi"] * llmapi]
            with pytest.raises(launch.LaunchFailed, match="does not answer any more"):
                launch._watch(process, launch.options_parser().parse_args(words))
        finally:
            process.kill()
            process.wait()
            stuck.shutdown()
            thread.join()


class Launcher:
    """launch.py in a process of its own, as in the container, with the local tritonserver on PATH."""

    def __init__(self, repository: Path, work: Path, ports: dict[str, int], *further: str) -> None:
        self.port, self.grpc_port = ports["http_port"], ports["grpc_port"]
        local = LocalServer(repository, engines_root=work, state_dir=work / "state")
        self.log = work / "launch.log"
        self.sink = self.log.open("wb")
        self.environment = local._environment()
        binary = find_tritonserver()
        self.environment["PATH"] = os.pathsep.join([str(binary.parent), self.environment["PATH"]])
        backends = assemble_backend_dir(work / "backends")
        own = ["--repository", str(repository), "--http-port", str(self.port), "--watch-period", "0.2"]
        extra = [f"--backend-directory={backends}", f"--grpc-port={self.grpc_port}", "--allow-metrics=false"]
        extra += ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--allow-gpu-metrics=false"]
        extra += ["--exit-timeout-secs=2", *further]  # a model whose process died keeps Triton waiting so long
        self.command = [sys.executable, "-I", launch.__file__, *own, "--", *extra]
        self.process = subprocess.Popen(self.command, env=self.environment, stdout=self.sink, stderr=subprocess.STDOUT)

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.said():
            assert time.monotonic() < deadline and self.process.poll() is None, self.said()[-3000:]
            time.sleep(0.05)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> dict[int, str]:
        """Process id -> command line of what the launcher has started."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(self.log.parent) in line and int(entry.name) != self.process.pid:
                found[int(entry.name)] = line
        return found

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        self.sink.close()


Start = Callable[..., Launcher]


@pytest.fixture
def start(
    tmp_path: Path, scripted_repository: Callable[[Path], Path], free_ports: Callable[[], dict[str, int]]
) -> Iterator[Start]:
    started: list[Launcher] = []

    def run(*further: str, model: str | None = None) -> Launcher:
        repository = scripted_repository(tmp_path / "repo")
        if model is not None:
            (repository / "tensorrt_llm_bls" / "1" / "model.py").write_text(model, encoding="utf-8")
        started.append(Launcher(repository, tmp_path, free_ports(), *further))
        return started[-1]

    yield run
    for launcher in started:
        launcher.close()


def test_a_life_on_the_real_server(start: Start) -> None:
    launcher = start()
    launcher.wait_for("launch: the server answers")
    said = launcher.said()
    assert said.index("loaded tensorrt_llm_bls\n") < said.index("loaded tensorrt_llm_bls_unary\n")
    with Client(f"127.0.0.1:{launcher.grpc_port}") as client:
        assert client.complete("Hello", max_tokens=3).stats.tokens > 0

    # Without the key nobody loads or unloads a model.
    url = f"http://127.0.0.1:{launcher.port}/v2/repository/models/tensorrt_llm_bls/unload"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, b"{}", timeout=5)
    refused.value.close()
    assert refused.value.code == 403

    probe = [*launcher.command[: launcher.command.index("--")], "--probe"]
    assert subprocess.run(probe, capture_output=True, timeout=30).returncode == 0

    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.process.wait(timeout=60) == 0, launcher.said()[-2000:]
    assert launcher.children() == {}


def test_a_model_that_died_ends_the_server(start: Start) -> None:
    launcher = start()
    launcher.wait_for("launch: the server answers")
    victim = next(pid for pid, line in launcher.children().items() if "/tensorrt_llm_bls_unary/" in line)
    os.kill(victim, signal.SIGKILL)
    assert launcher.process.wait(timeout=60) == 1
    assert "(3 of 3)" in launcher.said() and "launch: the server does not answer any more" in launcher.said()
    assert launcher.children() == {}


def test_a_model_that_does_not_load_is_named(start: Start) -> None:
    launcher = start(model="import a_missing_module\n")
    assert launcher.process.wait(timeout=60) == 1
    assert "launch: model tensorrt_llm_bls does not load: " in launcher.said().splitlines()[-1]
    assert "a_missing_module" in launcher.said().splitlines()[-1]


def test_a_server_that_cannot_start_ends_the_launcher(start: Start) -> None:
    launcher = start("--no-such-option")
    assert launcher.process.wait(timeout=60) == 1
    assert launcher.said().splitlines()[-1].startswith("launch: the server ended with code ")
