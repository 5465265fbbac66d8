"""The reference as the checks see it: its logits along somebody's output, what it would choose, how it would draw.

Logits become distributions by the reference sampler's own rule, which shares no code with the decoding core. Knows no
subject and no check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

import numpy as np

from trtspec.decoding.sampling import SamplingParams
from trtspec.parity.result import Choice
from trtspec.parity.subjects import END
from trtspec.runtime.reference import distribution

TOLERANCES = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.5}
"""Largest regret, in logits, that rounding explains, by the dtype of the subject; the reference computes in float32.

Five times the standard deviation of what rounding does to the difference of two logits, and of float32 more, whose sums
differ by the order of adding. Measured on 740 tokens of SmolLM2-135M-Instruct, greedy and drawn, against float32: 0.10
in bfloat16, 0.014 in float16, with the largest regret 0.28 and 0.013, and 2 to 4 % of the tokens ties in bfloat16.
"""


ACTIVATION_TOLERANCES = {"fp8": 3.0, "int8": 3.0}
"""The same for inputs of layers, keys and values that are rounded to a few values, by the type that has these.

Any difference, be it the order in which a pass over several tokens adds up, moves some of them to the next value, and
from layer to layer more of them, until two computations of one checkpoint are nearly as far apart as it is from its
model. Five times the standard deviation again, measured on 132 tokens of SmolLM2-135M-Instruct with fp8 weights,
activations and KV cache: the difference of two logits was off by 0.45 where the same float32 arithmetic took the tokens
one by one, by 0.58 in bfloat16 (largest regret 0.38 and 0.96; other tokens 5 and 8 %), and by 0.67 in the model itself.
Of int8, which is as far from its model (see `checkpoint.BUDGETS`), the same is assumed, not measured.
"""


def tolerance_of(dtype: str, reference_dtype: str = "float32", activations: Collection[str] = ()) -> float:
    """Largest regret that rounding explains where the reference computes in `reference_dtype`.

    Two computations in bfloat16 round independently: the difference of two logits was off by 0.13 between them, and by
    0.10 from float32.

    Args:
        dtype, reference_dtype: keys of `TOLERANCES`.
        activations: keys of `ACTIVATION_TOLERANCES`, those that subject and reference both round to.
    """
    others = [TOLERANCES[reference_dtype]] if reference_dtype != "float32" else []
    others += [ACTIVATION_TOLERANCES[kind] for kind in activations]
    return round(math.hypot(TOLERANCES[dtype], *others), 3) if others else TOLERANCES[dtype]


class Logits(Protocol):
    """A model to compare with."""

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """float32 `[len(ids), vocab]`: row i is what follows `ids[: i + 1]`."""
        ...


@dataclass(frozen=True)
class Yardstick:
    """The reference of one run.

    Attributes:
        target: the model that defines what is right.
        draft: the draft model; orders the transforms (`statistics.odds`), decides nothing. None if there is none.
        vocab_size: ids of the target are below it.
        end_ids: ids that end an answer.
        decode: ids to text, as the subject should do it.
        piece: one id as text that a person can recognise, special tokens too.
        tolerance: largest regret, in logits, that is a tie.
        precision: of the subject: its dtype, or the quantisation of its activations; a key of `checkpoint.BUDGETS`.
    """

    target: Logits
    draft: Logits | None
    vocab_size: int
    end_ids: tuple[int, ...]
    decode: Callable[[list[int]], str]
    piece: Callable[[int], str]
    tolerance: float
    precision: str = "float32"

    @property
    def rounding(self) -> float:
        """Largest standard deviation, in logits, of what rounding does to the difference of two logits.

        Twice what was measured, see `TOLERANCES`: other models and other kernels differ.
        """
        return max(0.4 * self.tolerance, 1e-6)

    @property
    def rounds_activations(self) -> bool:
        """Whether `ACTIVATION_TOLERANCES` are part of the tolerance: too much for tests of how tokens were drawn.

        Of tables of 16 ids whose logits were off by 0.6, as in bfloat16, 2 of 6 right samplers failed with 400 tokens;
        by 0.45, as in float32, 0 of 6, and 1 of 6 with 1 600.
        """
        return self.precision not in TOLERANCES

    def along(self, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Logits float32 `[n, vocab]` of what follows the prompt and each of the tokens.

        One forward pass: the model is forced along the tokens, right or wrong, so that each is judged given those
        before it. Ends (n <= len(tokens) + 1) before what cannot be fed: `END`, or an id that the model does not have.
        """
        return along(self.target, prompt, self._known(tokens))

    def draft_along(self, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray | None:
        """The same of the draft, its vocabulary cut or padded to the target's; None without one."""
        if self.draft is None:
            return None
        rows = along(self.draft, prompt, self._known(tokens))[:, : self.vocab_size]
        return np.pad(rows, ((0, 0), (0, self.vocab_size - rows.shape[1])), constant_values=-np.inf)

    def choice(self, row: np.ndarray, token: int) -> Choice:
        """A token with its text and the reference's logit.

        `END` stands for the best of the end ids; what is no id of the model has logit -inf.
        """
        if token == END and self.end_ids:
            token = max(self.end_ids, key=lambda end_id: float(row[end_id]))
        if not 0 <= token < self.vocab_size:
            return Choice(token, "", -math.inf)
        return Choice(token, self.piece(token), float(row[token]))

    def index(self, token: int) -> int:
        """Where `distribution` has the probability of a token of `Answer.tokens`."""
        return self.end_ids[0] if token == END else token

    def distribution(
        self, row: np.ndarray, context: Sequence[int], sampling: SamplingParams, *, slack: float | None = None
    ) -> np.ndarray:
        """Probabilities float64 `[vocab]` of what follows `context`, all end ids at the first of them.

        Which end id ended an answer is not reported, so they count as one token.

        Args:
            row: logits `[vocab]` after the context.
            context: prompt and output so far.
            sampling: how to draw.
            slack: with it, `widened` settings.
        """
        p = distribution(row, context, sampling if slack is None else widened(row, sampling, slack))
        if self.end_ids:
            total = p[list(self.end_ids)].sum()
            p[list(self.end_ids)] = 0.0
            p[self.end_ids[0]] = total
        return p

    def _known(self, tokens: Sequence[int]) -> list[int]:
        return list(takewhile(lambda token: 0 <= token < self.vocab_size, tokens))


def along(model: Logits, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """Logits float32 `[len(tokens) + 1, vocab]` that one model gives after the prompt and each of the tokens."""
    return model.logits([*prompt, *tokens])[len(prompt) - 1 :]


def widened(row: np.ndarray, sampling: SamplingParams, slack: float) -> SamplingParams:
    """Settings whose top-k and top-p let in what misses their borders by rounding.

    Args:
        row: logits `[vocab]`.
        sampling: the settings.
        slack: how far a token may miss, in logits; of the probability, as much and at most 0.05.
    """
    top_k = sampling.top_k
    if 0 < top_k < len(row):
        border = np.partition(row, len(row) - top_k)[len(row) - top_k]
        top_k = int((row >= border - slack).sum())
    return replace(sampling, top_k=top_k, top_p=min(1.0, sampling.top_p + min(slack, 0.05)))
