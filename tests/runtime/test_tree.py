"""Token trees in the torch runtime: one pass over all nodes, and a KV cache that holds the accepted path afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trtspec.decoding.cycle import Generation, Request
from trtspec.decoding.engine_call import EngineRequest
from trtspec.decoding.sampling import SamplingParams
from trtspec.decoding.token_tree import ROOT, TokenTree
from trtspec.errors import TrtspecError
from trtspec.runtime.local import speculate
from trtspec.runtime.torch_runtime import TorchRuntime

SAMPLED = SamplingParams(temperature=0.9, top_k=20)
BRANCHINGS = [(3,), (2, 2, 1), (1, 1, 2), (4, 1)]


def request_of(context: np.ndarray, tree: TokenTree, **fields) -> EngineRequest:
    return EngineRequest(context, len(tree) + 1, draft_tokens=tree.tokens, draft_parents=tree.parents, **fields)


def random_tree(rng: np.random.Generator, size: int, along: list[int]) -> TokenTree:
    """`size` nodes, among them as many of the path `along` as chance wants."""
    nodes: dict[tuple[int, int], int] = {}
    on_path = {ROOT: 0}  # node -> how far along
    while len(nodes) < size:
        parent = int(rng.integers(ROOT, len(nodes)))
        right = parent in on_path and rng.random() < 0.7
        token = along[on_path[parent]] if right else int(rng.integers(3, 280))
        if (parent, token) not in nodes:
            nodes[parent, token] = len(nodes)
            if parent in on_path and token == along[on_path[parent]]:
                on_path[nodes[parent, token]] = on_path[parent] + 1
    return TokenTree(
        np.array([token for _, token in nodes], np.int32), np.array([parent for parent, _ in nodes], np.int32)
    )


@pytest.fixture(scope="session")
def tree_engine(build_engine: Callable[..., Path], tiny_model_dir: Path) -> Path:
    return build_engine(tiny_model_dir, max_draft_len=24)


@pytest.fixture
def target(tree_engine: Path) -> TorchRuntime:
    return TorchRuntime(tree_engine, kv_cache_bytes=1 << 22)


def kept(runtime: TorchRuntime):
    """The one sequence in the runtime's cache."""
    (sequence,) = runtime._cache._sequences
    return sequence


def test_logits_of_all_nodes_are_those_of_their_texts(target: TorchRuntime, rng: np.random.Generator) -> None:
    context = rng.integers(3, 280, 9).astype(np.int32)
    tree = random_tree(rng, 12, rng.integers(3, 280, 13).tolist())
    rows = target.execute(request_of(context, tree, return_generation_logits=True)).generation_logits
    assert rows is not None and rows.shape == (13, target.config.vocab_size)
    for node in range(ROOT, len(tree)):
        text = np.concatenate([context, tree.tokens[tree.path(node)]])
        alone = target.execute(EngineRequest(text, 1, return_generation_logits=True)).generation_logits
        np.testing.assert_allclose(rows[node + 1], alone[0], atol=2e-4)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_the_cache_is_that_of_a_fresh_prefill_whatever_was_accepted(
    target: TorchRuntime, tree_engine: Path, rng: np.random.Generator, sampling: SamplingParams
) -> None:
    """Keys, values, ids and the next logits; over cycles in a row, in which nothing, some or all of a path is taken."""
    lengths = set()
    for conversation in range(4):
        context = rng.integers(3, 280, int(rng.integers(2, 30))).astype(np.int32)
        runtime = TorchRuntime(tree_engine, kv_cache_bytes=1 << 22)
        for cycle in range(6):
            size = int(rng.integers(1, 20))
            asked = replace(sampling, seed=10 * conversation + cycle)
            ahead = target.execute(EngineRequest(context, size + 1, asked)).output_ids.tolist()
            tree = random_tree(rng, size, ahead)
            result = runtime.execute(request_of(context, tree, sampling=asked))
            assert result.output_ids.tolist() == ahead[: len(result.output_ids)]
            assert result.num_accepted == len(result.output_ids) - 1 == len(tree.follow(ahead))
            context = np.concatenate([context, result.output_ids])

            sequence = kept(runtime)
            assert sequence.tokens[: sequence.length].tolist() == context[:-1].tolist()
            fresh = TorchRuntime(tree_engine, kv_cache_bytes=1 << 22)
            other = fresh.execute(EngineRequest(context, 1, return_generation_logits=True))
            for ours, theirs in zip(
                (sequence.cache.k, sequence.cache.v), (kept(fresh).cache.k, kept(fresh).cache.v), strict=True
            ):
                torch.testing.assert_close(
                    ours[:, :, :, : len(context) - 1], theirs[:, :, :, : len(context) - 1], atol=1e-4, rtol=1e-4
                )
            lengths.add(result.num_accepted)
            if cycle % 2:  # going on from the cache gives the logits of the fresh one
                here = runtime.execute(EngineRequest(context, 1, return_generation_logits=True))
                assert here.reused_tokens == len(context) - 1
                np.testing.assert_allclose(here.generation_logits, other.generation_logits, atol=2e-4)
    assert {0, 1, 2} <= lengths


