"""`trtspec parity --subject checkpoint`: healthy checkpoints pass, and each planted fault is found and named."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.errors import EXIT_ERROR, EXIT_OK, EXIT_PARITY_FAILED, EXIT_USAGE
from trtspec.models.source import ModelSource
from trtspec.parity.checkpoint import BUDGETS, budget_of, divergence
from trtspec.parity.workbench import Workbench
from trtspec.parity.yardstick import tolerance_of
from trtspec.runtime.reference import ReferenceSampler
from trtspec.spec.schema import CheckpointBudget
from trtspec.trtllm.checkpoint import Checkpoint

sys.path.append(str(Path(__file__).parents[1] / "trtllm"))
import tiny_checkpoints
from tiny_checkpoints import edit_config, edit_record, edit_tensors

LAYER = "transformer.layers.1"
QKV, FC, GATE, PROJ = f"{LAYER}.attention.qkv", f"{LAYER}.mlp.fc", f"{LAYER}.mlp.gate", f"{LAYER}.mlp.proj"
DENSE = f"{LAYER}.attention.dense"


class Deployment:
    """A spec with the checkpoint of its target, as `trtspec build` leaves them."""

    def __init__(self, root: Path, source: ModelSource, ref: dict[str, Any]) -> None:
        self.spec = root / "tiny.yaml"
        self.checkpoint = root / "engines" / "checkpoints" / "target"
        prompts = root / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"the target verifies {i}"}) + "\n" for i in range(3)))
        content = {
            "version": 1,
            "target": {"model": str(source.path), "dtype": "float16", **ref},
            "speculation": {"method": "none"},
            "hardware": {"gpu": "H100-SXM", "num_gpus": 4},
            "engine": {"runtime": "tensorrt_llm", "max_input_len": 64, "max_seq_len": 128},
            "parity": {"prompts": str(prompts), "num_prompts": 3, "max_tokens": 12},
            "output": {"engines": str(root / "engines"), "model_repo": str(root / "repository")},
        }
        self.spec.write_text(yaml.safe_dump(content))
        if not self.checkpoint.exists():
            tiny_checkpoints.convert_model(source, self.checkpoint, **ref)

    def run(self, *words: str) -> Result:
        """The command, on checkpoints."""
        return CliRunner().invoke(main, ["parity", str(self.spec), "--subject", "checkpoint", *words])

    def report(self, *words: str) -> dict[str, Any]:
        """Its report."""
        result = self.run(*words, "--json")
        assert result.exit_code in (EXIT_OK, EXIT_PARITY_FAILED), result.output
        report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        assert result.exit_code == (EXIT_PARITY_FAILED if report["verdict"] == "fault" else EXIT_OK)
        return report

    @contextmanager
    def damaged(self, damage: Callable[[Path], object]) -> Iterator[None]:
        """The checkpoint with a planted fault, mended afterwards."""
        whole = tiny_checkpoints.copy(self.checkpoint, self.checkpoint.with_name("whole"))
        try:
            damage(self.checkpoint)
            yield
        finally:
            for path in whole.iterdir():
                path.replace(self.checkpoint / path.name)
            whole.rmdir()


PRECISIONS: dict[str, dict[str, Any]] = {
    "float16": {},
    "bfloat16": {"dtype": "bfloat16", "pipeline_parallel": 2},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8", "tensor_parallel": 2},
    "int8_sq": {"quantization": "int8_sq", "tensor_parallel": 2},
    "int4_awq": {"quantization": "int4_awq", "tensor_parallel": 2},
    "w4a8_awq": {"quantization": "w4a8_awq"},
    "mixtral": {"quantization": "fp8", "tensor_parallel": 2},
}


@pytest.fixture(scope="module")
def deployments(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_json: str) -> Callable[[str], Deployment]:
    models: dict[str, ModelSource] = {}
    made: dict[str, Deployment] = {}

    def deployment(precision: str) -> Deployment:
        family = "Mixtral" if precision == "mixtral" else "Llama"
        if family not in models:
            directory = tmp_path_factory.mktemp("models") / family
            models[family] = tiny_checkpoints.save_model(directory, tiny_tokenizer_json, family)
        if precision not in made:
            root = tmp_path_factory.mktemp(precision)
            made[precision] = Deployment(root, models[family], PRECISIONS[precision])
        return made[precision]

    return deployment


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_healthy_checkpoint_passes(deployments: Callable[[str], Deployment], precision: str) -> None:
    report = deployments(precision).report()
    assert report["verdict"] == "pass", report
    assert [(check["subject"], check["name"]) for check in report["checks"]] == [
        ("checkpoint target", "format"),
        ("checkpoint target", "logits"),
        ("checkpoint target", "layers"),
    ]
    assert "3 prompts" in report["checks"][1]["evidence"]


def swapped(start: int, other: int, size: int, dim: int = 0) -> Callable[[torch.Tensor], torch.Tensor]:
    """Exchange two blocks of rows or columns."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        order = torch.arange(tensor.shape[dim])
        order[start : start + size], order[other : other + size] = (
            torch.arange(other, other + size),
            torch.arange(start, start + size),
        )
        kind = tensor.dtype
        return tensor.view(torch.uint8).index_select(dim, order).view(kind) if kind.itemsize == 1 else tensor[order]

    return change


