"""`trtspec train draft`: generate, train, measure, each resumable, with the result written as one directory.

Joins the stages; what each does is in its own module. Does not know how progress is shown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtspec.errors import TrtspecError
from trtspec.models.source import ModelSource, open_model
from trtspec.prompts import read_prompts, spread
from trtspec.runtime.llama import Llama, load_weights
from trtspec.train.answers import AnswerOptions, Report, claim, generate, load_target, made_of, shards
from trtspec.train.card import model_card
from trtspec.train.distill import Trainer, draft_config, head_ids, initial_weights, load_samples
from trtspec.train.loop import stage
from trtspec.train.measure import measure, reference_answers
from trtspec.train.store import draft_files, json_text, write_directory, write_text


@dataclass(frozen=True)
class DraftOptions(AnswerOptions):
    """What `trtspec train draft` was asked for; the fields are its options."""

    layers: int = 2
    draft_vocab: int = 8192


def train_draft(options: DraftOptions, report: Report) -> dict[str, Any]:
    """Run the three stages and write the draft; returns the figures of acceptance.json.

    Raises:
        TrtspecError: the target cannot be used, or the work directory belongs to another run.
    """
    prompts = spread(read_prompts(options.prompts), options.num_prompts)
    source = open_model(options.target, gguf_file=options.gguf_file)
    source.check()
    if options.layers > source.config.num_hidden_layers:
        raise TrtspecError(
            f"{options.layers} layers",
            where="--layers",
            expected=f"at most {source.config.num_hidden_layers}, the target's",
        )
    claim(options, source)
    generate(options, source, report)
    target = load_target(source)
    trainer, trained = _train(options, source, target, report)
    report("measure", 0.0, "recording the target's answers")
    config = trainer.model.config
    config_json, tensors = draft_files(config, trainer.model.weights, source)
    references = reference_answers(target, source, prompts, options.work_dir)
    figures = measure(as_stored(trainer.model), target, references)
    samples = trainer.samples + trainer.held_out
    figures |= {
        "target": options.target_name(source),
        "command": command_line(options),
        "draft": {
            "layers": options.layers,
            "draft_vocab_size": len(trainer.model.weights["d2t"]),
            "stored_parameters": sum(t.numel() for n, t in tensors.items() if n != "d2t"),
        },
        "training": {
            **made_of(options, (s.index for s in samples)),
            "answer_tokens": sum(len(s.rows) for s in samples),
            "top_k": samples[0].rows.shape[1],
            **trained,
        },
    }
    _write(options.output, config_json, tensors, figures)
    report("measure", 1.0, f"written to {options.output}")
    return figures


def measure_draft(options: DraftOptions, report: Report) -> dict[str, Any]:
    """Measure the draft that lies in `options.output` and renew its acceptance.json and README.md."""
    prompts = spread(read_prompts(options.prompts), options.num_prompts)
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
    figures = {**before, "command": command_line(options), **measure(draft, target, references)}
    write_text(options.output / "acceptance.json", json_text(figures))
    write_text(options.output / "README.md", model_card(figures))
    report("measure", 1.0, f"written to {options.output}")
    return figures


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
    return f"trtspec train draft --measure-only {options.target_options} --output {options.output}{options.measured_on}"


def _write(output: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], figures: dict[str, Any]) -> None:
    texts = {"config.json": json_text(config), "acceptance.json": json_text(figures), "README.md": model_card(figures)}
    write_directory(output, texts, tensors)


def _train(
    options: DraftOptions, source: ModelSource, target: Llama, report: Report
) -> tuple[Trainer, dict[str, float | int | None]]:
    label = f"{options.layers}-layers-{options.draft_vocab}"
    ids_file = options.work_dir / f"head-{label}.json"
    if not ids_file.exists():  # fixed once: a checkpoint is tied to its head
        ids = head_ids(shards(options), source.config.vocab_size, options.draft_vocab)
        write_text(ids_file, json.dumps(ids.tolist()))
    ids = torch.tensor(json.loads(ids_file.read_text()))
    report("train", 0.0, "reading the answers")
    samples = load_samples(shards(options), ids, source.config.vocab_size)
    weights = initial_weights(target.weights, options.layers, ids)
    trainer = Trainer(draft_config(source.config, options.layers), weights, samples, seed=options.seed)
    return trainer, stage(trainer, options, report, options.work_dir / f"checkpoint-{label}.pt")
