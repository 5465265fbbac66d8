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

**Single ids.** Some faults strike one id of every distribution, which the bulk hides: a draft that proposes its most
likely token, judged as if it had been drawn; an end id with a rule of its own. `indicator` gives the terms of the tests
that look there alone.

**Reuse.** Where one random number draws a draft token and decides on it too, tokens of low quantile in the draft's
distribution are let through and those of high quantile are rejected. `reuse` gives the terms of a test for that.

**Mixture.** A sampler that takes the draft's word in a few of 100 cases emits r = (1 - m) p + m q. No test beats the
likelihood ratio, the product of 1 - m + m q/p(x_t) (Neyman and Pearson 1933); whatever the subject's tokens depend on,
its expectation is 1 at most under the hypothesis, so that it exceeds 1/alpha with probability alpha at most, at any
time (Ville 1939). `mixture` uses that and no approximation: q/p has tails that no normal law describes.

**Known faults.** The same holds for every broken sampler whose distribution r is known given the prefix: the product of
r/p(x_t) is its most powerful test. `speculated` and `coarse` give r for faults of acceptance and of random numbers;
`likelihood` tests several faults at once, and says which one fits best.

**Surprise.** Another temperature, or truncation, changes how probable the tokens are in the mean: the score test has
the terms of -log p. `surprise` gives them.

**Seen.** Penalties that are forgotten, or count tokens that were proposed and rejected, scale what a penalised token
loses. The score test for that factor has the terms `against` of the logarithm of p without penalties over p.

**Looks.** A sample may be judged before it is complete, at fractions of it that are fixed beforehand, if each look has
its own share of the false-alarm rate (Lan and DeMets 1983). Here the share is the fraction of the sample that is new
(their spending function alpha t), and the shares simply add up (Bonferroni), so the whole rate holds whatever the
looks have in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

POWER = 0.95
MIN_EXPECTED = 5.0  # draws expected in a bin of the chi-square test (Cochran 1954)
Moments = tuple[float, float, float, float]
"""Of s(x) - E s for one token x: its value, and under p its variance and the third moments of its positive and of its
negative part."""
NO_MOMENTS: Moments = (0.0, 0.0, 0.0, 0.0)
_MIXTURES = (0.01, 0.03, 0.1, 0.3)  # shares of the draft that `mixture` looks for
_MIN_JUMPS = 3.0  # jumps expected in a sum, below which its law is not known well enough


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


def against(p: np.ndarray, score: np.ndarray, token: int) -> Moments:
    """How a token's score, `[vocab]`, differs from what it is under p in the mean."""
    deviation = score - float((p * score).sum())
    squares = p * deviation * deviation
    thirds = squares * deviation
    up = float(thirds[thirds > 0].sum())
    return float(deviation[token]), float(squares.sum()), up, up - float(thirds.sum())


def overlap(p: np.ndarray, q: np.ndarray, token: int) -> Moments:
    """For s = min(1, q/p): how well the draft covers the token."""
    return against(p, np.minimum(1.0, odds(p, q)), token)


def surprise(p: np.ndarray, token: int) -> Moments:
    """For s = -log p: its mean over the tokens differs from the entropy where the temperature is another."""
    return against(p, -np.log(p, out=np.zeros_like(p), where=p > 0), token)


def indicator(p: np.ndarray, chosen: int, token: int) -> Moments:
    """For s = 1 at one chosen id and 0 elsewhere."""
    mean = float(p[chosen])
    rest = max(0.0, 1.0 - mean)
    return (rest if token == chosen else -mean), mean * rest, mean * rest**3, rest * mean**3


def reuse(p: np.ndarray, q: np.ndarray, token: int) -> Moments:
    """For s = (share of its drafts that are rejected) (quantile of the id in q - 1/2): see the module."""
    rejected = np.maximum(0.0, 1.0 - np.divide(p, q, out=np.ones_like(p), where=q > 0))
    return against(p, rejected * (q.cumsum() - q / 2.0 - 0.5), token)


