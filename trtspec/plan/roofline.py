"""Times of forward passes from data sheets: each part of a pass takes as long as its bytes or its arithmetic need.

The parts are the matrices of the layers, attention over the KV cache, and the head. They run one after another, so each
has a roof of its own: max(bytes / bandwidth, operations / rate), both divided by tensor_parallel. Between ranks come
two all-reduces a layer, between stages a hand-over of the states.

A model that is larger than a host lies on several: its ranks fill one host after the other, those of a stage
(tensor_parallel) together, so that stages part at hosts first. What then crosses hosts goes through the network, of
which each GPU has its part: a hand-over from GPU to GPU, an all-reduce in rings through the parts of a host's GPUs.

Counted: weights at the width of their quantisation (scales of AWQ included; embedding, head and routers are never
quantised); of a mixture of experts those that the tokens of all sequences touch; keys and values of every sequence;
logits of every new token, of a prefill (context 0) the last one's. Not counted: activations, norms, sampling, launching
kernels. So small models and short passes come out too fast: of a 1B model on an H100, or a 7B
one on eight GPUs, believe measurements (`trtspec plan calibrate`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.plan.shapes import LatentConfig
from trtspec.plan.step_times import HEADS
from trtspec.spec.gpus import Arithmetic, Gpu
from trtspec.spec.schema import ModelRef, Spec
from trtspec.trtllm.memory import kv_bytes_per_token

EFFICIENCY = 1397.31 / 2039
"""Part of the data sheet's bandwidth that decoding reaches, 69 %, from one published figure.

