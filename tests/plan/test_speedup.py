"""The arithmetic of speculation: against enumeration, simulation with fixed seeds, and tables."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from trtspec.plan.speedup import (
    best_length,
    crossover,
    expected_tokens,
    expected_tokens_of,
    needed_acceptance,
    speed_up,
)


@pytest.mark.parametrize("k", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.75, 1.0])
def test_expected_tokens_is_that_of_every_outcome(alpha: float, k: int) -> None:
    """Over all 2^k patterns of drafts that would and would not be accepted."""
    total = 0.0
    for pattern in product((True, False), repeat=k):
        accepted = next((i for i, kept in enumerate(pattern) if not kept), k)
        total += float(np.prod([alpha if kept else 1 - alpha for kept in pattern])) * (accepted + 1)
    assert expected_tokens(alpha, k) == pytest.approx(total)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_expected_tokens_is_the_papers_closed_form(alpha: float) -> None:
    for k in range(20):
        assert expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


@pytest.mark.parametrize(("alpha", "k"), [(-0.1, 3), (1.1, 3), (float("nan"), 3), (0.5, -1)])
def test_what_is_no_probability_or_length_is_refused(alpha: float, k: int) -> None:
    with pytest.raises(ValueError, match="draft tokens"):
        expected_tokens(alpha, k)


def test_measured_survival_against_simulated_cycles() -> None:
    """Acceptance that differs from place to place and from text to text, where the closed form is wrong.

    Half of the texts accept with 0.95, half with 0.25; the mean over 200,000 cycles has a standard error of at most
    0.006 (its values lie in 1 to 6), so that 0.03 is five of them.
    """
    rng = np.random.default_rng(7)
    rates = rng.choice([0.95, 0.25], size=(200_000, 1))
    accepted = np.cumprod(rng.random((200_000, 5)) < rates, axis=1)
    survival = accepted.mean(axis=0)
    emitted = 1 + accepted.sum(axis=1)
    assert expected_tokens_of(survival) == pytest.approx(emitted.mean())
    exact = expected_tokens_of([(0.95**i + 0.25**i) / 2 for i in range(1, 6)])
    assert expected_tokens_of(survival) == pytest.approx(exact, abs=0.03)
    assert exact - expected_tokens(0.6, 5) > 0.5  # the mean rate says too little here


def test_without_drafts_nothing_is_gained_or_lost() -> None:
    assert expected_tokens_of([]) == expected_tokens(0.9, 0) == 1.0
    assert speed_up(1.0, 0, 0.5) == 1.0


def test_speed_up_by_hand() -> None:
    assert speed_up(3.0, 4, 0.05) == pytest.approx(3.0 / 1.2)
    assert speed_up(3.0, 4, 0.05, verify_cost=1.5, overhead=0.1) == pytest.approx(3.0 / 1.8)


# Best draft length and its speed-up for c and alpha, v = 1.
BEST = {
    0.02: {0.5: (4, 1.79), 0.6: (6, 2.17), 0.7: (8, 2.76), 0.8: (11, 3.82), 0.9: (19, 6.37)},
    0.05: {0.5: (3, 1.63), 0.6: (4, 1.92), 0.7: (6, 2.35), 0.8: (8, 3.09), 0.9: (13, 4.67)},
    0.10: {0.5: (2, 1.46), 0.6: (3, 1.67), 0.7: (4, 1.98), 0.8: (6, 2.47), 0.9: (10, 3.43)},
    0.20: {0.5: (1, 1.25), 0.6: (2, 1.40), 0.7: (3, 1.58), 0.8: (4, 1.87), 0.9: (7, 2.37)},
}


@pytest.mark.parametrize("alpha", [0.5, 0.6, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("c", BEST)
def test_the_table_of_best_lengths(c: float, alpha: float) -> None:
    length, value = best_length(lambda k: speed_up(expected_tokens(alpha, k), k, c), 40)
    assert (length, round(value, 2)) == BEST[c][alpha]


def test_best_length_is_the_shortest_of_those_alike_and_0_where_nothing_pays() -> None:
    assert best_length(lambda k: 1.5, 4) == (1, 1.5)
    assert best_length(lambda k: 0.9, 4) == (0, 1.0)
    assert best_length(lambda k: 1.0, 4) == (0, 1.0)
    assert best_length(lambda k: 9.0, 0) == (0, 1.0)


def test_crossover_is_the_first_batch_where_plain_decoding_wins() -> None:
    """Also where the speed-up rises again, as with a mixture of experts, whose verification gets cheaper once plain
    decoding touches all experts too."""
    values = {1: 1.4, 2: 1.0, 4: 0.9, 8: 1.2, 16: 0.5}
    assert crossover(values.__getitem__, values) == 4
    assert crossover(lambda batch: 1.0, range(1, 9)) is None


@pytest.mark.parametrize("c", [0.02, 0.2, 0.7])
def test_the_acceptance_that_breaks_even_is_c(c: float) -> None:
    """Corollary 3.9 of the paper, for v = 1: one draft token then emits 1 + c in the time of 1 + c."""
    assert needed_acceptance([1 + k * c for k in range(1, 9)]) == pytest.approx(c)


def test_the_acceptance_that_breaks_even_gives_a_speed_up_of_1_and_less_none() -> None:
    costs = [1.9 + 0.1 * k for k in range(1, 9)]  # a verification twice as long as a pass
    alpha = needed_acceptance(costs)
    assert alpha is not None

    def best(rate: float) -> float:
        return max(expected_tokens(rate, k) / cost for k, cost in enumerate(costs, 1))

    assert best(alpha) == pytest.approx(1.0)
    assert best(alpha - 0.01) < 1.0 < best(alpha + 0.01)
    assert needed_acceptance([2.0]) == pytest.approx(1.0)
    assert needed_acceptance([2.1, 3.2]) is None
