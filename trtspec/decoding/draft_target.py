"""A draft model and a target model, each behind an engine call, as drafter and verifier.

Used in process and in the BLS model alike: the same request gives the same calls, so the same text. Knows engines by
`EngineCall` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .cycle import Generation, Proposal
from .detokenize import shared_length
from .engine_call import EngineCall, EngineError, EngineRequest, EngineResult
from .sampling import SamplingParams, derive_seed
from .token_tree import ROOT, TokenTree
from .verify import Verification

AcceptanceMode = Literal["auto", "logits", "tokens"]


class DraftModel:
    """Drafter: a small model of the target's vocabulary.

    Args:
        call: the draft engine.
        acceptance: `logits`: sampled requests draw their drafts and send the draft's logits along; a draft engine that
            does not return them is an error. `tokens`: the draft is always greedy, and only ids are sent. `auto`: as
            `logits` where the engine returns them, ids where not. Greedy requests send ids only.
    """

    def __init__(self, call: EngineCall, acceptance: AcceptanceMode = "auto") -> None:
        self._call = call
        self._acceptance = acceptance

    def propose(self, generation: Generation, num_draft_tokens: int) -> Proposal:
        """Continue the context with the draft model."""
        sampling = generation.request.sampling
        drawn = not sampling.greedy and self._acceptance != "tokens"
        if drawn:
            # Hashed with the position, not counted up from it: numbers of drafts that came to nothing stay unused.
            sampling = sampling.seeded(derive_seed(sampling.seed, 0, f"draft from {len(generation.context)}"))
        else:
            sampling = sampling.greedily()
        request = engine_request(generation, num_draft_tokens, sampling)
        if drawn:
            request = replace(_without_end_ids(request, generation.request.end_ids), return_generation_logits=True)
        generation.raise_if_cancelled()
        result = self._call(request)
        if not drawn:
            return Proposal(checked_ids(result, num_draft_tokens, "draft"))
        return proposed(result, num_draft_tokens, generation.request.end_ids, self._acceptance, "draft")

    def learn(self, verification: Verification) -> None:
        """Nothing: the engine finds the common beginning of the next context by itself."""


class Target:
    """Verifier: the model whose output counts.

    Args:
        call: the target engine.
        role: its name in errors; the middle model of a cascade verifies too.
    """

    def __init__(self, call: EngineCall, role: str = "target") -> None:
        self._call = call
        self._role = role

    def verify(self, generation: Generation, proposal: Proposal) -> Verification:
        """One engine call: a verification, or plain decoding when nothing is proposed."""
        drafts = proposal.tokens
        max_new_tokens = generation.num_new_tokens(len(drafts))
        asked, sampling = generation.request, generation.request.sampling
        if not sampling.greedy:
            sampling = sampling.seeded(derive_seed(sampling.seed, len(generation.context), "target"))
        request = engine_request(
            generation,
            max_new_tokens,
            sampling,
            draft_tokens=drafts if len(drafts) else None,
            draft_logits=proposal.logits,
            draft_parents=proposal.parents,
            return_log_probs=asked.return_log_probs,
            return_generation_logits=asked.return_generation_logits,
            return_perf_metrics=asked.return_perf_metrics,
        )
        generation.raise_if_cancelled()
        result = self._call(request)
        tokens = checked_ids(result, max_new_tokens, self._role)

        # An own token never equals a draft that it replaces, so what the drafts have of the answer was accepted.
        ids = tokens.tolist()
        if proposal.parents is None:
            num_accepted, rows = shared_length(ids, drafts.tolist()), None
        else:
            nodes = TokenTree(drafts, proposal.parents).follow(ids)
            num_accepted, rows = len(nodes), [ROOT, *nodes]
        expected = num_accepted + 1 if len(drafts) else max_new_tokens
        return Verification(
            tokens=tuple(ids),
            num_accepted=num_accepted,
            log_probs=checked_log_probs(result, len(ids)) if asked.return_log_probs else None,
            ended=len(ids) < expected,
            logits=checked_logits(result, len(ids), rows) if asked.return_generation_logits else None,
            kv_blocks=result.kv_blocks,
        )


def _without_end_ids(request: EngineRequest, end_ids: tuple[int, ...]) -> EngineRequest:
    """The draft call that never ends early.

    Engines leave an end id out of the answer, and its logits with it. A drawn proposal that is short for that reason
    gives away what was drawn next, and the output would no longer follow the target. Nothing is lost: the target finds
    the end by itself in the same cycle.
    """
    return replace(
        request,
        min_new_tokens=request.max_new_tokens,
        bad_words=request.bad_words + tuple((token,) for token in end_ids[1:]),
    )


def proposed(
    result: EngineResult, num_draft_tokens: int, end_ids: tuple[int, ...], acceptance: AcceptanceMode, role: str
) -> Proposal:
    """Tokens that an engine drew while the end ids were banned, with the logits that they were drawn from.

    Raises:
        EngineError: not `num_draft_tokens` of each, except that with acceptance `auto` there may be no logits.
    """
    tokens, logits = checked_ids(result, num_draft_tokens, role), result.generation_logits
    if logits is None and acceptance == "auto":
        return Proposal(tokens)
    if logits is None or len(tokens) != num_draft_tokens or len(logits) != num_draft_tokens:
        rows = "no" if logits is None else len(logits)
        raise EngineError(
            f"the {role} engine returned {len(tokens)} tokens and {rows} rows of generation logits;"
            f" expected {num_draft_tokens} of each; build it with generation logits, or accept by tokens"
        )
    logits = np.array(logits, dtype=np.float32)
    logits[:, [token for token in end_ids if token < logits.shape[1]]] = -np.inf
    return Proposal(tokens, logits)


def engine_request(generation: Generation, max_new_tokens: int, sampling: SamplingParams, **more: Any) -> EngineRequest:
    """One call after the context; draft and target get the same rule, or q would not be what p is compared with.

    `more` are other fields of `EngineRequest`.
    """
    request = generation.request
    before_min = max(0, request.min_tokens - generation.num_generated)
    other_end_ids = tuple((token,) for token in request.end_ids[1:])  # an engine knows one end id
    return EngineRequest(
        input_ids=generation.context,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        end_id=request.end_ids[0] if request.end_ids else None,
        stop_sequences=other_end_ids,
        bad_words=request.bad_words + (other_end_ids if before_min else ()),
        embedding_bias=request.embedding_bias,
        min_new_tokens=min(before_min, max_new_tokens),
        **more,
    )


def checked_ids(result: EngineResult, max_new_tokens: int, role: str) -> NDArray[np.int32]:
    """The new tokens [n] of an answer; EngineError when they cannot be that."""
    tokens = np.asarray(result.output_ids)
    if tokens.ndim != 1 or len(tokens) > max_new_tokens:
        raise EngineError(
            f"the {role} engine returned ids of shape {list(tokens.shape)};"
            f" expected at most {max_new_tokens} new tokens, without the input"
        )
    if len(tokens) and (tokens.dtype.kind not in "iu" or min(tokens.tolist()) < 0):
        raise EngineError(f"the {role} engine returned {tokens[:8].tolist()}, which are not token ids")
    return tokens.astype(np.int32, copy=False)


def checked_log_probs(result: EngineResult, num_tokens: int) -> tuple[float, ...]:
    """Those of an answer of `num_tokens` tokens; EngineError when there are not as many."""
    if result.log_probs is None or len(result.log_probs) != num_tokens:
        raise EngineError(f"the target engine did not return one log probability for each of {num_tokens} tokens")
    return tuple(float(value) for value in result.log_probs)


def checked_logits(result: EngineResult, num_tokens: int, nodes: Sequence[int] | None = None) -> NDArray[np.float32]:
    """[n, V], those of an answer of `num_tokens` tokens; EngineError when there are not as many.

    Args:
        result: the answer.
        num_tokens: of it.
        nodes: of a tree, what each token follows: ROOT, then the accepted nodes.
    """
    logits = result.generation_logits
    if logits is not None and nodes is not None and len(logits) > max(nodes) + 1:
        logits = logits[[node + 1 for node in nodes]]
    if logits is None or len(logits) < num_tokens:
        num_rows = "no" if logits is None else len(logits)
        raise EngineError(f"the target engine returned {num_rows} rows of generation logits for {num_tokens} tokens")
    return logits[:num_tokens]
