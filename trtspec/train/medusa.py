"""`trtspec train medusa`: generate, train, measure, each resumable, with the result written as one directory.

The answers are those of `trtspec train draft`; the heads learn from the hidden states recorded with them. Joins the
stages; what each does is in its own module. Does not know how progress is shown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trtspec.models.medusa import DEFAULT_CHOICES, open_medusa
from trtspec.models.source import ModelSource, open_model
from trtspec.plan.tree import Node, accuracies_of, best_tree, chain, tokens_per_pass
from trtspec.prompts import Prompt, read_prompts, spread
from trtspec.runtime.llama import Llama
from trtspec.runtime.medusa import MedusaHeads
from trtspec.spec.schema import Medusa
from trtspec.train.answers import AnswerOptions, Report, claim, fast_dtype, generate, load_target, made_of, shards
from trtspec.train.card import medusa_card
from trtspec.train.distill import head_ids
from trtspec.train.heads import HeadTrainer, initial_heads, load_head_samples, text_ranks
from trtspec.train.loop import stage
from trtspec.train.measure import Reference, mode_name, reference_answers, step_milliseconds
from trtspec.train.store import json_text, write_directory, write_text

WEIGHTS = "medusa_lm_head.safetensors"
TREE_SIZES = (15, 40)  # nodes of the trees that heads are measured with
TOP = 5  # ranks on the card
JUDGED = 64  # answers kept aside that the trees are chosen for


@dataclass(frozen=True)
class MedusaOptions(AnswerOptions):
    """What `trtspec train medusa` was asked for; the fields are its options."""

    heads: int = 4
    layers: int = 2
    vocab: int = 2048

    @property
    def command(self) -> str:
        """The command that trains these heads again."""
        length = f"--steps {self.steps}" if self.steps else f"--minutes {self.minutes:g}"
        return (
            f"trtspec train medusa {self.target_options} --output {self.output} --heads {self.heads} "
            f"--layers {self.layers} --vocab {self.vocab} --tokens {self.tokens} --workers {self.workers} "
            f"--seed {self.seed} {length}"
        )

    @property
    def measure_command(self) -> str:
        """The command that measures them again."""
        return f"trtspec train medusa --measure-only {self.target_options} --output {self.output}{self.measured_on}"


def train_medusa(options: MedusaOptions, report: Report) -> dict[str, Any]:
    """Run the three stages and write the heads; returns the figures of acceptance.json.

    Raises:
        TrtspecError: the target cannot be used, or the work directory belongs to another run.
    """
    prompts = spread(read_prompts(options.prompts), options.num_prompts)
    source = open_model(options.target, gguf_file=options.gguf_file)
    source.check()
    claim(options, source)
    generate(options, source, report)
    target = load_target(source)
    trainer, trained = _train(options, source, target, report)
    weights = {name: tensor.detach().bfloat16() for name, tensor in trainer.parameters.items()}
    heads = MedusaHeads({name: tensor.float() for name, tensor in weights.items()}, trainer.heads.output)
    report("measure", 0.0, "choosing the trees")
    texts = [text_ranks(heads, s.states, s.tokens).numpy() for s in trainer.held_out[:JUDGED]]
    accuracies = accuracies_of(texts)
    trees = {str(size): best_tree(accuracies, size) for size in TREE_SIZES} if texts else {}
    report("measure", 0.2, "recording the target's answers")
    references = reference_answers(target, source, prompts, options.work_dir)
    samples = trainer.answers + trainer.held_out
    figures = {
        "target": options.target_name(source),
        "command": options.command,
        "measure_command": options.measure_command,
        "heads": {
            "num_heads": heads.num_heads,
            "num_layers": heads.num_layers,
            "stored_parameters": sum(t.numel() for t in weights.values()),
        },
        "training": {
            **made_of(options, (s.index for s in samples)),
            "answer_tokens": sum(len(s.tokens) for s in samples),
            "top_k": samples[0].rows.shape[1],
            "vocab": min(options.vocab, source.config.vocab_size),
            **trained,
        },
        **measure_heads(heads, target, references, trees, report),
    }
    tensors = {_public_name(name): tensor for name, tensor in weights.items()}
    config = {
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "hidden_size": source.config.hidden_size,
        "vocab_size": source.config.vocab_size,
        "base_model_name_or_path": options.target_name(source),
    }
    texts_of = {"config.json": config, "acceptance.json": figures}
    files = {name: json_text(content) for name, content in texts_of.items()}
    write_directory(options.output, files | {"README.md": medusa_card(figures)}, tensors, WEIGHTS)
    report("measure", 1.0, f"written to {options.output}")
    return figures


def measure_medusa(options: MedusaOptions, report: Report) -> dict[str, Any]:
    """Measure the heads in `options.output` and renew their acceptance.json, and README.md where it is ours."""
    prompts = spread(read_prompts(options.prompts), options.num_prompts)
    source = open_model(options.target, gguf_file=options.gguf_file)
    source.check()
    heads = load_heads(options.output, source)  # before anything is loaded or generated
    target = load_target(source)
    heads.output = target.weights["lm_head.weight"][: source.config.vocab_size]
    path = options.output / "acceptance.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    report("measure", 0.0, "recording the target's answers")
    references = reference_answers(target, source, prompts, options.work_dir)
    trees = {size: [tuple(node) for node in tree] for size, tree in before.get("trees", {}).items()}
    measured = measure_heads(heads, target, references, trees, report)
    figures = {**before, "measure_command": options.measure_command, **measured}
    write_text(path, json_text(figures))
    if "training" in figures:
        write_text(options.output / "README.md", medusa_card(figures))
    report("measure", 1.0, f"written to {options.output}")
    return figures


def load_heads(directory: Path, source: ModelSource) -> MedusaHeads:
    """Heads on disk in float32, without the target's output matrix (`output` is to be set where they have none).

    Raises:
        TrtspecError: no heads there, or heads of another target.
    """
    found = open_medusa(directory)
    found.check(source.config, Medusa(heads=str(directory), num_heads=found.num_heads, num_layers=found.num_layers))
    weights = {name: read().float() for name, read in found.tensors(found.num_heads).items()}
    return MedusaHeads(weights, torch.empty(0))


def measured_ranks(
    source: ModelSource, directory: Path, prompts: Sequence[Prompt], work_dir: Path
) -> list[NDArray[np.int16]]:
    """`text_ranks` of the heads in a directory along the target's answers to prompts."""
    heads = load_heads(directory, source)
    target = load_target(source)
    heads.output = target.weights["lm_head.weight"][: source.config.vocab_size]
    references = reference_answers(target, source, prompts, work_dir)
    return [text_ranks(heads, r.states, r.tokens[r.prompt_len :]).numpy() for r in references]


