"""How many tokens to draft next: always as many as fit, by a schedule over the load, or what emits most in a time.

The choice depends on what was committed before, on the load, and on how long earlier cycles took; never on the tokens
of the cycle that it is made for. Given all that came before, the length is a constant, and verification keeps the
target's distribution for every length: so does the output. A policy that looked at a proposal and then shortened it
would not.

Knows counts and times that it is told. Has no clock, and does not know drafters, engines or requests.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import TypeVar

POLICIES = ("fixed", "schedule", "adaptive")
_PREFIX = "draft_length_"
_OWN_MEMORY = 64  # draft tokens after which what a request's target said counts for 1/e
_POOL_MEMORY = 256  # the same for all requests together
_POOL_WEIGHT = 12.0  # draft tokens that the pooled rate counts for in a request's own
_FIRST_RATE, _FIRST_WEIGHT = 0.6, 4.0  # acceptance before anything is known
_COST_MEMORY = 512  # windows of a bucket after which their times count for 1/e
_STALE = 20_000  # cycles elsewhere after which a bucket is begun anew
_TRIALS = 6.0  # cycles of one request in a new bucket that may be spent on finding out
_TRIAL_SHARE = 1 / 64  # and of every further one
_ENOUGH = 2.0  # windows without and with drafts, to know what they take
_PROMPT_WEIGHT = 0.1  # of a window in which a prompt was read
_PRIOR = 1.0  # windows that the plain ones together count for in the line of those with drafts
_PLAIN_SHARE, _DRAFTING_SHARE = 0.1, 0.7  # of cycles with drafts: at most, at least, for a window of either kind
_SWITCH = 1.03  # what the other kind has to be better by for all requests to change to it
_NEAR, _SOON, _LATE = 0.8, 64, 256  # rounds until the other kind is tried; soon, if it is so much as good
_FEW = 16  # rounds for each window of the other kind, until they are that many
_ATTEMPTS = 6  # windows to try it in
_STALL = 4.0  # a window counts for at most so many times what it was expected to take
_SURPRISE, _SURPRISE_MEMORY = 0.3, 16  # part by which so many windows miss what was expected where times have changed
_SETTLED = 256  # windows of a bucket before it may be found to have changed
_Number = TypeVar("_Number", int, float)


class DraftLength:
    """Chooses draft lengths for all requests of a process; may be called from any thread.

    `fixed` drafts as much as there is room for. `schedule` drafts at most what stands at the first load that is not
    below the present one, and nothing beyond the last. `adaptive` takes the length k with most emitted tokens per time,

        (1 - a^(k+1)) / (1 - a) / (s + k c),

    with the request's acceptance a, the cost s of a cycle that drafts and c of each draft token, drafted and verified,
    in plain passes of the target (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding",
    equation 1 and theorem 3.8, in whose proof s is 1). Without a table of costs c, both are measured for each range of
    loads (1, 2, 3-4, 5-8, ...).

    What is measured is the time of the engines, not that of a request. Requests share forward passes: one that drafts
    makes all others wait, and by their own times each would find drafting cheap. So the calls of all requests that end
    in a window of a round are counted together: the time in which the engines were busy with any of them, by cycle.
    Windows without drafts have a mean, those with drafts a line over their draft tokens; older ones count less, and so
    do those with prompts, which short answers leave little else than.

    One request goes by its own acceptance. What the chosen lengths do not show is tried now and then: a few cycles of a
    new range, later one in 64. Where nothing is drafted, these are drafts of one token, in a row as long as they are
    accepted, which later cycles make up for. Several requests draft, each its own length, or do not, all together, by
    the acceptance of all: mixed passes cost as much as either and show the cost of neither. Once in 64 rounds, or more
    seldom where it is far behind, but soon again while it has few windows, they try for a window what they do not do.
    A range whose windows come to take another time, all of a sudden and for good, is begun anew.

    Args:
        policy: one of `POLICIES`.
        most: draft tokens that the target verifies in one pass.
        schedule: requests in flight -> most draft tokens, loads rising.
        token_cost: requests in flight -> c, interpolated between them and constant outside; None: measured.
        whole: proposals are token trees, and made as large as there is room for or not at all; a is then that of a
            chain without end with as many accepted tokens.

    Raises:
        ValueError: a policy that does not exist, or a table that `check_schedule` or `check_token_cost` refuse; the
            message begins with its name.
    """

    def __init__(
        self,
        policy: str = "fixed",
        most: int = 0,
        schedule: Mapping[int, int] | None = None,
        token_cost: Mapping[int, float] | None = None,
        whole: bool = False,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy: {policy!r}; expected one of {', '.join(POLICIES)}")
        self.policy = policy
        self.most = most
        self.schedule = dict(schedule or {})
        self.token_cost = None if token_cost is None else dict(token_cost)
        self.whole = whole
        if policy == "schedule" or self.schedule:
            _named("schedule", check_schedule, self.schedule, most if policy == "schedule" else None)
        if self.token_cost is not None:
            _named("token_cost", check_token_cost, self.token_cost)
        self._lock = Lock()
        self._pool = _Trials(_POOL_MEMORY)
        self._buckets: dict[int, _Bucket] = {}
        self._num_cycles = 0

    @classmethod
    def parse(cls, parameters: Mapping[str, str], most: int, *, whole: bool = False) -> DraftLength:
        """What `written` wrote; parameters that are missing leave the default, `fixed`.

        Raises:
            ValueError: one that is malformed; the message names it.
        """
        schedule = _read(parameters, "schedule", int)
        token_cost = _read(parameters, "token_cost", float)
        try:
            return cls(parameters.get(f"{_PREFIX}policy", "fixed"), most, schedule, token_cost, whole)
        except ValueError as error:
            raise ValueError(f"parameter {_PREFIX}{error}") from None

    def written(self) -> dict[str, str]:
        """The settings as parameters of a config.pbtxt, for `parse`."""
        tables = {"schedule": self.schedule, "token_cost": self.token_cost}
        return {f"{_PREFIX}policy": self.policy} | {
            f"{_PREFIX}{name}": ",".join(f"{load}:{value!r}" for load, value in table.items())
            for name, table in tables.items()
            if table
        }

    def running(self) -> RunningAcceptance:
        """The acceptance of a request that begins; it starts from that of recent ones."""
        return RunningAcceptance(self)

    def choose(self, in_flight: int, running: RunningAcceptance, room: int) -> int:
        """Draft tokens of the next cycle of a request, at most `room`.

        Args:
            in_flight: requests under way in the process, this one among them.
            running: the request's.
            room: draft tokens that there is room for; of a tree, nodes.
        """
        if room <= 0 or self.policy == "fixed":
            return max(room, 0)
        if self.policy == "schedule":
            loads = list(self.schedule)
            place = bisect_left(loads, in_flight)
            length = self.schedule[loads[place]] if place < len(loads) else 0
            return (room if length else 0) if self.whole else min(length, room)
        with self._lock:
            return self._adapted(in_flight, running, room)

    def observe(
        self, in_flight: int, length: int, began_s: float, ended_s: float, *, passes: int = 1, fresh: int = 1
    ) -> None:
        """Learn what a cycle took; also one without drafts, of any request.

        Args:
            in_flight: as it was given to `choose`.
            length: draft tokens that were proposed.
            began_s, ended_s: when the engines began and ended, by any clock that all requests share.
            passes: target passes; more than one for a call that decoded several tokens plainly.
            fresh: tokens of the context that the target, or what drafted, had not read before this cycle. More of them
                than a cycle leaves behind are a prompt or a text to catch up with: the window counts little, that of
                one request not at all.
        """
        if self.policy != "adaptive" or self.token_cost is not None or not 0 < ended_s - began_s < math.inf:
            return
        with self._lock:
            bucket = self._bucket(in_flight)
            has_prompt = fresh > self.most + 1
            if has_prompt and in_flight == 1:
                bucket.window = None
                return
            window = bucket.open_window(in_flight)
            window.has_prompt |= has_prompt
            window.add(length, passes, began_s, ended_s)
            if window.full:
                bucket.observe(window, ended_s)
            if bucket.outdated:
                del self._buckets[_bucket_of(in_flight)]

    def _adapted(self, in_flight: int, running: RunningAcceptance, room: int) -> int:
        self._num_cycles += 1
        bucket, times = self._bucket(in_flight), self._times(in_flight)
        if in_flight > 1 and self.token_cost is None:
            return self._with_others(bucket, times, in_flight, running, room)
        bucket.credit = min(bucket.credit + _TRIAL_SHARE, _TRIALS)
        best = room if times is None else self._fastest(running.rate, times, room)[0]
        if best:
            running.probes = 0
        may_try = bucket.credit >= 1 or (running.probes and bucket.credit > -_TRIALS)
        length = self._tried(bucket, running, best, room) if may_try else best
        running.trial = length != best
        if running.trial:
            bucket.credit -= 1
        return length

    def _tried(self, bucket: _Bucket, running: RunningAcceptance, best: int, room: int) -> int:
        """A length of a request that shows what `best` does not."""
        measured = self.token_cost is None
        if best:  # acceptance shows by itself
            return 0 if measured and bucket.plain.count <= bucket.drafts.count else best
        if measured and not bucket.plain.enough:
            return 0
        if measured and not bucket.drafts.enough:
            return room
        if not running.probes:
            # Two, since what drafts has the plain tokens to catch up with first.
            running.probes = 2
        running.probes -= 1
        return room if self.whole else 1

    def _with_others(
        self, bucket: _Bucket, times: _Times | None, in_flight: int, running: RunningAcceptance, room: int
    ) -> int:
        """A length of one of several requests: all of them draft, or none, as long as a window is open."""
        window = bucket.open_window(in_flight)
        window.chosen += 1
        bucket.rounds += 1 / in_flight
        if window.drafts is None:
            drafts = bucket.decide(times, self._speed_up(times) if times else 1.0)
            window.drafts, window.is_trial = drafts, drafts != bucket.is_drafting
        running.trial = window.is_trial
        if not window.drafts:
            return 0
        return room if times is None else self._fastest(running.rate, times, room, least=1)[0]

    def _speed_up(self, times: _Times) -> float:
        """What drafting brings to a request like all others together."""
        return self._fastest(self._pool.rate(_FIRST_RATE, _FIRST_WEIGHT), times, self.most, least=1)[1]

    def _fastest(self, rate: float, times: _Times, room: int, least: int = 0) -> tuple[int, float]:
        """The length from `least` on with most emitted tokens per time, see `DraftLength`, and how many of them in the
        time of a plain pass."""
        if self.whole:
            lengths = {0: 1.0, room: 1 / (1 - rate)}
        else:
            lengths, emitted, reached = {0: 1.0}, 1.0, 1.0
            for length in range(1, room + 1):
                reached *= rate
                emitted += reached
                lengths[length] = emitted
        speeds = {length: tokens / times.of(length) for length, tokens in lengths.items() if length >= least}
        best = max(speeds, key=speeds.__getitem__)
        return best, speeds[best]

    def _times(self, in_flight: int) -> _Times | None:
        """What cycles take at this load; None: nothing is known."""
        if self.token_cost is not None:
            return _Times(1.0, _interpolated(self.token_cost, in_flight))
        here = _bucket_of(in_flight)
        known = [place for place, bucket in self._buckets.items() if bucket.times is not None]
        return self._buckets[min(known, key=lambda place: abs(place - here))].times if known else None

    def _bucket(self, in_flight: int) -> _Bucket:
        place = _bucket_of(in_flight)
        bucket = self._buckets.get(place)
        if bucket is None or self._num_cycles - bucket.last_cycle > _STALE:
            bucket = self._buckets[place] = _Bucket()
        bucket.last_cycle = self._num_cycles
        return bucket


class RunningAcceptance:
    """How a request's draft tokens fare, of late; made by `DraftLength.running`, one a request.

    Attributes:
        trial: the length chosen last is only to find something out; without drafts a few tokens are enough for that.
        probes: further cycles that will draft for that.
    """

    def __init__(self, policy: DraftLength) -> None:
        self._policy = policy
        self._own = _Trials(_OWN_MEMORY)
        self.trial = False
        self.probes = 0

    @property
    def rate(self) -> float:
        """Estimated probability that a draft token is accepted, when those before it were."""
        pooled = self._policy._pool.rate(_FIRST_RATE, _FIRST_WEIGHT)
        return self._own.rate(pooled, _POOL_WEIGHT)

    def update(self, drafted: int, accepted: int) -> None:
        """Learn from a cycle; also from one without drafts, which makes older ones count less.

        Args:
            drafted: tokens that were proposed.
            accepted: how many of them were accepted.
        """
        # What follows the first token that was refused was not judged. The levels of a tree have no known end.
        all_accepted = 0 < drafted == accepted and not self._policy.whole
        if all_accepted and self.trial:
            self.probes = max(self.probes, 1)  # perhaps a change: find out at once
        if not drafted:
            self._own.forget(1)
            return
        judged = accepted + (not all_accepted)
        self._own.add(accepted, judged)
        with self._policy._lock:
            self._policy._pool.add(accepted, judged)


def check_schedule(schedule: Mapping[int, int], most: int | None = None) -> None:
    """Refuse a schedule that is empty, or whose loads do not rise, or that drafts more than `most`.

    Raises:
        ValueError: the first fault.
    """
    if not schedule:
        raise ValueError("empty; expected loads and lengths such as {4: 4, 8: 2, 16: 0}")
    _check_loads(schedule)
    for load, length in schedule.items():
        if length < 0 or (most is not None and length > most):
            expected = "0 or more" if most is None else f"0 to {most}"
            raise ValueError(f"{length} draft tokens at load {load}; expected {expected}")


def check_token_cost(token_cost: Mapping[int, float]) -> None:
    """Refuse costs that are none, negative or not finite, or whose loads do not rise.

    Raises:
        ValueError: the first fault.
    """
    if not token_cost:
        raise ValueError("empty; expected loads and costs such as {1: 0.2, 16: 1.1}")
    _check_loads(token_cost)
    for load, cost in token_cost.items():
        if not 0 <= cost < math.inf:
            raise ValueError(f"cost {cost} at load {load}; expected a finite number from 0 on")


def _check_loads(table: Mapping[int, float]) -> None:
    loads = list(table)
    if loads[0] < 1:
        raise ValueError(f"load {loads[0]}; expected 1 or more requests")
    for before, load in pairwise(loads):
        if load <= before:
            raise ValueError(f"load {load} stands after {before}; expected rising loads")


def _named(name: str, check: Callable[..., None], *arguments: object) -> None:
    try:
        check(*arguments)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _read(parameters: Mapping[str, str], name: str, number: Callable[[str], _Number]) -> dict[int, _Number] | None:
    """A table such as `4:4,8:2`; None without one."""
    text = parameters.get(_PREFIX + name)
    if text is None:
        return None
    try:
        rows = [row.split(":") for row in text.split(",")]
        table = {int(load): number(value) for load, value in rows}
        if len(table) != len(rows):
            raise ValueError("a load is given twice")
        return table
    except ValueError:
        example = "4:4,8:2,16:0" if name == "schedule" else "1:0.2,16:1.1"
        raise ValueError(f"parameter {_PREFIX}{name}: {text!r}; expected a table such as {example}") from None


def _interpolated(table: Mapping[int, float], load: int) -> float:
    loads = list(table)
    place = bisect_left(loads, load)
    if place in (0, len(loads)):
        return table[loads[min(place, len(loads) - 1)]]
    below, above = loads[place - 1], loads[place]
    part = (load - below) / (above - below)
    return table[below] + part * (table[above] - table[below])


def _bucket_of(in_flight: int) -> int:
    """1, 2, 3-4, 5-8, 9-16, ... as 0, 1, 2, ..."""
    return max(in_flight - 1, 0).bit_length()


@dataclass(frozen=True)
class _Times:
    """What a cycle with drafts takes, in plain passes: `start`, and `token` for each draft token."""

    start: float
    token: float

    def of(self, length: int) -> float:
        return self.start + self.token * length if length else 1.0


class _Window:
    """The calls that end in a stretch of time, as many as there are requests.

    Args:
        in_flight: requests.
        opened_s: the end of the window before.

    Attributes:
        drafts: whether all requests draft in it; None: not decided, each for itself.
        is_trial: it is not what they would do otherwise.
        has_prompt: a call has read one.
        chosen: cycles that a length was chosen for.
        drafted: draft tokens of the cycles that ended.
        drafting: how many of these had some.
        cycles: all that ended; a call that decodes plainly has as many as tokens.
    """

    def __init__(self, in_flight: int, opened_s: float) -> None:
        self.drafts: bool | None = None
        self.is_trial = self.has_prompt = False
        self.chosen = self.drafted = self.drafting = self.cycles = 0
        self.opened_s = opened_s
        self._wanted = in_flight
        self._spans: list[tuple[float, float]] = []

    def add(self, length: int, passes: int, began_s: float, ended_s: float) -> None:
        self.cycles += passes
        self.drafted += length
        self.drafting += length > 0
        self._spans.append((began_s, ended_s))

    @property
    def full(self) -> bool:
        return len(self._spans) >= self._wanted

    @property
    def is_stuck(self) -> bool:
        """Cycles go on, and end without being observed."""
        return self.chosen >= 4 * self._wanted

    @property
    def busy_s(self) -> float:
        """Time in which some cycle was under way."""
        busy, until = 0.0, self.opened_s
        for began, ended in sorted(self._spans):
            busy += max(0.0, ended - max(began, until))
            until = max(until, ended)
        return busy


class _Trials:
    """Counts of draft tokens that the target judged, older ones counting less."""

    def __init__(self, memory: int) -> None:
        self._keeps = 1 - 1 / memory
        self._accepted = self._judged = 0.0

    def add(self, accepted: int, judged: int) -> None:
        self.forget(judged)
        self._accepted += accepted
        self._judged += judged

    def forget(self, judged: int) -> None:
        kept = self._keeps**judged
        self._accepted *= kept
        self._judged *= kept

    def rate(self, prior: float, weight: float) -> float:
        return (self._accepted + weight * prior) / (self._judged + weight)


class _Line:
    """Seconds over draft tokens, both of a cycle: least squares, weighted exponentially and as is given.

    Attributes:
        count: windows, whatever they weigh; older ones count less.
    """

    def __init__(self) -> None:
        self.count = self._weight = 0.0
        self._length = self._length_squared = self._seconds = self._product = 0.0  # sums

    @property
    def enough(self) -> bool:
        return self.count >= _ENOUGH

    @property
    def mean_s(self) -> float:
        return self._seconds / self._weight

    def add(self, length: float, seconds: float, weight: float) -> None:
        self.forget()
        self.count += 1
        self._weight += weight
        self._length += weight * length
        self._length_squared += weight * length**2
        self._seconds += weight * seconds
        self._product += weight * length * seconds

    def forget(self) -> None:
        kept = 1 - 1 / _COST_MEMORY
        self.count *= kept
        self._weight *= kept
        self._length *= kept
        self._length_squared *= kept
        self._seconds *= kept
        self._product *= kept

    def fit(self, plain_s: float) -> tuple[float, float]:
        """Start, at least `plain_s`, and slope, at least 0; a line that has few lengths goes through `plain_s` at 0."""
        prior = _PRIOR * self._weight / self.count
        weight, seconds = self._weight + prior, self._seconds + prior * plain_s
        mean, mean_s = self._length / weight, seconds / weight
        spread = self._length_squared / weight - mean**2
        slope = max((self._product / weight - mean * mean_s) / spread, 0.0) if spread > 0 else 0.0
        start = max(mean_s - slope * mean, plain_s)
        mean, mean_s = self._length / self._weight, self.mean_s
        return start, max((mean_s - start) / mean, 0.0)


class _Bucket:
    """Times of windows at similar loads, and whether several requests draft."""

    def __init__(self) -> None:
        self.credit = _TRIALS
        self.last_cycle = 0
        self.is_drafting = True
        self.rounds = 0.0  # since the other kind was seen
        self.attempts = 0
        self.window: _Window | None = None
        self.plain, self.drafts = _Line(), _Line()
        self.times: _Times | None = None
        self._last_end_s = -math.inf
        self._drafted: bool | None = None  # in the last window
        self._num_windows = 0
        self._surprise = 0.0

    def open_window(self, in_flight: int) -> _Window:
        """The window that the next cycle belongs to."""
        if self.window is None or self.window.is_stuck:
            self.window = _Window(in_flight, self._last_end_s)
        return self.window

    def decide(self, times: _Times | None, speed_up: float) -> bool:
        """Whether all requests draft in the window that opens.

        Args:
            times: of this bucket, or one near it.
            speed_up: what drafting brings, by these times.
        """
        if times is not None and speed_up != 1.0:
            limit = 1 / _SWITCH if self.is_drafting else _SWITCH
            if (speed_up > limit) != self.is_drafting:
                self.is_drafting, self.rounds = not self.is_drafting, 0.0
        if not self.plain.enough and self.plain.count <= self.drafts.count:
            return self._try(False)
        if not self.drafts.enough:
            return self._try(True)
        behind = speed_up if not self.is_drafting else 1 / speed_up
        other = self.plain if self.is_drafting else self.drafts
        if self.rounds >= min(_SOON if behind > _NEAR else _LATE, _FEW * other.count):
            return self._try(not self.is_drafting)
        return self.is_drafting

    def _try(self, drafts: bool) -> bool:
        """`drafts`, but what is usual if that has been tried to no avail."""
        self.attempts += 1
        if self.attempts <= _ATTEMPTS:
            return drafts
        if self.attempts > 2 * _ATTEMPTS:
            self.attempts = 0
        self.rounds = 0.0
        return self.is_drafting

    def observe(self, window: _Window, ended_s: float) -> None:
        """Learn from a window that is full."""
        self.window, self._last_end_s = None, max(self._last_end_s, ended_s)
        share = window.drafting / window.cycles
        changed, self._drafted = window.drafts != self._drafted, window.drafts
        if changed or _PLAIN_SHARE < share < _DRAFTING_SHARE:  # cycles of the other kind had their part in it
            return
        self._num_windows += 1
        length, seconds = window.drafted / window.cycles, window.busy_s / window.cycles
        if self.times is not None:
            expected = self.plain.mean_s * (self.times.start + self.times.token * length if share > 0.5 else 1.0)
            seconds = min(seconds, _STALL * expected)
            self._surprise += (seconds / expected - 1 - self._surprise) / _SURPRISE_MEMORY
        here, other = (self.drafts, self.plain) if share > 0.5 else (self.plain, self.drafts)
        here.add(length, seconds, _PROMPT_WEIGHT if window.has_prompt else 1.0)
        other.forget()
        if (share > 0.5) != self.is_drafting:
            self.rounds, self.attempts = 0.0, 0
        if self.plain.enough and self.drafts.enough and (plain_s := self.plain.mean_s):
            start, token = self.drafts.fit(plain_s)
            self.times = _Times(start / plain_s, token / plain_s)

    @property
    def outdated(self) -> bool:
        """Whether windows have come to take another time than expected, at once and not by chance."""
        return self._num_windows > _SETTLED and abs(self._surprise) > _SURPRISE
