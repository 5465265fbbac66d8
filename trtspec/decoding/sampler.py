"""Choosing the tokens of one engine call, one position after the other.

What a runtime needs to answer an `EngineRequest` from rows of logits. Knows the request and what was chosen so far;
not where the rows come from.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .engine_call import EngineRequest
from .sampling import Uniforms, likeliest, log_probability, most_likely, probabilities, processed_logits


class TokenSampler:
    """History and sampling rule of one call.

    A runtime loops `token = sampler.next(row); sampler.append(token)` until `sampler.finished`. Position i sees the
    context and the i tokens appended before it.
    """

    def __init__(self, request: EngineRequest, uniforms: Uniforms | None = None) -> None:
        self.tokens: list[int] = []
        self.finished = request.max_new_tokens < 1
        self.uniforms = uniforms or Uniforms(request.sampling.seed)
        self._request = request
        self._context_length = len(request.input_ids)
        self._history = np.empty(self._context_length + request.max_new_tokens, dtype=np.int32)
        self._history[: self._context_length] = request.input_ids

    @property
    def greedy(self) -> bool:
        """Whether tokens are chosen, not drawn."""
        return self._request.sampling.greedy

    def next(self, logits: NDArray[np.floating]) -> int:
        """The token for the current position, from the model's logits [V]: the likeliest one, or a draw."""
        if self._request.sampling.greedy:
            return most_likely(self._processed(logits))
        return self.uniforms.draw(len(self.tokens), self.probabilities(logits))

    def probabilities(self, logits: NDArray[np.floating]) -> NDArray[np.float64]:
        """The distribution [V] at the current position that logits [V] stand for under the request's rule."""
        return probabilities(self._processed(logits), self._request.sampling)

    def likeliest(self, logits: NDArray[np.floating], count: int) -> list[int]:
        """The `count` likeliest tokens at the current position, the likeliest first; fewer when the rest is banned."""
        return likeliest(self._processed(logits), count)

    def log_probability(self, logits: NDArray[np.floating], token: int) -> float:
        """Logarithm of the token's probability at the current position, before top-k, top-p and min-p."""
        return log_probability(self._processed(logits), token)

    def append(self, token: int) -> None:
        """Settle the current position and go to the next one."""
        self._history[self._context_length + len(self.tokens)] = token
        self.tokens.append(token)
        self.finished = (
            token == self._request.end_id
            or len(self.tokens) >= self._request.max_new_tokens
            or any(tuple(self.tokens[-len(stop) :]) == stop for stop in self._request.stop_sequences)
        )

    def take_back(self) -> None:
        """Undo the last `append`."""
        self.tokens.pop()
        self.finished = False  # or there would have been nothing to append to

    def _processed(self, logits: NDArray[np.floating]) -> NDArray[np.floating]:
        request = self._request
        return processed_logits(
            logits,
            self._history[: self._context_length + len(self.tokens)],
            len(self.tokens),
            request.sampling,
            end_ids=() if request.end_id is None else (request.end_id,),
            min_new_tokens=request.min_new_tokens,
            bad_words=request.bad_words,
            bias=request.embedding_bias,
        )
