"""`trtspec serve` and `trtspec stop` as a user runs them, on a repository of test doubles."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.triton.server_state import SHARED_MEMORY, ServerState, family, running, stop

SPEC = """\
version: 1
target: {model: ./target, dtype: float32}
speculation: {method: draft_target, draft: {model: ./draft, dtype: float32}, num_draft_tokens: 4}
output: {engines: engines, model_repo: repo}
"""


@pytest.fixture
def config(tmp_path: Path, free_ports: Callable[[], dict[str, int]]) -> Iterator[Path]:
    """A spec whose repository is not built yet; whatever was started for it is ended."""
    path = tmp_path / "demo.yaml"
    ports = ", ".join(f"{name}: {port}" for name, port in free_ports().items())
    path.write_text(SPEC + f"serving: {{{ports}, startup_timeout_s: 60, num_threads: 1}}\n", encoding="utf-8")
    yield path
    stop(state_dir(path))


@pytest.fixture
def built(config: Path, scripted_repository: Callable[[Path], Path]) -> Path:
    """A spec with a repository."""
    scripted_repository(config.parent / "repo")
    return config


def state_dir(config: Path) -> Path:
    return config.parent / "engines" / ".server"


def trtspec(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def serve(config: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`trtspec serve` in a process of its own, since what it detaches outlives it."""
    command = [sys.executable, "-m", "trtspec", "serve", str(config), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=90)


