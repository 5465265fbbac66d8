"""One forward pass over what several sequences want of it: what the torch runtime computes, and calibration times.

Knows a model, sequences and heads. Does not know requests, threads, or who notes what a sequence has become.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from trtspec.runtime.early_exit import finish
from trtspec.runtime.kv_cache import Sequence
from trtspec.runtime.llama import KVCache, Llama, Span

T = TypeVar("T")


class Calls(Protocol):
    """Calls a function, when and in whatever thread it is to compute."""

    def __call__(self, work: Callable[[], T], /) -> T:
        """What `work` returns or raises."""
        ...


@dataclass(frozen=True)
class Step:
    """What one request wants of a forward pass.

    Attributes:
        sequence: what the tokens follow.
        ids: int32 [n], the tokens.
        num_rows: of how many of the last of them the outcome is wanted.
        head: makes it, of scores [num_rows, rows of the head], or of states [num_rows, hidden] that are not `scored`.
        places: `mask` and `positions` of `Llama.forward`, where the tokens are no chain.
    """

    sequence: Sequence
    ids: NDArray[np.int32]
    num_rows: int
    head: Callable[[torch.Tensor], Any]
    scored: bool = True
    places: dict[str, torch.Tensor] = field(default_factory=dict)


def run_pass(model: Llama, steps: list[Step]) -> list[Any]:
    """The outcome of each step, all in one pass; sequences do not count the tokens yet."""
    with torch.inference_mode():
        if len(steps) == 1:
            states: Iterable[torch.Tensor] = [finish(model, steps[0].sequence, steps[0].ids, steps[0].places)]
        else:
            spans = [Span(len(step.ids), step.sequence.cache, step.sequence.length, **step.places) for step in steps]
            ids = np.concatenate([step.ids for step in steps]).astype(np.int64)
            together = model.hidden_of_spans(torch.from_numpy(ids).to(model.device), spans)
            states = together.split([span.length for span in spans])
        rows = [each[-step.num_rows :] for step, each in zip(steps, states, strict=True)]
        scored = [place for place, step in enumerate(steps) if step.scored]
        if scored:  # the head's weights too are read once
            scores = model.scores(torch.cat([rows[place] for place in scored]))
            pieces = scores.split([steps[place].num_rows for place in scored])
            for place, piece in zip(scored, pieces, strict=True):
                rows[place] = piece
        return [step.head(each) for step, each in zip(steps, rows, strict=True)]


def pass_over(
    model: Llama, caches: Iterable[KVCache], num_tokens: int, start: int, num_rows: int
) -> Callable[[], None]:
    """A pass that can be made again and again, over `num_tokens` made-up tokens of each of some sequences.

    Args:
        model: whose pass.
        caches: one for each sequence, of one row; what they hold is written over from `start` on.
        num_tokens: new ones of each sequence.
        start: how many others each has already.
        num_rows: logits of the last so many tokens come back, as a verification needs them; of 1 the likeliest id.
    """
    head = partial(most_likely if num_rows == 1 else logits, model)
    steps = []
    for row, cache in enumerate(caches):
        sequence = Sequence(cache)
        sequence.length = start
        ids = (np.arange(num_tokens, dtype=np.int32) * 7919 + row + 1) % model.config.vocab_size
        steps.append(Step(sequence, ids, num_rows, head))

    def run() -> None:
        run_pass(model, steps)

    return run


def logits(model: Llama, scores: torch.Tensor) -> NDArray[np.float32]:
    """float32 [n, V], of scores [n, rows of the head]."""
    return model.over_vocabulary(scores).cpu().numpy()


def most_likely(model: Llama, scores: torch.Tensor) -> int | None:
    """The likeliest id of one row of scores, not spread over the vocabulary; None where that is NaN or infinite."""
    value, row = scores.max(dim=-1)
    if not math.isfinite(value.item()):
        return None
    ids = model.head_ids
    return int((row if ids is None else ids[row]).item())
