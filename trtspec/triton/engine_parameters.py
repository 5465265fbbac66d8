"""What the config.pbtxt of an engine model tells the C++ backend, parameter by parameter, each with its reason.

Knows the spec and the backend's parameters; does not know tensors, nor how the other models of the repository work.
"""

from __future__ import annotations

from collections.abc import Iterable

from trtspec.errors import TrtspecError
from trtspec.spec.schema import Choices, Lookahead, Spec
from trtspec.triton import contract
from trtspec.triton.pbtxt import flag
from trtspec.trtllm.placement import device_ids, participants

# Decoding modes of methods whose loop runs inside the target's engine. A target that is handed drafts, and a plain one,
# decode in the default mode: there is no value for them.
DECODING_MODES = {"medusa": "medusa", "eagle": "eagle", "redrafter": "redrafter", "lookahead": "lookahead"}
# Defaults that serving.engine_parameters may change.
_DEFAULTS = {
    "batch_scheduler_policy": "guaranteed_no_evict",  # an evicted request would compute its whole text again
    "cancellation_check_period_ms": "100",
    "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",  # where the container has it
    "normalize_log_probs": "true",
}
# Parameters that are no user's choice here, and what to change instead.
_OURS = {
    "FORCE_CPU_ONLY_INPUT_TENSORS": "",
    "decoding_mode": "speculation.method",
    "eagle_choices": "speculation.eagle.choices",
    "enable_chunked_context": "serving.chunked_context",
    "enable_kv_cache_reuse": "engine.kv_cache_reuse",
    "exclude_input_in_output": "serving.exclude_input_in_output",  # of the pipeline; engine models always answer whole
    "gpt_model_path": "serving.mount_point",
    "gpt_model_type": "",
    "gpu_device_ids": "serving.gpu_device_ids",
    "kv_cache_free_gpu_mem_fraction": "serving.kv_cache_free_gpu_mem_fraction",
    "lookahead_ngram_size": "speculation.lookahead.ngram_size",
    "lookahead_verification_set_size": "speculation.lookahead.verification_set_size",
    "lookahead_window_size": "speculation.lookahead.window_size",
    "max_beam_width": "",
    "medusa_choices": "speculation.medusa.choices",
    "num_nodes": "hardware.num_nodes",
    "participant_ids": "serving.spawn_processes",
    "speculative_decoding_fast_logits": "serving.fast_logits",
    "trtspec_kv_cache_bytes": "serving.kv_cache_bytes",
}
# Parameters that stay unset unless serving.engine_parameters gives them, and why that is right.
LEFT_UNSET = {
    "cross_kv_cache_fraction": "decoders only",
    "cuda_graph_cache_size": "belongs to cuda_graph_mode",
    "cuda_graph_mode": "takes memory; whether it pays is to be measured",
    "enable_context_fmha_fp32_acc": "the engine decides when it is built",
    "encoder_model_path": "decoders only",
    "gpu_weights_percent": "engines are built without weight streaming",
    "guided_decoding_backend": "the pipeline refuses guided decoding",
    "iter_stats_max_iterations": "the executor's default",
    "kv_cache_host_memory_bytes": "no cache on the host: drafts would wait for it",
    "kv_cache_onboard_blocks": "belongs to the cache on the host",
    "lora_cache_gpu_memory_fraction": "engines have no LoRA weights",
    "lora_cache_host_memory_bytes": "engines have no LoRA weights",
    "lora_cache_max_adapter_size": "engines have no LoRA weights",
    "lora_cache_optimal_adapter_size": "engines have no LoRA weights",
    "lora_prefetch_dir": "engines have no LoRA weights",
    "max_attention_window_size": "the whole sequence",
    "max_tokens_in_paged_kv_cache": "the fraction decides; with both, the smaller would",
    "multi_block_mode": "the backend's default, on",
    "recv_poll_period_ms": "the backend's default, a busy loop, answers soonest",
    "request_stats_max_iterations": "the executor's default",
    "sink_token_length": "belongs to a window of attention",
    "stats_check_period_ms": "the backend's default",
    "tokenizer_dir": "read by the Python backend only",
    "xgrammar_tokenizer_info_path": "the pipeline refuses guided decoding",
}


