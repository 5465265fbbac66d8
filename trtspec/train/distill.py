"""Stage 2 of distillation: train the draft's layers on the target's recorded distributions.

The draft is a Llama with a few of the target's layers, the target's embedding (frozen) and a head reduced to the ids
that the target uses most. The loss is the cross-entropy with the recorded top-k probabilities. Checkpoints hold all
that a restart needs. Does not know where answers come from, nor how a draft is stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from trtspec.models.config import ModelConfig
from trtspec.runtime.llama import Llama
from trtspec.train.loop import TrainingLoop


@dataclass(frozen=True)
class Sample:
    """One recorded answer.

    Attributes:
        tokens: int64 `[L]`, prompt and answer.
        prompt_len: tokens of the prompt.
        rows: int64 `[A, k]`, head rows of the target's likeliest tokens at each answer token, -1 outside the head.
        probs: float32 `[A, k]`, their probabilities, 0 outside the head.
    """

    index: int
    tokens: torch.Tensor
    prompt_len: int
    rows: torch.Tensor
    probs: torch.Tensor


def head_ids(shards: Sequence[Path], vocab_size: int, size: int) -> torch.Tensor:
    """Ids of the `size` tokens with the largest recorded probability mass, ascending int64."""
    from safetensors.torch import load_file

    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for shard in shards:
        data = load_file(shard)
        mass.index_add_(0, data["top_ids"].flatten().long(), data["top_logprobs"].double().exp().flatten())
    return mass.topk(min(size, vocab_size)).indices.sort().values


def load_samples(shards: Sequence[Path], ids: torch.Tensor, vocab_size: int) -> list[Sample]:
    """Read shards, with token ids of the distributions mapped to rows of the head `ids`."""
    from safetensors.torch import load_file

    row_of = torch.full((vocab_size,), -1, dtype=torch.int64)
    row_of[ids] = torch.arange(len(ids))
    samples = []
    for shard in shards:
        data = load_file(shard)
        lengths, prompts = data["length"].tolist(), data["prompt_len"].tolist()
        answers = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
        rows = row_of[data["top_ids"].long()]
        probs = data["top_logprobs"].float().exp() * (rows >= 0)
        for fields in zip(
            data["index"].tolist(), data["tokens"].long().split(lengths), prompts, rows.split(answers),
            probs.split(answers), strict=True,
        ):  # fmt: skip
            samples.append(Sample(*fields))
    return samples


def draft_config(target: ModelConfig, layers: int) -> ModelConfig:
    """The target's config with fewer layers and a head of its own."""
    return dataclasses.replace(target, num_hidden_layers=layers, tie_word_embeddings=False, dtype="bfloat16")


def initial_weights(target: dict[str, torch.Tensor], layers: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Draft weights under TensorRT-LLM names: the target's first layers, its embedding, and its head rows `ids`.

    The last norm is scaled down to a quarter: it was made for states that have passed all layers, and on those of the
    first ones it gives logits so large that training would begin by unlearning them (loss 17 instead of 7).
    """
    weights = {"transformer.ln_f.weight": 0.25 * target["transformer.ln_f.weight"]}
    for layer in range(layers):
        prefix = f"transformer.layers.{layer}."
        weights |= {name: tensor.clone() for name, tensor in target.items() if name.startswith(prefix)}
    weights["transformer.vocab_embedding.weight"] = target["transformer.vocab_embedding.weight"]
    weights["lm_head.weight"] = target["lm_head.weight"][ids]
    weights["d2t"] = (ids - torch.arange(len(ids))).int()
    return weights


FROZEN = ("transformer.vocab_embedding.weight", "lm_head.weight", "d2t")


class Trainer(TrainingLoop[Sample]):
    """Trains the layers and the last norm of a draft.

    Args:
        config: the draft's.
        weights: see `initial_weights`; the frozen ones are shared, the others become parameters.
        samples: recorded answers.
        batch_tokens, lr, seed: see `TrainingLoop`.
    """

    def __init__(
        self, config: ModelConfig, weights: dict[str, torch.Tensor], samples: Sequence[Sample], *,
        batch_tokens: int = 1024, lr: float = 3e-3, seed: int = 0,
    ) -> None:  # fmt: skip
        parameters = {name: torch.nn.Parameter(tensor) for name, tensor in weights.items() if name not in FROZEN}
        super().__init__(parameters, samples, batch_tokens=batch_tokens, lr=lr, weight_decay=0.3, seed=seed)
        self.model = Llama(config, {**weights, **parameters})

    def loss(self, batch: list[Sample]) -> torch.Tensor:
        """Mean cross-entropy of the draft with the target's probabilities, renormalised over head and top-k."""
        logits = self.logits(batch)
        rows = torch.cat([s.rows for s in batch])
        probs = torch.cat([s.probs for s in batch])
        weight = probs.sum(dim=-1)
        picked = logits.gather(1, rows.clamp_min(0)) - logits.logsumexp(dim=-1, keepdim=True)
        # A token whose distribution lies outside the head teaches nothing: its weight is its mass inside.
        return -(probs * picked).sum() / weight.sum()

    def logits(self, batch: list[Sample]) -> torch.Tensor:
        """Head logits `[answer tokens of the batch, rows of the head]` at the positions that predict them."""
        longest = max(len(s.tokens) for s in batch) - 1  # the last token predicts nothing
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, sample in enumerate(batch):
            ids[row, : len(sample.tokens) - 1] = sample.tokens[:-1]
        hidden = self.model.hidden(ids, None, 0)
        wanted = torch.cat([hidden[row, s.prompt_len - 1 : len(s.tokens) - 1] for row, s in enumerate(batch)])
        return F.linear(wanted, self.model.weights["lm_head.weight"])

    def length(self, sample: Sample) -> int:
        """Positions that a sample takes in a batch."""
        return len(sample.tokens)

    @torch.no_grad()
    def validate(self, limit: int = 64) -> dict[str, float]:
        """On prompts kept aside: loss, agreement of the two argmaxes, and expected overlap of the distributions."""
        kept = self.held_out[:limit]
        loss = agree = overlap = total = 0.0
        for begin in range(0, len(kept), 8):
            batch = kept[begin : begin + 8]
            logits = self.logits(batch)
            rows, probs = torch.cat([s.rows for s in batch]), torch.cat([s.probs for s in batch])
            loss += float(self.loss(batch)) * len(rows)
            agree += float((logits.argmax(dim=-1) == rows[:, 0]).sum())
            overlap += float(torch.minimum(logits.softmax(dim=-1).gather(1, rows.clamp_min(0)), probs).sum())
            total += len(rows)
        total = max(total, 1.0)
        return {"loss": loss / total, "agreement": agree / total, "overlap": overlap / total}
