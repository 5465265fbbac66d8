"""Embedding and head in a checkpoint: the whole vocabulary, and what each tensor-parallel rank holds of it.

ModelOpt pads both to a multiple of 64 for AWQ and then calls the padded size the vocabulary, whose last ids could be
drawn. Here the vocabulary keeps its size, and the rows that fill up the last rank are ids that TensorRT-LLM masks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtspec.errors import TrtspecError
from trtspec.models.source import EMBEDDING, ModelSource, SharedDraft

if TYPE_CHECKING:
    import torch


def full_head(source: ModelSource) -> torch.Tensor:
    """`[vocab, hidden]`, the head over all ids; a draft whose head is its target's, reduced, gets the whole of it.

    Raises:
        TrtspecError: a reduced head of its own, which an engine cannot have.
    """
    if isinstance(source, SharedDraft) and "lm_head.weight" not in source.own.tensor_names():
        return full_head(source.target)
    head = source.tensor(EMBEDDING if source.config.tie_word_embeddings else "lm_head.weight")
    if head.shape[0] != source.config.vocab_size:
        raise TrtspecError(
            f"the head has {head.shape[0]} rows for a vocabulary of {source.config.vocab_size}",
            where=str(source.path),
            expected="one row for each id, or the target's own head: engines have no reduced heads",
            fix="set engine.runtime: torch",
        )
    return head


def vocabulary_shard(weight: torch.Tensor, tensor_parallel: int, rank: int) -> torch.Tensor:
    """Rows `[ceil(vocab / tensor_parallel), hidden]` of one rank, filled up with zeros; a tensor of its own."""
    import torch

    rows = -(-weight.shape[0] // tensor_parallel)
    shard = weight[rank * rows : (rank + 1) * rows].clone()
    if missing := rows - shard.shape[0]:
        shard = torch.cat((shard, shard.new_zeros(missing, *shard.shape[1:])))
    return shard
