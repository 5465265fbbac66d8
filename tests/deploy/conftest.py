"""Specs of a small Llama for GPU clusters, with its sizes and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def spec_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a spec: sections as keyword arguments; `known=False` leaves the target without a config."""

    def write(name: str = "llama", known: bool = True, target: str = "", **sections: str) -> Path:
        models = tmp_path / "models" / "target"
        models.mkdir(parents=True, exist_ok=True)
        if known:
            (models / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        given = {
            "speculation": "{method: ngram}",
            "hardware": "{gpu: H100-SXM}",
            "engine": "{runtime: tensorrt_llm}",
        } | sections
        lines = "".join(f"{key}: {value}\n" for key, value in given.items())
        path = tmp_path / f"{name}.yaml"
        path.write_text(f"version: 1\ntarget: {{model: models/target{target}}}\n{lines}", encoding="utf-8")
        return path

    return write
