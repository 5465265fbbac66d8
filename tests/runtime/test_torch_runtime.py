"""The torch runtime, call by call, against the reference sampler."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from trtspec.decoding.engine_call import Cancelled, EngineRequest, EngineResult
from trtspec.decoding.sampling import SamplingParams
from trtspec.errors import TrtspecError
from trtspec.models.source import open_model, tokenizer_sha256
from trtspec.runtime.engine import write_torch_engine
from trtspec.runtime.reference import ReferenceSampler
from trtspec.runtime.torch_runtime import TorchRuntime

VOCAB = 280
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, top_k=50, frequency_penalty=0.1, seed=11)


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> ReferenceSampler:
    return ReferenceSampler(open_model(str(tiny_model_dir)))


@pytest.fixture
def prompt(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(3, VOCAB, size=12).astype(np.int32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def same(a: EngineResult, b: EngineResult) -> bool:
    return a.output_ids.tolist() == b.output_ids.tolist()


def test_greedy_generation_is_the_references(
    target: TorchRuntime, reference: ReferenceSampler, rng: np.random.Generator
) -> None:
    for length in (1, 2, 7, 40):
        prompt = rng.integers(0, VOCAB, size=length).astype(np.int32)
        result = target.execute(EngineRequest(prompt, 16))
        assert result.output_ids.dtype == np.int32
        assert result.output_ids.tolist() == reference.generate(prompt, GREEDY, 16)


def test_generation_logits_and_log_probs_stand_beside_their_tokens(
    target: TorchRuntime, reference: ReferenceSampler, prompt: np.ndarray
) -> None:
    for sampling in (GREEDY, SAMPLED):
        request = EngineRequest(prompt, 10, sampling, return_generation_logits=True, return_log_probs=True)
        result = target.execute(request)
        assert same(result, target.execute(replace(request, return_generation_logits=False, return_log_probs=False)))
        assert result.generation_logits is not None
        assert result.log_probs is not None
        assert result.generation_logits.shape == (10, VOCAB)
        assert result.generation_logits.dtype == result.log_probs.dtype == np.float32
        text = np.concatenate([prompt, result.output_ids])
        expected = reference.logits(text)[len(prompt) - 1 : -1]  # raw, nothing applied
        np.testing.assert_allclose(result.generation_logits, expected, rtol=0, atol=1e-4)
        if sampling.greedy:
            log_probs = torch.log_softmax(torch.from_numpy(expected), dim=-1).numpy()
            chosen = log_probs[np.arange(10), result.output_ids]
            np.testing.assert_allclose(result.log_probs, chosen, rtol=0, atol=1e-4)
        else:
            assert (result.log_probs < 0).all()


@pytest.mark.parametrize("num_right", [0, 1, 2, 3, 4])
def test_greedy_verification_keeps_what_the_target_would_say(
    target: TorchRuntime, reference: ReferenceSampler, prompt: np.ndarray, num_right: int
) -> None:
    right = reference.generate(prompt, GREEDY, 5)
    drafts = ids(*right[:4])
    drafts[num_right:] = (drafts[num_right:] + 1) % VOCAB
    request = EngineRequest(prompt, 5, draft_tokens=drafts, return_generation_logits=True, return_log_probs=True)
    result = target.execute(request)
    assert result.output_ids.tolist() == right[: num_right + 1]
    assert (result.num_draft_tokens, result.num_accepted) == (4, num_right)
    expected = reference.logits([*prompt.tolist(), *right])[len(prompt) - 1 :][: num_right + 1]
    np.testing.assert_allclose(result.generation_logits, expected, rtol=0, atol=1e-4)
    assert result.log_probs is not None
    assert len(result.log_probs) == num_right + 1


def test_an_end_id_ends_generation_and_verification(target: TorchRuntime, prompt: np.ndarray) -> None:
    tokens = target.execute(EngineRequest(prompt, 6)).output_ids
    end = int(tokens[3])
    stopped = target.execute(EngineRequest(prompt, 6, end_id=end))
    first = tokens.tolist().index(end)
    assert stopped.output_ids.tolist() == tokens[: first + 1].tolist()
    verified = target.execute(EngineRequest(prompt, 6, end_id=end, draft_tokens=tokens[:5]))
    assert same(verified, stopped)
    assert verified.num_accepted == first + 1


def test_an_end_id_in_the_prompt_does_not_end_anything(target: TorchRuntime) -> None:
    free = target.execute(EngineRequest(ids(3, 2, 7), 4))
    assert 2 not in free.output_ids
    assert same(target.execute(EngineRequest(ids(3, 2, 7), 4, end_id=2)), free)


def test_stop_sequences_end_with_their_last_token(target: TorchRuntime, prompt: np.ndarray) -> None:
    tokens = target.execute(EngineRequest(prompt, 8)).output_ids.tolist()
    stop = (tokens[2], tokens[3])
    stopped = target.execute(EngineRequest(prompt, 8, stop_sequences=((1, 1), stop)))
    assert stopped.output_ids.tolist() == tokens[:4]


def test_min_new_tokens_bad_words_and_bias(
    target: TorchRuntime, reference: ReferenceSampler, prompt: np.ndarray
) -> None:
    free = target.execute(EngineRequest(prompt, 6)).output_ids.tolist()
    held = target.execute(EngineRequest(prompt, 6, end_id=free[0], min_new_tokens=3)).output_ids.tolist()
    assert held == reference.generate(prompt, GREEDY, 6, end_ids=(free[0],), min_new_tokens=3)
    assert free[0] not in held[:3]

    bad = ((free[0],), (free[1], free[2]))
    without = target.execute(EngineRequest(prompt, 6, bad_words=bad)).output_ids.tolist()
    assert without == reference.generate(prompt, GREEDY, 6, bad_words=bad)
    assert free[0] not in without

    bias = np.zeros(VOCAB, dtype=np.float32)
    bias[77] = 1000.0
    biased = target.execute(EngineRequest(prompt, 3, SAMPLED, embedding_bias=bias))
    assert biased.output_ids.tolist() == [77, 77, 77]
    drafts = ids(77, 77, 5)
    verified = target.execute(EngineRequest(prompt, 4, SAMPLED, embedding_bias=bias, draft_tokens=drafts))
    assert verified.output_ids.tolist() == [77, 77, 77]


def test_reused_tokens_are_counted(target: TorchRuntime, prompt: np.ndarray) -> None:
    assert target.execute(EngineRequest(prompt, 4)).reused_tokens == 0
    assert target.execute(EngineRequest(prompt, 4)).reused_tokens == len(prompt) - 1
    first = target.execute(EngineRequest(prompt, 5, draft_tokens=ids(1, 1, 1, 1)))
    longer = np.concatenate([prompt, first.output_ids])
    assert target.execute(EngineRequest(longer, 1)).reused_tokens == len(longer) - 1
    assert target.statistics.reused_tokens == 2 * (len(prompt) - 1) + len(longer) - 1


def test_state_does_not_leak_between_requests(target: TorchRuntime, rng: np.random.Generator) -> None:
    """The same prompt three times, and A, B, A interleaved, with calls of every kind between them."""
    a, b = (rng.integers(3, VOCAB, size=n).astype(np.int32) for n in (20, 25))
    b[:10] = a[:10]
    for sampling in (GREEDY, SAMPLED):
        request_a, request_b = EngineRequest(a, 12, sampling), EngineRequest(b, 12, sampling)
        first = target.execute(request_a)
        assert same(target.execute(request_a), first)
        assert same(target.execute(request_a), first)
        other = target.execute(request_b)
        target.execute(EngineRequest(a, 5, sampling, draft_tokens=ids(9, 8, 7, 6)))
        assert same(target.execute(request_a), first)
        assert same(target.execute(request_b), other)


def test_a_long_input_goes_in_pieces(
    target_engine: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Every remainder of the piece length, also where the drafts would lie across a cut."""
    prompt = rng.integers(3, VOCAB, size=60).astype(np.int32)
    drafts = rng.integers(3, VOCAB, size=6).astype(np.int32)
    for length in range(40, 60):
        request = EngineRequest(prompt[:length], 7, draft_tokens=drafts, return_generation_logits=True)
        monkeypatch.setattr("trtspec.runtime.torch_runtime._MAX_PASS", 512)
        whole = TorchRuntime(target_engine, kv_cache_bytes=1 << 22).execute(request)
        monkeypatch.setattr("trtspec.runtime.torch_runtime._MAX_PASS", 13)
        pieces = TorchRuntime(target_engine, kv_cache_bytes=1 << 22).execute(request)
        assert same(whole, pieces)
        np.testing.assert_allclose(pieces.generation_logits, whole.generation_logits, rtol=0, atol=1e-4)


