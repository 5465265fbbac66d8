"""`trtspec serve --openai` and `trtspec stop` as a user runs them, on a repository of test doubles."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.openai.process import FrontEndProcess, end, running_port
from trtspec.triton.server_state import ServerState, build_stamp, running, stop

SPEC = """\
version: 1
target: {model: ./target, dtype: float32}
speculation: {method: draft_target, draft: {model: ./draft, dtype: float32}, num_draft_tokens: 4}
output: {engines: engines, model_repo: repo}
"""


@pytest.fixture
def demo(
    tmp_path: Path,
    scripted_repository: Callable[[Path], Path],
    tiny_tokenizer_json: str,
    free_ports: Callable[[], dict[str, int]],
) -> Iterator[SimpleNamespace]:
    """A built spec's `config` and `state` directory, and a free `port`; whatever was started for it is ended."""
    config, state = tmp_path / "demo.yaml", tmp_path / "engines" / ".server"
    ports = free_ports()
    listed = ", ".join(f"{name}: {port}" for name, port in ports.items())
    config.write_text(SPEC + f"serving: {{{listed}, startup_timeout_s: 60, num_threads: 1}}\n", encoding="utf-8")
    repository = scripted_repository(tmp_path / "repo")
    (repository / "tensorrt_llm_bls" / "1" / "tokenizer.json").write_text(tiny_tokenizer_json, encoding="utf-8")
    yield SimpleNamespace(config=config, state=state, port=free_ports()["http_port"], ports=ports)
    stop(state)
    end(state)


