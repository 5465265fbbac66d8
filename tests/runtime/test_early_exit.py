"""The target's first layers as its drafter, with its weights and KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from trtspec.decoding.cycle import Generation, Request
from trtspec.decoding.engine_call import EngineRequest
from trtspec.decoding.sampling import SamplingParams
from trtspec.models.source import open_model
from trtspec.models.surgery import truncated
from trtspec.runtime.early_exit import shared_layers
from trtspec.runtime.engine import EngineConfig, write_torch_engine
from trtspec.runtime.llama import Llama
from trtspec.runtime.local import speculate
from trtspec.runtime.torch_runtime import TorchRuntime

LAYERS = 4
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95)
Runtimes = dict[str, TorchRuntime]


@pytest.fixture(scope="module")
def model(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The later half of its layers changes little."""
    path = save_model(tmp_path_factory.mktemp("early-exit") / "model", num_hidden_layers=LAYERS)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.startswith(("model.layers.2.", "model.layers.3.")) and ("o_proj" in name or "down_proj" in name):
            tensor *= 0.2
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def build(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The engine of the target, or of so many first layers, as a build of method early_exit makes them."""

    def make(num_layers: int | None = None, dtype: str = "float32", **build_config: int) -> Path:
        source = open_model(str(model))
        if num_layers:
            source = truncated(source, num_layers)
        out = tmp_path_factory.mktemp("engines") / "engine"
        build_config = build_config if num_layers else {"max_draft_len": 8, **build_config}
        stamp = {"source_fingerprint": source.fingerprint()}
        write_torch_engine(source, out, dtype=dtype, role="target", build_config=build_config, stamp=stamp)
        return out

    return make


@pytest.fixture(scope="module")
def engines(build: Callable[..., Path]) -> dict[int | None, Path]:
    return {num_layers: build(num_layers) for num_layers in (None, 1, 2, 3)}


def runtimes(engines: dict[int | None, Path], num_layers: int) -> Runtimes:
    return {
        role: TorchRuntime(engines[layers], kv_cache_bytes=1 << 22)
        for role, layers in (("target", None), ("draft", num_layers))
    }


def finish(engines: Runtimes, request: Request, method: str = "early_exit") -> Generation:
    *_, last = speculate(method, engines, request)
    assert last.generation.draft_error is None
    return last.generation


def test_first_layers_are_recognised(
    engines: dict[int | None, Path], build: Callable[..., Path], target_engine: Path, draft_engine: Path
) -> None:
    configs = {num_layers: EngineConfig.load(path) for num_layers, path in engines.items()}
    assert [shared_layers(configs[None], configs[n]) for n in (1, 2, 3)] == [1, 2, 3]
    assert shared_layers(configs[None], configs[None]) is None
    assert shared_layers(configs[None], EngineConfig.load(build(2, "bfloat16"))) is None  # would draw another token
    assert shared_layers(EngineConfig.load(target_engine), configs[2]) is None  # whose fingerprint is not known
    assert shared_layers(EngineConfig.load(target_engine), EngineConfig.load(draft_engine)) is None


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_greedy_text_is_that_of_plain_decoding(
    engines: dict[int | None, Path], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, num_layers: int
) -> None:
    """Prompts from one token on; the draft's own engine is never called."""
    both = runtimes(engines, num_layers)
    monkeypatch.setattr(both["draft"], "execute", None)
    accepted = drafted = 0
    for number in range(8):
        prompt = rng.integers(3, 280, size=1 + 4 * number)
        plain = finish(both, Request(prompt, 24), "none")
        speculated = finish(both, Request(prompt, 24, num_draft_tokens=1 + number))
        assert speculated.token_ids.tolist() == plain.token_ids.tolist()
        accepted += speculated.acceptance.num_accepted
        drafted += speculated.acceptance.num_drafted
    # Chance would be 1 in 280.
    assert 0.01 < accepted / drafted < 0.95


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_sharing_gives_what_a_draft_engine_of_its_own_gives(
    engines: dict[int | None, Path], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams
) -> None:
    """Token by token and draft by draft, with the same random numbers: whether the law of the output is the target's is
    shown for draft engines (test_speculation.py, test_law.py), and holds here too."""
    shared, apart = runtimes(engines, 2), runtimes(engines, 2)
    requests = [
        Request(rng.integers(3, 280, size=9), 24, sampling=replace(sampling, seed=seed), num_draft_tokens=4)
        for seed in range(12)
    ]
    ours = [finish(shared, request) for request in requests]
    monkeypatch.setattr("trtspec.runtime.local.shared_layers", lambda target, draft: None)
    theirs = [finish(apart, request) for request in requests]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.token_ids.tolist() == other.token_ids.tolist()
        assert mine.acceptance == other.acceptance
    assert 0 < sum(g.acceptance.num_accepted for g in ours) < sum(g.acceptance.num_drafted for g in ours)
    assert shared["draft"].statistics.computed_tokens == 0 < apart["draft"].statistics.computed_tokens


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_cache_is_that_of_a_fresh_prefill(
    engines: dict[int | None, Path], rng: np.random.Generator, num_layers: int
) -> None:
    """After many accepted and rejected drafts."""
    both = runtimes(engines, num_layers)
    request = Request(rng.integers(3, 280, size=9), 60, sampling=replace(SAMPLED, seed=3), num_draft_tokens=5)
    generation = finish(both, request)
    assert 0 < generation.acceptance.num_accepted < generation.acceptance.num_drafted
    sequence = both["target"]._cache._sequences[-1]
    length, model = sequence.length, both["target"]._model
    assert sequence.tokens[:length].tolist() == generation.context[:length].tolist()
    assert length > 60
    fresh = model.new_cache(1, length)
    with torch.inference_mode():
        model.hidden(torch.from_numpy(sequence.tokens[:length].astype(np.int64))[None], fresh, 0)
    for ours, theirs in ((sequence.cache.k, fresh.k), (sequence.cache.v, fresh.v)):
        torch.testing.assert_close(ours[:, :, :, :length], theirs, atol=1e-4, rtol=1e-4)


class Passes:
    """Records which layer ran over how many tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, int]] = []
        original = Llama._layer

        def layer(model: Llama, number: int, x: torch.Tensor, *rest: object) -> torch.Tensor:
            self.seen.append((number, x.shape[1]))
            return original(model, number, x, *rest)

        monkeypatch.setattr(Llama, "_layer", layer)

    def take(self) -> list[tuple[int, int]]:
        seen, self.seen = self.seen, []
        return seen


def test_a_verification_runs_only_what_is_left(
    engines: dict[int | None, Path], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TorchRuntime(engines[None], kv_cache_bytes=1 << 22)
    context = rng.integers(3, 280, size=10).astype(np.int32)
    passes = Passes(monkeypatch)
    drafts = target.draft(EngineRequest(context, 3), 2).output_ids
    whole = [(layer, 9) for layer in range(LAYERS)]  # all of the input but the last token, for good
    assert passes.take() == whole + 3 * [(0, 1), (1, 1)]
    result = target.execute(EngineRequest(context, 4, draft_tokens=drafts))
    assert passes.take() == [(0, 1), (1, 1), (2, 4), (3, 4)]  # the last draft was not fed yet
    fresh = TorchRuntime(engines[None], kv_cache_bytes=1 << 22)
    assert (
        result.output_ids.tolist() == fresh.execute(EngineRequest(context, 4, draft_tokens=drafts)).output_ids.tolist()
    )


@pytest.mark.parametrize(
    "case", ["wrong drafts", "other drafts", "fewer drafts", "no drafts", "another request between", "twice"]
)
def test_a_verification_of_something_else_is_right_too(
    engines: dict[int | None, Path], rng: np.random.Generator, case: str
) -> None:
    target, fresh = (TorchRuntime(engines[None], kv_cache_bytes=1 << 22) for _ in range(2))
    context = rng.integers(3, 280, size=10).astype(np.int32)
    drafts = target.draft(EngineRequest(context, 4), 2).output_ids
    if case == "wrong drafts":
        drafts = np.array([40, 50], dtype=np.int32)
    elif case == "other drafts":
        drafts = np.append(drafts[:2], [40, 50]).astype(np.int32)
    elif case == "fewer drafts":
        drafts = drafts[:1]
    elif case == "another request between":
        target.execute(EngineRequest(context, 5, SAMPLED))
    elif case == "twice":
        target.draft(EngineRequest(context, 2, replace(SAMPLED, seed=4)), 1)
    request = EngineRequest(context, 6, return_log_probs=True)
    if case != "no drafts":
        request = replace(request, draft_tokens=drafts, max_new_tokens=len(drafts) + 1)
    # The second one goes on with the token that the drafts began with, which now stands elsewhere.
    longer = [replace(request, input_ids=np.append(context, token).astype(np.int32)) for token in (context[-1], 7)]
    for follow_up in (request, *longer):
        ours, theirs = target.execute(follow_up), fresh.execute(follow_up)
        assert ours.output_ids.tolist() == theirs.output_ids.tolist()
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-4)


def test_another_conversation_in_the_same_place_does_not_take_over_what_has_begun(
    build: Callable[..., Path], rng: np.random.Generator
) -> None:
    """Room for one sequence only: the second one takes its place, and goes on with the very token that has begun."""
    engine = build(max_seq_len=256)
    target, fresh = (TorchRuntime(engine, kv_cache_bytes=2 * LAYERS * 2 * 8 * 4 * 256) for _ in range(2))
    context = rng.integers(3, 280, size=10).astype(np.int32)
    target.draft(EngineRequest(context, 3), 2)
    request = EngineRequest(np.append(context[:5], context[-1]).astype(np.int32), 6, return_log_probs=True)
    ours, theirs = target.execute(request), fresh.execute(request)
    assert ours.reused_tokens == 5
    assert ours.output_ids.tolist() == theirs.output_ids.tolist()
    np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-4)
