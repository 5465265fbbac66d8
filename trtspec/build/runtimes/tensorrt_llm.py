"""Engines for TensorRT-LLM: a checkpoint, made and verified on any machine, then the compiler on a GPU."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trtspec.build.runtimes import EngineJob, Stage
from trtspec.errors import TrtspecError
from trtspec.triton.engine_parameters import check_engine_parameters
from trtspec.trtllm import compiler, convert

if TYPE_CHECKING:
    from trtspec.build.graph import Task
    from trtspec.models.config import ModelConfig
    from trtspec.models.source import ModelSource
    from trtspec.spec.schema import Spec

# What the compiler is told nothing of, so that a change does not compile again.
_NOT_THE_COMPILERS = {"model", "gguf_file", "max_seq_len", "trust_remote_code"}


def _conversion(job: EngineJob) -> convert.ConversionJob:
    return convert.ConversionJob(
        role=job.role,
        model=job.model,
        speculation=job.speculation,
        calibration=job.calibration,
        calibration_path=job.calibration_path,
        max_draft_len=job.build_config["max_draft_len"],
        heads_dir=job.heads,
        logits_dtype=job.engine.logits_dtype,
        version=job.engine.version,
        log_path=job.engines_dir / ".build" / "logs" / f"checkpoint-{job.role}.log",
    )


def _compilation(job: EngineJob) -> compiler.CompileJob:
    return compiler.CompileJob(
        role=job.role,
        checkpoint_dir=job.checkpoint_dir,
        out_dir=job.engine_dir,
        build_config=job.build_config,
        mode=job.mode,
        version=job.engine.version,
        logits_dtype=job.engine.logits_dtype,
        build_options=job.engine.build_options,
        world_size=job.model.world_size,
        sm=job.sm,
        quantization=job.model.quantization,
    )


def _check_conversion(job: EngineJob, config: ModelConfig, spec: Spec) -> None:
    """Refuse a model, precision or split that cannot be converted, with the place in the spec.

    Raises:
        TrtspecError: the reason, and the nearest that works.
    """
    try:
        convert.check_conversion(_conversion(job), config)
    except TrtspecError as refusal:
        if refusal.where and refusal.where.startswith(("target.", "speculation.")):
            refusal.where = spec.where(tuple(refusal.where.split(".")))
        raise


def _convert(job: EngineJob, source: ModelSource, task: Task, stamp: dict[str, Any]) -> dict[str, Any]:
    """Convert, and refuse a checkpoint that the contract does not allow before anybody compiles it.

    Raises:
        TrtspecError: a model or a precision that cannot be converted, or a checkpoint at fault.
    """
    from trtspec.trtllm.checkpoint import require_sound

    facts = convert.convert(_conversion(job), source, task.destination, stamp, task.advance, task.note)
    require_sound(task.destination)
    return facts


def _compile(job: EngineJob, source: ModelSource, task: Task, stamp: dict[str, Any]) -> dict[str, Any]:
    """Compile the checkpoint, or prepare everything that a GPU host needs to do so.

    Raises:
        TrtspecError: no GPU, another GPU or version than the spec's, or what the compiler says.
    """
    model = source.config
    stamp = {
        **stamp,
        "eos_token_ids": list(model.eos_token_ids),
        "bos_token_id": model.bos_token_id,
        "pad_token_id": model.pad_token_id,
        "model_config": asdict(model) | {"eos_token_ids": list(model.eos_token_ids)},
    }
    if not job.compile:
        task.note("prepared, not compiled: run the same build without --no-compile on a GPU host")
        return compiler.prepare_engine(_compilation(job), task.destination, stamp)
    return compiler.compile_engine(_compilation(job), task.destination, stamp, task.advance, task.gpu_ids)


def _check_options(job: EngineJob, config: ModelConfig, spec: Spec) -> None:
    """Refuse options of the compiler and of the backend that do not exist, or that the spec's keys set.

    Raises:
        TrtspecError: every fault of one kind, one a line.
    """
    compiler.check_options(_compilation(job), where=lambda name: spec.where(("engine", "build_options", name)))
    check_engine_parameters(spec)


def _compile_actions(job: EngineJob) -> list[str]:
    command = shlex.join(compiler.command(_compilation(job)))
    return [command] if job.compile else [f"prepare {job.engine_dir}, without compiling; on a GPU host: {command}"]


STAGES = (
    Stage(
        name="checkpoint",
        output=lambda job: job.checkpoint_dir,
        inputs=lambda job: convert.inputs(_conversion(job)),
        actions=lambda job: convert.actions(_conversion(job), job.checkpoint_dir),
        run=_convert,
        check=_check_conversion,
        code=("trtllm/convert", "trtllm/checkpoint.py", "models"),
    ),
    Stage(
        name="engine",
        output=lambda job: job.engine_dir,
        inputs=lambda job: {
            "model": job.model.model_dump(mode="json", exclude=_NOT_THE_COMPILERS),
            "options": compiler.options(_compilation(job)),
            "version": job.engine.version,
            "sm": job.sm,
            "compile": job.compile,
        },
        actions=_compile_actions,
        run=_compile,
        check=_check_options,
        gpus=lambda job: min(job.model.world_size, job.num_gpus) if job.compile else 0,
        code=(
            *("trtllm/compiler.py", "trtllm/trtllm_build.py", "trtllm/engine_stamp.py"),
            "build/runtimes/tensorrt_llm.py",
        ),
    ),
)
