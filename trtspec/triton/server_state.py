"""What is known on disk about a started server, the processes that belong to it, and how to end them.

A server carries a random token in the command line of tritonserver, and Triton hands it on to every model process
as the prefix of its shared-memory region. Whoever carries the token belongs to the server: a process id that was
given to somebody else since does not. A link to its directory stands beside these regions, so that a server is found by
its address alone. Knows nothing of how a server is started.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trtspec.errors import TrtspecError
from trtspec.triton.compose import Composition

STATE_FILE = "server.json"
SHARED_MEMORY = Path("/dev/shm")
EXIT_TIMEOUT_S = 3  # how long Triton itself waits for requests in flight
KILL_AFTER_S = EXIT_TIMEOUT_S + 5.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # and the address that a client on the same machine takes
_LINK = ".server"  # ends the names of links to the directories of servers
_GONE_WITHIN_S = 5.0


@dataclass(frozen=True)
class ServerState:
    """A started server.

    Attributes:
        pid: process id of tritonserver.
        token: what its processes and shared-memory regions are known by.
        host: address it listens on.
        http_port, grpc_port, metrics_port: its ports.
        model_repo, engines_root: the repository it serves, and where its engines are.
        build: `build_stamp` of the two when it was started.
        log: where it writes.
        ready: it has answered a request.
        stopping: somebody asked it to stop, so its end is no fault.
        project: of docker compose, for a server in a container; `pid` is then its supervisor's. Empty for a local one.
    """

    pid: int
    token: str
    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    model_repo: str
    engines_root: str
    build: str
    log: str
    ready: bool = False
    stopping: bool = False
    project: str = ""

    @property
    def alive(self) -> bool:
        """The process or the container exists and is this server."""
        if self.project:
            status = self.composition.status()
            return status is not None and not status.ended
        return self.token in command_line(self.pid)

    @property
    def composition(self) -> Composition:
        """The composition that its container belongs to."""
        return Composition(self.project, Path(self.log).parent)

    @property
    def kept_by(self) -> str:
        """What to call it: its process, or its container's project."""
        return f"container {self.project}" if self.project else f"process {self.pid}"

    @property
    def outdated(self) -> bool:
        """What it serves has been built again, or removed, since it was started."""
        return self.build != build_stamp(Path(self.model_repo), Path(self.engines_root))

    @property
    def address(self) -> str:
        """Host that a client on this machine connects to; a wildcard address is reached over loopback."""
        return connect_host(self.host)

    @property
    def grpc_url(self) -> str:
        """`host:port` of gRPC."""
        return f"{self.address}:{self.grpc_port}"

    def write(self, state_dir: Path) -> None:
        """Record it, whole or not at all."""
        temporary = state_dir / f".{STATE_FILE}.{os.getpid()}"
        try:
            temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, state_dir / STATE_FILE)
        finally:
            temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # there already; or nowhere to put it: then its spec alone tells where it is
            self._link.symlink_to(state_dir.absolute())

    def remove(self, state_dir: Path) -> None:
        """Forget it, unless another server has been recorded since."""
        recorded = read(state_dir)
        if recorded is not None and recorded.token == self.token:
            (state_dir / STATE_FILE).unlink(missing_ok=True)
            self._link.unlink(missing_ok=True)

    @property
    def _link(self) -> Path:
        return SHARED_MEMORY / f"{self.token}{_LINK}"


def build_stamp(model_repo: Path, engines_root: Path) -> str:
    """Changes when a model's or an engine's directory is written again."""
    configs = sorted([*model_repo.glob("*/config.pbtxt"), *engines_root.glob("*/config.json")])
    times = "".join(f"{path}:{path.stat().st_mtime_ns};" for path in configs)
    return hashlib.sha256(times.encode()).hexdigest()[:16]


def connect_host(host: str) -> str:
    """The address to connect to for a server that listens on `host`."""
    host = _WILDCARDS.get(host, host)
    return f"[{host}]" if ":" in host else host


