"""Verification: which draft tokens the target keeps, and the token it adds.

The output follows the target's distribution exactly, whatever the draft proposed. Knows logits and the request; not
how either model was run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .engine_call import NO_KV_BLOCKS, EngineRequest, KvBlocks
from .sampler import TokenSampler
from .sampling import Uniforms


class Rows(Protocol):
    """Logits of consecutive positions; an array [n, V], or something that computes row i when it is asked for."""

    def __getitem__(self, index: int, /) -> NDArray[np.floating]: ...


@dataclass(frozen=True)
class Proposal:
    """Draft tokens and, when they were drawn from them, the draft model's logits."""

    tokens: NDArray[np.int32]  # [k]
    logits: NDArray[np.float32] | None = None  # [k, V], as the model gave them, nothing applied
    parents: NDArray[np.int32] | None = (
        None  # [k], of a token tree, see `token_tree`; None: each follows the one before
    )

    def __post_init__(self) -> None:
        if len(self.tokens) and (lowest := min(self.tokens.tolist())) < 0:
            raise ValueError(f"proposal: {lowest} is not a token id")
        if self.logits is not None and len(self.logits) != len(self.tokens):
            raise ValueError(f"proposal: {len(self.logits)} rows of logits for {len(self.tokens)} tokens")

    @property
    def depth(self) -> int:
        """Most tokens that follow each other."""
        if self.parents is None:
            return len(self.tokens)
        depths = [0]  # of the context, then of each node
        for parent in self.parents.tolist():
            depths.append(depths[parent + 1] + 1)
        return max(depths)


NO_PROPOSAL = Proposal(np.empty(0, dtype=np.int32))


@dataclass(frozen=True)
class Verification:
    """What the target made of a proposal."""

    tokens: tuple[int, ...]  # accepted drafts, then the target's own token; an end id is the last
    num_accepted: int  # drafts among them
    log_probs: tuple[float, ...] | None = None  # one a token
    ended: bool = False  # the target is done: fewer tokens came than the call allowed
    logits: NDArray[np.float32] | None = None  # [tokens, V], the target's, nothing applied; when asked for
    kv_blocks: KvBlocks = NO_KV_BLOCKS  # when asked for


def verify(target_logits: Rows, request: EngineRequest, uniforms: Uniforms | None = None) -> Verification:
    """Accept the leading draft tokens and add one token of the target's own.

    Greedy: a draft is accepted when it is the target's argmax. Sampled, with draft logits: rejection sampling
    (Leviathan et al. 2023, Alg. 1; Chen et al. 2023, Alg. 2). Sampled, without: a draft is accepted when it equals the
    target's own draw, which is the same rule for a one-hot q; so a draft token chosen in any other way than by drawing
    from its logits (an argmax, a look-up) must come without them.

    Args:
        target_logits: row i [V] is the target's, after the context and the first i drafts; i = 0..k. Rows are asked for
            in order and only as far as the drafts are accepted.
        request: with `draft_tokens` [k]; both models' logits go through its sampling rule, in the same context.
        uniforms: the random numbers; those of the request's seed by default.

    Raises:
        ValueError: no draft tokens in the request, draft logits of another number, or logits without a distribution.
    """
    if request.draft_tokens is None:
        raise ValueError("draft_tokens: missing in a verification call")
    drafts = [int(token) for token in request.draft_tokens]
    draft_logits = None if request.sampling.greedy else request.draft_logits
    if draft_logits is not None and len(draft_logits) != len(drafts):
        raise ValueError(f"draft_logits: {len(draft_logits)} rows for {len(drafts)} draft tokens")

    sampler = TokenSampler(request, uniforms)
    log_probs: list[float] = []
    num_accepted = 0
    for position, draft in enumerate([*drafts, None]):  # None: the bonus token, when all drafts were accepted
        row = target_logits[position]
        if draft is None or draft_logits is None:
            token = sampler.next(row)
        else:
            token = accept_or_resample(
                draft,
                sampler.probabilities(row),
                sampler.probabilities(draft_logits[position]),
                position,
                sampler.uniforms,
            )
        if request.return_log_probs:
            log_probs.append(sampler.log_probability(row, token))
        sampler.append(token)
        num_accepted += token == draft
        if token != draft or sampler.finished:
            break
    return Verification(
        tokens=tuple(sampler.tokens),
        num_accepted=num_accepted,
        log_probs=tuple(log_probs) if request.return_log_probs else None,
        ended=len(sampler.tokens) < num_accepted + 1,
    )


def accept_or_resample(
    draft: int, p: NDArray[np.float64], q: NDArray[np.float64], position: int, uniforms: Uniforms
) -> int:
    """The draft token, or its replacement; distributed as p when the draft token was drawn from q.

    Args:
        draft: the draft token.
        p: [V], the target's distribution.
        q: [V'], the distribution that `draft` was drawn from; a shorter or longer vocabulary has probability 0 beyond.
        position: of the token in the call.
        uniforms: random numbers.
    """
    if keeps_draft(draft, p, q, position, uniforms):
        return draft
    return uniforms.draw(position, residual(p, q))


def keeps_draft(
    draft: int, p: NDArray[np.float64], q: NDArray[np.float64], position: int, uniforms: Uniforms, attempt: int = 0
) -> bool:
    """Whether the draft token is accepted: with min(1, p / q). `attempt` counts what was tried before it here."""
    p_draft = p[draft] if draft < len(p) else 0.0
    q_draft = q[draft] if draft < len(q) else 0.0
    # q <= p: the draft model says this token too seldom, always accept. q > p: too often, accept with p / q.
    # Either way min(p, q) of the token's probability comes from accepted drafts.
    return bool(p_draft > 0.0 and (q_draft <= p_draft or uniforms.accepts(position, p_draft / q_draft, attempt)))


def residual(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """[V], the distribution to go on with after a rejection."""
    # What is missing to p is max(0, p - q), and exactly its sum of drafts was rejected.
    missing = p.copy()
    shared = min(len(p), len(q))
    missing[:shared] -= q[:shared]
    np.maximum(missing, 0.0, out=missing)
    total = missing.sum()
    return missing / total if total > 0.0 else p  # p equals q up to rounding
