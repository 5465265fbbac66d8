"""The engines of a spec, run in this process through the decoding core's own cycle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trtspec.decoding.cycle import Block, Drafter, Request, generate
from trtspec.decoding.draft_target import Target
from trtspec.decoding.engine_call import EngineCall, EngineError, EngineRequest, EngineResult
from trtspec.decoding.sampler import TokenSampler
from trtspec.decoding.sampling import Uniforms
from trtspec.decoding.token_tree import TokenTree
from trtspec.decoding.verify import residual
from trtspec.errors import TrtspecError
from trtspec.parity.subjects import Answer, Counts, Cycle, Draw, Lost, Query, Unsupported


class InProcess:
    """The target's engine, a drafter and the decoding cycle in this process.

    Args:
        target: its engine.
        make_drafter: makes the drafter of one answer; None: every query is decoded plainly.
        end_ids: ids that end an answer.
        decode: ids to text.
        continuation_ids: see `trtspec.decoding.detokenize.continuation_ids`.
        contexts: tokens that the target can hold, and what proposes to it.
        name: of the subject.
        logits: whether the target's engine can return generation logits.
        uniforms: from the seed of a call to the random numbers that the target's engine draws with; None: not known.
        drafts_itself: the target's engine has a drafter inside, so that its passes are not seen.
        plain_chunk_tokens: tokens asked of the target in one call when nothing is drafted; None: all of them.
    """

    def __init__(
        self,
        target: EngineCall,
        make_drafter: Callable[[], Drafter] | None,
        *,
        end_ids: Sequence[int],
        decode: Callable[[list[int]], str],
        continuation_ids: Sequence[int] = (),
        contexts: tuple[int | None, int | None] = (None, None),
        name: str = "engines",
        logits: bool = True,
        uniforms: Callable[[int], Uniforms] | None = None,
        drafts_itself: bool = False,
        plain_chunk_tokens: int | None = 8,
    ) -> None:
        self.name = name
        self._target = target
        self._make_drafter = make_drafter
        self._end_ids = tuple(end_ids)
        self._decode = decode
        self._continuation_ids = tuple(continuation_ids)
        self._contexts = contexts
        self._logits = logits
        self._uniforms = uniforms
        self._drafts_itself = drafts_itself
        self._plain_chunk_tokens = plain_chunk_tokens

    def generate(self, query: Query) -> Answer:
        """See `Subject.generate`."""
        if query.logits and not self._logits:
            raise Unsupported(
                "the target's engine was built without generation logits",
                fix="build it with engine.gather_generation_logits: true",
            )
        drafter = self._make_drafter() if self._make_drafter else None
        # Logits are asked for to explain a draw, too.
        explained = None if query.sampling.greedy or self._drafts_itself else self._uniforms
        target = _Watched(self._target, query.logits or (self._logits and explained is not None), explained)
        try:
            blocks = list(
                generate(
                    self._request(query),
                    drafter,
                    Target(target),
                    decode=self._decode,
                    continuation_ids=self._continuation_ids,
                )
            )
        except (ValueError, EngineError) as error:
            raise TrtspecError(str(error), where=self.name) from error
        if failure := blocks[-1].generation.draft_error:
            raise Lost(f"the draft engine failed: {failure}", fix="build it again, or lower num_draft_tokens")
        token_ids = tuple(block.token_ids for block in blocks)
        return Answer(
            blocks=token_ids,
            text="".join(block.text for block in blocks),
            finish_reason=str(blocks[-1].finish_reason),
            pieces=tuple(block.text for block in blocks)
            if query.stream
            else ("".join(block.text for block in blocks),),
            counts=self._counts(len(query.ids), blocks, target),
            logits=target.logits(sum(map(len, token_ids))) if query.logits else None,
            log_probs=tuple(value for block in blocks for value in block.log_probs or ()) if query.log_probs else None,
            cycles=() if self._drafts_itself else tuple(target.cycles),
        )

    def _request(self, query: Query) -> Request:
        return Request(
            prompt_ids=np.asarray(query.ids, dtype=np.int32),
            max_tokens=query.max_tokens,
            min_tokens=query.min_tokens,
            sampling=query.sampling,
            end_ids=self._end_ids if query.end_ids is None else query.end_ids,
            stop_strings=query.stop,
            bad_words=tuple(word.ids for word in query.bad_words),
            num_draft_tokens=query.num_draft_tokens if self._make_drafter else 0,
            target_context=self._contexts[0],
            draft_context=self._contexts[1],
            plain_chunk_tokens=self._plain_chunk_tokens or query.max_tokens,
            return_log_probs=query.log_probs,
        )

    def _counts(self, input_tokens: int, blocks: Sequence[Block], target: _Watched) -> Counts:
        generation = blocks[-1].generation
        if self._drafts_itself:
            return Counts(input_tokens, generation.num_generated, target.num_drafted, target.num_accepted)
        return Counts(
            input_tokens=input_tokens,
            output_tokens=generation.num_generated,
            drafted=generation.acceptance.num_drafted,
            accepted=generation.acceptance.num_accepted,
            target_passes=generation.acceptance.num_target_passes,
            accepted_per_pass=tuple(cycle.accepted for cycle in target.cycles if cycle.drafts),
        )


class _Watched:
    """The target's engine during one answer, and what was seen of its calls.

    Args:
        call: the engine.
        logits: asks for generation logits.
        uniforms: see `InProcess`.
    """

    def __init__(self, call: EngineCall, logits: bool, uniforms: Callable[[int], Uniforms] | None) -> None:
        self.cycles: list[Cycle] = []
        self.num_drafted = self.num_accepted = 0  # as the engine says
        self._call = call
        self._wants_logits = logits
        self._uniforms = uniforms
        self._rows: list[NDArray[np.float32] | None] = []

    def __call__(self, request: EngineRequest) -> EngineResult:
        asked = replace(request, return_generation_logits=True) if self._wants_logits else request
        result = self._call(asked)
        if request.return_log_probs and result.log_probs is None:
            raise Unsupported("the target's engine returns no log probabilities")
        self.num_drafted += result.num_draft_tokens
        self.num_accepted += result.num_accepted
        tokens = [int(token) for token in result.output_ids]
        drafts = () if request.draft_tokens is None else tuple(request.draft_tokens.tolist())
        parents, rows = request.draft_parents, result.generation_logits
        chain = np.arange(-1, len(drafts) - 1)
        path = TokenTree(np.array(drafts, dtype=np.int32), chain if parents is None else parents).follow(tokens)
        if parents is not None and rows is not None:  # one after each node
            rows = rows[[0, *(node + 1 for node in path)]]
        self._rows.append(None if rows is None else np.asarray(rows[: len(tokens)], dtype=np.float32))
        draws: tuple[Draw, ...] = ()
        if self._uniforms is not None and parents is None and rows is not None and _fits(tokens, rows):
            draws = explained(request, tokens, rows, self._uniforms(request.sampling.seed))
        self.cycles.append(Cycle(len(request.input_ids), drafts, tuple(tokens), len(path), draws))
        return result

    def logits(self, num_tokens: int) -> NDArray[np.float32]:
        """float32 `[n, vocab]` of the first `num_tokens` new tokens, or of as many as there are."""
        rows = [rows for rows in self._rows if rows is not None]
        if len(rows) < len(self._rows):
            raise Unsupported("the target's engine returns no generation logits where it verifies drafts")
        return np.concatenate(rows)[:num_tokens]


def _fits(tokens: Sequence[int], rows: NDArray[np.floating]) -> bool:
    """Whether there is a row for each token, and a place in it."""
    return len(rows) >= len(tokens) and all(0 <= token < rows.shape[1] for token in tokens)


def explained(
    request: EngineRequest, tokens: Sequence[int], rows: NDArray[np.floating], uniforms: Uniforms
) -> tuple[Draw, ...]:
    """How the tokens of one call were drawn, if the rule of `trtspec.decoding.verify` was followed.

    Args:
        request: a sampled call, its drafts a chain.
        tokens: what came out.
        rows: logits `[len(tokens), vocab]` that they were chosen from.
        uniforms: the call's random numbers.
    """
    sampler, draws = TokenSampler(request, uniforms), []
    drafts = [] if request.draft_tokens is None else request.draft_tokens.tolist()
    for position, (token, row) in enumerate(zip(tokens, rows, strict=False)):
        p = chosen_from = sampler.probabilities(row)
        draft = drafts[position] if position < len(drafts) else None
        q_draft = None
        if draft is not None and request.draft_logits is not None:
            q = sampler.probabilities(request.draft_logits[position])
            q_draft = float(q[draft]) if draft < len(q) else 0.0
            chosen_from = residual(p, q)
        total = chosen_from.sum()
        low = float(chosen_from[:token].sum() / total)
        draws.append(
            Draw(
                token=token,
                draft=draft,
                accept=uniforms.at(position, "accept"),
                choose=uniforms.at(position, "token"),
                p=None if draft is None else float(p[draft]) if draft < len(p) else 0.0,
                q=q_draft,
                low=low,
                high=low + float(chosen_from[token] / total),
            )
        )
        sampler.append(token)
    return tuple(draws)
