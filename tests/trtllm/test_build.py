"""`trtspec build` for TensorRT-LLM through the front door: real checkpoints of small models, a stand-in compiler.

What needs a GPU is the stand-in's part; everything before it, and the repository after it, is the real thing.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trtllm_build_double as double
import yaml
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.errors import EXIT_ERROR, EXIT_OK
from trtspec.runtime.engine import EngineConfig

CONFIGS = Path(__file__).parents[2] / "configs"
H100 = ("NVIDIA H100 80GB HBM3", "9.0")
SIZES = {"hidden_size": 128, "intermediate_size": 256}
STEPS = ["resolve", "pair", "plan", "checkpoint:target", "checkpoint:draft", "engine:target", "engine:draft"]
STEPS += ["engines", "repository", "manifest"]
EXAMPLES = sorted(path.name for path in CONFIGS.glob("*.yaml") if "tensorrt_llm" in path.read_text())


class Project:
    """A spec for an H100 with two small models of its own beside it."""

    def __init__(self, root: Path, save_model: Callable[..., Path]) -> None:
        self.root = root
        save_model(root / "models" / "target", seed=1, **SIZES)
        save_model(root / "models" / "draft", seed=2, num_hidden_layers=1, **SIZES)
        self.config, self.engines = root / "tiny.yaml", root / "engines" / "tiny"
        self.model_repo = root / "model_repo" / "tiny"
        self.content: dict[str, Any] = {
            "version": 1,
            "target": {"model": "./models/target"},
            "speculation": {"method": "draft_target", "num_draft_tokens": 3, "draft": {"model": "./models/draft"}},
            "hardware": {"gpu": "H100-SXM"},
            "engine": {
                "runtime": "tensorrt_llm", "max_batch_size": 4, "max_input_len": 128, "max_seq_len": 256,
            },
            "calibration": {"num_prompts": 4, "max_tokens": 32},
        }  # fmt: skip

    def run(self, *options: str) -> Result:
        self.config.write_text(yaml.safe_dump(self.content))
        return CliRunner().invoke(main, ["build", str(self.config), *options])

    def build(self, *options: str) -> dict[str, str]:
        """Statuses of the steps of a build that must succeed."""
        result = self.run(*options, "--json")
        assert result.exit_code == EXIT_OK, result.output
        return {step["name"]: step["status"] for step in json.loads(result.stdout.splitlines()[-1])["steps"]}

    def refuse(self, *options: str) -> str:
        """The one line that a build that must fail says."""
        result = self.run(*options)
        assert result.exit_code == EXIT_ERROR, result.output
        assert len(result.stderr.splitlines()) == 1, result.stderr
        return result.stderr


@pytest.fixture
def project(tmp_path: Path, save_model: Callable[..., Path]) -> Project:
    return Project(tmp_path, save_model)


@pytest.fixture
def gpu_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    double.pretend(monkeypatch, tmp_path / "host", gpus=[H100], tensorrt_llm="1.2.1")


def test_without_a_gpu_the_checkpoints_are_kept_and_the_way_out_is_named(project: Project) -> None:
    message = project.refuse()
    assert "no GPU on this machine" in message
    assert "26.07-trtllm-python-py3" in message and "trtspec build --no-compile" in message
    assert (project.engines / "checkpoints" / "target" / "rank0.safetensors").is_file()
    assert not (project.engines / "target").exists()
    statuses = project.build("--no-compile")
    assert [name for name, status in statuses.items() if status == "cached"] == STEPS[:5]


def test_a_prepared_build_becomes_a_compiled_one_on_a_gpu_host(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(project.build("--no-compile")) == STEPS
    prepared = EngineConfig.load(project.engines / "target")
    assert not prepared.compiled
    repository = {path.relative_to(project.model_repo): path.read_bytes() for path in files(project.model_repo)}
    double.pretend(monkeypatch, tmp_path / "host", gpus=[H100], tensorrt_llm="1.2.1")
    statuses = project.build()
    assert [name for name, status in statuses.items() if status == "cached"] == STEPS[:5]
    compiled = EngineConfig.load(project.engines / "target")
    assert compiled.compiled and compiled.sm == 90
    steps = json.loads((project.engines / "manifest.json").read_text())["steps"]
    on_gpu = {name: step["gpu"] for name, step in steps.items() if step["gpu"] != "not run on a GPU"}
    assert on_gpu == {"engine:target": H100[0], "engine:draft": H100[0]}
    for name in ("max_batch_size", "max_seq_len", "max_num_tokens", "max_draft_len", "speculative_decoding_mode"):
        assert prepared.build[name] == compiled.build[name]
    assert {path.relative_to(project.model_repo): path.read_bytes() for path in files(project.model_repo)} == repository
    assert set(project.build().values()) == {"cached"}


def test_a_finished_engine_is_kept_when_the_other_fails(
    project: Project, gpu_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_MODE", "cuda_oom@draft")
    message = project.refuse()
    assert "out of memory" in message and "draft.log" in message
    assert EngineConfig.load(project.engines / "target").compiled
    monkeypatch.delenv("STANDIN_MODE")
    assert project.build()["engine:target"] == "cached"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["target.tensor_parallel=3", "hardware.num_gpus=4", "serving.orchestrator=true"], "tensor_parallel"),
        (["engine.version='1.4.0rc1'"], "compiles no engines"),
        (["target.quantization=fp8", "hardware.gpu=A100-80GB"], "nearest that works: target.quantization=none"),
        (["engine.build_options={gemm_plugim: auto}"], "did you mean gemm_plugin?"),
        (["engine.build_options={max_draft_len: 8}"], "engine.max_draft_len"),
        (["serving.engine_parameters={cuda_graph_mod: 'true'}"], "did you mean cuda_graph_mode?"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_converted(
    project: Project, settings: list[str], message: str
) -> None:
    said = project.refuse(*(word for setting in settings for word in ("--set", setting)))
    assert message in said
    assert not (project.engines / "checkpoints").exists()


def test_the_checkpoint_of_another_model_is_not_used(project: Project, save_model: Callable[..., Path]) -> None:
    """A new model under the old name is noticed, and converted again before anything is compiled."""
    project.build("--no-compile")
    shutil.rmtree(project.root / "models" / "target")
    save_model(project.root / "models" / "target", seed=7, **SIZES)
    statuses = project.build("--no-compile")
    cached = {name for name, status in statuses.items() if status == "cached"}
    assert cached == {"checkpoint:draft", "engine:draft"}


def test_a_rank_that_was_lost_is_converted_again(project: Project) -> None:
    project.build("--no-compile")
    (project.engines / "checkpoints" / "target" / "rank0.safetensors").unlink()
    assert project.build("--no-compile")["checkpoint:target"] == "ok"


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_command_of_an_example_is_one_that_the_compiler_takes(
    name: str, tmp_path: Path, save_model: Callable[..., Path]
) -> None:
    """A dry run of each example in configs/, whose models are not here; the options do not depend on them."""
    result = CliRunner().invoke(main, ["build", str(CONFIGS / name), "--dry-run", "--json"])
    assert result.exit_code == EXIT_OK, result.output
    steps = json.loads(result.stdout.splitlines()[-1])["steps"]
    lines = [line for step in steps for line in step["commands"] if line.startswith("trtllm-build ")]
    engines = [step["name"] for step in steps if step["name"].startswith("engine:")]
    assert len(lines) == len(engines)
    assert lines or "llmapi" in name
    for line in lines:
        options = double.check(shlex.split(line)[1:])
        assert options.checkpoint_dir.endswith(f"checkpoints/{Path(options.output_dir).name}")
    external = [line for line in lines if re.search("--speculative_decoding_mode draft_tokens_external", line)]
    assert bool(external) == (len(lines) > 1 or "mixtral" in name)


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_another_share_of_the_memory_is_planned_again(project: Project) -> None:
    project.build("--no-compile")
    setting = ("--set", "serving.kv_cache_free_gpu_mem_fraction.draft=0.25")
    statuses = project.build("--no-compile", *setting)
    assert [name for name, status in statuses.items() if status == "ok"] == ["plan", "repository", "manifest"]
    assert '"0.25"' in (project.model_repo / "tensorrt_llm_draft" / "config.pbtxt").read_text()
