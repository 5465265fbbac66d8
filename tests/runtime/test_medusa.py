"""Medusa heads in the torch runtime: the tokens of plain decoding in fewer passes, and the cache that it leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trtspec.decoding.engine_call import EngineRequest
from trtspec.decoding.sampler import TokenSampler
from trtspec.decoding.sampling import SamplingParams
from trtspec.decoding.token_tree import TokenTree
from trtspec.models.medusa import DEFAULT_CHOICES
from trtspec.models.source import open_model
from trtspec.plan.tree import tokens_per_pass
from trtspec.runtime.engine import write_torch_engine
from trtspec.runtime.llama import Llama, load_weights
from trtspec.runtime.medusa import MedusaHeads, MedusaSettings, TreeWalk, linear_name, output_name
from trtspec.runtime.torch_runtime import TorchRuntime
from trtspec.train.heads import text_ranks

CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0))
PROMPTS = ([5, 9, 40, 7], [100, 3, 3, 8, 60, 61], [33], [200, 201, 17, 90, 12, 45, 46, 47, 48, 49])
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)


def trained_heads(model_dir: Path, *, shared: bool = False) -> dict[str, torch.Tensor]:
    """Three heads that know some of what the target says after `PROMPTS`: a least-squares fit to its greedy answers."""
    source = open_model(str(model_dir))
    model = Llama(source.config, load_weights(source))
    states, texts = [], []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(40):
                ids.append(int(model.forward(torch.tensor([ids]), model.new_cache(1, 64), 0, num_logits=1).argmax()))
            states.append(model.hidden(torch.tensor([ids]), None, 0)[0])
        texts.append(torch.tensor(ids))
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    for head in range(3):
        weights[linear_name(head, 0, "weight")] = 0.1 * torch.randn(32, 32, generator=generator)
        weights[linear_name(head, 0, "bias")] = 0.1 * torch.randn(32, generator=generator)
    if shared:
        return weights
    heads = MedusaHeads(weights, model.weights["lm_head.weight"])
    for head in range(3):
        ahead = 2 + head
        seen = torch.cat([heads.states(head, state[:-ahead]) for state in states])
        wanted = torch.nn.functional.one_hot(torch.cat([text[ahead:] for text in texts]), 280).float()
        weights[output_name(head)] = torch.linalg.lstsq(seen, wanted).solution.T.contiguous()
    return weights


@pytest.fixture(scope="module")
def build(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TorchRuntime]:
    """A runtime of the tiny target, with heads or without."""
    heads = trained_heads(tiny_model_dir)

    def runtime(
        settings: MedusaSettings | None = None, *, kv_cache_bytes: int = 1 << 22, **limits: Any
    ) -> TorchRuntime:
        out = tmp_path_factory.mktemp("engines") / "target"
        stamp: dict[str, Any] = {"speculation": settings.to_stamp()} if settings else {}
        extra = {name: partial(lambda t: t, tensor) for name, tensor in heads.items()} if settings else {}
        write_torch_engine(
            open_model(str(tiny_model_dir)), out, dtype="float32", role="target",
            build_config={"max_draft_len": 8, **limits}, stamp=stamp, extra=extra,
        )  # fmt: skip
        return TorchRuntime(out, kv_cache_bytes=kv_cache_bytes)

    return runtime


@pytest.fixture(scope="module")
def plain(build: Callable[..., TorchRuntime]) -> TorchRuntime:
    return build()


@pytest.fixture
def medusa(build: Callable[..., TorchRuntime]) -> TorchRuntime:
    return build(MedusaSettings(CHOICES))


def request(prompt: list[int], count: int = 32, **fields: Any) -> EngineRequest:
    return EngineRequest(np.array(prompt, dtype=np.int32), count, **fields)


REQUESTS = {
    "greedy": {},
    "sampled": {"sampling": SAMPLED},
    "penalties": {"sampling": replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.2)},
    "greedy with penalties": {"sampling": SamplingParams(repetition_penalty=1.2)},
    "bans": {"bad_words": ((7,), (60, 61)), "sampling": SAMPLED},
    "logits": {"return_generation_logits": True, "return_log_probs": True},
    "sampled logits": {"return_generation_logits": True, "return_log_probs": True, "sampling": SAMPLED},
}


@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS.keys())
def test_the_answer_is_that_of_plain_decoding(
    fields: dict[str, Any], medusa: TorchRuntime, plain: TorchRuntime
) -> None:
    accepted = 0
    for prompt in PROMPTS:
        result, expected = medusa.execute(request(prompt, **fields)), plain.execute(request(prompt, **fields))
        assert result.output_ids.tolist() == expected.output_ids.tolist()
        accepted += result.num_accepted
        if expected.log_probs is not None and expected.generation_logits is not None:
            assert result.log_probs is not None and result.generation_logits is not None
            np.testing.assert_allclose(result.log_probs, expected.log_probs, atol=1e-4)
            np.testing.assert_allclose(result.generation_logits, expected.generation_logits, atol=1e-3)
    assert accepted > 0


def test_greedy_takes_fewer_passes(medusa: TorchRuntime) -> None:
    results = [medusa.execute(request(prompt)) for prompt in PROMPTS]
    passes = sum(len(r.output_ids) - r.num_accepted for r in results)
    assert sum(len(r.output_ids) for r in results) / passes > 1.3
    assert all(0 < r.num_accepted < r.num_draft_tokens for r in results)


def test_passes_are_those_that_the_heads_ranks_give(medusa: TorchRuntime, tiny_model_dir: Path) -> None:
    """What `trtspec plan tree` counts along a text: each tree is grown from the state of the last accepted token."""
    source = open_model(str(tiny_model_dir))
    model = Llama(source.config, load_weights(source))
    heads = MedusaHeads(trained_heads(tiny_model_dir), model.weights["lm_head.weight"])
    for prompt in PROMPTS:
        result = medusa.execute(request(prompt))
        tokens = torch.from_numpy(result.output_ids).long()
        with torch.inference_mode():
            ids = torch.cat([torch.tensor(prompt), tokens])
            states = model.hidden(ids[None, :-1], None, 0)[0, len(prompt) - 1 :]
        ranks = text_ranks(heads, states, tokens).numpy()
        passes = len(tokens) - result.num_accepted - 1  # without the prompt's
        assert (len(tokens) - 1) / passes == pytest.approx(tokens_per_pass(CHOICES, [ranks]))


def test_a_verification_leaves_no_state_behind(medusa: TorchRuntime) -> None:
    """The state that a tree grows from is that of the text as it is, also where drafts came from outside."""
    text = [*PROMPTS[0], *medusa.execute(request(PROMPTS[0], 6)).output_ids.tolist()]
    assert medusa._cache._sequences[-1].last_state is not None
    drafts = np.array([1, 1], dtype=np.int32)
    medusa.execute(request(text, 3, draft_tokens=drafts))
    assert medusa._cache._sequences[-1].last_state is None


def test_an_end_id_ends_inside_the_tree(medusa: TorchRuntime, plain: TorchRuntime) -> None:
    """Every token of an answer in turn is what ends it, as an end id and as a stop sequence over two passes."""
    for prompt in PROMPTS[:2]:
        text = plain.execute(request(prompt, 14)).output_ids.tolist()
        for place, token in enumerate(text):
            ends: list[dict[str, Any]] = [{"end_id": token}, {"end_id": token, "min_new_tokens": 6}]
            if place:
                ends.append({"stop_sequences": ((text[place - 1], token),)})
            for fields in ends:
                result = medusa.execute(request(prompt, 14, **fields)).output_ids.tolist()
                assert result == plain.execute(request(prompt, 14, **fields)).output_ids.tolist()


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_the_cache_is_that_of_a_fresh_prefill(sampling: SamplingParams, medusa: TorchRuntime) -> None:
    model = medusa._model
    kept = 0
    for prompt in PROMPTS:
        result = medusa.execute(request(prompt, 30, sampling=sampling))
        sequence = medusa._cache._sequences[-1]
        text = [*prompt, *result.output_ids.tolist()]
        assert sequence.tokens[: sequence.length].tolist() == text[: sequence.length]
        assert sequence.length >= len(text) - 1
        fresh = model.new_cache(1, sequence.length)
        with torch.inference_mode():
            model.hidden(torch.tensor([text[: sequence.length]]), fresh, 0)
        for ours, theirs in ((sequence.cache.k, fresh.k), (sequence.cache.v, fresh.v)):
            torch.testing.assert_close(ours[:, :, :, : sequence.length], theirs, atol=1e-4, rtol=1e-4)
        kept += result.num_accepted
    assert kept > 0


def test_a_text_in_many_calls_is_drafted_all_along(medusa: TorchRuntime, plain: TorchRuntime) -> None:
    """The state before the last token is kept with the sequence, so a call's first pass has a tree already."""
    text = list(PROMPTS[0])
    whole = medusa.execute(request(text, 24))
    first = medusa.execute(request(text, 4))
    text += first.output_ids.tolist()
    accepted = first.num_accepted
    for _ in range(5):
        result = medusa.execute(request(text, 4))
        assert result.reused_tokens == len(text) - 1
        assert result.num_draft_tokens >= len(CHOICES)
        text += result.output_ids.tolist()
        accepted += result.num_accepted
    assert text == [*PROMPTS[0], *plain.execute(request(PROMPTS[0], 24)).output_ids.tolist()]
    assert accepted >= 0.6 * whole.num_accepted


