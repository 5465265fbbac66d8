"""The tensors of a TensorRT-LLM checkpoint as one model that PyTorch can run: ranks merged, weights dequantised.

Knows how the layouts come apart. Knows neither whether a checkpoint is sound (`checkpoint`) nor how a model is run
(`trtspec.runtime.llama`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import safe_open

from trtspec.runtime.weights import ActivationQuantizer, ExecutableWeights
from trtspec.trtllm.checkpoint import FP8, INT8_SQ, W4A8_AWQ, Checkpoint, Linear, global_name, linears

_INPUT_KINDS = {FP8: "fp8", INT8_SQ: "int8", W4A8_AWQ: "fp8"}


def load_weights(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> ExecutableWeights:
    """Every tensor of a sound checkpoint (see `checkpoint.require_sound`), unsplit, in one type.

    The head keeps its padding rows. Heads that only a speculative mode of the engine uses (Medusa, EAGLE, ReDrafter)
    are left out: greedy output does not depend on them.

    Args:
        checkpoint: the checkpoint.
        dtype: of the weights that are computed with; what is stored in this type by one rank is mapped, not copied.
    """
    weights: dict[str, torch.Tensor] = {}
    activations: dict[str, ActivationQuantizer] = {}
    with ExitStack() as stack:
        for stage in range(checkpoint.pp_size):
            first = stage * checkpoint.tp_size
            paths = [checkpoint.rank_file(rank) for rank in range(first, first + checkpoint.tp_size)]
            ranks = _Ranks([stack.enter_context(safe_open(path, framework="pt")) for path in paths])
            for linear in linears(checkpoint, stage):
                if linear.name.startswith("medusa_heads.") or f"{linear.name}.weight" not in ranks.names:
                    continue
                name = global_name(checkpoint, stage, linear.name)
                parts = [_dequantised(checkpoint, linear, part) for part in ranks.parts(linear.name)]
                weights[f"{name}.weight"] = _merged(linear, parts).to(dtype)
                if linear.bias:
                    weights[f"{name}.bias"] = _merged_bias(linear, ranks.all(f"{linear.name}.bias")).to(dtype)
                if (quantizer := _quantizer(checkpoint, linear, ranks)) is not None:
                    activations[name] = quantizer
            for name in ranks.names:
                ours = global_name(checkpoint, stage, name)
                if name.endswith(("layernorm.weight", "ln_f.weight")):
                    weights[ours] = ranks.first(name).to(dtype)
                elif name.endswith(".router.weight"):
                    weights[ours] = ranks.first(name).float()
                elif name.endswith(".kv_cache_scaling_factor"):
                    kind = str(checkpoint.kv_cache_quant_algo).lower()
                    activations[ours.removesuffix("_scaling_factor")] = ActivationQuantizer(
                        kind, ranks.first(name).item()
                    )
                elif name == "transformer.vocab_embedding.weight":
                    weights[ours] = _embedding(checkpoint, ranks.all(name)).to(dtype)
    weights.setdefault("lm_head.weight", weights["transformer.vocab_embedding.weight"])  # tied
    return ExecutableWeights(weights, activations)


class _Ranks:
    """The open files of the ranks of one pipeline stage."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._files = files
        self.names = list(files[0].keys())

    def first(self, name: str) -> torch.Tensor:
        """A tensor that is the same on all ranks."""
        tensor: torch.Tensor = self._files[0].get_tensor(name)
        return tensor

    def all(self, name: str) -> list[torch.Tensor]:
        """Each rank's part of a tensor."""
        return [file.get_tensor(name) for file in self._files]

    def parts(self, module: str) -> list[dict[str, torch.Tensor]]:
        """Each rank's weight of a linear layer, with its scales, by kind."""
        kinds = ("weight", "weights_scaling_factor", "weights_scaling_factor_2")
        return [
            {kind: file.get_tensor(f"{module}.{kind}") for kind in kinds if f"{module}.{kind}" in self.names}
            for file in self._files
        ]


def _dequantised(checkpoint: Checkpoint, linear: Linear, part: dict[str, torch.Tensor]) -> torch.Tensor:
    """One rank's weight `[(experts,) out, in]` as numbers; as it is where it is not quantised."""
    weight, scale = part["weight"], part.get("weights_scaling_factor")
    if scale is None or not checkpoint.quantised(linear.name):
        return weight
    if checkpoint.quant_algo in (FP8, INT8_SQ):
        # scale: [1] or [experts, 1] for a whole matrix, [out] for rows
        rows = scale.float().reshape(*weight.shape[:-2], -1, 1)
        return weight.float() * rows
    values = unpacked(weight).float()
    groups = values.unflatten(-1, (-1, checkpoint.group_size)) * scale.float().unsqueeze(-1)
    result = groups.flatten(-2)
    if (second := part.get("weights_scaling_factor_2")) is not None:
        # W4A8: the product is rounded to fp8 before it meets the inputs, [1] or [experts, 1]
        result = ActivationQuantizer("fp8", second.float().reshape(*weight.shape[:-2], 1, 1))(result)
    return result


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """int8 `[.., out, in]` in -8..7 of `[.., out / 2, in]`: rows 2i and 2i + 1 are the low and high half of a byte."""
    low, high = packed & 15, packed >> 4
    low = torch.where(low > 7, low - 16, low)
    return torch.stack((low, high), dim=-2).flatten(-3, -2)


def _merged(linear: Linear, parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole weight `[(experts,) out, in]` of its ranks' parts."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim=-1) if linear.split == "row" else _joined(linear, parts, dim=-2)


def _merged_bias(linear: Linear, parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole bias `[out]`; that of a row-parallel layer is added once, and stored by every rank."""
    return parts[0] if linear.split == "row" else _joined(linear, parts, dim=-1)


def _joined(linear: Linear, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Output features in their own order again: each rank holds a piece of every block."""
    tp = len(parts)
    sizes = linear.rank_blocks(tp)
    by_block = zip(linear.blocks, sizes, *(part.split(sizes, dim) for part in parts), strict=True)
    # A block of fewer heads than ranks stands several times: every so many ranks there is a new head.
    return torch.cat([piece for block, size, *pieces in by_block for piece in pieces[:: tp * size // block]], dim)


def _quantizer(checkpoint: Checkpoint, linear: Linear, ranks: _Ranks) -> ActivationQuantizer | None:
    """What the engine does to the input of a layer; None if nothing."""
    if not checkpoint.quantised(linear.name):
        return None
    prequant = None
    if (name := f"{linear.name}.prequant_scaling_factor") in ranks.names:
        prequant = (torch.cat(ranks.all(name), dim=-1) if linear.split == "row" else ranks.first(name)).float()
    kind, scale = _INPUT_KINDS.get(str(checkpoint.quant_algo)), 1.0
    if kind is not None:
        scale = ranks.first(f"{linear.name}.activation_scaling_factor").item()
    return ActivationQuantizer(kind, scale, prequant)


def _embedding(checkpoint: Checkpoint, parts: list[torch.Tensor]) -> torch.Tensor:
    """The embedding `[vocab, hidden]` without padding."""
    if not checkpoint.config.get("use_parallel_embedding", False):
        return parts[0]
    whole = torch.cat(parts, dim=1 if checkpoint.config.get("embedding_sharding_dim", 0) else 0)
    return whole[: checkpoint.vocab_size]
