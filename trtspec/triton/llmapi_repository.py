"""Writes the Triton model repository of track llmapi: one model, `tensorrt_llm`, that hands requests to the LLM API.

The result runs on the stock TensorRT-LLM container and needs nothing installed there. Knows Triton's config messages
and the tensors of public LLM API clients; what model.yaml holds is the affair of `trtspec.trtllm.llmapi`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from trtspec.spec.schema import Spec
from trtspec.triton.contract import Tensor
from trtspec.triton.pbtxt import model_config, to_text
from trtspec.triton.replacing import replacing
from trtspec.trtllm import llmapi
from trtspec.trtllm.versions import major_minor

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

MODEL = "tensorrt_llm"
_SOURCES = Path(__file__).parent / "models"
_MODULES = {"llmapi.py": "model.py", "llmapi_request.py": "llmapi_request.py", "tensors.py": "tensors.py"}
_FIRST_WITH_IMAGES_AND_LORA = (1, 3)


def _optional(dtype: str, *names: str, dims: tuple[int, ...] = (1,)) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, dtype, dims, optional=True) for name in names)


_SAMPLING = "sampling_param_"
INPUTS = (
    Tensor("text_input", "STRING", (-1,)),
    *_optional("BOOL", "streaming", "stop", f"{_SAMPLING}exclude_input_from_output", f"{_SAMPLING}return_perf_metrics"),
    *_optional("BOOL", "return_finish_reason", "return_stop_reason", "return_cumulative_logprob"),
    *_optional("INT32", *(_SAMPLING + name for name in ("best_of", "top_k", "max_tokens"))),
    *_optional(
        "FP32", *(_SAMPLING + name for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty"))
    ),
    *_optional("UINT64", f"{_SAMPLING}seed"),
    *_optional("STRING", f"{_SAMPLING}stop", dims=(-1,)),
)
# Public clients of newer versions may send these; the model refuses them by name.
IMAGE_AND_LORA_INPUTS = (
    *_optional("STRING", "image_url", dims=(-1,)),
    *_optional("UINT64", "lora_id"),
    *_optional("STRING", "lora_name", "lora_path", "lora_ckpt_source"),
)
OUTPUTS = (
    *(Tensor(name, "STRING", (-1,)) for name in ("text_output", "finish_reason", "stop_reason")),
    Tensor("cumulative_logprob", "FP32", (-1,)),
    *(
        Tensor(f"kv_cache_{name}", "INT32", (-1,))
        for name in ("reused_block", "missed_block", "alloc_new_blocks", "alloc_total_blocks")
    ),
    Tensor("kv_cache_hit_rate", "FP32", (-1,)),
    *(Tensor(f"{name}_time_ns", "INT64", (1,)) for name in ("arrival", "first_scheduled", "first_token", "last_token")),
    Tensor("acceptance_rate", "FP32", (1,)),
    *(Tensor(name, "INT32", (1,)) for name in ("total_accepted_draft_tokens", "total_draft_tokens")),
)


def write_llmapi_repository(*, out_dir: Path, spec: Spec, model_path: str, draft_path: str | None = None) -> Path:
    """Write model `tensorrt_llm`: config.pbtxt, 1/model.yaml, 1/model.py and the modules that it imports.

    Args:
        out_dir: the repository; an older one in its place is replaced whole.
        spec: a spec of track llmapi.
        model_path: where the server sees the target, a Hugging Face directory.
        draft_path: the same for a draft model, a truncated target, or EAGLE-3 heads; by default `draft` (or `heads`) in
            the mount point.

    Returns:
        `out_dir`.

    Raises:
        TrtspecError: settings that the LLM API cannot honour, or something else in place of `out_dir`.
    """
    content = llmapi.model_yaml(spec, model_path=model_path, draft_path=draft_path)
    with replacing(out_dir) as staged:
        version = staged / MODEL / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(to_text(_config(spec, content)), encoding="utf-8")
        header = f"# Arguments of the LLM API of TensorRT-LLM {spec.engine.version}.\n"
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        (version / "model.yaml").write_text(header + text, encoding="utf-8")
        for source, name in _MODULES.items():
            shutil.copyfile(_SOURCES / source, version / name)
    return out_dir


def _config(spec: Spec, content: dict[str, dict[str, int]]) -> ModelConfig:
    from tritonclient.grpc import model_config_pb2 as pb

    newer = major_minor(spec.engine.version) >= _FIRST_WITH_IMAGES_AND_LORA
    parameters = {
        "exclude_input_in_output": _bool(spec.serving.exclude_input_in_output),
        "greedy_only": _bool(llmapi.greedy_only(spec)),
        "penalties": _bool(llmapi.penalties(spec)),
        "call_timeout_s": f"{spec.serving.call_timeout_s:g}",
    }
    devices = spec.serving.gpu_device_ids.target
    if devices is not None:
        parameters["gpu_device_ids"] = ",".join(map(str, devices))
    # Batching is the LLM's own; these two are also in model.yaml, from where the public model takes them.
    triton = content["triton_config"]
    config = model_config(
        MODEL,
        INPUTS + IMAGE_AND_LORA_INPUTS if newer else INPUTS,
        OUTPUTS,
        triton["max_batch_size"],
        parameters,
        backend="python",
    )
    config.model_transaction_policy.decoupled = bool(triton["decoupled"])
    config.instance_group.append(pb.ModelInstanceGroup(count=1, kind=pb.ModelInstanceGroup.KIND_CPU))
    return config


def _bool(value: bool) -> str:
    return "true" if value else "false"
