"""The fixed form of a pass against the pass itself, and when graphs are used; on a CPU, with a double of the graphs."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trtspec.decoding.engine_call import EngineRequest, EngineResult
from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.runtime import torch_runtime
from trtspec.runtime.cuda_graphs import GraphedLlama
from trtspec.runtime.llama import KVCache, Llama, to_trtllm
from trtspec.runtime.torch_runtime import TorchRuntime
from trtspec.runtime.weights import ActivationQuantizer

CAPACITY = 40
SIZES = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-grouped": ("Llama", {}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}),
    "mistral-one-kv-head": ("Mistral", {"sliding_window": None, "head_dim": 16, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3-qk-norm": ("Qwen3", {"head_dim": 16}),
}
Replay = Callable[[], None]


class GraphDouble(TorchDispatchMode):
    """Test double of a CUDA graph: records operators with the tensors they work on, and runs them again on these.

    Like the real one it runs no Python of the step again, writes where the recorded run wrote, and refuses what needs
    the value of a tensor. Unlike it, it computes while it records.
    """

    VALUES = ("item", "_local_scalar_dense", "nonzero", "is_nonzero", "unique", "equal")
    VIEWS = ("split", "unbind", "chunk")  # several of one tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name.startswith(self.VALUES):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}\nand a second line")
        result = func(*args, **(kwargs or {}))
        memory = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        if func._schema.is_mutable:
            self.calls.append((func, args, kwargs or {}, None))
        elif not isinstance(result, torch.Tensor):
            assert name.startswith(self.VIEWS), name
        elif result.untyped_storage().data_ptr() not in memory:  # no view, which needs no running
            self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, written in self.calls:
            result = func(*args, **kwargs)
            if written is not None:
                written.copy_(result)


class Recorder:
    """Records with doubles, and counts."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        self.recorded += 1
        with GraphDouble() as graph:
            states = step()
        states.fill_(torch.nan)  # there is no result before the first replay

        def replay() -> None:
            self.replayed += 1
            graph.replay()

        return states, replay


def models(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Llama, GraphedLlama, Recorder]:
    """A small random model without and with graphs."""
    import transformers

    name, extra = FAMILIES.get(family) or (family, {})
    torch.manual_seed(0)
    hf_config = getattr(transformers, f"{name}Config")(**{**SIZES, **extra, **options})
    theirs = getattr(transformers, f"{name}ForCausalLM")(hf_config)
    for parameter_name, parameter in theirs.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:  # would be all zeros or ones
            torch.nn.init.normal_(parameter, mean=float("norm" in parameter_name), std=0.2)
    config = ModelConfig.from_hf(hf_config.to_dict())
    weights = to_trtllm(config, {**theirs.to(dtype).state_dict()}.__getitem__)
    return Llama(config, weights), *graphed(config, weights)


def graphed(config: ModelConfig, weights: dict[str, torch.Tensor], **options: Any) -> tuple[GraphedLlama, Recorder]:
    recorder = Recorder()
    return GraphedLlama(config, weights, "cpu", widest=7, record=recorder, **options), recorder


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def assert_same_cache(found: KVCache, expected: KVCache, length: int) -> None:
    for ours, theirs in ((found.k, expected.k), (found.v, expected.v)):
        torch.testing.assert_close(ours[:, :, :, :length], theirs[:, :, :, :length], atol=1e-5, rtol=1e-5)
        assert torch.equal(ours[:, :, :, length:], theirs[:, :, :, length:]), "written behind the tokens"


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_replayed_pass_is_the_pass(family: str) -> None:
    """Every width, at starts that rise, fall (rolled back) and touch both ends of the cache."""
    plain, model, recorder = models(family)
    for width in range(1, 8):
        ours, theirs = model.new_cache(1, CAPACITY), plain.new_cache(1, CAPACITY)
        for store in (ours.k, ours.v, theirs.k, theirs.v):
            store.fill_(3.0)  # what a longer sequence left behind
        for cache, each in ((ours, model), (theirs, plain)):
            each.forward(tokens(1, CAPACITY - 9), cache, 0)
        starts = (9, 10, 11, 17, 12, 0, 25, CAPACITY - width)
        for number, start in enumerate(starts):
            ids = tokens(1, width, seed=number)
            found, expected = model.forward(ids, ours, start), plain.forward(ids, theirs, start)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
            assert_same_cache(ours, theirs, max(start + width, CAPACITY - 9))
            assert expected.std() > 0.2
        assert (recorder.recorded, recorder.replayed) == (width, width * (len(starts) - 2))


