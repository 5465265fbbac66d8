"""The figures of a load test: percentiles, rates, acceptance, and ratios with their intervals, from its rows alone.

**Between tokens.** A speculative server sends several tokens at once. Each of the n tokens of a block that comes d
seconds after the block before counts as d/n; the first block is the time to first token and counts for nothing here.

**Ratios.** How many times as fast one arm is as another at the same load, from sums over requests: tokens over seconds
from planned to end ("whole answers"), and tokens after the first block over the seconds they took ("decoding", which
leaves prompts and queues out and is what a plan's speed-up speaks of). In a closed loop the rate of whole answers times
the clients is the server's tokens per second, and it does not depend on how the last requests of a round run out.

**Intervals** are bootstrapped in two stages: rounds are drawn with replacement, and in each the places of requests, so
that both the noise of a round and the differences between prompts are in them. The same draws serve both sides: a place
has the same prompt in both, so what prompts differ by cancels out. With one round its noise is not known, and the
interval holds for the prompts alone.

Knows rows; no server, no plan and no page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtspec.bench.load import Answer
from trtspec.bench.serve_result import RATE, Load, Result, Row

if TYPE_CHECKING:
    import numpy as np

WHOLE, DECODING = "whole answers", "decoding"
LEVEL = 0.95
_DRAWS = 2000
_SEED = 5
_CENTILES = (50, 90, 99)
_KEEPS_UP = 0.9  # of the asked rate

TIMES: Mapping[str, Callable[[Answer], tuple[float, float]]] = {  # what a ratio compares: tokens, and seconds for them
    WHOLE: lambda answer: (answer.tokens, answer.end_s),
    DECODING: lambda answer: answer.later,
}


@dataclass(frozen=True)
class Percentiles:
    """Seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float] | np.ndarray) -> Percentiles | None:
        """Those of a sample, interpolated linearly; None where it is empty."""
        import numpy as np

        if not len(seconds):
            return None
        return cls(*(float(value) for value in np.percentile(np.asarray(seconds, dtype=float), _CENTILES)))


@dataclass(frozen=True)
class Cell:
    """One arm at one load. Figures are of requests that were answered; None: not known.

    Attributes:
        rounds: that count.
        requests, answered: sent; answered without an error.
        errors: kind -> how many.
        first: time to first token.
        between: time between tokens, a token a sample.
        whole: time to the end of the answer.
        tokens: generated.
        tokens_per_second: of the server, one figure a round, while all clients were busy.
        requests_per_second: one figure a round: those tokens over the tokens of a request.
        acceptance_rate: accepted over drafted.
        acceptance_length: tokens over target passes; 1 is plain decoding.
        repeated: requests whose text the run had sent before.
        reused: requests for which the server found blocks in its KV cache; None: it does not say.
        reused_blocks: found, on average over the requests.
    """

    load: Load
    arm: str
    rounds: int
    requests: int
    answered: int
    errors: Mapping[str, int]
    first: Percentiles | None
    between: Percentiles | None
    whole: Percentiles | None
    tokens: float
    tokens_per_second: tuple[float, ...]
    requests_per_second: tuple[float, ...]
    acceptance_rate: float | None
    acceptance_length: float | None
    repeated: int
    reused: int | None
    reused_blocks: float | None

    @property
    def speed(self) -> float:
        """Tokens per second, the median over rounds."""
        return _median(self.tokens_per_second)

    @property
    def request_rate(self) -> float:
        """Requests per second, the median over rounds."""
        return _median(self.requests_per_second)

    @property
    def falls_behind(self) -> bool:
        """It answers clearly fewer requests than arrive: its latencies grow for as long as the load lasts."""
        return self.load.kind == RATE and self.request_rate < _KEEPS_UP * self.load.value


@dataclass(frozen=True)
class Ratio:
    """How many times as fast something is.

    Attributes:
        value: above 1 is faster.
        low, high: interval at `LEVEL`.
        rounds: drawn from; of one round the interval knows no noise between rounds.
    """

    value: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def cells(result: Result) -> list[Cell]:
    """Every arm at every load, loads first."""
    return [_cell(result, load, arm) for load in result.loads for arm in result.arms if result.rows_of(load, arm)]


def between_tokens(answers: Iterable[Answer]) -> np.ndarray:
    """Seconds between tokens, float64, one for each token after the first block of its answer."""
    import numpy as np

    gaps: list[float] = []
    numbers: list[int] = []
    for answer in answers:
        for (before, _), (now, tokens) in zip(answer.blocks, answer.blocks[1:], strict=False):
            gaps.append((now - before) / tokens)
            numbers.append(max(1, round(tokens)))
    return np.repeat(np.asarray(gaps, dtype=float), np.asarray(numbers, dtype=int))


