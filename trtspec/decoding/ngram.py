"""Prompt lookup: what followed the same words earlier in the text is proposed again.

No model: a copy from the context, which the target then verifies like any draft. Knows token ids only.
"""

from __future__ import annotations

import numpy as np

from .cycle import Generation, Proposal
from .verify import NO_PROPOSAL, Verification


class NgramDrafter:
    """Drafter: continues the longest match of the end of the context, of several the most recent one.

    Proposals have no logits: their tokens were looked up, not drawn, so q is one-hot and the target accepts by
    equality with its own choice. It keeps nothing between cycles, so one may serve any number of requests; a look-up
    costs one comparison with each token of the window.

    Args:
        max_ngram: tokens of the longest match that is looked for.
        window: last tokens of the context that are searched; None for all.
    """

    def __init__(self, max_ngram: int = 3, window: int | None = None) -> None:
        if max_ngram < 1:
            raise ValueError(f"max_ngram: {max_ngram} is not at least 1")
        if window is not None and window < 1:
            raise ValueError(f"window: {window} is not at least 1")
        self._max_ngram = max_ngram
        self._window = window

    def propose(self, generation: Generation, num_draft_tokens: int) -> Proposal:
        """What follows the match; nothing without one.

        A match that overlaps the end of the text is a repetition with the distance between the two for its period, and
        its next rounds are proposed: every token proposed stands in the text.
        """
        text = generation.context if self._window is None else generation.context[-self._window :]
        end = len(text)
        # followers[i] - n .. followers[i] - 1 holds the last n tokens of the text; longer matches are among them
        followers = np.flatnonzero(text[:-1] == text[-1]) + 1
        for n in range(2, self._max_ngram + 1):
            longer = followers[followers >= n]
            longer = longer[text[longer - n] == text[end - n]]
            if not len(longer):
                break
            followers = longer
        if not len(followers):
            return NO_PROPOSAL
        start = followers[-1]
        return Proposal(text[start + np.arange(num_draft_tokens) % (end - start)])

    def learn(self, verification: Verification) -> None:
        """Nothing: what was accepted is in the next context."""
