"""Engines for the torch runtime: the weights under TensorRT-LLM's names, written here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtspec.build.runtimes import EngineJob
    from trtspec.models.source import ModelSource

CODE = ("build/runtimes/torch.py", "runtime/engine.py", "runtime/llama.py", "models")


def inputs(job: EngineJob) -> dict[str, Any]:
    """Type of the weights and limits; the TensorRT-LLM version does not matter here."""
    return {"dtype": job.model.dtype, "limits": job.build_config}


def actions(job: EngineJob) -> list[str]:
    """One sentence: no command is run."""
    limits = ", ".join(f"{name} {job.build_config[name]}" for name in ("max_seq_len", "max_draft_len"))
    return [f"write {job.model.model} as {job.model.dtype} weights for the torch runtime ({limits}) to {job.out_dir}"]


def build(
    job: EngineJob,
    source: ModelSource,
    destination: Path,
    stamp: dict[str, Any],
    advance: Callable[[float], None],
) -> dict[str, Any]:
    """Write the engine directory, tensor by tensor.

    Raises:
        TrtspecError: a model that the torch runtime cannot run, or a directory that cannot be written.
    """
    from trtspec.runtime.engine import write_torch_engine

    config = write_torch_engine(
        source,
        destination,
        dtype=job.model.dtype,
        role=job.role,
        build_config=job.build_config,
        stamp=stamp,
        progress=advance,
    )
    return config.to_json()
