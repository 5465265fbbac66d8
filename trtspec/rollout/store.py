"""Versions of a build on disk, and the record of which one is served, which came before, and what is under way.

A version is a directory beside the engines that holds engines and a model repository as a build writes them. Knows
files only: no server, and nothing of what is in a model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from trtspec.build.fingerprint import digest
from trtspec.build.lock import output_lock
from trtspec.build.output import write_atomic
from trtspec.build.state import BuildState
from trtspec.errors import TrtspecError

RECORD_FILE = "rollout.json"
VERSIONS = ".versions"  # inside the engines directory, so that a server sees all versions below one mount point
SERVER = ".server"  # record and log of a server, beside the engines that it serves
_FORMAT = 1
_STATE = Path(".build", "state.json")


@dataclass(frozen=True)
class Version:
    """A kept build.

    Attributes:
        number: from 1.
        identity: digest of its engines and its repository; equal builds have the same.
        manifest: path of its manifest.json.
        parity: verdict of the gate; empty for one that was served without.
        served_since: UTC time, ISO 8601, of the last time it was put into service; empty before.
    """

    number: int
    identity: str
    manifest: str
    parity: str = ""
    served_since: str = ""


@dataclass(frozen=True)
class Move:
    """A change of versions that has begun and not ended.

    Attributes:
        origin, target: numbers of the versions.
        replacing: the files of `origin` are being replaced, so that the way back is another move.
    """

    origin: int
    target: int
    replacing: bool = False


@dataclass(frozen=True)
class Record:
    """What is known of the versions.

    Attributes:
        versions: by number.
        served: numbers of those served, the one served now last; what a rollback leaves is taken off the end.
        move: what is under way.
    """

    versions: dict[int, Version] = field(default_factory=dict)
    served: tuple[int, ...] = ()
    move: Move | None = None

    @property
    def current(self) -> Version | None:
        """The version that is served."""
        return self.versions[self.served[-1]] if self.served else None

    @property
    def previous(self) -> Version | None:
        """The version that a rollback goes back to."""
        return self.versions[self.served[-2]] if len(self.served) > 1 else None


class Store:
    """The versions of one engines directory.

    Args:
        engines: directory of the engines that are served.
        repository: the model repository that is served.
    """

    def __init__(self, engines: Path, repository: Path) -> None:
        self.engines, self.repository = engines, repository
        self.record = _read(engines / RECORD_FILE)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep builds and other changes of versions away, for the length of a `with` block.

        Raises:
            TrtspecError: another process builds or changes versions here.
        """
        with output_lock(self.engines / ".build" / "lock", self.engines):
            self.record = _read(self.engines / RECORD_FILE)
            yield

    def save(self, record: Record) -> None:
        """Replace the record."""
        content = {
            "format": _FORMAT,
            "versions": [asdict(version) for version in record.versions.values()],
            "served": list(record.served),
            "move": asdict(record.move) if record.move else None,
        }
        write_atomic(self.engines / RECORD_FILE, json.dumps(content, indent=1) + "\n")
        self.record = record

    def place(self, number: int) -> Path:
        """Directory of a version."""
        return self.engines / VERSIONS / str(number)

    def places(self) -> list[Path]:
        """Directories of all versions, those of candidates too."""
        return [path for path in (self.engines / VERSIONS).glob("*") if path.name.isdecimal()]

    def engines_of(self, number: int) -> Path:
        """Engines of a version, one directory a role."""
        return self.place(number) / "engines"

    def repository_of(self, number: int) -> Path:
        """Model repository of a version, as a build writes it."""
        return self.place(number) / "repository"

    def version_of(self, number: int) -> Version:
        """A version as its build left it."""
        return Version(number, identity(self.engines_of(number)), str(self.engines_of(number) / "manifest.json"))

    def keep_served(self) -> Version:
        """Keep what is served now, which may have been built in place since; returns its version.

        Raises:
            TrtspecError: nothing is built here.
        """
        now, current = identity(self.engines), self.record.current
        if current is not None and current.identity == now:
            return current
        number = max(self.record.versions, default=0) + 1
        remove(self.place(number))  # of a candidate that did not pass: another build
        self._begin(number, repository=True)
        version = self.version_of(number)
        versions = {**self.record.versions, number: version}
        self.save(replace(self.record, versions=versions, served=(*self.record.served, number)))
        return version

    def add(self, version: Version) -> None:
        """Put a version on the record."""
        self.save(replace(self.record, versions={**self.record.versions, version.number: version}))

    def candidate(self) -> int:
        """Number of the next version; its engines begin as those that are served, so that unchanged ones are not built.

        A candidate that was not finished or did not pass is gone on with.
        """
        number = max(self.record.versions, default=0) + 1
        self._begin(number, repository=False)
        return number

    def _begin(self, number: int, *, repository: bool) -> None:
        place = self.place(number)
        if place.exists():
            return
        staging = place.with_name(f".{number}")
        shutil.rmtree(staging, ignore_errors=True)
        (staging / "engines" / _STATE.parent).mkdir(parents=True)
        for name in _visible(self.engines):
            link(self.engines / name, staging / "engines" / name)
        shutil.copyfile(self.engines / _STATE, staging / "engines" / _STATE)
        (staging / "engines" / _STATE).with_name("lock").touch()  # says to builds that this is theirs
        if repository:
            shutil.copytree(self.repository, staging / "repository")
        os.rename(staging, place)

    def install_engines(self, number: int) -> None:
        """Put the engines of a version, their manifest and the state of their build in the place of those served.

        Done again after it was cut off, it comes to the same.
        """
        source, incoming = self.engines_of(number), self.engines / VERSIONS / ".incoming"
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir(parents=True)
        wanted = _visible(source)
        for name in wanted - {"manifest.json"}:
            link(source / name, incoming / name)
            replace_tree(incoming / name, self.engines / name)
        for name in _visible(self.engines) - wanted:
            remove(self.engines / name)
        manifest = (source / "manifest.json").read_text(encoding="utf-8")
        for kept, place in ((source, self.engines), (self.repository_of(number), self.repository)):
            manifest = manifest.replace(json.dumps(str(kept.resolve()))[1:-1], json.dumps(str(place.resolve()))[1:-1])
        write_atomic(self.engines / "manifest.json", manifest)
        write_atomic(self.engines / _STATE, (source / _STATE).read_text(encoding="utf-8"))
        shutil.rmtree(incoming)

    def prune(self) -> list[int]:
        """Remove all versions but the one that is served and the one before, candidates that did not pass among them;
        returns their numbers."""
        kept = self.record.served[-2:]
        gone = sorted({*self.record.versions, *(int(place.name) for place in self.places())} - {*kept})
        versions = {number: version for number, version in self.record.versions.items() if number in kept}
        self.save(replace(self.record, versions=versions, served=kept))
        for number in gone:
            remove(self.place(number))
        return gone


