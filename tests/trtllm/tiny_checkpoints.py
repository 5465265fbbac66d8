"""Small random models, their checkpoints as `trtspec build` writes them, and ways to damage one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trtspec.models.source import ModelSource, open_model
from trtspec.spec.schema import Calibration, Medusa, ModelRef, Speculation
from trtspec.trtllm.checkpoint import CONFIG, RECORD, Checkpoint
from trtspec.trtllm.compiler import CompileJob, prepare_engine
from trtspec.trtllm.convert import ConversionJob, convert

SIZES = {
    "vocab_size": 280, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.06, "bos_token_id": 0,
    "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}

Change = Callable[[torch.Tensor], torch.Tensor]


def save_model(directory: Path, tokenizer_json: str, family: str = "Llama", **sizes: Any) -> ModelSource:
    """Write a random model of a family, with norms and biases that are not all the same, and open it."""
    import transformers

    more = MIXTRAL if family == "Mixtral" else {"head_dim": 64}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **more, **sizes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    return open_model(str(directory))


def convert_model(source: ModelSource, directory: Path, medusa: Path | None = None, **ref: Any) -> Path:
    """Its checkpoint, with the Medusa heads of a directory; other keywords are those of a spec's model section."""
    speculation = Speculation(method="none")
    if medusa:
        speculation = Speculation(method="medusa", medusa=Medusa(heads=str(medusa), num_heads=2))
    job = ConversionJob(
        role="target",
        model=ModelRef(model=str(source.path), **{"dtype": "float16", **ref}),
        speculation=speculation,
        calibration=Calibration(num_prompts=8, max_tokens=32),
        calibration_path=None,
        max_draft_len=speculation.num_draft_tokens,
        heads_dir=medusa,
    )
    record = {"source": str(source.path), "source_fingerprint": source.fingerprint(), "spec_hash": "0"}
    convert(job, source, directory, record, lambda fraction: None, lambda note: None)
    return directory


def prepare(checkpoint: Path, engine: Path) -> Path:
    """The engine that `trtspec build --no-compile` leaves beside it."""
    found = Checkpoint.load(checkpoint)
    limits = {"max_batch_size": 1, "max_input_len": 64, "max_seq_len": 96, "max_num_tokens": 512, "max_beam_width": 1}
    plugins = {"use_paged_context_fmha": True, "tokens_per_block": 32}
    job = CompileJob(
        role="target",
        checkpoint_dir=checkpoint,
        out_dir=engine,
        build_config={**limits, "max_draft_len": 0, "speculative_decoding_mode": 1, "plugin_config": plugins},
        mode=None,
        version="1.2.1",
        logits_dtype="float32",
        world_size=found.world_size,
        sm=90,
    )
    keys = ("model_config", "eos_token_ids", "source", "source_fingerprint")
    prepare_engine(job, engine, {key: found.record[key] for key in keys})
    return engine


def copy(checkpoint: Path, directory: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(checkpoint, directory))


def edit_config(checkpoint: Path, name: str = CONFIG, **changes: Any) -> None:
    """Set keys of config.json (dots go down into sections), or remove those that become None."""
    path = checkpoint / name
    content = json.loads(path.read_text())
    for key, value in changes.items():
        section, *names = content, *key.split("__")
        for step in names[:-1]:
            section = section[step]
        if value is None:
            section.pop(names[-1], None)
        else:
            section[names[-1]] = value
    path.write_text(json.dumps(content))


def edit_record(checkpoint: Path, **changes: Any) -> None:
    """The same of our record."""
    edit_config(checkpoint, RECORD, **changes)


def edit_tensors(checkpoint: Path, changes: dict[str, Change | None], ranks: tuple[int, ...] | None = None) -> None:
    """Replace tensors of some ranks, or all that have them, by what a function makes of them; None removes one."""
    for path in sorted(checkpoint.glob("rank*.safetensors")):
        rank = int(path.stem.removeprefix("rank"))
        if ranks is not None and rank not in ranks:
            continue
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, change in changes.items():
            if name in tensors:
                old = tensors.pop(name)
                if change is not None:
                    tensors[name] = change(old.clone()).contiguous()
        save_file(tensors, path)