def engine_parameters(
    spec: Spec, role: str, directory: str, *, fraction: float | None, kv_cache_bytes: int | None
) -> dict[str, str]:
    """The parameters of the engine model of `role`.

    Args:
        spec: what is served.
        role: a key of `spec.models`.
        directory: name of the engine's directory under the mount point.
        fraction: of free GPU memory for its KV cache; None: the backend's default.
        kv_cache_bytes: size of its KV cache in the torch runtime; None: that runtime's default.
    """
    serving = spec.serving
    parameters = {
        **_DEFAULTS,
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "gpt_model_path": f"{serving.mount_point.rstrip('/')}/{directory}",
        # drafts are verified by in-flight batching only, and without beams
        "gpt_model_type": "inflight_fused_batching",
        "max_beam_width": "1",
        # every cycle sends the whole context again: without reuse it would be computed again too
        "enable_kv_cache_reuse": flag(spec.engine.kv_cache_reuse),
        "enable_chunked_context": flag(serving.chunked_context),
        # the pipeline reads the prompt back to check the answer
        "exclude_input_in_output": "false",
        "num_nodes": str(spec.hardware.num_nodes),
        "speculative_decoding_fast_logits": flag(serving.fast_logits),
    }
    if spec.hardware.sm and spec.hardware.num_nodes == 1:  # on several nodes the launcher hands GPUs to ranks
        parameters["gpu_device_ids"] = _joined(device_ids(spec)[role])
    if serving.orchestrator and not serving.spawn_processes:
        parameters["participant_ids"] = _joined(participants(spec)[role])
    if fraction is not None:
        parameters["kv_cache_free_gpu_mem_fraction"] = f"{fraction:.6f}".rstrip("0").rstrip(".")
    if spec.engine.runtime != "torch":  # what was planned is a cache of the GPU's type; the stand-in computes in others
        kv_cache_bytes = serving.kv_cache_bytes.of(role)
    if kv_cache_bytes is not None:
        parameters["trtspec_kv_cache_bytes"] = str(kv_cache_bytes)
    return parameters | _decoding(spec) | serving.engine_parameters


def check_engine_parameters(spec: Spec) -> None:
    """Refuse entries of serving.engine_parameters that the backend does not know or that other keys decide, and what
    the pipeline cannot work with.

    Raises:
        TrtspecError: the first wrong key.
    """
    if spec.serving.fast_logits:
        raise TrtspecError(
            "the pipeline takes the end ids out of the draft's logits, and with fast logits it does not see them",
            where=spec.where(("serving", "fast_logits")),
            fix="remove this key",
        )
    for name, value in spec.serving.engine_parameters.items():
        where = spec.where(("serving", "engine_parameters", name))
        if name in _OURS:
            instead = f"set {_OURS[name]} instead" if _OURS[name] else "remove it"
            raise TrtspecError("trtspec sets this parameter itself", where=where, fix=instead)
        if name not in contract.ENGINE_PARAMETERS:
            known = sorted(contract.ENGINE_PARAMETERS.keys() - _OURS)
            raise TrtspecError(
                "no parameter of the C++ backend's models", where=where, fix=contract.did_you_mean(name, known)
            )
        if words := contract.wrong_value(name, value):
            raise TrtspecError(f"{value!r} is no value for it", where=where, expected=words)


def _decoding(spec: Spec) -> dict[str, str]:
    """How the engine decodes, where the loop is inside it; such methods have one engine, the target's."""
    speculation = spec.speculation
    if speculation.method not in DECODING_MODES:
        return {}
    parameters = {"decoding_mode": DECODING_MODES[speculation.method]}
    if speculation.method == "lookahead":
        sizes = speculation.lookahead or Lookahead()
        # all three or none: the backend has no defaults for them
        parameters |= {
            "lookahead_window_size": str(sizes.window_size),
            "lookahead_ngram_size": str(sizes.ngram_size),
            "lookahead_verification_set_size": str(sizes.verification_set_size),
        }
    heads = {"medusa": speculation.medusa, "eagle": speculation.eagle}.get(speculation.method)
    if heads is not None and heads.choices:  # unset is the runtime's own tree of 63 nodes
        parameters[f"{speculation.method}_choices"] = tree_text(heads.choices)
    return parameters


def tree_text(choices: Choices) -> str:
    """A token tree in the backend's syntax: `{0}, {1}, {0, 0}`."""
    return ", ".join(f"{{{', '.join(map(str, path))}}}" for path in choices)


def _joined(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
