"""One writer per output directory: an advisory lock that the kernel drops when its holder dies.

Knows nothing of steps. A lock file left behind by a killed process is no obstacle, and its presence beside an
output says that the output is ours to replace.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtspec.errors import TrtspecError


@contextmanager
def output_lock(path: Path, guarded: Path) -> Iterator[None]:
    """Hold the lock file `path`, which guards the output `guarded`, for the length of a `with` block.

    Raises:
        TrtspecError: another process holds it; its pid is named. Never waits.
        OSError: the lock file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(descriptor, 32).decode(errors="replace").strip()
            holder = f"process {pid}" if pid else "another process"
            raise TrtspecError(
                f"{holder} is building here",
                where=str(guarded),
                fix="wait until it has ended, or stop it, and run this again; finished steps are kept",
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
