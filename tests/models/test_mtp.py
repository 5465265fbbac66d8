"""Multi-token prediction modules: what the config promises and the files hold."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtspec.errors import TrtspecError
from trtspec.models.mtp import check_mtp, module_prefixes
from trtspec.models.source import open_model

Make = Callable[..., Any]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Make:
    """A DeepSeek-V3 in names only: two shards of empty tensors, of `layers` decoder layers, and an index."""

    def make(layers: int, num_nextn_predict_layers: int | None, **config: Any) -> Any:
        names = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(layers)]
        shards = {"model-1.safetensors": names[: layers // 2], "model-2.safetensors": names[layers // 2 :]}
        for shard, held in shards.items():
            header = {name: {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]} for name in held}
            text = json.dumps(header).encode()
            (tmp_path / shard).write_bytes(struct.pack("<Q", len(text)) + text)
        index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        content = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "vocab_size": 129280,
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "intermediate_size": 18432,
            **config,
        }
        if num_nextn_predict_layers is not None:
            content["num_nextn_predict_layers"] = num_nextn_predict_layers
        (tmp_path / "config.json").write_text(json.dumps(content))
        return open_model(str(tmp_path))

    return make


def test_a_checkpoint_with_its_module_passes(checkpoint: Make) -> None:
    source = checkpoint(62, 1)
    check_mtp(source, 1)
    assert module_prefixes(source.config) == ("model.layers.61.",)


def test_a_module_that_only_the_config_has_is_refused_by_its_prefix(checkpoint: Make, tmp_path: Path) -> None:
    with pytest.raises(TrtspecError) as refused:
        check_mtp(checkpoint(61, 1), 1)
    assert str(refused.value).startswith(
        f"{tmp_path}: no weight under model.layers.61., where multi-token prediction module 1 of 1 should be"
    )


def test_layer_6_is_not_layer_61(checkpoint: Make) -> None:
    with pytest.raises(TrtspecError, match=r"no weight under model\.layers\.6\., "):
        check_mtp(checkpoint(6, 1, num_hidden_layers=6), 1)


@pytest.mark.parametrize("number", [0, None])
def test_a_model_without_modules_is_refused(checkpoint: Make, number: int | None) -> None:
    with pytest.raises(TrtspecError, match="num_nextn_predict_layers is 0: this model has no multi-token prediction"):
        check_mtp(checkpoint(62, number), 1)


def test_more_modules_than_the_checkpoint_has_are_refused(checkpoint: Make) -> None:
    with pytest.raises(TrtspecError) as refused:
        check_mtp(checkpoint(62, 1), 3)
    assert "3 multi-token prediction modules are asked for, but num_nextn_predict_layers is 1" in str(refused.value)
    assert "at most 1" in str(refused.value)


def test_the_second_of_two_modules_is_looked_for_when_it_is_used(checkpoint: Make) -> None:
    source = checkpoint(62, 2)
    check_mtp(source, 1)
    with pytest.raises(TrtspecError, match=r"no weight under model\.layers\.62\., .*module 2 of 2"):
        check_mtp(source, 2)
