"""Budgets and plans: figures computed by hand."""

from __future__ import annotations

import pytest

from trtspec.errors import TrtspecError
from trtspec.parity import statistics
from trtspec.parity.power import LOOKS, Budget, level, place_shares, plan, tokens_needed


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("2000", Budget(tokens=2000)),
        ("2000 tokens", Budget(tokens=2000)),
        ("90s", Budget(seconds=90.0)),
        ("5m", Budget(seconds=300.0)),
        ("1.5 min", Budget(seconds=90.0)),
    ],
)
def test_budgets_as_they_are_written(text: str, budget: Budget) -> None:
    assert Budget.parse(text) == budget


@pytest.mark.parametrize("text", ["", "many", "0", "-5", "0s", "2.5", "3 days"])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(TrtspecError, match="no budget"):
        Budget.parse(text)


def test_minutes_become_tokens_at_a_measured_speed() -> None:
    assert Budget.parse("5m").tokens_at(19.0) == 5700
    assert Budget.parse("800").tokens_at(19.0) == 800


@pytest.mark.parametrize("variation", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("share", [1.0, 0.1])
def test_tokens_needed_is_the_inverse_of_what_is_detectable(variation: float, share: float) -> None:
    one = level(1e-3, 25)
    needed = tokens_needed(variation, one, share)
    assert statistics.detectable(int(needed * share) + 1, one) <= variation
    assert statistics.detectable(int(needed * share * 0.98), one) > variation


def test_the_last_look_has_half_of_the_rate() -> None:
    assert level(1e-3, 25) == pytest.approx(2e-5)
    assert LOOKS[-1] == 1.0


def test_shares_of_the_places_by_hand() -> None:
    # 3 drafts at .5: 1, .5, .25, .125 of 1.875; 1 draft: 1, .5 of 1.5
    assert dict(place_shares((3,), 0.5)) == pytest.approx(
        {"first tokens of a pass": 8 / 15, "later tokens of a pass": 6 / 15, "bonus tokens": 1 / 15}
    )
    both = dict(place_shares((3, 1), 0.5))
    assert both["bonus tokens"] == pytest.approx((1 / 15 + 1 / 3) / 2)
    assert sum(both.values()) == pytest.approx(1.0)
    assert dict(place_shares((0,), 0.5))["bonus tokens"] == 0.0


def test_a_plan_says_what_each_group_will_show() -> None:
    made = plan(2000, 1e-3, 25, (3, 1), tokens_per_second=20.0)
    whole, *_, bonus = [made.detectable(share) for _, share in made.shares]
    assert whole == pytest.approx(statistics.detectable(2000, 2e-5))
    assert bonus > whole
    assert str(made).startswith(
        f"to see a total variation of {whole:.2f} in all tokens: 2 000 tokens, about 100 s at 20"
    )
