"""What a step leaves on disk: staged beside its place, swapped in whole, recorded, and checked later.

Knows nothing of steps. An output is one file or one directory; it is written under a staging directory on the same
file system, so a build that dies leaves the old output or none, never half of one.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from trtspec.build.fingerprint import digest_file
from trtspec.errors import TrtspecError


@dataclass(frozen=True)
class FileRecord:
    """One file of an output: bytes, sha256, and the two times (ns) that tell whether it was touched since."""

    size: int
    sha256: str
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Record of a file as it is now; reads all of it."""
        stat = path.stat()
        return cls(stat.st_size, digest_file(path), stat.st_mtime_ns, stat.st_ctime_ns)

    def damage(self, path: Path) -> str | None:
        """What is wrong with the file now, or None; its bytes are read only where its times have changed."""
        try:
            stat = path.stat()
        except OSError:
            return f"{path} is missing"
        if stat.st_size != self.size:
            return f"{path} has {stat.st_size} bytes, {self.size} were written"
        touched = (stat.st_mtime_ns, stat.st_ctime_ns) != (self.mtime_ns, self.ctime_ns)
        return f"{path} has other content than was written" if touched and digest_file(path) != self.sha256 else None


Records = dict[str, FileRecord]  # path relative to the output ("." where the output is a file) -> record


def record(output: Path) -> Records:
    """Records of every file of an output."""
    if output.is_file():
        return {".": FileRecord.of(output)}
    files = sorted(path for path in output.rglob("*") if path.is_file())
    return {path.relative_to(output).as_posix(): FileRecord.of(path) for path in files}


def damage(output: Path, records: Records) -> str | None:
    """The first fault of an output against its records, or None. Files that were added do not count."""
    return next((fault for name, file in records.items() if (fault := file.damage(output / name))), None)


def with_times_now(output: Path, records: Records) -> Records:
    """The records of an undamaged output, with its times as they are now: a touched file is then read only once."""
    times = {name: (output / name).stat() for name in records}
    return {
        name: replace(file, mtime_ns=times[name].st_mtime_ns, ctime_ns=times[name].st_ctime_ns)
        for name, file in records.items()
    }


def staging_dir(output: Path) -> Path:
    """Where an output is written before it is swapped in: a hidden directory beside it."""
    return output.parent / f".{output.name}.staging"


def clear_staging(output: Path) -> None:
    """Remove what a killed build left behind."""
    staging = staging_dir(output)
    if staging.exists():
        shutil.rmtree(staging)


def swap_in(output: Path) -> None:
    """Put the staged output in its place; the old one is removed after that.

    Killed in between, the output is missing or the old one, and the next build makes it again.
    """
    staging = staging_dir(output)
    staged, previous = staging / output.name, staging / "previous"
    if output.is_dir() and not output.is_symlink():
        os.rename(output, previous)
        try:
            os.rename(staged, output)
        except OSError:
            os.rename(previous, output)
            raise
    else:
        os.replace(staged, output)
    shutil.rmtree(staging)


def write_atomic(path: Path, text: str) -> None:
    """Write a small text file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_DIRECTORY = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR}


def explain(error: OSError, place: Path) -> TrtspecError:
    """One line for what the operating system refused; `place` where the error names no path."""
    where = str(error.filename or place)
    if error.errno in _NO_SPACE:
        return TrtspecError(
            "no space left on the disk", where=where, fix="free some space and run this again; finished steps are kept"
        )
    if error.errno in _NO_PERMISSION:
        return TrtspecError(
            "no permission", where=where, fix="change its owner or mode, or choose another directory under output"
        )
    if error.errno in _NO_DIRECTORY:
        return TrtspecError(
            "something else stands where a file or directory must go",
            where=where,
            fix="move it away and run this again",
        )
    return TrtspecError(error.strerror or str(error), where=where, fix="mend this and run it again")


@contextmanager
def explained(place: Path) -> Iterator[None]:
    """Turn what the operating system refuses inside a `with` block into one line for the user."""
    try:
        yield
    except OSError as error:
        raise explain(error, place) from error
