"""The target's answers that a trainer works on: made once by several processes, and gone on with after an end.

Both trainers use the same answers, so they can share a work directory. Does not know what is trained on them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch

from trtspec.errors import TrtspecError
from trtspec.models.source import ModelSource, open_model
from trtspec.runtime.llama import Llama, load_weights
from trtspec.train.generate import count_tokens, generate_shards
from trtspec.train.prompts import training_prompt
from trtspec.train.store import write_text

CAPACITY = 320  # positions of a training text; a step's attention goes over as many as the longest row has
RECIPE = 2  # raised when other prompts are drawn or something else is recorded
MAX_ROWS = 160  # answers generated side by side; more gain nothing on a CPU

Report = Callable[[str, float, str], None]
"""Called with the stage (generate, train, measure), the share of it that is done, and a note."""


@dataclass(frozen=True)
class AnswerOptions:
    """Where answers come from and where they are kept; the fields are options of the trainers."""

    target: str
    gguf_file: str | None
    output: Path
    work_dir: Path
    prompts: Path
    num_prompts: int | None = None
    tokens: int = 400_000
    steps: int | None = None
    minutes: float | None = 40.0
    workers: int = 2
    seed: int = 0
    resume: bool = True

    @property
    def target_options(self) -> str:
        """The options that name the target, as they stand in a command."""
        return f"--target {self.target}" + (f" --gguf-file {self.gguf_file}" if self.gguf_file else "")

    @property
    def measured_on(self) -> str:
        """The option that says how many prompts count, as it stands in a command; nothing where all do."""
        return f" --num-prompts {self.num_prompts}" if self.num_prompts else ""

    def target_name(self, source: ModelSource) -> str:
        """What the target is called on a card."""
        return self.gguf_file or source.name


def load_target(source: ModelSource, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Llama:
    """The target in one type."""
    return Llama(source.config, {name: tensor.to(dtype) for name, tensor in load_weights(source).items()}, device)


def fast_dtype() -> torch.dtype:
    """bfloat16 where this CPU multiplies it, which answers about twice as fast; else float32."""
    able: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # not in every torch that is allowed
    return torch.bfloat16 if any(able.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16")) else torch.float32


def fast_dtype_name() -> str:
    """Its name without the module's."""
    return str(fast_dtype()).removeprefix("torch.")


def claim(options: AnswerOptions, source: ModelSource) -> None:
    """Make sure that what lies in the work directory was made for this target and seed, in the same way."""
    run = {"target": source.fingerprint(), "seed": options.seed, "recipe": RECIPE, "dtype": fast_dtype_name()}
    stamp = options.work_dir / "run.json"
    if not options.resume and stamp.exists():  # nothing but a work directory is ever removed
        shutil.rmtree(options.work_dir)
    if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) != run:
        raise TrtspecError(
            "the work directory holds the answers of another target or seed, type of numbers or trtspec",
            where=str(options.work_dir),
            fix="give another --work-dir, or discard it with --no-resume",
        )  # fmt: skip
    options.work_dir.mkdir(parents=True, exist_ok=True)
    write_text(stamp, json.dumps(run))


def generate(options: AnswerOptions, source: ModelSource, report: Report) -> None:
    """Answer prompts in one-threaded processes, which outrun one process with many threads."""
    folder = options.work_dir / "answers"
    folder.mkdir(exist_ok=True)
    per_worker = -(-options.tokens // options.workers)
    rows = _rows_that_fit(source, options.workers)
    context = multiprocessing.get_context("spawn")
    failures: SimpleQueue[str] = context.SimpleQueue()
    workers = [
        context.Process(
            target=_worker, daemon=True,
            args=(options.target, options.gguf_file, folder, per_worker, w, options.workers, options.seed, rows,
                  failures),
        )
        for w in range(options.workers)
        if count_tokens(folder, w) < per_worker
    ]  # fmt: skip
    begun, before = time.monotonic(), count_tokens(folder)
    for worker in workers:
        worker.start()
    try:
        while any(worker.is_alive() for worker in workers):
            done = count_tokens(folder)
            speed = (done - before) / (time.monotonic() - begun)
            report("generate", min(1.0, done / options.tokens), f"{done} tokens, {speed:.0f} a second")
            for worker in workers:
                worker.join(timeout=2.0 / len(workers))
    finally:
        for worker in workers:
            worker.kill()
    if not failures.empty():
        raise TrtspecError(failures.get())
    if any(worker.exitcode for worker in workers):
        raise TrtspecError(
            "a process that generated answers ended early (out of memory?)", where=str(folder),
            fix="run the same command again: it goes on from there; with fewer --workers it needs less memory",
        )  # fmt: skip
    report("generate", 1.0, f"{count_tokens(folder)} tokens")


def made_of(options: AnswerOptions, indices: Iterable[int]) -> dict[str, Any]:
    """What a card says about answers to the prompts of these numbers."""
    numbers = list(indices)
    return {
        "answers": len(numbers),
        "own_prompts": sum(training_prompt(number, options.seed).unfinished for number in numbers),
        "dtype": fast_dtype_name(),
    }


def shards(options: AnswerOptions) -> list[Path]:
    """The files that hold the answers."""
    return sorted((options.work_dir / "answers").glob("answers-*.safetensors"))


def _worker(
    target: str, gguf_file: str | None, folder: Path, tokens: int, worker: int, workers: int, seed: int, rows: int,
    failures: SimpleQueue[str],
) -> None:  # fmt: skip
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    try:
        source = open_model(target, gguf_file=gguf_file)
        generate_shards(
            load_target(source, fast_dtype()), source, folder,
            tokens=tokens, worker=worker, workers=workers, seed=seed, rows=rows,
            capacity=min(CAPACITY, source.config.max_position_embeddings),
        )  # fmt: skip
    except (TrtspecError, OSError, MemoryError) as error:
        failures.put(str(error) or type(error).__name__)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, even if that was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _rows_that_fit(source: ModelSource, workers: int) -> int:
    """Batch rows whose KV caches take at most half of the memory that is free now."""
    c = source.config
    row = 2 * fast_dtype().itemsize * c.num_hidden_layers * c.num_key_value_heads * c.head_size * CAPACITY
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(8, min(MAX_ROWS, free // 2 // workers // row))
