"""What can be checked, behind one protocol: it is given a prompt and settings, and answers with token ids and text.

A new kind of subject is one file here: a class with `name` and `generate`. Knows no reference and no check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trtspec.decoding.sampling import SamplingParams
from trtspec.errors import TrtspecError

END = -1  # in a sequence of tokens: an end id, whichever it was


class Unsupported(TrtspecError):
    """A subject cannot honour what a query asks for; what was to be checked with it is not applicable there."""


class Lost(TrtspecError):
    """A subject, or its draft engine, is gone, such as a server without a connection: the run ends."""


@dataclass(frozen=True)
class Word:
    """A word as text, and the token ids that a subject bans for it."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Query:
    """One generation asked of a subject.

    A subject honours every field or raises `Unsupported`; it ignores none.

    Attributes:
        text: the prompt, any chat template already applied.
        ids: the same prompt as token ids.
        max_tokens: longest answer.
        sampling: greedy, or how to draw, with the seed and the penalties.
        num_draft_tokens: draft tokens a cycle; 0 decodes plainly. An engine that drafts by itself is not told.
        min_tokens: no end id comes before so many tokens.
        stop: texts that end the answer and are no part of it.
        bad_words: words that must not come.
        end_ids: ids that end the answer instead of the model's own.
        stream: block by block, else in one piece.
        logits, log_probs: asks for those of the new tokens.
    """

    text: str
    ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    num_draft_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    bad_words: tuple[Word, ...] = ()
    end_ids: tuple[int, ...] | None = None
    stream: bool = True
    logits: bool = False
    log_probs: bool = False


@dataclass(frozen=True)
class Counts:
    """What a subject says of its own work on one query; None: it does not say.

    Attributes:
        input_tokens, output_tokens: of the prompt, and generated.
        drafted, accepted: draft tokens proposed and accepted.
        target_passes: forward passes of the target that verified or generated.
        accepted_per_pass: accepted drafts of each pass that verified some, in order.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    target_passes: int | None = None
    accepted_per_pass: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Draw:
    """How one token was drawn.

    Attributes:
        token: its id.
        draft: the draft token that stood in its place; None where none did.
        accept, choose: the uniform numbers for accepting a draft and for choosing a token; which of them counted, the
            rule says.
        p, q: probability of `draft` in the target and in the draft model; None without it, and q None where drafts are
            accepted by equality.
        low, high: `token` is chosen where low <= `choose` < high, of the residual where a draft is rejected.
    """

    token: int
    draft: int | None
    accept: float
    choose: float
    p: float | None
    q: float | None
    low: float
    high: float


@dataclass(frozen=True)
class Cycle:
    """One call of the target's engine, told so that it can be gone through by hand; see `trtspec.parity.replay`.

    Attributes:
        position: tokens of prompt and output before it.
        drafts: draft tokens that it verified.
        tokens: what came out, an end id included; the answer may use fewer.
        accepted: drafts among them.
        draws: one for each of `tokens`, where the subject's random numbers and logits are known.
    """

    position: int
    drafts: tuple[int, ...]
    tokens: tuple[int, ...]
    accepted: int
    draws: tuple[Draw, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What the subject made of a query.

    Attributes:
        blocks: ids of the new tokens, one tuple for each time the subject emitted some; without the end id.
        text: text of the answer.
        finish_reason: `stop` (an end id, or a text of `Query.stop`), or `length`.
        pieces: the text as it was streamed, one piece a message.
        counts: the subject's own figures.
        logits: float32 `[n, vocab]` for the new tokens, where they were asked for.
        log_probs: natural logarithm, one a new token, where they were asked for.
        cycles: how it came about, of a subject that can tell; for traces, checks need not look at it.
    """

    blocks: tuple[tuple[int, ...], ...]
    text: str
    finish_reason: str
    pieces: tuple[str, ...] = ()
    counts: Counts = Counts()
    logits: NDArray[np.float32] | None = None
    log_probs: tuple[float, ...] | None = None
    cycles: tuple[Cycle, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """All new tokens, without the end id."""
        return tuple(token for block in self.blocks for token in block)

    @property
    def tokens(self) -> tuple[int, ...]:
        """What was chosen: the ids, and `END` where an end id was chosen last; of a query without `Query.stop`."""
        return (*self.ids, END) if self.finish_reason == "stop" else self.ids


class Subject(Protocol):
    """Anything that generates. `generate` is called from several threads at once by checks that want company."""

    name: str

    def generate(self, query: Query) -> Answer:
        """The whole answer to one query.

        Raises:
            Unsupported: it cannot honour this query.
            TrtspecError: it cannot answer at all.
        """
        ...