def test_requests_from_threads_answer_as_alone(target_engine: Path, rng: np.random.Generator) -> None:
    """Six threads, room for three sequences: they wait for each other and mix up nothing."""
    prompts = [rng.integers(3, VOCAB, size=int(n)).astype(np.int32) for n in rng.integers(5, 40, size=6)]
    requests = []
    for prompt in prompts:
        requests.append(EngineRequest(prompt, 9, replace(SAMPLED, seed=len(prompt))))
        requests.append(EngineRequest(prompt, 6, draft_tokens=rng.integers(3, VOCAB, size=5).astype(np.int32)))
        requests.append(EngineRequest(prompt, 9))
    alone = [TorchRuntime(target_engine, kv_cache_bytes=1 << 22).execute(request) for request in requests]
    one = 2 * 2 * 2 * 8 * 4 * 512  # bytes of a sequence of max_seq_len; short ones take half
    runtime = TorchRuntime(target_engine, kv_cache_bytes=one + one // 2)
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(runtime.execute, requests * 2))
    for request, expected, actual in zip(requests * 2, alone * 2, together, strict=True):
        assert same(actual, expected), request
    assert runtime.statistics.evictions > 0


def test_a_request_waits_for_room_but_not_for_ever(
    target_engine: Path, monkeypatch: pytest.MonkeyPatch, prompt: np.ndarray
) -> None:
    monkeypatch.setattr("trtspec.runtime.torch_runtime._WAIT_S", 0.2)
    runtime = TorchRuntime(target_engine, kv_cache_bytes=2 * 2 * 2 * 8 * 4 * 512)  # one long sequence
    started, go_on = threading.Event(), threading.Event()

    def hold() -> bool:
        started.set()
        go_on.wait(20)
        return False

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(runtime.execute, EngineRequest(prompt, 260), cancelled=hold)
        try:
            assert started.wait(20)
            with pytest.raises(TrtspecError, match=r"no room for 272 tokens in 0.2 s, .*; raise it") as caught:
                runtime.execute(EngineRequest(prompt, 260))
        finally:
            go_on.set()
        assert caught.value.where == "kv_cache_bytes"
        assert len(holding.result(60).output_ids) == 260
    assert len(runtime.execute(EngineRequest(prompt, 260)).output_ids) == 260


