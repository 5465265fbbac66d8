"""Stage 1 of distillation: the target's own answers to many prompts, with its top-k log-probabilities a token.

Rows of one big batch are refilled as soon as their answer ends. Finished answers are written in shards, atomically,
and a restart goes on with the prompts that no shard holds. Does not know the draft.

A shard is a safetensors file of n answers: `index` [n] (prompt number), `prompt_len` [n], `length` [n] (prompt and
answer), `tokens` [sum of length] int32, and for the answer tokens of all n one after another `top_ids` [answer, k]
int32, `top_logprobs` [answer, k] float16 (natural log of the target's probability at temperature 1) and `states`
[answer, hidden] bfloat16, the target's hidden states (after the last norm) that these were computed from.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trtspec.errors import TrtspecError
from trtspec.models.source import ModelSource
from trtspec.runtime.llama import Llama
from trtspec.train.prompts import Prompt, training_prompt

TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 1.0)  # drawn per prompt; three of five answers are greedy
ANSWER_LENGTHS = (64, 96, 128, 160)  # the longest an answer may get, drawn per prompt
PROMPT_LENGTH = 64  # the longest that the rest of an unfinished prompt may get


@dataclass
class Answer:
    """One row: the prompt, what was generated so far, and the states and distributions it was drawn from.

    Where `begun` is set, the row goes on with these words of a user, and what is generated is the rest of a prompt.
    """

    index: int
    prompt: list[int]
    temperature: float
    budget: int
    tokens: list[int] = field(default_factory=list)
    top_ids: list[torch.Tensor] = field(default_factory=list)
    top_logprobs: list[torch.Tensor] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)
    begun: str | None = None


class Generator:
    """Answers prompts in a batch of rows that are refilled.

    Args:
        model: the target, on a CPU or a GPU.
        eos_ids: ids that end an answer.
        rows: size of the batch.
        capacity: cache positions a row; prompt plus answer never exceed it.
        top_k: how many log-probabilities are kept a token; sampling is among these too. None: sampling is among all,
            and nothing but tokens is kept.
        seed: of the sampling.
    """

    def __init__(
        self,
        model: Llama,
        eos_ids: Iterable[int],
        *,
        rows: int = 160,
        capacity: int = 320,
        top_k: int | None = 24,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.eos = set(eos_ids)
        self.top_k = top_k
        self.cache = model.new_cache(rows, capacity)
        self.rows: list[Answer | None] = [None] * rows
        self.random = torch.Generator(device=model.device).manual_seed(seed)

    @torch.inference_mode()
    def answers(self, waiting: Iterator[Answer]) -> Iterator[Answer]:
        """Yield finished answers until `waiting` is used up and every row is done."""
        refill = max(1, len(self.rows) // 12)
        exhausted = False
        while True:
            free = [i for i, row in enumerate(self.rows) if row is None]
            if not exhausted and len(free) >= refill:
                for begin in range(0, len(free), refill):
                    slots = free[begin : begin + refill]
                    batch = [answer for _, answer in zip(slots, waiting, strict=False)]
                    exhausted = len(batch) < len(slots)
                    if batch:
                        self._start(slots, batch)
                    if exhausted:
                        break
            active = [i for i, row in enumerate(self.rows) if row is not None]
            if not active:
                return
            done = list(self._finished(active))
            yield from done
            if len(done) < len(active):
                self._step()

    def _start(self, slots: list[int], batch: list[Answer]) -> None:
        """Prefill a group of prompts, padded on the right, and take their first tokens."""
        longest = max(len(answer.prompt) for answer in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, answer in enumerate(batch):
            ids[row, : len(answer.prompt)] = torch.tensor(answer.prompt)
        fresh = self.model.new_cache(len(batch), longest)
        hidden = self.model.hidden(ids.to(self.model.device), fresh, 0)
        slots = slots[: len(batch)]
        self.cache.k[:, slots, :, :longest] = fresh.k
        self.cache.v[:, slots, :, :longest] = fresh.v
        last = torch.tensor([len(answer.prompt) - 1 for answer in batch], device=self.model.device)
        self._append(batch, hidden[torch.arange(len(batch), device=self.model.device), last])
        for slot, answer in zip(slots, batch, strict=True):
            self.rows[slot] = answer

    def _step(self) -> None:
        """One more token for every row; idle rows run along at position 0."""
        ids = torch.tensor([[row.tokens[-1]] if row else [0] for row in self.rows], device=self.model.device)
        start = torch.tensor(
            [len(row.prompt) + len(row.tokens) - 1 if row else 0 for row in self.rows], device=self.model.device
        )
        hidden = self.model.hidden(ids, self.cache, start)[:, 0]
        active = [i for i, row in enumerate(self.rows) if row is not None]
        self._append([row for row in self.rows if row is not None], hidden[active])

    def _append(self, answers: list[Answer], hidden: torch.Tensor) -> None:
        """Draw the next token of each row from hidden `[n, hidden]` and keep its top-k log-probabilities."""
        logits = self.model.head(hidden)
        # [n, k], descending; or [n, vocab]
        values, ids = (logits, None) if self.top_k is None else logits.topk(self.top_k, dim=-1)
        logprobs = values - logits.logsumexp(dim=-1, keepdim=True)
        temperature = torch.tensor([a.temperature for a in answers], device=self.model.device).unsqueeze(1)
        scaled = logprobs / temperature.clamp_min(1e-6)
        # Gumbel-max: the largest of log p + Gumbel noise is a draw from p
        noise = -torch.empty_like(scaled).exponential_(generator=self.random).log()
        choice = torch.where(temperature > 0, scaled + noise, scaled).argmax(dim=-1, keepdim=True)
        tokens = (choice if ids is None else ids.gather(1, choice)).squeeze(1).tolist()
        for answer, token in zip(answers, tokens, strict=True):
            answer.tokens.append(token)
        if ids is None:
            return
        ids, kept, states = ids.int().cpu(), logprobs.half().cpu(), hidden.bfloat16().cpu()
        for row, answer in enumerate(answers):
            answer.top_ids.append(ids[row])
            answer.top_logprobs.append(kept[row])
            answer.states.append(states[row])

    def _finished(self, active: list[int]) -> Iterator[Answer]:
        for slot in active:
            row = self.rows[slot]
            if row is not None and (row.tokens[-1] in self.eos or len(row.tokens) >= row.budget):
                self.rows[slot] = None
                yield row


def prompt_ids(prompt: Prompt, source: ModelSource) -> list[int]:
    """Token ids of a prompt, the chat template applied to conversations; an unfinished one ends with its words."""
    if not prompt.unfinished:
        return source.encode(source.chat(prompt.messages) if prompt.messages else prompt.text)
    *before, last = prompt.messages
    mark = "\N{OBJECT REPLACEMENT CHARACTER}"
    opening, _, _ = source.chat([*before, {**last, "content": mark}]).partition(mark)
    return source.encode(opening + last["content"])


def generate_shards(
    model: Llama,
    source: ModelSource,
    folder: Path,
    *,
    tokens: int,
    worker: int = 0,
    workers: int = 1,
    seed: int = 0,
    rows: int = 160,
    capacity: int = 320,
    answers_per_shard: int = 32,
    report: Callable[[int], None] = lambda tokens: None,
) -> int:
    """Answer the prompts `worker, worker + workers, ...` until this worker's shards hold `tokens` answer tokens.

    Args:
        folder: where the shards `answers-WORKER-NUMBER.safetensors` are written and looked for.
        report: called with the answer tokens done after each shard.

    Returns:
        answer tokens in this worker's shards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = sorted(folder.glob(f"answers-{worker}-*.safetensors"))
    done, total = _in_shards(shards)
    report(total)
    if total >= tokens:
        return total
    generator = Generator(
        model,
        source.config.eos_token_ids,
        rows=rows,
        capacity=capacity,
        seed=seed * 1000 + len(shards) * workers + worker,
    )
    finished: list[Answer] = []
    completed: deque[Answer] = deque()  # prompts that the model has written the rest of
    waiting = _first_of(completed, _waiting(source, capacity, seed, worker, workers, done))
    number = len(shards)
    decode = source.tokenizer().decode
    for answer in generator.answers(waiting):
        if answer.begun is not None:
            message = {"role": "user", "content": (answer.begun + decode(answer.tokens)).strip()}
            completed.extend(_planned(answer.index, Prompt("own", (message,)), source, capacity, seed))
            continue
        finished.append(answer)
        if len(finished) == answers_per_shard:
            save_shard(finished, folder / f"answers-{worker}-{number:05d}.safetensors")
            total += sum(len(a.tokens) for a in finished)
            finished, number = [], number + 1
            report(total)
            if total >= tokens:
                break
    return total