def test_a_long_prompt_and_a_tree_in_several_passes(
    build_engine: Callable[..., Path], tiny_model_dir: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree is in the last pass, whatever the others hold."""
    monkeypatch.setattr("trtspec.runtime.torch_runtime._MAX_PASS", 16)
    engine = build_engine(tiny_model_dir, max_draft_len=15)
    for length in range(30, 48, 3):
        context = rng.integers(3, 280, length).astype(np.int32)
        runtime = TorchRuntime(engine, kv_cache_bytes=1 << 22)
        ahead = runtime.execute(EngineRequest(context, 16)).output_ids.tolist()
        tree = random_tree(rng, 15, ahead)
        result = TorchRuntime(engine, kv_cache_bytes=1 << 22).execute(request_of(context, tree))
        assert result.output_ids.tolist() == ahead[: len(result.output_ids)]
        assert result.num_accepted == len(tree.follow(ahead))
    with pytest.raises(TrtspecError, match="a tree of 16 nodes"):
        wide = TokenTree(np.arange(3, 19, dtype=np.int32), np.full(16, ROOT, np.int32))
        TorchRuntime(build_engine(tiny_model_dir, max_draft_len=16), kv_cache_bytes=1 << 22).execute(
            request_of(context, wide)
        )


@pytest.mark.parametrize(
    ("parents", "message"),
    [([0, ROOT], "do not all come before"), ([ROOT], r"\[1\] parents for \[2\] tokens"), ([ROOT, 1], "come before")],
)
def test_parents_that_make_no_tree_are_refused(target: TorchRuntime, parents: list[int], message: str) -> None:
    request = EngineRequest(
        np.array([5], np.int32), 3, draft_tokens=np.array([4, 5], np.int32), draft_parents=np.array(parents, np.int32)
    )
    with pytest.raises(TrtspecError, match=message):
        target.execute(request)
    with pytest.raises(TrtspecError, match="draft_parents: given without draft_tokens"):
        target.execute(replace(request, draft_tokens=None))


def test_a_failure_leaves_no_node_in_the_cache(target: TorchRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    context, tree = np.array([5, 6, 7], np.int32), TokenTree(np.array([8, 9], np.int32), np.array([-1, -1], np.int32))
    monkeypatch.setattr("trtspec.runtime.torch_runtime.verify_tree", lambda *_: (_ for _ in ()).throw(ValueError("no")))
    with pytest.raises(TrtspecError, match="no"):
        target.execute(request_of(context, tree))
    sequence = kept(target)
    assert sequence.tokens[: sequence.length].tolist() == context.tolist()


# ---- the method


def finish(method: str, runtimes: dict[str, TorchRuntime], request: Request, **keywords) -> Generation:
    *_, last = speculate(method, runtimes, request, **keywords)
    assert last.generation.draft_error is None
    return last.generation


@pytest.mark.parametrize("one_pass", [True, False], ids=["draft in one pass", "draft node by node"])
@pytest.mark.parametrize("branching", BRANCHINGS, ids=str)
def test_greedy_text_of_trees_is_the_text_without(
    target: TorchRuntime,
    build_engine: Callable[..., Path],
    tiny_draft_dir: Path,
    rng: np.random.Generator,
    branching: tuple[int, ...],
    one_pass: bool,
) -> None:
    draft = TorchRuntime(
        build_engine(tiny_draft_dir, role="draft", max_draft_len=8 if one_pass else 0), kv_cache_bytes=1 << 22
    )
    runtimes, accepted, drafted = {"target": target, "draft": draft}, 0, 0
    for _ in range(4):
        prompt = rng.integers(3, 280, int(rng.integers(1, 30)))
        plain = finish("none", runtimes, Request(prompt, 20))
        request = Request(prompt, 20, num_draft_tokens=int(np.cumprod(branching).sum()))
        grown = finish("tree", runtimes, request, settings={"branching": branching})
        assert grown.token_ids.tolist() == plain.token_ids.tolist()
        accepted += grown.acceptance.num_accepted
        drafted += grown.acceptance.num_drafted
    assert 0 < accepted < drafted


def test_sampled_text_by_tokens_is_the_text_without(
    target: TorchRuntime, build_engine: Callable[..., Path], tiny_draft_dir: Path, rng: np.random.Generator
) -> None:
    """Chosen children: the target draws as it does alone, with the same random numbers. Drawn ones: another text."""
    draft = TorchRuntime(build_engine(tiny_draft_dir, role="draft", max_draft_len=8), kv_cache_bytes=1 << 22)
    runtimes, same = {"target": target, "draft": draft}, []
    for seed in range(4):
        prompt, sampling = rng.integers(3, 280, 8), replace(SAMPLED, seed=seed)
        plain = finish("none", runtimes, Request(prompt, 16, sampling=sampling)).token_ids.tolist()
        request = Request(prompt, 16, sampling=sampling, num_draft_tokens=10)
        chosen = finish("tree", runtimes, request, acceptance="tokens")
        assert chosen.token_ids.tolist() == plain
        assert chosen.acceptance.num_accepted > 0
        same.append(finish("tree", runtimes, request).token_ids.tolist() == plain)
    assert not all(same)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_text_of_the_trees_of_two_drafts_is_the_text_without(
    target: TorchRuntime,
    build_engine: Callable[..., Path],
    tiny_model_dir: Path,
    tiny_draft_dir: Path,
    rng: np.random.Generator,
    sampling: SamplingParams,
) -> None:
    """A small draft, and one that is the target itself: with it, more is accepted."""
    draft, same = (
        TorchRuntime(build_engine(model, role="draft", max_draft_len=8), kv_cache_bytes=1 << 22)
        for model in (tiny_draft_dir, tiny_model_dir)
    )
    settings, accepted = {"branching": (2, 1)}, {1: 0, 2: 0}
    for seed in range(3):
        prompt, rule = rng.integers(3, 280, 8), replace(sampling, seed=seed)
        plain = finish("none", {"target": target}, Request(prompt, 16, sampling=rule)).token_ids.tolist()
        for count in accepted:
            runtimes = {"target": target, "draft": draft} | ({"draft_2": same} if count == 2 else {})
            request = Request(prompt, 16, sampling=rule, num_draft_tokens=4 * count)
            grown = finish("tree", runtimes, request, settings=settings, acceptance="tokens")
            assert grown.token_ids.tolist() == plain
            accepted[count] += grown.acceptance.num_accepted
            finish("tree", runtimes, request, settings=settings)  # drawn, with the logits of both
    assert accepted[2] > accepted[1]