def test_cancellation_is_seen_before_each_pass_and_leaves_the_runtime_well(
    target: TorchRuntime, prompt: np.ndarray
) -> None:
    expected = target.execute(EngineRequest(prompt, 10))
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 4

    with pytest.raises(Cancelled):
        target.execute(EngineRequest(prompt, 10), cancelled=cancelled)
    assert asked == 5
    with pytest.raises(Cancelled):
        target.execute(EngineRequest(prompt, 3, draft_tokens=ids(1, 2)), cancelled=lambda: True)
    assert same(target.execute(EngineRequest(prompt, 10)), expected)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("input_ids", {"input_ids": ids(5, -1)}, r"id -1 is not in the vocabulary; expected 0 to 279"),
        ("input_ids", {"input_ids": ids(5, VOCAB)}, r"id 280 is not in the vocabulary"),
        ("input_ids", {"input_ids": ids()}, r"a row of token ids"),
        ("input_ids", {"input_ids": np.ones((1, 3), dtype=np.int32)}, r"shape \[1, 3\]; expected a row"),
        ("input_ids", {"input_ids": np.ones(3, dtype=np.float32)}, r"float32 of shape \[3\]; expected a row"),
        ("input_ids", {"input_ids": np.ones(512, dtype=np.int32)}, r"512 tokens; expected fewer than max_seq_len 512"),
        ("max_new_tokens", {"max_new_tokens": 0}, r"0 new tokens after 4; expected 1 to 508"),
        ("max_new_tokens", {"max_new_tokens": 509}, r"509 new tokens after 4; expected 1 to 508 \(max_seq_len 512\)"),
        ("max_new_tokens", {"draft_tokens": ids(1, 2)}, r"5 in the verification of 2 draft tokens; expected 3"),
        ("draft_tokens", {"draft_tokens": ids(1, 2, 3, VOCAB)}, r"id 280 is not in the vocabulary"),
        ("draft_tokens", {"draft_tokens": ids(-2)}, r"id -2 is not in the vocabulary"),
        ("draft_tokens", {"draft_tokens": ids()}, r"a row of token ids"),
        ("draft_tokens", {"draft_tokens": np.ones(9, dtype=np.int32), "max_new_tokens": 10}, r"9 tokens; .* at most 8"),
        ("draft_logits", {"draft_logits": np.zeros((4, VOCAB), dtype=np.float32)}, r"without draft_tokens"),
        (
            "draft_logits",
            {"draft_tokens": ids(1, 2, 3, 4), "draft_logits": np.zeros((3, VOCAB), dtype=np.float32)},
            r"shape \[3, 280\]; expected \[4, 280\]",
        ),
        (
            "draft_logits",
            {"draft_tokens": ids(1, 2, 3, 4), "draft_logits": np.zeros(4 * VOCAB, dtype=np.float32)},
            r"shape \[1120\]; expected \[4, 280\]",
        ),
        ("embedding_bias", {"embedding_bias": np.zeros((1, VOCAB), dtype=np.float32)}, r"shape \[1, 280\]"),
        ("bad_words", {"bad_words": ((5,), ())}, r"an empty sequence"),
    ],
)
def test_requests_that_do_not_fit_are_refused_by_field(
    target: TorchRuntime, field: str, change: dict[str, Any], message: str
) -> None:
    good = EngineRequest(ids(5, 6, 7, 8), 5)
    with pytest.raises(TrtspecError, match=message) as caught:
        target.execute(replace(good, **change))
    assert caught.value.where == field
    assert len(target.execute(good).output_ids) == 5


