"""What an unfinished load test has measured, in a file beside the one it is to become: JSON Lines, a header with its
settings, then every row and slice as it ends.

A run that is started again with the same settings goes on after the last slice that was complete. Knows records; not
how they are measured.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from trtspec.bench.serve_result import Row, Slice, as_dict, row_of, slice_of
from trtspec.build.output import write_atomic
from trtspec.errors import TrtspecError


def kept_path(path: Path) -> Path:
    """Where the unfinished run that is to become `path` is kept."""
    return path.with_name(f"{path.name}.partial")


class Kept:
    """The file of an unfinished run, for the length of a `with` block. Safe to use from several threads at once.

    Attributes:
        rows, slices: of complete slices, those of an earlier run first.

    Args:
        path: the file; made if it is not there.
        header: what decides whether an earlier run can be gone on with.

    Raises:
        TrtspecError: the file is of a run with other settings, or none of these files.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._path, self._header = path, json.loads(json.dumps(header))
        self._lock = threading.Lock()
        self._open: list[Row] = []  # of the slice that is not complete
        self.rows: list[Row] = []
        self.slices: list[Slice] = []
        if path.exists():
            self._read()

    def __enter__(self) -> Kept:
        records = [{"header": self._header}]
        records += [{"row": as_dict(row)} for row in self.rows] + [{"slice": as_dict(each)} for each in self.slices]
        write_atomic(self._path, "".join(json.dumps(record) + "\n" for record in records))
        self._file: TextIO = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._file.close()

    def add_row(self, row: Row) -> None:
        """A request that has ended."""
        with self._lock:
            if not self._file.closed:  # a request that outlived its run
                self._open.append(row)
                self._write("row", row)

    def add_slice(self, piece: Slice) -> None:
        """All requests of the slice have ended."""
        with self._lock:
            self._write("slice", piece)
            self.rows += self._open
            self.slices.append(piece)
            self._open = []

    def remove(self) -> None:
        """The run is over, and its result written."""
        self._path.unlink(missing_ok=True)

    def _write(self, kind: str, record: Row | Slice) -> None:
        self._file.write(json.dumps({kind: as_dict(record)}) + "\n")
        self._file.flush()

    def _read(self) -> None:
        header: Any = None
        rows: list[Row] = []
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
                if "header" in record:
                    header = record["header"]
                elif "row" in record:
                    rows.append(row_of(record["row"]))
                else:
                    self.slices.append(slice_of(record["slice"]))
            except (ValueError, KeyError, TypeError):
                break  # the line at which the earlier run died
        if not isinstance(header, dict):
            raise TrtspecError("is there, and no unfinished load test", where=str(self._path), fix="give another name")
        if header != self._header:
            raise TrtspecError(
                f"keeps an unfinished run with other settings ({', '.join(differences(header, self._header))})",
                where=str(self._path),
                fix="repeat that run's command, or remove the file",
            )
        complete = {(each.load, each.arm, each.round) for each in self.slices}
        self.rows = [row for row in rows if (row.load, row.arm, row.round) in complete]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two sets of settings, each as `name: old, now new`."""
    found = []
    for name in dict.fromkeys((*old, *new)):
        before, now = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            found += differences(before, now)
        elif before != now:
            found.append(f"{name}: {json.dumps(before)}, now {json.dumps(now)}")
    return found
