"""A real server on this machine for the length of a `with` block, watched and repaired as by `trtspec serve`."""

from __future__ import annotations

import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from trtspec.errors import TrtspecError
from trtspec.triton import server_state
from trtspec.triton.server import LocalServer
from trtspec.triton.server_state import SHARED_MEMORY, family

SERVER = "tritonserver"
_SERIES = re.compile(r"^(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_END_S = 20.0

Series = list[tuple[str, dict[str, str], float]]  # name, labels, value


def free_ports() -> dict[str, int]:
    """Three ports that nobody listens on, as keyword arguments of a server."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        numbers = [probe.getsockname()[1] for probe in probes]
    return dict(zip(("http_port", "grpc_port", "metrics_port"), numbers, strict=True))


def parse_metrics(text: str) -> Series:
    """The series of a metrics page."""
    return [
        (found["name"], dict(_LABEL.findall(found["labels"])), float(found["value"]))
        for found in _SERIES.finditer(text)
    ]


def by_label(series: Series, name: str, label: str) -> dict[str, float]:
    """Values of one metric by the value of a label, summed over all others."""
    sums: dict[str, float] = {}
    for found, labels, value in series:
        if found == name:
            sums[labels[label]] = sums.get(labels[label], 0.0) + value
    return sums


@dataclass
class Watched:
    """A server and what its supervisor said.

    Attributes:
        said: one line for each model that was loaded again, and each time the server was started again.
        failure: why the supervisor gave up, if it did.
    """

    server: LocalServer
    said: list[str] = field(default_factory=list)
    failure: TrtspecError | None = None

    @property
    def restarts(self) -> int:
        """How often the server was started again."""
        return sum("is started again" in line for line in self.said)

    @property
    def url(self) -> str:
        """`host:port` of gRPC."""
        return self.server.state.grpc_url

    def metrics(self) -> Series:
        """What the server publishes now.

        Raises:
            TrtspecError: it is gone.
        """
        url = f"http://127.0.0.1:{self.server.metrics_port}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return parse_metrics(answer.read().decode())
        except OSError as error:
            gone = TrtspecError(f"the server publishes nothing: {error}", where=self.server.log_source)
            raise self.failure or gone from error

    def processes(self) -> dict[str, int]:
        """Process ids: of the server itself, and by model instance, such as tensorrt_llm_0_0."""
        pids = {}
        for pid, line in family(self.server.state.token).items():
            words = line.split("\0")
            if "triton_python_backend_stub" in words[0]:
                pids[words[8]] = pid  # the words of `trtspec.triton.server._model_processes`
            elif pid == self.server.state.pid:
                pids[SERVER] = pid
        return pids

    def shared_memory(self) -> int:
        """Bytes of its regions in shared memory that are in use."""
        return sum(path.lstat().st_blocks * 512 for path in SHARED_MEMORY.glob(f"{self.server.state.token}*"))

    def _watch(self) -> None:
        try:
            self.server.supervise(self.said.append)
        except TrtspecError as error:
            self.failure = error


@contextmanager
def watched(server: LocalServer, *, revivals_a_minute: int | None = None) -> Iterator[Watched]:
    """Start a server and watch it; at the end it is gone, with everything that belongs to it.

    Args:
        server: not started yet.
        revivals_a_minute: how often a model or the server may die before the supervisor gives up; None: its own limits.

    Raises:
        TrtspecError: it does not start.
    """
    limit: dict[str, Any] = {}
    if revivals_a_minute is not None:
        limit = {"_MAX_REVIVALS_A_MINUTE": revivals_a_minute, "_MAX_RESTARTS": revivals_a_minute}
    with patch.multiple("trtspec.triton.server", **limit) if limit else ExitStack(), server:
        found = Watched(server)
        watcher = threading.Thread(target=found._watch, name="supervisor", daemon=True)
        watcher.start()
        try:
            yield found
        finally:
            server_state.stop(server.state_dir)  # as `trtspec stop`: the supervisor knows that this end is meant
            watcher.join(_END_S)
