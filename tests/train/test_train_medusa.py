"""`trtspec train medusa` from the front door: a whole run, its files, measuring again, and wrong input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from trtspec.cli import main
from trtspec.models.medusa import open_medusa
from trtspec.models.source import open_model
from trtspec.plan.tree import best_tree
from trtspec.runtime.llama import Llama, load_weights
from trtspec.runtime.medusa import MedusaHeads
from trtspec.spec.schema import Medusa
from trtspec.train.answers import fast_dtype
from trtspec.train.heads import (
    PIECE,
    HeadSample,
    HeadTrainer,
    initial_heads,
    load_head_samples,
    pieces,
    text_ranks,
)
from trtspec.train.loop import HELD_OUT

PROMPTS = [{"category": "code", "prompt": "def f"}, {"category": "chat", "prompt": "hello there"}]


def arguments(model: Path, folder: Path, *extra: str) -> list[str]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, PROMPTS)))
    return [
        "train", "medusa", "--target", str(model), "--output", str(folder / "heads"),
        "--work-dir", str(folder / "work"), "--prompts", str(prompts),
        "--tokens", "600", "--steps", "6", "--heads", "2", "--layers", "2", "--vocab", "64", "--workers", "1", *extra,
    ]  # fmt: skip


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


@pytest.fixture(scope="module")
def trained(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    result = run(*arguments(tiny_model_dir, folder))
    assert result.exit_code == 0, result.output
    stages = [line.split(":")[0] for line in result.stderr.splitlines()]
    assert list(dict.fromkeys(stages)) == ["generate", "train", "measure"]
    assert "greedy, all: tokens a target pass" in result.stdout
    return folder


def test_what_is_written_is_what_other_readers_of_heads_expect(tiny_model_dir: Path, trained: Path) -> None:
    heads = trained / "heads"
    assert {p.name for p in heads.iterdir()} == {
        "config.json", "medusa_lm_head.safetensors", "acceptance.json", "README.md",
    }  # fmt: skip
    assert not [path for path in trained.iterdir() if path.name.startswith(".")]
    found = open_medusa(heads)
    found.check(open_model(str(tiny_model_dir)).config, Medusa(heads="h", num_heads=2, num_layers=2))
    assert not found.has_own_output
    tensors = load_file(heads / "medusa_lm_head.safetensors")
    assert tensors["1.0.linear.weight"].dtype == torch.bfloat16 and tensors["1.0.linear.weight"].abs().sum() > 0
    config = json.loads((heads / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, 2)


def test_figures_and_card_agree(trained: Path) -> None:
    figures = json.loads((trained / "heads" / "acceptance.json").read_text())
    assert set(figures["modes"]) == {"greedy", "temperature 1"}
    assert set(figures["modes"]["greedy"]) == {"all", "code", "chat"}
    assert figures["training"]["steps"] == 6
    greedy = figures["modes"]["greedy"]["all"]
    assert set(greedy["tokens_per_pass"]) == {"chain of 2", "15 nodes", "40 nodes"}
    assert all(row == sorted(row) for row in greedy["top_1_to_5"])  # the first two are right where the first is
    card = (trained / "heads" / "README.md").read_text()
    best = max(greedy["tokens_per_pass"].values())
    assert f"{best:.2f} tokens a target pass" in card
    training = figures["training"]
    assert 0 < training["own_prompts"] < training["answers"]
    assert f"{100 * training['own_prompts'] / training['answers']:.0f} % of which it wrote itself" in card
    assert f"made in {training['dtype']}" in card and f"{training['loss_trained']:.2f} on answers that were" in card
    assert figures["command"] in card and "trtspec train medusa --measure-only" in card


def test_the_recorded_states_are_the_targets(tiny_model_dir: Path, trained: Path) -> None:
    source = open_model(str(tiny_model_dir))
    model = Llama(source.config, load_weights(source))
    shard = sorted((trained / "work" / "answers").glob("*.safetensors"))[0]
    data = load_file(shard)
    length, prompt_len = int(data["length"][0]), int(data["prompt_len"][0])
    with torch.inference_mode():
        states = model.hidden(data["tokens"][None, :length].long(), None, 0)[0, prompt_len - 1 : length - 1]
    recorded = data["states"][: length - prompt_len].float()
    rounding = (2e-2, 2e-2) if fast_dtype() == torch.float32 else (0.1, 0.05)  # of answers made in bfloat16
    torch.testing.assert_close(recorded, states, atol=rounding[0], rtol=rounding[1])
    assert len(states) < 2 or (recorded[1:] - states[:-1]).abs().max() > 0.5, "another token's state would be seen"
    sample = load_head_samples([shard], torch.arange(280), 280)[0]
    assert sample.tokens.tolist() == data["tokens"][prompt_len:length].tolist()
    assert sample.states.shape == (length - prompt_len, 32)


def test_measuring_again_gives_the_same_figures(tiny_model_dir: Path, trained: Path) -> None:
    before = json.loads((trained / "heads" / "acceptance.json").read_text())
    result = run(*arguments(tiny_model_dir, trained, "--measure-only", "--json"))
    assert result.exit_code == 0, result.output
    after = json.loads(result.stdout.splitlines()[-1])
    for key in ("modes", "trees", "accuracies", "training"):
        assert after[key] == before[key]


def test_measuring_on_some_prompts_is_said(tiny_model_dir: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "heads", tmp_path / "heads")
    command = [*arguments(tiny_model_dir, tmp_path, "--measure-only"), "--num-prompts", "1"]
    result = run(*command)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "heads" / "acceptance.json").read_text())
    assert figures["prompts"] == 1 and set(figures["modes"]["greedy"]) == {"all", "code"}
    card = (tmp_path / "heads" / "README.md").read_text()
    assert "1 unseen prompts" in card and "--num-prompts 1" in card


def test_a_tree_is_planned_from_the_figures(tiny_model_dir: Path, trained: Path) -> None:
    path = trained / "heads" / "acceptance.json"
    result = run("plan", "tree", "--accuracies", str(path), "--nodes", "6", "--json")
    assert result.exit_code == 0, result.output
    found = [tuple(node) for node in json.loads(result.stdout)["choices"]]
    assert found == best_tree(json.loads(path.read_text())["accuracies"], 6)


def test_a_tree_is_planned_for_a_spec_with_and_without_figures(
    tiny_model_dir: Path, trained: Path, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"version: 1\ntarget: {{model: {tiny_model_dir}}}\nspeculation:\n  method: medusa\n  medusa: "
        f"{{heads: {trained / 'heads'}, num_heads: 2, num_layers: 2, choices: [[0]]}}\n"
        f"parity: {{prompts: {trained / 'prompts.jsonl'}}}\n"
    )
    answers = []
    for options in ([], ["--measure", "--work-dir", str(trained / "work")]):
        result = run("plan", "tree", str(spec), "--nodes", "5", "--json", *options)
        assert result.exit_code == 0, result.output
        answers.append(json.loads(result.stdout))
    assert answers[0]["choices"] == answers[1]["choices"]


def samples(count: int, generator: torch.Generator) -> list[HeadSample]:
    """Texts in which the token is what the state says: state i is one-hot of token i; the next one is token + 1."""
    made = []
    for index in range(count):
        begin = int(torch.randint(0, 20, (1,), generator=generator))
        tokens = (begin + torch.arange(12)) % 20
        states = torch.nn.functional.one_hot(tokens, 20).bfloat16()
        made.append(HeadSample(index + 1, states, tokens, tokens[:, None], torch.ones(12, 1)))
    return made


@pytest.mark.parametrize("kept", [20, 8], ids=["all ids", "8 ids and a sample of the others"])
def test_heads_learn_what_comes(kept: int) -> None:
    """Ids that are not always in the loss are never a target here, and must not be guessed for that."""
    generator = torch.Generator().manual_seed(0)
    texts = samples(40, generator)
    output = 4.0 * torch.eye(20)
    ids = torch.arange(kept)
    if kept < 20:
        texts = [HeadSample(s.index, s.states, s.tokens % 8, (s.tokens % 8)[:, None], s.probs) for s in texts]
    trainer = HeadTrainer(initial_heads(2, 1, 20), output, ids, texts, num_sampled=4, batch_tokens=64, lr=3e-2)
    before = float(trainer.loss(texts).detach())
    trainer.train(steps=120)
    assert float(trainer.loss(texts).detach()) < 0.3 * before
    ranks = text_ranks(trainer.heads, texts[0].states, texts[0].tokens)
    assert (ranks[:11, 0] == 0).all() and (ranks[:10, 1] == 0).all()


def test_an_answer_is_cut_without_losing_a_token() -> None:
    """Every pair of a state and the token ahead of it is in a piece, for every head."""
    tokens = torch.arange(3 * PIECE + 5)
    whole = HeadSample(1, tokens[:, None].bfloat16(), tokens, tokens[:, None], torch.ones(len(tokens), 1))
    cut = pieces(whole, 2)
    assert max(len(piece.tokens) for piece in cut) <= PIECE + 2
    for ahead in (1, 2):
        pairs = {(int(s), int(t)) for p in cut for s, t in zip(p.states[:-ahead, 0], p.tokens[ahead:], strict=True)}
        assert pairs == {(i, i + ahead) for i in range(len(tokens) - ahead)}


def test_ranks_are_of_the_token_that_many_places_on() -> None:
    """Heads of zeros repeat the target's own guess: state i one-hot of token i guesses token i."""
    tokens = torch.tensor([3, 3, 5, 3])
    heads = MedusaHeads(initial_heads(2, 1, 20), torch.eye(20))
    ranks = text_ranks(heads, torch.nn.functional.one_hot(tokens, 20), tokens)
    assert ranks[0, 0] == 0  # token 1 is 3 again
    assert ranks[1, 0] != 0 and ranks[1, 1] == 0  # token 2 is another, token 3 is 3
    assert ranks[3].tolist() == [-1, -1] and ranks[2, 1] == -1  # behind the end


