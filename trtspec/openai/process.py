"""The front end as a process beside a Triton server: start it, wait for it, keep it alive, end it.

There is no record of it: its command line holds the directory of the server that it belongs to, and its port. Knows
nothing of what it serves.
"""

from __future__ import annotations

import http.client
import importlib.util
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trtspec.errors import TrtspecError
from trtspec.triton.ports import require_free
from trtspec.triton.server import ServerFailed
from trtspec.triton.server_state import connect_host, family, read, send_signal

DEFAULT_PORT = 9000
LOG_FILE = "openai.log"
_MODULE = "trtspec.openai"
_NEEDS = ("fastapi", "uvicorn")
_ENDS_WITHIN_S = 5.0
_STARTS_WITHIN_S = 60.0
_MAX_STARTS_A_MINUTE = 3
_POLL_S = 0.05


class FrontEndProcess:
    """One front end.

    Args:
        state_dir: directory of the server's record; the log is written there.
        host: address to listen on.
        port: port to listen on.
        grpc_url: `host:port` of the server's gRPC.
        tokenizer: the pipeline's tokenizer.json.
        names: of the model, for clients.
    """

    def __init__(
        self, state_dir: Path, *, host: str, port: int, grpc_url: str, tokenizer: Path, names: Sequence[str]
    ) -> None:
        self.state_dir = state_dir
        self.host = host
        self.port = port
        self.log = state_dir / LOG_FILE
        options = ["--host", host, "--port", str(port), "--grpc", grpc_url, "--tokenizer", str(tokenizer)]
        names_given = [word for name in names for word in ("--model", name)]
        self._command = [sys.executable, *_words(state_dir), *options, *names_given]
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._ending = False

    @property
    def url(self) -> str:
        """What clients take for base_url."""
        return url_of(self.host, self.port)

    def start(self) -> None:
        """Start the process; returns at once. One that outlived an earlier server of this directory is ended.

        Raises:
            TrtspecError: its packages are missing, or the port is taken.
        """
        require_packages()
        end(self.state_dir)
        require_free(self.host, {"--openai-port": self.port})
        self.log.unlink(missing_ok=True)
        self._spawn()

    def wait_ready(self) -> None:
        """Wait until it answers, which it does when the server's model is ready.

        Raises:
            ServerFailed: it died or takes too long.
        """
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while not self._answers():
            if self._running.poll() is not None:
                raise ServerFailed(f"the OpenAI front end {_how_it_ended(self._running)}", log=self.log)
            if time.monotonic() > deadline:
                raise ServerFailed(f"the OpenAI front end does not answer after {_STARTS_WITHIN_S:g} s", log=self.log)
            time.sleep(_POLL_S)

    def watch(self, say: Callable[[str], None]) -> None:
        """Start it again whenever it dies, in a thread of its own, until `stop` or `trtspec stop`.

        Args:
            say: told in one line each time, and when that happens too often.
        """
        threading.Thread(target=self._watch, args=(say,), daemon=True).start()

    def stop(self) -> None:
        """End it, by force after a deadline."""
        with self._starting:
            self._ending = True
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "start() comes first"
        return self._process

    def _spawn(self) -> None:
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal reaches the supervisor only, which ends it in order.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(connect_host(self.host).strip("[]"), self.port, timeout=5)
        try:
            connection.request("GET", "/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _watch(self, say: Callable[[str], None]) -> None:
        starts: list[float] = []
        while True:
            self._running.wait()
            how, now = _how_it_ended(self._running), time.monotonic()
            starts = [then for then in starts if now - then < 60.0]
            with self._starting:
                recorded = read(self.state_dir)
                if self._ending or recorded is None or recorded.stopping:
                    return
                if len(starts) >= _MAX_STARTS_A_MINUTE:
                    say(f"the OpenAI front end {how} again and again; it stays down, Triton goes on (log: {self.log})")
                    return
                say(f"the OpenAI front end {how}; it is started again (log: {self.log})")
                self._spawn()
            starts.append(now)


def require_packages() -> None:
    """Refuse an environment without the packages of the front end.

    Raises:
        TrtspecError: the first that is missing.
    """
    for package in _NEEDS:
        if importlib.util.find_spec(package) is None:
            raise TrtspecError(
                f"the Python package {package} is not installed", fix="install it with pip install 'trtspec[openai]'"
            )


def running_port(state_dir: Path) -> int | None:
    """The port of the front end of this directory; None where none is running."""
    for line in _processes(state_dir).values():
        words = line.split("\0")
        return int(words[words.index("--port") + 1])
    return None


def end(state_dir: Path) -> bool:
    """End the front end of this directory, whoever started it.

    Returns:
        Whether there was one.

    Raises:
        TrtspecError: it belongs to another user, or does not die.
    """
    found = set(_processes(state_dir))
    deadline = time.monotonic() + _ENDS_WITHIN_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _processes(state_dir):
            send_signal(pid, number)
        while _processes(state_dir) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        deadline += 1.0
    if left := set(_processes(state_dir)):
        raise TrtspecError(f"process {min(left)} of the OpenAI front end does not die", where=str(state_dir))
    return bool(found)


def url_of(host: str, port: int) -> str:
    """What clients on this machine take for base_url."""
    return f"http://{connect_host(host)}:{port}/v1"


def _processes(state_dir: Path) -> dict[int, str]:
    """Process id -> command line."""
    return family("\0".join((*_words(state_dir), "")))


def _words(state_dir: Path) -> tuple[str, ...]:
    """What a command line has after the interpreter: enough to tell a front end, and whose it is."""
    return "-m", _MODULE, str(state_dir.absolute())


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
