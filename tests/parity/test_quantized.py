"""Engines of a quantised target: their reference is their own checkpoint, as exact as its rounding allows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from trtspec.cli import main
from trtspec.errors import EXIT_OK, EXIT_PARITY_FAILED, TrtspecError
from trtspec.models.source import ModelSource, open_model
from trtspec.parity.checkpoint import BUDGETS
from trtspec.parity.workbench import EngineLogits, Workbench, engine_configs
from trtspec.parity.yardstick import ACTIVATION_TOLERANCES, TOLERANCES, tolerance_of
from trtspec.runtime.reference import ReferenceSampler
from trtspec.spec.load import load_spec

sys.path.append(str(Path(__file__).parents[1] / "trtllm"))
import tiny_checkpoints

TEXT = list(range(3, 40))


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_json: str) -> Callable[..., Path]:
    """A spec whose engine is prepared from a checkpoint of this kind."""
    root = tmp_path_factory.mktemp("quantized")
    model: list[ModelSource] = []

    def built(name: str, **ref: Any) -> Path:
        spec = root / f"{name}.yaml"
        if spec.exists():
            return spec
        if not model:
            model.append(tiny_checkpoints.save_model(root / "model", tiny_tokenizer_json))
        (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"verifies {i}"}) + "\n" for i in range(3)))
        content = {
            "version": 1,
            "target": {"model": str(model[0].path), "dtype": "float16", **ref},
            "speculation": {"method": "none"},
            "hardware": {"gpu": "H100-SXM"},
            "engine": {"runtime": "tensorrt_llm", "max_batch_size": 1, "max_input_len": 64, "max_seq_len": 96},
            "parity": {"prompts": str(root / "prompts.jsonl"), "max_tokens": 12, "num_samples": 60, "num_draws": 0},
        }
        spec.write_text(yaml.safe_dump(content))
        engines = root / "engines" / name
        checkpoint = tiny_checkpoints.convert_model(model[0], engines / "checkpoints" / "target", **ref)
        tiny_checkpoints.prepare(checkpoint, engines / "target")
        return spec

    return built


def workbench(spec: Path, *overrides: str) -> Workbench:
    loaded = load_spec(spec, overrides)
    return Workbench(loaded, engine_configs(loaded))


def test_rounded_activations_widen_the_tolerance() -> None:
    assert tolerance_of("bfloat16", activations={"fp8"}) == pytest.approx((0.5**2 + 3.0**2) ** 0.5, abs=1e-3)
    assert tolerance_of("float16", "float16", {"fp8", "int8"}) > tolerance_of("float16", activations={"int8"})
    assert tolerance_of("float32", activations=()) == TOLERANCES["float32"]


@pytest.mark.parametrize(
    ("name", "ref", "precision", "tolerance"),
    [
        ("fp8", {"quantization": "fp8"}, "FP8", tolerance_of("float16", activations={"fp8"})),
        ("int8", {"quantization": "int8_sq"}, "W8A8_SQ_PER_CHANNEL", tolerance_of("float16", activations={"int8"})),
        ("int4", {"quantization": "int4_awq"}, "float16", TOLERANCES["float16"]),  # rounds weights alone
    ],
)
def test_the_reference_is_the_executed_checkpoint(
    build: Callable[..., Path], name: str, ref: dict[str, Any], precision: str, tolerance: float
) -> None:
    spec = build(name, **ref)
    bench = workbench(spec, "parity.reference_dtype=subject")
    yardstick = bench.yardstick
    assert (yardstick.precision, yardstick.tolerance, bench.reference_dtype) == (precision, tolerance, "float32")
    assert precision in BUDGETS and ACTIVATION_TOLERANCES.keys() == {"fp8", "int8"}
    found = yardstick.target.logits(TEXT)
    np.testing.assert_array_equal(found, EngineLogits(engine_configs(load_spec(spec))["target"]).logits(TEXT))
    unquantised = ReferenceSampler(open_model(load_spec(spec).target.model)).logits(TEXT)
    assert np.abs(found - unquantised).max() > 10 * TOLERANCES["float32"]
    assert workbench(spec, "parity.tolerance=0.25").yardstick.tolerance == 0.25


def test_an_engine_passes_against_its_checkpoint_and_no_other(
    build: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = build("fp8", quantization="fp8")
    checks = [word for name in ("greedy", "logits", "sampled") for word in ("--check", name)]
    words = ["parity", str(spec), "--subject", "engines", *checks, "--json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == EXIT_OK, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    found = {check["name"]: check for check in report["checks"]}
    assert found["logits"]["verdict"] == "pass" and found["greedy"]["verdict"] in ("pass", "tie")
    assert found["sampled"]["verdict"] == "not applicable"
    assert "the target's activations are rounded (FP8)" in found["sampled"]["evidence"]
    assert report["settings"]["tolerance"] == tolerance_of("float16", activations={"fp8"})

    logits = EngineLogits.logits
    monkeypatch.setattr(EngineLogits, "logits", lambda self, ids: 20 * logits(self, ids)[:, ::-1])
    result = CliRunner().invoke(main, words)
    assert result.exit_code == EXIT_PARITY_FAILED, result.output


def test_a_model_that_is_published_quantised_is_no_reference(
    build: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that claims to be exact, of a model whose own weights say that they are not."""
    spec = build("int4", quantization="int4_awq")
    monkeypatch.setattr("trtspec.models.source.HFSource.is_quantized", True)
    monkeypatch.setattr("trtspec.parity.workbench.Workbench._is_quantized", False)
    with pytest.raises(TrtspecError, match="are published quantised, and the reference does not execute those"):
        _ = workbench(spec).yardstick
