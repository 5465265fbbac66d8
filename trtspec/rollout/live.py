"""A running local server whose models are loaded and unloaded one by one, and when an old process has answered all.

Knows the record of a server, its processes and Triton's model control; nothing of versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trtspec.errors import TrtspecError
from trtspec.triton.client import Client
from trtspec.triton.server_state import ServerState, cpu_seconds, family

_POLL_S = 0.1
_IDLE_S = 5.0
_COMPUTING = 0.03  # of one CPU


class NotDrained(TrtspecError):
    """Requests of an old process are still running."""


class LiveServer(Client):
    """Controls the models of a server.

    Args:
        state: its record.
        load_timeout_s: longest wait for a model to be loaded, in seconds.
        drain_timeout_s: longest wait for requests in flight to end, in seconds.
    """

    def __init__(self, state: ServerState, *, load_timeout_s: float, drain_timeout_s: float) -> None:
        super().__init__(state.grpc_url, control_key=state.token)
        self.state = state
        self._load_timeout_s, self._drain_timeout_s = load_timeout_s, drain_timeout_s

    def load(self, models: Sequence[str]) -> None:
        """Load some models at the same time, as their files are now. One that is loaded goes on answering until the new
        one does, and ends with its last request; if the new one does not load, the old one stays.

        Raises:
            TrtspecError: no server, or a model does not load.
        """
        with ThreadPoolExecutor(len(models)) as threads:
            loads = [threads.submit(self._load, model) for model in models]
        for load in loads:
            load.result()

    def _load(self, model: str) -> None:
        from tritonclient.grpc import service_pb2

        with self._explained(self._load_timeout_s):
            self._stub.RepositoryModelLoad(
                service_pb2.RepositoryModelLoadRequest(model_name=model),
                timeout=self._load_timeout_s,
                metadata=self._control,
            )

    def unload(self, models: Sequence[str]) -> None:
        """Take no further requests for some models; those in flight are answered.

        Raises:
            TrtspecError: no server.
        """
        from tritonclient.grpc import service_pb2

        for model in models:
            with self._explained(self._load_timeout_s):
                self._stub.RepositoryModelUnload(
                    service_pb2.RepositoryModelUnloadRequest(model_name=model),
                    timeout=self._load_timeout_s,
                    metadata=self._control,
                )

    def wait_gone(self, models: Sequence[str]) -> None:
        """Wait until unloaded models have answered all requests and their processes have ended.

        Raises:
            NotDrained: they take too long.
        """
        self._wait(lambda: not any(map(self.processes, models)), ", ".join(models))

    def processes(self, model: str) -> set[int]:
        """Process ids of the one instance of a model: more than one while an old one answers its last requests."""
        instance = f"{model}_0_0"
        return {pid for pid, line in family(self.state.token).items() if instance in line.split("\0")}

    def wait_answered(self, pipelines: Sequence[str], engines: Sequence[str]) -> bool:
        """Wait until the processes of pipelines that were loaded again, all but the newest, have ended.

        One whose client cancelled a stream between the last response and the stream's status never ends in Triton
        2.51. So those whose engines have computed nothing for a while count as having answered: a request in flight
        always keeps one busy.

        Args:
            pipelines: each with a new process that takes its requests.
            engines: models that only the old processes call.

        Returns:
            Whether the processes have ended.

        Raises:
            NotDrained: they take too long.
        """
        old = {pid for model in pipelines for pid in sorted(self.processes(model), key=_start)[:-1]}
        busy_at, busy_s = time.monotonic(), self._cpu_s(engines)

        def answered() -> bool:
            nonlocal busy_at, busy_s
            now, used_s = time.monotonic(), self._cpu_s(engines)
            if used_s - busy_s > _COMPUTING * (now - busy_at):
                busy_at, busy_s = now, used_s
            return self._ended(old) or now - busy_at > _IDLE_S

        self._wait(answered, ", ".join(pipelines))
        return self._ended(old)

    def _ended(self, pids: set[int]) -> bool:
        return pids.isdisjoint(family(self.state.token))

    def _cpu_s(self, models: Sequence[str]) -> float:
        """CPU seconds that the processes of some models have used so far."""
        return sum(cpu_seconds(pid) for model in models for pid in self.processes(model))

    def _wait(self, over: Callable[[], bool], models: str) -> None:
        deadline = time.monotonic() + self._drain_timeout_s
        while not over():
            if time.monotonic() > deadline:
                raise NotDrained(
                    f"requests of {models} are still running after {self._drain_timeout_s:g} s",
                    where=self.url,
                    fix="nothing was taken from them; run the same command again to go on",
                )
            time.sleep(_POLL_S)


def _start(pid: int) -> int:
    """When a process started, in clock ticks of the machine; 0 for one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
