"""Whether the models of a spec fit at a batch and a context, GPU by GPU in the order of loading, and what would fit.

What a model holds beside its weights before its KV cache is made:

- activations of a pass over the most tokens that its engine takes at once (T), in the model's dtype: the residual
  stream and the layer's input (2 T hidden), queries, keys and values, gate and up of the MLP (of a mixture of experts,
  once for each expert that a token goes to); all but the first two are divided by tensor_parallel. Layers follow one
  another in the same buffers;
- logits, float32 rows over the vocabulary: batch x (draft tokens + 1) of a model that verifies; batch x 1 of one that
  drafts, batch x draft tokens where engine.gather_generation_logits keeps them for the target;
- the CUDA context with its libraries: `CONTEXT_GB` a process and GPU. With an orchestrator every model has processes of
  its own, without one they share one.

These are sizes by calculation, not measured. TensorRT-LLM gives a KV cache a fraction of what is then free
(`trtspec.trtllm.memory`); caches of the torch runtime have the size that the spec says. Knows the spec and sizes of
models, not speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from trtspec.decoding.methods import DRAFTS, MIDDLES
from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.plan.result import Memory, MemoryRow
from trtspec.plan.roofline import layer_weights, precision
from trtspec.spec.gpus import Gpu
from trtspec.spec.schema import Mtp, PerModelFraction, Spec
from trtspec.trtllm.memory import (
    DEFAULT_FRACTION,
    Load,
    default_fractions,
    kv_bytes_per_token,
    load_sequence,
)
from trtspec.trtllm.placement import device_ids, load_order
from trtspec.trtllm.support import QUANTIZATION_MIN_SM

CONTEXT_GB = 0.5  # an assumption: CUDA context, cuBLAS and NCCL of one process on one GPU
_HOST_PROCESS_GB = 0.4  # Python with torch
_MAX_NUM_TOKENS = 8192  # trtllm-build's own default
_MOST_SEQUENCES = 4096
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_GB = 1e9


@dataclass(frozen=True)
class _Sizes:
    """One model on each of its GPUs, in GB; `sequence` is the cache of one sequence."""

    role: str
    gpus: tuple[int, ...]
    weights: float
    activations: float
    logits: float
    context: float
    sequence: float

    @property
    def fixed(self) -> float:
        return self.weights + self.activations + self.logits + self.context

    def row(self, gpu: int, batch: int, kv_cache: float, left: float, fraction: float | None = None) -> MemoryRow:
        needed = batch * self.sequence
        return MemoryRow(
            gpu, self.role, self.weights, kv_cache, needed, self.activations, self.logits, self.context, left, fraction
        )


def memory_plan(
    spec: Spec, models: Mapping[str, ModelConfig], device_gb: float, batch: int, context: int | None = None
) -> Memory:
    """What the models hold, and the largest batch that there is room for.

    Args:
        spec: says which models run where.
        models: role -> sizes.
        device_gb: memory of one GPU, or of the host where hardware.gpu is cpu; GB of 10^9 bytes.
        batch: sequences in flight.
        context: tokens of each; None: as many as an engine takes (max_seq_len).
    """
    memory = _at(spec, models, device_gb, batch, context)
    most = _largest(lambda size: _at(spec, models, device_gb, size, context).fits, _MOST_SEQUENCES)
    return replace(memory, max_batch=most)


def _at(spec: Spec, models: Mapping[str, ModelConfig], device_gb: float, batch: int, context: int | None) -> Memory:
    sizes = [_sizes(spec, role, models[role], batch, context) for role in load_order(spec)]
    fixed_caches = spec.engine.runtime == "torch"
    place = _given_caches if fixed_caches else _one_cache if spec.engine.track == "llmapi" else _fractions
    length = min(context or spec.max_seq_len("target"), spec.max_seq_len("target"))
    try:
        rows, problem = tuple(place(spec, sizes, models, device_gb, batch)), None
    except TrtspecError as error:
        rows, problem = tuple(_without_caches(sizes, device_gb, batch)), error.problem
    if problem is None:
        short = next((row for row in rows if row.kv_cache_gb < row.kv_needed_gb * (1 - 1e-9)), None)
        if short is not None:
            problem = (
                f"the {short.role}'s KV cache of {short.kv_cache_gb:.2f} GB is too small for {batch} sequences of "
                f"{length} tokens, which need {short.kv_needed_gb:.2f}"
            )
    return Memory(device_gb, batch, length, rows, tuple(_notes(spec)), problem)


def _sizes(spec: Spec, role: str, model: ModelConfig, batch: int, context: int | None) -> _Sizes:
    ref = spec.models[role]
    return _Sizes(
        role,
        (0,) if spec.engine.runtime == "torch" else device_ids(spec)[role],
        _weight_bytes(spec, role, model) / ref.world_size / _GB,
        _activation_bytes(spec, role, model, batch) / _GB,
        _logit_bytes(spec, role, model, batch) / _GB,
        _context_gb(spec, role),
        _sequence_bytes(spec, role, model, context) / ref.world_size / _GB,
    )


def _weight_bytes(spec: Spec, role: str, model: ModelConfig) -> float:
    """On all GPUs together; heads and modules that draft inside the target's engine are not quantised."""
    ref, speculation, hidden = spec.models[role], spec.speculation, model.hidden_size
    if role == "draft" and speculation.method == "early_exit" and spec.engine.runtime == "torch":
        return 0.0  # shared with the target
    layers, unquantized = layer_weights(model, model.num_experts), hidden * model.vocab_size
    if not model.tie_word_embeddings:
        unquantized *= 2
    if role == "target" and speculation.method == "medusa" and speculation.medusa:
        head = hidden * (speculation.medusa.num_layers * hidden + model.vocab_size)
        unquantized += speculation.medusa.num_heads * head
    if role == "target" and speculation.method == "mtp":
        layer = layer_weights(replace(model, num_hidden_layers=1, num_dense_mlp_layers=0), model.num_experts)
        layers += (speculation.mtp or Mtp()).num_modules * (layer + 2 * hidden * hidden)
    return layers * precision(ref)[0] + unquantized * _BYTES[ref.dtype]


