"""A load test of a running server: the same prompts with speculation and without, in turn, round by round.

A round of a load asks every arm for the same requests, one arm after the other, and the next round begins with another
arm, so that whatever else the machine does hits all alike. Before anything counts, every prompt is read once, so that
no arm pays for what another finds in the server's KV cache, and every arm answers some requests at every load. With
`unique` every request has a beginning of its own instead, and nothing is found in a cache.

Knows arms and rounds; not how a request is sent (`load`) nor what follows from the rows (`serve_figures`).
"""

from __future__ import annotations

import itertools
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from trtspec.bench.kept import Kept
from trtspec.bench.load import GONE, Answer, Ask, Sender, closed_loop, in_turn, open_loop, poisson
from trtspec.bench.serve_prompts import SentPrompt, digest
from trtspec.bench.serve_result import CONCURRENCY, RATE, Load, Result, Row, Slice
from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.triton.client import ModelInfo

ON, OFF, ADAPTIVE, DEFAULT = "on", "off", "adaptive", "default"
ARMS = {  # name -> what its requests ask for
    ON: "drafting, a given number of tokens a cycle",
    OFF: "plain decoding",
    ADAPTIVE: "the server chooses the draft length by what it measures",
    DEFAULT: "whatever the server does when a request does not say",
}
_READ_TOKENS = 8  # of an answer when a prompt is read for the first time: enough that the draft model reads it, too
_READERS = 2
_FEWEST = 4  # requests of a slice, for each client
_WARMUPS = 2  # for each client
_WARMUPS_OPEN = 4
_SEVERAL = 2.0  # tokens in the first block of a plain answer
_LATE_S = 0.05


