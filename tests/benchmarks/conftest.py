"""Small random models and a config a method, for the benchmarks that run all of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))

from small_specs import PROMPTS, SPECULATION


@pytest.fixture(scope="session")
def configs(tmp_path_factory: pytest.TempPathFactory, save_model: Callable[..., Path]) -> dict[str, Path]:
    """One config a method."""
    root = tmp_path_factory.mktemp("benchmark")
    save_model(root / "target")
    save_model(root / "middle", blend=(1, 0.05))
    save_model(root / "draft", blend=(1, 0.15))
    (root / "heads").mkdir()
    shapes = {"weight": (32, 32), "bias": (32,)}  # of zeros: each head says what the target says next
    heads = {f"{h}.0.linear.{kind}": torch.zeros(shape) for h in range(2) for kind, shape in shapes.items()}
    save_file(heads, root / "heads" / "medusa_lm_head.safetensors")
    (root / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS))
    for method, section in SPECULATION.items():
        content = {
            "version": 1,
            "name": method,
            "target": {"model": "./target", "dtype": "float32"},
            "speculation": {"method": method, **section},
            "engine": {"max_batch_size": 2, "max_input_len": 128, "max_seq_len": 256},
        }
        (root / f"{method}.yaml").write_text(yaml.safe_dump(content))
    return {method: root / f"{method}.yaml" for method in SPECULATION}
