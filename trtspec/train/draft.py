"""`trtspec train draft`: generate, train, measure, each resumable, with the result written as one directory.

Joins the stages; what each does is in its own module. Does not know how progress is shown.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch

from trtspec.errors import TrtspecError
from trtspec.models.source import ModelSource, open_model
from trtspec.runtime.llama import Llama, load_weights
from trtspec.train.card import model_card
from trtspec.train.distill import Trainer, draft_config, head_ids, initial_weights, load_samples
from trtspec.train.generate import count_tokens, generate_shards
from trtspec.train.measure import measure, read_prompts, reference_answers
from trtspec.train.store import draft_files, write_directory, write_text

CAPACITY = 448  # positions of a training text
MAX_ROWS = 160  # answers generated side by side; more gain nothing on a CPU

Report = Callable[[str, float, str], None]
"""Called with the stage (generate, train, measure), the share of it that is done, and a note."""


@dataclass(frozen=True)
class DraftOptions:
    """What `trtspec train draft` was asked for; the fields are its options."""

    target: str
    gguf_file: str | None
    output: Path
    work_dir: Path
    prompts: Path
    tokens: int = 400_000
    steps: int | None = None
    minutes: float | None = 40.0
    layers: int = 2
    draft_vocab: int = 8192
    workers: int = 2
    seed: int = 0
    resume: bool = True


def train_draft(options: DraftOptions, report: Report) -> dict[str, Any]:
    """Run the three stages and write the draft; returns the figures of acceptance.json.

    Raises:
        TrtspecError: the target cannot be used, or the work directory belongs to another run.
    """
    prompts = read_prompts(options.prompts)
    source = open_model(options.target, gguf_file=options.gguf_file)
    source.check()
    if options.layers > source.config.num_hidden_layers:
        raise TrtspecError(
            f"{options.layers} layers",
            where="--layers",
            expected=f"at most {source.config.num_hidden_layers}, the target's",
        )
    _claim(options, source)
    _generate(options, source, report)
    target = load_target(source)
    trainer = _train(options, source, target, report)
    report("measure", 0.0, "recording the target's answers")
    config = trainer.model.config
    config_json, tensors = draft_files(config, trainer.model.weights, source)
    references = reference_answers(target, source, prompts, options.work_dir)
    figures = measure(as_stored(trainer.model), target, references)
    samples = trainer.samples + trainer.held_out
    figures |= {
        "target": options.gguf_file or source.name,
        "command": command_line(options),
        "draft": {
            "layers": options.layers,
            "draft_vocab_size": len(trainer.model.weights["d2t"]),
            "stored_parameters": sum(t.numel() for n, t in tensors.items() if n != "d2t"),
        },
        "training": {
            "answers": len(samples),
            "answer_tokens": sum(len(s.rows) for s in samples),
            "top_k": samples[0].rows.shape[1],
            "steps": trainer.step,
            "minutes": round(trainer.seconds / 60, 1),
            "cpus": os.cpu_count(),
            **{name: round(value, 4) for name, value in trainer.validate().items()},
        },
    }
    _write(options.output, config_json, tensors, figures)
    report("measure", 1.0, f"written to {options.output}")
    return figures


def measure_draft(options: DraftOptions, report: Report) -> dict[str, Any]:
    """Measure the draft that lies in `options.output` and renew its acceptance.json and README.md."""
    prompts = read_prompts(options.prompts)
    source = open_model(options.target, gguf_file=options.gguf_file)
    draft_source = open_model(str(options.output.absolute()), target=source)
    draft_source.check()
    before = json.loads((options.output / "acceptance.json").read_text(encoding="utf-8"))
    target = load_target(source)
    draft = Llama(
        draft_source.config, {n: t if n == "d2t" else t.float() for n, t in load_weights(draft_source).items()}
    )
    report("measure", 0.0, "recording the target's answers")
    references = reference_answers(target, source, prompts, options.work_dir)
    report("measure", 0.5, "judging the draft")
    figures = {**before, **measure(draft, target, references)}
    write_text(options.output / "acceptance.json", _json(figures))
    write_text(options.output / "README.md", model_card(figures))
    report("measure", 1.0, f"written to {options.output}")
    return figures


def load_target(source: ModelSource) -> Llama:
    """The target in float32."""
    return Llama(source.config, {name: tensor.float() for name, tensor in load_weights(source).items()})


def as_stored(model: Llama) -> Llama:
    """The draft as it comes back from its bfloat16 file."""
    weights = {
        name: tensor.detach()
        if name in ("d2t", "lm_head.weight") or "embedding" in name
        else tensor.detach().bfloat16().float()
        for name, tensor in model.weights.items()
    }
    return Llama(model.config, weights)


def command_line(options: DraftOptions) -> str:
    """The command that measures this draft again."""
    gguf = f" --gguf-file {options.gguf_file}" if options.gguf_file else ""
    return f"trtspec train draft --measure-only --target {options.target}{gguf} --output {options.output}"


def _write(output: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], figures: dict[str, Any]) -> None:
    texts = {"config.json": _json(config), "acceptance.json": _json(figures), "README.md": model_card(figures)}
    write_directory(output, texts, tensors)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def _claim(options: DraftOptions, source: ModelSource) -> None:
    """Make sure that what lies in the work directory was made for this target and seed."""
    run = {"target": source.fingerprint(), "seed": options.seed}
    stamp = options.work_dir / "run.json"
    if not options.resume and stamp.exists():  # nothing but a work directory is ever removed
        shutil.rmtree(options.work_dir)
    if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) != run:
        raise TrtspecError(
            "the work directory holds the answers of another target or seed", where=str(options.work_dir),
            fix="give another --work-dir, or discard it with --no-resume",
        )  # fmt: skip
    options.work_dir.mkdir(parents=True, exist_ok=True)
    write_text(stamp, json.dumps(run))


def _generate(options: DraftOptions, source: ModelSource, report: Report) -> None:
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


def _worker(
    target: str, gguf_file: str | None, folder: Path, tokens: int, worker: int, workers: int, seed: int, rows: int,
    failures: SimpleQueue[str],
) -> None:  # fmt: skip
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    try:
        source = open_model(target, gguf_file=gguf_file)
        generate_shards(
            load_target(source), source, folder,
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
    row = 2 * 4 * c.num_hidden_layers * c.num_key_value_heads * c.head_size * CAPACITY
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(8, min(MAX_ROWS, free // 2 // workers // row))


def _train(options: DraftOptions, source: ModelSource, target: Llama, report: Report) -> Trainer:
    shards = sorted((options.work_dir / "answers").glob("answers-*.safetensors"))
    label = f"{options.layers}-layers-{options.draft_vocab}"
    ids_file = options.work_dir / f"head-{label}.json"
    if not ids_file.exists():  # fixed once: a checkpoint is tied to its head
        write_text(ids_file, json.dumps(head_ids(shards, source.config.vocab_size, options.draft_vocab).tolist()))
    ids = torch.tensor(json.loads(ids_file.read_text()))
    report("train", 0.0, "reading the answers")
    samples = load_samples(shards, ids, source.config.vocab_size)
    weights = initial_weights(target.weights, options.layers, ids)
    trainer = Trainer(draft_config(source.config, options.layers), weights, samples, seed=options.seed)
    smooth = 0.0

    def note(step: int, done: float, loss: float) -> None:
        nonlocal smooth
        smooth = loss if smooth == 0.0 else 0.98 * smooth + 0.02 * loss
        report("train", min(1.0, done), f"step {step}, loss {smooth:.3f}")

    trainer.train(
        steps=options.steps,
        minutes=options.minutes,
        report=note,
        checkpoint=options.work_dir / f"checkpoint-{label}.pt",
    )
    report("train", 1.0, ", ".join(f"{name} {value:.3f}" for name, value in trainer.validate().items()))
    return trainer