def measure_heads(
    heads: MedusaHeads, target: Llama, references: Sequence[Reference], trees: dict[str, list[Node]], report: Report
) -> dict[str, Any]:
    """The figures of acceptance.json: right guesses by head and rank, and tokens a target pass with several trees.

    Args:
        trees: by number of nodes; none: the best ones for these texts.
    """
    ranks = []
    for number, reference in enumerate(references):
        report("measure", 0.3 + 0.6 * number / len(references), "judging the heads")
        ranks.append(text_ranks(heads, reference.states, reference.tokens[reference.prompt_len :]).numpy())
    accuracies = accuracies_of(ranks)
    trees = trees or {str(size): best_tree(accuracies, size) for size in TREE_SIZES}
    measured = {f"chain of {heads.num_heads}": chain(heads.num_heads)}
    measured |= {f"{size} nodes": tree for size, tree in trees.items()}
    if heads.num_heads >= max(map(len, DEFAULT_CHOICES)):
        measured[f"default {len(DEFAULT_CHOICES)} nodes"] = list(DEFAULT_CHOICES)
    modes: dict[str, dict[str, list[Any]]] = {}
    for reference, text in sorted(zip(references, ranks, strict=True), key=lambda pair: pair[0].temperature):
        by_category = modes.setdefault(mode_name(reference.temperature), {"all": []})
        by_category["all"].append(text)
        by_category.setdefault(reference.category, []).append(text)
    rows = sorted({1, *(1 + len(tree) for tree in measured.values())})
    return {
        "answer_tokens": sum(len(text) for text in ranks),
        "prompts": len({tuple(r.tokens[: r.prompt_len].tolist()) for r in references}),
        "threads": torch.get_num_threads(),
        "accuracies": [[round(value, 4) for value in row] for row in accuracies],
        "trees": {size: [list(node) for node in tree] for size, tree in trees.items()},
        "pass_ms": {str(n): round(step_milliseconds(target, num_tokens=n, repeats=10), 1) for n in rows},
        "modes": {
            mode: {category: _figures(texts, measured) for category, texts in categories.items()}
            for mode, categories in modes.items()
        },
    }


def _figures(texts: list[Any], trees: dict[str, list[Node]]) -> dict[str, Any]:
    right = []
    for head in range(texts[0].shape[1]):
        ranks = [rank for text in texts for rank in text[: max(len(text) - 1 - head, 0), head].tolist()]
        right.append([round(sum(0 <= r <= best for r in ranks) / max(len(ranks), 1), 3) for best in range(TOP)])
    return {
        "tokens_per_pass": {name: round(tokens_per_pass(tree, texts), 3) for name, tree in trees.items()},
        "top_1_to_5": right,  # by head: how often the token is among its first 1, 2, ... choices
    }


def _public_name(name: str) -> str:
    """`0.1.linear.weight` of TensorRT-LLM's `medusa_heads.0.medusa_layers.1.linear.weight`."""
    return name.removeprefix("medusa_heads.").replace("medusa_layers.", "")


def _train(
    options: MedusaOptions, source: ModelSource, target: Llama, report: Report
) -> tuple[HeadTrainer, dict[str, float | int | None]]:
    label = f"{options.heads}x{options.layers}-{options.vocab}"
    ids_file = options.work_dir / f"medusa-ids-{options.vocab}.json"
    if not ids_file.exists():  # fixed once, so that a run that goes on has the same loss
        ids = head_ids(shards(options), source.config.vocab_size, options.vocab)
        write_text(ids_file, json.dumps(ids.tolist()))
    ids = torch.tensor(json.loads(ids_file.read_text()))
    report("train", 0.0, "reading the answers")
    samples = load_head_samples(shards(options), ids, source.config.vocab_size)
    weights = initial_heads(options.heads, options.layers, source.config.hidden_size)
    output = target.weights["lm_head.weight"][: source.config.vocab_size]
    trainer = HeadTrainer(weights, output, ids, samples, dtype=fast_dtype(), seed=options.seed)
    return trainer, stage(trainer, options, report, options.work_dir / f"medusa-{label}.pt")