def speculated(q: np.ndarray, accepted: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """What a cycle emits in place of a draft token, `[vocab]`.

    Args:
        q: what the draft token is drawn from, `[vocab]`.
        accepted: probability of accepting each id, `[vocab]`.
        residual: what a rejected one is replaced from, `[vocab]`; sums to 1.
    """
    kept = q * accepted
    return kept + (1.0 - kept.sum()) * residual


def coarse(p: np.ndarray, levels: int) -> np.ndarray:
    """What a draw by id from p `[vocab]` becomes if its random number has so many levels: 0, 1 / levels, ..."""
    cumulative = p.cumsum()
    numbers = np.ceil(levels * cumulative / cumulative[-1])  # of those that draw this id or a lower one
    numbers[1:] -= numbers[:-1].copy()
    return numbers / levels


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


def independence(name: str, first: np.ndarray, second: np.ndarray, weights: np.ndarray | None = None) -> Evidence:
    """Correlation of pairs of transforms, each pair formed without looking at its second member.

    Under the hypothesis the terms are martingale differences of known variance, so their normalised sum is close to a
    standard normal from some tens of pairs on. The statistic is the correlation.

    Args:
        name: of the test.
        first, second: transforms `[n]`.
        weights: `[n]`, known before the second member; larger where the transforms say more.
    """
    weights = np.ones(len(first)) if weights is None else weights
    if (norm := math.sqrt(float((weights**2).sum()))) <= 1e-12:
        return Evidence(name, len(first), 0.0, 1.0, "no pair")
    products = 12.0 * weights * (first - 0.5) * (second - 0.5)
    z = float(products.sum()) / norm
    return Evidence(name, len(first), z / math.sqrt(len(first)), _two_sided(z), "random numbers are tied")


def leaning(name: str, terms: np.ndarray, words: tuple[str, str]) -> Evidence:
    """Whether terms that should be zero in the mean are.

    Under the hypothesis the terms are bounded martingale differences. Where a model is nearly certain they are rare
    large jumps rather than noise, so the tail of their sum is that of the Poisson law, shifted and scaled, which has
    their variance and the third moment of their jumps to that side; without jumps that is the normal law. A sum of
    fewer than 3 such jumps is not judged.

    Args:
        name: of the test.
        terms: `[n, 4]`, one `Moments` a token; the statistic is their sum over its standard deviation.
        words: what a sum above, and below, zero means.
    """
    total, variance, up, down = (float(column) for column in terms.reshape(-1, 4).sum(axis=0))
    if variance <= 1e-9 or variance**3 < _MIN_JUMPS * max(up, down) ** 2:
        return Evidence(name, len(terms), 0.0, 1.0, "too little that could differ")
    p_value = min(1.0, 2.0 * _tail(abs(total), variance, up if total > 0 else down))
    return Evidence(name, len(terms), total / math.sqrt(variance), p_value, words[0] if total > 0 else words[1])


def mixture(name: str, ratios: np.ndarray, words: str) -> Evidence:
    """Whether some of the tokens come from the draft: the likelihood ratio, averaged over shares of the draft.

    Args:
        name: of the test.
        ratios: q/p `[n]` of the tokens in the order they came; the statistic is the largest likelihood ratio on the
            way, whose inverse is the p-value (Ville).
        words: what it means.
    """
    return likelihood(name, 1.0 + np.array(_MIXTURES) * (ratios[:, None] - 1.0), [words] * len(_MIXTURES))


def likelihood(name: str, ratios: np.ndarray, words: Sequence[str]) -> Evidence:
    """Whether the tokens fit one of several known alternatives better: the likelihood ratio, averaged over them.

    Args:
        name: of the test.
        ratios: r/p of the tokens in the order they came, by the alternatives r `[n, alternatives]`, all above 0; the
            statistic is the largest averaged likelihood ratio on the way, whose inverse is the p-value (Ville).
        words: what each alternative means.
    """
    logs = np.vstack([np.zeros(len(words)), np.log(ratios).cumsum(axis=0)])  # [1 + n, alternatives]
    averages = np.logaddexp.reduce(logs, axis=1) - math.log(len(words))
    at = int(averages.argmax())
    peak, best = float(averages[at]), words[int(logs[at].argmax())]
    return Evidence(name, len(ratios), math.exp(min(700.0, peak)), min(1.0, math.exp(-peak)), best)


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


def total_variation(observed: np.ndarray, expected: np.ndarray, alpha: float) -> tuple[float, float, float]:
    """Lower bound, observed value and upper bound of the total variation between two laws, over bins.

    Args:
        observed: numbers of draws `[bins]` from the one.
        expected: what the other expects of as many.
        alpha: probability that the bounds are wrong. By the triangle inequality they are a `radius` away.
    """
    total = float(observed.sum())
    middle = float(np.abs(observed - expected).sum()) / (2.0 * total) if total else 0.0
    around = radius(int(total), len(observed), alpha) if len(observed) > 1 else 0.0
    return max(0.0, middle - around), middle, min(1.0, middle + around)


def radius(num: int, num_bins: int, alpha: float = 0.05) -> float:
    """How far observed frequencies of `num` draws may be from their law in total variation, with probability 1 - alpha.

    Holds for every law and every number of draws (Weissman, Ordentlich, Seroussi, Verdu, Weinberger 2003, theorem 2.1:
    P(L1 distance >= e) <= (2^bins - 2) exp(-num e^2 / 2), and the total variation is half of that distance).
    """
    if num < 1 or num_bins < 2:
        return 1.0
    # log(2^bins - 2), without the overflow
    sets = num_bins * math.log(2.0) + math.log1p(-(2.0 ** (1 - num_bins)))
    return min(1.0, math.sqrt(2.0 * (sets - math.log(alpha)) / num) / 2.0)


def _two_sided(z: float) -> float:
    """Probability of a standard normal further from 0 than z."""
    return math.erfc(abs(z) / math.sqrt(2.0))


def _tail(total: float, variance: float, third: float) -> float:
    """P(S >= total) for a sum S of mean 0 with this variance and third moment >= 0: shifted and scaled Poisson law."""
    from scipy import special

    jump = third / variance
    num_jumps = variance / jump**2 if jump > 0 else math.inf
    if num_jumps > 1e6:
        return math.erfc(total / math.sqrt(2.0 * variance)) / 2.0
    return float(special.gammainc(total / jump + num_jumps, num_jumps))
