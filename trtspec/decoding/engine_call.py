"""What the decoding core asks of an engine, and what it gets back.

An engine is anything that takes an `EngineRequest` and returns an `EngineResult`: the torch runtime in this process,
or a model behind Triton. This module knows neither; deadlines, retries and transport are the caller's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .sampling import GREEDY, SamplingParams


class EngineError(RuntimeError):
    """An engine answered, but not with what was asked for."""


class Cancelled(Exception):
    """The caller no longer wants the answer; raised instead of making another engine call."""


@dataclass(frozen=True)
class EngineRequest:
    """One call of an engine: generate after `input_ids`, or verify `draft_tokens` in one pass.

    A verification call sets `draft_tokens` (length k) and `max_new_tokens` = k + 1; it is answered by the accepted
    drafts and one token of the engine's own, or fewer when an end id comes first. With `draft_parents` the draft tokens
    are a tree, of which one path is accepted; the engines of the C++ backend take chains only.
    """

    input_ids: NDArray[np.int32]  # [L], the whole context: prompt and everything emitted so far
    max_new_tokens: int
    sampling: SamplingParams = GREEDY
    end_id: int | None = None
    stop_sequences: tuple[tuple[int, ...], ...] = ()  # token ids; matched on new tokens only, kept in the output
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids; the last one is banned where the ones before it match
    embedding_bias: NDArray[np.float32] | None = None  # [V], added to the logits
    draft_tokens: NDArray[np.int32] | None = None  # [k]
    draft_logits: NDArray[np.float32] | None = None  # [k, V], as the draft model gave them, nothing applied
    draft_parents: NDArray[np.int32] | None = None  # [k], see `token_tree.TokenTree`; None: each follows the one before
    min_new_tokens: int = 0  # `end_id` has probability 0 before that many new tokens
    return_generation_logits: bool = False
    return_log_probs: bool = False
    return_perf_metrics: bool = False


@dataclass(frozen=True)
class KvBlocks:
    """Blocks of an engine's KV cache."""

    allocated: int = 0  # new ones
    reused: int = 0
    total: int = 0  # that the request holds

    def after(self, earlier: KvBlocks) -> KvBlocks:
        """The counts of this call and of those before it."""
        return KvBlocks(earlier.allocated + self.allocated, earlier.reused + self.reused, self.total)


NO_KV_BLOCKS = KvBlocks()


@dataclass(frozen=True)
class EngineResult:
    """The answer to an `EngineRequest`."""

    output_ids: NDArray[np.int32]  # [n], new tokens only; an end id or stop sequence that ended the call is the last
    # [n, V], as the model gave them, nothing applied; of a tree [k + 1, V]: after the context, and after each node
    generation_logits: NDArray[np.float32] | None = None
    log_probs: NDArray[np.float32] | None = None  # [n], natural logarithm
    num_draft_tokens: int = 0  # of a verification call
    num_accepted: int = 0  # of a verification call
    reused_tokens: int = 0  # context tokens that were found in the KV cache
    kv_blocks: KvBlocks = NO_KV_BLOCKS  # with `return_perf_metrics`, where the engine counts them


EngineCall = Callable[[EngineRequest], EngineResult]
"""Runs one request to its end. Raises whatever the transport raises: time-outs, broken connections, EngineError."""

EngineCalls = Callable[[Sequence[EngineRequest]], list[EngineResult]]
"""Runs several requests of one generation, at the same time where the transport can; answers in their order."""


def one_by_one(call: EngineCall) -> EngineCalls:
    """`call` for several requests, one after the other."""
    return lambda requests: [call(request) for request in requests]
