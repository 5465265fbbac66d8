"""What a build remembers between runs: the last good run of every step, saved after each one.

Knows nothing of what the steps do. The file is replaced whole, so a killed build leaves the last saved state.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trtspec.build.fingerprint import digest
from trtspec.build.output import FileRecord, Records, write_atomic

_VERSION = 1


@dataclass(frozen=True)
class StepRecord:
    """The last good run of one step.

    Attributes:
        inputs: name of each input -> sha256 of its value; says which one has changed.
        facts: the JSON object that the step returned; later steps read it.
        files: records of the output's files.
        seconds: wall time of the run.
        finished_at: UTC time, ISO 8601.
        actions: what was done, as commands or sentences.
    """

    inputs: dict[str, str]
    facts: dict[str, Any]
    files: Records = field(default_factory=dict)
    seconds: float = 0.0
    finished_at: str = ""
    actions: list[str] = field(default_factory=list)

    @property
    def input_hash(self) -> str:
        """sha256 over all inputs."""
        return digest(self.inputs)

    @property
    def output_hash(self) -> str:
        """sha256 over what the step returned and the content of the files that it wrote."""
        return digest([self.facts, {name: file.sha256 for name, file in self.files.items()}])


class BuildState:
    """The records of one engines directory: name of the step -> record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, StepRecord] = _read(path)

    def save(self) -> None:
        """Replace the file.

        Raises:
            OSError: it cannot be written; the old one stays.
        """
        steps = {name: asdict(record) for name, record in self.records.items()}
        write_atomic(self.path, json.dumps({"version": _VERSION, "steps": steps}, indent=1) + "\n")


def _read(path: Path) -> dict[str, StepRecord]:
    """A file that is absent, damaged or of another version counts as empty: everything is then built again."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["version"] != _VERSION:
            return {}
        return {name: _record(entry) for name, entry in document["steps"].items()}
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _record(entry: dict[str, Any]) -> StepRecord:
    return StepRecord(**entry | {"files": {name: FileRecord(**file) for name, file in entry["files"].items()}})