@dataclass(frozen=True)
class Settings:
    """What is asked.

    Attributes:
        prompts: in order; a round begins again at the first when it is through.
        prompts_name: of the file.
        loads, arms: all pairs of them are measured.
        num_draft_tokens: of the arm `on`.
        rounds: that count.
        requests: in a round of one arm at one load; None: every prompt once, four for each client at least; or
        seconds: for how long requests are begun.
        warmup: requests of every arm at every load that do not count; None: two for each client.
        max_tokens: longest answer.
        temperature: 0 is greedy.
        unique: every request has a beginning of its own.
        seed: of arrivals and of sampled answers.
    """

    prompts: tuple[SentPrompt, ...]
    prompts_name: str
    loads: tuple[Load, ...]
    arms: tuple[str, ...]
    num_draft_tokens: int | None
    rounds: int = 3
    requests: int | None = None
    seconds: float | None = None
    warmup: int | None = None
    max_tokens: int = 64
    temperature: float = 0.0
    unique: bool = False
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON; of the prompts their number and a digest."""
        return {
            "prompts": {"file": self.prompts_name, "number": len(self.prompts), "digest": digest(self.prompts)},
            "loads": [{"kind": load.kind, "value": load.value} for load in self.loads],
            "arms": list(self.arms),
            "num_draft_tokens": self.num_draft_tokens,
            "rounds": self.rounds,
            "requests": self.requests,
            "seconds": self.seconds,
            "warmup": self.warmup,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "unique": self.unique,
            "seed": self.seed,
        }

    def num_requests(self, load: Load, number: int) -> int | None:
        """In a round of one arm, 0 being the warm-up; None: as many as the time allows."""
        clients = int(load.value) if load.kind == CONCURRENCY else 0
        if number == 0:
            return self.warmup if self.warmup is not None else _WARMUPS * clients or _WARMUPS_OPEN
        if self.requests is not None or self.seconds is not None:
            return self.requests
        return max(len(self.prompts), _FEWEST * clients)

    def arrivals(self, load: Load, number: int) -> list[float]:
        """Of an open loop in a round, in seconds: the same for every arm."""
        requests = self.num_requests(load, number)
        return poisson(load.value, f"{self.seed} {load.value} {number}", requests=requests, seconds=self.seconds)


class Observer(Protocol):
    """Watches a run."""

    def started(self, what: str, requests: int | None) -> None:
        """The next piece of work, and how many requests it has, if that is known."""

    def advance(self) -> None:
        """A request has ended."""

    def progress(self, done: int, of: int) -> None:
        """So many slices are complete."""


def chosen_arms(
    info: ModelInfo, wanted: Sequence[str] | None, num_draft_tokens: int | None
) -> tuple[tuple[str, ...], int | None]:
    """The arms that this server can be asked for, and the draft length of `on`.

    Args:
        info: of the model that is asked.
        wanted: None: all that show a difference.
        num_draft_tokens: of `on`; None: the server's own.

    Raises:
        TrtspecError: the server cannot do what an arm asks for.
    """
    own = int(info.parameters.get("num_draft_tokens") or 0)
    policy, method = info.parameters.get("draft_length_policy", "fixed"), info.parameters.get("method", "unknown")
    adapts = policy == ADAPTIVE
    # The pipeline says 0 where nothing drafts, and where an engine drafts by itself; others do not say.
    switchable = "num_draft_tokens" in info.inputs and info.parameters.get("num_draft_tokens") != "0"
    if wanted is None:
        wanted = (ON, OFF, *((ADAPTIVE,) if adapts else ())) if switchable else (DEFAULT,)
    if not switchable and set(wanted) & {ON, OFF}:
        raise TrtspecError(
            f"the server's requests cannot switch speculation on and off (its method is {method})",
            where="--arms",
            fix=f"use --arms {DEFAULT}, and compare with a run on a server without speculation by --compare",
        )
    if ADAPTIVE in wanted and not adapts:
        raise TrtspecError(
            f"the server's draft length is not adaptive (its policy is {policy})",
            where="--arms",
            fix=f"build it with serving.draft_length.policy: adaptive, or use --arms {DEFAULT} for what it does",
        )
    if ON not in wanted:
        return tuple(wanted), None
    if not (length := num_draft_tokens or own):
        raise TrtspecError(
            "how many tokens are to be drafted is not known: the server does not say",
            where=f"--arms {ON}",
            fix="give CONFIG, or --num-draft-tokens",
        )
    return tuple(wanted), length


def run(sender: Sender, url: str, settings: Settings, kept: Kept, observer: Observer) -> Result:
    """Measure what is not kept yet.

    Raises:
        TrtspecError: the server is gone, or it refuses every prompt; complete slices are kept.
    """
    date = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    test = _Test(sender, settings, kept, observer)
    done = {(each.load, each.arm, each.round) for each in kept.slices}
    slices = [
        (load, arm, number)
        for number in range(1, settings.rounds + 1)
        for load in settings.loads
        for arm in in_turn(settings.arms, number - 1)
    ]
    left = [each for each in slices if each not in done]
    for load, _, number in left:
        if load.kind == RATE and not settings.arrivals(load, number):
            raise TrtspecError(
                f"no request arrives within {settings.seconds:g} s at {load} (round {number})",
                where="--duration",
                fix="allow more time, or raise --rate",
            )
    if left and not settings.unique:
        test.read_prompts()
    for load, arm in dict.fromkeys((load, arm) for load, arm, _ in left):
        test.warm_up(load, arm)
    for load, arm, number in left:
        observer.progress(len(kept.slices), len(slices))
        test.measure(load, arm, number)
    observer.progress(len(kept.slices), len(slices))
    order = {each: place for place, each in enumerate(slices)}
    rows = sorted(kept.rows, key=lambda row: (order[row.load, row.arm, row.round], row.index))
    return Result(
        settings=settings.as_dict(),
        server={"url": url, **server_facts(sender.info)},
        date=date,
        rows=tuple(rows),
        slices=tuple(sorted(kept.slices, key=lambda each: order[each.load, each.arm, each.round])),
        notes=tuple(_notes(rows, settings)),
    )


def server_facts(info: ModelInfo) -> dict[str, Any]:
    """What the model says of itself that matters for its speed; names of the pipeline's parameters."""
    names = ("method", "num_draft_tokens", "draft_length_policy", "max_concurrency", "vocab_size", "acceptance")
    return {name: info.parameters[name] for name in names if name in info.parameters}


