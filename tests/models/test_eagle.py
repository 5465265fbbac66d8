"""EAGLE heads: what is refused from their headers, and how a reduced vocabulary maps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.models.eagle import check_eagle, draft_ids
from trtspec.models.source import open_model


@pytest.fixture
def target(tiny_model_dir: Path) -> ModelConfig:
    """Hidden size 32; ten ids, so that the whole maps can be written down."""
    return replace(open_model(str(tiny_model_dir)).config, vocab_size=10)


def write(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"hidden_size": 32, "vocab_size": 10} | config))
    return path


def marks(*ids: int) -> torch.Tensor:
    """t2d over ten ids."""
    return torch.tensor([i in ids for i in range(10)])


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_whole_heads_pass(tmp_path: Path, target: ModelConfig) -> None:
    fc, bias = torch.zeros(32, 64), torch.zeros(32)
    assert check_eagle(write(tmp_path, {"fc.weight": fc, "fc.bias": bias}, bias=True), target, 1).path == tmp_path
    check_eagle(write(tmp_path, {"fc.weight": fc}, bias=False), target, 1)
    check_eagle(write(tmp_path, {"fc.weight": fc}), target, 1)
    check_eagle(write(tmp_path, {"fc.weight": torch.zeros(32, 96)}), target, 3)


@pytest.mark.parametrize(
    ("tensors", "config", "version", "message"),
    [
        ({"fc.weight": (32, 64)}, {"bias": True}, 1, r"config\.json says bias: true, but tensor fc\.bias is missing"),
        ({"fc.weight": (32, 64), "fc.bias": (32,)}, {"bias": False}, 1, r"bias: false, but tensor fc\.bias is there"),
        ({"layers.0.mlp.gate_proj.weight": (4, 4)}, {}, 1, r"tensor fc\.weight is missing"),
        ({"fc.weight": (32, 96)}, {}, 1, r"shape \[32, 96\]; expected \[32, 64\] for EAGLE-1 heads"),
        ({"fc.weight": (32, 64)}, {}, 3, r"shape \[32, 64\]; expected \[32, 96\] for EAGLE-3 heads"),
        ({"fc.weight": (64, 128)}, {"hidden_size": 64}, 1, r"expected \[32, 64\].* target of hidden size 32"),
        ({"fc.weight": (32, 64)}, {"vocab_size": 12}, 1, r"for a vocabulary of 12 ids, the target has 10"),
    ],
)
def test_heads_that_do_not_fit(
    tmp_path: Path,
    target: ModelConfig,
    tensors: dict[str, tuple[int, ...]],
    config: dict[str, Any],
    version: int,
    message: str,
) -> None:
    write(tmp_path, {name: torch.zeros(shape) for name, shape in tensors.items()}, **config)
    with pytest.raises(TrtspecError, match=message):
        check_eagle(tmp_path, target, version)


def test_pickled_heads_are_read_like_others(tmp_path: Path, target: ModelConfig) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"bias": True}))
    torch.save({"fc.weight": torch.zeros(32, 64), "fc.bias": torch.zeros(32)}, tmp_path / "pytorch_model.bin")
    assert set(check_eagle(tmp_path, target, 1).shapes) == {"fc.weight", "fc.bias"}
    torch.save({"fc.weight": torch.zeros(32, 64)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(TrtspecError, match=r"fc\.bias is missing"):
        check_eagle(tmp_path, target, 1)
    torch.save({"fc.weight": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(TrtspecError, match=r"pytorch_model\.bin: not a file of tensors, or one that would run code"):
        check_eagle(tmp_path, target, 1)


def test_no_heads(tmp_path: Path, target: ModelConfig) -> None:
    with pytest.raises(TrtspecError, match=r"config\.json is missing"):
        check_eagle(tmp_path, target, 1)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TrtspecError, match=r"no weights; expected \*\.safetensors, or pytorch_model\.bin"):
        check_eagle(tmp_path, target, 1)


def test_offsets_are_added_to_the_drafts_own_ids() -> None:
    assert draft_ids(offsets(0, 1, 3, 5), 10).tolist() == [0, 2, 5, 8]
    assert draft_ids(offsets(0, 1, 3, 5), 10, marks(0, 2, 5, 8)).tolist() == [0, 2, 5, 8]
    assert draft_ids(offsets(0, 0, 0), 10, marks(0, 1, 2)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        ((0, 1, 2, 3), (0, 1, 2, 3), r"d2t holds absolute ids.*; expected offsets: .* i \+ d2t\[i\]"),
        ((0, 2, 5, 8), (0, 2, 5, 8), "d2t holds absolute ids"),
        ((0, 1, 3, 5), (0, 2, 5, 9), r"disagree: d2t maps to \[0, 2, 5, 8\], t2d marks \[0, 2, 5, 9\]"),
        ((0, 1, 3, 5), (0, 2, 5), "disagree"),
        ((0, 1, 3, 7), None, r"maps to \[0, 2, 5, 10\], which are no different ids below 10"),
        ((3, 0, 0, 0), None, "no different ids"),
        ((-1, 0, 0, 0), None, "no different ids"),
    ],
)
def test_wrong_maps(d2t: tuple[int, ...], t2d: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(TrtspecError, match=message):
        draft_ids(offsets(*d2t), 10, None if t2d is None else marks(*t2d))


def test_a_reduced_vocabulary_in_the_files(tmp_path: Path, target: ModelConfig) -> None:
    fc = {"fc.weight": torch.zeros(32, 96)}
    heads = check_eagle(write(tmp_path, fc | {"d2t": offsets(0, 1, 3, 5)}, draft_vocab_size=4), target, 3)
    assert heads.draft_vocab_size == 4
    check_eagle(write(tmp_path, fc, draft_vocab_size=10), target, 3)
    with pytest.raises(TrtspecError, match=r"d2t is missing: nothing says which of the 10 ids the 4 ids"):
        check_eagle(write(tmp_path, fc, draft_vocab_size=4), target, 3)
    absolute = {"d2t": offsets(0, 1, 2, 3), "t2d": marks(0, 1, 2, 3)}
    with pytest.raises(TrtspecError, match="absolute ids"):
        check_eagle(write(tmp_path, fc | absolute, draft_vocab_size=4), target, 3)
    with pytest.raises(TrtspecError, match=r"d2t has shape \[4\]; expected \[5\]"):
        check_eagle(write(tmp_path, fc | {"d2t": offsets(0, 1, 3, 5)}, draft_vocab_size=5), target, 3)