def in_foreground(config: Path, *options: str) -> tuple[subprocess.Popen[str], ServerState]:
    """Start `trtspec serve` and wait until it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trtspec", "serve", str(config), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        state = running(state_dir(config))
        if state is not None and state.ready:
            return process, state
        if process.poll() is not None:
            break
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"not ready: {process.communicate()}")


def leftovers(state: ServerState) -> list[str]:
    return [*map(str, family(state.token)), *map(str, SHARED_MEMORY.glob(f"{state.token}*"))]


def test_before_the_build_it_names_the_command_to_run(config: Path) -> None:
    result = trtspec("serve", config)
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: {config.parent / 'repo'}: there is no built model repository here; run: trtspec build {config}\n"
    )


def test_without_a_gpu_a_stand_in_takes_the_place_of_the_container(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.defpath)  # nvidia-smi is not there, whatever this machine has
    settings = ("--set", "engine.runtime=tensorrt_llm", "--set", "hardware.gpu=H100-SXM")
    result = serve(built, "--detach", *settings)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[0] == "no GPU here: the stand-in backend executes the checkpoints with PyTorch"
    assert running(state_dir(built)) is not None


def test_the_llm_api_has_no_stand_in(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    sets = ("engine.runtime=tensorrt_llm", "engine.track=llmapi", "hardware.gpu=H100-SXM")
    result = trtspec("serve", built, *(word for each in sets for word in ("--set", each)))
    assert result.exit_code == 1
    assert "engine.track: the LLM API runs on GPUs only" in result.stderr and result.stderr.count("\n") == 1


def test_in_the_foreground_until_a_signal(built: Path) -> None:
    model = built.parent / "repo" / "tensorrt_llm_bls" / "1" / "model.py"
    model.write_text(model.read_text().replace('"num_draft_tokens", [4]', '"num_draft_tokens", [0]'))
    process, state = in_foreground(built)
    assert process.stdout is not None
    begun = "".join(process.stdout.readline() for _ in range(3))  # it says so a moment after it is ready
    process.send_signal(signal.SIGTERM)
    rest, err = process.communicate(timeout=60)
    out = begun + rest
    assert process.returncode == 0, err
    assert err == f"warning: no draft was proposed at the first request; see {state.log}\n"
    assert out.splitlines() == [
        f"starting the Triton server on {built.parent / 'repo'} (log: {state.log})",
        f"ready: gRPC 127.0.0.1:{state.grpc_port}, HTTP http://127.0.0.1:{state.http_port}, "
        f"metrics http://127.0.0.1:{state.metrics_port}/metrics (process {state.pid})",
        "Ctrl-C stops it",
        "stopping",
    ]
    assert leftovers(state) == [] and running(state_dir(built)) is None


def test_a_signal_while_it_is_still_starting(built: Path) -> None:
    slow = "import time\nclass TritonPythonModel:\n    def initialize(self, args):\n        time.sleep(60)\n"
    (built.parent / "repo" / "tensorrt_llm_bls" / "1" / "model.py").write_text(slow)
    process = subprocess.Popen([sys.executable, "-m", "trtspec", "serve", str(built)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline().startswith(b"starting")
    state = running(state_dir(built))
    assert state is not None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert leftovers(state) == []


def test_ctrl_c_while_waiting_for_a_detached_server_ends_that_too(built: Path) -> None:
    slow = "import time\nclass TritonPythonModel:\n    def initialize(self, args):\n        time.sleep(60)\n"
    (built.parent / "repo" / "tensorrt_llm_bls" / "1" / "model.py").write_text(slow)
    command = [sys.executable, "-m", "trtspec", "serve", str(built), "--detach"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None and process.stderr.readline().startswith(b"starting")
    state = running(state_dir(built))
    assert state is not None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"error: interrupted\n")
    assert leftovers(state) == [] and running(state_dir(built)) is None


def test_a_server_that_dies_and_cannot_be_started_again_ends_it_with_the_end_of_the_log(built: Path) -> None:
    process, state = in_foreground(built)
    (built.parent / "repo" / "tensorrt_llm_bls" / "1" / "model.py").write_text("import a_missing_module\n")
    os.kill(state.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    *log, error = err.splitlines()
    assert error.startswith(
        f"error: {state.log}: the server ended with code 1 while it was starting: model tensorrt_llm_b"
    )
    assert "a_missing_module" in error
    assert log and all(line.startswith("  ") for line in log) and "failed to load all models" in log[-1]
    assert leftovers(state) == [] and running(state_dir(built)) is None


def test_a_model_that_does_not_load_is_named(built: Path) -> None:
    (built.parent / "repo" / "tensorrt_llm_bls" / "1" / "model.py").write_text("import a_missing_module\n")
    result = serve(built, "--detach")
    assert result.returncode == 1
    *log, error = result.stderr.splitlines()
    assert log[0].startswith("starting the Triton server on ")
    assert error.startswith(f"error: {state_dir(built) / 'tritonserver.log'}: the server ended with code 1 while ")
    assert "model tensorrt_llm_bls failed to load: " in error and "a_missing_module" in error
    assert any("failed to load all models" in line for line in log)
    assert "Traceback" not in result.stderr


def test_a_detached_life(built: Path, free_ports: Callable[[], dict[str, int]]) -> None:
    first = serve(built, "--detach")
    assert first.returncode == 0, first.stderr
    assert first.stderr.count("\n") == 1 and first.stderr.startswith("starting the Triton server on ")
    state = running(state_dir(built))
    assert state is not None and state.ready
    assert (
        f"ready: gRPC 127.0.0.1:{state.grpc_port}" in first.stdout and f"trtspec stop {built} ends it" in first.stdout
    )

    again = trtspec("serve", built, "--detach")
    assert again.exit_code == 0
    assert again.stdout.startswith("already running: gRPC") and running(state_dir(built)) == state

    rewritten = built.parent / "repo" / "tensorrt_llm_bls" / "config.pbtxt"
    built_at = rewritten.stat().st_mtime_ns
    os.utime(rewritten)
    outdated = trtspec("serve", built, "--detach")
    assert outdated.exit_code == 1
    assert f"serves an earlier build; run: trtspec stop {built}; then serve again" in outdated.stderr
    os.utime(rewritten, ns=(built_at, built_at))

    elsewhere = trtspec("serve", built, "--detach", "--grpc-port", str(free_ports()["grpc_port"]))
    assert elsewhere.exit_code == 1
    assert f"already being served elsewhere (gRPC on {state.grpc_url})" in elsewhere.stderr

    foreground = trtspec("serve", built)
    assert foreground.exit_code == 1
    assert f"already running (process {state.pid}" in foreground.stderr

    victim = next(pid for pid, line in family(state.token).items() if "/tensorrt_llm_bls/" in line)
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not any("/tensorrt_llm_bls/" in line for pid, line in family(state.token).items() if pid != victim):
        assert time.monotonic() < deadline, "nobody watches the detached server"
        time.sleep(0.1)

    stopped = trtspec("stop", built)
    assert (stopped.exit_code, stopped.stdout) == (
        0,
        f"stopped the server of demo (process {state.pid}, gRPC {state.grpc_url})\n",
    )
    assert leftovers(state) == []
    twice = trtspec("stop", built)
    assert (twice.exit_code, twice.stdout) == (0, "nothing was running for demo\n")


def test_a_port_in_use_names_its_holder_and_the_way_out(built: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        for options in ([], ["--detach"]):
            result = serve(built, "--http-port", port, *options)
            assert result.returncode == 1
            assert re.search(
                rf"error: 127\.0\.0\.1:{port}: the port is in use by process {os.getpid()} \(.*\); "
                r"stop that process or choose another port with --http-port\n$",
                result.stderr,
            )


@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_no_port_at_all_is_a_usage_error(config: Path, port: str) -> None:
    assert trtspec("serve", config, "--http-port", port).exit_code == 2


def test_stop_where_nothing_was_ever_started(config: Path) -> None:
    result = trtspec("stop", config)
    assert (result.exit_code, result.stdout) == (0, "nothing was running for demo\n")
