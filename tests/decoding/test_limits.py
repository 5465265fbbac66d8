"""Length clamps."""

from __future__ import annotations

import pytest

from trtspec.decoding.limits import clamp_num_draft_tokens, emission_limit


@pytest.mark.parametrize(
    ("length", "draft_context", "expected"),
    [
        (2042, 2048, 5),
        (2044, 2048, 4),
        (2048, 2048, 0),
        (2060, 2048, 0),
        (4092, 4096, 3),
        (4095, 4096, 0),
        (10, None, 5),
    ],
)
def test_contexts(length, draft_context, expected):
    """Target context 4096, 5 draft tokens wanted."""
    limit = emission_limit(0, 10_000, length, 4096)
    assert clamp_num_draft_tokens(5, length, limit, draft_context) == expected


@pytest.mark.parametrize(("remaining", "expected"), [(1, 0), (2, 1), (5, 4), (6, 5), (7, 5)])
def test_the_targets_own_token_keeps_its_place(remaining, expected):
    assert clamp_num_draft_tokens(5, 100, remaining) == expected


def test_emission_is_bounded_by_max_tokens_and_context():
    assert emission_limit(3, 10, 50) == 7
    assert emission_limit(3, 10, 50, 53) == 3
    assert emission_limit(3, 10, 60, 53) == 0
