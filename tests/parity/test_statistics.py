"""The statistics: tables computed by hand, laws by simulation with fixed seeds."""

from __future__ import annotations

import numpy as np
import pytest

from trtspec.parity.statistics import (
    chi_square,
    coarse,
    detectable,
    detectable_draws,
    holm,
    independence,
    indicator,
    leaning,
    likelihood,
    mixture,
    odds,
    overlap,
    pooled,
    radius,
    rarest,
    reuse,
    speculated,
    surprise,
    total_variation,
    transform,
    uniformity,
)

WORDS = ("small", "large")
P = np.array([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize(
    ("score", "token", "v", "expected"),
    [
        (None, 0, 0.0, 0.0),
        (None, 2, 0.5, 0.45),
        (None, 3, 1.0, 1.0),
        (P, 3, 0.5, 0.2),  # most probable first
        (P, 0, 0.5, 0.95),
        (np.array([1.0, 2.0, 2.0, 0.0]), 2, 0.0, 0.2),  # order 1, 2 (equal, by id), 0, 3
        (np.array([1.0, 2.0, 2.0, 0.0]), 0, 0.0, 0.5),
    ],
)
def test_transform_in_an_order(score: np.ndarray | None, token: int, v: float, expected: float) -> None:
    assert transform(P, token, v, score) == pytest.approx(expected)


def test_overlap_terms_by_hand() -> None:
    p, q = np.array([0.6, 0.2, 0.2, 0.0]), np.array([0.3, 0.4, 0.1, 0.2])
    # s = [.5, 1, .5, 0], E s = sum(min(p, q)) = .6, Var s = .15 + .2 + .05 - .36 = .04
    assert odds(p, q) == pytest.approx([0.5, 2.0, 0.5, 0.0])
    # E (s - E s)^3: up .2 * .4^3 = .0128, down .8 * .1^3 = .0008
    assert overlap(p, q, 1) == pytest.approx((0.4, 0.04, 0.0128, 0.0008))
    assert overlap(p, q, 0) == pytest.approx((-0.1, 0.04, 0.0128, 0.0008))


def test_terms_of_a_single_id_by_hand() -> None:
    p = np.array([0.6, 0.2, 0.2, 0.0])
    assert indicator(p, 1, 1) == pytest.approx((0.8, 0.16, 0.1024, 0.0064))
    assert indicator(p, 1, 2) == pytest.approx((-0.2, 0.16, 0.1024, 0.0064))
    assert indicator(p, 3, 0) == (0.0, 0.0, 0.0, 0.0)


def test_surprise_and_reuse_by_hand() -> None:
    p = np.array([0.5, 0.25, 0.25, 0.0])  # entropy 1.5 ln 2; the deviations are -.5 and .5 of ln 2
    assert surprise(p, 0)[:2] == pytest.approx((-0.5 * np.log(2), 0.25 * np.log(2) ** 2))
    q = np.array([0.5, 0.5, 0.0, 0.0])  # half of the drafts of id 1 are rejected, at quantile .75 in the mean
    assert reuse(p, q, 1)[0] == pytest.approx(0.5 * 0.25 * 0.75)


def test_likelihood_ratio_of_a_mixture_by_hand() -> None:
    found = mixture("", np.array([2.0, 0.0]), "mixed")
    best = np.mean([1.01, 1.03, 1.1, 1.3])  # after the first token; the second speaks against it
    assert found.statistic == pytest.approx(best)
    assert found.p_value == pytest.approx(1 / best)
    assert mixture("", np.ones(10), "mixed").p_value == 1.0


def test_likelihood_of_several_faults_by_hand() -> None:
    """Averaged over the two: 1.25 after the first token, (2 * 3 + .25) / 2 after the second, less after the third."""
    ratios = np.array([[2.0, 0.5], [3.0, 0.5], [0.5, 1.0]])
    found = likelihood("", ratios, ["one", "other"])
    assert found.statistic == pytest.approx(3.125)
    assert found.p_value == pytest.approx(1 / 3.125)
    assert found.words == "one"
    assert likelihood("", ratios[:, ::-1], ["one", "other"]).words == "other"
    assert likelihood("", np.ones((0, 2)), ["one", "other"]).p_value == 1.0


def test_likelihood_keeps_its_level_at_any_time() -> None:
    """Hypothesis: the p-value is .05 or less in 5 % of right samples at most, although it looks after every token.

    2000 samples of 100 tokens, two alternatives; at a true rate of .05 more than 131 have probability 1e-3.
    """
    rng = np.random.default_rng(6)
    ratios = np.array([[2.5, 0.5], [0.9, 1.1], [0.625, 1.15]])
    p = np.array([0.1, 0.5, 0.4])
    assert p @ ratios == pytest.approx([0.95, 1.06], abs=0.05)
    ratios /= p @ ratios
    samples = (ratios[rng.choice(3, size=100, p=p)] for _ in range(2000))
    low = sum(likelihood("", sample, ["one", "other"]).p_value <= 0.05 for sample in samples)
    assert 0 < low <= 131


def test_what_a_cycle_emits_by_hand() -> None:
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.25, 0.5])
    rest = np.array([0.5, 0.5, 0.0])
    assert speculated(q, np.array([1.0, 1.0, 0.0]), rest) == pytest.approx(p)
    assert speculated(q, np.array([1.0, 1.0, 0.4]), rest) == pytest.approx([0.4, 0.4, 0.2])