def read(state_dir: Path) -> ServerState | None:
    """The recorded server, alive or not; None where nothing readable is recorded."""
    try:
        return ServerState(**json.loads((state_dir / STATE_FILE).read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


def running(state_dir: Path) -> ServerState | None:
    """The server of this directory, if it is alive; a record that outlived its server counts as none."""
    state = read(state_dir)
    return state if state is not None and state.alive else None


def find(url: str) -> ServerState | None:
    """The server that answers at this address, if this user started it on this machine with `trtspec serve`.

    Args:
        url: `host:port` of gRPC, as a client would write it.
    """
    host, _, port = url.rpartition(":")
    addresses = _addresses(host.strip("[]"))
    for link in SHARED_MEMORY.glob(f"*{_LINK}"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            state = read(link) if link.lstat().st_uid == os.getuid() else None
            if state and port == str(state.grpc_port) and _is_reached_at(state, addresses) and state.alive:
                return state
    return None


def stop(state_dir: Path) -> ServerState | None:
    """End the server of this directory and remove every trace of it. Ends within about `KILL_AFTER_S` seconds.

    Returns:
        The server that was ended, or None if none was running; what a dead one left behind is removed either way.

    Raises:
        TrtspecError: the server belongs to another user, or does not die.
    """
    state = read(state_dir)
    if state is None:
        return None
    was_alive = state.alive
    if was_alive:
        replace(state, stopping=True).write(state_dir)
        if not state.project:
            send_signal(state.pid, signal.SIGTERM)
            _wait_until_dead(state, KILL_AFTER_S)
    clean_up(state, state_dir)
    return state if was_alive else None


def require_not_running(state_dir: Path) -> None:
    """Refuse a second server of one directory, and clear away what is left of one that died.

    Raises:
        TrtspecError: it is running, or what is left of it cannot be removed.
    """
    state = running(state_dir)
    if state is not None:
        raise TrtspecError(
            f"a server of this configuration is already running ({state.kept_by}, gRPC on {state.grpc_url})",
            where=state.model_repo,
            fix="use it, or end it with trtspec stop CONFIG",
        )
    stale = read(state_dir)
    if stale is not None:
        clean_up(stale, state_dir)


def clean_up(state: ServerState, state_dir: Path) -> None:
    """Kill what is left of a server and remove its shared memory or its container, and its record.

    Raises:
        TrtspecError: a process belongs to another user, or survives SIGKILL; docker does not remove the container.
    """
    if state.project:
        state.composition.down()
        state.remove(state_dir)
        return
    deadline = time.monotonic() + _GONE_WITHIN_S
    while left := family(state.token):
        if time.monotonic() > deadline:
            raise TrtspecError(f"process {next(iter(left))} of the server does not die", where=state.model_repo)
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        time.sleep(0.05)
    for region in SHARED_MEMORY.glob(f"{state.token}*"):
        region.unlink(missing_ok=True)
    state.remove(state_dir)


def command_line(pid: int) -> str:
    """Command line of a living process, words separated by NUL; empty for a dead one and for a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far, of all its threads; 0 for one that is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime


def family(token: str) -> dict[int, str]:
    """Process id -> command line of every living process that carries the token."""
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return {pid: line for pid in pids if token in (line := command_line(pid))}


def _is_reached_at(state: ServerState, addresses: set[str]) -> bool:
    if state.host in _WILDCARDS:
        return any(map(_is_ours, addresses))
    return not addresses.isdisjoint(_addresses(state.host))


def _is_ours(address: str) -> bool:
    """Whether an address is one of this machine's."""
    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        return False
    return True


def _addresses(host: str) -> set[str]:
    """What a name stands for; nothing where it is not known."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return set()


def _wait_until_dead(state: ServerState, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while state.alive and time.monotonic() < deadline:
        time.sleep(0.05)


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if there still is one.

    Raises:
        TrtspecError: it is somebody else's.
    """
    with contextlib.suppress(ProcessLookupError):
        try:
            os.kill(pid, number)
        except PermissionError as error:
            raise TrtspecError(
                f"no permission to end process {pid}", fix="stop the server as the user who started it"
            ) from error
