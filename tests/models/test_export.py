"""A model as a Hugging Face directory of its own: what transformers reads from it is the same model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trtspec.models import export as module
from trtspec.models.export import export
from trtspec.models.source import ModelSource, open_model
from trtspec.models.surgery import truncated


def logits(directory: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def as_it_was(source: ModelSource) -> dict[str, torch.Tensor]:
    return {name: source.tensor(name) for name in source.tensor_names()}


def test_a_directory_is_linked_not_copied(tiny_model_dir: Path, tmp_path: Path) -> None:
    export(open_model(str(tiny_model_dir)), tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    assert weights.stat().st_ino == (tiny_model_dir / "model.safetensors").stat().st_ino
    assert torch.equal(logits(tmp_path / "out", [5, 6, 7]), logits(tiny_model_dir, [5, 6, 7]))


def test_another_type_is_written_in_pieces(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 20_000)
    source, seen = open_model(str(tiny_model_dir)), []
    export(source, tmp_path / "out", dtype="bfloat16", advance=seen.append)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    written = open_model(str(tmp_path / "out"))
    written.check()
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in as_it_was(written).values())
    assert seen == sorted(seen) and seen[-1] == 1.0
    for name, tensor in as_it_was(source).items():
        assert torch.equal(written.tensor(name), tensor.bfloat16()), name


def test_the_first_layers_stand_by_themselves(tiny_model_dir: Path, tmp_path: Path) -> None:
    """What transformers makes of the exported directory is the original model with its last layers taken off."""
    export(truncated(open_model(str(tiny_model_dir)), 1), tmp_path / "out")
    whole = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    del whole.model.layers[1:]
    whole.config.num_hidden_layers = 1
    with torch.inference_mode():
        expected = whole(torch.tensor([[5, 6, 7]]), use_cache=False).logits[0]
    assert torch.equal(logits(tmp_path / "out", [5, 6, 7]), expected)


def test_the_tokenizer_comes_along(tiny_model_dir: Path, tmp_path: Path) -> None:
    source = open_model(str(tiny_model_dir))
    export(source, tmp_path / "out", dtype="float16")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("the draft", add_special_tokens=False) == source.encode("the draft")
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == source.chat(messages)