def exchange(*names: str) -> Callable[[Path], None]:
    """Exchange two tensors of the same rank."""

    def damage(checkpoint: Path) -> None:
        kept: dict[str, torch.Tensor] = {}
        first, second = names
        for name in names:
            edit_tensors(checkpoint, {name: partial(kept.setdefault, name)}, (0,))
        edit_tensors(checkpoint, {first: lambda _: kept[second], second: lambda _: kept[first]}, (0,))

    return damage


def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor * factor


FAULTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "query heads": (
        "fp8",
        lambda path: edit_tensors(path, {f"{QKV}.weight": swapped(0, 64, 64)}, (1,)),
        f"{QKV}: query heads 2 and 3 are swapped",
    ),
    "key heads": (
        "float16",
        lambda path: edit_tensors(path, {f"{QKV}.weight": swapped(256, 320, 64)}),
        f"{QKV}: key heads 0 and 1 are swapped",
    ),
    "keys and values": (
        "float16",
        lambda path: edit_tensors(path, {f"{QKV}.weight": swapped(256, 384, 128)}),
        f"{QKV}: keys and values are swapped",
    ),
    "inputs of heads": (
        "fp8",
        lambda path: edit_tensors(path, {f"{DENSE}.weight": swapped(0, 64, 64, dim=1)}, (0,)),
        f"{DENSE}: the inputs of heads 0 and 1 are swapped",
    ),
    "a scale of fp8": (
        "fp8",
        lambda path: edit_tensors(path, {f"{FC}.weights_scaling_factor": times(2)}),
        f"weights_scaling_factor of {FC} is 2 times what it should be",
    ),
    "a scale on one rank": (
        "fp8",
        lambda path: edit_tensors(path, {f"{PROJ}.weights_scaling_factor": times(0.5)}, (1,)),
        f"weights_scaling_factor of {PROJ} on rank 1 is 0.5 times what it should be",
    ),
    "the scales of int8": (
        "int8_sq",
        lambda path: edit_tensors(path, {f"{QKV}.weights_scaling_factor": times(3)}),
        f"weights_scaling_factor of {QKV} is 3 times what it should be",
    ),
    "the scale of one row of int8": (
        "int8_sq",
        lambda path: edit_tensors(
            path, {f"{FC}.weights_scaling_factor": lambda scale: scale * (1 + (torch.arange(256) == 7))}, (1,)
        ),
        f"weights_scaling_factor of {FC} is 2 times what it should be in rows 263",
    ),
    "the scales of int4": (
        "int4_awq",
        lambda path: edit_tensors(path, {f"{GATE}.weights_scaling_factor": times(2)}),
        f"weights_scaling_factor of {GATE} is 2 times what it should be",
    ),
    "factors before AWQ": (
        "int4_awq",
        lambda path: edit_tensors(
            path, {f"{FC}.prequant_scaling_factor": lambda scale: scale * (1 + (torch.arange(256) < 64))}
        ),
        f"prequant_scaling_factor of {FC} is 2 times what it should be in inputs 0, 1, 2, 3 and 60 more",
    ),
    "an input scale of fp8": (
        "fp8",
        lambda path: edit_tensors(path, {f"{QKV}.activation_scaling_factor": times(2)}),
        f"activation_scaling_factor of {QKV} is 2 times what was calibrated",
    ),
    "gate and up": (
        "float16",
        exchange(f"{FC}.weight", f"{GATE}.weight"),
        f"{FC}: holds what belongs into {GATE}",
    ),
    "a transposed weight": (
        "float16",
        lambda path: edit_tensors(path, {f"{DENSE}.weight": lambda weight: weight.t()}),
        f"{DENSE}: the weights are transposed",
    ),
    "two layers": (
        "float16",
        exchange(f"{DENSE}.weight", "transformer.layers.0.attention.dense.weight"),
        f"{DENSE}: holds the weights of layer 0",
    ),
    "two stages": (
        "bfloat16",
        lambda path: exchange_files(path / "rank0.safetensors", path / "rank1.safetensors"),
        "rank0.safetensors: tensor transformer.vocab_embedding.weight is missing",
    ),
    "two ranks": (
        "int8_sq",
        lambda path: exchange_files(path / "rank0.safetensors", path / "rank1.safetensors"),
        f"{GATE}: the parts of ranks 0 and 1 are swapped",
    ),
    "a norm": (
        "float16",
        lambda path: edit_tensors(path, {f"{LAYER}.input_layernorm.weight": times(2)}),
        f"{LAYER}.input_layernorm.weight is 2 times what it should be",
    ),
    "the head": (
        "float16",
        lambda path: edit_tensors(path, {"lm_head.weight": times(2)}),
        "lm_head.weight is 2 times what it should be",
    ),
    "a rank": (
        "fp8",
        lambda path: (path / "rank1.safetensors").unlink(),
        "rank 1 of 2 is missing: rank1.safetensors",
    ),
    "experts": (
        "mixtral",
        lambda path: edit_tensors(
            path,
            {f"{FC}.weight": swapped(1, 2, 1), f"{FC}.weights_scaling_factor": lambda scale: scale[[0, 2, 1, 3]]},
        ),
        f"{FC}: experts 1 and 2 are swapped",
    ),
    "up and gate of experts": (
        "mixtral",
        lambda path: edit_tensors(path, {f"{FC}.weight": lambda weight: halves(weight)}),
        "the halves for up and gate are swapped",
    ),
    "a scale of one expert": (
        "mixtral",
        lambda path: edit_tensors(
            path, {f"{PROJ}.weights_scaling_factor": lambda scale: scale * torch.tensor([[1], [1], [4], [1]])}
        ),
        f"weights_scaling_factor of {PROJ}, expert 2 is 4 times what it should be",
    ),
}  # fmt: skip


