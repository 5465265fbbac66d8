"""The layouts that a spec could have: its target split over other numbers of GPUs, its draft beside it or apart.

Knows what TensorRT-LLM takes, and how ranks lie on hosts. Does not know speed or memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.plan.memory import with_derived_fractions
from trtspec.spec.schema import PerModelDevices, Spec
from trtspec.trtllm.checkpoint import AWQ_GROUP_SIZE
from trtspec.trtllm.placement import check_placement, device_ids
from trtspec.trtllm.support import check_support

HOST_GPUS = 8  # of NVIDIA's HGX boards, which come with four or eight; where nobody says
_TENSOR, _PIPELINE, _MOST_HOSTS = (1, 2, 4, 8, 16), (1, 2, 4), 4


def layouts(spec: Spec, target: ModelConfig, host_gpus: int) -> Iterator[tuple[str, Spec]]:
    """The other layouts of a spec that TensorRT-LLM can have, with a name each.

    The target split otherwise, and what drafts on GPUs of its own instead of the target's, or the other way round.
    Cache fractions are derived in them; those of the spec are for its own layout.

    Args:
        spec: whose own layout is left out.
        target: sizes of its target.
        host_gpus: GPUs of a host.
    """
    own, apart = (spec.target.tensor_parallel, spec.target.pipeline_parallel), drafts_apart(spec)
    for tensor in _TENSOR:
        for pipeline in _PIPELINE:
            if (tensor, pipeline) != own and _divides(spec, target, tensor, pipeline, host_gpus):
                yield f"TP {tensor} x PP {pipeline}", arranged(spec, tensor, pipeline, apart, host_gpus)
    if len(spec.models) > 1 and spec.engine.track == "engine":
        where = "the target's GPUs" if apart else "GPUs of its own"
        yield f"the draft on {where}", arranged(spec, *own, not apart, host_gpus)


def arranged(spec: Spec, tensor: int, pipeline: int, apart: bool, host_gpus: int) -> Spec:
    """The spec with its target split so, and what drafts on the GPUs after the target's, or on the first ones."""
    split = {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
    changes: dict[str, Any] = {"target": spec.target.model_copy(update=split)}
    if spec.engine.track == "llmapi" and spec.speculation.draft:  # which loads both with one setting
        draft = spec.speculation.draft.model_copy(update=split)
        changes["speculation"] = spec.speculation.model_copy(update={"draft": draft})
    spec = with_derived_fractions(spec.model_copy(update=changes))
    target, drafts = spec.target.world_size, [ref.world_size for role, ref in spec.models.items() if role != "target"]
    most = max(drafts, default=0)
    gpus = target + most if apart else max(target, most)
    devices = PerModelDevices()
    if apart:
        roles = {role.split("_")[0]: ref.world_size for role, ref in spec.models.items() if role != "target"}
        devices = PerModelDevices(**{role: tuple(range(target, target + size)) for role, size in roles.items()})
    several = gpus > host_gpus
    hardware = {"num_gpus": host_gpus if several else gpus, "num_nodes": math.ceil(gpus / host_gpus)}
    serving: dict[str, Any] = {"gpu_device_ids": devices}
    if spec.engine.track == "engine" and drafts and max(target, most) > 1:
        serving["orchestrator"] = True
    if several and (spec.serving.orchestrator or "orchestrator" in serving):
        serving["spawn_processes"] = False
    return spec.model_copy(
        update={
            "hardware": spec.hardware.model_copy(update=hardware),
            "serving": spec.serving.model_copy(update=serving),
        }
    )


def drafts_apart(spec: Spec) -> bool:
    """Whether all models that draft have GPUs that the target has not."""
    devices = device_ids(spec)
    shared = any({*devices[role]} & {*devices["target"]} for role in devices if role != "target")
    return spec.engine.runtime == "tensorrt_llm" and len(devices) > 1 and not shared


def require_buildable(spec: Spec) -> None:
    """Refuse a layout that cannot be built or started.

    Raises:
        TrtspecError: why.
    """
    if problems := check_support(spec):
        raise TrtspecError(problems[0].reason)
    several = spec.hardware.num_nodes > 1
    if several and spec.engine.track == "llmapi":
        raise TrtspecError("the Triton model of the LLM API runs within one host")
    if several and drafts_apart(spec):
        raise TrtspecError("a host has no GPU left for the draft beside the target's")
    check_placement(spec)


def _divides(spec: Spec, model: ModelConfig, tensor: int, pipeline: int, host_gpus: int) -> bool:
    """Whether TensorRT-LLM can split a model so, and its ranks fill hosts one after another."""
    world, heads, kv_heads = tensor * pipeline, model.num_attention_heads, model.num_key_value_heads
    if world > host_gpus and (world % host_gpus or (host_gpus % tensor and tensor % host_gpus)):
        return False
    if world > _MOST_HOSTS * host_gpus or model.num_hidden_layers % pipeline:
        return False
    if kv_heads % tensor and tensor % kv_heads:  # more ranks than heads: each head stands on several
        return False
    group = AWQ_GROUP_SIZE if spec.target.quantization in ("int4_awq", "w4a8_awq") else 1
    sizes = (model.intermediate_size, heads * model.head_size)
    return heads % tensor == 0 and not any(size % (tensor * group) for size in sizes)
