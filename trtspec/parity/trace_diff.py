"""Where two traces part: the first difference of each query that both have.

Knows traces; judges nothing: two right subjects may part at a rounding tie, or because they draw other numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from trtspec.errors import TrtspecError
from trtspec.parity.subjects import END, Answer, Query
from trtspec.parity.trace import Record, Trace

DEFAULTS = {"num_draft_tokens": 0, "stream": True, "logits": False, "log_probs": False}
"""Fields of a query that may be ignored, and what then stands for them: they do not change what is right."""


@dataclass(frozen=True)
class Side:
    """One of two answers around the place where they part.

    Attributes:
        number: of the record in its trace.
        token: id there, `END` for an end id; None if the answer is over.
        text: of the block that the token came with, where the trace has it.
        block: number of that block, from 1.
        place: of the token in its block, from 1.
        accepted: drafts accepted in the pass before, the pass itself and the one after; None where there is none.
    """

    number: int
    token: int | None
    text: str | None
    block: int
    place: int
    accepted: tuple[int | None, int | None, int | None]


@dataclass(frozen=True)
class Parting:
    """One query that two traces answer differently.

    Attributes:
        query: the query.
        what: `tokens`, `finish_reason`, `text` or `error`: the first of these that differs.
        position: place of the first different token in the output, from 0; of other differences, the length.
        a, b: both sides of a difference of tokens.
        words: the difference, in one clause.
    """

    query: Query
    what: str
    position: int
    a: Side | None
    b: Side | None
    words: str


@dataclass(frozen=True)
class Diff:
    """What two traces have in common, and where they part.

    Attributes:
        a, b: the traces.
        num_common: answers to queries that both have.
        partings: those that differ.
        only_a, only_b: queries that one of them has.
    """

    a: Trace
    b: Trace
    num_common: int
    partings: tuple[Parting, ...]
    only_a: tuple[Query, ...]
    only_b: tuple[Query, ...]

    def lines(self) -> list[str]:
        """All of it for people, the summary first."""
        num_same = self.num_common - len(self.partings)
        lines = [f"{side}: {trace.path}: {trace.words()}" for side, trace in (("A", self.a), ("B", self.b))]
        summary = f"{self.num_common} answers to the same queries: {num_same} equal, {len(self.partings)} part"
        lines.append(f"{summary}; only in A: {len(self.only_a)}; only in B: {len(self.only_b)}")
        for parting in self.partings:
            lines.append(f"{shown(parting.query)}: {parting.words}")
            sides = (("A", parting.a), ("B", parting.b))
            lines += [f"  {name}: {side_words(side)}" for name, side in sides if side is not None]
        for name, queries in (("A", self.only_a), ("B", self.only_b)):
            lines += [f"only in {name}: {shown(query)}" for query in queries]
        return lines


def diff(
    a: Trace, b: Trace, subjects: tuple[str | None, str | None] = (None, None), ignore: Sequence[str] = ()
) -> Diff:
    """Compare the answers to the queries that two traces have in common; of several to one query, each with each turn.

    Args:
        a, b: the traces.
        subjects: whose answers of each; None: everybody's.
        ignore: fields of a query (`DEFAULTS`) in which it may differ and is still the same.

    Raises:
        TrtspecError: a field that cannot be ignored, or a subject that a trace does not have.
    """
    for name in ignore:
        if name not in DEFAULTS:
            raise TrtspecError(f"{name} cannot be ignored", expected=", ".join(DEFAULTS))
    first, second = (_by_query(*given, ignore) for given in zip((a, b), subjects, strict=True))
    partings: list[Parting] = []
    num_common = 0
    for query in first:
        for one, other in zip(first[query], second.get(query, ()), strict=False):
            num_common += 1
            partings += [parting] if (parting := part(query, one, other)) else []
    return Diff(
        a,
        b,
        num_common,
        tuple(partings),
        tuple(query for query in first if query not in second),
        tuple(query for query in second if query not in first),
    )


def part(query: Query, a: Record, b: Record) -> Parting | None:
    """Where two answers to a query part; None if they are the same."""
    if a.answer is None or b.answer is None:
        if a.error == b.error:
            return None
        words = " and ".join("an answer" if record.answer else f"the error {record.error!r}" for record in (a, b))
        return Parting(query, "error", 0, None, None, words)
    ours, theirs = (_tokens(query, answer) for answer in (a.answer, b.answer))
    shorter = min(len(ours), len(theirs))
    position = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    if position < max(len(ours), len(theirs)):
        words = f"part at token {position} of {len(ours)} and {len(theirs)}"
        return Parting(query, "tokens", position, _side(a, ours, position), _side(b, theirs, position), words)
    for what in ("finish_reason", "text"):
        one, other = getattr(a.answer, what), getattr(b.answer, what)
        if one != other:
            words = f"the same {len(ours)} tokens, but {what} {_short(one)} and {_short(other)}"
            return Parting(query, what, len(ours), None, None, words)
    return None


def side_words(side: Side) -> str:
    """One side for people."""
    if side.token is None:
        return f"answer {side.number}: is over"
    token = "the end" if side.token == END else f"token {side.token}"
    words = f"answer {side.number}: {token}, the {_ordinal(side.place)} of block {side.block}"
    if side.text:
        words += f" {_short(side.text)}"
    names = ("before", "there", "after")
    accepted = [f"{count} {name}" for count, name in zip(side.accepted, names, strict=True) if count is not None]
    return words + (f"; drafts accepted: {', '.join(accepted)}" if accepted else "")


def shown(query: Query) -> str:
    """A query in a few words: how it differs from a plain greedy one."""
    sampling = "greedy" if query.sampling.greedy else f"temperature {query.sampling.temperature:g}"
    if not query.sampling.greedy:
        sampling += f" seed {query.sampling.seed}"
    words = [sampling, f"num_draft_tokens {query.num_draft_tokens}"]
    for field in fields(Query)[5:]:
        value = getattr(query, field.name)
        if value != field.default:
            words.append(f"{field.name} {value}")
    return f"{_short(query.text[-40:])} ({', '.join(words)})"


def _by_query(trace: Trace, subject: str | None, ignore: Sequence[str]) -> dict[Query, list[Record]]:
    found: defaultdict[Query, list[Record]] = defaultdict(list)
    if subject is not None and subject not in trace.subjects:
        raise TrtspecError(f"no answers of {subject}", where=str(trace.path), expected=", ".join(trace.subjects))
    neutral = {name: DEFAULTS[name] for name in ignore}
    for record in trace.records:
        if subject in (None, record.subject):
            found[replace(record.query, **neutral)].append(record)  # type: ignore[arg-type]
    return dict(found)


def _tokens(query: Query, answer: Answer) -> tuple[int, ...]:
    """As chosen; which id ended an answer that a stop word may have ended is not known."""
    return answer.ids if query.stop else answer.tokens


def _side(record: Record, tokens: Sequence[int], position: int) -> Side:
    answer = record.answer
    assert answer is not None
    start = 0
    for number, block in enumerate(answer.blocks):
        last = number == len(answer.blocks) - 1
        if position < start + len(block) or last:
            break
        start += len(block)
    pieces = answer.pieces
    told = pieces[number] if len(pieces) == len(answer.blocks) else None
    accepted: Sequence[int | None] = [cycle.accepted if cycle.drafts else None for cycle in answer.cycles]
    accepted = accepted or answer.counts.accepted_per_pass or ()
    if len(accepted) != len(answer.blocks):  # passes and blocks are not the same
        accepted = ()
    around = [accepted[i] if 0 <= i < len(accepted) else None for i in (number - 1, number, number + 1)]
    return Side(
        number=record.number,
        token=tokens[position] if position < len(tokens) else None,
        text=told,
        block=number + 1,
        place=position - start + 1,
        accepted=(around[0], around[1], around[2]),
    )


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"


def _short(text: str, longest: int = 60) -> str:
    return repr(text if len(text) <= longest else f"{text[:longest]}...")
