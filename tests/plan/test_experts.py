"""How many experts a verification touches: the formula, and the count on a model."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from trtspec.models.config import ModelConfig
from trtspec.plan.experts import experts_touched, measured_experts, weights_read
from trtspec.runtime.llama import Llama, to_trtllm


@pytest.mark.parametrize(("experts", "per_token", "tokens"), [(4, 1, 3), (4, 2, 2), (5, 2, 3)])
def test_the_expectation_is_that_of_every_choice(experts: int, per_token: int, tokens: int) -> None:
    """Over all ways in which independent tokens can choose, every set of experts equally likely."""
    sets = [set(choice) for choice in product(range(experts), repeat=per_token) if len(set(choice)) == per_token]
    counts = [len(set().union(*chosen)) for chosen in product(sets, repeat=tokens)]
    assert experts_touched(experts, per_token, tokens) == pytest.approx(np.mean(counts))


def model(**changes: object) -> Llama:
    """A small random Qwen3-MoE; `router` scales its router, so that 0 sends every token to the same experts."""
    import transformers

    router = changes.pop("router", 1.0)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "head_dim": 8, "num_key_value_heads": 2, "max_position_embeddings": 96, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.3,
    }  # fmt: skip
    config = transformers.Qwen3MoeConfig(**{**sizes, **changes})
    theirs = transformers.Qwen3MoeForCausalLM(config)
    state = {name: t * router if name.endswith("mlp.gate.weight") else t for name, t in theirs.state_dict().items()}
    ours = ModelConfig.from_hf(config.to_dict())
    return Llama(ours, to_trtllm(ours, state.__getitem__))


TEXT = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(3)).tolist()


def test_the_count_on_a_model_is_below_the_bound_and_grows() -> None:
    counts = [measured_experts(model(), [TEXT, TEXT[:3]], tokens) for tokens in (1, 2, 4, 8)]
    assert counts[0] == 2.0  # one token, its two experts
    assert counts == sorted(counts)
    for count, tokens in zip(counts[1:], (2, 4, 8), strict=True):
        assert 2.0 < count < experts_touched(8, 2, tokens) + 0.1


def test_tokens_that_all_go_to_the_same_experts_touch_these_alone() -> None:
    assert measured_experts(model(router=0.0), [TEXT], 8) == 2.0


def test_a_count_by_hand() -> None:
    """The first layer's choices of one text, taken one by one."""
    llama = model(num_hidden_layers=1)
    recorded: list[torch.Tensor] = []
    original = llama.route

    def route(rows: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        recorded.append(original(rows, name)[1])
        return original(rows, name)

    llama.route = route  # type: ignore[method-assign]
    with torch.inference_mode():
        llama.hidden(torch.tensor([TEXT]), None, 0)
    chosen = recorded[0].tolist()
    windows = [{e for token in chosen[at : at + 3] for e in token} for at in range(len(chosen) - 2)]
    assert measured_experts(llama, [TEXT], 3) == pytest.approx(np.mean([len(window) for window in windows]))


def test_texts_that_are_too_short_say_so() -> None:
    with pytest.raises(ValueError, match="no text of 70 tokens"):
        measured_experts(model(), [TEXT], 70)


def test_what_is_read_of_a_dense_model_does_not_depend_on_the_tokens() -> None:
    experts = model().config
    read = [weights_read(experts, 2, tokens) for tokens in (1, 3, 1000)]
    layers = 2 * 32 * (2 * 8 * (4 + 2) + 8)
    assert read[0] == pytest.approx(layers + 2 * 32 * 2 * 3 * 16 + 32 * 97)
    assert read[0] < read[1] < read[2]
    assert read[2] == pytest.approx(layers + 2 * 32 * 8 * 3 * 16 + 32 * 97)
