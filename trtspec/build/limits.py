"""The light plan: each engine's limits, and whether weights and KV caches fit into memory.

Knows the spec and the sizes of the models. Does not know speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trtspec.build.machine import memory_bytes
from trtspec.decoding.methods import DRAFTS, MIDDLES
from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.runtime.engine import SPECULATIVE_MODES
from trtspec.spec.gpus import GPUS
from trtspec.spec.schema import Spec, Tree, serving_key
from trtspec.trtllm.memory import kv_bytes_per_token, share_gpus
from trtspec.trtllm.placement import check_placement
from trtspec.trtllm.support import METHODS

DEFAULT_MAX_NUM_TOKENS = 8192  # trtllm-build's own default
_MODE_NUMBERS = {name: number for number, name in SPECULATIVE_MODES.items()}
_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
_WEIGHT_BITS = {"fp8": 8, "int8_sq": 8, "int4_awq": 4, "w4a8_awq": 4}


def mode(spec: Spec, role: str) -> str | None:
    """The compiler's name of the speculative decoding mode of the engine of `role`; None: it verifies nothing."""
    return METHODS[spec.speculation.method].engine if _max_draft_len(spec, role) else None


def build_config(spec: Spec, role: str, context: int | None) -> dict[str, Any]:
    """Limits of the engine of `role`, under the names of TensorRT-LLM's build_config.

    Args:
        spec: what to build.
        role: a key of `spec.models`.
        context: positions the model was made for; None when it could not be looked at.
    """
    engine, max_draft_len = spec.engine, _max_draft_len(spec, role)
    max_seq_len = min(spec.max_seq_len(role), context or spec.max_seq_len(role))
    in_one_step = engine.max_batch_size * (max_draft_len + 1)
    return {
        "max_batch_size": engine.max_batch_size,
        "max_input_len": min(engine.max_input_len, max_seq_len),
        "max_seq_len": max_seq_len,
        "max_num_tokens": max(engine.max_num_tokens or DEFAULT_MAX_NUM_TOKENS, in_one_step),
        "max_beam_width": 1,
        "max_draft_len": max_draft_len,
        "speculative_decoding_mode": _MODE_NUMBERS[mode(spec, role) or "none"],
        "plugin_config": {
            "use_paged_context_fmha": engine.paged_context_fmha,
            "tokens_per_block": engine.tokens_per_block,
        },
        "gather_generation_logits": engine.gather_generation_logits,
    }


def plan(spec: Spec, models: Mapping[str, ModelConfig], drafting_weights: int = 0) -> dict[str, Any]:
    """Limits and memory of all engines, as JSON.

    Args:
        spec: what to build.
        models: role -> what its checkpoint says.
        drafting_weights: how many more weights the target's engine has: heads, or modules that predict further tokens.

    Returns:
        `engines` (role -> build_config), `memory` (role -> bytes of `weights` and `kv_cache`), `kv_cache_fractions`
        (role -> what the C++ backend is told; empty in the torch runtime), `notes`.

    Raises:
        TrtspecError: a tree that is wider than a vocabulary, a KV cache that cannot hold one longest sequence, or more
            than the memory there is.
    """
    _require_narrow_tree(spec, models)
    engines = {role: build_config(spec, role, model.max_position_embeddings) for role, model in models.items()}
    lengths = {role: engine["max_seq_len"] for role, engine in engines.items()}
    notes = [
        f"max_seq_len of the {role} is {length} instead of {spec.max_seq_len(role)}: its model knows no more positions"
        for role, length in lengths.items()
        if length < spec.max_seq_len(role)
    ]
    shortest = min((role for role in lengths if role in DRAFTS), key=lengths.__getitem__, default="target")
    if lengths[shortest] < lengths["target"]:
        notes.append(
            f"texts of {lengths[shortest]} to {lengths['target']} tokens get no drafts: the {shortest} ends there"
        )
    memory = {
        role: {"weights": weight_bytes(spec, role, model), "kv_cache": kv_cache_bytes(spec, role, model, lengths[role])}
        for role, model in models.items()
    }
    memory["target"]["weights"] += drafting_weights * _BITS[spec.target.dtype] // 8  # these are not quantised
    fractions = {}
    if spec.engine.runtime == "tensorrt_llm" and spec.engine.track == "engine":
        check_placement(spec)
        weights = {role: parts["weights"] for role, parts in memory.items()}
        shares = share_gpus(spec, models, weights, lengths)
        fractions = shares.fractions
        notes += shares.table()
    else:
        _require_fit(spec, memory)
    return {"engines": engines, "memory": memory, "kv_cache_fractions": fractions, "notes": notes}


