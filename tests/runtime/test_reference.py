"""The reference sampler: against examples worked out by hand, against transformers, and against the decoding core."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from trtspec.decoding.sampling import SamplingParams, probabilities, processed_logits
from trtspec.errors import TrtspecError
from trtspec.models.source import open_model
from trtspec.runtime.reference import ReferenceSampler, distribution

GREEDY = SamplingParams()
BEFORE_MIN = {"end_ids": (0,), "min_new_tokens": 1}


def logits_of(*shares: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(shares))


@pytest.mark.parametrize(
    ("shares", "history", "sampling", "rules", "expected"),
    [
        # temperature 0.5 squares the shares
        ((0.5, 0.3, 0.2), [0], SamplingParams(0.5), {}, (25 / 38, 9 / 38, 4 / 38)),
        ((0.45, 0.25, 0.2, 0.1), [0], SamplingParams(1.0, top_k=2), {}, (9 / 14, 5 / 14, 0, 0)),
        # 0.5 alone does not hold 0.6, 0.5 and 0.3 do
        ((0.2, 0.5, 0.3), [0], SamplingParams(1.0, top_p=0.6), {}, (0, 0.625, 0.375)),
        # of the two that top_k leaves (0.625, 0.375) the first holds top_p
        ((0.2, 0.5, 0.3), [0], SamplingParams(1.0, top_k=2, top_p=0.6), {}, (0, 1, 0)),
        ((0.5, 0.3, 0.2), [0], SamplingParams(1.0, min_p=0.5), {}, (0.625, 0.375, 0)),
        # log(2), log(1), log(1), with penalties of log(2) a count: 2/4, 1/2, 1
        ((2, 1, 1), [0, 0, 1], SamplingParams(1.0, frequency_penalty=np.log(2)), {}, (0.25, 0.25, 0.5)),
        ((2, 1, 1), [0, 0, 1], SamplingParams(1.0, presence_penalty=np.log(2)), {}, (0.4, 0.2, 0.4)),
        # a positive logit is divided by the repetition penalty, a negative one multiplied: 4 to 2, 1/4 to 1/16
        ((4, 0.25, 1), [0, 1], SamplingParams(1.0, repetition_penalty=2.0), {}, (32 / 49, 1 / 49, 16 / 49)),
        # the temperature comes before the penalty: 2 becomes 4, then 4/2
        ((2, 1), [0], SamplingParams(0.5, presence_penalty=np.log(2)), {}, (2 / 3, 1 / 3)),
        ((2, 1, 1), [0], SamplingParams(1.0), {"bias": np.array([0, np.log(2), 0])}, (0.4, 0.4, 0.2)),
        ((2, 1, 1), [0], SamplingParams(1.0), {**BEFORE_MIN, "num_generated": 0}, (0, 0.5, 0.5)),
        ((2, 1, 1), [0], SamplingParams(1.0), {**BEFORE_MIN, "num_generated": 1}, (0.5, 0.25, 0.25)),
        ((2, 1, 1), [9, 5, 6], SamplingParams(1.0), {"bad_words": [(1,), (5, 6, 2), (6, 5, 0)]}, (1, 0, 0)),
        ((0.3, 0.5, 0.2), [9], GREEDY, {}, (0, 1, 0)),
        ((0.3, 0.5, 0.2), [1], replace(GREEDY, presence_penalty=1.0), {}, (1, 0, 0)),
        ((0.3, 0.5, 0.2), [9], SamplingParams(1.0, top_k=1), {}, (0, 1, 0)),
    ],
)  # fmt: skip
def test_distributions_worked_out_by_hand(
    shares: tuple[float, ...], history: list[int], sampling: SamplingParams, rules: dict, expected: tuple[float, ...]
) -> None:
    logits = np.concatenate([logits_of(*shares), np.full(10 - len(shares), -np.inf)])
    if "bias" in rules:
        rules = {**rules, "bias": np.pad(rules["bias"], (0, 10 - len(rules["bias"])))}
    result = distribution(logits, history, sampling, **rules)
    np.testing.assert_allclose(result[: len(expected)], expected, rtol=0, atol=1e-12)
    assert result[len(expected) :].sum() == 0.0


def test_the_decoding_core_has_the_same_distributions(rng: np.random.Generator) -> None:
    """Two implementations without a common line, over random rows and every combination of settings."""
    vocab_size, compared = 50, 0
    cuts = itertools.product((0.0, 0.4, 1.0, 1.7), (0, 1, 7), (1.0, 0.8), (0.0, 0.1))
    penalties = [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (0.8, 0.5, -0.2), (1.0, -0.7, 0.4)]
    for (temperature, top_k, top_p, min_p), penalty in itertools.product(cuts, penalties):
        sampling = SamplingParams(temperature, top_k, top_p, min_p, *penalty)
        logits = rng.normal(size=vocab_size, scale=3.0).astype(np.float32)
        history = rng.integers(0, vocab_size, size=int(rng.integers(1, 40))).astype(np.int32)
        rules = {
            "end_ids": (3, 4),
            "min_new_tokens": int(rng.integers(0, 3)),
            "bad_words": ((8,), (int(history[-1]), 9), (1, 2, 3)),
            "bias": rng.normal(size=vocab_size).astype(np.float32) if rng.random() < 0.5 else None,
        }
        core = probabilities(processed_logits(logits, history, 1, sampling, **rules), sampling)  # type: ignore[arg-type]
        plain = distribution(logits, history, sampling, num_generated=1, **rules)  # type: ignore[arg-type]
        np.testing.assert_allclose(core, plain, rtol=0, atol=1e-6, err_msg=str(sampling))
        compared += 1
    assert compared == 192


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> ReferenceSampler:
    return ReferenceSampler(open_model(str(tiny_model_dir)))


def test_logits_are_those_of_transformers(reference: ReferenceSampler, tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    ids = [5, 99, 3, 3, 270]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    logits = reference.logits(ids)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_computes_in_the_type_it_is_told(reference: ReferenceSampler, tiny_model_dir: Path, dtype: str) -> None:
    """The logits come in float32, and hold what the narrower type can: they are near the others', and not the same."""
    ids = [5, 99, 3, 3, 270]
    narrow, wide = ReferenceSampler(open_model(str(tiny_model_dir)), dtype).logits(ids), reference.logits(ids)
    assert narrow.dtype == np.float32
    np.testing.assert_array_equal(torch.tensor(narrow).to(getattr(torch, dtype)).float().numpy(), narrow)
    assert 0 < np.abs(narrow - wide).max() < 0.05 * np.abs(wide).max()


