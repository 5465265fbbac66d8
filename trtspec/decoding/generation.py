"""The state of one request: what was emitted, why it ended, what may come next, and the counters.

Everything that ends or limits an answer is decided here. Knows tokens, text and lengths; not how tokens come about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .acceptance import Acceptance
from .detokenize import Detokenizer
from .engine_call import NO_KV_BLOCKS, Cancelled
from .limits import clamp_num_draft_tokens, emission_limit
from .request import Request
from .stop import StopStrings
from .verify import Proposal, Verification

FinishReason = Literal["stop", "length", "cancelled"]
_MAX_DRAFT_ERRORS = 2  # in a row; each may have cost a whole time-out


@dataclass(frozen=True)
class Block:
    """What one cycle adds to the answer; what a stream sends."""

    text: str  # may be empty while a character or a stop string is still open
    token_ids: tuple[int, ...]  # without end ids
    log_probs: tuple[float, ...] | None  # one a token id, when asked for
    finish_reason: FinishReason | None  # set in the last block, and only there
    generation: Generation = field(repr=False)  # text, ids and counters of the whole generation so far
    logits: NDArray[np.float32] | None = field(default=None, repr=False)  # [tokens, V], when asked for


class Generation:
    """State of one request: what was emitted, why it ended, and the counters.

    Attributes:
        request: the request.
        text: emitted so far, without stop strings.
        finish_reason: None while running.
        cancelled: asked before every engine call.
        kv_blocks: of the target, over all its calls, if the request asks for them.
        draft_limit: most draft tokens of the next cycle, besides what the request says; None: no other limit.
        plain_limit: most tokens to ask of the target in the next cycle if nothing is drafted; None: a chunk.
        acceptance: counters.
        draft_acceptance: counters inside the drafter: how a cascade's middle model accepted; else zeros.
        fallbacks: cycles that the target made without drafts, by reason: `draft_error`, `draft_empty`, `draft_context`
            (its context is full), `draft_given_up` (too many errors before).
        draft_error: what the drafter, or something it drafts with, raised last.
    """

    def __init__(
        self,
        request: Request,
        decode: Callable[[list[int]], str] | None = None,
        continuation_ids: Sequence[int] = (),
        cancelled: Callable[[], bool] = lambda: False,
        *,
        may_draft: bool = True,
    ) -> None:
        if request.stop_strings and decode is None:
            raise ValueError("stop_strings: given without a decoder to find them in the text")
        self.request = request
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.cancelled = cancelled
        self.draft_limit: int | None = None
        self.plain_limit: int | None = None
        self.kv_blocks = NO_KV_BLOCKS
        self.acceptance = Acceptance()
        self.draft_acceptance = Acceptance()
        self.fallbacks: Counter[str] = Counter()
        self.draft_error: Exception | None = None
        self._detokenizer = Detokenizer(decode or (lambda ids: ""), continuation_ids)
        self._stop = StopStrings(request.stop_strings)
        self._may_draft = may_draft and request.num_draft_tokens > 0
        self._draft_errors_in_a_row = 0
        prompt: NDArray[np.int32] = request.prompt_ids  # type: ignore[assignment]  # Request made it one
        self._prompt_length = self._length = len(prompt)
        self._ids = np.concatenate([prompt, np.zeros(self._emission_limit, dtype=np.int32)])

    @property
    def context(self) -> NDArray[np.int32]:
        """[L], prompt and output so far; not to be written to."""
        return self._ids[: self._length]

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[n], output so far, without end ids."""
        return self._ids[self._prompt_length : self._length]

    @property
    def num_generated(self) -> int:
        """Tokens of output so far."""
        return self._length - self._prompt_length

    @property
    def draft_room(self) -> int:
        """Draft tokens that the next cycle has room for."""
        if not self._may_draft or self._gave_up:
            return 0
        most = self.request.num_draft_tokens
        if self.draft_limit is not None:
            most = min(most, self.draft_limit)
        return clamp_num_draft_tokens(most, self._length, self._cycle_limit, self.request.draft_context)

    @property
    def node_room(self) -> int:
        """Nodes of a token tree that the next cycle has room for: each takes a position, accepted or not.

        How many of them may follow each other is `draft_room`: only accepted ones count for the length of the answer.
        """
        request, room = self.request, self.request.num_draft_tokens if self.draft_room else 0
        if request.target_context is not None:
            room = min(room, request.target_context - self._length - 1)
        if request.draft_context is not None:
            room = min(room, request.draft_context - self._length)
        return room

    def num_new_tokens(self, num_drafted: int) -> int:
        """Tokens to ask of the target in the next call, given the number of draft tokens it will verify.

        Without drafts it is a chunk; but just one token when the next cycle may draft again.
        """
        if num_drafted or self.draft_room:
            return num_drafted + 1
        return min(self.plain_limit or self.request.plain_chunk_tokens, self._cycle_limit)

    @property
    def _emission_limit(self) -> int:
        request = self.request
        return emission_limit(self.num_generated, request.max_tokens, self._length, request.target_context)

    @property
    def _cycle_limit(self) -> int:
        # An engine knows one end id and when to allow it. The others are banned like bad words, for a whole call: no
        # call may reach over min_tokens.
        until_min = self.request.min_tokens - self.num_generated
        if until_min > 0 and len(self.request.end_ids) > 1:
            return min(self._emission_limit, until_min)
        return self._emission_limit

    @property
    def _gave_up(self) -> bool:
        return self._draft_errors_in_a_row >= _MAX_DRAFT_ERRORS

    def draft_failed(self, error: Exception) -> None:
        """Note that the drafter raised; after two times in a row it is not asked again."""
        self.draft_error = error
        self._draft_errors_in_a_row += 1
        self.fallbacks["draft_error"] += 1

    def draft_succeeded(self, num_drafted: int) -> None:
        """Note that the drafter answered."""
        self._draft_errors_in_a_row = 0
        if num_drafted == 0:
            self.fallbacks["draft_empty"] += 1

    def raise_if_cancelled(self) -> None:
        """Raises Cancelled when the caller no longer wants the answer."""
        if self.cancelled():
            raise Cancelled

    def commit(self, proposal: Proposal, verification: Verification) -> Block:
        """Take the verified tokens up to the first that ends the generation, and make them text."""
        self._count(len(proposal.tokens), verification)
        self.kv_blocks = verification.kv_blocks.after(self.kv_blocks)
        text, taken, limit = "", 0, self._emission_limit
        for token in verification.tokens:
            if token in self.request.end_ids:
                self.finish_reason = "stop"
                break
            self._ids[self._length] = token
            self._length += 1
            taken += 1
            if self.request.stop_strings:
                text += self._stop.push(self._detokenizer.push([token]))
            if self._stop.stopped:
                self.finish_reason = "stop"
                break
            if taken >= limit:
                self.finish_reason = "length"
                break
        else:
            if verification.ended or not verification.tokens:  # an end id that the engine did not show
                self.finish_reason = "stop"
        if not self.request.stop_strings:  # no token of the block can end it by its text: once for all of them
            text = self._detokenizer.push(verification.tokens[:taken])
        log_probs = None if verification.log_probs is None else verification.log_probs[:taken]
        logits = None if verification.logits is None else verification.logits[:taken]
        return self._block(text, verification.tokens[:taken], log_probs, logits)

    def cancel(self) -> Block:
        """End here."""
        self.finish_reason = "cancelled"
        return self._block("", (), () if self.request.return_log_probs else None)

    def _block(
        self,
        text: str,
        token_ids: tuple[int, ...],
        log_probs: tuple[float, ...] | None,
        logits: NDArray[np.float32] | None = None,
    ) -> Block:
        if self.finish_reason is not None and not self._stop.stopped:
            text += self._stop.push(self._detokenizer.flush()) + self._stop.flush()
        self.text += text
        return Block(text, token_ids, log_probs, self.finish_reason, self, logits)

    def _count(self, num_drafted: int, verification: Verification) -> None:
        if num_drafted:
            self.acceptance.add_step(num_drafted, verification.num_accepted, len(verification.tokens))
            return
        self.acceptance.add_plain(len(verification.tokens))
        if self._may_draft and self._gave_up:
            self.fallbacks["draft_given_up"] += 1
        elif self._may_draft and self.request.draft_context is not None and self._length >= self.request.draft_context:
            self.fallbacks["draft_context"] += 1
