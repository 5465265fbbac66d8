"""Stage 2 of distillation: train the draft's layers on the target's recorded distributions.

The draft is a Llama with a few of the target's layers, the target's embedding (frozen) and a head reduced to the ids
that the target uses most. The loss is the cross-entropy with the recorded top-k probabilities. Checkpoints hold all
that a restart needs. Does not know where answers come from, nor how a draft is stored.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.runtime.llama import Llama

HELD_OUT = 40  # every so-manieth prompt is kept for validation


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


class Trainer:
    """Trains the layers and the last norm of a draft with AdamW.

    Args:
        config: the draft's.
        weights: see `initial_weights`; the frozen ones are shared, the others become parameters.
        samples: recorded answers.
        batch_tokens: padded tokens a step.
        lr: peak learning rate; it warms up over 2 % of the run and falls to zero with a cosine.
    """

    def __init__(
        self, config: ModelConfig, weights: dict[str, torch.Tensor], samples: Sequence[Sample], *,
        batch_tokens: int = 1024, lr: float = 3e-3, seed: int = 0,
    ) -> None:  # fmt: skip
        if not samples:
            raise TrtspecError("no recorded answers to train on", fix="raise --tokens")
        self.parameters = {name: torch.nn.Parameter(tensor) for name, tensor in weights.items() if name not in FROZEN}
        self.model = Llama(config, {**weights, **self.parameters})
        groups = [
            {"params": [p for p in self.parameters.values() if p.ndim == 2], "weight_decay": 0.3},
            {"params": [p for p in self.parameters.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
        self.lr = lr
        self.held_out = [s for s in samples if s.index % HELD_OUT == 0]
        self.samples = [s for s in samples if s.index % HELD_OUT]
        self.batch_tokens, self.seed = batch_tokens, seed
        self.step = 0
        self.seconds = 0.0  # of training, over all restarts

    def train(
        self,
        *,
        steps: int | None = None,
        minutes: float | None = None,
        report: Callable[[int, float, float], None] = lambda step, done, loss: None,
        checkpoint: Path | None = None,
        checkpoint_every: float = 60.0,
    ) -> None:
        """Train until `steps` steps or `minutes` minutes of training are done, whichever comes first.

        Args:
            report: called after each step with the step, the share of the run that is done, and the loss.
            checkpoint: written every `checkpoint_every` seconds and at the end; read first if it is there.
        """
        if checkpoint and checkpoint.exists():
            self._load(checkpoint)
        saved = clock = time.monotonic()
        for batch in self._batches():
            done = max(self.step / steps if steps else 0.0, self.seconds / 60 / minutes if minutes else 0.0)
            if done >= 1.0:
                break
            rate = min(1.0, done / 0.02) if done < 0.02 and self.step < 200 else 0.5 * (1 + math.cos(math.pi * done))
            loss = self._update(batch, max(rate, 0.02))
            now = time.monotonic()
            self.seconds += now - clock
            clock = now
            self.step += 1
            report(self.step, done, loss)
            if checkpoint and now - saved > checkpoint_every:
                self._save(checkpoint)
                saved = now
        if checkpoint:
            self._save(checkpoint)

    def _update(self, batch: list[Sample], rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * rate
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

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

    def _batches(self) -> Iterator[list[Sample]]:
        """Endless batches of samples of like length, in an order fixed by the seed; skips those already done."""
        done = 0
        epoch = 0
        while True:
            rng = random.Random(f"{self.seed}/{epoch}")
            order = rng.sample(self.samples, len(self.samples))
            batches = []
            for begin in range(0, len(order), 256):
                batches += list(self._cut(sorted(order[begin : begin + 256], key=lambda s: len(s.tokens))))
            rng.shuffle(batches)
            for batch in batches:
                if done >= self.step:
                    yield batch
                done += 1
            epoch += 1

    def _cut(self, ordered: list[Sample]) -> Iterator[list[Sample]]:
        batch: list[Sample] = []
        for sample in ordered:
            if batch and (len(batch) + 1) * len(sample.tokens) > self.batch_tokens:
                yield batch
                batch = []
            batch.append(sample)
        if batch:
            yield batch

    def _save(self, path: Path) -> None:
        state: dict[str, Any] = {
            "parameters": {name: p.detach() for name, p in self.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, path)

    def _load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