def _activation_bytes(spec: Spec, role: str, model: ModelConfig, batch: int) -> float:
    """On each GPU, see the module."""
    ref, engine = spec.models[role], spec.engine
    prefill = engine.max_input_len if engine.runtime == "torch" else engine.max_num_tokens or _MAX_NUM_TOKENS
    tokens = max(prefill, batch * (_num_draft_tokens(spec, role) + 1))
    attention = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_size
    mlp = model.intermediate_size
    if model.num_experts:
        mlp = (model.moe_intermediate_size or mlp) * model.num_experts_per_token
    return tokens * _BYTES[ref.dtype] * (2 * model.hidden_size + (attention + 2 * mlp) / ref.tensor_parallel)


def _logit_bytes(spec: Spec, role: str, model: ModelConfig, batch: int) -> float:
    """On each GPU, see the module."""
    drafts = _num_draft_tokens(spec, role)
    rows = drafts + 1
    if role in DRAFTS:
        rows = max(drafts, 1) if spec.engine.gather_generation_logits else 1
    return 4.0 * batch * rows * model.vocab_size


def _sequence_bytes(spec: Spec, role: str, model: ModelConfig, context: int | None) -> float:
    """KV cache of one sequence of so many tokens and its drafts, on all GPUs together; None: of a longest one."""
    longest = min(spec.max_seq_len(role), model.max_position_embeddings)
    length = longest if context is None else min(context + _num_draft_tokens(spec, role), longest)
    if role == "target" and spec.speculation.method == "mtp":
        modules = (spec.speculation.mtp or Mtp()).num_modules
        model = replace(model, num_hidden_layers=model.num_hidden_layers + modules)
    return float(kv_bytes_per_token(spec.models[role], model) * length)


def _num_draft_tokens(spec: Spec, role: str) -> int:
    """Tokens that a cycle proposes to the model of `role`, or, of a draft, that it proposes."""
    cascade = spec.speculation.cascade if spec.speculation.method == "cascade" else None
    if cascade and role not in ("target", MIDDLES[0]):
        return cascade.num_draft_tokens
    return spec.speculation.num_draft_tokens


