"""What can be checked, behind one protocol: it is given a prompt and settings, and answers with token ids and text.

A new kind of subject is one more class with `name` and `generate`. Knows no reference and no check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from trtspec.decoding.cycle import Drafter, Request, generate
from trtspec.decoding.draft_target import Target
from trtspec.decoding.engine_call import EngineCall
from trtspec.decoding.sampling import SamplingParams
from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.triton.client import Client


END = -1  # in a sequence of tokens: an end id, whichever it was


@dataclass(frozen=True)
class Query:
    """One generation asked of a subject.

    Attributes:
        text: the prompt, any chat template already applied.
        ids: the same prompt as token ids.
        max_tokens: longest answer.
        sampling: greedy, or how to draw, with the seed.
        num_draft_tokens: draft tokens a cycle; 0 decodes plainly.
    """

    text: str
    ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    num_draft_tokens: int


@dataclass(frozen=True)
class Answer:
    """What the subject made of it.

    Attributes:
        blocks: ids of the new tokens, one tuple for each time the subject emitted some; without the end id.
        text: text of the answer.
        finish_reason: `stop` (an end id), or `length`.
    """

    blocks: tuple[tuple[int, ...], ...]
    text: str
    finish_reason: str

    @property
    def ids(self) -> tuple[int, ...]:
        """All new tokens, without the end id."""
        return tuple(token for block in self.blocks for token in block)

    @property
    def tokens(self) -> tuple[int, ...]:
        """What was chosen: the ids, and `END` where an end id was chosen last."""
        return (*self.ids, END) if self.finish_reason == "stop" else self.ids


class Subject(Protocol):
    """Anything that generates."""

    name: str

    def generate(self, query: Query) -> Answer:
        """The whole answer to one query.

        Raises:
            TrtspecError: the subject cannot answer.
        """
        ...


class InProcess:
    """The target's engine, a drafter and the decoding cycle in this process.

    Args:
        target: its engine.
        make_drafter: makes the drafter of one answer; None: every query is decoded plainly.
        end_ids: ids that end an answer.
        decode: ids to text.
        continuation_ids: see `trtspec.decoding.detokenize.continuation_ids`.
        contexts: tokens that the target can hold, and what proposes to it.
    """

    name = "engines"

    def __init__(
        self,
        target: EngineCall,
        make_drafter: Callable[[], Drafter] | None,
        *,
        end_ids: Sequence[int],
        decode: Callable[[list[int]], str],
        continuation_ids: Sequence[int] = (),
        contexts: tuple[int | None, int | None] = (None, None),
    ) -> None:
        self._target = Target(target)
        self._make_drafter = make_drafter
        self._end_ids = tuple(end_ids)
        self._decode = decode
        self._continuation_ids = tuple(continuation_ids)
        self._contexts = contexts

    def generate(self, query: Query) -> Answer:
        """See `Subject.generate`."""
        request = Request(
            prompt_ids=np.asarray(query.ids, dtype=np.int32),
            max_tokens=query.max_tokens,
            sampling=query.sampling,
            end_ids=self._end_ids,
            num_draft_tokens=query.num_draft_tokens if self._make_drafter else 0,
            target_context=self._contexts[0],
            draft_context=self._contexts[1],
        )
        drafter = self._make_drafter() if self._make_drafter else None
        blocks = list(
            generate(request, drafter, self._target, decode=self._decode, continuation_ids=self._continuation_ids)
        )
        if error := blocks[-1].generation.draft_error:
            raise TrtspecError(f"the draft engine failed: {error}", fix="build it again, or lower num_draft_tokens")
        return Answer(
            blocks=tuple(block.token_ids for block in blocks),
            text="".join(block.text for block in blocks),
            finish_reason=str(blocks[-1].finish_reason),
        )


class Server:
    """The BLS model of a running Triton server, streamed.

    Args:
        client: a connection to it.
        timeout_s: longest time for one answer, in seconds.
    """

    name = "server"

    def __init__(self, client: Client, timeout_s: float = 600.0) -> None:
        self._client = client
        self._timeout_s = timeout_s

    def generate(self, query: Query) -> Answer:
        """See `Subject.generate`."""
        sampling = query.sampling
        drawn = {} if sampling.greedy else {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or None,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }  # fmt: skip
        chunks = list(
            self._client.generate(
                query.text,
                max_tokens=query.max_tokens,
                num_draft_tokens=query.num_draft_tokens,
                timeout_s=self._timeout_s,
                **drawn,  # type: ignore[arg-type]
            )
        )
        blocks = tuple(tuple(chunk.output_ids) for chunk in chunks if chunk.output_ids is not None)
        stats = chunks[-1].stats
        if stats is None or stats.finish_reason is None or not blocks:
            raise TrtspecError(
                "the server does not report output_ids and finish_reason, which parity compares",
                where=self._client.url,
                fix="serve a repository written by this version: trtspec build CONFIG, then trtspec serve CONFIG",
            )
        return Answer(blocks, "".join(chunk.text for chunk in chunks), stats.finish_reason)
