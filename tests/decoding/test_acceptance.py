"""Counters of speculation."""

from __future__ import annotations

import pytest

from trtspec.decoding.acceptance import Acceptance


def test_arithmetic_of_a_histogram():
    counters = Acceptance.from_histogram([8, 0, 6, 6], 3)
    assert (counters.num_steps, counters.num_drafted, counters.num_accepted) == (20, 60, 30)
    assert counters.rate == 0.5
    assert counters.length == 2.5


def test_steps_add_up_to_the_histogram():
    counters = Acceptance()
    for num_accepted, times in ((0, 8), (3, 6), (2, 6)):
        for _ in range(times):
            counters.add_step(3, num_accepted, num_accepted + 1)
    assert counters == Acceptance.from_histogram([8, 0, 6, 6], 3)


def test_plain_tokens_are_passes_of_length_one():
    counters = Acceptance()
    counters.add_plain(4)
    assert (counters.num_steps, counters.rate, counters.length) == (0, 0.0, 1.0)
    counters.add_step(5, 3, 4)
    assert counters.length == pytest.approx(8 / 5)


def test_nothing_done_is_no_division_by_zero():
    assert (Acceptance().rate, Acceptance().length) == (0.0, 0.0)


def test_sums_over_generations():
    total = Acceptance.from_histogram([1, 2], 1) + Acceptance.from_histogram([0, 0, 3], 2)
    assert total == Acceptance([1, 2, 3], 9, 14, 6)
    assert sum([total], Acceptance()) == total
