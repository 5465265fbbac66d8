"""Writing a trained draft as a Hugging Face style directory that shares its target's embedding and tokenizer.

Knows the directory's files and the way back from TensorRT-LLM names. Does not know training or measuring.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trtspec.models.config import ModelConfig
from trtspec.models.source import ModelSource, tokenizer_sha256
from trtspec.runtime.llama import to_hf

SHARED = ("model.embed_tokens.weight", "lm_head.weight")


def draft_files(
    config: ModelConfig, weights: Mapping[str, torch.Tensor], target: ModelSource
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json and tensors of a draft: layers and norm in bfloat16, `d2t` as it is, nothing that is shared."""
    stored = {
        name: (tensor if name == "d2t" else tensor.detach().bfloat16()).contiguous()
        for name, tensor in to_hf(config, weights).items()
        if name not in SHARED
    }
    shared = {
        "shares": ["embedding", "tokenizer"],
        "tokenizer_sha256": tokenizer_sha256(target),
        "draft_vocab_size": len(weights["d2t"]),
    }
    return {**config.to_hf(), "trtspec": shared}, stored


def json_text(value: dict[str, Any]) -> str:
    """The content of a JSON file."""
    return json.dumps(value, indent=2) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a file that appears, or changes, only when it is complete."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def write_directory(
    output: Path, texts: Mapping[str, str], tensors: Mapping[str, torch.Tensor], weights: str = "model.safetensors"
) -> None:
    """Write `texts`, and `tensors` as the file `weights`; the directory is replaced as a whole, never half-written."""
    from safetensors.torch import save_file

    output.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        for name, text in texts.items():
            (part / name).write_text(text, encoding="utf-8")
        save_file(dict(tensors), part / weights, metadata={"format": "pt"})
        part.chmod(0o755)  # mkdtemp and save_file keep theirs to the owner
        (part / weights).chmod(0o644)
        if output.exists():
            old = part.with_name(part.name + "-old")
            os.replace(output, old)
            os.replace(part, output)
            shutil.rmtree(old)
        else:
            os.replace(part, output)
    finally:
        shutil.rmtree(part, ignore_errors=True)
