"""The arithmetic of speculative decoding: expected tokens, speed-up, best draft length, where plain decoding wins.

Notation of the docstrings: gamma draft tokens a cycle; alpha, the probability that a draft token is accepted when those
before it were; c, a draft step in plain passes of the target; v, a verification in plain passes; E, emitted tokens a
target pass, the bonus token counts. Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """E = (1 - alpha^(gamma + 1)) / (1 - alpha) = 1 + alpha + ... + alpha^gamma, added up, so that alpha may be 1.

    Leviathan et al. 2023 (arXiv 2211.17192), equation 1: every draft token is accepted with the same probability,
    whatever became of others. Where texts have easy and hard places it is too high or too low; `expected_tokens_of`
    takes what was measured.

    Raises:
        ValueError: alpha is no probability, or a negative number of draft tokens.
    """
    if not 0.0 <= alpha <= 1.0 or num_draft_tokens < 0:
        raise ValueError(f"alpha {alpha} and {num_draft_tokens} draft tokens; expected 0 to 1, and 0 or more")
    return sum(alpha**place for place in range(num_draft_tokens + 1))


def expected_tokens_of(survival: Iterable[float]) -> float:
    """E = 1 + S_1 + ... + S_gamma, with S_i the measured probability that the first i draft tokens are accepted.

    The expectation of a count is the sum of the probabilities that it reaches 1, 2, ...; no independence is assumed.
    """
    return 1.0 + sum(survival)


def speed_up(
    tokens_per_pass: float,
    num_draft_tokens: int,
    draft_cost: float,
    verify_cost: float = 1.0,
    overhead: float = 0.0,
) -> float:
    """E / (gamma c + v + o), over plain decoding.

    Leviathan et al. 2023, theorem 3.8, is the case v = 1, o = 0 with the E of `expected_tokens`. v grows with the batch
    as soon as arithmetic and not memory is the limit ("target efficiency" 1 / v in MoESD, arXiv 2505.19645).

    Args:
        tokens_per_pass: E.
        num_draft_tokens: gamma.
        draft_cost: c.
        verify_cost: v.
        overhead: o, what lies between the models, in plain passes.
    """
    return tokens_per_pass / (num_draft_tokens * draft_cost + verify_cost + overhead)


def best_length(speed_up_at: Callable[[int], float], most: int) -> tuple[int, float]:
    """The draft length from 0 to `most` with the largest speed-up, and that; the shorter of two alike.

    Args:
        speed_up_at: of a length from 1 on; plain decoding, length 0, has 1.
    """
    values = [1.0, *(speed_up_at(length) for length in range(1, most + 1))]
    best = max(range(most + 1), key=lambda length: values[length])
    return best, values[best]


def crossover(speed_up_at: Callable[[int], float], batches: Iterable[int]) -> int | None:
    """The first of `batches` where plain decoding wins, that is a speed-up below 1; None: it wins at none of them.

    Args:
        speed_up_at: of a batch.
        batches: rising; all of them up to a limit, since the speed-up of a mixture of experts falls, rises and falls.
    """
    return next((batch for batch in batches if speed_up_at(batch) < 1.0), None)


def needed_acceptance(costs: Sequence[float]) -> float | None:
    """The smallest alpha with which some draft length breaks even; None: even alpha = 1 does not.

    With v = 1 that is c: speculation pays for some length where alpha > c (Leviathan et al. 2023, corollary 3.9).

    Args:
        costs: of draft length 1, 2, ...: a cycle in plain passes.
    """
    found = [_alpha_for(cost, length) for length, cost in enumerate(costs, 1) if cost <= length + 1]
    return min(found, default=None)


def _alpha_for(tokens: float, num_draft_tokens: int) -> float:
    """The alpha that emits so many tokens a pass, by bisection: E rises with alpha."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, num_draft_tokens) >= tokens else (middle, high)
    return high