def test_impossible_distributions_are_an_error(target: TorchRuntime, prompt: np.ndarray) -> None:
    nothing = np.full(VOCAB, -np.inf, dtype=np.float32)
    for sampling in (GREEDY, SAMPLED):
        with pytest.raises(TrtspecError, match="no distribution"):
            target.execute(EngineRequest(prompt, 2, sampling, embedding_bias=nothing))


def test_generation_logits_only_where_the_engine_was_built_for_them(
    build_engine: Callable[..., Path], tiny_draft_dir: Path, prompt: np.ndarray
) -> None:
    engine = build_engine(tiny_draft_dir, role="draft", gather_generation_logits=False)
    runtime = TorchRuntime(engine, kv_cache_bytes=1 << 22)
    with pytest.raises(TrtspecError, match="built without generation logits; build it with"):
        runtime.execute(EngineRequest(prompt, 2, return_generation_logits=True))
    assert len(runtime.execute(EngineRequest(prompt, 2)).output_ids) == 2


@pytest.mark.parametrize("device", ["cuda:0", "teapot"])
def test_a_device_that_is_not_there_is_named(target_engine: Path, device: str) -> None:
    if device.startswith("cuda") and torch.cuda.is_available():
        device = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(TrtspecError, match=rf"device '{device}': cannot be used: .*; expected cpu or cuda"):
        TorchRuntime(target_engine, device=device, kv_cache_bytes=1 << 22)


