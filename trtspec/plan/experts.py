"""Weights that a pass has to read: of a mixture of experts, the more of them the more tokens are verified at once.

Knows sizes of models, and the router of one. Does not know time: where memory bandwidth is the limit, as for few
requests on a GPU, time is proportional to what is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtspec.models.config import ModelConfig
from trtspec.runtime.llama import Llama


def experts_touched(num_experts: int, num_experts_per_token: int, num_tokens: int) -> float:
    """Expected number of different experts that so many tokens go to: E (1 - (1 - k/E)^t).

    For tokens that choose independently and every expert equally likely (MoESD, arXiv 2505.19645). Real tokens of one
    text agree more often, so this is an upper bound; `measured_experts` counts.
    """
    return num_experts * (1.0 - (1.0 - num_experts_per_token / num_experts) ** num_tokens)


def weights_read(config: ModelConfig, num_layers: int, num_tokens: int) -> float:
    """Parameters that one pass over `num_tokens` tokens reads: of the first layers and the head.

    Embedding rows and norms, which are few, are left out; of the experts, those in `experts_touched` count.
    """
    attention = 2 * config.head_size * (config.num_attention_heads + config.num_key_value_heads)
    mlp = 3.0 * config.intermediate_size
    if config.num_experts:
        expert = 3 * (config.moe_intermediate_size or config.intermediate_size)
        touched = experts_touched(config.num_experts, config.num_experts_per_token, num_tokens)
        mlp = touched * expert + 3 * config.shared_expert_intermediate_size + config.num_experts
    return config.hidden_size * (num_layers * (attention + mlp) + config.vocab_size)


@torch.inference_mode()
def measured_experts(model: Llama, texts: Sequence[Sequence[int]], num_tokens: int) -> float:
    """Mean number of different experts that `num_tokens` tokens in a row go to, over layers and places of the texts.

    Args:
        model: a mixture of experts.
        texts: token ids; those of fewer than `num_tokens` are left out.
        num_tokens: tokens in a row, as a verification has them.

    Raises:
        ValueError: no text is long enough.
    """
    counts: list[torch.Tensor] = []
    for text in texts:
        if len(text) < num_tokens:
            continue
        recorder = _Recorder(model)
        recorder.hidden(torch.tensor([list(text)], device=model.device), None, 0)
        for chosen in recorder.chosen:  # [tokens, top_k]
            there = torch.zeros(len(text), model.config.num_experts, device=model.device).scatter_(1, chosen, 1.0)
            windows = there.unfold(0, num_tokens, 1).amax(dim=-1)  # [places, experts]
            counts.append(windows.sum(dim=-1))
    if not counts:
        raise ValueError(f"no text of {num_tokens} tokens or more")
    return float(torch.cat(counts).mean())


class _Recorder(Llama):
    """A model that notes where its routers send the tokens."""

    def __init__(self, model: Llama) -> None:
        super().__init__(model.config, model.weights, model.device, model.activations)
        self.chosen: list[torch.Tensor] = []

    def route(self, rows: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        shares, chosen = super().route(rows, name)
        self.chosen.append(chosen)
        return shares, chosen