def test_coarse_numbers_by_hand() -> None:
    # of 0, 1/4, 1/2, 3/4: the first two fall on id 0 (to .3), none on id 1 (to .4), 1/2 and 3/4 on ids 2 and 3
    assert coarse(np.array([0.3, 0.1, 0.2, 0.4]), 4).tolist() == [0.5, 0.0, 0.25, 0.25]


def test_a_few_rare_jumps_are_no_evidence() -> None:
    """A model that is nearly certain: 1000 tokens, each the other one with probability .001. Three of them are nothing
    special, and a normal law would give a p-value below .05; with 20 times as many tokens, 60 instead of 20 are."""
    p = np.array([0.999, 0.001])
    few = np.array([indicator(p, 1, token) for token in [1] * 4 + [0] * 996])
    many = np.array([indicator(p, 1, token) for token in [1] * 60 + [0] * 19940])
    assert leaning("", few, WORDS).p_value == 1.0
    assert leaning("", many, WORDS).p_value < 1e-8


def test_a_sum_of_rare_jumps_is_not_called_significant_too_often() -> None:
    """Hypothesis: `leaning` rejects right data at level .01 no more often than that, where a model is nearly sure.

    60 tokens with laws of little entropy, 4000 samples; at a true rate of .01 more than 60 rejections have probability
    1e-3. The normal law alone rejects more often than that.
    """
    rng = np.random.default_rng(5)
    laws = [rng.dirichlet(np.full(50, 0.02)) + 1e-9 for _ in range(60)]
    laws = [p / p.sum() for p in laws]
    terms = [np.array([surprise(p, token) for token in range(50)]) for p in laws]
    draws = np.array([rng.choice(50, size=4000, p=p) for p in laws]).T
    total = sum(own[draws[:, place]] for place, own in enumerate(terms))  # [4000, 4]
    found = [leaning("", sums[None], WORDS).p_value for sums in total]
    z = np.abs(total[:, 0]) / np.sqrt(total[:, 1])
    assert 0 < sum(p_value < 0.01 for p_value in found) <= 60
    assert sum(p_value < 0.001 for p_value in found) < (z > 3.29).sum()


def test_total_variation_with_bounds() -> None:
    # sqrt(2 (ln(2^4 - 2) + ln 20) / 400) / 2 = .0839
    assert radius(400, 4, 0.05) == pytest.approx(0.08393, rel=1e-3)
    low, middle, high = total_variation(np.array([130, 90, 90, 90]), np.full(4, 100.0), 0.05)
    assert (low, middle) == (0.0, pytest.approx(0.075))
    assert high == pytest.approx(0.1589, rel=1e-3)
    assert radius(0, 4) == radius(10, 1) == 1.0


def test_holm_by_hand() -> None:
    # thresholds .05/4, .05/3, .05/2, .05: the third p-value misses its own, so the fourth is not looked at
    assert holm([0.04, 0.001, 0.016, 0.03], 0.05) == [False, True, True, False]
    assert holm([0.02, 0.5], 0.05) == [True, False]
    assert holm([], 0.05) == []


@pytest.mark.parametrize(
    ("p", "counts", "observed", "expected"),
    [
        ([0.5, 0.3, 0.15, 0.05], [45, 35, 15, 5], [45, 35, 15, 5], [50, 30, 15, 5]),
        ([0.5, 0.3, 0.16, 0.04], [45, 35, 15, 5], [45, 35, 20], [50, 30, 20]),  # 4 expected: joins the one before
        ([0.99, 0.004, 0.004, 0.002], [100, 0, 0, 0], [100], [100]),  # nothing left to compare
        ([0.0, 1.0], [0, 50], [50], [50]),
    ],
)
def test_pooled_bins(p: list[float], counts: list[int], observed: list[int], expected: list[float]) -> None:
    bins = pooled(np.array(p), np.array(counts))
    assert bins[0].tolist() == observed
    assert bins[1] == pytest.approx(expected)


def test_no_data_is_no_evidence() -> None:
    nothing = np.array([])
    found = (
        uniformity("", nothing, WORDS),
        independence("", nothing, nothing),
        leaning("", nothing, WORDS),
        rarest("", nothing),
        chi_square("", [(np.array([0.99, 0.01]), np.array([10, 0]))]),
    )
    assert [evidence.p_value for evidence in found] == [1.0] * 5