def test_another_continuation_is_not_drafted_from_the_old_state(medusa: TorchRuntime, plain: TorchRuntime) -> None:
    prompt = list(PROMPTS[0])
    medusa.execute(request(prompt, 9))
    other = [*prompt, 77, 78, 79]
    for length in range(1, 6):
        other.append(80 + length)
        expected = plain.execute(request(other, 9)).output_ids.tolist()
        assert medusa.execute(request(other, 9)).output_ids.tolist() == expected


def test_a_tree_is_cut_where_the_text_ends(build: Callable[..., TorchRuntime], plain: TorchRuntime) -> None:
    """Up to max_seq_len, with a KV cache that holds one sequence of it and no position more."""
    settings = MedusaSettings(CHOICES)
    small = build(settings, max_seq_len=40, kv_cache_bytes=2 * 2 * 2 * 8 * 4 * 40)
    for count in (1, 2, 3, 20, 36):
        result = small.execute(request(PROMPTS[0], count))
        assert result.output_ids.tolist() == plain.execute(request(PROMPTS[0], count)).output_ids.tolist()
    # One token to come is the target's own: there is nothing to draft for.
    assert small.execute(request(PROMPTS[1], 1)).num_draft_tokens == 0


def test_heads_without_an_output_matrix_use_the_targets(tiny_model_dir: Path) -> None:
    source = open_model(str(tiny_model_dir))
    output = load_weights(source)["lm_head.weight"]
    weights = trained_heads(tiny_model_dir, shared=True)
    heads = MedusaHeads(weights, output)
    x = torch.randn(32, generator=torch.Generator().manual_seed(1))
    assert (heads.num_heads, heads.num_layers) == (3, 1)
    y = weights[linear_name(1, 0, "weight")] @ x + weights[linear_name(1, 0, "bias")]
    expected = output @ (x + y * torch.sigmoid(y))
    torch.testing.assert_close(heads.logits(1, x), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(heads.all_logits(x, 2)[1], expected, atol=1e-4, rtol=1e-4)


def test_typical_acceptance_takes_what_is_likely_enough() -> None:
    """p = 0.5, 0.3, 0.2 has entropy 1.03: delta * exp(-H) = 0.3 * 0.357 = 0.107, so epsilon decides up to there."""
    row = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    tree = TokenTree(np.array([1, 2], dtype=np.int32), np.array([-1, -1], dtype=np.int32))

    def walked(epsilon: float, delta: float, sampling: SamplingParams) -> tuple[list[int], list[int]]:
        sampler = TokenSampler(request([0], 1, sampling=sampling))
        walk = TreeWalk(sampler, MedusaSettings(((0,),), "typical", epsilon, delta))
        return walk.through(tree, lambda node: row, lambda row, token: None), sampler.tokens

    drawn = SamplingParams(temperature=1.0, seed=3)
    assert walked(0.09, 0.3, drawn) == ([0], [1])  # of both likely children the likelier, whatever the draw
    assert walked(0.25, 0.8, drawn) == ([0], [1])  # 0.8 * 0.357 = 0.286 is above epsilon, which only token 1 passes
    plain = TokenSampler(request([0], 1, sampling=drawn))
    token = plain.next(row)
    assert walked(0.9, 1.0, drawn)[1] == [token]  # nothing passes 0.357: the target's own draw
    assert walked(0.09, 0.3, SamplingParams()) == ([], [0])  # greedy requests stay exact


def test_typical_acceptance_takes_the_longest_path() -> None:
    """The likeliest child is a dead end; its sibling goes on, and of two ways to go on there the likelier is taken."""
    #                       root: 1   2 | below 1: 3 | below 2: 4   3 | below the first of these: 5
    tree = TokenTree(np.array([1, 2, 3, 4, 3, 5], np.int32), np.array([-1, -1, 0, 1, 1, 3], np.int32))
    rows = {
        -1: [0.01, 0.5, 0.4, 0.03, 0.03, 0.03],
        0: [0.9, 0.02, 0.02, 0.02, 0.02, 0.02],  # 3 is not likely enough behind 1
        1: [0.01, 0.01, 0.01, 0.5, 0.45, 0.02],
        3: [0.95, 0.01, 0.01, 0.01, 0.01, 0.01],  # nor 5 behind 2, 4
    }

    def walked(epsilon: float, end_id: int | None = None) -> tuple[list[int], list[int]]:
        sampler = TokenSampler(replace(request([0], 9, sampling=SamplingParams(temperature=1.0)), end_id=end_id))
        walk = TreeWalk(sampler, MedusaSettings(((0,),), "typical", epsilon, 100.0))
        asked: list[int] = []

        def row_of(node: int) -> np.ndarray:
            asked.append(node)
            return np.log(np.array(rows.get(node, rows[0]), dtype=np.float32))

        seen: list[int] = []
        nodes = walk.through(tree, row_of, lambda row, token: seen.append(token))
        assert seen == sampler.tokens and len(asked) == len(set(asked))
        return nodes, sampler.tokens[: len(nodes)]

    assert walked(0.1) == ([1, 4], [2, 3])
    assert walked(0.47) == ([0], [1])  # only the first token passes
    assert walked(0.005) == ([1, 3, 5], [2, 4, 5])  # everything passes: the deepest
    assert walked(0.1, end_id=2) == ([0], [1])  # nothing comes behind an end id: all are as long


def test_typical_acceptance_accepts_more_and_greedy_stays_exact(
    build: Callable[..., TorchRuntime], plain: TorchRuntime
) -> None:
    lossy = build(MedusaSettings(CHOICES, "typical", epsilon=0.01, delta=0.05))
    lossless = build(MedusaSettings(CHOICES))
    counts = []
    for runtime in (lossy, lossless):
        results = [runtime.execute(request(prompt, sampling=SAMPLED)) for prompt in PROMPTS]
        counts.append(sum(result.num_accepted for result in results))
    assert counts[0] > counts[1]
    for prompt in PROMPTS:
        expected = plain.execute(request(prompt)).output_ids.tolist()
        assert lossy.execute(request(prompt)).output_ids.tolist() == expected


def test_settings_survive_the_stamp() -> None:
    for settings in (MedusaSettings(CHOICES), MedusaSettings(((0,),), "typical", 0.2, 0.5)):
        stamp = settings.to_stamp()
        assert MedusaSettings.from_stamp(stamp) == settings
        assert stamp["lossless"] == (settings.acceptance == "lossless")


def test_the_default_tree() -> None:
    assert len(set(DEFAULT_CHOICES)) == 63
    assert len(TokenTree.from_choices(DEFAULT_CHOICES)) == 63
    assert {len(path) for path in DEFAULT_CHOICES} == {1, 2, 3, 4}
