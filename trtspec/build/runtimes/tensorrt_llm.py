"""Engines for TensorRT-LLM: this release knows the compiler's command line, but neither converts nor compiles.

Refuses to build; a dry run prints the command.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.build.runtimes import EngineJob
    from trtspec.models.source import ModelSource

CODE = ("build/runtimes/tensorrt_llm.py",)


def inputs(job: EngineJob) -> dict[str, Any]:
    """Precision, split, version and limits."""
    model = job.model.model_dump(mode="json", exclude={"model", "gguf_file", "max_seq_len"})
    return {"model": model, "version": job.engine.version, "mode": job.mode, "limits": job.build_config}


def actions(job: EngineJob) -> list[str]:
    """The conversion in words, and the `trtllm-build` line."""
    model, config = job.model, job.build_config
    if job.engine.track == "llmapi":
        return [f"nothing to compile: on track llmapi the server loads {model.model} itself"]
    checkpoint = job.out_dir.with_name(f"{job.out_dir.name}-checkpoint")
    paged = "enable" if config["plugin_config"]["use_paged_context_fmha"] else "disable"
    options = {
        "checkpoint_dir": checkpoint,
        "output_dir": job.out_dir,
        **{f"max_{name}": config[f"max_{name}"] for name in ("batch_size", "input_len", "seq_len", "num_tokens")},
        "max_beam_width": config["max_beam_width"],
        "use_paged_context_fmha": paged,
        "tokens_per_block": config["plugin_config"]["tokens_per_block"],
    }
    if job.mode:
        options |= {"speculative_decoding_mode": job.mode, "max_draft_len": config["max_draft_len"]}
    return [
        f"convert {model.model} to a TensorRT-LLM checkpoint in {checkpoint} ({model.dtype}, quantization "
        f"{model.quantization}, KV cache {model.kv_cache_dtype}, tensor parallel {model.tensor_parallel}, "
        f"pipeline parallel {model.pipeline_parallel})",
        shlex.join(["trtllm-build", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]),
    ]


def build(
    job: EngineJob,
    source: ModelSource,
    destination: Path,
    stamp: dict[str, Any],
    advance: Callable[[float], None],
) -> NoReturn:
    """Always refuses.

    Raises:
        TrtspecError: what is missing.
    """
    raise TrtspecError(
        "checkpoint conversion and the compile step (trtllm-build) are not in this release",
        where="engine.runtime: tensorrt_llm",
        fix="set engine.runtime: torch, or use --dry-run to see the commands",
    )
