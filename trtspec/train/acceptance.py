"""Exact acceptance of speculative decoding from per-token acceptance probabilities; numbers only, no models.

Rejection sampling emits tokens distributed as the target's, so one can turn the draw around: given that token x was
emitted, it came from an accepted draft token with probability `min(p(x), q(x)) / p(x) = min(1, q(x) / p(x))`, and
independently at every position. A text sampled from the target and the draft's q along it therefore give the expected
number of target passes for any draft length without running the loop. Greedy is the case of probabilities 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Acceptance:
    """Expected totals over texts at one draft length.

    Attributes:
        emitted: tokens, bonus tokens and corrections included.
        passes: target passes.
        drafted: draft tokens proposed.
        accepted: accepted draft tokens by their place in the draft, first to last.
        reached: how often every place was judged, that is all places before it were accepted.
    """

    emitted: float
    passes: float
    drafted: float
    accepted: tuple[float, ...]
    reached: tuple[float, ...]

    @property
    def length(self) -> float:
        """Emitted tokens a target pass."""
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def rate(self) -> float:
        """Accepted over drafted."""
        return sum(self.accepted) / self.drafted if self.drafted else 0.0

    @property
    def by_position(self) -> tuple[float, ...]:
        """P(accepted | all before it accepted), by place in the draft."""
        return tuple(a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True))


def expected_acceptance(texts: Sequence[Sequence[float]], num_draft_tokens: int) -> Acceptance:
    """Run the cycle over every text in expectation.

    Args:
        texts: for every text, the probability at each token that the draft's proposal there is accepted.
        num_draft_tokens: proposals a cycle; the last cycle of a text proposes on, but what lies beyond the text's
            end counts as neither emitted nor accepted.
    """
    passes = drafted = 0.0
    accepted, reached = [0.0] * num_draft_tokens, [0.0] * num_draft_tokens
    for text in texts:
        begins = [1.0] + [0.0] * len(text)  # begins[i]: P(a cycle begins at token i)
        for at in range(len(text)):
            passes += begins[at]
            drafted += begins[at] * num_draft_tokens
            arrive = begins[at]
            for place in range(num_draft_tokens):
                token = at + place
                if token == len(text):
                    break
                reached[place] += arrive
                accepted[place] += arrive * text[token]
                begins[token + 1] += arrive * (1.0 - text[token])  # rejected: the correction is emitted here
                arrive *= text[token]
            else:
                begins[min(at + num_draft_tokens + 1, len(text))] += arrive  # all accepted: the bonus token
    emitted = float(sum(len(text) for text in texts))
    return Acceptance(emitted, passes, drafted, tuple(accepted), tuple(reached))
