"""config.json of a checkpoint: every field that TensorRT-LLM's model classes read, none that they do not know.

Knows the fields of the Llama and Qwen families and of Medusa. Does not know weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtspec.models.config import ModelConfig
    from trtspec.trtllm.convert import ConversionJob

LLAMA_FAMILY = ("llama", "mistral", "mixtral")
QWEN_FAMILY = ("qwen2", "qwen3")
FAMILIES = (*LLAMA_FAMILY, *QWEN_FAMILY)
# What TensorRT-LLM quantises in no model, as patterns of its module names; a list of ours replaces its own.
NEVER_QUANTIZED = ("lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding")
_RENORMALIZE = 1  # ExpertScaleNormalizationMode of Mixtral
# TensorRT-LLM's names of the precisions.
QUANT_ALGO = {
    "none": None,
    "fp8": "FP8",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
}
KV_CACHE_QUANT_ALGO = {"auto": None, "fp8": "FP8", "int8": "INT8"}
AWQ = ("int4_awq", "w4a8_awq")
AWQ_BLOCK = 128
_DEFAULT_SEQ_LENGTH = 8192  # of Qwen checkpoints that do not say; used by logn attention only


def checkpoint_config(job: ConversionJob, model: ModelConfig) -> dict[str, Any]:
    """The content of config.json.

    Args:
        job: precision, split and heads.
        model: the model as converted.
    """
    tensor_parallel, pipeline_parallel = job.model.tensor_parallel, job.model.pipeline_parallel
    mapping = {"world_size": job.model.world_size, "tp_size": tensor_parallel, "pp_size": pipeline_parallel}
    config: dict[str, Any] = {
        "architecture": model.architecture,
        "dtype": job.model.dtype,
        "logits_dtype": job.logits_dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_size": model.head_size,
        "intermediate_size": model.intermediate_size,
        "hidden_act": "swiglu" if model.num_experts else model.hidden_act,
        "norm_epsilon": model.norm_epsilon,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": model.max_position_embeddings,
        "rotary_base": model.rotary_base,
        "rotary_scaling": model.rotary_scaling,
        "qk_layernorm": model.qk_layernorm,
        "attn_bias": model.attn_bias,
        "mlp_bias": model.mlp_bias,
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "mapping": mapping,
        "quantization": _quantization(job),
    }
    if model.model_type in QWEN_FAMILY:
        config |= {
            "qwen_type": model.model_type,
            "seq_length": _DEFAULT_SEQ_LENGTH,
            "use_logn_attn": False,
            "moe_intermediate_size": 0,
            "moe_shared_expert_intermediate_size": 0,
        }
    else:
        config |= {"residual_mlp": False, "tie_word_embeddings": model.tie_word_embeddings}
    if model.num_experts:
        config["moe"] = {
            "num_experts": model.num_experts,
            "top_k": model.num_experts_per_token,
            "normalization_mode": _RENORMALIZE,
        }
        mapping |= {"moe_tp_size": tensor_parallel, "moe_ep_size": 1}
    if job.heads == "medusa" and job.speculation.medusa:
        config |= {
            "architecture": "MedusaForCausalLM",
            "num_medusa_heads": job.speculation.medusa.num_heads,
            "num_medusa_layers": job.speculation.medusa.num_layers,
            "max_draft_len": job.max_draft_len,
            "model_type": model.model_type,
            "qwen_type": model.model_type if model.model_type in QWEN_FAMILY else "",
        }
    return config


def _quantization(job: ConversionJob) -> dict[str, Any]:
    """QuantConfig; it accepts no fields but its own."""
    section: dict[str, Any] = {
        "quant_algo": QUANT_ALGO[job.model.quantization],
        "kv_cache_quant_algo": KV_CACHE_QUANT_ALGO[job.model.kv_cache_dtype],
    }
    if job.model.quantization in AWQ:
        section |= {"group_size": AWQ_BLOCK, "has_zero_point": False, "pre_quant_scale": True}
    if section["quant_algo"]:
        heads = ("*medusa_heads*",) if job.heads == "medusa" else ()
        section["exclude_modules"] = [*NEVER_QUANTIZED, *heads]
    return section
