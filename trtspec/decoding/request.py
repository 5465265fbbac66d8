"""What a caller asks for: one prompt and how to continue it.

Knows token ids and text to stop at; not templates, tokenizers or engines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .sampling import GREEDY, SamplingParams


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Raises:
        ValueError: a field out of range; the message begins with its name.
    """

    prompt_ids: NDArray[np.int32] | ArrayLike  # [p], p >= 1; becomes int32
    max_tokens: int
    min_tokens: int = 0  # end ids are banned before; stop strings are not
    sampling: SamplingParams = GREEDY
    end_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    embedding_bias: NDArray[np.float32] | None = None  # [V]
    num_draft_tokens: int = 0  # 0: plain decoding
    target_context: int | None = None  # tokens that the target can hold; None: no limit
    draft_context: int | None = None
    plain_chunk_tokens: int = 8  # tokens asked of the target in one call when nothing is drafted
    return_log_probs: bool = False
    return_generation_logits: bool = False  # of the target, one row for each token of output
    return_perf_metrics: bool = False  # how the target's KV cache was used

    def __post_init__(self) -> None:
        self.validate()
        object.__setattr__(self, "prompt_ids", np.asarray(self.prompt_ids, dtype=np.int32))
        for name in ("end_ids", "stop_strings"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "bad_words", tuple(tuple(word) for word in self.bad_words))

    def validate(self) -> None:
        """Raises ValueError naming the first field that is out of range."""
        prompt = np.asarray(self.prompt_ids)
        if prompt.ndim != 1 or not len(prompt) or prompt.dtype.kind not in "iu" or prompt.min() < 0:
            raise ValueError("prompt_ids: not a non-empty row of token ids")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: {self.max_tokens} is not at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} is not from 0 to max_tokens ({self.max_tokens})")
        if self.num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens: {self.num_draft_tokens} is not at least 0")
        if self.plain_chunk_tokens < 1:
            raise ValueError(f"plain_chunk_tokens: {self.plain_chunk_tokens} is not at least 1")
        if any(not stop for stop in self.stop_strings):
            raise ValueError("stop_strings: an empty string stops everywhere")
        if any(not len(word) for word in self.bad_words):
            raise ValueError("bad_words: an empty sequence of ids")
        if self.embedding_bias is not None and not np.all(self.embedding_bias < np.inf):
            raise ValueError("embedding_bias: NaN or +inf")
        if self.target_context is not None and len(prompt) >= self.target_context:
            raise ValueError(
                f"prompt_ids: {len(prompt)} tokens leave no room in the target's context of {self.target_context}"
            )
