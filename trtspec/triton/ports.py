"""Where a server can listen: whether a port is free, who holds it if not, who can reach it. Knows nothing of Triton."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from trtspec.errors import TrtspecError

_LISTEN = "0A"  # state column of /proc/net/tcp


def require_free(host: str, ports: Mapping[str, int]) -> None:
    """Check that every port can be bound on `host`.

    Args:
        ports: option that chooses the port, such as `--http-port` -> port.

    Raises:
        TrtspecError: a port is taken, asked for twice or not allowed, or the address is not one of this machine.
    """
    seen: dict[int, str] = {}
    for option, port in ports.items():
        if port in seen:
            raise TrtspecError(f"{seen[port]} and {option} are both {port}", fix=f"choose another port with {option}")
        seen[port] = option
        _require_free(host, port, option)


def _require_free(host: str, port: int, option: str) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server does: a port whose last connections are still closing counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            holder = holder_of(port)
            by = f" by process {holder}" if holder else ""
            raise TrtspecError(
                f"the port is in use{by}", where=where, fix=f"stop that process or choose another port with {option}"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise TrtspecError(
                "no permission to listen on this port", where=where, fix=f"choose one above 1023 with {option}"
            ) from error
        raise TrtspecError(
            f"cannot listen on this address ({error.strerror or error})", where=where, fix="choose another with --host"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def holder_of(port: int) -> str | None:
    """`PID (name)` of the process that listens on a TCP port; None where it cannot be seen."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(handle) in sockets for handle in (process / "fd").iterdir()):
                return f"{process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:
            continue  # ended meanwhile, or somebody else's
    return None


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for columns in map(str.split, rows):
            if columns[3] == _LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                inodes.add(columns[9])
    return inodes
