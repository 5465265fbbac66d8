"""Three models: a draft proposes to a middle model, and what comes out of that is proposed to the target.

The middle model and its drafter run the same cycle as the target does. Its output has exactly the middle model's
distribution, however good the draft is, so it may be proposed with the middle model's logits as what it was drawn
from, and the target's output is exact again. Knows engines by `EngineCall` alone; a drafter that is itself a cascade
makes four models or more.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .cycle import Drafter, Generation, Proposal, generate
from .draft_target import AcceptanceMode, Target, proposed
from .engine_call import Cancelled, EngineCall, EngineRequest, EngineResult
from .request import Request
from .sampling import derive_seed
from .verify import Verification

NUM_DRAFT_TOKENS = 3  # from draft to middle model, where nobody says otherwise
_MAX_DRAFT_ERRORS = 2  # without a cycle of drafts free of them in between; each may have cost a whole time-out


class Cascade:
    """Drafter: a middle model with a drafter of its own. Serves one request.

    When its drafter fails, the middle model proposes alone; when the middle model fails, that is an error of this
    drafter, and the target goes on alone.

    Args:
        drafter: proposes to the middle model.
        middle: engine of the middle model.
        num_draft_tokens: most tokens proposed to the middle model in one of its passes.
        acceptance: how the target accepts what the middle model proposes, see `DraftModel`.
        draft_context: tokens that `drafter` can hold; None for no limit. The middle model's own limit is the
            request's `draft_context`.
        role: the middle model's name in errors.
    """

    def __init__(
        self,
        drafter: Drafter,
        middle: EngineCall,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        *,
        acceptance: AcceptanceMode = "auto",
        draft_context: int | None = None,
        role: str = "middle",
    ) -> None:
        self._drafter = drafter
        self._middle = middle
        self._num_draft_tokens = num_draft_tokens
        self._acceptance = acceptance
        self._draft_context = draft_context
        self._role = role
        self._draft_errors = 0

    def propose(self, generation: Generation, num_draft_tokens: int) -> Proposal:
        """Continue the context with the middle model; its counters are added to `generation.draft_acceptance`."""
        outer, context = generation.request, generation.context
        drawn = not outer.sampling.greedy and self._acceptance != "tokens"
        # Tokens that are drawn are drawn with all end ids banned, from first to last: see `DraftModel`. A greedy
        # proposal may end; the target then finds the end by itself in the same pass.
        min_tokens = num_draft_tokens if drawn else outer.min_tokens - generation.num_generated
        middle = _Recorded(self._middle, with_logits=drawn)
        inner = Request(
            prompt_ids=context,
            max_tokens=num_draft_tokens,
            min_tokens=min(max(0, min_tokens), num_draft_tokens),
            sampling=replace(
                outer.sampling,
                temperature=outer.sampling.temperature if drawn else 0.0,
                # All seeds of this cycle come from one that no other cycle uses: what the target rejected is drawn
                # again from fresh numbers.
                seed=derive_seed(outer.sampling.seed, 0, f"middle from {len(context)}"),
            ),
            end_ids=outer.end_ids,
            bad_words=outer.bad_words,
            embedding_bias=outer.embedding_bias,
            num_draft_tokens=self._num_draft_tokens,
            draft_context=self._draft_context,
            plain_chunk_tokens=num_draft_tokens,
        )
        drafter = self._drafter if self._draft_errors < _MAX_DRAFT_ERRORS else None
        blocks, error = [], None
        try:
            for block in generate(inner, drafter, Target(middle, self._role), cancelled=generation.cancelled):
                blocks.append(block)
        except Exception as raised:
            # What came before the failing call stands: whether there was such a call depends on what had been drawn,
            # and a proposal that is thrown away because of its tokens no longer has the middle model's distribution.
            if not blocks:
                raise
            error = raised
        if blocks[-1].finish_reason == "cancelled":
            raise Cancelled
        made = blocks[-1].generation
        self._note(made, generation, error)
        if not drawn:
            return Proposal(made.token_ids)
        expected = made.num_generated if error else num_draft_tokens
        return proposed(middle.first(len(blocks)), expected, outer.end_ids, self._acceptance, self._role)

    def learn(self, verification: Verification) -> None:
        """Nothing: both engines find the common beginning of the next context by themselves."""

    def _note(self, made: Generation, outer: Generation, error: Exception | None) -> None:
        """Count what the middle model accepted, and what failed."""
        outer.draft_acceptance += made.acceptance
        if errors := made.fallbacks["draft_error"]:
            self._draft_errors += errors
        elif made.acceptance.num_drafted:
            self._draft_errors = 0
        outer.draft_error = error or made.draft_error or outer.draft_error


class _Recorded:
    """The middle engine, and everything it answered in one cycle."""

    def __init__(self, call: EngineCall, with_logits: bool) -> None:
        self._call = call
        self._with_logits = with_logits
        self._results: list[EngineResult] = []

    def __call__(self, request: EngineRequest) -> EngineResult:
        result = self._call(replace(request, return_generation_logits=self._with_logits))
        self._results.append(result)
        return result

    def first(self, count: int) -> EngineResult:
        """The first `count` answers as one: ids [n], logits [n, V] where all of them had some."""
        results = self._results[:count]
        logits = [result.generation_logits for result in results]
        return EngineResult(
            np.concatenate([result.output_ids for result in results]),
            None if any(rows is None for rows in logits) else np.concatenate(logits),  # type: ignore[arg-type]
        )