def test_prompts_kept_aside_are_not_trained_on() -> None:
    texts = samples(3 * HELD_OUT, torch.Generator().manual_seed(0))
    trainer = HeadTrainer(initial_heads(1, 1, 20), torch.eye(20), torch.arange(20), texts)
    assert len(trainer.held_out) == 3
    assert {s.index for s in trainer.held_out}.isdisjoint(s.index for s in trainer.samples)


def test_heads_of_another_target_are_refused_before_anything_is_recorded(
    tiny_model_dir: Path, trained: Path, tmp_path: Path
) -> None:
    """By config.json, and by the shapes."""
    for change in ("config", "shapes"):
        folder = tmp_path / change
        (folder / "heads").mkdir(parents=True)
        config = json.loads((trained / "heads" / "config.json").read_text())
        tensors = load_file(trained / "heads" / "medusa_lm_head.safetensors")
        if change == "config":
            config["vocab_size"] = 281
        else:
            tensors = {n: torch.zeros([48] * t.ndim) for n, t in tensors.items()}
            config = {}
        (folder / "heads" / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "heads" / "medusa_lm_head.safetensors")
        result = run(*arguments(tiny_model_dir, folder, "--measure-only"))
        assert result.exit_code == 1
        assert "use the heads that were trained for this target" in result.stderr
        assert not (folder / "work").exists()


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        (["--prompts", "nowhere.jsonl"], 1, "nowhere.jsonl: no such prompt file"),
        (["--target", "./nowhere"], 1, "no such model directory"),
        (["--heads", "0"], 2, "--heads"),
        (["--measure-only", "--output", "nowhere"], 1, "no Medusa heads"),
    ],
)
def test_wrong_input_is_one_line(
    tiny_model_dir: Path, tmp_path: Path, extra: list[str], code: int, message: str
) -> None:
    result = run(*arguments(tiny_model_dir, tmp_path, *extra))
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "heads").exists()
