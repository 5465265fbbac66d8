"""The LLM API loads models itself: nothing is compiled, each model is laid beside the others as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trtspec.build.runtimes import EngineJob, Stage
from trtspec.errors import TrtspecError
from trtspec.trtllm import llmapi

if TYPE_CHECKING:
    from trtspec.build.graph import Task
    from trtspec.models.source import ModelSource
    from trtspec.spec.schema import Spec


def _run(job: EngineJob, source: ModelSource, task: Task, stamp: dict[str, Any]) -> dict[str, Any]:
    """Lay out the model directory.

    Raises:
        OSError: it cannot be written.
        TrtspecError: a weight cannot be read, or the model is not quantised as the spec says.
    """
    from trtspec.models.export import export

    if job.model.quantization != "none" and not source.is_quantized:
        raise TrtspecError(
            f"{job.model.model} is not quantised, and the LLM API loads it as it is",
            where=f"{job.role}: quantization: {job.model.quantization}",
            expected="a checkpoint with quantization_config in its config.json, or with hf_quant_config.json",
            fix="name a quantised checkpoint, or set quantization: none",
        )
    export(source, task.destination, advance=task.advance)
    return {}


def _check(spec: Spec) -> None:
    """Refuse settings that the LLM API of this version cannot honour.

    Raises:
        TrtspecError: the key at fault.
    """
    llmapi.model_yaml(spec)


STAGES = (
    Stage(
        name="model",
        output=lambda job: job.engine_dir,
        inputs=lambda job: {},
        actions=lambda job: [f"lay out {job.model.model} as a Hugging Face directory in {job.engine_dir}"],
        run=_run,
        check=lambda job, config, spec: _check(spec),
        code=("build/runtimes/llmapi.py", "models"),
    ),
)