def halves(weight: torch.Tensor) -> torch.Tensor:
    up, gate = weight.view(torch.uint8).chunk(2, dim=1)
    return torch.cat((gate, up), dim=1).view(weight.dtype)


def exchange_files(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(deployments: Callable[[str], Deployment], name: str) -> None:
    precision, damage, message = FAULTS[name]
    deployment = deployments(precision)
    with deployment.damaged(damage):
        report = deployment.report()
    assert report["verdict"] == "fault"
    problems = [finding["problem"] for check in report["checks"] for finding in check["findings"]]
    assert any(message in problem for problem in problems), problems


def test_only_the_damaged_part_is_named(deployments: Callable[[str], Deployment]) -> None:
    deployment = deployments("fp8")
    with deployment.damaged(FAULTS["a scale of fp8"][1]):
        layers = deployment.report("--check", "layers")["checks"]
    assert [finding["problem"] for check in layers for finding in check["findings"]] == [FAULTS["a scale of fp8"][2]]


def test_a_clipped_input_shows_without_a_calibration(deployments: Callable[[str], Deployment]) -> None:
    """Nobody recorded what was calibrated; the prompts show that inputs are cut off."""

    def damage(path: Path) -> None:
        edit_record(path, calibration=None)
        edit_tensors(path, {f"{PROJ}.activation_scaling_factor": times(1 / 64)})

    deployment = deployments("int8_sq")
    with deployment.damaged(damage):
        report = deployment.report("--check", "layers")
    assert report["checks"][0]["findings"], report["checks"][0]["evidence"]
    (finding,) = report["checks"][0]["findings"]
    assert finding["problem"].startswith(f"activation_scaling_factor of {PROJ} covers inputs up to ")


def test_another_rotary_base_is_a_fault_of_the_layers_too(deployments: Callable[[str], Deployment]) -> None:
    def damage(path: Path) -> None:
        edit_config(path, rotary_base=100.0)
        edit_record(path, model_config__rotary_base=100.0)

    deployment = deployments("float16")
    with deployment.damaged(damage):
        report = deployment.report()
    checks = {check["name"]: check["verdict"] for check in report["checks"]}
    assert checks == {"format": "pass", "logits": "fault", "layers": "fault"}
    assert "though its weights are right" in report["checks"][2]["findings"][0]["problem"]


def test_a_fault_of_the_logits_can_be_reproduced(deployments: Callable[[str], Deployment]) -> None:
    deployment = deployments("float16")
    with deployment.damaged(FAULTS["the head"][1]):
        report = deployment.report("--check", "logits")
        summary, worst, *_ = report["checks"][0]["findings"]
        assert summary["problem"].startswith("KL ") and "more than float16 explains" in summary["problem"]
        assert worst["prompt"] in (1, 2, 3) and worst["chosen"] and worst["expected"]
        words = shlex.split(worst["reproduce"])
        again = CliRunner().invoke(main, [*words[1:], "--json"])
    assert again.exit_code == EXIT_PARITY_FAILED
    assert json.loads(again.stdout.splitlines()[-1])["settings"]["prompt_numbers"] == [worst["prompt"]]


def test_the_spec_may_set_the_budget(deployments: Callable[[str], Deployment]) -> None:
    deployment = deployments("int4_awq")
    words = ("--check", "logits", "--set", "parity.checkpoint.max_kl=0.001")
    assert deployment.report(*words)["verdict"] == "fault"
    assert deployment.report("--check", "logits", "--set", "parity.checkpoint.max_tokens=5")["verdict"] == "pass"
    checkpoint = Checkpoint.load(deployment.checkpoint)
    assert budget_of(checkpoint, CheckpointBudget()) == BUDGETS["W4A16_AWQ"]
    assert budget_of(checkpoint, CheckpointBudget(min_top1=0.5)).min_top1 == 0.5


def test_every_model_of_a_spec_has_a_checkpoint(deployments: Callable[[str], Deployment]) -> None:
    deployment = deployments("float16")
    model = yaml.safe_load(deployment.spec.read_text())["target"]["model"]
    draft = f'speculation={{"method": "draft_target", "draft": {{"model": "{model}", "dtype": "float16"}}}}'
    words = ("--set", draft, "--check", "format", "--check", "logits")
    assert "checkpoints/draft/config.json: no such checkpoint" in deployment.run(*words).stderr
    tiny_checkpoints.copy(deployment.checkpoint, deployment.checkpoint.with_name("draft"))
    lines = deployment.run(*words).stdout.splitlines()
    shown = [line.split(" in ")[0] for line in lines if line.startswith("checkpoint ")]
    assert shown == [
        "checkpoint target, format: pass",
        "checkpoint target, logits: pass",
        "checkpoint draft, format: pass",
        "checkpoint draft, logits: pass",
    ]


def test_engines_of_a_quantised_target_are_held_against_its_checkpoint(
    deployments: Callable[[str], Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speculation must not change what the quantised model answers; that it is not the model is another matter."""
    deployment = deployments("w4a8_awq")
    tiny_checkpoints.prepare(deployment.checkpoint, deployment.checkpoint.parents[1] / "target")
    words = ["parity", str(deployment.spec), "--subject", "engines", "--check", "greedy"]
    assert CliRunner().invoke(main, words).exit_code == EXIT_OK
    exact = tolerance_of("float32")
    monkeypatch.setattr(Workbench, "_reference", lambda self: (ReferenceSampler(self._source), "float32", exact))
    assert CliRunner().invoke(main, words).exit_code == EXIT_PARITY_FAILED


def test_what_cannot_be_checked_is_said_in_one_line(deployments: Callable[[str], Deployment]) -> None:
    deployment = deployments("float16")
    for words, code, message in (
        (("--set", "output.engines=elsewhere"), EXIT_ERROR, "no such checkpoint"),
        (("--set", "engine.runtime=torch"), EXIT_ERROR, "is built without checkpoints"),
        (("--check", "greedy"), EXIT_USAGE, "greedy is no check of --subject checkpoint"),
        (("--url", "127.0.0.1:9"), EXIT_USAGE, "--subject checkpoint does not check one"),
    ):
        result = deployment.run(*words)
        assert result.exit_code == code, result.output
        assert message in result.stderr and "Traceback" not in result.output
    with deployment.damaged(lambda path: edit_record(path, source_fingerprint="another")):
        result = deployment.run()
    assert result.exit_code == EXIT_ERROR and "made from another state of the model" in result.stderr


def test_divergence_is_that_of_the_definition() -> None:
    p, q = np.array([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]), np.array([[0.25, 0.5, 0.25], [0.5, 0.5, 0.0]])
    with np.errstate(divide="ignore"):
        found = divergence(np.log(p), np.log(q))
    np.testing.assert_allclose(found, [0.25 * np.log(2), np.log(2)], atol=1e-12)
    padded = np.concatenate([np.log(q[:1]), [[-np.inf]]], axis=1)
    np.testing.assert_allclose(divergence(np.log(p[:1]), padded), [0.25 * np.log(2)])
