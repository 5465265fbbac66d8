"""The best branching for a draft model: against all there are, and against what method tree then does."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from trtspec.cli import main
from trtspec.cli.common import target_answers
from trtspec.decoding.cycle import Request
from trtspec.models.source import open_model
from trtspec.plan.draft import draft_ranks
from trtspec.plan.tree import accuracies_of, best_branching, best_tree, branching_tree, chain, expected_tokens
from trtspec.runtime.engine import write_torch_engine
from trtspec.runtime.local import speculate
from trtspec.runtime.torch_runtime import TorchRuntime
from trtspec.spec.load import load_spec

ACCURACIES = [[0.5, 0.2, 0.1, 0.05], [0.35, 0.3, 0.1, 0.05], [0.25, 0.12, 0.05, 0.02]]
PROMPTS = ["Say hello.", "Why is the sky blue?", "Count to three.", "Name a river."]


def bigrams(*orders: list[int]) -> Any:
    """A draft model that finds, after token t, the tokens `orders[t]` likeliest, in this order."""
    logits = torch.full((len(orders), len(orders)), -9.0)
    for token, order in enumerate(orders):
        logits[token, order] = -torch.arange(float(len(order)))
    return SimpleNamespace(
        config=SimpleNamespace(vocab_size=len(orders)),
        device=torch.device("cpu"),
        hidden=lambda ids, cache, start: ids,
        head=lambda tokens: logits[tokens].clone(),
    )


def test_ranks_by_hand() -> None:
    """Prompt 0 1, answer 2 0 1 3: after 1 the 2 is third, after 2 the 0 is second, and then both are first."""
    draft = bigrams([1, 2, 3, 0], [0, 1, 2, 3], [3, 0, 1, 2], [0, 1, 2, 3])
    draft_of_more = bigrams([1, 2, 3, 0], [4, 0, 1, 2, 3], [4, 3, 0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3])
    for each in (draft, draft_of_more):  # id 4 is not known to the target, and is not proposed
        ranks = draft_ranks(each, [0, 1], [2, 0, 1, 3], 2, num_ids=4)
        assert ranks.tolist() == [[2, 1], [1, 0], [0, 3], [3, -1], [-1, -1]]
    assert accuracies_of([ranks], width=3) == [[1 / 4, 1 / 4, 1 / 4], [1 / 3, 1 / 3, 0.0]]


def test_behind_an_id_that_the_draft_does_not_know_nothing_is_right() -> None:
    draft = bigrams([1, 2, 0], [0, 1, 2], [0, 1, 2])
    assert draft_ranks(draft, [0], [1, 0, 7, 1], 1, num_ids=8)[:, 0].tolist() == [0, 0, -1, -1, -1]
    assert draft_ranks(draft, [7, 0], [1], 1, num_ids=8)[:, 0].tolist() == [-1, -1]


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 9, 14, 30])
def test_no_branching_is_better(nodes: int) -> None:
    found = best_branching(ACCURACIES, nodes)
    trees = [branching_tree(each) for depth in (1, 2, 3) for each in product(range(1, 5), repeat=depth)]
    best = max(expected_tokens(tree, ACCURACIES) for tree in trees if len(tree) <= nodes)
    assert len(branching_tree(found)) <= nodes
    assert expected_tokens(branching_tree(found), ACCURACIES) == pytest.approx(best)
    assert best <= expected_tokens(best_tree(ACCURACIES, nodes), ACCURACIES) + 1e-12


def test_branchings_by_hand() -> None:
    """Three nodes: a chain gives 0.5 (1 + 0.35 (1 + 0.25)) = 0.72, three side by side 0.8, two behind one 0.825."""
    assert best_branching(ACCURACIES, 3) == (1, 2)
    assert best_branching([[0.9, 0.0], [0.9, 0.0]], 20) == (1, 1)  # no node that is never right
    assert best_branching([[0.0], [0.5]], 9) == ()
    assert branching_tree((2, 1)) == [(0,), (1,), (0, 0), (1, 0)]


@pytest.fixture(scope="module")
def models(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for path in (save_model(folder / "target", seed=1), save_model(folder / "draft", seed=1, blend=(2, 0.1))):
        tensors = load_file(path / "model.safetensors")
        tensors["lm_head.weight"][[0, 2]] = 0.0  # end ids: never the likeliest
        save_file(tensors, path / "model.safetensors")
    return folder


@pytest.fixture
def config(models: Path, tmp_path: Path) -> Callable[..., Path]:
    """A spec of the two models."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))

    def write(name: str = "draft", **speculation: Any) -> Path:
        spec = {
            "version": 1,
            "target": {"model": str(models / "target"), "dtype": "float32"},
            "speculation": {"draft": {"model": str(models / name), "dtype": "float32"}, **speculation},
            "hardware": {"gpu": "cpu"},
            "engine": {"runtime": "torch"},
            "parity": {"prompts": "prompts.jsonl"},
        }
        path = tmp_path / "spec.yaml"
        path.write_text(json.dumps(spec))
        return path

    return write


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", "tree", *map(str, arguments)])


