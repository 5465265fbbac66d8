"""The seam between the build and what executes engines: one module a runtime, named as in `engine.runtime`.

A new runtime is a new module here with what `EngineBuilder` lists. Knows none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from trtspec.models.source import ModelSource
    from trtspec.spec.schema import Engine, ModelRef


@dataclass(frozen=True)
class EngineJob:
    """One engine to build.

    Attributes:
        role: target, draft or middle.
        model: the section of the spec that names the model.
        engine: the engine section of the spec.
        mode: TensorRT-LLM's name of the target's speculative decoding mode; None for an engine that verifies nothing.
        build_config: limits under TensorRT-LLM's names.
        out_dir: where the engine ends up.
    """

    role: str
    model: ModelRef
    engine: Engine
    mode: str | None
    build_config: dict[str, Any]
    out_dir: Path


class EngineBuilder(Protocol):
    """What a runtime's module offers."""

    @property
    def CODE(self) -> tuple[str, ...]:
        """Source of the package that decides what an engine looks like; a change builds engines again."""

    def inputs(self, job: EngineJob) -> dict[str, Any]:
        """What of the job decides the engine, besides the model; a change builds it again."""

    def actions(self, job: EngineJob) -> list[str]:
        """The command lines that `build` runs, or sentences for what it does itself."""

    def build(
        self,
        job: EngineJob,
        source: ModelSource,
        destination: Path,
        stamp: dict[str, Any],
        advance: Callable[[float], None],
    ) -> dict[str, Any]:
        """Write the engine directory `destination`, stamped with `stamp`, and return its config.json.

        Raises:
            TrtspecError: this machine, this release or this model cannot do it.
            OSError: it cannot be written.
        """


def engine_builder(runtime: str) -> EngineBuilder:
    """The builder of the runtime with this name."""
    return cast(EngineBuilder, importlib.import_module(f"{__name__}.{runtime}"))
