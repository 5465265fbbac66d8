"""What is read from config.json and generation_config.json."""

from __future__ import annotations

from typing import Any

import pytest

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig

BASE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip


def config(**extra: Any) -> ModelConfig:
    return ModelConfig.from_hf({**BASE, **extra})


def test_defaults_of_a_short_config() -> None:
    read = config()
    assert (read.num_key_value_heads, read.head_size, read.rotary_base, read.dtype) == (4, 8, 10000.0, "float32")
    assert (read.attn_bias, read.qk_layernorm, read.tie_word_embeddings, read.rotary_scaling) == (False,) * 3 + (None,)


@pytest.mark.parametrize(
    ("ours", "theirs", "union"),
    [
        (2, None, (2,)),
        (None, [128001, 128008, 128009], (128001, 128008, 128009)),
        (128009, [128001, 128008, 128009], (128009, 128001, 128008)),
        ([1, 2], 2, (1, 2)),
        (None, None, ()),
    ],
)
def test_eos_ids_are_the_union_of_both_files(ours: Any, theirs: Any, union: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf({**BASE, "eos_token_id": ours}, {"eos_token_id": theirs}).eos_token_ids == union


def test_switches_that_a_family_hard_codes() -> None:
    assert config(model_type="qwen2", architectures=["Qwen2ForCausalLM"]).attn_bias
    qwen3 = config(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=16)
    assert (qwen3.attn_bias, qwen3.qk_layernorm, qwen3.head_size) == (False, True, 16)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", "factor": 8.0}},
    ],
)
def test_rope_in_the_old_and_the_new_spelling(rope: dict[str, Any]) -> None:
    read = config(**rope)
    assert read.rotary_base == 500000.0
    assert read.rotary_scaling is not None and read.rotary_scaling["factor"] == 8.0


def test_experts_and_mtp_layers() -> None:
    mixtral = config(num_local_experts=8, num_experts_per_tok=2)
    deepseek = config(n_routed_experts=256, num_experts_per_tok=8, num_nextn_predict_layers=1)
    assert (mixtral.num_experts, mixtral.num_experts_per_token) == (8, 2)
    assert (deepseek.num_experts, deepseek.num_nextn_predict_layers) == (256, 1)


def test_a_multimodal_wrapper_is_read_through() -> None:
    text = {key: value for key, value in BASE.items() if key != "architectures"}
    assert ModelConfig.from_hf({"architectures": ["XForConditionalGeneration"], "text_config": text}).hidden_size == 32


@pytest.mark.parametrize(
    "change", [{}, {"num_local_experts": 8, "num_experts_per_tok": 2}, {"torch_dtype": "bfloat16"}]
)
def test_written_config_reads_back_the_same(change: dict[str, Any]) -> None:
    read = config(eos_token_id=[1, 2], bos_token_id=0, **change)
    assert ModelConfig.from_hf(read.to_hf()) == read


@pytest.mark.parametrize(
    ("value", "message"), [(None, "hidden_size is missing"), ("32", "hidden_size is '32'"), (0, "is 0")]
)
def test_an_impossible_size_is_named(value: Any, message: str) -> None:
    with pytest.raises(TrtspecError, match=message):
        config(hidden_size=value)


@pytest.mark.parametrize("value", ["one", -1, 1.5])
@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_experts_per_tok", "moe_intermediate_size"])
def test_an_impossible_count_is_named(key: str, value: Any) -> None:
    with pytest.raises(TrtspecError, match=f"{key} is {value!r}"):
        config(**{key: value})