def test_one_absurd_token_is_found_and_a_rare_one_is_not() -> None:
    ordinary = np.linspace(0.0, 0.999, 500)
    assert rarest("", ordinary).p_value > 0.3  # 1 of 1000 in 500 tokens
    assert rarest("", np.append(ordinary, 1.0 - 1e-9)).p_value < 1e-6
    assert uniformity("", np.append(ordinary, 1.0 - 1e-9), WORDS).p_value > 0.3  # the bulk does not show it


def test_words_say_which_way_the_deviation_goes() -> None:
    assert uniformity("", np.linspace(0.0, 0.5, 50), WORDS).words == "small"
    assert uniformity("", np.linspace(0.5, 1.0, 50), WORDS).words == "large"
    assert leaning("", np.array([[0.3, 0.1, 0.01, 0.01]] * 50), WORDS).words == "small"


def test_transforms_are_uniform_exactly_when_the_tokens_are_draws() -> None:
    """Hypothesis: tokens drawn from p give uniform transforms in every order; tokens of another law do not.

    2000 tokens from 2000 different distributions over 30 ids. False alarm: three tests at 1e-4. Power: the other law is
    a mixture with 30 % of q, total variation about .15 in the mean; detectable(2000, 1e-4) is .07.
    """
    rng = np.random.default_rng(1)
    right: list[list[float]] = []
    wrong: list[float] = []
    for _ in range(2000):
        p, q = rng.dirichlet(np.full(30, 0.3)) + 1e-9, rng.dirichlet(np.full(30, 0.3)) + 1e-9
        p, q = p / p.sum(), q / q.sum()
        token = int(rng.choice(30, p=p))
        right.append([transform(p, token, rng.random(), score) for score in (None, p, odds(p, q))])
        wrong.append(transform(p, int(rng.choice(30, p=0.7 * p + 0.3 * q)), rng.random(), odds(p, q)))
    assert all(uniformity("", np.array(right)[:, order], WORDS).p_value > 1e-4 for order in range(3))
    assert uniformity("", np.array(wrong), WORDS).p_value < 1e-4


def test_a_deviation_of_the_stated_size_is_found_as_often_as_stated() -> None:
    """Hypothesis: `detectable` keeps its promise of 95 %.

    A mixture that moves a total variation d = detectable(n, alpha) from the later half of the order to the earlier one.
    400 samples of n = 300; a true power of .95 gives fewer than 366 hits with probability 1e-3.
    """
    rng = np.random.default_rng(2)
    num, alpha = 300, 1e-4
    d = detectable(num, alpha)
    hits = 0
    for _ in range(400):
        u = rng.random(num)
        moved = (u > 0.5) & (rng.random(num) < 2 * d)
        u[moved] -= 0.5
        hits += uniformity("", u, WORDS).p_value < alpha
    assert hits >= 366


def test_draws_of_the_stated_deviation_are_found_as_often_as_stated() -> None:
    """Hypothesis: `detectable_draws` keeps its promise of 95 %.

    Eight equal bins, half of them raised by the stated total variation; 400 samples of n = 200, as above.
    """
    rng = np.random.default_rng(3)
    p, alpha = np.full(8, 1 / 8), 1e-4
    d = detectable_draws(200, 8, alpha)
    r = p + np.array([1, -1] * 4) * d / 4
    hits = sum(chi_square("", [(p, rng.multinomial(200, r))]).p_value < alpha for _ in range(400))
    assert 0.1 < d < 0.3
    assert hits >= 366


def test_p_values_are_not_too_small_under_the_hypothesis() -> None:
    """Hypothesis: each test rejects right data at level .01 no more often than that.

    1500 samples of 150; at a true rate of .01 more than 28 rejections have probability 1e-3 (the statistics are not
    exactly normal or chi-square distributed, the tail is what matters).
    """
    rng = np.random.default_rng(4)
    p, q = rng.dirichlet(np.full(20, 0.5)), rng.dirichlet(np.full(20, 0.5))
    rejections = dict.fromkeys(("uniformity", "independence", "leaning", "rarest", "chi_square"), 0)
    terms = np.array([overlap(p, q, token) for token in range(20)])
    for _ in range(1500):
        u = rng.random(150)
        tokens = rng.choice(20, size=150, p=p)
        found = {
            "uniformity": uniformity("", u, WORDS),
            "independence": independence("", u[:-1], u[1:]),
            "leaning": leaning("", terms[tokens], WORDS),
            "rarest": rarest("", u),
            "chi_square": chi_square("", [(p, np.bincount(tokens, minlength=20))]),
        }
        for name, evidence in found.items():
            rejections[name] += evidence.p_value < 0.01
    assert all(4 <= number <= 28 for number in rejections.values()), rejections


@pytest.mark.parametrize(("num", "expected"), [(0, 1.0), (5, 1.0), (400, 0.15238), (10000, 0.030477)])
def test_detectable_total_variation(num: int, expected: float) -> None:
    # (sqrt(ln(2 / 1e-4) / 2) + 1.64485 / 2) / sqrt(num) = (2.2253 + .8224) / sqrt(num), and at most 1
    assert detectable(num, 1e-4) == pytest.approx(expected, rel=1e-3)
