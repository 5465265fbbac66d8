"""Traces: what a run asked its subjects, what they answered, and what the checks made of it, in one file.

JSON Lines. The first line is the header, `{"kind": "header", "format": 1, "trtspec": VERSION, ...}` with whatever the
run says of itself: the spec, fingerprints of its models, settings. Every other line is one of

- `{"kind": "answer", "number": N, "subject": NAME, "again": BOOL, "query": {...}, "answer": {...}}`: the fields of
  `Query` and `Answer`. Arrays are not kept; `left_out` names them. `cycles` has, of a subject that can tell, each call
  of the target: the drafts, what came out, and for each token the uniform numbers and probabilities that decided it.
- `{"kind": "error", ...}`: the same with `error` and `unsupported` instead of an answer.
- `{"kind": "note", "check": NAME, "answer": N, "record": {...}}`: what a check found out about answer N, such as
  regrets or transforms; `trtspec.parity.replay` says which it can judge again.

Numbers that JSON does not have are the strings "inf", "-inf" and "nan". Knows no check and no model.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from trtspec import __version__
from trtspec.decoding.sampling import SamplingParams
from trtspec.errors import TrtspecError
from trtspec.parity.subjects import Answer, Counts, Cycle, Draw, Query, Subject, Unsupported, Word

FORMAT = 1


@dataclass(frozen=True)
class Record:
    """One answer, or the error that came instead.

    Attributes:
        number: running number in the trace, from 1.
        subject: who answered.
        query: what was asked.
        answer: without arrays; None if there was an error.
        error: its text.
        unsupported: whether it says that the subject cannot honour such a query.
        left_out: names of the answer's arrays.
    """

    number: int
    subject: str
    query: Query
    answer: Answer | None
    error: str = ""
    unsupported: bool = False
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Note:
    """What a check found out about one answer.

    Attributes:
        check: its name.
        answer: number of the record it is about; None where it is about none.
        record: what it found out.
    """

    check: str
    answer: int | None
    record: dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """A whole trace file.

    Attributes:
        path: where it lies.
        header: its first line.
        records, notes: in the order they were written.
    """

    path: Path
    header: dict[str, Any]
    records: tuple[Record, ...]
    notes: tuple[Note, ...]

    @property
    def subjects(self) -> tuple[str, ...]:
        """Names of those who answered, in order of appearance."""
        return tuple(dict.fromkeys(record.subject for record in self.records))

    def words(self) -> str:
        """What it is, in one clause."""
        num = len(self.records)
        return f"{', '.join(self.subjects) or 'nobody'}, {num} answer{'' if num == 1 else 's'}"


class Recorder:
    """Writes a trace as the run goes on, line by line; safe to use from several threads.

    Args:
        path: the file; one that is there is replaced. None: writes nothing.
        header: what the run says of itself.

    Raises:
        TrtspecError: the file cannot be written.
    """

    def __init__(self, path: Path | None = None, header: Mapping[str, Any] | None = None) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._last = threading.local()
        self._file: IO[str] | None = None
        if path is not None:
            try:
                self._file = path.open("w", encoding="utf-8", errors="backslashreplace")  # which is JSON's escape
            except OSError as error:
                raise TrtspecError(f"cannot be written: {error.strerror}", where=str(path)) from error
        self._write({"kind": "header", "format": FORMAT, "trtspec": __version__, **(header or {})})

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is written from here on."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def answer(self, subject: str, query: Query, answer: Answer, again: bool = False) -> int:
        """Write one answer; `again`: not the first to this query. Returns its number."""
        return self._numbered("answer", subject, query, {"again": again, "answer": answer_fields(answer)})

    def error(self, subject: str, query: Query, error: TrtspecError) -> int:
        """Write that there was no answer."""
        unsupported = isinstance(error, Unsupported)
        return self._numbered("error", subject, query, {"error": str(error), "unsupported": unsupported})

    def got(self, number: int) -> None:
        """The calling thread has just been given this answer: what it notes next is about that."""
        self._last.number = number

    def note(self, check: str, record: dict[str, Any]) -> None:
        """Write what a check found out about the answer that the calling thread was given last."""
        self._write({"kind": "note", "check": check, "answer": getattr(self._last, "number", None), "record": record})

    def _numbered(self, kind: str, subject: str, query: Query, more: dict[str, Any]) -> int:
        with self._lock:
            self._number += 1
            number = self._number
            self._put({"kind": kind, "number": number, "subject": subject, "query": query_fields(query), **more})
        return number

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._put(line)

    def _put(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(plain(line), ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()


class Remembering:
    """A subject that writes down its answers, and gives a known one again to the same query.

    Answers with logits are not kept: they are large.

    Args:
        subject: who is asked.
        recorder: writes the trace.
        given: answers that the subject has given in other processes, each taken in place of its first one to the query.

    Attributes:
        asked_afresh: the same subject without the memory; its answers are written down too.
        tokens: new tokens of all answers, given ones too.
    """

    def __init__(
        self, subject: Subject, recorder: Recorder | None = None, given: Mapping[Query, Answer] | None = None
    ) -> None:
        self.name, self.tokens = subject.name, 0
        self.asked_afresh: Subject = _Afresh(self)
        self._subject = subject
        self._recorder = recorder or Recorder()
        self._lock = threading.Lock()
        self._known: dict[Query, tuple[int, Answer]] = {}
        self._given = dict(given or {})

    def __getattr__(self, name: str) -> Any:
        """Whatever else the subject says of itself."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._subject, name)

    def generate(self, query: Query) -> Answer:
        """See `Subject.generate`."""
        with self._lock:
            known = self._known.get(query)
        if known is None:
            return self._written(query, self._given[query]) if query in self._given else self.ask(query)
        number, answer = known
        self._recorder.got(number)
        return answer

    def ask(self, query: Query) -> Answer:
        """The subject's own answer, written down."""
        try:
            answer = self._subject.generate(query)
        except TrtspecError as error:
            self._recorder.got(self._recorder.error(self.name, query, error))
            raise
        return self._written(query, answer)

    def _written(self, query: Query, answer: Answer) -> Answer:
        with self._lock:
            again = query in self._known
            self.tokens += len(answer.ids)
        number = self._recorder.answer(self.name, query, answer, again)
        self._recorder.got(number)
        if not query.logits:
            with self._lock:
                self._known.setdefault(query, (number, answer))
        return answer