def identity(engines: Path) -> str:
    """Digest of what was built into an engines directory: the engines and the repository, wherever they lie.

    Raises:
        TrtspecError: nothing is built there.
    """
    records = BuildState(engines / _STATE).records
    if "repository" not in records or not (engines / "manifest.json").is_file():
        raise TrtspecError("nothing is built here", where=str(engines), fix="run trtspec build CONFIG")
    return digest({name: record.output_hash for name, record in records.items() if record.files and name != "manifest"})


def link(source: Path, place: Path) -> None:
    """A second name for every file of a tree, or a copy where the file system has none."""
    if source.is_file():
        _link_file(source, place)
    else:
        shutil.copytree(source, place, symlinks=True, copy_function=_link_file)


def replace_tree(source: Path, place: Path) -> None:
    """Put a file or directory in the place of another one, which passes through the directory of `source`.

    Killed in between, the old one is in its place, or nothing, or the new one.
    """
    old = source.with_name(f".{source.name}.old")
    remove(old)
    if place.exists():
        os.rename(place, old)
    os.rename(source, place)
    remove(old)


def remove(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def now() -> str:
    """UTC time, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _link_file(source: str | Path, place: str | Path) -> None:
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)


def _visible(engines: Path) -> set[str]:
    """What a build leaves in an engines directory."""
    return {path.name for path in engines.iterdir() if not path.name.startswith(".") and path.name != RECORD_FILE}


def _read(path: Path) -> Record:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']}")
        versions = {entry["number"]: Version(**entry) for entry in content["versions"]}
        move = Move(**content["move"]) if content["move"] else None
        return Record(versions, tuple(content["served"]), move)
    except FileNotFoundError:
        return Record()
    except (ValueError, KeyError, TypeError) as error:
        raise TrtspecError(
            f"cannot be read as a record of versions ({error})",
            where=str(path),
            fix=f"restore it; or remove it and {path.parent / VERSIONS}, and build and serve again",
        ) from None