def trtspec(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def serve(demo: SimpleNamespace, *options: str) -> list[str]:
    return [sys.executable, "-m", "trtspec", "serve", str(demo.config), "--openai-port", str(demo.port), *options]


def get(demo: SimpleNamespace, path: str) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{demo.port}{path}", timeout=10) as response:
        return json.load(response)


def pid_of(demo: SimpleNamespace) -> int:
    """The front end's process."""
    from trtspec.openai.process import _processes

    (pid,) = _processes(demo.state)
    return pid


def eventually(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def answers(demo: SimpleNamespace) -> bool:
    try:
        return [model["id"] for model in get(demo, "/v1/models")["data"]] == ["demo", "tensorrt_llm_bls"]
    except OSError:
        return False


def test_in_the_foreground_a_signal_ends_both(demo: SimpleNamespace) -> None:
    process = subprocess.Popen(serve(demo), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("starting the Triton server")
    ready = process.stdout.readline()
    assert ready.startswith(f"ready: OpenAI http://127.0.0.1:{demo.port}/v1, gRPC 127.0.0.1:"), process.communicate()
    assert process.stdout.readline() == "Ctrl-C stops it\n" and answers(demo)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "stopping\n", "")
    assert running_port(demo.state) is None and running(demo.state) is None


def test_a_detached_life(demo: SimpleNamespace) -> None:
    first = subprocess.run(serve(demo, "--detach"), capture_output=True, text=True, timeout=90)
    assert first.returncode == 0, first.stderr
    assert f"ready: OpenAI http://127.0.0.1:{demo.port}/v1, " in first.stdout and answers(demo)

    again = trtspec("serve", demo.config, "--detach")
    assert again.exit_code == 0 and f"already running: OpenAI http://127.0.0.1:{demo.port}/v1" in again.stdout
    elsewhere = trtspec("serve", demo.config, "--detach", "--openai-port", demo.port + 1)
    assert elsewhere.exit_code == 1
    assert f"with OpenAI's API on port {demo.port}; run: trtspec stop" in elsewhere.stderr

    os.kill(victim := pid_of(demo), signal.SIGKILL)
    eventually(lambda: answers(demo) and pid_of(demo) != victim, "nobody watches the front end")
    said = (demo.state / "serve.log").read_text()
    assert "the OpenAI front end was killed by SIGKILL; it is started again" in said

    request = urllib.request.Request(
        f"http://127.0.0.1:{demo.port}/v1/completions",
        json.dumps({"model": "demo", "prompt": "first HANG", "temperature": 0, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        assert b'"text":"first "' in stream.readline()
        stopped = trtspec("stop", demo.config)
        last = stream.read().decode().strip()
    assert (stopped.exit_code, running_port(demo.state)) == (0, None), stopped.output
    with socket.create_server(("127.0.0.1", demo.port)):
        pass  # the port is free at once
    assert set(json.loads(last.removeprefix("data: "))) == {"error"}, "an answer cut short is not a complete one"
    assert said == (demo.state / "serve.log").read_text().removesuffix("stopped\n"), "stopping is no accident"


def test_a_server_that_was_started_without_it_is_not_passed_off(
    demo: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, engines = (demo.config.parent / name for name in ("repo", "engines"))
    places = {"model_repo": str(repository), "engines_root": str(engines), "log": "", "host": "127.0.0.1"}
    build = build_stamp(repository, engines)
    state = ServerState(pid=os.getpid(), token="any", build=build, ready=True, **demo.ports, **places)
    monkeypatch.setattr("trtspec.triton.server_state.running", lambda state_dir: state)
    assert trtspec("serve", demo.config, "--detach").stdout.startswith("already running: gRPC ")
    result = trtspec("serve", demo.config, "--detach", "--openai")
    assert result.exit_code == 1 and "already being served, without OpenAI's API; run: trtspec stop" in result.stderr


def test_a_port_in_use_ends_the_start(demo: SimpleNamespace) -> None:
    with socket.create_server(("127.0.0.1", demo.port)):
        result = trtspec("serve", demo.config, "--openai-port", demo.port)
    assert result.exit_code == 1
    assert "the port is in use by process" in result.stderr
    assert result.stderr.endswith("choose another port with --openai-port\n")
    assert running(demo.state) is None


def test_refusals_before_anything_is_started(demo: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = demo.ports["grpc_port"]
    same = trtspec("serve", demo.config, "--openai-port", taken)
    assert same.stderr == (
        f"error: --grpc-port and --openai-port are both {taken}; choose another with --openai-port\n"
    )
    sets = ("engine.runtime=tensorrt_llm", "engine.track=llmapi", "hardware.gpu=H100-SXM")
    llmapi = trtspec("serve", demo.config, "--openai", *(word for each in sets for word in ("--set", each)))
    assert "engine.track: --openai speaks to the pipeline of compiled engines" in llmapi.stderr
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = trtspec("serve", demo.config, "--openai")
    assert missing.stderr == (
        "error: the Python package fastapi is not installed; install it with pip install 'trtspec[openai]'\n"
    )
    assert (same.exit_code, llmapi.exit_code, missing.exit_code) == (1, 1, 1)
    assert not demo.state.exists()


def test_without_a_server_it_says_so_and_dies_only_when_told(demo: SimpleNamespace) -> None:
    """Also how it dies: a front end whose server is not recorded is not started again."""
    demo.state.mkdir(parents=True)
    front_end = FrontEndProcess(
        demo.state,
        host="127.0.0.1",
        port=demo.port,
        grpc_url=f"127.0.0.1:{demo.ports['grpc_port']}",
        tokenizer=demo.config.parent / "repo" / "tensorrt_llm_bls" / "1" / "tokenizer.json",
        names=("demo", "tensorrt_llm_bls"),
    )
    front_end.start()
    eventually(lambda: answers(demo), "it does not listen")
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(demo, "/health/ready")
    assert caught.value.code == 503
    body = json.dumps({"model": "demo", "prompt": "a"}).encode()
    url = f"http://127.0.0.1:{demo.port}/v1/completions"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=60)
    error = json.load(caught.value)["error"]
    assert (caught.value.code, error["type"], error["code"]) == (503, "server_error", "server_unavailable")
    caught.value.close()
    result = trtspec("stop", demo.config)
    assert (result.exit_code, result.stdout) == (
        0,
        "stopped the OpenAI front end of demo; its server was not running any more\n",
    )
    front_end.stop()
    assert running_port(demo.state) is None