def ratio(rows: Sequence[Row], base: Sequence[Row], kind: str) -> Ratio | None:
    """How many times as fast the requests of `rows` went as those of `base`.

    Args:
        rows, base: of one arm at one load each; failed requests are left out.
        kind: `WHOLE` or `DECODING`.

    Returns:
        None where one side has no tokens to compare, or took no time.
    """
    rounds = max((row.round for row in (*rows, *base)), default=0)
    places = max((row.index for row in (*rows, *base)), default=-1) + 1
    return ratio_of(_sums(rows, kind, rounds, places), _sums(base, kind, rounds, places))


def ratio_of(sums: np.ndarray, base: np.ndarray) -> Ratio | None:
    """How many times as fast one side is as another, from tokens and seconds alone.

    Args:
        sums, base: float64 `[rounds, places, 2]`, tokens and seconds of each request; zeros where there is none.

    Returns:
        None where one side has no tokens to compare, or took no time.
    """
    import numpy as np

    sides = [sums, base]
    if not all(side.sum(axis=(0, 1)).all() for side in sides):
        return None
    sides = [side[side.any(axis=(1, 2))] for side in sides]  # rounds that one of two runs does not have
    generator = np.random.default_rng(_SEED)
    most, places, quotients = max(len(side) for side in sides), sums.shape[1], []
    for _ in range(_DRAWS):
        drawn_rounds, drawn_places = generator.random((most, 1)), generator.random((most, places))
        quotients.append(_rate(_drawn(sides[0], drawn_rounds, drawn_places)))
        quotients[-1] /= _rate(_drawn(sides[1], drawn_rounds, drawn_places))
    low, high = np.nanquantile(quotients, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    value = _rate(sides[0]) / _rate(sides[1])
    return Ratio(value, float(low), float(high), min(len(side) for side in sides))


def _sums(rows: Sequence[Row], kind: str, rounds: int, places: int) -> np.ndarray:
    """Tokens and seconds `[rounds, places, 2]`; zeros where there is no answered request."""
    import numpy as np

    sums = np.zeros((rounds, places, 2))
    for row in rows:
        if row.answer.error is None:
            sums[row.round - 1, row.index] = TIMES[kind](row.answer)
    return sums


def _rate(sums: np.ndarray) -> float:
    """Tokens per second; nan where there is nothing."""
    tokens, seconds = sums.sum(axis=(0, 1))
    return float(tokens / seconds) if tokens and seconds else float("nan")


def _drawn(sums: np.ndarray, rounds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """One draw with replacement, shaped as `sums` `[rounds, places, 2]`; numbers in [0, 1) say which."""
    which = (rounds[: len(sums)] * len(sums)).astype(int), (places[: len(sums)] * sums.shape[1]).astype(int)
    drawn: np.ndarray = sums[which]
    return drawn


def _cell(result: Result, load: Load, arm: str) -> Cell:
    rows = result.rows_of(load, arm)
    good = [row.answer for row in rows if row.answer.error is None]
    slices = [each for each in result.slices if (each.load, each.arm) == (load, arm)]
    tokens = sum(answer.tokens for answer in good)
    speeds = tuple(_tokens_until(rows, each.round, each.busy_s) / each.busy_s for each in slices)
    drafted, accepted, passes = (
        sum(getattr(answer, name) for answer in good) for name in ("drafted", "accepted", "passes")
    )
    reused = [answer.reused_blocks for answer in good if answer.reused_blocks is not None]
    return Cell(
        load=load,
        arm=arm,
        rounds=len(slices),
        requests=len(rows),
        answered=len(good),
        errors=dict(Counter(row.answer.error for row in rows if row.answer.error)),
        first=Percentiles.of([answer.first_s for answer in good if answer.first_s is not None]),
        between=Percentiles.of(between_tokens(good)),
        whole=Percentiles.of([answer.end_s for answer in good]),
        tokens=tokens,
        tokens_per_second=speeds,
        requests_per_second=tuple(speed * len(good) / tokens if tokens else 0.0 for speed in speeds),
        acceptance_rate=accepted / drafted if drafted else None,
        acceptance_length=tokens / passes if passes else None,
        repeated=sum(row.repeats > 0 for row in rows),
        reused=sum(blocks > 0 for blocks in reused) if reused else None,
        reused_blocks=sum(reused) / len(reused) if reused else None,
    )


def _tokens_until(rows: Sequence[Row], number: int, seconds: float) -> float:
    """Tokens that came by then in a round."""
    return sum(
        tokens
        for row in rows
        if row.round == number and row.answer.error is None
        for at, tokens in row.answer.blocks
        if row.planned_s + at <= seconds
    )


def _median(values: Sequence[float]) -> float:
    import statistics

    return statistics.median(values) if values else 0.0
