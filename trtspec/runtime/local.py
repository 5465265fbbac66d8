"""Speculation within this process: the decoding cycle over two torch runtimes.

Knows runtimes and the cycle; not where engines come from, and no server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from trtspec.decoding.cycle import Block, Request, generate
from trtspec.decoding.draft_target import AcceptanceMode, DraftModel, Target
from trtspec.runtime.engine import check_engine_pair
from trtspec.runtime.torch_runtime import TorchRuntime


def speculate(
    target: TorchRuntime,
    draft: TorchRuntime | None,
    request: Request,
    *,
    acceptance: AcceptanceMode = "auto",
    decode: Callable[[list[int]], str] | None = None,
    continuation_ids: Sequence[int] = (),
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Block]:
    """Continue a prompt, block by block; `decode`, `continuation_ids` and `cancelled` are those of `cycle.generate`.

    Args:
        target: verifies.
        draft: proposes; None for plain decoding.
        request: contexts that it leaves open become those of the engines.
        acceptance: by the draft's logits or by its ids, see `DraftModel`.

    Raises:
        TrtspecError: the engines do not fit each other or the request.
    """
    check_engine_pair(
        target.config,
        draft.config if draft else None,
        request.num_draft_tokens if draft else 0,
        draft_logits=acceptance == "logits",
    )
    request = replace(
        request,
        target_context=request.target_context or target.config.max_seq_len,
        draft_context=request.draft_context or (draft.config.max_seq_len if draft else None),
    )
    return generate(
        request,
        DraftModel(partial(draft.execute, cancelled=cancelled), acceptance) if draft else None,
        Target(partial(target.execute, cancelled=cancelled)),
        decode=decode,
        continuation_ids=continuation_ids,
        cancelled=cancelled,
    )