def test_generation_is_token_by_token(reference: ReferenceSampler) -> None:
    prompt = [5, 99, 3]
    tokens = reference.generate(prompt, GREEDY, 6)
    for i, token in enumerate(tokens):
        assert token == reference.logits([*prompt, *tokens[:i]])[-1].argmax()
    end = tokens[2]
    assert reference.generate(prompt, GREEDY, 6, end_ids=(end,)) == tokens[: tokens.index(end) + 1]
    sampled = SamplingParams(temperature=1.0, seed=2**64 - 1)
    assert reference.generate(prompt, sampled, 6) == reference.generate(prompt, sampled, 6)
    assert reference.generate(prompt, sampled, 6) != reference.generate(prompt, replace(sampled, seed=4), 6)


def test_weights_that_do_not_fit_are_refused(save_model: Callable[..., Path], tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.7.mlp.extra"] = weights.pop("model.norm.weight")
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(TrtspecError, match=r"do not fit .*LlamaForCausalLM: missing_keys \['model.norm.weight'\]"):
        ReferenceSampler(open_model(str(directory)))


def test_an_architecture_that_transformers_lacks_is_named(save_model: Callable[..., Path], tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model", architectures=["TeapotForCausalLM"])
    with pytest.raises(TrtspecError, match="transformers has no TeapotForCausalLM"):
        ReferenceSampler(open_model(str(directory)))
