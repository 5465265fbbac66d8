"""Token trees by themselves: their shape, and what the target keeps of one in cases made by hand and at random.

How sampled outputs are distributed is in test_law.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from decoding_doubles import fixed_model, script_model, table_model

from trtspec.decoding.engine_call import EngineRequest
from trtspec.decoding.sampling import SamplingParams, Uniforms
from trtspec.decoding.token_tree import ROOT, TokenTree, verify_tree
from trtspec.decoding.verify import verify

SHAPES = [[[0]], [[0], [1], [2]], [[0], [0, 0], [0, 0, 0]], [[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]]]
CONTEXT = np.array([3, 1, 2], dtype=np.int32)


def tree_of(*nodes: tuple[int, int]) -> TokenTree:
    """Of (parent, token) pairs."""
    return TokenTree(np.array([t for _, t in nodes], np.int32), np.array([p for p, _ in nodes], np.int32))


def random_tree(rng: np.random.Generator, vocab_size: int, size: int) -> TokenTree:
    nodes: list[tuple[int, int]] = []
    while len(nodes) < size:
        node = (int(rng.integers(ROOT, len(nodes))) if nodes else ROOT, int(rng.integers(vocab_size)))
        if node not in nodes:
            nodes.append(node)
    return tree_of(*nodes)


def rows_of(model, tree: TokenTree) -> np.ndarray:
    texts = [tuple(CONTEXT.tolist()) + tuple(tree.tokens[tree.path(node)].tolist()) for node in range(ROOT, len(tree))]
    return np.array([model(text) for text in texts])


def request_of(size: int, **fields) -> EngineRequest:
    return EngineRequest(CONTEXT, size + 1, **fields)


# ---- shape


def test_a_tree_from_choices() -> None:
    tree = TokenTree.from_choices([[1], [0], [0, 1, 0], [0, 0], [0, 1]])
    assert tree.tokens.tolist() == [0, 1, 0, 1, 0]  # level by level, siblings by rank
    assert tree.parents.tolist() == [ROOT, ROOT, 0, 0, 3]
    assert tree.depths().tolist() == [0, 0, 1, 1, 2]
    assert tree.paths() == [[1], [0, 2], [0, 3, 4]]
    assert tree.children(ROOT) == [0, 1] and tree.children(0) == [2, 3] and tree.children(4) == []
    assert tree.mask().astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize("choices", SHAPES, ids=str)
def test_depths_and_masks_agree_with_paths(choices) -> None:
    tree = TokenTree.from_choices(choices)
    for node in range(len(tree)):
        assert tree.path(node) == np.flatnonzero(tree.mask()[node]).tolist()
        assert len(tree.path(node)) == tree.depths()[node] + 1
    assert {node for path in tree.paths() for node in path} == set(range(len(tree)))


def test_following_tokens() -> None:
    tree = tree_of((ROOT, 5), (ROOT, 6), (1, 5), (2, 7))
    assert tree.follow([6, 5, 7, 1]) == [1, 2, 3]
    assert tree.follow([6, 7]) == [1]
    assert tree.follow([7]) == tree.follow([]) == []


@pytest.mark.parametrize(
    ("tokens", "parents", "logits", "message"),
    [
        ([1, 2], [ROOT], None, r"\[1\] parents for \[2\] tokens"),
        ([-1], [ROOT], None, "-1 is not a token id"),
        ([1, 2], [1, ROOT], None, r"parents \[1, -1\] do not all come before"),
        ([1, 2], [ROOT, 1], None, "do not all come before"),
        ([1], [-2], None, "do not all come before"),
        ([1, 2, 2], [ROOT, 0, 0], None, "two children of one node are the same token"),
        ([1, 2], [ROOT, 0], np.zeros((1, 4), np.float32), "1 rows of logits for 2 tokens"),
    ],
)
def test_what_is_no_tree(tokens, parents, logits, message) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree(np.array(tokens, np.int32), np.array(parents, np.int32), logits)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], [1, 0]], r"\[1, 0\] is listed, its beginning \[1\] is not"),
        ([[0], [0]], "listed twice"),
        ([[0], []], "an empty path"),
    ],
)
def test_choices_that_are_no_tree(choices, message) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree.from_choices(choices)


# ---- verification


def greedy_tokens(model, num_tokens: int) -> list[int]:
    text = list(CONTEXT.tolist())
    for _ in range(num_tokens):
        text.append(int(model(tuple(text)).argmax()))
    return text[len(CONTEXT) :]


@pytest.mark.parametrize("size", [1, 3, 6, 12])
def test_greedy_tokens_are_those_of_plain_decoding(size: int) -> None:
    rng = np.random.default_rng(size)
    reached = set()
    for seed in range(40):
        model = table_model(4, seed)
        tree = random_tree(rng, 4, size)
        path = verify_tree(rows_of(model, tree), request_of(size), tree)
        assert list(path.tokens) == greedy_tokens(model, len(path.tokens))
        assert list(path.nodes) == tree.follow(greedy_tokens(model, size + 1))
        assert len(path.tokens) == len(path.nodes) + 1
        reached.add(len(path.nodes))
    assert len(reached) > 1


@pytest.mark.parametrize("with_logits", [False, True])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9, top_k=3, seed=5)])
def test_a_chain_is_verified_as_without_a_tree(sampling: SamplingParams, with_logits: bool) -> None:
    """The same tokens from the same random numbers, log probabilities included."""
    rng = np.random.default_rng(1)
    accepted = 0
    for seed in range(30):
        draft, target = table_model(4, seed), table_model(4, seed + 100)
        tokens = rng.integers(0, 4, 4).astype(np.int32)
        tree = TokenTree(tokens, np.arange(-1, 3, dtype=np.int32), rows_of(draft, tree_of((ROOT, 0)))[[0] * 4])
        if not with_logits:
            tree = replace(tree, logits=None)
        request = request_of(
            4,
            sampling=replace(sampling, seed=seed),
            draft_tokens=tokens,
            draft_logits=tree.logits,
            return_log_probs=True,
            end_id=3,
        )
        rows = rows_of(target, tree)
        chain, path = verify(rows, request), verify_tree(rows, request, tree)
        assert (path.tokens, len(path.nodes)) == (chain.tokens, chain.num_accepted)
        assert path.log_probs == chain.log_probs
        accepted += chain.num_accepted
    assert accepted > 10


def test_a_drawn_token_that_no_child_has_is_the_last() -> None:
    model = fixed_model([0.0, 0.0, 1.0, 0.0])
    path = verify_tree(rows_of(model, t := tree_of((ROOT, 0), (ROOT, 1))), request_of(2, sampling=SAMPLED), t)
    assert (path.tokens, path.nodes) == ((2,), ())


SAMPLED = SamplingParams(temperature=1.0)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_what_ends_a_walk(sampling: SamplingParams) -> None:
    """An end id and a stop sequence inside the tree: nothing below them is looked at; a minimum length is kept."""
    tree = tree_of((ROOT, 2), (ROOT, 0), (0, 3), (2, 1))
    rows = rows_of(script_model([2, 3, 1, 0], 4, len(CONTEXT)), tree)
    assert verify_tree(rows, request_of(4, sampling=sampling), tree).tokens == (2, 3, 1, 0)
    ended = verify_tree(rows, request_of(4, sampling=sampling, end_id=3), tree)
    assert (ended.tokens, ended.nodes) == ((2, 3), (0, 2))
    stopped = verify_tree(rows, request_of(4, sampling=sampling, stop_sequences=((2, 3),)), tree)
    assert (stopped.tokens, stopped.nodes) == ((2, 3), (0, 2))
    later = verify_tree(rows, request_of(4, sampling=sampling, end_id=3, min_new_tokens=2), tree)
    assert later.tokens[0] == 2 and later.tokens[1] != 3
    short = verify_tree(rows, replace(request_of(4, sampling=sampling), max_new_tokens=2), tree)
    assert (short.tokens, short.nodes) == ((2, 3), (0, 2))


def test_bad_words_and_penalties_count_the_nodes_above() -> None:
    """Token 1 is banned behind token 2, which only the tree holds."""
    tree = tree_of((ROOT, 2), (0, 1), (0, 3))
    rows = rows_of(script_model([2, 1, 1, 1], 4, len(CONTEXT)), tree)
    path = verify_tree(rows, request_of(3, bad_words=((2, 1),)), tree)
    assert path.nodes == (0,) and path.tokens[1] != 1
    again = tree_of((ROOT, 0), (0, 0), (0, 4))
    rows = rows_of(script_model([0, 0, 0, 0], 5, len(CONTEXT)), again)
    penalised = verify_tree(rows, request_of(3, sampling=SamplingParams(presence_penalty=60.0)), again)
    assert penalised.nodes == (0, 2)  # 0 was fine in the first place, and is not behind itself


def test_rows_are_asked_for_along_the_walk_only() -> None:
    asked = []

    class Rows:
        def __getitem__(self, index: int) -> np.ndarray:
            asked.append(index)
            return rows[index]

    tree = tree_of((ROOT, 0), (ROOT, 2), (0, 1), (1, 3), (3, 1))
    rows = rows_of(script_model([2, 3, 0, 0], 4, len(CONTEXT)), tree)
    path = verify_tree(Rows(), request_of(5), tree)
    assert (path.tokens, path.nodes, asked) == ((2, 3, 0), (1, 3), [0, 2, 4])


def test_no_node_is_plain_decoding_of_one_token() -> None:
    empty = np.empty(0, dtype=np.int32)
    path = verify_tree(
        rows_of(script_model([2], 4, 3), TokenTree(empty, empty)), request_of(0), TokenTree(empty, empty)
    )
    assert (path.tokens, path.nodes) == ((2,), ())


def test_every_attempt_at_a_position_has_a_random_number_of_its_own() -> None:
    uniforms = Uniforms(7)
    numbers = [uniforms.at(position, "accept", attempt) for position, attempt in product(range(20), range(20))]
    numbers += [uniforms.at(position, "token") for position in range(20)]
    assert len(set(numbers)) == len(numbers)
    first, second = np.array(numbers[:-20]).reshape(20, 20)[:, :2].T
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.6
