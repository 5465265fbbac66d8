"""After which layer to leave for drafts: what every early exit of a model would have proposed along its own answers.

Greedily, a draft counts only where all drafts before it were right, and then its context is the answer itself. So what
the exits predict along recorded answers, in one pass, gives the cycles of speculation exactly, for every layer and
draft length at once. Knows a decoder and texts. Does not know specs, or how fast a machine is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from trtspec.models.config import ModelConfig
from trtspec.plan.acceptance import expected_acceptance
from trtspec.plan.experts import weights_read
from trtspec.plan.speedup import speed_up
from trtspec.runtime.llama import Llama
from trtspec.train.generate import Answer, Generator

MAX_DRAFT_TOKENS = 8


@dataclass(frozen=True)
class EarlyExit:
    """What one exit is worth with its best number of draft tokens.

    Attributes:
        layer: layers that the draft consists of.
        right: how often it predicts the target's next token.
        num_draft_tokens: the number with the largest speed-up.
        acceptance_rate: accepted over drafted.
        tokens_per_pass: emitted tokens a target pass, the target's own one counts.
        cost: c, a draft step in target steps.
        speed_up: modelled, over plain decoding; see `speedup.speed_up`.
    """

    layer: int
    right: float
    num_draft_tokens: int
    acceptance_rate: float
    tokens_per_pass: float
    cost: float
    speed_up: float


def greedy_answers(
    model: Llama, prompts: Sequence[Sequence[int]], max_tokens: int, end_ids: Iterable[int]
) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of each prompt, in order; an end id is the last token of its answer."""
    capacity = max(map(len, prompts)) + max_tokens
    generator = Generator(model, end_ids, rows=min(len(prompts), 32), capacity=capacity, top_k=1)
    waiting = (Answer(number, list(ids), 0.0, max_tokens) for number, ids in enumerate(prompts))
    done = sorted(generator.answers(waiting), key=lambda answer: answer.index)
    return [(answer.prompt, answer.tokens) for answer in done]


@torch.inference_mode()
def exit_matches(
    model: Llama, prompt: Sequence[int], answer: Sequence[int], layers: Iterable[int]
) -> dict[int, list[float]]:
    """For each exit, 1.0 for every answer token that it predicts and 0.0 for every other one; one forward pass."""
    wanted = set(layers)
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    x, matches = model.embed(ids[:, :-1]), {}
    for layer in range(max(wanted)):
        x = model.layer_output(layer, x)
        if layer + 1 in wanted:
            logits = model.head(model.norm(x[0, len(prompt) - 1 :]))
            matches[layer + 1] = (logits.argmax(dim=-1) == ids[0, len(prompt) :]).float().tolist()
    return matches


def judge(
    config: ModelConfig, layer: int, matches: Sequence[Sequence[float]], max_draft_tokens: int = MAX_DRAFT_TOKENS
) -> EarlyExit:
    """The exit after `layer` with the number of draft tokens that the model of the time likes best.

    A step's time is taken to be proportional to the weights that it reads (`weights_read`): c is N/L for N of L layers
    where the head is small beside them, and more where it is not, since every draft step needs the head too; v is 1
    but for a mixture of experts, of which a verification reads more.

    Args:
        config: of the target.
        layer: N.
        matches: for each text what `exit_matches` says of this exit.
        max_draft_tokens: most draft tokens to consider.
    """
    step = weights_read(config, config.num_hidden_layers, 1)
    cost = weights_read(config, layer, 1) / step
    flat = [match for text in matches for match in text]
    candidates = []
    for num_draft_tokens in range(1, max_draft_tokens + 1):
        acceptance = expected_acceptance(matches, num_draft_tokens)
        verify_cost = weights_read(config, config.num_hidden_layers, num_draft_tokens + 1) / step
        candidates.append(
            EarlyExit(
                layer=layer,
                right=sum(flat) / len(flat),
                num_draft_tokens=num_draft_tokens,
                acceptance_rate=acceptance.rate,
                tokens_per_pass=acceptance.length,
                cost=cost,
                speed_up=speed_up(acceptance.length, num_draft_tokens, cost, verify_cost),
            )
        )
    return max(candidates, key=lambda candidate: candidate.speed_up)