def test_tokens_a_pass_are_those_of_method_tree(config: Callable[..., Path], tmp_path: Path) -> None:
    """What the plan says of its tree and of the spec's, and what each then does on the same prompts."""
    path = config(method="tree", tree={"branching": [1, 2, 1]})
    result = run(path, "--nodes", 8, "--max-tokens", 20, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    said = list(figures["tokens_per_pass"].values())
    spec = load_spec(path)
    roles = {role: open_model(ref.model) for role, ref in spec.models.items()}
    _, texts = target_answers(spec, roles["target"], None, 20)
    assert (figures["prompts"], figures["answer_tokens"]) == (4, sum(len(answer) for _, answer in texts))
    for role, source in roles.items():
        build_config = {"max_draft_len": 8}
        stamp = {"source_fingerprint": source.fingerprint()}
        write_torch_engine(source, tmp_path / role, dtype="float32", role=role, build_config=build_config, stamp=stamp)
    for number, branching in ((0, figures["branching"]), (2, [1, 2, 1])):
        runtimes = {role: TorchRuntime(tmp_path / role, kv_cache_bytes=1 << 22) for role in roles}
        passes = 0
        for prompt, answer in texts:
            asked = Request(prompt, len(answer), num_draft_tokens=len(branching_tree(branching)))
            *_, last = speculate("tree", runtimes, asked, settings={"branching": tuple(branching)})
            assert last.generation.token_ids.tolist() == answer
            passes += last.generation.acceptance.num_target_passes
        assert said[number] == pytest.approx(figures["answer_tokens"] / passes)
    assert 1.2 < said[0] < 4.0 and said[0] != said[2]
    expected = list(figures["expected_tokens_per_pass"].values())
    assert expected[0] == pytest.approx(expected_tokens(branching_tree(figures["branching"]), figures["accuracies"]))
    assert expected[1] == pytest.approx(expected_tokens(chain(len(figures["branching"])), figures["accuracies"]))
    assert expected[3] == max(expected) and expected[0] >= expected[2]


def test_a_draft_that_is_always_right_gets_a_chain(config: Callable[..., Path]) -> None:
    path = config("target", method="draft_target", num_draft_tokens=3)
    result = run(path, "--nodes", 12, "--num-prompts", 2, "--max-tokens", 8)
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout) == {"speculation": {"method": "tree", "tree": {"branching": [1, 1, 1]}}}
    assert "# 4.00 tokens a target pass expected, 4.00 along the answers: branching [1, 1, 1], 3 nodes" in result.stdout
    assert "along the answers: a chain of 3; gained over it: 0 %" in result.stdout
    assert "answering 2 prompts" in result.stderr


def test_depth_bounds_the_plan_and_not_what_the_spec_has(config: Callable[..., Path]) -> None:
    path = config(method="tree", tree={"branching": [2, 1, 1]})
    shallow, deep = (
        json.loads(run(path, "--nodes", 10, "--depth", depth, "--max-tokens", 12, "--json").stdout) for depth in (1, 5)
    )
    assert len(shallow["branching"]) == 1 and len(deep["branching"]) > 1
    name = "branching [2, 1, 1] of the spec, 6 nodes"
    assert shallow["tokens_per_pass"][name] == deep["tokens_per_pass"][name]
    assert shallow["expected_tokens_per_pass"][name] == pytest.approx(deep["expected_tokens_per_pass"][name])


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({"method": "ngram", "ngram": {}}, "method ngram has no tree that is planned; expected method medusa, tree or"),
        ({"method": "early_exit", "early_exit": {"layer": 1}}, "use `trtspec plan exit`"),
        ({"method": "tree", "tree": {"drafts": [{"model": "draft"}]}}, "--set speculation.tree.drafts=[]"),
        ({"method": "draft_target", "draft": {"model": "missing"}}, "missing"),
    ],
)
def test_other_methods_are_refused(config: Callable[..., Path], speculation: dict[str, Any], message: str) -> None:
    result = run(config(**speculation), "--nodes", 5)
    assert result.exit_code == 1, result.output
    assert message in result.stderr


def test_what_measures_drafts_is_refused_for_heads(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[[0.5]]")
    result = run("--accuracies", path, "--nodes", 5, "--num-prompts", 3, "--depth", 2)
    assert result.exit_code == 2
    assert "--depth, --num-prompts: only for draft models" in result.stderr


def test_another_prompt_file(config: Callable[..., Path], tmp_path: Path) -> None:
    path = config(method="tree")
    result = run(path, "--nodes", 5, "--prompts", tmp_path / "none.jsonl")
    assert result.exit_code == 1 and "none.jsonl" in result.stderr
    (tmp_path / "one.jsonl").write_text('{"prompt": "Hello"}\n')
    result = run(path, "--nodes", 5, "--prompts", tmp_path / "one.jsonl", "--max-tokens", 12, "--json")
    assert json.loads(result.stdout)["prompts"] == 1