class _Test:
    """The requests of a run: which prompt is whose turn, and how often it was sent."""

    def __init__(self, sender: Sender, settings: Settings, kept: Kept, observer: Observer) -> None:
        self._sender, self._settings, self._kept, self._observer = sender, settings, kept, observer
        self._drafts = {ON: settings.num_draft_tokens, OFF: 0}
        self._sent: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._salt, self._marks = secrets.token_hex(3), itertools.count()  # a server that saw an earlier run, too

    def read_prompts(self) -> None:
        """Every prompt once.

        Raises:
            TrtspecError: none of them is answered.
        """
        prompts, arms = self._settings.prompts, self._settings.arms
        arm = next((arm for arm in arms if arm != OFF), OFF)  # with drafts: models that draft read prompts, too
        answers: list[Answer] = []
        self._observer.started("reading the prompts", len(prompts))
        stop = threading.Event()

        def read(index: int, planned: float) -> None:
            max_tokens = min(_READ_TOKENS, self._settings.max_tokens)
            answers.append(self._send(arm, 0, index, planned, stop, max_tokens)[0])

        closed_loop(min(_READERS, len(prompts)), read, stop, requests=len(prompts))
        if all(answer.error for answer in answers):
            raise TrtspecError(f"no prompt was answered; the first error: {answers[0].message}")

    def warm_up(self, load: Load, arm: str) -> None:
        """Requests that do not count."""
        self._observer.started(f"warm-up, {load}, {arm}", self._settings.num_requests(load, 0))
        stop = threading.Event()

        def work(index: int, planned: float) -> None:
            self._send(arm, 0, index, planned, stop)

        self._drive(load, 0, stop, work)

    def measure(self, load: Load, arm: str, number: int) -> None:
        """One slice."""
        settings, stop, begin = self._settings, threading.Event(), time.monotonic()
        what = f"{load}, {arm}, round {number} of {settings.rounds}"
        self._observer.started(what, settings.num_requests(load, number))

        def work(index: int, planned: float) -> None:
            answer, prompt, repeats = self._send(arm, number, index, planned, stop)
            if not stop.is_set():
                at = planned - begin
                self._kept.add_row(Row(load, arm, number, index, prompt.number, prompt.category, repeats, at, answer))

        busy_s = self._drive(load, number, stop, work)
        self._kept.add_slice(Slice(load, arm, number, busy_s))

    def _drive(self, load: Load, number: int, stop: threading.Event, work: Callable[[int, float], None]) -> float:
        """Round 0 is the warm-up."""
        settings = self._settings
        if load.kind == RATE:
            return open_loop(settings.arrivals(load, number), work, stop)
        requests, seconds = settings.num_requests(load, number), settings.seconds if number else None
        return closed_loop(int(load.value), work, stop, requests=requests, seconds=seconds)

    def _send(
        self,
        arm: str,
        number: int,
        index: int,
        planned: float,
        stop: threading.Event,
        max_tokens: int | None = None,
    ) -> tuple[Answer, SentPrompt, int]:
        """The answer to one request, its prompt, and how often that had been sent before.

        Raises:
            TrtspecError: the server is gone.
        """
        settings = self._settings
        prompt = settings.prompts[index % len(settings.prompts)]
        mark = f"({self._salt}{next(self._marks):06x}) " if settings.unique else ""
        text = prompt.marked(mark)
        with self._lock:
            repeats = self._sent[text]
            self._sent[text] += 1
        ask = Ask(
            prompt=text,
            max_tokens=max_tokens or settings.max_tokens,
            num_draft_tokens=self._drafts.get(arm),
            temperature=settings.temperature,
            seed=int.from_bytes(sha256(f"{settings.seed} {number} {index}".encode()).digest()[:4], "little"),
        )
        answer = self._sender.send(ask, planned, stop)
        if answer.error == GONE and not stop.is_set():
            raise TrtspecError(f"the server is gone: {answer.message}")
        self._observer.advance()
        return answer, prompt, repeats


def _notes(rows: Sequence[Row], settings: Settings) -> list[str]:
    """What to know of the figures."""
    notes = []
    if settings.unique:
        notes.append("every request had a beginning of its own: prompts were read in full (--unique)")
    elif repeated := sum(row.repeats > 0 for row in rows):
        tells = any(row.answer.reused_blocks is not None for row in rows)
        known = "" if tells else " (this server does not say whether it did)"
        notes.append(
            f"{repeated} of {len(rows)} requests repeat a prompt that this run had sent before, in every arm alike: the"
            f" server may find it in its KV cache{known}, so the time to first token is that of cached prompts;"
            " --unique measures whole prompts"
        )
    if settings.temperature == 0 and not settings.unique and len(settings.arms) > 1:
        notes += _other_texts(rows)
    notes += _first_blocks(rows)
    if errors := Counter(row.answer.error for row in rows if row.answer.error):
        kinds = ", ".join(f"{number} {kind}" for kind, number in errors.most_common())
        first = next(row.answer.message for row in rows if row.answer.error)
        notes.append(f"{sum(errors.values())} of {len(rows)} requests failed ({kinds}) and count for nothing: {first}")
    if late := [row.answer.sent_s for row in rows if row.answer.sent_s > _LATE_S]:
        worst = math.ceil(max(late) * 1e3)
        notes.append(f"{len(late)} requests were sent up to {worst} ms late; their latency counts from when planned")
    return notes


def _first_blocks(rows: Sequence[Row]) -> list[str]:
    """Plain answers that come in pieces."""
    first = [row.answer.blocks[0][1] for row in rows if row.arm == OFF and row.answer.blocks]
    if not first or (size := sum(first) / len(first)) < _SEVERAL:
        return []
    return [
        f"plain answers begin with {size:.1f} tokens at once (serving.plain_chunk_tokens): the time to first token of "
        f"{OFF} is that of so many"
    ]


def _other_texts(rows: Sequence[Row]) -> list[str]:
    """Greedy answers that are not the same in all arms."""
    texts: dict[tuple[Load, int, int], set[str]] = {}
    for row in rows:
        if row.answer.error is None:
            texts.setdefault((row.load, row.round, row.index), set()).add(row.answer.digest)
    other = sum(len(found) > 1 for found in texts.values())
    return [f"{other} of {len(texts)} greedy answers are not the same text in all arms"] if other else []
