"""The lean decoder against transformers, token by token, and the ways its cache is used."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.runtime.llama import Llama, to_hf, to_trtllm
from trtspec.runtime.weights import ActivationQuantizer

SIZES = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("Llama", {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0}),
    "linear-rope": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen2-moe-normalised": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": True}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
}


def both(family: str) -> tuple[Any, Llama]:
    """A small random model in transformers, and ours over its weights."""
    import transformers

    name, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **extra}, attn_implementation="eager")
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter_name, parameter in theirs.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:  # would be all zeros or ones
            torch.nn.init.normal_(parameter, mean=float("norm" in parameter_name), std=0.2)
    state = {**theirs.state_dict()}
    ours_config = ModelConfig.from_hf(config.to_dict())
    return theirs, Llama(ours_config, to_trtllm(ours_config, state.__getitem__))


@pytest.fixture(scope="module")
def llama() -> Llama:
    return both("llama")[1]


def prompt(*shape: int) -> torch.Tensor:
    return torch.randint(0, 131, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_are_those_of_transformers(family: str) -> None:
    theirs, ours = both(family)
    ids = prompt(2, 70)
    expected = theirs(ids).logits
    cache = ours.new_cache(2, 70)
    whole = ours.forward(ids, cache, 0)
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    cache = ours.new_cache(2, 80)
    pieces = [ours.forward(ids[:, a:b], cache, a) for a, b in ((0, 31), (31, 32), (32, 38), (38, 70))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 0.3, "a model without contrast would hide a wrong layer"


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if not name.startswith(("mixtral", "qwen2-moe", "qwen3-moe"))]
)
@torch.inference_mode()
def test_bfloat16_logits_are_those_of_transformers_but_for_rounding(family: str) -> None:
    """A prompt's pass, one token, a verification, and more: each takes its products another way."""
    theirs, exact = both(family)
    ids = prompt(2, 70)
    expected = theirs(ids).logits
    ours = Llama(exact.config, {name: tensor.bfloat16() for name, tensor in exact.weights.items()})
    cache = ours.new_cache(2, 70)
    pieces = [ours.forward(ids[:, a:b], cache, a) for a, b in ((0, 31), (31, 32), (32, 38), (38, 70))]
    error = (torch.cat(pieces, dim=1) - expected).square().mean(dim=(0, 2)).sqrt() / expected.std()
    theirs_rounded = theirs.bfloat16()(ids).logits.float()
    rounding = (theirs_rounded - expected).square().mean(dim=(0, 2)).sqrt() / expected.std()
    assert float(error.max()) < 2 * float(rounding.max()), f"{error.max():.3g}, of transformers {rounding.max():.3g}"
    one = torch.cat([ours.forward(ids[:1, n : n + 1], cache, n) for n in range(32, 38)], dim=1)
    again = ours.forward(ids[:1, 32:38], cache, 32)
    torch.testing.assert_close(one, again, atol=0.05 * float(expected.std()), rtol=0.02)


