"""What can be converted at all: family, precision and split, decided by sizes alone.

The rules are those of ModelOpt's exporter and of TensorRT-LLM's layers. Does not know files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trtspec.errors import TrtspecError
from trtspec.spec.marks import dotted
from trtspec.spec.rules import role_key
from trtspec.trtllm.convert import own_converter
from trtspec.trtllm.convert.checkpoint_config import AWQ, AWQ_BLOCK, FAMILIES, QWEN_FAMILY

if TYPE_CHECKING:
    from trtspec.models.config import ModelConfig
    from trtspec.trtllm.convert import ConversionJob

# Families of which TensorRT-LLM does not run every precision.
PRECISIONS = {"mixtral": ("none", "fp8")}


def refusals(job: ConversionJob, model: ModelConfig) -> Iterator[TrtspecError]:
    """Every reason against this conversion, each with the nearest setting that works."""
    key = dotted(role_key(job.role))
    own = own_converter.is_needed(job, model.model_type)
    if own and job.heads is None and model.model_type not in own_converter.FAMILY_SCRIPTS:
        yield TrtspecError(
            f"models of family {model.model_type} ({model.architecture}) cannot be converted",
            where=f"{key}.model",
            expected=f"one of {', '.join(dict.fromkeys((*FAMILIES, *own_converter.FAMILY_SCRIPTS)))}",
        )
    if own and job.heads != "redrafter":
        yield from _own_converter(job, model, key)
    if job.heads == "redrafter" and model.model_type not in ("llama", "qwen2"):
        yield TrtspecError(
            f"ReDrafter heads do not go with a target of family {model.model_type}",
            where=f"{key}.model",
            expected="llama or qwen2",
        )
    if job.heads == "medusa" and model.model_type not in ("llama", "mistral", "mixtral", "qwen2"):
        yield TrtspecError(
            f"Medusa heads do not go with a target of family {model.model_type} in TensorRT-LLM",
            where=f"{key}.model",
            expected="llama, mistral, mixtral or qwen2",
            fix="set speculation.method: draft_target",
        )
    allowed = PRECISIONS.get(model.model_type)
    if allowed and job.model.quantization not in allowed:
        yield TrtspecError(
            f"TensorRT-LLM runs no {job.model.quantization} weights in models of family {model.model_type}",
            where=f"{key}.quantization",
            expected=" or ".join(allowed),
            fix=f"set {key}.quantization: fp8",
        )
    yield from _split(job, model, key)


def _own_converter(job: ConversionJob, model: ModelConfig, key: str) -> Iterator[TrtspecError]:
    """TensorRT-LLM's scripts are used for unquantised models only."""
    why = f"{job.heads} heads" if job.heads else f"dtype {job.model.dtype}"
    if not job.heads and model.model_type not in FAMILIES:
        why = f"family {model.model_type}"
    for name, plain in (("quantization", "none"), ("kv_cache_dtype", "auto")):
        value = getattr(job.model, name)
        if value != plain:
            fix = f"set {key}.{name}: {plain}"
            if why.startswith("dtype"):
                fix += f", or {key}.dtype: bfloat16"
            yield TrtspecError(f"{name} {value} cannot be had with {why}", where=f"{key}.{name}", fix=fix)
    if job.heads == "eagle" and model.model_type in QWEN_FAMILY:
        yield TrtspecError(
            "EAGLE heads run in engines of the Llama family only",
            where=f"{key}.model",
            fix="set engine.track: llmapi with EAGLE-3 heads, or speculation.method: draft_target",
        )


def _split(job: ConversionJob, model: ModelConfig, key: str) -> Iterator[TrtspecError]:
    tensor_parallel, pipeline_parallel = job.model.tensor_parallel, job.model.pipeline_parallel
    problem = _split_problem(job, model, tensor_parallel)
    if problem:
        sizes = [n for n in range(1, model.num_attention_heads + 1) if not _split_problem(job, model, n)]
        if sizes:
            nearest = min(sizes, key=lambda n: (abs(n - tensor_parallel), n))
            yield TrtspecError(
                problem,
                where=f"{key}.tensor_parallel",
                expected=_either(sizes),
                fix=f"set {key}.tensor_parallel: {nearest}",
            )
        else:
            yield TrtspecError(
                problem,
                where=f"{key}.quantization",
                expected="none, fp8 or int8_sq",
                fix=f"set {key}.quantization: fp8",
            )
    if model.num_hidden_layers % pipeline_parallel:
        layers = model.num_hidden_layers
        sizes = [n for n in range(1, layers + 1) if layers % n == 0]
        nearest = min(sizes, key=lambda n: (abs(n - pipeline_parallel), n))
        yield TrtspecError(
            f"{layers} layers cannot be divided evenly among {pipeline_parallel} pipeline stages",
            where=f"{key}.pipeline_parallel",
            expected=_either(sizes),
            fix=f"set {key}.pipeline_parallel: {nearest}",
        )


def _split_problem(job: ConversionJob, model: ModelConfig, size: int) -> str | None:
    """Why the model cannot be divided among `size` GPUs; None if it can."""
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % size:
        return f"{heads} attention heads cannot be divided among {size} GPUs"
    if kv_heads % size and size % kv_heads:
        return f"{kv_heads} key/value heads can neither be divided among nor repeated on {size} GPUs"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(model, name) % size:
            return f"{name} {getattr(model, name)} cannot be divided among {size} GPUs"
    if job.model.quantization == "int8_sq" and size > kv_heads:
        return f"int8_sq cannot repeat {kv_heads} key/value heads on {size} GPUs"
    if job.model.quantization in AWQ:
        for what, width in (
            ("hidden_size", model.hidden_size),
            ("intermediate_size", model.intermediate_size),
            ("num_attention_heads x head_size", heads * model.head_size),
        ):
            if (width // size) % AWQ_BLOCK:
                share = f"{width}" if size == 1 else f"{width} / {size} = {width // size}"
                return f"{what} {share} is no multiple of {AWQ_BLOCK}, the block of {job.model.quantization}"
    return None


def _either(sizes: list[int]) -> str:
    *first, last = (str(n) for n in sizes)
    return f"{', '.join(first)} or {last}" if first else last