def weight_bytes(spec: Spec, role: str, model: ModelConfig) -> int:
    """Bytes of a decoder's weights: embedding and head (one where tied), attention, gated MLP times experts."""
    ref = spec.models[role]
    attention = 2 * model.head_size * (model.num_attention_heads + model.num_key_value_heads)
    mlp = 3 * model.intermediate_size
    if model.num_experts:
        expert = model.moe_intermediate_size or model.intermediate_size
        mlp = 3 * (model.num_experts * expert + model.shared_expert_intermediate_size)
    layers = model.num_hidden_layers * model.hidden_size * (attention + mlp)
    vocabulary = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return (layers * _WEIGHT_BITS.get(ref.quantization, _BITS[ref.dtype]) + vocabulary * _BITS[ref.dtype]) // 8


def kv_cache_bytes(spec: Spec, role: str, model: ModelConfig, max_seq_len: int) -> int:
    """The KV cache that the spec asks for; unset, one longest sequence for each request in flight.

    Raises:
        TrtspecError: it cannot hold one sequence of `max_seq_len` tokens.
    """
    ref = spec.models[role]
    longest = kv_bytes_per_token(ref, _with_modules(spec, role, model)) * max_seq_len
    given: int | None = spec.serving.kv_cache_bytes.of(role)
    if given is None:
        return longest * spec.serving.max_concurrency
    if given < longest:
        raise TrtspecError(
            f"{given} bytes do not hold one sequence of {max_seq_len} tokens of the {role}",
            where=spec.where(("serving", "kv_cache_bytes", serving_key(role))),
            expected=f"at least {longest}",
            fix="raise it or lower engine.max_seq_len",
        )
    return given


def _with_modules(spec: Spec, role: str, model: ModelConfig) -> ModelConfig:
    """The model as its engine holds it: modules that draft inside a torch engine are further layers."""
    if spec.engine.runtime != "torch" or spec.speculation.method != "mtp" or role != "target":
        return model
    return replace(model, num_hidden_layers=model.num_hidden_layers + model.num_nextn_predict_layers)


def _max_draft_len(spec: Spec, role: str) -> int:
    """Draft tokens that the engine of `role` verifies in one pass."""
    if spec.speculation.method == "tree" and role in DRAFTS and spec.engine.runtime == "torch":
        return (spec.speculation.tree or Tree()).num_parents  # it takes the tree that has grown so far in one pass
    if spec.speculation.method == "none" or role in DRAFTS:
        return 0
    if role in MIDDLES and spec.speculation.cascade:
        return spec.speculation.cascade.num_draft_tokens
    return spec.max_draft_len


def _require_narrow_tree(spec: Spec, models: Mapping[str, ModelConfig]) -> None:
    """A node has no more children than there are ids."""
    speculation, heads = spec.speculation, spec.speculation.medusa
    if speculation.method == "tree":
        children, key = max((speculation.tree or Tree()).branching), ("speculation", "tree", "branching")
    elif speculation.method == "medusa" and heads and heads.choices:
        children, key = 1 + max(max(path) for path in heads.choices), ("speculation", "medusa", "choices")
    else:
        return
    role = min(models, key=lambda role: models[role].vocab_size)
    if children > models[role].vocab_size:
        raise TrtspecError(
            f"a node of the tree has {children} children, and the vocabulary of the {role} has "
            f"{models[role].vocab_size} ids",
            where=spec.where(key),
            expected=f"at most {models[role].vocab_size}",
        )


def _require_fit(spec: Spec, memory: Mapping[str, Mapping[str, int]]) -> None:
    gpu = spec.hardware.gpu
    there = GPUS[gpu].memory_gb * 10**9 * spec.hardware.total_gpus if spec.hardware.sm else memory_bytes()
    needed = sum(sum(parts.values()) for parts in memory.values())
    if needed > there:
        parts = ", ".join(
            f"{role}: weights {part['weights'] / 2**30:.1f}, KV cache {part['kv_cache'] / 2**30:.1f}"
            for role, part in memory.items()
        )
        raise TrtspecError(
            f"{needed / 2**30:.1f} GiB of memory are needed ({parts}), {gpu} has {there / 2**30:.1f}",
            where=spec.where(("hardware", "gpu")),
            fix="lower serving.kv_cache_bytes, engine.max_seq_len or serving.max_concurrency, or take a smaller dtype",
        )
