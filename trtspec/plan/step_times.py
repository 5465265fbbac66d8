"""What forward passes take: the one thing that a plan wants to know of a machine.

`trtspec.plan.roofline` answers from data sheets, measured curves from a machine. Knows neither.
"""

from __future__ import annotations

from typing import Protocol

HEADS = "heads"
"""Role of what a method adds to the target: all Medusa heads for one token, or one multi-token prediction module."""


class StepTimes(Protocol):
    """Times of forward passes on one machine."""

    @property
    def source(self) -> str:
        """Where the times come from, one line for people."""
        ...

    def seconds(self, role: str, batch: int, tokens: int, context: int) -> float:
        """Seconds of one forward pass.

        Args:
            role: a key of `Spec.models`, or `HEADS`.
            batch: sequences.
            tokens: new tokens of each of them: 1 is plain decoding, k + 1 the verification of k draft tokens, the
                length of a prompt (with context 0) its prefill.
            context: tokens that the KV cache of each sequence holds.

        Raises:
            TrtspecError: nothing is known of such a pass.
        """
        ...

    def overhead(self, batch: int) -> float:
        """Seconds of a speculative cycle outside of all models; 0 where nothing is known."""
        ...
