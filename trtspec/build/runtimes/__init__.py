"""The seam between the build and what executes models: one module a runtime, which lists the stages of an engine.

A new runtime is a new module here with `STAGES`. Knows none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtspec.build.graph import Task
    from trtspec.models.config import ModelConfig
    from trtspec.models.source import ModelSource
    from trtspec.spec.schema import Calibration, Engine, ModelRef, Spec, Speculation

LLM_API = "llmapi"


@dataclass(frozen=True)
class EngineJob:
    """One engine to build.

    Attributes:
        role: target, draft or middle.
        model: the section of the spec that names the model.
        engine: the engine section of the spec.
        speculation, calibration: these sections of the spec.
        calibration_path: absolute path of the calibration prompts; None: those that come with trtspec.
        heads: directory of the Medusa, EAGLE or ReDrafter weights that go into this engine.
        mode: TensorRT-LLM's name of the target's speculative decoding mode; None for an engine that verifies nothing.
        build_config: limits under TensorRT-LLM's names.
        sm: compute capability times ten of the GPU that it is for; 0 for the CPU.
        num_gpus: GPUs of one node.
        compile: whether the engine is compiled here, or only prepared.
        engines_dir: directory of all engines of the spec.
    """

    role: str
    model: ModelRef
    engine: Engine
    speculation: Speculation
    calibration: Calibration
    calibration_path: Path | None
    heads: Path | None
    mode: str | None
    build_config: dict[str, Any]
    sm: int
    num_gpus: int
    compile: bool
    engines_dir: Path

    @property
    def engine_dir(self) -> Path:
        """Where the engine ends up."""
        return self.engines_dir / self.role

    @property
    def checkpoint_dir(self) -> Path:
        """Where its checkpoint ends up, if the runtime needs one."""
        return self.engines_dir / "checkpoints" / self.role


@dataclass(frozen=True)
class Stage:
    """One step on the way from a model to its engine; a step of the build for each role, named `name:role`.

    Attributes:
        name: what it makes.
        output: directory that it writes.
        inputs: what of the job decides the result, besides the model and the stage before; a change makes it again.
        actions: the command lines that `run` runs, or sentences for what it does itself.
        run: writes `task.destination`, stamped with the dictionary, and returns JSON facts. Raises TrtspecError if this
            machine, this release or this model cannot do it, OSError if it cannot be written.
        check: refuses, before anything is run, a model or settings of the spec that it cannot work with (TrtspecError).
        gpus: GPUs that it occupies while it runs.
        code: source of the package that decides the result, besides the models.
    """

    name: str
    output: Callable[[EngineJob], Path]
    inputs: Callable[[EngineJob], dict[str, Any]]
    actions: Callable[[EngineJob], list[str]]
    run: Callable[[EngineJob, ModelSource, Task, dict[str, Any]], dict[str, Any]]
    code: tuple[str, ...]
    check: Callable[[EngineJob, ModelConfig, Spec], None] = lambda job, config, spec: None
    gpus: Callable[[EngineJob], int] = lambda job: 0


def stages(runtime: str) -> tuple[Stage, ...]:
    """The stages of the runtime with this name (`engine.runtime`, or `llmapi`), in order."""
    found: tuple[Stage, ...] = importlib.import_module(f"{__name__}.{runtime}").STAGES
    return found
