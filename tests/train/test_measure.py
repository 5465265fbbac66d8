"""Measuring a draft against recorded answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trtspec.models.source import ModelSource, open_model
from trtspec.prompts import Prompt
from trtspec.runtime.llama import Llama, load_weights
from trtspec.train.measure import (
    Reference,
    acceptance_probabilities,
    measure,
    reference_answers,
)

PROMPTS = [Prompt(1, "def f", "code"), Prompt(2, "hello there", "chat"), Prompt(3, "class A", "code")]


def llama(source: ModelSource) -> Llama:
    return Llama(source.config, load_weights(source))


@pytest.fixture(scope="module")
def target(tiny_model_dir: Path) -> ModelSource:
    return open_model(str(tiny_model_dir))


@pytest.fixture(scope="module")
def references(target: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    return reference_answers(llama(target), target, PROMPTS, tmp_path_factory.mktemp("work"))


def test_one_greedy_and_one_sampled_answer_a_prompt(references: list[Reference]) -> None:
    assert sorted((r.category, r.temperature) for r in references) == sorted(
        (category, temperature) for category in ("code", "chat", "code") for temperature in (0.0, 1.0)
    )
    assert all(r.p.min() > 0 and r.p.max() <= 1 for r in references)


def test_recorded_answers_are_read_again(target: ModelSource, tmp_path: Path) -> None:
    first = reference_answers(llama(target), target, PROMPTS, tmp_path)
    (path,) = tmp_path.iterdir()
    stamp = path.stat().st_mtime_ns
    second = reference_answers(llama(target), target, PROMPTS, tmp_path)
    assert path.stat().st_mtime_ns == stamp
    assert all(torch.equal(a.tokens, b.tokens) and torch.equal(a.p, b.p) for a, b in zip(first, second, strict=True))
    reference_answers(llama(target), target, PROMPTS[:2], tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "other prompts, other answers"


def test_the_target_as_its_own_draft_is_always_accepted(target: ModelSource, references: list[Reference]) -> None:
    model = llama(target)
    for reference in references:
        assert min(acceptance_probabilities(model, reference)) > 0.97
    figures = measure(model, model, references)
    for mode in ("greedy", "temperature 1"):
        lengths = [len(r.p) for r in references if (r.temperature == 0) == (mode == "greedy")]
        for n in (1, 4):
            passes = sum(-(-length // (n + 1)) for length in lengths)
            measured = figures["modes"][mode]["all"]["acceptance_length"][str(n)]
            assert measured == pytest.approx(sum(lengths) / passes, rel=0.03)
    assert set(figures["modes"]["greedy"]) == {"all", "code", "chat"}


@torch.inference_mode()
def test_probabilities_of_another_model(tiny_draft_dir: Path, references: list[Reference]) -> None:
    draft = llama(open_model(str(tiny_draft_dir)))
    for reference in references:
        got = acceptance_probabilities(draft, reference)
        for place in range(0, len(reference.p), 9):
            end = reference.prompt_len + place
            logits = draft.forward(reference.tokens[None, :end], draft.new_cache(1, end), 0, num_logits=1)[0, 0]
            token = int(reference.tokens[end])
            if reference.temperature == 0:
                assert got[place] == float(int(logits.argmax()) == token)
            else:
                expected = min(1.0, float(logits.softmax(-1)[token] / reference.p[place]))
                assert got[place] == pytest.approx(expected, rel=1e-3)
    assert {0.0, 1.0} == {a for r in references if r.temperature == 0 for a in acceptance_probabilities(draft, r)}
