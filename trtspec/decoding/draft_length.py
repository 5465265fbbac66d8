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
from itertools import pairwise
from threading import Lock
from typing import TypeVar

POLICIES = ("fixed", "schedule", "adaptive")
_PREFIX = "draft_length_"
_OWN_MEMORY = 64  # draft tokens after which what a request's target said counts for 1/e
_POOL_MEMORY = 256  # the same for all requests together
_POOL_WEIGHT = 12.0  # draft tokens that the pooled rate counts for in a request's own
_FIRST_RATE, _FIRST_WEIGHT = 0.6, 4.0  # acceptance before anything is known
_COST_MEMORY = 512  # cycles of a bucket after which their times count for 1/e
_STALE = 20_000  # cycles elsewhere after which a bucket is begun anew
_TRIALS = 6.0  # cycles of a new bucket that may be spent on finding out
_TRIAL_SHARE = 1 / 64  # and of every further one
_ENOUGH = 2.0  # times, without and with drafts, to draw a line through
_STALL = 4.0  # a cycle counts for at most so many times what it was expected to take
_SURPRISE, _SURPRISE_MEMORY = 0.3, 16  # part by which so many cycles miss what was expected where times have changed
_SETTLED = 256  # cycles of a bucket before it may be found to have changed
_Number = TypeVar("_Number", int, float)


class DraftLength:
    """Chooses draft lengths for all requests of a process; may be called from any thread.

    `fixed` drafts as much as there is room for. `schedule` drafts at most what stands at the first load that is not
    below the present one, and nothing beyond the last. `adaptive` takes the length k with most emitted tokens per time,

        (1 - a^(k+1)) / (1 - a) / (1 + k c),

    with the request's acceptance a and the cost c of one more draft token, drafted and verified, in plain passes of the
    target (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", equation 1 and theorem
    3.8, whose proof this denominator is from). Without a table of costs, a line of the time of a cycle over its length
    is fitted for each range of loads (1, 2, 3-4, 5-8, ...), older cycles counting less. What the chosen lengths do not
    show is tried now and then: a few cycles of a new range, later one in 64. Where nothing is drafted, these are drafts
    of one token, in a row as long as they are accepted, which later cycles make up for. A range whose cycles come to
    take another time, all of a sudden and for good, is begun anew.

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
        self, in_flight: int, length: int, accepted: int, draft_s: float, verify_s: float, fresh: int = 1
    ) -> None:
        """Learn what a cycle took; also one without drafts, of any request.

        Args:
            in_flight: as it was given to `choose`.
            length: draft tokens that were proposed.
            accepted: how many of them were accepted.
            draft_s: seconds that drafting took.
            verify_s: seconds of the target; of a call for several plain tokens, of one of them.
            fresh: tokens of the context that the target, or what drafted, had not read before this cycle. More of them
                than a cycle leaves behind are a prompt or a text to catch up with, and the time is left out.
        """
        seconds = draft_s + verify_s
        if self.policy != "adaptive" or self.token_cost is not None or not 0 < seconds < math.inf:
            return
        if fresh > self.most + 1:
            return
        with self._lock:
            bucket = self._bucket(in_flight)
            bucket.add(length, seconds)
            if bucket.outdated:
                del self._buckets[_bucket_of(in_flight)]

    def _adapted(self, in_flight: int, running: RunningAcceptance, room: int) -> int:
        self._num_cycles += 1
        bucket = self._bucket(in_flight)
        bucket.credit = min(bucket.credit + _TRIAL_SHARE, _TRIALS)
        cost = self._cost(in_flight)
        best = room if cost is None else _fastest(running.rate, cost, room, self.whole)
        if best:
            running.probes = 0
        may_try = bucket.credit >= 1 or (running.probes and bucket.credit > -_TRIALS)
        length = self._tried(bucket, running, best, room) if may_try else best
        running.trial = length != best
        if running.trial:
            bucket.credit -= 1
        return length

    def _tried(self, bucket: _Bucket, running: RunningAcceptance, best: int, room: int) -> int:
        """A length that shows what `best` does not."""
        measured = self.token_cost is None
        if best:  # acceptance shows by itself
            return 0 if measured and bucket.num_plain <= bucket.num_drafted else best
        if measured and bucket.num_plain < _ENOUGH:
            return 0
        if measured and bucket.num_drafted < _ENOUGH:
            return room
        if not running.probes:
            # Two, since what drafts has the plain tokens to catch up with first.
            running.probes = 2
        running.probes -= 1
        return room if self.whole else 1

    def _cost(self, in_flight: int) -> float | None:
        """c at this load; None: nothing is known."""
        if self.token_cost is not None:
            return _interpolated(self.token_cost, in_flight)
        here = _bucket_of(in_flight)
        known = [place for place, bucket in self._buckets.items() if bucket.known]
        return self._buckets[min(known, key=lambda place: abs(place - here))].cost if known else None

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
        trial: the length chosen last is only to find something out; without drafts one token is enough for that.
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


def _fastest(rate: float, cost: float, room: int, whole: bool) -> int:
    """The length with most emitted tokens per time of a plain pass, see `DraftLength`."""
    if whole:
        return room if 1 / (1 - rate) > 1 + room * cost else 0
    best, fastest = 0, 1.0
    emitted = reached = 1.0
    for length in range(1, room + 1):
        reached *= rate
        emitted += reached
        if emitted / (1 + length * cost) > fastest:
            best, fastest = length, emitted / (1 + length * cost)
    return best


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


class _Bucket:
    """Times of cycles at similar loads, and the line through them: exponentially weighted least squares."""

    def __init__(self) -> None:
        self.credit = _TRIALS
        self.last_cycle = 0
        self.num_plain = self.num_drafted = 0.0
        self._length = self._length_squared = self._seconds = self._product = 0.0  # sums
        self._num_cycles = 0
        self._surprise = 0.0

    def add(self, length: int, seconds: float) -> None:
        self._num_cycles += 1
        if self.known:
            plain_s, token_s = self._line()
            expected = plain_s + token_s * length
            seconds = min(seconds, _STALL * expected)
            self._surprise += (seconds / expected - 1 - self._surprise) / _SURPRISE_MEMORY
        kept = 1 - 1 / _COST_MEMORY
        self.num_plain = self.num_plain * kept + (length == 0)
        self.num_drafted = self.num_drafted * kept + (length > 0)
        self._length = self._length * kept + length
        self._length_squared = self._length_squared * kept + length**2
        self._seconds = self._seconds * kept + seconds
        self._product = self._product * kept + length * seconds

    @property
    def known(self) -> bool:
        """Whether there are times without and with drafts."""
        return self.num_plain >= _ENOUGH <= self.num_drafted

    @property
    def outdated(self) -> bool:
        """Whether cycles have come to take another time than the line says, at once and not by chance."""
        return self._num_cycles > _SETTLED and abs(self._surprise) > _SURPRISE

    @property
    def cost(self) -> float:
        """Of a draft token, in plain passes."""
        plain_s, token_s = self._line()
        return token_s / plain_s

    def _line(self) -> tuple[float, float]:
        """Seconds of a plain pass, more than 0, and of a draft token, at least 0."""
        count = self.num_plain + self.num_drafted
        length, seconds = self._length / count, self._seconds / count
        spread = self._length_squared / count - length**2
        token_s = max((self._product / count - length * seconds) / spread, 0.0)
        return max(seconds - token_s * length, 0.01 * seconds), token_s
