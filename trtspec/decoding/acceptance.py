"""Counting what speculation brought.

Acceptance rate = accepted / drafted; acceptance length = emitted tokens / target passes, the target's own token counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Acceptance:
    """Counters over one generation, or a sum over many."""

    histogram: list[int] = field(default_factory=list)  # [j]: speculative steps with j accepted drafts
    num_drafted: int = 0
    num_emitted: int = 0  # tokens that came out of target passes, end ids included
    num_target_passes: int = 0  # speculative steps, and one a token of plain decoding

    @classmethod
    def from_histogram(cls, histogram: Sequence[int], num_draft_tokens: int) -> Acceptance:
        """Counters of steps that all drafted `num_draft_tokens` and ran to their end."""
        steps = sum(histogram)
        accepted = sum(count * steps for count, steps in enumerate(histogram))
        return cls(list(histogram), steps * num_draft_tokens, steps + accepted, steps)

    def add_step(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Count one verification of `num_drafted` tokens."""
        self.histogram.extend([0] * (num_accepted + 1 - len(self.histogram)))
        self.histogram[num_accepted] += 1
        self.num_drafted += num_drafted
        self.num_emitted += num_emitted
        self.num_target_passes += 1

    def add_plain(self, num_emitted: int) -> None:
        """Count tokens that were decoded one by one."""
        self.num_emitted += num_emitted
        self.num_target_passes += num_emitted

    def __add__(self, other: Acceptance) -> Acceptance:
        size = max(len(self.histogram), len(other.histogram))
        padded = [counts.histogram + [0] * (size - len(counts.histogram)) for counts in (self, other)]
        return Acceptance(
            [a + b for a, b in zip(*padded, strict=True)],
            self.num_drafted + other.num_drafted,
            self.num_emitted + other.num_emitted,
            self.num_target_passes + other.num_target_passes,
        )

    @property
    def num_steps(self) -> int:
        """Verifications."""
        return sum(self.histogram)

    @property
    def num_accepted(self) -> int:
        """Draft tokens that were accepted."""
        return sum(count * steps for count, steps in enumerate(self.histogram))

    @property
    def rate(self) -> float:
        """Accepted / drafted; 0 when nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def length(self) -> float:
        """Emitted tokens / target passes; 0 before the first pass."""
        return self.num_emitted / self.num_target_passes if self.num_target_passes else 0.0