def _waiting(
    source: ModelSource, capacity: int, seed: int, worker: int, workers: int, done: set[int]
) -> Iterator[Answer]:
    """Endless rows to begin, by blocks of 128 prompts ordered by length so that groups pad little."""
    block = 0
    while True:
        answers = []
        for index in range(block * 128 * workers + worker, (block + 1) * 128 * workers, workers):
            if index not in done:
                answers += _planned(index, training_prompt(index, seed), source, capacity, seed)
        if not answers and not done:
            raise TrtspecError(
                f"no prompt leaves room for an answer in {capacity} positions",
                where=source.name,
                expected="a target with a longer context",
            )
        yield from sorted(answers, key=lambda answer: len(answer.prompt))
        block += 1


def _planned(index: int, prompt: Prompt, source: ModelSource, capacity: int, seed: int) -> list[Answer]:
    """The row that answers a prompt, or that writes the rest of an unfinished one; none where it is too long."""
    rng = random.Random(f"{seed}/{index}")
    ids = prompt_ids(prompt, source)
    shortest = min(ANSWER_LENGTHS) // 3
    if prompt.unfinished:
        fits = len(ids) + PROMPT_LENGTH + shortest <= capacity
        return [Answer(index, ids, 1.0, PROMPT_LENGTH, begun=prompt.messages[-1]["content"])] if fits else []
    budget = min(rng.choice(ANSWER_LENGTHS), capacity - len(ids))
    return [Answer(index, ids, rng.choice(TEMPERATURES), budget)] if budget >= shortest else []


