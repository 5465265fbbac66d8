"""What a spec asks of drafters that are not there or belong to another model: refused before any weight is read.

`trtspec check` and `trtspec build` say the same, in one line, with what was expected and what was found.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import save_file

from trtspec.cli import main
from trtspec.errors import EXIT_ERROR


@pytest.fixture(scope="module")
def root(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("refusals")
    target = save_model(root / "target")
    config = json.loads((target / "config.json").read_text())
    save_model(root / "draft", blend=(1, 0.1))
    swap_ids(save_model(root / "foreign", blend=(1, 0.1)), 5, 6)
    modules = Path(shutil.copytree(target, root / "no-modules"))
    (modules / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    save_heads(root / "heads", hidden, vocab)
    save_heads(root / "wide-heads", hidden + 8, vocab)
    save_heads(root / "other-heads", hidden, vocab + 8)
    # a middle model with further ids of its own, in which its draft does not agree with it
    for name in ("long-middle", "long-draft"):
        add_ids(save_model(root / name, blend=(1, 0.1)), [f"<{name} {i}>" for i in range(4)])
    return root


def save_heads(directory: Path, hidden: int, vocab: int) -> None:
    directory.mkdir()
    tensors = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(hidden, hidden)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(hidden)
        tensors[f"{head}.1.weight"] = torch.zeros(vocab, hidden)
    save_file(tensors, directory / "medusa_lm_head.safetensors")


def swap_ids(model: Path, one: int, other: int) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = (next(token for token, i in vocabulary.items() if i == n) for n in (one, other))
    vocabulary[a], vocabulary[b] = other, one
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


def add_ids(model: Path, words: list[str]) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first = 1 + max([*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])])
    vocabulary.update({word: first + i for i, word in enumerate(words)})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


def ref(name: str, **more: Any) -> dict[str, Any]:
    return {"model": f"./{name}", "dtype": "float32", **more}


def medusa(heads: str, **settings: Any) -> dict[str, Any]:
    return {"method": "medusa", "medusa": {"heads": heads, "num_heads": 2, "choices": [[0], [0, 0]], **settings}}


def cascade(middle: str, *lower: str) -> dict[str, Any]:
    """The last of `lower` is the draft."""
    *middles, draft = map(ref, lower)
    return {"method": "cascade", "draft": draft, "cascade": {"middle": ref(middle), "middles": middles}}


def tree(**settings: Any) -> dict[str, Any]:
    return {"method": "tree", "draft": ref("draft"), "tree": settings}


# What is asked for -> (speculation, further sections, parts of the message).
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "heads of another hidden size": (medusa("./wide-heads"), {}, ("has shape [", "for a target of hidden size")),
    "heads of another vocabulary": (medusa("./other-heads"), {}, ("has shape [288, ", "280 ids")),
    "heads that are not there": (medusa("./nowhere"), {}, ("nowhere",)),
    "more heads than there are": (
        medusa("./heads", num_heads=3),
        {},
        ("3 Medusa heads are asked for, and there are 2",),
    ),
    "a tree deeper than the heads": (
        medusa("./heads", choices=[[0], [0, 0], [0, 0, 0]]),
        {},
        ("path [0, 0, 0] is deeper than num_heads 2",),
    ),
    "a tree with a missing prefix": (
        medusa("./heads", choices=[[0], [1, 0]]),
        {},
        ("the parent of path [1, 0] is missing; add [1]",),
    ),
    "a tree of heads wider than the vocabulary": (
        medusa("./heads", choices=[[280]]),
        {},
        ("a node of the tree has 281 children", "at most 280"),
    ),
    "a tree of more nodes than the engine takes": (
        tree(branching=[2, 2]),
        {"engine": {"max_input_len": 64, "max_seq_len": 128, "max_draft_len": 5}},
        ("engine.max_draft_len: 5 does not fit the 6 draft tokens",),
    ),
    "an exit layer outside the model": (
        {"method": "early_exit", "early_exit": {"layer": 40}},
        {},
        ("the first 40 of ", "layers are no smaller model"),
    ),
    "a middle model of another tokenizer": (
        cascade("foreign", "draft"),
        {},
        ("the tokenizers differ in 2 of ", "first in id 5"),
    ),
    "a draft of another tokenizer than the middle model": (
        cascade("draft", "foreign"),
        {},
        ("the tokenizers differ in 2 of ", "first in id 5"),
    ),
    "a draft that agrees with the target and not with the middle model": (
        cascade("long-middle", "long-draft"),
        {},
        ("'<long-middle 0>' in the middle, '<long-draft 0>' in the draft",),
    ),
    "a second middle model of another tokenizer": (
        cascade("draft", "foreign", "draft"),
        {},
        ("the tokenizers differ in 2 of ", "first in id 5"),
    ),
    "a second middle model that does not agree with the first": (
        cascade("long-middle", "long-draft", "draft"),
        {},
        ("'<long-middle 0>' in the middle, '<long-draft 0>' in the draft",),
    ),
    "a draft that does not agree with the third middle model": (
        cascade("draft", "draft", "long-middle", "long-draft"),
        {},
        ("'<long-middle 0>' in the middle_3, '<long-draft 0>' in the draft",),
    ),
    "a further draft of another tokenizer": (
        tree(branching=[1], drafts=[ref("foreign")]),
        {},
        ("the tokenizers differ in 2 of ", "first in id 5"),
    ),
    "MTP of a model without modules": ({"method": "mtp"}, {}, ("num_nextn_predict_layers is 0",)),
    "MTP without its tensors": (
        {"method": "mtp"},
        {"target": ref("no-modules")},
        ("no weight under model.layers.", "where multi-token prediction module 1 of 1 should be"),
    ),
}


@pytest.mark.parametrize("command", ["check", "build"])
@pytest.mark.parametrize("asked", REFUSED)
def test_what_does_not_fit_is_refused_from_the_headers(
    root: Path, asked: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculation, sections, parts = REFUSED[asked]
    content = {"version": 1, "target": ref("target"), "speculation": speculation}
    content |= {"engine": {"max_input_len": 64, "max_seq_len": 128}} | sections
    config = root / f"{command}.yaml"
    config.write_text(yaml.safe_dump(content))
    for reader in ("trtspec.models.source.HFSource.tensor", "trtspec.models.medusa.MedusaHeads.linear"):
        monkeypatch.setattr(reader, lambda *words: pytest.fail("a weight was read"))
    result = CliRunner().invoke(main, [command, str(config)])
    assert result.exit_code == EXIT_ERROR, result.output
    lines = [line for line in (result.stdout + result.stderr).splitlines() if all(part in line for part in parts)]
    assert lines, result.output
    assert "Traceback" not in result.output
    assert not (root / "engines" / command / "target").exists()


def test_a_tree_wider_than_a_vocabulary_is_refused(root: Path, save_model: Callable[..., Path]) -> None:
    """Wide trees have few ids only in toy models: the vocabulary is cut for this one."""
    from dataclasses import replace

    from trtspec.build import limits
    from trtspec.errors import TrtspecError
    from trtspec.models.source import open_model
    from trtspec.spec.load import load_spec

    config = root / "wide.yaml"
    content = {"version": 1, "target": ref("target"), "speculation": tree(branching=[9])}
    config.write_text(yaml.safe_dump(content))
    model = open_model(str(root / "target")).config
    with pytest.raises(
        TrtspecError, match="a node of the tree has 9 children, and the vocabulary of the draft has 8 ids"
    ):
        limits.plan(load_spec(config), {"target": model, "draft": replace(model, vocab_size=8)})
