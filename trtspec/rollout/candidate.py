"""The next version before it is served: built beside the one that serves, held against memory, judged by parity.

It is judged on a server of its own, which reads the repository that will be served and shares nothing with the one that
answers clients: a candidate that crashes or hangs takes nobody along. Knows builds, parity and local servers; not how a
version comes into a running server.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.errors import EXIT_PARITY_FAILED, TrtspecError
from trtspec.rollout.store import SERVER, Store
from trtspec.spec.schema import Output, Spec
from trtspec.triton.server_state import stop

if TYPE_CHECKING:
    from trtspec.build.graph import Observer as BuildObserver
    from trtspec.parity.result import Report
    from trtspec.parity.suite import Observer


class GateClosed(TrtspecError):
    """Parity found a fault in the candidate; nothing was switched."""

    exit_code = EXIT_PARITY_FAILED


def spec_of(spec: Spec, store: Store, number: int) -> Spec:
    """The spec of version `number`: the same, with results in the version's own directory."""
    engines, repository = store.engines_of(number).resolve(), store.repository_of(number).resolve()
    return spec.model_copy(update={"output": Output(engines=str(engines), model_repo=str(repository))})


def require_memory(spec: Spec) -> None:
    """Check that a second build fits beside the one that serves; reads no weights.

    Raises:
        TrtspecError: it does not.
    """
    from trtspec.build import limits
    from trtspec.build.sources import Sources

    sources = Sources(spec)
    planned = limits.plan(spec, {role: sources.open(role).config for role in spec.models})["memory"]
    needed, free = sum(sum(parts.values()) for parts in planned.values()), _free_memory()
    if needed > free:
        raise TrtspecError(
            f"the new version needs {needed / 2**30:.2f} GiB beside the one that serves, {free / 2**30:.2f} are free",
            where=str(spec.source),
            fix="lower serving.kv_cache_bytes, or " + BESIDE,
        )


BESIDE = (
    "serve the new version beside the old one and move the clients: build and serve it with --set output.engines=DIR "
    "--set output.model_repo=DIR and ports of its own, check it with trtspec parity, then end the old server; on "
    "Kubernetes, a new Deployment behind the same Service"
)


def build(spec: Spec, observer: BuildObserver) -> None:
    """Build a version as `trtspec build` would; unchanged steps are cached.

    Raises:
        TrtspecError: a step failed; what was built stays for the next try.
    """
    from trtspec.build.steps import build_graph
    from trtspec.trtllm.support import require_buildable

    require_buildable(spec)
    report = build_graph(spec).run(observer)
    if report.error:
        raise report.error


def gate(spec: Spec, place: Path, checks: Sequence[str], observer: Observer, say: Callable[[str], None]) -> Report:
    """Serve a version on free ports of this machine alone, and judge it.

    Args:
        spec: of the version.
        place: directory of the version, for the server's record and log.
        checks: names of the checks.
        observer: is told how the checks go on.
        say: is told where it is served.

    Raises:
        GateClosed: a check found a fault.
        TrtspecError: it does not load or does not answer, or cannot be checked.
    """
    from trtspec.parity import workbench
    from trtspec.parity.report.text import finding_lines, summary_line
    from trtspec.parity.suite import Selection, command, run
    from trtspec.triton.server import LocalServer

    end_gate(place)
    http_port, grpc_port, metrics_port = _free_ports(3)
    server = LocalServer(
        spec.model_repo_dir,
        engines_root=spec.engines_dir,
        mount_point=spec.serving.mount_point,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        startup_timeout_s=spec.serving.startup_timeout_s,
        num_threads=spec.serving.num_threads,
        state_dir=place / SERVER,
    )
    with server:
        say(f"the new version is judged on a server of its own (gRPC {server.state.grpc_url})")
        selection = Selection(subjects=(workbench.SERVER,), url=server.state.grpc_url, checks=tuple(checks))
        report = run(spec, selection, command(str(spec.source), selection, ()), observer)
    for check in report.checks:
        for line in finding_lines(check):
            say(line)
    if report.failed:
        raise GateClosed(
            f"the new version is not served: {summary_line(report)}",
            where=str(place),
            fix="mend it and roll out again; what is unchanged is not built again",
        )
    return report


def end_gate(place: Path) -> None:
    """End the server of a gate that was killed, if there is one."""
    if (place / SERVER).is_dir():
        stop(place / SERVER)


def _free_memory() -> int:
    """Bytes that new processes may take, of the machine and of the control group that this process is confined to."""
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return min(free, int(limit) - int(used)) if limit.isdigit() else free


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
