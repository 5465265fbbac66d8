"""Engines for the torch runtime: the weights under TensorRT-LLM's names, written here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trtspec.build.runtimes import EngineJob, Stage

if TYPE_CHECKING:
    from trtspec.build.graph import Task
    from trtspec.models.source import ModelSource


def _inputs(job: EngineJob) -> dict[str, Any]:
    """Type of the weights and limits; the TensorRT-LLM version does not matter here."""
    return {"dtype": job.model.dtype, "limits": job.build_config}


def _actions(job: EngineJob) -> list[str]:
    limits = ", ".join(f"{name} {job.build_config[name]}" for name in ("max_seq_len", "max_draft_len"))
    return [
        f"write {job.model.model} as {job.model.dtype} weights for the torch runtime ({limits}) to {job.engine_dir}"
    ]


def _run(job: EngineJob, source: ModelSource, task: Task, stamp: dict[str, Any]) -> dict[str, Any]:
    """Write the engine directory, tensor by tensor; its config.json are the facts.

    Raises:
        TrtspecError: a model that the torch runtime cannot run, or a directory that cannot be written.
    """
    from trtspec.runtime.engine import write_torch_engine

    config = write_torch_engine(
        source,
        task.destination,
        dtype=job.model.dtype,
        role=job.role,
        build_config=job.build_config,
        stamp=stamp,
        progress=task.advance,
    )
    return config.to_json()


STAGES = (
    Stage(
        name="engine",
        output=lambda job: job.engine_dir,
        inputs=_inputs,
        actions=_actions,
        run=_run,
        code=("build/runtimes/torch.py", "runtime/engine.py", "runtime/llama.py", "models"),
    ),
)
