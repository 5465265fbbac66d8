"""Multi-token prediction modules: what the config promises and the files hold."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtspec.errors import TrtspecError
from trtspec.models.mtp import check_mtp, module_prefixes
from trtspec.models.source import open_model

Make = Callable[..., Any]
MODULE = {"enorm": [7168], "hnorm": [7168], "eh_proj": [7168, 14336], "shared_head.norm": [7168]}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Make:
    """A DeepSeek-V3 in names only: two shards of empty tensors, of `layers` decoder layers, and an index."""

    def make(
        layers: int,
        num_nextn_predict_layers: int | None,
        module: dict[str, list[int]] = MODULE,
        **config: Any,
    ) -> Any:
        shapes = {f"model.layers.{layer}.self_attn.o_proj.weight": [0] for layer in range(layers)}
        shapes |= {f"model.layers.61.{name}.weight": shape for name, shape in module.items() if layers > 61}
        names = list(shapes)
        shards = {"model-1.safetensors": names[: layers // 2], "model-2.safetensors": names[layers // 2 :]}
        for shard, held in shards.items():
            header, end = {}, 0
            for name in held:
                size = 2 * math.prod(shapes[name])
                header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [end, end + size]}
                end += size
            text = json.dumps(header).encode()
            with (tmp_path / shard).open("wb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                file.truncate(file.tell() + end)  # a hole of that size, no data
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


@pytest.mark.parametrize("name", MODULE)
def test_a_module_without_one_of_its_parts_is_refused_by_its_name(checkpoint: Make, name: str) -> None:
    source = checkpoint(62, 1, {part: shape for part, shape in MODULE.items() if part != name})
    with pytest.raises(TrtspecError, match=rf"weight model\.layers\.61\.{name}\.weight of a multi-token prediction"):
        check_mtp(source, 1)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("eh_proj", [14336, 7168]), ("enorm", [4096]), ("shared_head.head", [32000, 7168]), ("embed_tokens", [129280, 8])],
)
def test_a_module_of_another_model_is_refused_by_its_shape(checkpoint: Make, name: str, shape: list[int]) -> None:
    source = checkpoint(62, 1, MODULE | {name: shape})
    with pytest.raises(TrtspecError, match=rf"model\.layers\.61\.{name}\.weight has shape \[{shape[0]}.*; expected \["):
        check_mtp(source, 1)