def test_rows_of_padding_have_no_probability(
    build_engine: Callable[..., Path], tiny_model_dir: Path, prompt: np.ndarray
) -> None:
    """A head padded for tensor parallelism to 282 rows, with all real logits negative and the padding's zero."""
    engine = build_engine(tiny_model_dir)
    weights = load_file(engine / "rank0.safetensors")
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    weights["lm_head.weight"] = torch.cat([weights["lm_head.weight"], torch.zeros(2, 32)])
    save_file(weights, engine / "rank0.safetensors")
    runtime = TorchRuntime(engine, kv_cache_bytes=1 << 22)
    negative = np.full(VOCAB, -1e4, dtype=np.float32)
    request = EngineRequest(prompt, 30, replace(SAMPLED, top_k=0, temperature=5.0), embedding_bias=negative)
    result = runtime.execute(replace(request, return_generation_logits=True))
    assert result.generation_logits is not None
    assert result.generation_logits.shape == (30, VOCAB)
    assert result.output_ids.max() < VOCAB


def test_drafts_from_a_longer_vocabulary_are_rejected_not_refused(target: TorchRuntime, prompt: np.ndarray) -> None:
    logits = np.zeros((2, 300), dtype=np.float32)
    result = target.execute(EngineRequest(prompt, 3, SAMPLED, draft_tokens=ids(299, 4), draft_logits=logits))
    assert result.num_accepted == 0
    assert result.output_ids.max() < VOCAB


class TestReducedHead:
    """A draft whose head covers a part of the vocabulary, and which takes its embedding from the target."""

    head_ids = np.array([2, 5, 6, 40, 41, 99, 100, 101, 200, 279])

    @pytest.fixture
    def reduced(self, tiny_model_dir: Path, save_model: Callable[..., Path], tmp_path: Path) -> TorchRuntime:
        directory = save_model(tmp_path / "reduced", blend=(1, 0.03))
        tensors = load_file(directory / "model.safetensors")
        del tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        tensors["d2t"] = torch.from_numpy(self.head_ids - np.arange(10)).to(torch.int32)
        save_file(tensors, directory / "model.safetensors")
        source = open_model(str(tiny_model_dir))
        config = json.loads((directory / "config.json").read_text())
        config["trtspec"] = {
            "shares": ["embedding", "tokenizer"],
            "tokenizer_sha256": tokenizer_sha256(source),
            "draft_vocab_size": 10,
        }
        (directory / "config.json").write_text(json.dumps(config))
        write_torch_engine(
            open_model(str(directory), target=source),
            tmp_path / "engine",
            dtype="float32",
            role="draft",
            build_config={},
            stamp={},
        )
        return TorchRuntime(tmp_path / "engine", kv_cache_bytes=1 << 22)

    def test_logits_are_those_of_the_ids_in_the_head(self, reduced: TorchRuntime, prompt: np.ndarray) -> None:
        result = reduced.execute(EngineRequest(prompt, 5, SAMPLED, return_generation_logits=True))
        assert result.generation_logits is not None
        finite = np.isfinite(result.generation_logits)
        assert all(np.flatnonzero(row).tolist() == self.head_ids.tolist() for row in finite)
        assert set(result.output_ids.tolist()) <= set(self.head_ids.tolist())

    def test_greedy_without_logits_gives_the_same_ids(self, reduced: TorchRuntime, rng: np.random.Generator) -> None:
        for _ in range(5):
            prompt = rng.integers(3, VOCAB, size=6).astype(np.int32)
            with_logits = reduced.execute(EngineRequest(prompt, 12, return_generation_logits=True))
            assert same(reduced.execute(EngineRequest(prompt, 12)), with_logits)
            assert with_logits.generation_logits is not None
            assert with_logits.generation_logits.argmax(axis=1).tolist() == with_logits.output_ids.tolist()


def test_bfloat16_engines_run_in_bfloat16(build_engine: Callable[..., Path], tiny_model_dir: Path) -> None:
    runtime = TorchRuntime(build_engine(tiny_model_dir, dtype="bfloat16"), kv_cache_bytes=1 << 22)
    result = runtime.execute(EngineRequest(ids(5, 6, 7), 4, return_generation_logits=True))
    assert result.generation_logits is not None
    rounded = torch.from_numpy(result.generation_logits).to(torch.bfloat16).float().numpy()
    assert (result.generation_logits == rounded).all()
