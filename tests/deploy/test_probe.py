"""The probe of a serving pod, against a server that answers, fails, hangs, or is only busy."""

from __future__ import annotations

import contextlib
import http.server
import importlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trtspec.triton import launch


class Server(http.server.ThreadingHTTPServer):
    """Answers as Triton does; `says` is the pipeline's answer, `others` whether the target answers others meanwhile."""

    says: tuple[int, dict[str, str]] = (200, {"text_output": " there"})
    hangs = False
    others = False
    asked: dict[str, object] | None = None
    count = 0


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.count += self.server.others
        stats = {"inference_stats": {"success": {"count": self.server.count}}}
        known = self.path == "/v2/models/tensorrt_llm/stats"
        self.answer(200 if known else 404, {"model_stats": [stats]})

    def do_POST(self) -> None:
        self.server.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.hangs:
            time.sleep(1.0)
        known = self.path == "/v2/models/tensorrt_llm_bls_unary/generate"
        self.answer(*(self.server.says if known else (404, {})))

    def answer(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        with contextlib.suppress(BrokenPipeError):  # a client that did not wait
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as serving:
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        yield serving
        serving.shutdown()


@pytest.fixture
def probe(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The probe's exit code, `launch` beside it as in a pod."""
    monkeypatch.setitem(sys.modules, "launch", launch)
    module = importlib.import_module("trtspec.deploy.probe")
    monkeypatch.setattr(launch, "_FULL_WAIT_S", 0.01)
    return lambda *options: module.main(["--http-port", str(server.server_port), "--timeout", "0.3", *options])


def test_one_token_through_the_pipeline(server: Server, probe: Callable[..., int]) -> None:
    assert probe() == 0 and probe("--or-busy") == 0
    assert server.asked is not None and server.asked["max_tokens"] == 1


def test_the_files_of_a_pod_suffice(server: Server, tmp_path: Path) -> None:
    beside = Path(launch.__file__)
    for path in (beside, beside.parents[1] / "deploy" / "probe.py"):
        shutil.copy(path, tmp_path)
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import probe; "]
    command[-1] += f"sys.exit(probe.main(['--http-port', '{server.server_port}']))"
    assert subprocess.run(command, timeout=60).returncode == 0
    server.says = (500, {"error": "the pipeline is gone"})
    assert subprocess.run(command, timeout=60, stderr=subprocess.DEVNULL).returncode == 1


@pytest.mark.parametrize("others", [False, True])
def test_a_dead_pipeline_fails_whatever_else_is_answered(
    server: Server, probe: Callable[..., int], others: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    server.says, server.others = (500, {"error": "Stub process 'tensorrt_llm_bls_unary_0_0' is not healthy."}), others
    assert probe("--or-busy") == 1
    assert capsys.readouterr().err == "Stub process 'tensorrt_llm_bls_unary_0_0' is not healthy.\n"


def test_a_server_that_hangs_fails_and_one_that_is_busy_does_not(server: Server, probe: Callable[..., int]) -> None:
    server.hangs = True
    assert probe("--or-busy") == 1
    server.others = True
    assert probe("--or-busy") == 0
    assert probe() == 1, "a server that starts has no others to answer"


def test_a_full_queue_is_busy_while_it_moves(server: Server, probe: Callable[..., int]) -> None:
    server.says = (503, {"error": "8 texts are waiting; expected fewer than 8"})
    assert probe("--or-busy") == 1
    server.others = True
    assert probe("--or-busy") == 0


def test_nobody_there(probe: Callable[..., int], server: Server) -> None:
    server.shutdown()
    server.server_close()
    assert probe("--or-busy") == 1
