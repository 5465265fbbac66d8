"""The statistics behind the sampled checks: probability integral transforms, tests of them, and their power.

Knows arrays of probabilities and tokens; knows no model, no subject and no report.

**The transform.** Let p_t be the reference's conditional distribution at position t, x_t the token the subject
emitted there, and v_t uniform and independent of everything. With the vocabulary in any order that depends on the
prefix alone, u_t = P(before x_t) + v_t p_t(x_t) is uniform on (0, 1), and u_1, u_2, ... are independent, exactly if
every x_t is drawn from p_t (randomised form of Rosenblatt 1952; Brockwell 2007). So one test covers all prompts,
positions and sampling settings together, however different their distributions are.

**Speculation.** An emitted token depends on the draft, yet given the prefix its law is p_t whatever was drafted:
that is the claim under test. Tokens may be grouped by anything known *before* x_t is drawn, such as the place in the
cycle (0 for the first token after a verification, 1 for the next, ...): picking terms of an independent sequence by
its past leaves it independent and uniform (optional skipping, Doob 1936). Grouping by what happened *to* x_t, accepted
or corrected, is not allowed: an accepted token is distributed as min(p, q), a corrected one as max(0, p - q), and
neither is p. The uniforms of a subject's own generator are not needed.

**Orders.** A test sees a deviation only as far as the order lines it up:

- `id`: the vocabulary's own order, for whatever the others do not foresee and for reused random numbers;
- `probability`: most probable first, for a wrong temperature, wrong truncation and wrong logits;
- `odds`: by q/p, the odds of the draft against the target, most preferred by the draft first. A rule of acceptance that
  lets the draft through (always accept, a residual drawn from p, the draft's own bonus token, a mixture) emits r with
  r/p a rising function of q/p, so the distance of Kolmogorov and Smirnov in this order *is* the total variation between
  r and p, the largest value that any order could give.

**Overlap.** The commonest fault, replacing a rejected token from p itself, emits r = min(p, q) + beta p with
beta = 1 - sum(min(p, q)): r/p - 1 is s - E s for s = min(1, q/p), so the sum of s(x_t) - E s over the tokens is its
most powerful test (the score test), and a good one for every other leak of the draft. `overlap` gives its terms.

**Favourite.** A draft that proposes its most likely token, judged as if it had been drawn, emits that token more often
than p and shares out the loss. `favourite` gives the terms of the test that looks there alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

POWER = 0.95
MIN_EXPECTED = 5.0  # draws expected in a bin of the chi-square test (Cochran 1954)


@dataclass(frozen=True)
class Evidence:
    """One test of the null hypothesis "the subject draws from the reference".

    Attributes:
        name: what was tested.
        num: size of the sample: tokens, pairs of tokens, or draws.
        statistic: the value of the test statistic, for the reader.
        p_value: probability under the hypothesis of a statistic at least as extreme.
        words: what the deviation looks like, if it is one.
    """

    name: str
    num: int
    statistic: float
    p_value: float
    words: str


def transform(p: np.ndarray, token: int, v: float, score: np.ndarray | None = None) -> float:
    """The randomised probability integral transform of one token, in [0, 1].

    Args:
        p: float64 `[vocab]`, the reference's distribution; sums to 1.
        token: the emitted id.
        v: a uniform number that nothing else uses.
        score: `[vocab]`, a function of the prefix; higher scores come first, equal ones in the order of ids.
            None is the order of ids.
    """
    if score is None:
        before = p[:token].sum()
    else:
        before = p[score > score[token]].sum() + p[:token][score[:token] == score[token]].sum()
    return float(min(1.0, before + v * p[token]))


def odds(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """q/p `[vocab]`, how much more the draft likes a token than the target does; 0 where p is 0."""
    return np.divide(q, p, out=np.zeros_like(p), where=p > 0)


def overlap(p: np.ndarray, q: np.ndarray, token: int) -> tuple[float, float]:
    """s - E s of the token, and the variance of s, for s = min(1, q/p) under p: how well the draft covers it."""
    s = np.minimum(1.0, odds(p, q))
    mean = float((p * s).sum())
    return float(s[token]) - mean, float((p * s * s).sum()) - mean * mean


def favourite(p: np.ndarray, q: np.ndarray, token: int) -> tuple[float, float]:
    """s - E s of the token, and the variance of s, for s = 1 where q is largest and 0 elsewhere."""
    first = int(q.argmax())
    mean = float(p[first])
    return float(token == first) - mean, mean * (1.0 - mean)


def uniformity(name: str, u: np.ndarray, words: tuple[str, str]) -> Evidence:
    """Kolmogorov-Smirnov test, exact for every sample size; the statistic is the distance D of the distribution
    functions.

    Args:
        name: of the test.
        u: transforms `[n]`; with n = 0 the p-value is 1.
        words: what transforms that are too small, and too large, mean.
    """
    from scipy import stats

    if not len(u):
        return Evidence(name, 0, 0.0, 1.0, "no token")
    result = stats.kstest(u, "uniform", method="exact")
    small = result.statistic_sign > 0
    return Evidence(name, len(u), float(result.statistic), float(result.pvalue), words[0] if small else words[1])


def independence(name: str, first: np.ndarray, second: np.ndarray) -> Evidence:
    """Correlation of pairs of transforms, each pair formed without looking at its second member.

    Under the hypothesis the terms are martingale differences of variance 1 (after scaling), so their normalised sum is
    close to a standard normal from some tens of pairs on. The statistic is the correlation.
    """
    if not len(first):
        return Evidence(name, 0, 0.0, 1.0, "no pair")
    products = 12.0 * (first - 0.5) * (second - 0.5)
    z = products.sum() / math.sqrt(len(products))
    return Evidence(name, len(first), float(products.mean()), _two_sided(float(z)), "random numbers are tied")


def leaning(name: str, terms: np.ndarray, words: tuple[str, str]) -> Evidence:
    """Whether terms that should be zero in the mean are.

    Under the hypothesis the terms are bounded martingale differences, so their sum over its standard deviation, which
    is the statistic, is close to a standard normal from some tens of terms on.

    Args:
        name: of the test.
        terms: `[n, 2]`, deviation and variance, as `overlap` and `favourite` give them.
        words: what a sum above, and below, zero means.
    """
    total, variance = terms.reshape(-1, 2).sum(axis=0)
    if variance <= 1e-12:
        return Evidence(name, len(terms), 0.0, 1.0, "nothing that could differ")
    z = float(total) / math.sqrt(variance)
    return Evidence(name, len(terms), z, _two_sided(z), words[0] if z > 0 else words[1])


def rarest(name: str, u: np.ndarray) -> Evidence:
    """Whether the least probable token is too improbable for a sample of this size.

    Args:
        u: transforms in the order `probability`: 1 - u is the probability of a token at least as rare. The smallest of
            n such numbers is below s with probability 1 - (1 - s)^n. Catches single absurd tokens, which no test of the
            bulk can see.
    """
    if not len(u):
        return Evidence(name, 0, 1.0, 1.0, "no token")
    smallest = float((1.0 - u).min())
    p_value = 1.0 if smallest >= 1.0 else -math.expm1(len(u) * math.log1p(-smallest))
    return Evidence(name, len(u), smallest, p_value, "a token that should hardly ever come")


def chi_square(name: str, samples: Sequence[tuple[np.ndarray, np.ndarray]]) -> Evidence:
    """Pearson's test of draws against exact distributions; independent samples are added up.

    Args:
        samples: pairs of p, float64 `[vocab]`, and counts, int `[vocab]`, of draws from it. Tokens are pooled in the
            order of p, which does not look at the counts, so that each bin expects at least `MIN_EXPECTED` draws.

    A sample that leaves fewer than two bins says nothing and is left out; with none left the p-value is 1.
    """
    from scipy import stats

    statistic, freedom, num = 0.0, 0, 0
    for p, counts in samples:
        observed, expected = pooled(p, counts)
        if len(expected) > 1:
            statistic += float(((observed - expected) ** 2 / expected).sum())
            freedom += len(expected) - 1
            num += int(counts.sum())
    p_value = float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0
    return Evidence(name, num, statistic, p_value, "other frequencies than the reference's")


def pooled(p: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Observed and expected numbers per bin: the most probable tokens each in a bin of its own, the rest together."""
    total = counts.sum()
    order = np.argsort(-p, kind="stable")
    expected = p[order] * total
    # tail[i]: draws expected from token i of the order on; a token gets its own bin while both it and the rest suffice
    tail = expected[::-1].cumsum()[::-1]
    alone = int(np.argmin(np.append((expected[:-1] >= MIN_EXPECTED) & (tail[1:] >= MIN_EXPECTED), False)))
    observed = counts[order]
    return (
        np.append(observed[:alone], observed[alone:].sum()).astype(np.float64),
        np.append(expected[:alone], expected[alone:].sum()),
    )


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which hypotheses are rejected so that any false rejection at all has probability at most alpha (Holm 1979).

    Holds under every dependence between the tests.
    """
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def detectable(num: int, alpha: float) -> float:
    """The total variation that `uniformity` finds with probability 95 % at the level alpha, in (0, 1].

    The sample must be `num` transforms in the order that lines the deviation up (see `odds`); then at some point c the
    distribution functions differ by the total variation d, and D >= |F_n(c) - c|. The test rejects for
    D > sqrt(ln(2 / alpha) / (2 num)) (Massart 1990), and n F_n(c) is binomial with a standard deviation of at most
    sqrt(num) / 2, so d = (sqrt(ln(2 / alpha) / 2) + 1.645 / 2) / sqrt(num) is enough.
    """
    if num < 1:
        return 1.0
    quantile = 1.6448536269514722  # of the standard normal at POWER
    return min(1.0, (math.sqrt(math.log(2.0 / alpha) / 2.0) + quantile / 2.0) / math.sqrt(num))


def detectable_draws(num: int, num_bins: int, alpha: float) -> float:
    """The total variation between bins that `chi_square` finds in `num` draws with probability 95 %, in (0, 1].

    The noncentrality num * sum((r - p)^2 / p) of a deviation d is at least 4 num d^2 (Cauchy-Schwarz), and the power is
    that of the noncentral chi-square law.
    """
    from scipy import optimize, stats

    if num < 1 or num_bins < 2:
        return 1.0
    critical = stats.chi2.isf(alpha, num_bins - 1)

    def miss(d: float) -> float:
        return float(stats.ncx2.cdf(critical, num_bins - 1, 4.0 * num * d * d)) - (1.0 - POWER)

    return float(optimize.brentq(miss, 1e-6, 1.0)) if miss(1.0) < 0 else 1.0


def _two_sided(z: float) -> float:
    """Probability of a standard normal further from 0 than z."""
    return math.erfc(abs(z) / math.sqrt(2.0))
