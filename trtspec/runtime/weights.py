"""What a decoder is made of: its tensors, and what an engine does to the inputs of its linear layers.

Knows numbers only; not where they come from, nor the decoder that uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

LARGEST = {"fp8": 448.0, "int8": 127.0}
"""Largest value of float8 e4m3, and of int8 as scales are computed."""


@dataclass(frozen=True)
class ActivationQuantizer:
    """Static quantisation of one tensor, simulated: rounded as the engine rounds, kept in its own type.

    Attributes:
        kind: `fp8` (e4m3) or `int8`; None rounds nothing.
        scale: what one unit of that type stands for; a number, or a tensor that broadcasts.
        prequant: factors `[features]`, or `[experts, features]`, that the activations are multiplied by before.
    """

    kind: str | None = None
    scale: float | torch.Tensor = 1.0
    prequant: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        """The activations `[.., features]` as the layer behind them sees them; for one expert of a stack."""
        if self.prequant is not None:
            x = x * (self.prequant if expert is None else self.prequant[expert]).to(x)
        if self.kind is None:
            return x
        if self.kind == "fp8":
            largest = LARGEST["fp8"]
            return (x / self.scale).clamp(-largest, largest).to(torch.float8_e4m3fn).to(x.dtype) * self.scale
        return (x / self.scale).round().clamp(-128, 127) * self.scale


@dataclass(frozen=True)
class ExecutableWeights:
    """One model, ready for `Llama`.

    Attributes:
        weights: tensors under the names of `trtspec.runtime.llama`, unsplit; the head may keep padding rows.
        activations: what happens in the engine to the input of a linear layer, by its name, and to keys and values,
            by the name `transformer.layers.N.attention.kv_cache`.
    """

    weights: dict[str, torch.Tensor]
    activations: Mapping[str, ActivationQuantizer] = field(default_factory=dict)
