"""Which draft fits which target: the verdict and its reasons, through `trtspec check` on tiny model directories."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tokenizers import AddedToken, Tokenizer, models

from trtspec.cli import main
from trtspec.models.pair import PairVerdict, check_pair
from trtspec.models.source import open_model

WORDS = ["<unk>", "</s>", "a", "b", "c", "d", "e", "f"]


def write_model(path: Path, words: list[str], *, added: tuple[str, ...] = (), **config: Any) -> None:
    """A model directory without weights: `words` are ids 0, 1, ..., `added` are added tokens behind them."""
    path.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    tokenizer.save(str(path / "tokenizer.json"))
    defaults = {
        "model_type": "llama",
        "vocab_size": len(words) + len(added),
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(defaults | config))


Check = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Run `trtspec check` on the models big and small; exit code and the lines about the pair."""
    monkeypatch.chdir(tmp_path)
    Path("t.yaml").write_text(
        "version: 1\ntarget: {model: big}\nspeculation: {method: draft_target, draft: {model: small}}\n"
    )

    def run(target: dict[str, Any], draft: dict[str, Any]) -> tuple[int, list[str]]:
        write_model(Path("big"), **({"words": WORDS} | target))
        write_model(Path("small"), **({"words": WORDS} | draft))
        result = CliRunner().invoke(main, ["check", "t.yaml"])
        lines = result.stdout.splitlines()
        assert (result.stderr, lines[0]) == ("", "support: accept")
        if result.exit_code == 0:
            assert lines.pop() == "plan: accept"
        return result.exit_code, lines[1:]

    return run


AGREE = {
    "tokenizer": "  the tokenizers agree in all 8 ids",
    "vocabulary": "  both vocabularies have 8 entries",
    "eos": "  both end at EOS ids 1",
    "context": "  the draft's context of 64 tokens covers the target's 64",
    "family": "  both are of the family llama",
}


def reasons(*first: str, **instead: str) -> list[str]:
    """`first`, then what agrees, except what is said instead (empty: nothing)."""
    return [*first, *(line for line in (AGREE | instead).values() if line)]


ACCEPT, NOTE, REFUSE = (
    f"pair: big with draft small: {verdict}" for verdict in ("accept", "accept, with a note", "refuse")
)

PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], int, list[str]]] = {
    "the same": ({}, {}, 0, [ACCEPT, *reasons()]),
    # 151936 and 152064 entries over one tokenizer, in small
    "padded vocabulary": (
        {"vocab_size": 16}, {"vocab_size": 12}, 0,
        [NOTE, *reasons("  the vocabularies have 16 (target) and 12 (draft) entries; draft logits are padded with "
                        "-inf to 16", vocabulary="")],
    ),
    "draft padded further": (
        {}, {"vocab_size": 12}, 0,
        [NOTE, *reasons("  the vocabularies have 8 (target) and 12 (draft) entries; draft logits are cut to 8",
                        vocabulary="")],
    ),
    # 32000 and 32001 entries, the extra one an added token
    "added token at the target's tail": (
        {"added": ("<pad>",)}, {}, 0,
        [ACCEPT, *reasons(
            tokenizer="  the tokenizers agree in all 8 shared ids; only the target goes on, with added tokens "
            "from id 8: '<pad>'",
            vocabulary="  the vocabularies have 9 (target) and 8 (draft) entries; draft logits are padded with -inf "
            "to 9",
        )],
    ),
    "added token at the draft's tail": (
        {}, {"added": ("<pad>",)}, 0,
        [ACCEPT, *reasons(
            tokenizer="  the tokenizers agree in all 8 shared ids; only the draft goes on, with added tokens "
            "from id 8: '<pad>'",
            vocabulary="  the vocabularies have 8 (target) and 9 (draft) entries; draft logits are cut to 8",
        )],
    ),
    "ordinary token at the tail": (
        {"words": [*WORDS, "g"]}, {}, 0,
        [NOTE, *reasons(
            "  the tokenizers agree in all 8 shared ids; only the target goes on, with ordinary tokens from id 8: 'g'",
            tokenizer="",
            vocabulary="  the vocabularies have 9 (target) and 8 (draft) entries; draft logits are padded with -inf "
            "to 9",
        )],
    ),
    "ids 5 and 6 swapped": (
        {}, {"words": ["<unk>", "</s>", "a", "b", "c", "e", "d", "f"]}, 1,
        [REFUSE, *reasons("  the tokenizers differ in 2 of 8 ids, first in id 5: 'd' in the target, 'e' in the draft; "
                          "use a draft with the target's tokenizer", tokenizer="")],
    ),
    "id 0 different": (
        {}, {"words": ["<s>", *WORDS[1:]]}, 1,
        [REFUSE, *reasons("  the tokenizers differ in 1 of 8 ids, first in id 0: '<unk>' in the target, '<s>' in the "
                          "draft; use a draft with the target's tokenizer", tokenizer="")],
    ),
    "two tails": (
        {"added": ("<x>",)}, {"added": ("<y>",)}, 1,
        [REFUSE, *reasons("  the tokenizers differ in 1 of 9 ids, first in id 8: '<x>' in the target, '<y>' in the "
                          "draft; use a draft with the target's tokenizer", tokenizer="",
                          vocabulary="  both vocabularies have 9 entries")],
    ),
    "all EOS ids, in any order": (
        {"eos_token_id": [1, 2]}, {"eos_token_id": [2, 1]}, 0, [ACCEPT, *reasons(eos="  both end at EOS ids 1, 2")],
    ),
    "other EOS ids": (
        {"eos_token_id": [1, 2]}, {"eos_token_id": 1}, 0,
        [NOTE, *reasons("  EOS ids are 1, 2 (target) and 1 (draft); the target's count for both", eos="")],
    ),
    "no EOS id": (
        {"eos_token_id": None}, {}, 0,
        [NOTE, *reasons("  the target names no EOS id: only max_tokens and stop words end a text", eos="")],
    ),
    "other BOS id": (
        {}, {"bos_token_id": None}, 0,
        [NOTE, *reasons("  BOS ids are 0 (target) and None (draft); both get the target's")],
    ),
    "short context": (
        {}, {"max_position_embeddings": 32}, 0,
        [NOTE, *reasons("  the draft's context of 32 tokens is shorter than the target's 64: longer texts get no "
                        "drafts", context="")],
    ),
    "long context": (
        {}, {"max_position_embeddings": 128}, 0,
        [ACCEPT, *reasons(context="  the draft's context of 128 tokens covers the target's 64")],
    ),
    "other family": (
        {}, {"model_type": "mistral"}, 0,
        [NOTE, *reasons("  the families differ: llama (target) and mistral (draft)", family="")],
    ),
    "tokenizer larger than the model": (
        {}, {"added": ("<pad>",), "vocab_size": 8}, 0,
        [NOTE, *reasons(
            "  the draft's tokenizer has 9 ids, its model only 8: a text with one of the others cannot be processed",
            tokenizer="  the tokenizers agree in all 8 shared ids; only the draft goes on, with added tokens "
            "from id 8: '<pad>'",
        )],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("target", "draft", "code", "lines"), PAIRS.values(), ids=PAIRS)
def test_the_verdict_on_a_pair(
    check: Check, target: dict[str, Any], draft: dict[str, Any], code: int, lines: list[str]
) -> None:
    assert check(target, draft) == (code, lines)


def test_an_empty_tokenizer_is_refused(check: Check) -> None:
    code, lines = check({}, {"words": [], "vocab_size": 8})
    assert (code, lines[:2]) == (1, [REFUSE, "  the tokenizer of the draft small is empty"])


def test_eos_ids_of_both_config_files_count(check: Check, tmp_path: Path) -> None:
    write_model(tmp_path / "a", WORDS, eos_token_id=2)
    write_model(tmp_path / "b", WORDS, eos_token_id=[2, 3])
    (tmp_path / "a" / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    outcome = check_pair(open_model(str(tmp_path / "a")), open_model(str(tmp_path / "b")))
    assert outcome == PairVerdict("accept", [line.strip() for line in reasons(eos="both end at EOS ids 2, 3")])


def test_the_most_severe_reason_comes_first(tmp_path: Path) -> None:
    write_model(tmp_path / "a", WORDS)
    write_model(tmp_path / "b", WORDS[::-1], eos_token_id=2, vocab_size=16, model_type="qwen2")
    outcome = check_pair(open_model(str(tmp_path / "a")), open_model(str(tmp_path / "b")))
    assert outcome.verdict == "refuse"
    assert "first in id 0: '<unk>' in the target, 'f' in the draft" in outcome.reasons[0]
    assert [reason.split()[0] for reason in outcome.reasons[1:]] == ["the", "EOS", "the", "the"]


def test_both_drafts_of_a_cascade_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("big", "middle", "small"):
        write_model(Path(name), WORDS)
    Path("t.yaml").write_text(
        "version: 1\ntarget: {model: big}\nspeculation: {method: cascade, draft: {model: small}, "
        "cascade: {middle: {model: middle}}}\n"
    )
    result = CliRunner().invoke(main, ["check", "t.yaml"])
    assert result.exit_code == 0
    assert [line for line in result.stdout.splitlines() if not line.startswith(" ")] == [
        "support: accept",
        "pair: big with middle middle: accept",
        "pair: big with draft small: accept",
        "plan: accept",
    ]


def test_a_split_that_does_not_divide_the_model_is_refused_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("big"), WORDS)
    Path("t.yaml").write_text(
        "version: 1\ntarget: {model: big, tensor_parallel: 3}\nspeculation: {method: none}\n"
        "hardware: {gpu: H100-SXM, num_gpus: 4}\nengine: {runtime: tensorrt_llm}\n"
    )
    result = CliRunner().invoke(main, ["check", "t.yaml"])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-2] == "plan: refuse"
    assert "t.yaml:2: target.tensor_parallel" in result.stdout.splitlines()[-1]


def test_without_a_draft_there_is_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("big"), WORDS)
    Path("t.yaml").write_text("version: 1\ntarget: {model: big}\nspeculation: {method: none}\n")
    result = CliRunner().invoke(main, ["check", "t.yaml"])
    assert (result.exit_code, result.output) == (
        0,
        "support: accept\npair: method none has no draft model to compare with big\nplan: accept\n",
    )


BROKEN_MODELS = {
    "no directory": (None, "./small: no such model directory"),
    "no config": ("config.json", "config.json is missing"),
    "no tokenizer": ("tokenizer.json", "tokenizer.json is missing"),
}


@pytest.mark.parametrize(("missing", "message"), BROKEN_MODELS.values(), ids=BROKEN_MODELS)
def test_a_broken_model_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("big"), WORDS)
    if missing:
        write_model(Path("small"), WORDS)
        (Path("small") / missing).unlink()
    Path("t.yaml").write_text(
        "version: 1\ntarget: {model: big}\nspeculation: {method: draft_target, draft: {model: ./small}}\n"
    )
    result = CliRunner().invoke(main, ["check", "t.yaml"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert message.removeprefix("./") in result.stderr and "small" in result.stderr