@torch.inference_mode()
def test_in_bfloat16_it_is_the_pass_but_for_rounding() -> None:
    plain, model, recorder = models("llama-grouped", torch.bfloat16)
    ours, theirs = model.new_cache(1, CAPACITY), plain.new_cache(1, CAPACITY)
    for start in range(0, 35, 5):
        ids = tokens(1, 5, seed=start)
        found, expected = model.forward(ids, ours, start), plain.forward(ids, theirs, start)
        assert (found - expected).square().mean().sqrt() < 0.03 * expected.std()
    assert recorder.replayed == 5


@torch.inference_mode()
def test_a_graph_belongs_to_one_cache_and_goes_with_it() -> None:
    plain, model, recorder = models("llama-grouped")
    caches = [(model.new_cache(1, CAPACITY), plain.new_cache(1, CAPACITY)) for _ in range(2)]
    for start in range(6):  # two conversations in turn
        for number, (ours, theirs) in enumerate(caches):
            ids = tokens(1, 1, seed=2 * start + number)
            torch.testing.assert_close(model.forward(ids, ours, start), plain.forward(ids, theirs, start))
    assert (recorder.recorded, recorder.replayed) == (2, 8)
    alive = [weakref.ref(ours) for ours, _ in caches]
    del ours, caches
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


@torch.inference_mode()
def test_a_result_outlives_the_next_replay() -> None:
    _, model, recorder = models("llama-grouped")
    cache = model.new_cache(1, CAPACITY)
    states = [model.hidden(tokens(1, 2, seed=n), cache, 2 * n) for n in range(5)]
    kept = [each.clone() for each in states]
    model.hidden(tokens(1, 2, seed=9), cache, 10)
    assert recorder.replayed == 4
    assert all(torch.equal(a, b) for a, b in zip(states, kept, strict=True))
    assert not torch.equal(states[3], states[4])