class _Afresh:
    """What `Remembering` keeps, asked each time."""

    def __init__(self, remembering: Remembering) -> None:
        self.name = remembering.name
        self._remembering = remembering

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._remembering, name)

    def generate(self, query: Query) -> Answer:
        return self._remembering.ask(query)


def read(path: Path, *, cut_off: bool = False) -> Trace:
    """A trace file.

    Args:
        path: the file.
        cut_off: whether its end may be missing; then a last line that is broken is left out.

    Raises:
        TrtspecError: there is none, it is broken or cut off (`where` has the line), or of another format.
    """
    try:
        text = path.read_bytes().decode("utf-8", "replace" if cut_off else "strict")
    except OSError as error:
        raise TrtspecError(f"cannot be read: {error.strerror}", where=str(path), fix="record one: --trace") from error
    except UnicodeDecodeError as error:
        raise TrtspecError("not a trace: not UTF-8", where=str(path)) from error
    records: list[Record] = []
    notes: list[Note] = []
    header: dict[str, Any] = {}
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        last = number == len(lines)
        if last and not line:
            break
        try:
            content = json.loads(line)
            if not isinstance(content, dict):
                raise ValueError("not an object")
            kind = content["kind"]
            if number == 1:
                header = _header(content, where)
            elif kind == "note":
                notes.append(Note(content["check"], content["answer"], dict(content["record"])))
            elif kind in ("answer", "error"):
                records.append(_record(content))
            else:
                raise ValueError(f"kind {kind!r}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if last and number > 1:
                if cut_off:
                    break
                raise TrtspecError(
                    "the trace is cut off in this line", where=where, fix="remove the line, or record the trace again"
                ) from error
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise TrtspecError(f"not a line of a trace: {what}", where=where, fix="record the trace again") from error
    if not header:
        raise TrtspecError("the trace is empty", where=f"{path}:1", fix="record the trace again")
    return Trace(path, header, tuple(records), tuple(notes))


def query_fields(query: Query) -> dict[str, Any]:
    """A query as JSON can hold it."""
    return {field.name: getattr(query, field.name) for field in fields(Query)} | {
        "sampling": vars(query.sampling),
        "bad_words": [vars(word) for word in query.bad_words],
    }


def read_query(content: Mapping[str, Any]) -> Query:
    """A query from its fields.

    Raises:
        KeyError, TypeError, ValueError: they are not those of a query.
    """
    given: dict[str, Any] = {name: _tuple(value) for name, value in content.items()}
    words = tuple(Word(word["text"], tuple(word["ids"])) for word in content["bad_words"])
    return Query(**given | {"sampling": SamplingParams(**content["sampling"]), "bad_words": words})


def answer_fields(answer: Answer) -> dict[str, Any]:
    """An answer as JSON can hold it; arrays are left out."""
    content = {field.name: getattr(answer, field.name) for field in fields(Answer) if field.name != "logits"}
    return content | {
        "counts": {name: value for name, value in vars(answer.counts).items() if value is not None},
        "cycles": [vars(cycle) | {"draws": [vars(draw) for draw in cycle.draws]} for cycle in answer.cycles],
        "left_out": [] if answer.logits is None else ["logits"],
    }


def read_answer(content: Mapping[str, Any]) -> Answer:
    """An answer from its fields, without arrays.

    Raises:
        KeyError, TypeError, ValueError: they are not those of an answer.
    """
    counts: dict[str, Any] = {name: _tuple(value) for name, value in content["counts"].items()}
    cycles = [
        Cycle(
            position=cycle["position"],
            drafts=tuple(cycle["drafts"]),
            tokens=tuple(cycle["tokens"]),
            accepted=cycle["accepted"],
            draws=tuple(Draw(**draw) for draw in cycle["draws"]),
        )
        for cycle in content["cycles"]
    ]
    log_probs = content["log_probs"]
    return Answer(
        blocks=tuple(tuple(block) for block in content["blocks"]),
        text=content["text"],
        finish_reason=content["finish_reason"],
        pieces=tuple(content["pieces"]),
        counts=Counts(**counts),
        log_probs=None if log_probs is None else tuple(float(value) for value in log_probs),
        cycles=tuple(cycles),
    )


def plain(value: Any) -> Any:
    """The same in types that JSON has."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    return str(value)


def unplain(value: Any) -> Any:
    """Numbers and tuples of them as they were before `plain` and JSON."""
    if isinstance(value, list):
        return tuple(unplain(item) for item in value)
    return float(value) if isinstance(value, str) else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _header(content: dict[str, Any], where: str) -> dict[str, Any]:
    if content["kind"] != "header":
        raise TrtspecError("not a trace: no header", where=where)
    if content["format"] != FORMAT:
        raise TrtspecError(
            f"a trace of format {content['format']}, written by trtspec {content['trtspec']}",
            where=where,
            expected=f"format {FORMAT}",
            fix="record it again with this version",
        )
    return content


def _record(content: dict[str, Any]) -> Record:
    record = Record(int(content["number"]), str(content["subject"]), read_query(content["query"]), None)
    if content["kind"] == "error":
        return replace(record, error=str(content["error"]), unsupported=bool(content["unsupported"]))
    answer = content["answer"]
    return replace(record, answer=read_answer(answer), left_out=tuple(answer["left_out"]))
