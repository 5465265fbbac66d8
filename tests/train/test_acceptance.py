"""The arithmetic of expected acceptance: cases by hand, and the real rejection loop as its witness."""

from __future__ import annotations

import numpy as np
import pytest

from trtspec.train.acceptance import expected_acceptance


@pytest.mark.parametrize(
    ("text", "num_draft_tokens", "passes", "accepted"),
    [
        ([1, 1, 1, 1, 1, 1], 2, 2, (2, 2)),  # two cycles: two drafts and the bonus token
        ([0, 0, 0], 4, 3, (0, 0, 0, 0)),  # every draft is wrong: one token a pass
        ([1, 0, 1, 0], 3, 2, (2, 0, 0)),  # accepted, then corrected
        ([1, 1, 1, 1], 6, 1, (1, 1, 1, 1, 0, 0)),  # the text ends inside the draft
        ([1, 1, 0, 1, 1], 1, 3, (2,)),  # the bonus tokens take the places of the second and the fourth
        ([], 4, 0, (0, 0, 0, 0)),
    ],
)
def test_certain_texts(text: list[float], num_draft_tokens: int, passes: int, accepted: tuple[int, ...]) -> None:
    result = expected_acceptance([text], num_draft_tokens)
    assert (result.passes, result.accepted, result.emitted) == (passes, accepted, len(text))
    assert result.drafted == passes * num_draft_tokens


def test_a_coin() -> None:
    """Two tokens, each accepted with probability 1/2, one draft: 1 + 1/2 passes."""
    result = expected_acceptance([[0.5, 0.5]], 1)
    assert result.passes == 1.5
    assert result.length == pytest.approx(2 / 1.5)
    assert result.by_position == (0.5,)


def draw(rng: np.random.Generator, distribution: np.ndarray) -> int:
    return min(int(distribution.cumsum().searchsorted(rng.random())), len(distribution) - 1)


def speculate(rng: np.random.Generator, p: np.ndarray, q: np.ndarray, length: int, num_draft_tokens: int) -> int:
    """Target passes of the textbook loop (Leviathan et al. 2023, algorithm 1) over a first-order Markov chain."""
    token, emitted, passes = 0, 0, 0
    while emitted < length:
        passes += 1
        for _ in range(num_draft_tokens):
            proposal = draw(rng, q[token])
            if rng.random() >= p[token, proposal] / q[token, proposal]:
                residual = np.maximum(p[token] - q[token], 0)
                token = draw(rng, residual / residual.sum())
                emitted += 1
                break
            token = proposal
            emitted += 1
        else:
            token = draw(rng, p[token])
            emitted += 1
    return passes


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_expectation_along_sampled_texts_is_that_of_the_loop(num_draft_tokens: int) -> None:
    """Hypothesis: mean passes of the loop = mean of expected_acceptance over texts sampled from the target.

    1500 runs of either kind over 24 tokens, 4-sigma band on the difference of the means: false alarms 1 in 16,000.
    Scoring a text with q(x), the chance that the draft proposes it, instead of min(1, q/p) is off by 64 sigma here.
    """
    rng = np.random.default_rng(7)
    p, q = rng.dirichlet([0.4] * 5, size=5), rng.dirichlet([0.8] * 5, size=5)
    length, runs = 24, 1500
    loop = [speculate(rng, p, q, length, num_draft_tokens) for _ in range(runs)]
    expected = []
    for _ in range(runs):
        token, text = 0, []
        for _ in range(length):
            emitted = draw(rng, p[token])
            text.append(min(1.0, q[token, emitted] / p[token, emitted]))
            token = emitted
        expected.append(expected_acceptance([text], num_draft_tokens).passes)
    sigma = np.sqrt(np.var(loop) / runs + np.var(expected) / runs)
    assert abs(np.mean(loop) - np.mean(expected)) < 4 * sigma
