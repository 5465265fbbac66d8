"""How much a sampled check has to draw, and what it can see: before it runs, and after.

Knows numbers of tokens, false-alarm rates and groups of tokens; no model, no subject, no data.

The false-alarm rate of a run is divided among its statistical checks and subjects (the suite does that), each check's
among its looks in proportion to the tokens that are new in each (Lan and DeMets 1983; see `statistics`), and that of a
look among its tests (Holm 1979; the first to be rejected, which is what counts for power, has to pass Bonferroni's
bound). What is stated here is what the last look sees.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from trtspec.errors import TrtspecError
from trtspec.parity import statistics

LOOKS = (1 / 8, 1 / 4, 1 / 2, 1.0)
"""Fractions of the planned tokens after which the sampled check looks at what it has."""
_LAST_SHARE = LOOKS[-1] - LOOKS[-2]
_UNITS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "m": 60.0, "min": 60.0, "minutes": 60.0, "h": 3600.0}
_EXPECTED_ACCEPTANCE = 0.6  # of draft tokens, as long as nothing is measured


@dataclass(frozen=True)
class Budget:
    """What a sampled check may cost: new tokens, or seconds. Exactly one is given."""

    tokens: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """From `2000`, `2000 tokens`, `90s` or `5m`.

        Raises:
            TrtspecError: it is none of these.
        """
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text.lower())
        number, unit = (float(match[1]), match[2]) if match else (0.0, "")
        if number > 0 and unit in _UNITS:
            return cls(seconds=number * _UNITS[unit])
        if number >= 1 and number.is_integer() and unit in ("", "token", "tokens"):
            return cls(tokens=int(number))
        raise TrtspecError(f"no budget: {text!r}", expected="tokens or time, as in 2000, 2000 tokens, 90s, 5m")

    def tokens_at(self, tokens_per_second: float) -> int:
        """New tokens that it pays for at a measured speed."""
        return self.tokens if self.tokens is not None else max(1, int((self.seconds or 0.0) * tokens_per_second))


@dataclass(frozen=True)
class Plan:
    """What a sampled check will see, by what it will draw.

    Attributes:
        tokens: new tokens, over all groups.
        level: false-alarm rate of each of its tests at the last look.
        shares: the groups in which deviations are looked for, and their expected shares of the tokens.
        tokens_per_second: measured; None if it is not known yet.
    """

    tokens: int
    level: float
    shares: tuple[tuple[str, float], ...]
    tokens_per_second: float | None = None

    def detectable(self, share: float = 1.0) -> float:
        """The total variation found with probability 95 % in a group that has this share of the tokens."""
        return statistics.detectable(int(self.tokens * share), self.level)

    def __str__(self) -> str:
        return "; ".join(
            f"to see a total variation of {self.detectable(share):.2f} in {name}: {self._cost()}"
            for name, share in self.shares
        )

    def _cost(self) -> str:
        cost = f"{self.tokens:,} tokens".replace(",", " ")
        if self.tokens_per_second:
            seconds = self.tokens / self.tokens_per_second
            cost += f", about {seconds:.0f} s at {self.tokens_per_second:.0f} tokens/s"
        return cost


def plan(
    tokens: int,
    alpha: float,
    num_tests: int,
    lengths: Sequence[int],
    acceptance: float = _EXPECTED_ACCEPTANCE,
    tokens_per_second: float | None = None,
) -> Plan:
    """What so many tokens will show.

    Args:
        tokens: new tokens.
        alpha: false-alarm rate of the whole check.
        num_tests: tests that share it.
        lengths: numbers of draft tokens that take turns; 0 is plain decoding.
        acceptance: expected share of accepted draft tokens.
        tokens_per_second: speed of subject and reference together, if it is known.
    """
    shares = [("all tokens", 1.0), *((name, share) for name, share in place_shares(lengths, acceptance) if share)]
    return Plan(tokens, level(alpha, num_tests), tuple(shares), tokens_per_second)


def level(alpha: float, num_tests: int) -> float:
    """False-alarm rate of one of `num_tests` tests at the last look of a check that has `alpha` in all."""
    return alpha * _LAST_SHARE / num_tests


def tokens_needed(variation: float, level: float, share: float = 1.0) -> int:
    """Tokens after which a total variation is found with probability 95 %, by one test at this level.

    Args:
        variation: in (0, 1].
        level: false-alarm rate of the test.
        share: of the tokens, in the group that deviates.
    """
    # detectable is c / sqrt(n)
    many = 10**12
    return math.ceil((statistics.detectable(many, level) / variation) ** 2 * many / share)


def place_shares(lengths: Sequence[int], acceptance: float) -> list[tuple[str, float]]:
    """Expected shares of the tokens in each place of a cycle, if every draft token is accepted with this probability.

    A cycle of n draft tokens emits its k-th token with probability acceptance^k, k = 0 ... n; the last is the bonus
    token. Answers with each of the lengths have as many tokens.
    """
    first = later = bonus = 0.0
    for length in lengths:
        places = [acceptance**place for place in range(length + 1)]
        whole = sum(places) * len(lengths)
        first += places[0] / whole
        later += sum(places[1:length]) / whole
        bonus += places[length] / whole if length else 0.0
    return [("first tokens of a pass", first), ("later tokens of a pass", later), ("bonus tokens", bonus)]