def _context_gb(spec: Spec, role: str) -> float:
    if spec.hardware.gpu == "cpu":
        return _HOST_PROCESS_GB if role == load_order(spec)[0] else 0.0
    if spec.engine.track == "engine" and spec.serving.orchestrator:
        return CONTEXT_GB
    gpus, order = device_ids(spec), load_order(spec)
    earlier = {gpu for other in order[: order.index(role)] for gpu in gpus[other]}
    return 0.0 if earlier & set(gpus[role]) else CONTEXT_GB


def _fractions(
    spec: Spec, sizes: list[_Sizes], models: Mapping[str, ModelConfig], device_gb: float, batch: int
) -> Iterator[MemoryRow]:
    """Compiled engines: each cache takes its fraction of what is free when its model has loaded."""
    loads = [
        Load(
            size.role,
            size.weights,
            spec.serving.kv_cache_free_gpu_mem_fraction.of(size.role),
            size.gpus,
            kv_cache=batch * size.sequence,
            longest=size.sequence,
            buffers=size.fixed - size.weights,
        )
        for size in sizes
    ]
    filled = default_fractions(device_gb, loads)
    fractions, by_role = {load.role: load.fraction for load in filled}, {size.role: size for size in sizes}
    for row in load_sequence(device_gb, filled, spec.where):
        yield by_role[row.role].row(row.gpu, batch, row.kv_cache, row.left, fractions[row.role])


def _one_cache(
    spec: Spec, sizes: list[_Sizes], models: Mapping[str, ModelConfig], device_gb: float, batch: int
) -> Iterator[MemoryRow]:
    """LLM API: one process a GPU holds all models; its fraction is for all caches, by what they need."""
    fraction = spec.serving.kv_cache_free_gpu_mem_fraction.target or DEFAULT_FRACTION
    for gpu in sorted({gpu for size in sizes for gpu in size.gpus}):
        here = [size for size in sizes if gpu in size.gpus]
        free = device_gb - sum(size.fixed for size in here)
        _require(free > 0, spec, here, device_gb, f"GPU {gpu}")
        all_sequences = sum(size.sequence for size in here)
        left = device_gb
        for size in here:
            kv_cache = fraction * free * size.sequence / all_sequences
            left -= size.fixed + kv_cache
            yield size.row(gpu, batch, kv_cache, left, fraction)


def _given_caches(
    spec: Spec, sizes: list[_Sizes], models: Mapping[str, ModelConfig], device_gb: float, batch: int
) -> Iterator[MemoryRow]:
    """Torch runtime: caches as large as the spec says; unset, for max_concurrency longest sequences."""
    left, rows = device_gb, []
    for size in sizes:
        given = spec.serving.kv_cache_bytes.of(size.role)
        whole = spec.serving.max_concurrency * _sequence_bytes(spec, size.role, models[size.role], None)
        kv_cache = (whole if given is None else given) / _GB
        left -= size.fixed + kv_cache
        rows.append(size.row(0, batch, kv_cache, left))
    _require(left >= 0, spec, sizes, device_gb, "the machine" if spec.hardware.gpu == "cpu" else "GPU 0", rows)
    yield from rows


def _without_caches(sizes: list[_Sizes], device_gb: float, batch: int) -> Iterator[MemoryRow]:
    left = {gpu: device_gb for size in sizes for gpu in size.gpus}
    for size in sizes:
        for gpu in size.gpus:
            left[gpu] -= size.fixed
            yield size.row(gpu, batch, 0.0, left[gpu])


def _require(
    fits: bool, spec: Spec, sizes: list[_Sizes], device_gb: float, device: str, rows: list[MemoryRow] | None = None
) -> None:
    if fits:
        return
    caches = {row.role: row.kv_cache_gb for row in rows or ()}
    parts = " + ".join(f"{size.fixed + caches.get(size.role, 0.0):.1f} ({size.role})" for size in sizes)
    what = "weights, buffers and KV caches" if rows else "weights and buffers alone"
    raise TrtspecError(
        f"{device} has {device_gb:.1f} GB, and {what} take {parts}", where=spec.where(("hardware", "gpu"))
    )


def _notes(spec: Spec) -> Iterator[str]:
    if spec.speculation.method in ("eagle", "redrafter"):
        yield f"the weights of the {spec.speculation.method} heads are not counted"
    asked = spec.serving.kv_cache_free_gpu_mem_fraction
    chosen = [role for role in spec.models if asked.of(role) is not None]
    if spec.engine.runtime == "tensorrt_llm" and spec.engine.track == "engine" and chosen:
        yield f"the fraction of the {' and the '.join(chosen)} is the spec's; without it, one is derived from the needs"


