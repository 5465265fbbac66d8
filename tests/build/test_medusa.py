"""A spec with Medusa heads for the torch runtime, from the front door: what is built, checked, refused and labelled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from trtspec.cli import main
from trtspec.errors import EXIT_OK

PROMPTS = [{"prompt": f"the target verifies {i}", "category": "chat"} for i in range(6)]
CHOICES = [[0], [1], [0, 0], [0, 1], [1, 0]]


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def heads(num_heads: int = 2, hidden: int = 32) -> dict[str, torch.Tensor]:
    """Of zeros, and the target's output matrix: each head says what the target says next."""
    shapes = {"weight": (hidden, hidden), "bias": (hidden,)}
    return {f"{h}.0.linear.{kind}": torch.zeros(shape) for h in range(num_heads) for kind, shape in shapes.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, save_model: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("medusa")
    save_model(folder / "target")
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS))
    (folder / "heads").mkdir()
    save_file(heads(), folder / "heads" / "medusa_lm_head.safetensors")
    return folder


def spec(root: Path, name: str, **medusa: Any) -> Path:
    content = {
        "version": 1,
        "name": name,
        "target": {"model": "./target", "dtype": "float32"},
        "speculation": {
            "method": "medusa",
            "medusa": {"heads": "./heads", "num_heads": 2, "choices": CHOICES} | medusa,
        },
        "engine": {"max_batch_size": 2, "max_input_len": 128, "max_seq_len": 256},
        "parity": {"prompts": "prompts.jsonl", "num_prompts": 3, "max_tokens": 16, "num_samples": 160, "num_draws": 0},
        "output": {"engines": f"./engines/{name}", "model_repo": f"./repo/{name}"},
    }
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def built(root: Path) -> Path:
    path = spec(root, "lossless")
    result = invoke("build", str(path))
    assert result.exit_code == EXIT_OK, result.output
    return path


def test_the_engine_holds_the_heads_under_tensorrt_llm_names(root: Path, built: Path) -> None:
    engine = root / "engines" / "lossless" / "target"
    tensors = load_file(engine / "rank0.safetensors")
    names = {name for name in tensors if name.startswith("medusa_heads.")}
    kinds = ("weight", "bias")
    assert names == {f"medusa_heads.{h}.medusa_layers.0.linear.{kind}" for h in (0, 1) for kind in kinds}
    config = json.loads((engine / "config.json").read_text())
    assert config["build_config"]["speculative_decoding_mode"] == 4
    assert config["build_config"]["max_draft_len"] == len(CHOICES)
    manifest = json.loads((root / "engines" / "lossless" / "manifest.json").read_text())
    planned = manifest["steps"]["plan"]["facts"]["memory"]["target"]["weights"]
    assert planned == pytest.approx(
        sum(tensor.nbytes for tensor in tensors.values()), rel=0.02
    )  # norms are not counted
    assert sum(tensors[name].nbytes for name in names) > 0.04 * planned
    section = config["trtspec"]["speculation"]
    assert section["choices"] == CHOICES and section["lossless"] is True


def test_the_pipeline_takes_sampled_requests(root: Path, built: Path) -> None:
    """TensorRT-LLM's Medusa mode is greedy whatever is asked for; the torch runtime samples as without heads."""
    text = (root / "repo" / "lossless" / "tensorrt_llm_bls" / "config.pbtxt").read_text()
    value = text.split('key: "greedy_only"')[1].split("string_value: ")[1].split()[0]
    assert value == '"false"'


def test_what_was_built_passes_parity(built: Path) -> None:
    result = invoke("parity", str(built), "--subject", "engines")
    assert result.exit_code == EXIT_OK, result.output
    lines = [line.split(" in ")[0] for line in result.stdout.splitlines() if line.startswith("engines")]
    names = ("greedy", "sampled", "logits", "invariances", "rules", "degenerate")
    assert lines == [f"engines, {name}: pass" for name in names]


