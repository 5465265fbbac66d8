"""Stage 3 of distillation: how much of a draft the target accepts on prompts it has not seen, and what a step costs.

The target's answers are recorded once (greedy and at temperature 1); a draft is then judged by one pass over them,
see `trtspec.plan.acceptance` for why that is exact. Does not know how a draft was trained.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtspec.models.source import ModelSource
from trtspec.plan.acceptance import Expected, expected_acceptance
from trtspec.prompts import Prompt
from trtspec.runtime.llama import Llama
from trtspec.runtime.passes import pass_over
from trtspec.train.generate import Answer, Generator, prompt_ids, save_shard
from trtspec.train.prompts import Prompt as Request

NUM_DRAFT_TOKENS = (1, 2, 3, 4, 5, 6)
ANSWER_TOKENS = 128
SAMPLED_PER_PROMPT = 1
_TOP_K = 256  # sampled answers are drawn from so many tokens, and p is renormalised over them


@dataclass(frozen=True)
class Reference:
    """One recorded answer of the target: category, temperature, tokens, and of each answer token p and the state."""

    category: str
    temperature: float
    tokens: torch.Tensor  # int64 [L]
    prompt_len: int
    p: torch.Tensor  # float32 [A]
    states: torch.Tensor  # bfloat16 [A, hidden], what the tokens were chosen from


def reference_answers(
    model: Llama, source: ModelSource, prompts: Sequence[Prompt], folder: Path, seed: int = 0
) -> list[Reference]:
    """The target's answers: one greedy and one sampled a prompt; recorded in `folder`, by target and prompts."""
    from safetensors.torch import load_file

    asked = [(prompt.category or "none", prompt.text) for prompt in prompts]
    made_of = json.dumps([source.fingerprint(), asked, seed, "states"])
    path = folder / f"reference-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}.safetensors"

    plan = [
        (category, prompt, temperature)
        for category, prompt in asked
        for temperature in (0.0,) + (1.0,) * SAMPLED_PER_PROMPT
    ]
    if not path.exists():
        waiting = []
        for index, (_, prompt, temperature) in enumerate(plan):
            chat = Request("measure", ({"role": "user", "content": prompt},))
            ids = prompt_ids(chat, source)
            waiting.append(Answer(index, ids, temperature, ANSWER_TOKENS))
        capacity = max(len(answer.prompt) for answer in waiting) + ANSWER_TOKENS
        generator = Generator(
            model, source.config.eos_token_ids, rows=min(64, len(plan)), capacity=capacity, top_k=_TOP_K, seed=seed
        )
        folder.mkdir(parents=True, exist_ok=True)
        save_shard(list(generator.answers(iter(waiting))), path)
    data = load_file(path)
    lengths, prompt_lens = data["length"].tolist(), data["prompt_len"].tolist()
    answers = [length - prompt for length, prompt in zip(lengths, prompt_lens, strict=True)]
    references = []
    for index, tokens, prompt_len, ids, logprobs, states in zip(
        data["index"].tolist(), data["tokens"].long().split(lengths), prompt_lens,
        data["top_ids"].long().split(answers), data["top_logprobs"].float().split(answers),
        data["states"].split(answers), strict=True,
    ):  # fmt: skip
        probs = logprobs.exp() / logprobs.exp().sum(dim=-1, keepdim=True)
        chosen = (probs * (ids == tokens[prompt_len:, None])).sum(dim=-1)
        category, _, temperature = plan[index]
        references.append(Reference(category, temperature, tokens, prompt_len, chosen, states))
    return references


@torch.inference_mode()
def acceptance_probabilities(draft: Llama, reference: Reference) -> list[float]:
    """Per answer token, the probability that the draft's proposal there is accepted, given that the text goes on so."""
    hidden = draft.hidden(reference.tokens[None, :-1], None, 0)[0, reference.prompt_len - 1 :]
    logits = draft.head(hidden)  # [A, vocab]
    emitted = reference.tokens[reference.prompt_len :]
    if reference.temperature == 0:
        return (logits.argmax(dim=-1) == emitted).float().tolist()
    q = logits.softmax(dim=-1).gather(1, emitted[:, None])[:, 0]
    return (q / reference.p.clamp_min(1e-9)).clamp_max(1.0).tolist()


def step_milliseconds(model: Llama, position: int = 192, repeats: int = 30, num_tokens: int = 1) -> float:
    """Median time of a forward pass over `num_tokens` tokens, the outcome of the last, behind `position` others."""
    step = pass_over(model, [model.new_cache(1, position + num_tokens)], num_tokens, position, num_rows=1)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


def measure(draft: Llama, target: Llama, references: Sequence[Reference]) -> dict[str, Any]:
    """The figures of acceptance.json: by temperature, overall and by category, at 1 to 6 draft tokens."""
    texts: dict[float, dict[str, list[list[float]]]] = {}
    for reference in references:
        by_category = texts.setdefault(reference.temperature, {})
        by_category.setdefault(reference.category, []).append(acceptance_probabilities(draft, reference))
    draft_ms, target_ms = step_milliseconds(draft), step_milliseconds(target)
    return {
        "answer_tokens": sum(len(reference.p) for reference in references),
        "prompts": len({tuple(r.tokens[: r.prompt_len].tolist()) for r in references}),
        "threads": torch.get_num_threads(),
        "step_ms": {
            "draft": round(draft_ms, 2),
            "target": round(target_ms, 2),
            "ratio": round(draft_ms / target_ms, 4),
        },
        "modes": {
            mode_name(temperature): {
                "all": _figures([text for texts_ in by_category.values() for text in texts_]),
                **{category: _figures(texts_) for category, texts_ in by_category.items()},
            }
            for temperature, by_category in sorted(texts.items())
        },
    }


def mode_name(temperature: float) -> str:
    """How answers of this temperature are called in the figures."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def _figures(texts: list[list[float]]) -> dict[str, Any]:
    by_length: dict[str, Expected] = {str(n): expected_acceptance(texts, n) for n in NUM_DRAFT_TOKENS}
    return {
        "acceptance_length": {n: round(a.length, 3) for n, a in by_length.items()},
        "acceptance_rate": {n: round(a.rate, 3) for n, a in by_length.items()},
        "accepted_by_position": [round(rate, 3) for rate in by_length[str(NUM_DRAFT_TOKENS[-1])].by_position],
    }