def _largest(works: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that works, where all smaller ones do; 0: none."""
    low, high = 0, 1
    while high <= limit and works(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def alternatives(
    spec: Spec, models: Mapping[str, ModelConfig], memory: Memory, gpus: Mapping[str, Gpu], gpu: Gpu
) -> list[str]:
    """What would fit instead of a plan that does not, the nearest first, each as what to set.

    First fractions that are derived instead of the spec's, a smaller batch, a shorter context; then settings of the
    target: fp8 weights and cache, more GPUs (tensor_parallel), another GPU of the catalogue; several of these together
    only where no part of them is enough.
    """
    found, batch, context = [], memory.batch, memory.context
    if _at(with_derived_fractions(spec), models, memory.device_gb, batch, context).fits:
        found.append("without serving.kv_cache_free_gpu_mem_fraction, so that it is derived")
    if memory.max_batch:
        found.append(f"a batch of {memory.max_batch} (--batch {memory.max_batch})")
    length = _largest(lambda tokens: _at(spec, models, memory.device_gb, batch, tokens).fits, context)
    if length >= min(64, context):
        found.append(f"a context of {length} tokens (--context {length})")
    if spec.engine.runtime == "torch":
        return found
    fitting: dict[frozenset[str], str] = {}
    for words, other, device in sorted(_variants(spec, gpus, gpu), key=lambda variant: _distance(variant[0])):
        if any(kinds <= words.keys() for kinds in fitting):
            continue  # a part of these changes is enough
        if words and _at(other, models, device.memory_gb, batch, context).fits:
            fitting[frozenset(words)] = " ".join(words.values())
    return found + list(fitting.values())


def with_derived_fractions(spec: Spec) -> Spec:
    """The spec without cache fractions of its own, so that they follow from what the models need."""
    serving = spec.serving.model_copy(update={"kv_cache_free_gpu_mem_fraction": PerModelFraction()})
    return spec.model_copy(update={"serving": serving})


def _distance(changes: Mapping[str, str]) -> tuple[int, int]:
    """How far a variant is from the spec: by the number of changes, then by what they cost."""
    return len(changes), sum(("fp8", "gpus", "gpu").index(kind) for kind in changes)


def _variants(spec: Spec, gpus: Mapping[str, Gpu], gpu: Gpu) -> Iterator[tuple[dict[str, str], Spec, Gpu]]:
    """Kind of change -> words, with the spec and the GPU that they lead to."""
    larger = sorted(
        ((name, row) for name, row in gpus.items() if row.sm and row.memory_gb > gpu.memory_gb),
        key=lambda item: item[1].memory_gb,
    )
    split = spec.target.tensor_parallel
    chosen = spec.serving.gpu_device_ids.target is not None
    for quantised, ranks, (name, row) in product(
        (False, True), (split,) if chosen else (split, 2 * split, 4 * split, 8 * split), ((None, gpu), *larger)
    ):
        if ranks > 8 * max(1, spec.hardware.num_nodes):
            continue
        words, target, hardware = {}, spec.target, spec.hardware
        if quantised:
            if target.quantization != "none" or row.sm < QUANTIZATION_MIN_SM["fp8"]:
                continue
            target = target.model_copy(update={"quantization": "fp8", "kv_cache_dtype": "fp8"})
            words["fp8"] = "target.quantization=fp8 target.kv_cache_dtype=fp8"
        if ranks > split:
            target = target.model_copy(update={"tensor_parallel": ranks})
            num_gpus = max(hardware.num_gpus, target.world_size)
            hardware = hardware.model_copy(update={"num_gpus": num_gpus})
            words["gpus"] = f"target.tensor_parallel={ranks} hardware.num_gpus={num_gpus}"
            if len(spec.models) > 1 and spec.engine.track == "engine" and not spec.serving.orchestrator:
                words["gpus"] += " serving.orchestrator=true"
        if name is not None:
            words["gpu"] = f"hardware.gpu={name}"
        yield words, spec.model_copy(update={"target": target, "hardware": hardware}), row