def _first_of(completed: deque[Answer], others: Iterator[Answer]) -> Iterator[Answer]:
    """What lies in the queue, when it lies there, before the others."""
    while True:
        yield completed.popleft() if completed else next(others)


def save_shard(answers: list[Answer], path: Path) -> None:
    """Write one shard; the file appears only when it is complete."""
    from safetensors.torch import save_file

    part = path.with_suffix(".part")
    save_file(
        {
            "index": torch.tensor([a.index for a in answers]),
            "prompt_len": torch.tensor([len(a.prompt) for a in answers]),
            "length": torch.tensor([len(a.prompt) + len(a.tokens) for a in answers]),
            "tokens": torch.tensor([t for a in answers for t in a.prompt + a.tokens], dtype=torch.int32),
            "top_ids": torch.stack([row for a in answers for row in a.top_ids]),
            "top_logprobs": torch.stack([row for a in answers for row in a.top_logprobs]),
            "states": torch.stack([row for a in answers for row in a.states]),
        },
        part,
    )
    os.replace(part, path)


def count_tokens(folder: Path, worker: int | None = None) -> int:
    """Answer tokens in the shards of one worker, or of all."""
    return _in_shards(sorted(folder.glob(f"answers-{'*' if worker is None else worker}-*.safetensors")))[1]


def _in_shards(shards: list[Path]) -> tuple[set[int], int]:
    """Prompt numbers and answer tokens that the shards hold."""
    from safetensors import safe_open

    done: set[int] = set()
    total = 0
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            done.update(file.get_tensor("index").tolist())
            total += file.get_slice("top_ids").get_shape()[0]
    return done, total
