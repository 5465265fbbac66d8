"""Medusa heads in the formats they are published in, and heads that are broken or another model's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.models.medusa import open_medusa
from trtspec.models.source import open_model
from trtspec.spec.schema import Medusa

HIDDEN, VOCAB = 32, 280
Tensors = dict[str, torch.Tensor]


def heads(num_heads: int = 3, num_layers: int = 1, own_output: bool = True, prefix: str = "") -> Tensors:
    """Random heads under the names of the first public implementation."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator)
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = torch.randn(HIDDEN, generator=generator)
        if own_output:
            tensors[f"{prefix}{head}.{num_layers}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    return tensors


def pickled(path: Path, tensors: Tensors) -> None:
    torch.save(tensors, path / "medusa_lm_head.pt")


def safetensors(path: Path, tensors: Tensors) -> None:
    save_file(tensors, path / "medusa_lm_head.safetensors")


def modelopts(path: Path, tensors: Tensors) -> None:
    """With the base model's weights, in two files."""
    renamed = {f"medusa_heads.{name}": tensor for name, tensor in tensors.items()}
    last = renamed.popitem()
    save_file(renamed | {"model.norm.weight": torch.ones(HIDDEN)}, path / "model-00001-of-00002.safetensors")
    save_file(dict([last]), path / "model-00002-of-00002.safetensors")


def tensorrt_llms(path: Path, tensors: Tensors) -> None:
    renamed = {}
    for name, tensor in tensors.items():
        head, layer, rest = name.split(".", 2)
        name = f"medusa_layers.{layer}.{rest}" if "linear" in rest else "lm_head.weight"
        renamed[f"medusa_heads.{head}.{name}"] = tensor
    save_file(renamed, path / "model.safetensors")


@pytest.fixture
def target(tiny_model_dir: Path) -> ModelConfig:
    return open_model(str(tiny_model_dir)).config


@pytest.mark.parametrize("save", [pickled, safetensors, modelopts, tensorrt_llms])
@pytest.mark.parametrize("own_output", [True, False])
def test_every_format_gives_the_same_heads(
    tmp_path: Path, target: ModelConfig, save: Callable[[Path, Tensors], None], own_output: bool
) -> None:
    tensors = heads(num_layers=2, own_output=own_output)
    save(tmp_path, tensors)
    found = open_medusa(tmp_path)
    found.check(target, Medusa(heads="h", num_heads=3, num_layers=2))
    assert (found.num_heads, found.num_layers, found.has_own_output) == (3, 2, own_output)
    weight, bias = found.linear(2, 1)
    assert torch.equal(weight, tensors["2.1.linear.weight"]) and torch.equal(bias, tensors["2.1.linear.bias"])
    output = found.output(1)
    if own_output:
        assert output is not None and torch.equal(output, tensors["1.2.weight"])
    else:
        assert output is None


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("1.0.linear.bias", r"Medusa head 1 has no tensor 1\.0\.linear\.bias; expected 1 layers .* each of 3 heads"),
        ("2.1.weight", r"Medusa heads \[2\] have layers or an output matrix, not both"),
    ],
)
def test_heads_that_are_not_whole(tmp_path: Path, lost: str, message: str) -> None:
    tensors = heads()
    del tensors[lost]
    safetensors(tmp_path, tensors)
    with pytest.raises(TrtspecError, match=message):
        open_medusa(tmp_path)


def test_an_output_matrix_behind_layers_that_are_not_there(tmp_path: Path) -> None:
    safetensors(tmp_path, {name.replace(".1.weight", ".3.weight"): tensor for name, tensor in heads().items()})
    with pytest.raises(TrtspecError, match=r"Medusa head 0 has its output matrix in 0\.3\.weight, behind 1 layers"):
        open_medusa(tmp_path)


def test_no_heads(tmp_path: Path) -> None:
    with pytest.raises(TrtspecError, match=r"no Medusa heads; expected medusa_lm_head\.safetensors"):
        open_medusa(tmp_path)
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(TrtspecError, match=r"no tensor is named like 0\.0\.linear\.weight"):
        open_medusa(tmp_path)


def test_a_pickle_that_would_run_code_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w').close()",)

    torch.save({"0.0.linear.weight": Bomb()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(TrtspecError, match=r"medusa_lm_head\.pt: not a file of tensors, or one that would run code"):
        open_medusa(tmp_path)
    assert not (tmp_path / "ran").exists()
    torch.save({"0.0.linear.weight": 3}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(TrtspecError, match="not a state dictionary"):
        open_medusa(tmp_path)


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"num_heads": 4}, {}, r"4 Medusa heads are asked for, and there are 3; set speculation\.medusa\.num_heads: 3"),
        ({"num_heads": 3, "num_layers": 2}, {}, r"each Medusa head has 1 layers, the spec says 2"),
        ({"num_heads": 3}, {"hidden_size": 64}, r"0\.0\.linear\.bias has shape \[32\]; expected \[64\]"),
        ({"num_heads": 3}, {"vocab_size": 300}, r"0\.1\.weight has shape \[280, 32\]; expected \[300, 32\]"),
    ],
)
def test_heads_of_another_target_or_spec(
    tmp_path: Path, target: ModelConfig, settings: dict[str, int], changes: dict[str, int], message: str
) -> None:
    safetensors(tmp_path, heads())
    found = open_medusa(tmp_path)
    found.check(target, Medusa(heads="h", num_heads=2))  # fewer than there are
    with pytest.raises(TrtspecError, match=message):
        found.check(replace(target, **changes), Medusa(heads="h", **settings))


@pytest.mark.parametrize(
    "config", [{"medusa_num_heads": 4}, {"medusa": {"num_medusa_heads": 4}}, {"medusa_num_layers": 2}]
)
def test_a_config_that_contradicts_the_tensors(tmp_path: Path, config: dict[str, object]) -> None:
    safetensors(tmp_path, heads())
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    open_medusa(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TrtspecError, match=r"config\.json says [24] Medusa (heads|layers), the tensors are those of"):
        open_medusa(tmp_path)
