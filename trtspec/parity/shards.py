"""What the shards of a run leave behind, and how one process takes it up.

The expensive part of a check is to have the subject answer, and of the sampled check to transform the answers; neither
depends on which process does it. A shard asks its part of what is known beforehand to be asked (`CheckKind.share`) and
keeps it in a trace of its own, `SUBJECT-I-of-N.jsonl`. The process that judges takes an answer from there in place of
the subject's first one to the same query, and asks whatever is missing. Knows traces; not which checks there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtspec import __version__
from trtspec.errors import TrtspecError
from trtspec.parity.subjects import Answer, Query
from trtspec.parity.trace import Recorder, read
from trtspec.shard import Shard, keep_for_this_process

MADE_OF = "made_of"  # in the header of a trace: digest of all that its answers depend on
_PARTIAL, _BEFORE = ".partial", ".before"  # what is being written, and what earlier attempts have left


@dataclass(frozen=True)
class Given:
    """Answers that were given in other processes.

    Attributes:
        answers: by query.
        notes: what checks have kept of them, by check and query.
    """

    answers: dict[Query, Answer] = field(default_factory=dict)
    notes: dict[tuple[str, Query], dict[str, Any]] = field(default_factory=dict)

    def noted(self, check: str, query: Query) -> dict[str, Any] | None:
        """See `Trial.noted`."""
        return self.notes.get((check, query))


def given(directory: Path, subject: str, made_of: str) -> Given:
    """What all shards of a subject have recorded, those that were interrupted too.

    Raises:
        TrtspecError: no such directory, or shards of something else.
    """
    if not directory.is_dir():
        raise TrtspecError(
            "no shards here", where=str(directory), fix="record them with --shard 1/N, 2/N, ..., and the same --shards"
        )
    return _taken(sorted(directory.glob(f"{subject}-*-of-*.jsonl*")), made_of)


@contextmanager
def recording(
    directory: Path, subject: str, shard: Shard, header: dict[str, Any]
) -> Iterator[tuple[Recorder, Given] | None]:
    """What writes the trace of one shard, and what it had before it was interrupted; None: it is complete.

    The trace gets its name when the `with` block ends well.

    Raises:
        TrtspecError: the trace is of something else, cannot be written, or another process writes it.
    """
    path = directory / f"{subject}-{shard.file_name}"
    partial, before = (path.with_name(path.name + ending) for ending in (_PARTIAL, _BEFORE))
    directory.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        keep_for_this_process(lock, "records this shard")
        if path.exists():
            _taken([path], header[MADE_OF])
            yield None
            return
        # The answers of earlier attempts are written again, in their places: until then both files stay.
        left = [file for file in (before, partial) if file.exists()]
        known = _taken(left, header[MADE_OF])
        if left:
            os.replace(max(left, key=lambda file: file.stat().st_size), before)
        with Recorder(partial, header) as recorder:
            yield recorder, known
        os.replace(partial, path)
        before.unlink(missing_ok=True)


def _taken(paths: list[Path], made_of: str) -> Given:
    found = Given()
    for path in paths:
        cut_off = path.suffix != ".jsonl"
        if cut_off and b"\n" not in path.read_bytes():
            continue  # ended before its first line
        trace = read(path, cut_off=cut_off)
        if (trace.header.get(MADE_OF), trace.header.get("trtspec")) != (made_of, __version__):
            raise TrtspecError(
                "a shard of another spec, other prompts or models, or another trtspec",
                where=str(path),
                fix="say what it was recorded with, or remove it",
            )
        queries = {record.number: record.query for record in trace.records}
        for record in trace.records:
            if record.answer is not None and not record.left_out:
                found.answers.setdefault(record.query, record.answer)
        for note in trace.notes:
            if note.answer in queries:
                found.notes.setdefault((note.check, queries[note.answer]), note.record)
    return found