@pytest.mark.parametrize("own", [True, False])
def test_the_build_says_whose_output_matrix_the_heads_use(root: Path, own: bool) -> None:
    """And that it leaves heads out."""
    directory = root / f"heads-{own}"
    directory.mkdir()
    matrices = {f"{head}.1.weight": torch.zeros(280, 32) for head in range(3)} if own else {}
    save_file(heads(3) | matrices, directory / "medusa_lm_head.safetensors")
    result = invoke("build", str(spec(root, f"matrix-{own}", heads=f"./{directory.name}")))
    assert result.exit_code == EXIT_OK, result.output
    assert "the first 2 of 3 Medusa heads are used" in result.output
    assert ("each Medusa head has its own output matrix, from " in result.output) == own
    assert ("the Medusa heads share the target's output matrix" in result.output) == (not own)


def test_another_tree_builds_the_engine_again(built: Path) -> None:
    again = ["build", str(built), "--set", "speculation.medusa.choices=[[0],[1]]", "--dry-run"]
    result = invoke(*again)
    assert result.exit_code == EXIT_OK, result.output
    assert "2 Medusa heads from ./heads, with a tree of 2 nodes" in result.output


def test_typical_acceptance_is_labelled(root: Path) -> None:
    path = spec(root, "typical", acceptance="typical", epsilon=0.2)
    result = invoke("build", str(path))
    assert result.exit_code == EXIT_OK, result.output
    assert "acceptance typical is lossy" in result.output
    manifest = json.loads((root / "engines" / "typical" / "manifest.json").read_text())
    section = manifest["steps"]["engine:target"]["facts"]["trtspec"]["speculation"]
    assert section["lossless"] is False and section["epsilon"] == 0.2
    result = invoke("parity", str(path), "--subject", "engines")
    assert result.exit_code == EXIT_OK, result.output
    assert "engines, greedy: pass" in result.stdout
    assert "engines, sampled: not applicable" in result.stdout and "lossy" in result.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 3}, "3 Medusa heads are asked for, and there are 2"),
        ({"num_layers": 2}, "each Medusa head has 1 layers, the spec says 2"),
        ({"choices": [[0], [0, 0], [0, 0, 0]]}, "path [0, 0, 0] is deeper than num_heads 2"),
        ({"choices": [[0], [1, 0]]}, "[1, 0]"),
        ({"choices": None}, "the default tree has 4 levels, more than there are heads"),
        ({"heads": "./nowhere"}, "nowhere"),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_written(
    root: Path, settings: dict[str, Any], message: str
) -> None:
    path = spec(root, "refused", **settings)
    result = invoke("build", str(path))
    assert result.exit_code == 1
    assert message in result.stderr and "Traceback" not in result.stderr
    assert not (root / "engines" / "refused" / "target").exists()


def test_heads_of_another_model_are_refused_by_their_header(root: Path) -> None:
    (root / "wide").mkdir()
    save_file(heads(hidden=48), root / "wide" / "medusa_lm_head.safetensors")
    (root / "foreign").mkdir()
    save_file(heads(), root / "foreign" / "medusa_lm_head.safetensors")
    (root / "foreign" / "config.json").write_text('{"vocab_size": 32000}')
    for directory, said in (("./wide", "has shape [48"), ("./foreign", "vocab_size 32000")):
        result = invoke("build", str(spec(root, "refused", heads=directory)))
        assert result.exit_code == 1
        assert said in result.stderr and "use the heads that were trained for this target" in result.stderr
        assert not (root / "engines" / "refused" / "target").exists()


def test_typical_acceptance_is_for_the_torch_runtime(root: Path) -> None:
    path = spec(root, "compiled", acceptance="typical")
    options = [
        "--set",
        "engine.runtime=tensorrt_llm",
        "--set",
        "hardware.gpu=H100-SXM",
        "--set",
        "target.dtype=float16",
    ]
    result = invoke("config", "validate", str(path), *options)
    assert result.exit_code == 1
    assert "speculation.medusa.acceptance" in result.stderr and "engine.runtime: torch" in result.stderr
