"""Train Medusa heads on the target's recorded hidden states.

Head h sees the state that the target's token i was chosen from, and learns the target's distribution of token i + 1 + h
(Medusa-1 of Cai et al. 2024: the target stays as it is). The loss is the cross-entropy with the recorded top-k
probabilities over the ids that the target uses most and a new random sample of the others, whose logits are raised by
the logarithm of one over the share that is sampled, so that together they stand for all. Does not know where answers
come from, nor how heads are stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from trtspec.runtime.medusa import MedusaHeads, linear_name
from trtspec.train.loop import TrainingLoop

PIECE = 16  # positions of a training sample: a step sees many answers, a little of each
NUM_RANKS = 16  # ranks that are told apart; what ranks lower counts as not found


@dataclass(frozen=True)
class HeadSample:
    """One recorded answer.

    Attributes:
        index: number of its prompt.
        states: bfloat16 `[A, hidden]`; row i is what answer token i was chosen from.
        tokens: int64 `[A]`, the answer.
        rows: int64 `[A, k]`, places among the trained ids of the target's likeliest tokens, -1 outside.
        probs: float32 `[A, k]`, their probabilities, 0 outside.
    """

    index: int
    states: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor
    probs: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that is recorded at each token."""
        return self.states, self.tokens, self.rows, self.probs


def load_head_samples(shards: Sequence[Path], ids: torch.Tensor, vocab_size: int) -> list[HeadSample]:
    """Read shards, with token ids of the distributions mapped to places in `ids` int64 [n]."""
    from safetensors.torch import load_file

    place = torch.full((vocab_size,), -1, dtype=torch.int64)
    place[ids] = torch.arange(len(ids))
    samples = []
    for shard in shards:
        data = load_file(shard)
        lengths, prompts = data["length"].tolist(), data["prompt_len"].tolist()
        answers = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
        texts = [text[n:] for text, n in zip(data["tokens"].long().split(lengths), prompts, strict=True)]
        rows = place[data["top_ids"].long()]
        probs = data["top_logprobs"].float().exp() * (rows >= 0)
        for fields in zip(
            data["index"].tolist(), data["states"].split(answers), texts, rows.split(answers), probs.split(answers),
            strict=True,
        ):  # fmt: skip
            samples.append(HeadSample(*fields))
    return samples


def pieces(sample: HeadSample, num_heads: int) -> list[HeadSample]:
    """An answer in pieces, each with as many tokens behind its positions as the last head looks ahead."""
    return [
        HeadSample(sample.index, *(t[at : at + PIECE + num_heads] for t in sample.tensors))
        for at in range(0, max(len(sample.tokens) - num_heads, 1), PIECE)
    ]


def initial_heads(num_heads: int, num_layers: int, hidden_size: int) -> dict[str, torch.Tensor]:
    """Heads of zeros under TensorRT-LLM names: each begins as the target's own head."""
    shapes = {"weight": (hidden_size, hidden_size), "bias": (hidden_size,)}
    return {
        linear_name(head, layer, kind): torch.zeros(shape)
        for head in range(num_heads)
        for layer in range(num_layers)
        for kind, shape in shapes.items()
    }