@torch.inference_mode()
def test_rolling_back_is_a_smaller_start(llama: Llama) -> None:
    ids = prompt(1, 20)
    cache = llama.new_cache(1, 20)
    expected = llama.forward(ids, cache, 0)[:, 12:]
    cache = llama.new_cache(1, 20)
    llama.forward(ids[:, :12], cache, 0)
    llama.forward(prompt(1, 8).flip(1), cache, 12)  # drafts that are rejected
    torch.testing.assert_close(llama.forward(ids[:, 12:], cache, 12), expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_rows_of_different_length_share_a_batch(llama: Llama) -> None:
    ids, lengths = prompt(3, 24), torch.tensor([9, 17, 4])
    cache = llama.new_cache(3, 24)
    llama.forward(ids[:, :17], cache, 0)  # shorter rows are padded on the right with what follows
    batched = llama.forward(ids.gather(1, lengths[:, None] + torch.arange(3)), cache, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = llama.forward(ids[row : row + 1, : length + 3], llama.new_cache(1, 24), 0, num_logits=3)
        torch.testing.assert_close(batched[row : row + 1], alone, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_tree_sees_its_own_branch_only(llama: Llama) -> None:
    ids, branches = prompt(1, 10), (torch.tensor([[5, 6]]), torch.tensor([[7, 8]]))
    cache = llama.new_cache(1, 16)
    llama.forward(ids, cache, 0)
    nodes = torch.cat(branches, dim=1)  # 5 - 6 and 7 - 8, both after the prompt
    mask = torch.block_diag(*[torch.ones(2, 2).tril()] * 2).bool()
    tree = llama.forward(nodes, cache, 10, mask=mask, positions=torch.tensor([0, 1, 0, 1]))
    for number, branch in enumerate(branches):
        alone = llama.forward(torch.cat((ids, branch), dim=1), llama.new_cache(1, 16), 0, num_logits=2)
        torch.testing.assert_close(tree[:, 2 * number : 2 * number + 2], alone, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_without_a_cache_the_hidden_states_are_the_same(llama: Llama) -> None:
    ids = prompt(2, 12)
    torch.testing.assert_close(llama.hidden(ids, None, 0), llama.hidden(ids, llama.new_cache(2, 12), 0))


@torch.inference_mode()
def test_a_reduced_head_proposes_only_its_ids(llama: Llama) -> None:
    ids, kept = prompt(1, 6), torch.tensor([3, 4, 40, 130])
    full = llama.forward(ids, llama.new_cache(1, 6), 0)
    weights = {
        **llama.weights,
        "lm_head.weight": llama.weights["lm_head.weight"][kept],
        "d2t": (kept - torch.arange(4)).int(),
    }
    reduced = Llama(llama.config, weights).forward(ids, llama.new_cache(1, 6), 0)
    torch.testing.assert_close(reduced[..., kept], full[..., kept])
    assert torch.isinf(reduced).sum() == 6 * (131 - 4)


@torch.inference_mode()
def test_padding_of_the_head_is_never_chosen(llama: Llama) -> None:
    """Every real logit is negative; those of the padding rows would be 0."""
    ids, head = prompt(1, 6), llama.weights["lm_head.weight"]
    expected = llama.forward(ids, llama.new_cache(1, 6), 0)
    padded = Llama(llama.config, {**llama.weights, "lm_head.weight": torch.cat((head, torch.zeros(3, 48)))})
    found = padded.forward(ids, padded.new_cache(1, 6), 0)
    torch.testing.assert_close(found[..., :131], expected)
    assert bool((found[..., 131:] == -torch.inf).all())
    negative = Llama(llama.config, {**padded.weights, "lm_head.weight": -padded.weights["lm_head.weight"].abs()})
    assert int(negative.head(torch.ones(1, 48)).argmax()) < 131


@torch.inference_mode()
def test_one_layer_alone_is_the_layer(llama: Llama) -> None:
    ids = prompt(2, 9)
    x = torch.nn.functional.embedding(ids, llama.weights["transformer.vocab_embedding.weight"])
    for layer in range(llama.config.num_hidden_layers):
        x = llama.layer_output(layer, x)
    x = torch.nn.functional.rms_norm(x, (48,), llama.weights["transformer.ln_f.weight"], llama.config.norm_epsilon)
    torch.testing.assert_close(x, llama.hidden(ids, None, 0))


@torch.inference_mode()
@pytest.mark.parametrize(
    "name", ["attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj", "attention.kv_cache"]
)
def test_what_is_rounded_before_a_layer_shows(llama: Llama, name: str) -> None:
    """One tensor of one layer is rounded coarsely: logits move, and without rounding they do not."""
    ids, key = prompt(1, 20), f"transformer.layers.1.{name}"
    expected = llama.forward(ids, llama.new_cache(1, 20), 0)
    nothing = Llama(llama.config, llama.weights, activations={key: ActivationQuantizer()})
    assert torch.equal(nothing.forward(ids, nothing.new_cache(1, 20), 0), expected)
    coarse = Llama(llama.config, llama.weights, activations={key: ActivationQuantizer("int8", 0.5)})
    assert (coarse.forward(ids, coarse.new_cache(1, 20), 0) - expected).abs().max() > 1e-3


def test_the_rounding_of_activations() -> None:
    x = torch.tensor([0.26, -0.74, 1000.0, -1000.0])
    assert ActivationQuantizer("int8", 0.5)(x).tolist() == [0.5, -0.5, 63.5, -64.0]
    assert ActivationQuantizer("fp8", 0.5)(x).tolist() == [0.25, -0.75, 224.0, -224.0]  # 3 bits behind the first
    factors = torch.tensor([[2.0], [4.0]])
    assert ActivationQuantizer(prequant=factors)(torch.ones(1, 1), 1).tolist() == [[4.0]]


def test_weights_are_not_copied(llama: Llama) -> None:
    again = Llama(llama.config, llama.weights)
    assert all(again.weights[name].data_ptr() == tensor.data_ptr() for name, tensor in llama.weights.items())


@pytest.mark.parametrize("family", ["llama-biases", "qwen3"])
def test_the_way_back_to_hugging_face_names(family: str) -> None:
    theirs, ours = both(family)
    state = theirs.state_dict()
    back = to_hf(ours.config, ours.weights)
    assert set(back) == set(state)
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_a_cache_that_is_too_short_says_so(llama: Llama) -> None:
    with pytest.raises(TrtspecError, match="holds 8 positions, 9 are needed"):
        llama.forward(prompt(1, 9), llama.new_cache(1, 8), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma", "architecture": "GemmaForCausalLM"}, "does not run GemmaForCausalLM"),
        ({"num_experts": 8}, "does not run LlamaForCausalLM"),
        ({"model_type": "mixtral", "architecture": "MixtralForCausalLM"}, "does not run MixtralForCausalLM"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"num_dense_mlp_layers": 2}, "2 of 3 layers have no experts"),
        ({"rotary_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
    ],
)
def test_what_would_run_wrongly_is_refused(llama: Llama, change: dict[str, Any], message: str) -> None:
    with pytest.raises(TrtspecError, match=message):
        Llama(dataclasses.replace(llama.config, **change), llama.weights)
