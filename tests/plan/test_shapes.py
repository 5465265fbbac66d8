"""Named shapes: their sizes against the numbers that model cards give."""

from __future__ import annotations

import pytest

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.plan.roofline import layer_weights
from trtspec.plan.shapes import LatentConfig, card_parameters, shape_names, shape_of
from trtspec.spec.schema import ModelRef
from trtspec.trtllm.memory import kv_bytes_per_token

BF16 = ModelRef(model="any")
# KiB of keys and values a token in 16 bits.
CACHES = {
    "Llama-2-7B": 512, "Llama-3.1-8B": 128, "Llama-3.1-70B": 320, "Llama-3.3-70B": 320, "Llama-2-70B": 320,
    "Llama-3.2-1B": 32, "Llama-3.2-3B": 112, "Mixtral-8x7B": 128, "Qwen2.5-7B": 56, "SmolLM2-135M": 22.5,
    "DeepSeek-V3": 61 * (512 + 64) * 2 / 1024,
}  # fmt: skip


def test_the_shapes_that_there_are() -> None:
    assert shape_names() == [
        "Llama-2-7B", "Llama-2-70B", "Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.3-70B", "Llama-3.2-1B", "Llama-3.2-3B",
        "Qwen2.5-7B", "Qwen2.5-0.5B", "Mistral-7B", "Mixtral-8x7B", "DeepSeek-V3", "SmolLM2-135M",
    ]  # fmt: skip


@pytest.mark.parametrize("name", shape_names())
def test_parameters_are_those_of_the_model_card(name: str) -> None:
    """Within 1 %: cards round, and norms and biases are left out."""
    config = shape_of(name)
    vocabulary = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    counted = layer_weights(config, config.num_experts) + vocabulary
    assert counted / 1e9 == pytest.approx(card_parameters(name), rel=0.01)


@pytest.mark.parametrize("name", CACHES)
def test_cache_of_a_token(name: str) -> None:
    assert kv_bytes_per_token(BF16, shape_of(name)) == 1024 * CACHES[name]


def test_latent_attention_keeps_the_latent_vector_and_the_rotated_key_on_every_rank() -> None:
    config = shape_of("DeepSeek-V3")
    assert isinstance(config, LatentConfig)
    one = kv_bytes_per_token(BF16, config)
    assert kv_bytes_per_token(ModelRef(model="any", tensor_parallel=8), config) == 8 * one


def test_a_token_of_deepseek_uses_37_billion_weights() -> None:
    """ "37B activated", says the technical report (arXiv 2412.19437), with one of embedding and head."""
    config = shape_of("DeepSeek-V3")
    used = layer_weights(config, config.num_experts_per_token) + config.vocab_size * config.hidden_size
    assert used / 1e9 == pytest.approx(37, rel=0.02)


# DeepSeek-V2-Lite, of whose config.json these are the sizes: 15.7 billion weights, queries that are not compressed.
LITE = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10944, "n_routed_experts": 64,
    "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def test_a_config_with_latent_attention() -> None:
    config = LatentConfig.of(ModelConfig.from_hf(LITE), LITE)
    counted = layer_weights(config, 64) + 2 * config.vocab_size * config.hidden_size
    assert counted / 1e9 == pytest.approx(15.7, rel=0.01)
    assert kv_bytes_per_token(BF16, config) == 27 * (512 + 64) * 2


@pytest.mark.parametrize(("key", "value"), [("qk_rope_head_dim", None), ("v_head_dim", 0), ("kv_lora_rank", "many")])
def test_a_damaged_config_with_latent_attention(key: str, value: object) -> None:
    with pytest.raises(TrtspecError, match=rf"config\.json: {key} is {value!r}; expected a whole number from 1 on"):
        LatentConfig.of(ModelConfig.from_hf(LITE), {**LITE, key: value})


def test_an_unknown_shape_lists_the_known_ones() -> None:
    with pytest.raises(TrtspecError) as error:
        shape_of("Llama-9")
    assert "'Llama-9'" in str(error.value) and all(name in str(error.value) for name in shape_names())