class HeadTrainer(TrainingLoop[HeadSample]):
    """Trains heads that share the target's output matrix, which stays as it is.

    Args:
        weights: see `initial_heads`; they become parameters.
        output: float32 `[vocab, hidden]`, the target's.
        ids: int64 [n], the ids that are always in the loss.
        samples: recorded answers.
        dtype: of the large products; parameters and probabilities are float32.
        num_sampled: further ids in the loss of a step.
        batch_tokens, lr, seed: see `TrainingLoop`.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], output: torch.Tensor, ids: torch.Tensor,
        samples: Sequence[HeadSample], *, dtype: torch.dtype = torch.float32,
        num_sampled: int = 256, batch_tokens: int = 512, lr: float = 3e-3, seed: int = 0,
    ) -> None:  # fmt: skip
        parameters = {name: torch.nn.Parameter(tensor) for name, tensor in weights.items()}
        super().__init__(parameters, samples, batch_tokens=batch_tokens, lr=lr, weight_decay=0.01, seed=seed)
        self.heads = MedusaHeads(self.parameters, output)
        self.answers = self.samples
        self.samples = [piece for answer in self.answers for piece in pieces(answer, self.heads.num_heads)]
        others = torch.ones(len(output), dtype=torch.bool)
        others[ids] = False
        self._others = others.nonzero()[:, 0]
        self._num_sampled = min(num_sampled, len(self._others))
        self._dtype = dtype
        self._output = output.to(dtype)
        self._kept = self._output[ids]
        self._random = torch.Generator().manual_seed(seed)

    def loss(self, batch: list[HeadSample]) -> torch.Tensor:
        """Mean over the heads of the cross-entropy with the target's probabilities, see the module."""
        drawn = self._others[torch.randperm(len(self._others), generator=self._random)[: self._num_sampled]]
        matrix = torch.cat([self._kept, self._output[drawn]])  # [n + sampled, hidden]
        raised = torch.zeros(len(matrix))
        if self._num_sampled:
            raised[len(self._kept) :] = math.log(len(self._others) / self._num_sampled)
        total = torch.zeros(())
        for head in range(self.heads.num_heads):
            ahead = 1 + head
            some = batch[::ahead]  # a head counts where those before it are right, so the later get less of the time
            states = torch.cat([s.states[:-ahead] for s in some]).float()
            rows = torch.cat([s.rows[ahead:] for s in some])
            probs = torch.cat([s.probs[ahead:] for s in some])
            with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
                logits = F.linear(self.heads.states(head, states), matrix, raised)
            picked = F.log_softmax(logits.float(), dim=-1).gather(1, rows.clamp_min(0))
            total = total - (probs * picked).sum() / probs.sum().clamp_min(1e-6)
        return total / self.heads.num_heads

    def length(self, sample: HeadSample) -> int:
        """Tokens of an answer."""
        return len(sample.tokens)

    @torch.no_grad()
    def validate(self, limit: int = 32) -> dict[str, float]:
        """On prompts kept aside: how often each head's first choice is the token that comes, and the loss.

        The loss on as many of the answers that were trained on tells whether answers or steps are missing.
        """
        kept, seen = self.held_out[:limit], self.answers[:limit]
        ranks = [text_ranks(self.heads, s.states, s.tokens) for s in kept]
        hits = [[text[: -1 - h, h] == 0 for text in ranks] for h in range(self.heads.num_heads)]
        figures = {f"head_{h}": float(torch.cat(hit).float().mean()) if hit else 0.0 for h, hit in enumerate(hits)}
        for name, samples in (("loss", kept), ("loss_trained", seen)):
            if samples:
                batches = [samples[at : at + 8] for at in range(0, len(samples), 8)]
                figures[name] = sum(float(self.loss(batch)) for batch in batches) / len(batches)
        return figures


@torch.inference_mode()
def text_ranks(heads: MedusaHeads, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Where the tokens of a text rank in the heads' logits.

    Args:
        heads: the heads.
        states: `[A, hidden]`, see `HeadSample`.
        tokens: int64 `[A]`.

    Returns:
        int16 `[A, heads]`: at `[i, h]` the rank that head h gives token i + 1 + h from state i; -1 where it is not
        among the first `NUM_RANKS`, or the text ends before.
    """
    ranks = torch.full((len(tokens), heads.num_heads), -1, dtype=torch.int16)
    for head in range(heads.num_heads):
        wanted = tokens[1 + head :]
        if not len(wanted):
            continue
        ranks[: len(wanted), head] = ranks_in(heads.logits(head, states[: len(wanted)].float()), wanted)
    return ranks


def ranks_in(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """int16 `[n]`: where each of `tokens` `[n]` ranks in its row of `logits` `[n, vocab]`; -1 behind `NUM_RANKS`."""
    found = logits.topk(min(NUM_RANKS, logits.shape[-1]), dim=-1).indices == tokens[:, None]  # [n, ranks]
    return torch.where(found.any(dim=-1), found.int().argmax(dim=-1), -1).to(torch.int16)
