"""Speculation within this process: the decoding cycle over torch runtimes.

Knows runtimes, methods and the cycle; not where engines come from, and no server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from trtspec.decoding.cascade import NUM_DRAFT_TOKENS
from trtspec.decoding.cycle import Block, Request, generate
from trtspec.decoding.draft_target import AcceptanceMode, Target
from trtspec.decoding.engine_call import EngineCall
from trtspec.decoding.methods import DRAFTS, METHODS, DraftEngine, Method, Setting, make_drafter
from trtspec.runtime.early_exit import shared_layers
from trtspec.runtime.engine import check_engine_pair
from trtspec.runtime.torch_runtime import TorchRuntime


def _never() -> bool:
    return False


def speculate(
    method: str,
    runtimes: Mapping[str, TorchRuntime],
    request: Request,
    *,
    acceptance: AcceptanceMode = "auto",
    settings: Mapping[str, Setting] | None = None,
    decode: Callable[[list[int]], str] | None = None,
    continuation_ids: Sequence[int] = (),
    cancelled: Callable[[], bool] = _never,
) -> Iterator[Block]:
    """Continue a prompt, block by block; `decode`, `continuation_ids` and `cancelled` are those of `cycle.generate`.

    Args:
        method: `none` for plain decoding, or a key of `decoding.methods.METHODS`.
        runtimes: role -> engine: `target`, and those that the method needs.
        request: contexts that it leaves open become those of the engines.
        acceptance: by what proposes' logits or by its ids, see `DraftModel`.
        settings: of the method, see `decoding.methods.Method.settings`.

    Raises:
        TrtspecError: the engines do not fit each other or the request.
    """
    target, row = runtimes["target"], METHODS.get(method)
    settings = settings or {}
    request = replace(request, target_context=request.target_context or target.config.max_seq_len)
    drafter = None
    if row is not None:
        _check_engines(runtimes, row, request.num_draft_tokens, acceptance, settings)
        engines = draft_engines(runtimes, cancelled)
        request = replace(request, draft_context=request.draft_context or row.draft_context(engines))
        drafter = make_drafter(method, engines, acceptance, **settings)
    return generate(
        request,
        drafter,
        Target(partial(target.execute, cancelled=cancelled)),
        decode=decode,
        continuation_ids=continuation_ids,
        cancelled=cancelled,
    )


def draft_engines(
    runtimes: Mapping[str, TorchRuntime], cancelled: Callable[[], bool] = _never
) -> dict[str, DraftEngine]:
    """The engines among `runtimes` (by role) that drafts are made with.

    A draft of the target's own first layers is not called: the target runs them, with its weights and KV cache. Not so
    the middle model of a cascade, which has to verify: that is a pass of an engine of its own.
    """
    target = runtimes["target"]

    def call(role: str, runtime: TorchRuntime) -> EngineCall:
        num_layers = shared_layers(target.config, runtime.config) if role in DRAFTS else None
        if num_layers is None:
            return partial(runtime.execute, cancelled=cancelled)
        return partial(target.draft, num_layers=num_layers, cancelled=cancelled)

    return {
        role: DraftEngine(
            call(role, runtime),
            runtime.config.max_seq_len,
            runtime.config.returns_generation_logits,
            max_draft_len=runtime.config.max_draft_len,
            num_ids=target.config.vocab_size,
        )
        for role, runtime in runtimes.items()
        if role != "target"
    }


def _check_engines(
    runtimes: Mapping[str, TorchRuntime],
    method: Method,
    num_draft_tokens: int,
    acceptance: AcceptanceMode,
    settings: Mapping[str, Setting],
) -> None:
    """Each engine can verify what the next one proposes."""
    check_engine_pair(runtimes["target"].config, None, num_draft_tokens)
    between = settings.get("num_draft_tokens", NUM_DRAFT_TOKENS)  # of a cascade, below the target
    assert isinstance(between, int)
    for verifier, proposer in method.pairs(runtimes):
        to_target = verifier == "target"
        check_engine_pair(
            runtimes[verifier].config,
            runtimes[proposer].config,
            num_draft_tokens if to_target else between,
            draft_logits=to_target and acceptance == "logits",
        )
