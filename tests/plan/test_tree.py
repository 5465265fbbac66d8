"""The best token tree: against all trees there are, and from the front door."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.models.medusa import DEFAULT_CHOICES
from trtspec.plan.tree import Node, accuracies_of, best_tree, chain, expected_tokens, tokens_per_pass

ACCURACIES = [[0.5, 0.2, 0.1, 0.05], [0.35, 0.15, 0.1, 0.05], [0.25, 0.12, 0.05, 0.02], [0.2, 0.1, 0.05, 0.02]]


def all_trees(num_ranks: int, depth: int, size: int) -> Iterator[frozenset[Node]]:
    """Every tree of exactly `size` nodes, grown node by node."""
    nodes = [node for d in range(1, depth + 1) for node in product(range(num_ranks), repeat=d)]
    trees = {frozenset[Node]()}
    for _ in range(size):
        trees = {t | {n} for t in trees for n in nodes if n not in t and (len(n) == 1 or n[:-1] in t)}
    yield from trees


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_no_tree_is_better(size: int, seed: int) -> None:
    """Three heads of three ranks, right by chances in no order: rank 2 may be better than rank 0."""
    rng = np.random.default_rng(seed)
    accuracies = (rng.dirichlet(np.ones(4), size=3)[:, :3]).tolist()
    found = best_tree(accuracies, size)
    best = max(expected_tokens(list(tree), accuracies) for tree in all_trees(3, 3, size))
    assert len(found) == size and len(set(found)) == size
    assert all(len(node) == 1 or node[:-1] in found for node in found)
    assert expected_tokens(found, accuracies) == pytest.approx(best, abs=1e-12)


def test_large_trees_take_the_most_valuable_nodes() -> None:
    """With independent heads no node is worth more than its parent, so the best n nodes are a tree by themselves."""
    found = best_tree(ACCURACIES, 40)
    nodes = [node for depth in range(1, 5) for node in product(range(4), repeat=depth)]
    values = sorted((expected_tokens([node], ACCURACIES) - 1.0 for node in nodes), reverse=True)
    assert expected_tokens(found, ACCURACIES) == pytest.approx(1.0 + sum(values[:40]))


def test_a_rank_that_is_never_right_gets_no_node() -> None:
    assert best_tree([[0.6, 0.0], [0.5, 0.0]], 8) == [(0,), (0, 0)]
    assert best_tree([[0.0], [0.9]], 8) == []


def test_expected_tokens_by_hand() -> None:
    assert expected_tokens(chain(2), ACCURACIES) == pytest.approx(1 + 0.5 + 0.5 * 0.35)
    assert expected_tokens([(1,), (1, 2), (9,)], ACCURACIES) == pytest.approx(1 + 0.2 + 0.2 * 0.1)


def test_tokens_per_pass_by_hand() -> None:
    """Six tokens: behind the first, a hit of two nodes (three tokens), then a miss, then the rest."""
    ranks = np.array([[0, 1], [5, 5], [5, 5], [-1, 0], [1, -1], [-1, -1]], dtype=np.int16)
    # 0 -> tokens 1, 2 and the own 3; 3 -> the own 4; 4 -> (1,) is token 5, the end.
    assert tokens_per_pass([(0,), (0, 1), (1,)], [ranks]) == pytest.approx(5 / 3)
    assert tokens_per_pass([(0,)], [ranks]) == pytest.approx(5 / 4)
    assert tokens_per_pass([(0,)], [ranks, ranks[:1]]) == pytest.approx(5 / 4)  # one token needs no pass


def test_accuracies_are_given_that_the_tokens_before_were_found() -> None:
    ranks = np.array([[0, 2], [1, 0], [-1, 0], [0, 0], [0, -1], [-1, -1]], dtype=np.int16)
    # Head 0 speaks of the tokens behind 0..4: ranks 0, 1, none, 0, 0. Head 1 of 0..3; the third is behind a miss.
    assert accuracies_of([ranks], width=3) == [[3 / 5, 1 / 5, 0.0], [2 / 3, 0.0, 1 / 3]]


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["plan", "tree", *args])


@pytest.fixture
def accuracies(tmp_path: Path) -> Path:
    path = tmp_path / "acceptance.json"
    path.write_text(json.dumps({"accuracies": ACCURACIES}))
    return path


def test_the_command_prints_choices_for_the_spec(accuracies: Path) -> None:
    result = run("--accuracies", str(accuracies), "--nodes", "12")
    assert result.exit_code == 0, result.output
    choices = yaml.safe_load(result.stdout)["choices"]
    assert [tuple(path) for path in choices] == best_tree(ACCURACIES, 12)
    best, line, default = (float(text.split()[1]) for text in result.stdout.splitlines()[:3])
    assert best == pytest.approx(expected_tokens(best_tree(ACCURACIES, 12), ACCURACIES), abs=0.005)
    assert line == pytest.approx(expected_tokens(chain(4), ACCURACIES), abs=0.005)
    assert default == pytest.approx(expected_tokens(DEFAULT_CHOICES, ACCURACIES), abs=0.005)
    assert best > line


def test_the_command_as_json(accuracies: Path) -> None:
    result = run("--accuracies", str(accuracies), "--nodes", "7", "--json")
    assert len(json.loads(result.stdout)["choices"]) == 7


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
@pytest.mark.parametrize("name", ["tree.svg", "tree.png"])
def test_the_tree_as_a_picture(accuracies: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    result = run("--accuracies", str(accuracies), "--nodes", "9", "--plot", str(tmp_path / name))
    assert result.exit_code == 0, result.output
    content = (tmp_path / name).read_bytes()
    if name.endswith("svg"):
        assert content.decode().count("% -->") == 9  # a label a node, besides the root
    else:
        assert content.startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ('{"modes": {}}', "no accuracies in it"),
        ("[[0.5, 1.2]]", "no accuracies in it"),
        ("[[0.7, 0.6]]", "right more often than always"),
        ("[[0.0], [0.0]]", "no head is ever right"),
    ],
)
def test_wrong_figures_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    result = run("--accuracies", str(path), "--nodes", "5")
    assert result.exit_code == 1
    assert message in result.stderr and str(path) in result.stderr


def test_no_tree_is_planned_that_a_spec_would_refuse(accuracies: Path) -> None:
    result = run("--accuracies", str(accuracies), "--nodes", "64")
    assert result.exit_code == 2 and "64 is not in the range 1<=x<=63" in result.output


def test_one_source_of_figures_is_asked_for(accuracies: Path) -> None:
    for args in (
        [],
        [str(accuracies), "--accuracies", str(accuracies)],
        ["--accuracies", str(accuracies), "--measure"],
    ):
        result = run(*args, "--nodes", "5")
        assert result.exit_code == 2 and "CONFIG" in result.output
