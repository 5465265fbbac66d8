"""The memory of GPUs that engines share: what each model's KV cache gets, and the fractions that give it what it needs.

TensorRT-LLM loads a model's weights and gives its KV cache a fraction of what is then free. Models load one after
another (`placement.load_order`), so an early one that takes too much leaves no room for a later one's weights. Ranks of
one engine agree on the smallest number of cache blocks that any of them has room for.

Sizes are in GB of 10^9 bytes, on one GPU. `share_gpus` counts neither activations nor CUDA contexts: the tenth that
default fractions leave free is for them. `trtspec.plan.memory` counts them, as `Load.buffers`. Knows the spec and the
sizes of models; does not know speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.spec.gpus import GPUS
from trtspec.spec.marks import Key, dotted
from trtspec.spec.schema import ModelRef, Spec, serving_key
from trtspec.trtllm.placement import device_ids, load_order

DEFAULT_FRACTION = 0.9  # the backend's own, for a model that has what is left to itself
_PLENTY = 2.0  # of the cache that a full batch needs: the batch, and as much again
_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "fp8": 8, "int8": 8}
_FRACTIONS = "kv_cache_free_gpu_mem_fraction"


@dataclass(frozen=True)
class Load:
    """One model that is loaded; sizes on each of its GPUs.

    Attributes:
        role: target, middle or draft.
        weights: GB of weights.
        fraction: of the free memory, for the KV cache; None: to be derived.
        gpus: where it runs.
        kv_cache: GB of cache that a full batch of longest sequences needs.
        longest: GB of cache that one longest sequence needs.
        buffers: GB of what else is there before the cache is made: activations, logits, CUDA context.
    """

    role: str
    weights: float
    fraction: float | None = None
    gpus: tuple[int, ...] = (0,)
    kv_cache: float = 0.0
    longest: float = 0.0
    buffers: float = 0.0

    @property
    def fixed(self) -> float:
        """GB that are there whatever the cache gets."""
        return self.weights + self.buffers

    @property
    def fixed_named(self) -> str:
        return "weights and buffers" if self.buffers else "weights"


@dataclass(frozen=True)
class Loaded:
    """What a model holds on one GPU, and what is left there when it has loaded; GB."""

    role: str
    gpu: int
    weights: float
    kv_cache: float
    left: float


@dataclass(frozen=True)
class Shares:
    """The memory plan of a spec: `fractions` by role, and what each GPU holds in the order of loading."""

    fractions: dict[str, float]
    rows: list[Loaded]
    notes: list[str]

    def table(self) -> list[str]:
        """A line for each GPU and model, then the notes."""
        rows = [
            f"GPU {row.gpu}: {row.role} weights {row.weights:.1f} GB, KV cache {row.kv_cache:.1f} GB "
            f"(fraction {self.fractions[row.role]:g}), {row.left:.1f} GB left"
            for row in sorted(self.rows, key=lambda row: row.gpu)
        ]
        return [*rows, *self.notes]

    def to_json(self) -> dict[str, Any]:
        """`fractions`, `rows`, `notes`."""
        return asdict(self)


def load_sequence(memory_gb: float, loads: Sequence[Load], where: Callable[[Key], str] = dotted) -> list[Loaded]:
    """What the models hold when they have loaded one after another on GPUs of `memory_gb`.

    Args:
        memory_gb: of each GPU.
        loads: in the order of loading, each with its fraction.
        where: place of a spec key, for messages.

    Raises:
        TrtspecError: a model's weights do not fit into what is left, or its cache does not hold one sequence.
    """
    free = {gpu: memory_gb for load in loads for gpu in load.gpus}
    before: dict[int, str] = {}  # GPU -> the model that loaded there last
    rows = []
    for gpu in free:
        _require_room_for_weights(memory_gb, gpu, [load for load in loads if gpu in load.gpus], where)
    for load in loads:
        for gpu in load.gpus:
            if load.fixed > free[gpu]:
                raise TrtspecError(
                    f"the {load.role} cannot load: its {load.fixed_named} take {load.fixed:.1f} GB of GPU {gpu}, and "
                    f"{free[gpu]:.1f} GB are left there after the {before[gpu]} has taken its part",
                    where=where(("serving", _FRACTIONS, serving_key(before[gpu]))),
                    fix="lower it, or remove it to have it derived",
                )
        assert load.fraction is not None, "default_fractions comes first"
        kv_cache = min(load.fraction * (free[gpu] - load.fixed) for gpu in load.gpus)
        if kv_cache < load.longest:
            raise TrtspecError(
                f"the {load.role}'s KV cache gets {kv_cache:.2f} GB, and one longest sequence needs {load.longest:.2f}",
                where=where(("serving", _FRACTIONS, serving_key(load.role))),
                fix="raise it, lower those of models that load before, or lower engine.max_seq_len",
            )
        for gpu in load.gpus:
            free[gpu] -= load.fixed + kv_cache
            before[gpu] = load.role
            rows.append(Loaded(load.role, gpu, load.weights, kv_cache, free[gpu]))
    return rows


def default_fractions(memory_gb: float, loads: Sequence[Load]) -> list[Load]:
    """`loads` with every fraction filled in.

    A model that shares a GPU with one that loads later gets twice the cache it needs, so that as many finished texts
    can be kept for reuse; the one that loads last, 0.9 of what is left. Where there is not so much, each gets the same
    part of what it needs, and so they hold the same texts.
    """
    last = {gpu: load.role for load in loads for gpu in load.gpus}
    part = min(_affordable(memory_gb, [load for load in loads if gpu in load.gpus]) for gpu in last)
    free = dict.fromkeys(last, memory_gb)
    filled = []
    for load in loads:
        fraction, kv_cache = load.fraction, 0.0
        room = {gpu: max(free[gpu] - load.fixed, 0.0) for gpu in load.gpus}
        if fraction is None:
            # Where room differs, the GPU with the least decides, for its fraction is the largest.
            shared = [room[gpu] for gpu in load.gpus if last[gpu] != load.role]
            fraction = DEFAULT_FRACTION
            if shared and min(shared) > 0:
                fraction = min(math.ceil(1000 * part * load.kv_cache / min(shared)) / 1000, DEFAULT_FRACTION)
        kv_cache = min(fraction * value for value in room.values())
        for gpu in load.gpus:
            free[gpu] = room[gpu] - kv_cache
        filled.append(replace(load, fraction=fraction))
    return filled


def _affordable(memory_gb: float, loads: Sequence[Load]) -> float:
    """How much of the needed caches one GPU has room for, at most `_PLENTY`.

    With P the memory beside all weights and buffers, n the needs of those before and m that of the last one: x n for
    each of them, and 0.9 (P - sum of x n) = x m for the last.
    """
    *earlier, last = loads
    there = memory_gb - sum(load.fixed for load in loads)
    needed = last.kv_cache + DEFAULT_FRACTION * sum(load.kv_cache for load in earlier)
    return min(_PLENTY, max(0.0, DEFAULT_FRACTION * there / needed)) if needed else _PLENTY


def share_gpus(
    spec: Spec,
    models: Mapping[str, ModelConfig],
    weights: Mapping[str, int],
    lengths: Mapping[str, int] | None = None,
) -> Shares:
    """The memory plan for the GPUs of `spec`.

    Args:
        spec: names the GPU, which models run where, batch and length, and fractions where the user chose them.
        models: role -> sizes.
        weights: role -> bytes of weights on all its GPUs together.
        lengths: role -> longest sequence of its engine; those of the spec where it is not given.

    Raises:
        TrtspecError: the models do not fit, naming the key to change.
    """
    memory_gb, gpus = GPUS[spec.hardware.gpu].memory_gb, device_ids(spec)
    loads = []
    for role in load_order(spec):
        ref, length = spec.models[role], (lengths or {}).get(role, spec.max_seq_len(role))
        longest = kv_bytes_per_token(ref, models[role]) * length / ref.world_size / 1e9
        loads.append(
            Load(
                role=role,
                weights=weights[role] / ref.world_size / 1e9,
                fraction=spec.serving.kv_cache_free_gpu_mem_fraction.of(role),
                gpus=gpus[role],
                kv_cache=longest * spec.engine.max_batch_size,
                longest=longest,
            )
        )
    filled = default_fractions(memory_gb, loads)
    rows = load_sequence(memory_gb, filled, spec.where)
    caches = {row.role: row.kv_cache for row in rows}
    notes = [
        f"the {load.role}'s KV cache of {caches[load.role]:.1f} GB holds {caches[load.role] / load.longest:.1f} of the "
        f"{spec.engine.max_batch_size} longest sequences of a full batch"
        for load in filled
        if caches[load.role] < load.kv_cache * (1 - 1e-9)
    ]
    if spec.serving.orchestrator and not spec.serving.spawn_processes and any(_shared(gpus, role) for role in gpus):
        notes.append("models that share a GPU load at the same time without spawned processes: give each its own GPUs")
    return Shares({load.role: load.fraction for load in filled if load.fraction is not None}, rows, notes)


def kv_bytes_per_token(ref: ModelRef, model: ModelConfig) -> int:
    """Bytes of keys and values for one token on all GPUs together: 2 x layers x KV heads x head size.

    A rank holds at least one KV head, so heads are repeated where there are fewer of them than ranks.
    """
    heads = math.ceil(model.num_key_value_heads / ref.tensor_parallel) * ref.tensor_parallel
    bits = _BITS[ref.dtype if ref.kv_cache_dtype == "auto" else ref.kv_cache_dtype]
    return 2 * model.num_hidden_layers * heads * model.head_size * bits // 8


def _shared(gpus: Mapping[str, tuple[int, ...]], role: str) -> bool:
    return any(set(gpus[role]) & set(others) for other, others in gpus.items() if other != role)


def _require_room_for_weights(memory_gb: float, gpu: int, loads: Sequence[Load], where: Callable[[Key], str]) -> None:
    if sum(load.fixed for load in loads) >= memory_gb:
        parts = " + ".join(f"{load.fixed:.1f} ({load.role})" for load in loads)
        named = next((load.fixed_named for load in loads if load.buffers), "weights")
        raise TrtspecError(
            f"GPU {gpu} has {memory_gb:g} GB, and {named} alone take {parts}",
            where=where(("hardware", "gpu")),
            fix="split the models over more GPUs (tensor_parallel), quantise them, or take a larger GPU",
        )
