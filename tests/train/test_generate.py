"""Recording the target's answers: what is recorded, refilling of rows, shards, going on after an end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trtspec.errors import TrtspecError
from trtspec.models.source import ModelSource, open_model
from trtspec.runtime.llama import Llama, load_weights
from trtspec.train.generate import Answer, Generator, count_tokens, generate_shards, prompt_ids
from trtspec.train.prompts import Prompt, training_prompt


@pytest.fixture(scope="module")
def source(tiny_model_dir: Path) -> ModelSource:
    return open_model(str(tiny_model_dir))


@pytest.fixture(scope="module")
def model(source: ModelSource) -> Llama:
    return Llama(source.config, load_weights(source))


def waiting(count: int, temperature: float, budget: int = 12) -> list[Answer]:
    generator = torch.Generator().manual_seed(3)
    lengths = [3 + (5 * i) % 7 for i in range(count)]
    prompts = [torch.randint(3, 280, (n,), generator=generator).tolist() for n in lengths]
    return [Answer(i, prompt, temperature, budget + i % 3, [], [], []) for i, prompt in enumerate(prompts)]


@torch.inference_mode()
def test_greedy_answers_are_those_of_one_row_alone(model: Llama) -> None:
    """Eleven prompts of different length through four rows, so that rows are refilled at different positions."""
    generator = Generator(model, eos_ids=(2,), rows=4, capacity=40, top_k=5)
    answers = {answer.index: answer for answer in generator.answers(iter(waiting(11, 0.0)))}
    assert sorted(answers) == list(range(11))
    for plan in waiting(11, 0.0):
        text = list(plan.prompt)
        recorded = answers[plan.index]
        for step, token in enumerate(recorded.tokens):
            logits = model.forward(torch.tensor([text]), model.new_cache(1, 40), 0, num_logits=1)
            logprobs = logits[0, 0].log_softmax(-1)
            top = logprobs.topk(5)
            assert token == top.indices[0]
            assert recorded.top_ids[step].tolist() == top.indices.tolist()
            torch.testing.assert_close(recorded.top_logprobs[step].float(), top.values, atol=2e-2, rtol=2e-3)
            text.append(token)
        assert len(recorded.tokens) == plan.budget or recorded.tokens[-1] == 2
        assert 2 not in recorded.tokens[:-1]


@torch.inference_mode()
def test_sampled_tokens_follow_the_distribution(model: Llama) -> None:
    """Hypothesis: first tokens at temperature 1 follow the softmax over the 8 likeliest.

    2000 draws, chi-square with 7 degrees of freedom, threshold 27.9: false alarms 1 in 4,000. Sampling at
    temperature 0.7 gives about 248 here, a uniform choice about 2300.
    """
    prompt = waiting(1, 1.0)[0].prompt
    plans = [Answer(i, prompt, 1.0, 1, [], [], []) for i in range(2000)]
    generator = Generator(model, eos_ids=(2,), rows=500, capacity=16, top_k=8, seed=5)
    tokens = torch.tensor([answer.tokens[0] for answer in generator.answers(iter(plans))])
    top = model.forward(torch.tensor([prompt]), model.new_cache(1, 16), 0, num_logits=1)[0, 0].topk(8)
    expected = 2000 * top.values.softmax(-1)
    observed = (tokens[:, None] == top.indices).sum(dim=0)
    assert observed.sum() == 2000
    assert float(((observed - expected) ** 2 / expected).sum()) < 27.9


@torch.inference_mode()
def test_without_a_top_k_all_tokens_are_drawn_from_and_none_kept(model: Llama) -> None:
    """Hypothesis: first tokens at temperature 1 are outside the 8 likeliest as often as the softmax over all says.

    2000 draws, a band of 4 standard errors: false alarms 1 in 16,000. Sampling among the 8 is off by 18.
    """
    prompt = waiting(1, 1.0)[0].prompt
    plans = [Answer(i, prompt, 1.0, 1) for i in range(2000)]
    generator = Generator(model, eos_ids=(2,), rows=500, capacity=16, top_k=None, seed=5)
    answers = list(generator.answers(iter(plans)))
    logits = model.forward(torch.tensor([prompt]), model.new_cache(1, 16), 0, num_logits=1)[0, 0]
    outside = 1.0 - float(logits.softmax(-1).topk(8).values.sum())
    first = set(logits.topk(8).indices.tolist())
    share = sum(answer.tokens[0] not in first for answer in answers) / 2000
    error = (outside * (1.0 - outside) / 2000) ** 0.5
    assert outside > 15 * error
    assert abs(share - outside) < 4 * error
    assert not any(answer.top_ids or answer.top_logprobs or answer.states for answer in answers)


def shards(source: ModelSource, model: Llama, folder: Path, tokens: int) -> int:
    return generate_shards(
        model, source, folder, tokens=tokens, workers=2, worker=1, rows=4, capacity=448, answers_per_shard=2
    )


def test_a_second_run_goes_on_with_other_prompts(source: ModelSource, model: Llama, tmp_path: Path) -> None:
    first = shards(source, model, tmp_path, 60)
    assert first == count_tokens(tmp_path, 1) == count_tokens(tmp_path) >= 60
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert shards(source, model, tmp_path, 60) == first, "there is nothing left to do"
    second = shards(source, model, tmp_path, first + 60)
    assert second >= first + 60
    assert all(path.read_bytes() == content for path, content in before.items())
    indices = [i for path in sorted(tmp_path.iterdir()) for i in load_file(path)["index"].tolist()]
    assert len(indices) == len(set(indices)) and all(i % 2 == 1 for i in indices)


def test_a_shard_says_what_it_holds(source: ModelSource, model: Llama, tmp_path: Path) -> None:
    shards(source, model, tmp_path, 20)
    data = load_file(tmp_path / "answers-1-00000.safetensors")
    answers = (data["length"] - data["prompt_len"]).tolist()
    assert data["top_ids"].shape == data["top_logprobs"].shape == (sum(answers), 24)
    assert sum(data["length"].tolist()) == len(data["tokens"])
    first = source.tokenizer().decode(data["tokens"][: data["prompt_len"][0]].tolist(), skip_special_tokens=False)
    assert first.startswith("<|im_start|>") and first.endswith("<|im_start|>assistant\n")
    assert not list(tmp_path.glob("*.part"))


@torch.inference_mode()
def test_the_states_in_a_shard_are_the_models(source: ModelSource, model: Llama, tmp_path: Path) -> None:
    """Kept in bfloat16, made in float32: nothing else is lost."""
    shards(source, model, tmp_path, 20)
    data = load_file(tmp_path / "answers-1-00000.safetensors")
    length, prompt_len = int(data["length"][0]), int(data["prompt_len"][0])
    states = model.hidden(data["tokens"][None, :length].long(), None, 0)[0, prompt_len - 1 : length - 1]
    torch.testing.assert_close(data["states"][: length - prompt_len].float(), states, atol=2e-2, rtol=2e-2)


def test_an_unfinished_prompt_ends_with_its_words(source: ModelSource) -> None:
    begun, whole = (
        prompt_ids(Prompt("own", ({"role": "user", "content": text},), unfinished=unfinished), source)
        for text, unfinished in (("List five", True), ("List five", False))
    )
    assert whole[: len(begun)] == begun and len(whole) > len(begun)
    assert source.tokenizer().decode(begun).endswith("user\nList five")


def test_the_model_finishes_such_prompts_and_then_answers_them(
    source: ModelSource, model: Llama, tmp_path: Path
) -> None:
    """Every recorded text is a whole conversation: the words a prompt began with, more, and the assistant's turn."""
    shards(source, model, tmp_path, 200)
    decode = source.tokenizer().decode
    rest = []
    for path in sorted(tmp_path.iterdir()):
        data = load_file(path)
        texts = data["tokens"].split(data["length"].tolist())
        for index, length, text in zip(data["index"].tolist(), data["prompt_len"].tolist(), texts, strict=True):
            prompt = training_prompt(index)
            written = decode(text[:length].tolist(), skip_special_tokens=False)
            if prompt.unfinished:
                begun = prompt.messages[-1]["content"].strip()
                _, _, said = written.partition(f"user\n{begun}")
                assert said.endswith("<|im_end|>\n<|im_start|>assistant\n")
                rest.append(said.removesuffix("<|im_end|>\n<|im_start|>assistant\n"))
    assert rest and any(rest)


def test_a_context_without_room_for_any_prompt(source: ModelSource, model: Llama, tmp_path: Path) -> None:
    with pytest.raises(TrtspecError, match="no prompt leaves room for an answer in 40 positions"):
        generate_shards(model, source, tmp_path, tokens=10, rows=2, capacity=40)
