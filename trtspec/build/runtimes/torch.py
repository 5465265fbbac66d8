"""Engines for the torch runtime: the weights under TensorRT-LLM's names, written here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trtspec.build.runtimes import EngineJob, Stage
from trtspec.spec.schema import Mtp

if TYPE_CHECKING:
    import torch

    from trtspec.build.graph import Task
    from trtspec.models.source import ModelSource


def _inputs(job: EngineJob) -> dict[str, Any]:
    """Type of the weights, limits, and how it drafts by itself; the TensorRT-LLM version does not matter here."""
    inputs = {"dtype": job.model.dtype, "limits": job.build_config}
    drafting = _drafting(job)
    return inputs | {"speculation": drafting} if drafting else inputs


def _actions(job: EngineJob) -> list[str]:
    limits = ", ".join(f"{name} {job.build_config[name]}" for name in ("max_seq_len", "max_draft_len"))
    actions = [
        f"write {job.model.model} as {job.model.dtype} weights for the torch runtime ({limits}) to {job.engine_dir}"
    ]
    drafting, medusa = _drafting(job), job.speculation.medusa
    if drafting and drafting["method"] == "medusa" and medusa:
        nodes = job.speculation.num_draft_tokens
        actions.append(f"add {medusa.num_heads} Medusa heads from {medusa.heads}, with a tree of {nodes} nodes")
    elif drafting:
        actions.append(f"add {drafting['num_modules']} multi-token prediction modules of the same checkpoint")
    return actions


def _drafting(job: EngineJob) -> dict[str, Any] | None:
    """The section `speculation` of the engine's stamp: how it drafts by itself; None where it does not."""
    medusa = job.speculation.medusa
    if job.role == "target" and job.speculation.method == "medusa" and medusa:
        from trtspec.models.medusa import DEFAULT_CHOICES
        from trtspec.runtime.medusa import MedusaSettings

        choices = medusa.choices or DEFAULT_CHOICES
        return MedusaSettings(choices, medusa.acceptance, medusa.epsilon, medusa.delta).to_stamp()
    if job.role == "target" and job.speculation.method == "mtp":
        return {
            "method": "mtp",
            "num_modules": (job.speculation.mtp or Mtp()).num_modules,
            "num_draft_tokens": job.speculation.num_draft_tokens,
            "lossless": True,
        }
    return None


def _extra(job: EngineJob, source: ModelSource, note: Callable[[str], None]) -> dict[str, Callable[[], torch.Tensor]]:
    """Tensors that it drafts with, by name, each with what reads it; says with `note` what the files of heads decide.

    Raises:
        TrtspecError: they are missing, or belong to another target; seen from their headers.
    """
    if job.role == "target" and job.speculation.method == "medusa" and job.speculation.medusa and job.heads:
        from trtspec.models.medusa import open_medusa

        heads = open_medusa(job.heads)
        heads.check(source.config, job.speculation.medusa)
        for remark in heads.remarks(job.speculation.medusa.num_heads):
            note(remark)
        return heads.tensors(job.speculation.medusa.num_heads)
    if job.role == "target" and job.speculation.method == "mtp":
        from trtspec.runtime.mtp import module_weights

        return module_weights(source, (job.speculation.mtp or Mtp()).num_modules)
    return {}


def _run(job: EngineJob, source: ModelSource, task: Task, stamp: dict[str, Any]) -> dict[str, Any]:
    """Write the engine directory, tensor by tensor; its config.json are the facts.

    Raises:
        TrtspecError: a model or heads that the torch runtime cannot run, or a directory that cannot be written.
    """
    from trtspec.runtime.engine import write_torch_engine

    drafting = _drafting(job)
    if drafting and not drafting.get("lossless", True):
        task.note(f"acceptance {drafting['acceptance']} is lossy: sampled requests do not follow the target exactly")
    config = write_torch_engine(
        source,
        task.destination,
        dtype=job.model.dtype,
        role=job.role,
        build_config=job.build_config,
        stamp=stamp | {"speculation": drafting} if drafting else stamp,
        extra=_extra(job, source, task.note),
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
        code=(
            "build/runtimes/torch.py",
            "runtime/engine.py",
            "runtime/llama.py",
            "runtime/medusa.py",
            "runtime/mtp.py",
            "models",
        ),
    ),
)
