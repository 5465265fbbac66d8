"""What a load test leaves: one row a request, one slice a round of one arm at one load, and the settings; read and
written as JSON, and as CSV with a line a request.

Plain records. Knows neither how they are measured (`serve`) nor what follows from them (`serve_figures`).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtspec.bench.load import Answer
from trtspec.errors import TrtspecError

VERSION = 1
CONCURRENCY, RATE = "concurrency", "rate"


@dataclass(frozen=True, order=True)
class Load:
    """How much is asked at the same time: `value` clients (closed loop) or requests per second (open loop)."""

    kind: str
    value: float

    def __str__(self) -> str:
        if self.kind == RATE:
            return f"{self.value:g} requests/s"
        return f"{self.value:g} client{'s' * (self.value != 1)}"


@dataclass(frozen=True)
class Row:
    """One request.

    Attributes:
        load, arm, round: where it belongs; rounds count from 1.
        index: its place in the round; the same place has the same prompt, seed and arrival in every arm.
        prompt: its line in the prompt file.
        category: the prompt's.
        repeats: how often the run had sent the same text before.
        planned_s: when it was to be sent, in seconds from the beginning of the round.
        answer: what became of it.
    """

    load: Load
    arm: str
    round: int
    index: int
    prompt: int
    category: str | None
    repeats: int
    planned_s: float
    answer: Answer


@dataclass(frozen=True)
class Slice:
    """One round of one arm at one load, as a whole.

    Attributes:
        busy_s: seconds in which all clients were busy; in an open loop until the last answer had ended.
    """

    load: Load
    arm: str
    round: int
    busy_s: float


@dataclass(frozen=True)
class Result:
    """A load test.

    Attributes:
        settings: what was asked; see `serve.Settings.as_dict`.
        server: what the model says of itself: address, model, method, draft length, policy.
        date: when it began, UTC.
        rows, slices: what was measured.
        notes: what to know of the figures.
    """

    settings: Mapping[str, Any]
    server: Mapping[str, Any]
    date: str
    rows: tuple[Row, ...]
    slices: tuple[Slice, ...]
    notes: tuple[str, ...] = ()

    @property
    def loads(self) -> list[Load]:
        """In the order in which they were asked for."""
        return list(dict.fromkeys(each.load for each in self.slices))

    @property
    def arms(self) -> list[str]:
        """In the order in which they were asked for."""
        found = {each.arm for each in self.slices}
        return [arm for arm in self.settings["arms"] if arm in found]

    def rows_of(self, load: Load, arm: str) -> list[Row]:
        """Of one arm at one load."""
        return [row for row in self.rows if (row.load, row.arm) == (load, arm)]


def to_json(result: Result, **more: Any) -> str:
    """The result as text, with all rows at its end and the keys of `more` before them."""
    head = {
        "version": VERSION,
        "date": result.date,
        "settings": dict(result.settings),
        "server": dict(result.server),
        "notes": list(result.notes),
        **more,
        "slices": [as_dict(each) for each in result.slices],
    }
    rows = ",\n  ".join(json.dumps(as_dict(row), ensure_ascii=False) for row in result.rows)  # a line a request
    text = json.dumps(head, ensure_ascii=False, indent=1)
    return text.removesuffix("\n}") + f',\n "rows": [\n  {rows}\n ]\n}}\n'


def read(path: Path) -> Result:
    """A result that `to_json` wrote.

    Raises:
        TrtspecError: no such file, or not a load test's.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TrtspecError("no such file", where=str(path)) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TrtspecError(f"cannot be read as JSON: {error}", where=str(path)) from error
    if not isinstance(data, dict) or data.get("version") != VERSION or "slices" not in data:
        raise TrtspecError(
            "is no load test", where=str(path), expected=f"what `trtspec bench serve --json` writes, version {VERSION}"
        )
    try:
        return Result(
            settings=data["settings"],
            server=data["server"],
            date=data["date"],
            rows=tuple(map(row_of, data["rows"])),
            slices=tuple(map(slice_of, data["slices"])),
            notes=tuple(data["notes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TrtspecError(f"is damaged: {error!r}", where=str(path)) from error


def as_dict(record: Row | Slice) -> dict[str, Any]:
    """For JSON; times are rounded to microseconds."""
    return _rounded(asdict(record))


def row_of(data: Mapping[str, Any]) -> Row:
    """The row that `as_dict` has written."""
    answer = data["answer"]
    blocks = tuple((float(seconds), float(tokens)) for seconds, tokens in answer["blocks"])
    return Row(**{**data, "load": Load(**data["load"]), "answer": Answer(**{**answer, "blocks": blocks})})


def slice_of(data: Mapping[str, Any]) -> Slice:
    """The slice that `as_dict` has written."""
    return Slice(**{**data, "load": Load(**data["load"])})


def to_csv(result: Result) -> str:
    """A header and a line a request; times in seconds from when the request was planned, empty: not known."""
    lines = [_line(row) for row in result.rows]
    text = io.StringIO()
    table = csv.DictWriter(text, list(lines[0]) if lines else [], lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    return text.getvalue()


def _line(row: Row) -> dict[str, Any]:
    answer = row.answer
    line = {
        "load_kind": row.load.kind,
        "load": row.load.value,
        **{name: getattr(row, name) for name in ("arm", "round", "index", "prompt", "category", "repeats")},
        "planned_s": row.planned_s,
        "sent_s": answer.sent_s,
        "first_token_s": answer.first_s,
        "end_s": answer.end_s,
        "tokens": answer.tokens,
        "input_tokens": answer.input_tokens,
        "drafted": answer.drafted,
        "accepted": answer.accepted,
        "target_passes": answer.passes,
        **{name: getattr(answer, name) for name in ("reused_blocks", "finish", "error", "message")},
    }
    return {key: _rounded(value) for key, value in line.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value
