"""What LLM(...) accepts, version by version: written down from the published classes, apart from trtspec's own tables.

As in the real classes, an unknown field is an error, and so is a speculative_config without what its class requires.
"""

from __future__ import annotations

from typing import Any


def _words(text: str) -> set[str]:
    return set(text.split())


ARGUMENTS = _words(
    """
    model backend tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code tensor_parallel_size
    pipeline_parallel_size context_parallel_size moe_expert_parallel_size moe_tensor_parallel_size
    moe_cluster_parallel_size gpus_per_node dtype revision enable_attention_dp kv_cache_config enable_chunked_prefill
    guided_decoding_backend scheduler_config speculative_config max_batch_size max_input_len max_seq_len max_beam_width
    max_num_tokens gather_generation_logits enable_lora lora_config return_perf_metrics disable_overlap_scheduler
    cuda_graph_config moe_config attn_backend sampler_type stream_interval load_format allreduce_strategy print_iter_log
    enable_iter_perf_stats
    """
)
KV_CACHE = _words(
    """
    enable_block_reuse max_tokens max_attention_window sink_token_length free_gpu_memory_fraction host_cache_size
    cross_kv_cache_fraction secondary_offload_min_priority event_buffer_max_size attention_dp_events_gather_period_ms
    enable_partial_reuse copy_on_partial_reuse use_uvm max_gpu_total_bytes dtype tokens_per_block
    """
)
_OLD_GATE = {"acceptance_window", "acceptance_length_threshold"}
_NEW_GATE = {"acceptance_rate_window_size", "acceptance_rate_threshold"}
_BASE_1_2 = {"max_draft_len", "max_total_draft_tokens", "speculative_model_dir", "max_concurrency", "load_format"}
_BASE_1_3 = _BASE_1_2 | {"speculative_model", "draft_len_schedule", "allow_advanced_sampling"}
_BASE_1_4 = (_BASE_1_3 | {"use_rejection_sampling", "advanced_sampling_mode", "enable_penalty", "moe_backend"}) - {
    "speculative_model_dir"
}
BASE = {
    "1.2.1": _BASE_1_2 | _OLD_GATE,
    "1.3.0rc3": _BASE_1_3 | _OLD_GATE,
    "1.3.0": _BASE_1_3 | _NEW_GATE | {"use_rejection_sampling", "advanced_sampling_mode", "enable_penalty"},
    "1.4.0rc4": _BASE_1_4 | _NEW_GATE | {"moe_tactic", "spec_dec_variant"},
}
_NGRAM = {"max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool"}
_MTP = {"use_relaxed_acceptance_for_thinking", "relaxed_topk", "relaxed_delta", "use_mtp_vanilla"}
_MTP |= {"num_nextn_predict_layers"}
_EAGLE = {"use_dynamic_tree", "dynamic_tree_max_topK", "max_non_leaves_per_layer", "eagle3_layers_to_capture"}
# version -> decoding_type -> its own fields
SPECULATIVE = {
    "1.2.1": {"DraftTarget": set(), "Eagle": _EAGLE | {"eagle3_one_model"}, "NGram": _NGRAM, "MTP": _MTP},
    "1.3.0rc3": {"Draft_Target": set(), "Eagle3": _EAGLE | {"eagle3_one_model"}, "NGram": _NGRAM, "MTP": _MTP},
    "1.3.0": {"Draft_Target": set(), "Eagle3": _EAGLE | {"sa_config"}, "NGram": _NGRAM, "MTP": _MTP | {"sa_config"}},
    "1.4.0rc4": {"Draft_Target": set(), "Eagle3": _EAGLE | {"sa_config"}, "NGram": _NGRAM, "MTP": _MTP | {"sa_config"}},
}


def check_arguments(arguments: dict[str, Any], version: str) -> None:
    """Raise ValueError for what LLM(...) of `version` would refuse."""
    _check("LLM", arguments, ARGUMENTS)
    if not arguments.get("model"):
        raise ValueError("model is missing")
    if arguments.get("backend") not in (None, "pytorch"):
        raise ValueError(f"backend {arguments['backend']}")
    cache = arguments.get("kv_cache_config", {})
    _check("KvCacheConfig", cache, KV_CACHE)
    if not 0 < cache.get("free_gpu_memory_fraction", 0.9) <= 1:
        raise ValueError("free_gpu_memory_fraction")
    speculation = arguments.get("speculative_config")
    if speculation is not None:
        _check_speculation(dict(speculation), version)


def _check_speculation(config: dict[str, Any], version: str) -> None:
    kind = config.pop("decoding_type", None)
    if kind not in SPECULATIVE[version]:
        raise ValueError(f"decoding_type {kind} is none of {sorted(SPECULATIVE[version])}")
    _check(f"{kind} of {version}", config, BASE[version] | SPECULATIVE[version][kind])
    # MTP's own field was renamed; before that its max_draft_len is overwritten
    old_mtp = kind == "MTP" and version in ("1.2.1", "1.3.0rc3")
    drafts = config.get("num_nextn_predict_layers" if old_mtp else "max_draft_len")
    if not isinstance(drafts, int) or drafts <= 0:
        raise ValueError(f"{kind} of {version} needs a draft length")
    draft_model = config.get("speculative_model") or config.get("speculative_model_dir")
    if kind in ("DraftTarget", "Draft_Target", "Eagle", "Eagle3") and not draft_model:
        raise ValueError(f"{kind} needs a speculative model")
    if kind == "NGram" and config.get("max_matching_ngram_size", 0) <= 0:
        raise ValueError("max_matching_ngram_size")


def _check(what: str, given: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"{what}: extra fields {unknown}")
