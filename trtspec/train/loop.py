"""The loop that every trainer goes through: batches, AdamW, a schedule, checkpoints that a restart goes on from.

Knows parameters and samples; what the loss is, is the trainer's matter. Does not know models or files of answers.
"""

from __future__ import annotations

import math
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from trtspec.errors import TrtspecError
from trtspec.train.answers import AnswerOptions, Report

HELD_OUT = 40  # every so-manieth prompt is kept for validation


class Indexed(Protocol):
    """A sample, with the number of its prompt."""

    @property
    def index(self) -> int: ...


SampleT = TypeVar("SampleT", bound=Indexed)


class TrainingLoop(ABC, Generic[SampleT]):
    """Trains parameters with AdamW on batches of samples; a trainer adds `loss`, `length` and `validate`.

    Args:
        parameters: by name; matrices are decayed, vectors are not.
        samples: recorded answers; every `HELD_OUT`th prompt is kept aside in `held_out`.
        batch_tokens: padded positions a step.
        lr: peak learning rate; it warms up over 2 % of the run and falls to zero with a cosine.
        weight_decay: of the matrices.
        seed: of the order of the samples.

    Raises:
        TrtspecError: no samples.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], samples: Sequence[SampleT], *,
        batch_tokens: int, lr: float, weight_decay: float, seed: int,
    ) -> None:  # fmt: skip
        self.parameters = dict(parameters)
        self.held_out = [s for s in samples if s.index % HELD_OUT == 0]
        self.samples = [s for s in samples if s.index % HELD_OUT]
        if not self.samples:
            raise TrtspecError("no recorded answers to train on", fix="raise --tokens")
        groups = [
            {"params": [p for p in self.parameters.values() if p.ndim == 2], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
        self.lr, self.batch_tokens, self.seed = lr, batch_tokens, seed
        self.step = 0
        self.seconds = 0.0  # of training, over all restarts

    @abstractmethod
    def loss(self, batch: list[SampleT]) -> torch.Tensor:
        """Mean loss of a batch."""

    @abstractmethod
    def length(self, sample: SampleT) -> int:
        """Positions that a sample takes in a batch."""

    @abstractmethod
    def validate(self, limit: int = 64) -> dict[str, float]:
        """Figures on at most `limit` samples of `held_out`."""

    def train(
        self,
        *,
        steps: int | None = None,
        minutes: float | None = None,
        report: Callable[[int, float, float], None] = lambda step, done, loss: None,
        checkpoint: Path | None = None,
        checkpoint_every: float = 60.0,
    ) -> None:
        """Train until `steps` steps or `minutes` minutes of training are done, whichever comes first.

        Args:
            report: called after each step with the step, the share of the run that is done, and the loss.
            checkpoint: written every `checkpoint_every` seconds and at the end; read first if it is there.
        """
        if checkpoint and checkpoint.exists():
            self._load(checkpoint)
        saved = clock = time.monotonic()
        for batch in self._batches():
            done = max(self.step / steps if steps else 0.0, self.seconds / 60 / minutes if minutes else 0.0)
            if done >= 1.0:
                break
            rate = min(1.0, done / 0.02) if done < 0.02 and self.step < 200 else 0.5 * (1 + math.cos(math.pi * done))
            loss = self._update(batch, max(rate, 0.02))
            now = time.monotonic()
            self.seconds += now - clock
            clock = now
            self.step += 1
            report(self.step, done, loss)
            if checkpoint and now - saved > checkpoint_every:
                self._save(checkpoint)
                saved = now
        if checkpoint:
            self._save(checkpoint)

    def _update(self, batch: list[SampleT], rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * rate
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _batches(self) -> Iterator[list[SampleT]]:
        """Endless batches of samples of like length, in an order fixed by the seed; skips those already done."""
        done = 0
        epoch = 0
        while True:
            rng = random.Random(f"{self.seed}/{epoch}")
            order = rng.sample(self.samples, len(self.samples))
            batches = []
            for begin in range(0, len(order), 256):
                batches += list(self._cut(sorted(order[begin : begin + 256], key=self.length)))
            rng.shuffle(batches)
            for batch in batches:
                if done >= self.step:
                    yield batch
                done += 1
            epoch += 1

    def _cut(self, ordered: list[SampleT]) -> Iterator[list[SampleT]]:
        batch: list[SampleT] = []
        for sample in ordered:
            if batch and (len(batch) + 1) * self.length(sample) > self.batch_tokens:
                yield batch
                batch = []
            batch.append(sample)
        if batch:
            yield batch

    def _save(self, path: Path) -> None:
        state: dict[str, Any] = {
            "parameters": {name: p.detach() for name, p in self.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, path)

    def _load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]


def stage(
    trainer: TrainingLoop[Any], options: AnswerOptions, report: Report, checkpoint: Path
) -> dict[str, float | int | None]:
    """Run the stage `train` as the options say; returns what a card says about it, see `TrainingLoop.validate`."""
    smooth = 0.0

    def note(step: int, done: float, loss: float) -> None:
        nonlocal smooth
        smooth = loss if smooth == 0.0 else 0.98 * smooth + 0.02 * loss
        report("train", min(1.0, done), f"step {step}, loss {smooth:.3f}")

    trainer.train(steps=options.steps, minutes=options.minutes, report=note, checkpoint=checkpoint)
    figures = trainer.validate()
    report("train", 1.0, ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    return {
        "steps": trainer.step,
        "minutes": round(trainer.seconds / 60, 1),
        "cpus": os.cpu_count(),
        **{name: round(value, 4) for name, value in figures.items()},
    }
