"""Medusa heads in a checkpoint: their names in TensorRT-LLM, and each rank's share of them.

Does not know their files (see `trtspec.models.medusa`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtspec.errors import TrtspecError
from trtspec.models.medusa import MedusaHeads, open_medusa
from trtspec.trtllm.convert.vocabulary import full_head, vocabulary_shard

if TYPE_CHECKING:
    import torch

    from trtspec.models.source import ModelSource
    from trtspec.trtllm.convert import ConversionJob


@dataclass(frozen=True)
class CheckpointHeads:
    """The heads of one job.

    Attributes:
        heads: on disk.
        num_heads: how many of them are used, from the first.
        shared_output: `[vocab, hidden]`, the target's head, where they have none of their own.
        dtype: type of their weights in the checkpoint.
        tensor_parallel: GPUs that they are split over.
    """

    heads: MedusaHeads
    num_heads: int
    shared_output: torch.Tensor | None
    dtype: torch.dtype
    tensor_parallel: int

    def shard(self, rank: int) -> dict[str, torch.Tensor]:
        """What one rank holds: its rows of every linear and of every output matrix."""
        tensors: dict[str, torch.Tensor] = {}
        for head in range(self.num_heads):
            for layer in range(self.heads.num_layers):
                name = f"medusa_heads.{head}.medusa_layers.{layer}.linear"
                for kind, tensor in zip(("weight", "bias"), self.heads.linear(head, layer), strict=True):
                    rows = tensor.shape[0] // self.tensor_parallel
                    tensors[f"{name}.{kind}"] = tensor[rank * rows : (rank + 1) * rows].to(self.dtype).clone()
            output = self.heads.output(head)
            if output is None:
                output = self.shared_output
            assert output is not None
            shard = vocabulary_shard(output, self.tensor_parallel, rank)
            tensors[f"medusa_heads.{head}.lm_head.weight"] = shard.to(self.dtype)
        return tensors


def open_heads(job: ConversionJob, source: ModelSource, note: Callable[[str], None]) -> CheckpointHeads:
    """The heads that the job asks for; says with `note` which output matrices they use.

    Raises:
        TrtspecError: no heads, or heads that do not fit.
    """
    import torch

    settings = job.speculation.medusa
    if settings is None or job.heads_dir is None:
        raise TrtspecError("method medusa without heads", where="speculation.medusa.heads")
    heads = open_medusa(job.heads_dir)
    heads.check(source.config, settings)
    for remark in heads.remarks(settings.num_heads):
        note(remark)
    if not heads.has_own_output:
        note("the checkpoint stores that matrix once more for each Medusa head")
    shared = None if heads.has_own_output else full_head(source)
    return CheckpointHeads(
        heads, settings.num_heads, shared, getattr(torch, job.model.dtype), job.model.tensor_parallel
    )