gpt-fast (README, benchmarks at batch 1 with a prompt of 5 tokens) reports Llama-2-7B in bfloat16 on an A100-80GB at
104.9 tokens/s and, for what these tokens have to read, 1397.31 GB/s; the card's data sheet says 2039 GB/s. No second
figure is used: rates of arithmetic are taken to be reached to the same part, so that the tokens in flight at which a
GPU turns from memory to arithmetic, and with them the batch at which plain decoding wins, are those of its data sheet.
"""
LATENCY_S = 10e-6
"""Seconds until an all-reduce within a host begins to move bytes; an assumption, not fitted to anything."""

NETWORK_LATENCY_S = 30e-6
"""The same between hosts, with network cards that read GPU memory; an assumption too."""

_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
_AWQ = 0.5 + 2 / 128  # four bits, and a 16-bit scale for every 128 of them
_QUANTIZED: dict[str, tuple[float, Arithmetic | None]] = {  # bytes of a weight, arithmetic; None: the model's dtype
    "fp8": (1.0, "fp8"),
    "int8_sq": (1.0, "int8"),
    "int4_awq": (_AWQ, None),
    "w4a8_awq": (_AWQ, "fp8"),
}


@dataclass(frozen=True)
class Roofline:
    """`StepTimes` of a GPU by its data sheet.

    Args:
        models: role -> sizes and precision. Layers that the precision's `num_layers` leaves out do not count.
        gpu: a catalogue row.
        efficiency: part of bandwidth and rates that is reached.
        extra: role -> weights that a pass reads besides layers and head, in the precision of the model.
        host_gpus: GPUs of a host; None: all are on one.
        network_gbps: what joins hosts, 10^9 bits a second for each GPU in each direction; None: not known.

    Raises:
        TrtspecError: the row has no bandwidth, as that of the CPU, or lacks an arithmetic or the link that a model
            needs; a model is larger than a host, and the network is not known.
    """

    models: Mapping[str, tuple[ModelConfig, ModelRef]]
    gpu: Gpu
    efficiency: float = EFFICIENCY
    extra: Mapping[str, float] = field(default_factory=dict)
    host_gpus: int | None = None
    network_gbps: float | None = None

    def __post_init__(self) -> None:
        if self.gpu.bandwidth_gb_per_s is None:
            raise TrtspecError(
                f"{self.gpu.name} has no roofline: its speed is not on a data sheet",
                fix="measure it: trtspec plan calibrate CONFIG",
            )
        for role, (_, ref) in self.models.items():
            self._require(role, ref)

    @classmethod
    def of(
        cls,
        spec: Spec,
        configs: Mapping[str, ModelConfig],
        gpu: Gpu,
        efficiency: float = EFFICIENCY,
        network_gbps: float | None = None,
    ) -> Roofline:
        """The roofline of a spec's models, and of the heads or modules that its method adds (`HEADS`).

        Args:
            spec: names roles, precisions, method, and the GPUs of a host.
            configs: role -> sizes.
            gpu: which need not be the spec's own.
            efficiency: see the class.
            network_gbps: see the class.
        """
        models = {role: (configs[role], ref) for role, ref in spec.models.items()}
        target, speculation = configs["target"], spec.speculation
        extra: dict[str, float] = {}
        if speculation.method == "medusa" and speculation.medusa:
            # Each head: residual layers, and a matrix onto the vocabulary; one of those is the head that counts anyway.
            heads, hidden = speculation.medusa, target.hidden_size
            models[HEADS] = (replace(target, num_hidden_layers=0), spec.target.model_copy(update=_UNQUANTIZED))
            extra[HEADS] = heads.num_heads * heads.num_layers * hidden**2
            extra[HEADS] += (heads.num_heads - 1) * hidden * target.vocab_size
        elif speculation.method == "mtp":
            models[HEADS] = (replace(target, num_hidden_layers=1, num_dense_mlp_layers=0), spec.target)
            extra[HEADS] = 2 * target.hidden_size**2  # joins the state and the token's embedding
        return cls(models, gpu, efficiency, extra, spec.hardware.num_gpus, network_gbps)

    @property
    def source(self) -> str:
        """`roofline of H100-SXM at 69 % of its data sheet`."""
        return f"roofline of {self.gpu.name} at {self.efficiency:.0%} of its data sheet".replace("%", " %")

    def seconds(self, role: str, batch: int, tokens: int, context: int) -> float:
        """One forward pass, see `StepTimes.seconds`.

        With pipeline_parallel p the sequences go through the stages in p groups, one behind the other, so that a pass
        of all of them takes as long as one group needs for all stages.

        Raises:
            TrtspecError: no model has this role.
        """
        if role not in self.models:
            raise TrtspecError(f"no model {role!r}", where=self.source, expected=f"one of {', '.join(self.models)}")
        config, ref = self._cut[role]
        rows = math.ceil(batch / ref.pipeline_parallel)
        new, width = rows * tokens, _BYTES[ref.dtype]
        weight, arithmetic = precision(ref)
        extra = self.extra.get(role, 0.0)
        read, used = (layer_weights(config, _touched(config, count)) + extra for count in (new, 1))
        pairs = rows * tokens * (context + (tokens + 1) / 2)  # of a query and a key that it sees
        head = config.hidden_size * config.vocab_size
        parts = (
            (read * weight, 2 * used * new, arithmetic),
            (rows * (context + tokens) * kv_bytes_per_token(ref, config), pairs * _pair_operations(config), ref.dtype),
            (head * width, 2 * head * (new if context else rows), ref.dtype),
        )
        roofs = sum(self._roof(moved, operations, kind) for moved, operations, kind in parts)
        return roofs / ref.tensor_parallel + self._communication(config, ref, new * config.hidden_size * width)

    def overhead(self, batch: int) -> float:
        """0: a data sheet does not say what happens between the models."""
        return 0.0

    @cached_property
    def _cut(self) -> dict[str, tuple[ModelConfig, ModelRef]]:
        """`models` with the layers that are kept."""
        cut = {}
        for role, (config, ref) in self.models.items():
            layers = min(ref.num_layers or config.num_hidden_layers, config.num_hidden_layers)
            cut[role] = (replace(config, num_hidden_layers=layers), ref)
        return cut

    def _roof(self, moved: float, operations: float, kind: Arithmetic) -> float:
        bandwidth = (self.gpu.bandwidth_gb_per_s or 0.0) * 1e9
        return max(moved / bandwidth, operations / (self.gpu.dense_tflops[kind] * 1e12)) / self.efficiency

    def _communication(self, config: ModelConfig, ref: ModelRef, state: float) -> float:
        """Two ring all-reduces of the states (`state` bytes) a layer, and a hand-over between stages."""
        if self.gpu.link is None:
            return 0.0
        ranks, stages = ref.tensor_parallel, ref.pipeline_parallel
        one_way, network = self.gpu.link.gb_per_s / 2 * 1e9, (self.network_gbps or 0.0) / 8 * 1e9
        here = self.host_gpus or ref.world_size
        latency, ring = (LATENCY_S, one_way) if ranks <= here else (NETWORK_LATENCY_S, min(one_way, here * network))
        reduced = latency + 2 * (ranks - 1) / ranks * state / ring
        far = sum(first // here != (first - ranks) // here for first in range(ranks, ref.world_size, ranks))
        seconds = (ranks > 1) * 2 * config.num_hidden_layers * reduced
        seconds += (stages - 1 - far) * (LATENCY_S + state / one_way)
        return seconds + (far * (NETWORK_LATENCY_S + state / network) if far else 0.0)

    def _require(self, role: str, ref: ModelRef) -> None:
        for kind in (ref.dtype, precision(ref)[1]):
            if kind not in self.gpu.dense_tflops:
                raise TrtspecError(
                    f"the catalogue has no {kind} rate of {self.gpu.name}, which the {role} computes with",
                    expected=f"one of {', '.join(self.gpu.dense_tflops)}",
                    fix="take another dtype or quantization, or add the rate to a --gpu-file",
                )
        if ref.world_size > 1 and self.gpu.link is None:
            raise TrtspecError(
                f"the catalogue does not say what joins GPUs of type {self.gpu.name}, and the {role} takes several",
                fix="add `link` to its row in a --gpu-file",
            )
        if self.host_gpus is not None and ref.world_size > self.host_gpus and self.network_gbps is None:
            raise TrtspecError(
                f"the {role} lies on several hosts of {self.host_gpus} GPUs, and what joins them is not known",
                fix="give it for each GPU in 10^9 bits a second, such as --network-gbps 400",
            )


_UNQUANTIZED = {"quantization": "none"}


def layer_weights(config: ModelConfig, num_experts: float) -> float:
    """Weights of all layers, with `num_experts` experts of each layer that has some; without norms and biases."""
    dense = config.num_hidden_layers
    if config.num_experts:
        dense = min(config.num_dense_mlp_layers, config.num_hidden_layers)
    expert = config.moe_intermediate_size or config.intermediate_size
    sparse_mlp = num_experts * 3 * expert + 3 * config.shared_expert_intermediate_size + config.num_experts
    mlps = dense * 3 * config.intermediate_size + (config.num_hidden_layers - dense) * sparse_mlp
    return config.num_hidden_layers * _attention_weights(config) + config.hidden_size * mlps


def _attention_weights(config: ModelConfig) -> float:
    """Weights of one layer's attention; of latent attention with the matrices that compress and expand."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if not isinstance(config, LatentConfig):
        return 2.0 * hidden * config.head_size * (heads + config.num_key_value_heads)
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    queries = config.q_lora_rank * (hidden + heads * key) or hidden * heads * key
    latent = hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
    expanded = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    return queries + latent + expanded + heads * config.v_head_dim * hidden


def _pair_operations(config: ModelConfig) -> float:
    """Operations of attention for one query and one key in all layers; of latent attention in the absorbed form."""
    numbers = 2 * config.head_size
    if isinstance(config, LatentConfig):
        numbers = 2 * config.kv_lora_rank + config.qk_rope_head_dim
    return 2 * config.num_hidden_layers * config.num_attention_heads * numbers


def _touched(config: ModelConfig, tokens: int) -> float:
    """Experts of a layer that so many tokens go to."""
    if not config.num_experts:
        return 0.0
    from trtspec.plan.experts import experts_touched  # brings torch along

    return experts_touched(config.num_experts, config.num_experts_per_token, tokens)


def precision(ref: ModelRef) -> tuple[float, Arithmetic]:
    """Bytes of a layer's weight, scales of AWQ included, and the arithmetic that multiplies it."""
    weight, arithmetic = _QUANTIZED.get(ref.quantization, (_BYTES[ref.dtype], None))
    return weight, arithmetic or ref.dtype