@torch.inference_mode()
def test_what_has_no_fixed_shape_runs_without() -> None:
    plain, model, recorder = models("llama-grouped")
    ours, theirs = model.new_cache(2, CAPACITY), plain.new_cache(2, CAPACITY)
    mask, positions = torch.eye(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    passes: list[tuple[torch.Tensor, int | torch.Tensor, dict[str, Any]]] = [
        (tokens(1, 8), 0, {}),  # wider than the widest
        (tokens(2, 2), 8, {}),  # a batch
        (tokens(2, 2), torch.tensor([8, 9]), {}),
        (tokens(1, 3), 10, {"mask": mask, "positions": positions}),  # a tree
        (tokens(1, 3), 10, {"mask": mask}),
        (tokens(1, 3), 10, {"positions": positions}),
    ]
    for ids, start, options in passes * 4:
        found, expected = model.forward(ids, ours, start, **options), plain.forward(ids, theirs, start, **options)
        assert torch.equal(found, expected)
    model.hidden(tokens(1, 5), None, 0)
    assert recorder.recorded == 0


@torch.inference_mode()
def test_a_mixture_of_experts_runs_without() -> None:
    plain, model, recorder = models("Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ours, theirs = model.new_cache(1, CAPACITY), plain.new_cache(1, CAPACITY)
    for start in range(5):
        ids = tokens(1, 1, seed=start)
        assert torch.equal(model.forward(ids, ours, start), plain.forward(ids, theirs, start))
    assert recorder.recorded == 0


@torch.inference_mode()
def test_a_pass_beyond_the_cache_is_refused_by_a_recorded_width_too() -> None:
    _, model, recorder = models("llama-grouped")
    cache = model.new_cache(1, CAPACITY)
    for start in range(4):
        model.forward(tokens(1, 2), cache, start)
    assert recorder.replayed == 2
    with pytest.raises(TrtspecError, match=f"holds {CAPACITY} positions, {CAPACITY + 1} are needed"):
        model.forward(tokens(1, 2), cache, CAPACITY - 1)


@torch.inference_mode()
def test_static_quantisation_is_recorded() -> None:
    plain, _, _ = models("llama-grouped")
    name = "transformer.layers.1.attention"
    activations = {
        f"{name}.dense": ActivationQuantizer("int8", 0.02),
        f"{name}.kv_cache": ActivationQuantizer("fp8", 0.05),
    }
    quantised = Llama(plain.config, plain.weights, activations=activations)
    model, recorder = graphed(plain.config, plain.weights, activations=activations)
    caches = [each.new_cache(1, CAPACITY) for each in (model, quantised, plain)]
    for start in range(5):
        ids = tokens(1, 1, seed=start)
        found, expected, exact = (
            each.forward(ids, cache, start) for each, cache in zip((model, quantised, plain), caches, strict=True)
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert recorder.replayed == 3
    assert not torch.allclose(expected, exact, atol=1e-3), "the quantisation does nothing"


@torch.inference_mode()
def test_after_a_recording_that_fails_all_runs_without_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, _, _ = models("llama-grouped")

    class NeedsValues(ActivationQuantizer):
        def __call__(self, x: torch.Tensor, expert: int | None = None) -> torch.Tensor:
            return x * min(1.0, float(x.abs().max()))

    activations = {"transformer.layers.1.mlp.fc": NeedsValues()}
    model, recorder = graphed(plain.config, plain.weights, activations=activations)
    expected = Llama(plain.config, plain.weights, activations=activations)
    ours, theirs = model.new_cache(1, CAPACITY), expected.new_cache(1, CAPACITY)
    with caplog.at_level(logging.WARNING):
        for width in (1, 2):
            for start in range(6):
                ids = tokens(1, width, seed=start)
                assert torch.equal(model.forward(ids, ours, start), expected.forward(ids, theirs, start))
    assert (recorder.recorded, recorder.replayed) == (1, 0)
    (record,) = caplog.records
    assert "no CUDA graphs" in record.message
    assert "not permitted when stream is capturing" in record.message
    assert "\n" not in record.message


def test_an_engine_on_a_gpu_answers_with_graphs_what_it_does_without(
    target_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generation, verifications that accept some and all drafts, an input that goes on and one that shares a prefix."""

    def answers(device: str) -> list[EngineResult]:
        runtime = TorchRuntime(target_engine, device=device, kv_cache_bytes=1 << 22)
        results = []
        prompt = np.arange(3, 15, dtype=np.int32)
        right = runtime.execute(EngineRequest(prompt, 24)).output_ids
        for done in range(0, 20, 2):
            drafts = right[done : done + 3].copy()
            drafts[2] += done % 4 == 0
            request = EngineRequest(np.concatenate([prompt, right[:done]]), 4, draft_tokens=drafts)
            results.append(runtime.execute(request))
        results += [runtime.execute(EngineRequest(np.append(prompt[:length], 20), 12)) for length in (5, 9, 12)]
        return results

    recorder = Recorder()

    def on_cpu(config: ModelConfig, weights: Any, device: str, activations: Any, *, widest: int) -> GraphedLlama:
        assert (device, widest) == ("cuda:0", 9)  # for up to 8 draft tokens
        return GraphedLlama(config, weights, "cpu", activations, widest=widest, record=recorder)

    monkeypatch.setattr(torch_runtime, "_check_device", lambda device: None)
    monkeypatch.setattr(torch_runtime, "GraphedLlama", on_cpu)
    expected = answers("cpu")
    assert recorder.recorded == 0
    found = answers("cuda:0")
    assert recorder.replayed > 20
    assert [each.output_ids.tolist() for each in found] == [each.output_ids.tolist() for each in expected]
    assert {each.num_accepted for each in found if each.num_draft_tokens} == {2, 3}
