"""What a spec asks of TensorRT-LLM's LLM API: the content of 1/model.yaml, for the version that the spec names.

Field names of the LLM API changed between 1.2 and 1.4. That is data here (`NAMES`, `FIELDS`), and no key is written
that the version does not know: the LLM API refuses to start on one. Knows the spec; reads no model and starts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trtspec.errors import TrtspecError
from trtspec.spec.marks import Key
from trtspec.spec.rules import role_key
from trtspec.spec.schema import ModelRef, Ngram, Spec

NEWEST_KNOWN = "1.4.0rc4"
DEFAULT_MAX_NUM_TOKENS = 8192  # of the LLM API, as of trtllm-build
CANCELLATION_CHECK_PERIOD_MS = 100

# Our name of a thing -> TensorRT-LLM's, from the version on that stands before it; None: there is no such thing.
# Where a name changed at a pre-release that is not known exactly, the old one stays as long as both are understood.
NAMES: dict[str, tuple[tuple[str, str | None], ...]] = {
    "draft_target": (("1.2.0rc0", "DraftTarget"), ("1.3.0rc0", "Draft_Target")),
    "eagle3": (("1.2.0rc0", "Eagle"), ("1.3.0rc0", "Eagle3")),
    "mtp": (("1.2.0rc0", "MTP"),),
    "ngram": (("1.2.0rc0", "NGram"),),
    "draft_model": (("1.2.0rc0", "speculative_model_dir"), ("1.3.0rc15", "speculative_model")),
    "draft_len": (("1.2.0rc0", "max_draft_len"),),
    "mtp_draft_len": (("1.2.0rc0", "num_nextn_predict_layers"), ("1.3.0rc15", "max_draft_len")),
    # Sampling beside greedy decoding where target and drafter are one module; on 1.4 it needs no switch.
    "sampling_switch": (("1.2.0rc0", None), ("1.3.0rc0", "allow_advanced_sampling"), ("1.4.0rc0", None)),
    "rejection_sampling": (("1.2.0rc0", None), ("1.3.0rc15", "use_rejection_sampling")),
    "max_concurrency": (("1.2.0rc0", "max_concurrency"),),
    "draft_len_schedule": (("1.2.0rc0", None), ("1.3.0rc0", "draft_len_schedule")),
    "gate_window": (("1.2.0rc0", "acceptance_window"), ("1.3.0rc27", "acceptance_rate_window_size")),
    "gate_threshold": (("1.2.0rc0", "acceptance_length_threshold"), ("1.3.0rc27", "acceptance_rate_threshold")),
}
# Drafter and target in one module, scheduled as one; the others draft between two steps of the scheduler, which then
# must not overlap them.
ONE_MODEL = frozenset({"eagle3", "mtp"})
# Decoders of one module that know only the likeliest token, whatever a request says.
_GREEDY_ONLY_BEFORE = "1.3.0rc0"
# From some pre-release of 1.3 on, a draft model is part of the target's module too.
_DRAFTS_IN_MODEL_SINCE = "1.3.0rc0"
# The loads of a draft_len_schedule are the largest of their steps; at first they were the smallest. Until when is not
# known exactly, and a schedule that is read the other way is not refused.
_SCHEDULE_TO_LARGEST_SINCE = "1.3.0rc27"

# What each part of model.yaml may hold: field, type, the first version that has it and the first that does not; `-` is
# the beginning, a missing end means that it is still there.
_COMMON = """
    max_draft_len                int
    max_total_draft_tokens       int
    speculative_model_dir        str    -          1.4.0rc0
    speculative_model            str    1.3.0rc0
    max_concurrency              int
    draft_len_schedule           dict   1.3.0rc0
    load_format                  str
    acceptance_window            int    -          1.3.0rc27
    acceptance_length_threshold  float  -          1.3.0rc27
    acceptance_rate_window_size  int    1.3.0rc27
    acceptance_rate_threshold    float  1.3.0rc27
    allow_advanced_sampling      bool   1.3.0rc0
    use_rejection_sampling       bool   1.3.0rc15
    advanced_sampling_mode       str    1.3.0rc27
    enable_penalty               bool   1.3.0rc27
    moe_backend                  str    1.3.0rc29
    moe_tactic                   str    1.4.0rc4
    spec_dec_variant             int    1.4.0rc1
"""
_EAGLE3 = """
    use_dynamic_tree             bool
    dynamic_tree_max_topK        int
    max_non_leaves_per_layer     int
    eagle3_layers_to_capture     list
    eagle_choices                list   -          1.4.0rc0
    greedy_sampling              bool   -          1.4.0rc0
    posterior_threshold          float  -          1.4.0rc0
    eagle3_one_model             bool   -          1.4.0rc0
    num_eagle_layers             int    -          1.4.0rc0
    eagle3_model_arch            str    1.3.0rc0
    sa_config                    dict   1.3.0rc15
"""
FIELDS = {
    "arguments": """
    model                        str
    backend                      str
    tokenizer                    str
    tokenizer_mode               str
    trust_remote_code            bool
    dtype                        str
    tensor_parallel_size         int
    pipeline_parallel_size       int
    context_parallel_size        int
    moe_expert_parallel_size     int
    moe_tensor_parallel_size     int
    gpus_per_node                int
    enable_attention_dp          bool
    enable_chunked_prefill       bool
    guided_decoding_backend      str
    max_batch_size               int
    max_beam_width               int
    max_input_len                int
    max_seq_len                  int
    max_num_tokens               int
    gather_generation_logits     bool
    return_perf_metrics          bool
    disable_overlap_scheduler    bool
    cuda_graph_config            dict
    moe_config                   dict
    attn_backend                 str
    sampler_type                 str
    stream_interval              int
    load_format                  str
    scheduler_config             dict
    kv_cache_config              dict
    speculative_config           dict
""",
    "kv_cache_config": """
    enable_block_reuse           bool
    enable_partial_reuse         bool
    copy_on_partial_reuse        bool
    max_tokens                   int
    max_attention_window         list
    sink_token_length            int
    free_gpu_memory_fraction     float
    max_gpu_total_bytes          int
    host_cache_size              int
    onboard_blocks               bool   -          1.4.0rc0
    dtype                        str
    tokens_per_block             int
    mamba_ssm_cache_dtype        str
    disk_cache_size              int    1.4.0rc0
    disk_cache_path              str    1.4.0rc0
""",
    "triton_config": """
    max_batch_size               int
    decoupled                    bool
    cancellation_check_period_ms int
    multimodal                   bool   1.3.0rc0
""",
    "draft_target": _COMMON,
    "eagle3": _COMMON + _EAGLE3,
    "mtp": _COMMON
    + """
    num_nextn_predict_layers     int
    use_relaxed_acceptance_for_thinking bool
    relaxed_topk                 int
    relaxed_delta                float
    use_mtp_vanilla              bool
    mtp_eagle_one_model          bool   -          1.4.0rc0
    BEGIN_THINKING_PHASE_TOKEN   int    -          1.3.0rc0
    END_THINKING_PHASE_TOKEN     int    -          1.3.0rc0
    begin_thinking_phase_token   int    1.3.0rc0
    end_thinking_phase_token     int    1.3.0rc0
    use_dynamic_tree             bool   1.3.0rc27
    dynamic_tree_max_topK        int    1.3.0rc27
    sa_config                    dict   1.3.0rc15
    draft_lm_head_dtype          str    1.4.0rc4
    draft_moe_dtype              str    1.4.0rc4
""",
    "ngram": _COMMON
    + """
    max_matching_ngram_size      int
    is_keep_all                  bool
    is_use_oldest                bool
    is_public_pool               bool
""",
}
_VERSION = re.compile(r"(\d+\.\d+(?:\.\d+)*?)(?:rc(\d+)|\.post(\d+))?")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
    "dict": dict,
    "list": list,
}


@dataclass(frozen=True)
class Refusal:
    """A setting that the LLM API cannot honour: the key to blame, why, and what to write instead."""

    key: Key
    reason: str
    fix: str


def model_yaml(spec: Spec, *, model_path: str | None = None, draft_path: str | None = None) -> dict[str, Any]:
    """The content of 1/model.yaml: the arguments of `LLM(...)`, and `triton_config`, which is the Triton model's.

    Args:
        spec: a spec of track llmapi.
        model_path: where the server sees the target; by default in the mount point, where `trtspec build` lays it.
        draft_path: the same for the draft model, the truncated target of early_exit, or the EAGLE-3 heads.

    Raises:
        TrtspecError: settings that the LLM API of this version cannot honour, one line for each.
    """
    if refused := list(refusals(spec)):
        raise TrtspecError("\n".join(str(TrtspecError(r.reason, where=spec.where(r.key), fix=r.fix)) for r in refused))
    engine, target, paths = spec.engine, spec.target, model_paths(spec)
    kind = drafting(spec)
    content: dict[str, Any] = {
        "model": model_path or paths["target"],
        "backend": "pytorch",
        "dtype": target.dtype,
        "tensor_parallel_size": target.tensor_parallel,
        "pipeline_parallel_size": target.pipeline_parallel,
        "max_batch_size": engine.max_batch_size,
        "max_input_len": engine.max_input_len,
        "max_seq_len": spec.max_seq_len("target"),
        "max_num_tokens": engine.max_num_tokens or max(DEFAULT_MAX_NUM_TOKENS, _least_num_tokens(spec)),
        "enable_chunked_prefill": spec.serving.chunked_context,
        "return_perf_metrics": True,  # acceptance figures come with them
        "kv_cache_config": _kv_cache(spec),
    }
    if any(ref.trust_remote_code for ref in spec.models.values()):
        content["trust_remote_code"] = True
    if kind is not None:
        if kind not in ONE_MODEL:
            content["disable_overlap_scheduler"] = True
        content["speculative_config"] = _speculation(spec, kind, draft_path or paths.get("draft"))
    content["triton_config"] = {
        "max_batch_size": 0,
        "decoupled": True,
        "cancellation_check_period_ms": CANCELLATION_CHECK_PERIOD_MS,
    }
    if unknown := unknown_fields(content, engine.version):
        raise TrtspecError("; ".join(unknown), where=spec.where(("engine", "version")))
    return content


def model_paths(spec: Spec) -> dict[str, str]:
    """Where the server sees what it loads: `target`, and `draft` for a draft model, a truncated target, or heads."""
    mount = spec.serving.mount_point.rstrip("/")
    paths = {role: f"{mount}/{role}" for role in spec.models}
    if spec.speculation.method == "eagle":
        paths["draft"] = f"{mount}/heads"
    return paths


def drafting(spec: Spec) -> str | None:
    """Who drafts inside the LLM API, as `NAMES` calls it; None for plain decoding."""
    return {
        "draft_target": "draft_target",
        "early_exit": "draft_target",
        "ngram": "ngram",
        "mtp": "mtp",
        "eagle": "eagle3",
    }.get(spec.speculation.method)


def greedy_only(spec: Spec) -> bool:
    """Whether this version's decoder ignores temperature, top-k and top-p for this method."""
    return drafting(spec) in ONE_MODEL and _order(spec.engine.version) < _order(_GREEDY_ONLY_BEFORE)


def penalties(spec: Spec) -> bool:
    """Whether frequency and presence penalties count where drafts are verified in the model itself."""
    kind, version = drafting(spec), spec.engine.version
    return kind not in ONE_MODEL and not (kind == "draft_target" and _order(version) >= _order(_DRAFTS_IN_MODEL_SINCE))


def is_version(text: str) -> bool:
    """Whether `text` is a version of TensorRT-LLM, known or not."""
    return _VERSION.fullmatch(text) is not None


def name_in(version: str, thing: str) -> str | None:
    """TensorRT-LLM's name of `thing`, a key of `NAMES`, in `version`; None where it has none.

    A version newer than any known one has the newest known name.
    """
    found = None
    for since, name in NAMES[thing]:
        if _order(since) <= _order(version):
            found = name
    return found


def fields_in(version: str, part: str) -> dict[str, str]:
    """Field -> type of a part of model.yaml, a key of `FIELDS`, in `version`."""
    fields = {}
    for row in filter(str.strip, FIELDS[part].splitlines()):
        name, kind, since, before = (*row.split(), "-", "-")[:4]
        begun = since == "-" or _order(since) <= _order(version)
        ended = before != "-" and _order(before) <= _order(version)
        if begun and not ended:
            fields[name] = kind
    return fields


def unknown_fields(content: Mapping[str, Any], version: str) -> list[str]:
    """Fields of a model.yaml that `version` does not have, or that hold another type, one clause each."""
    parts: list[tuple[str, str, Mapping[str, Any]]] = [
        ("", "arguments", {key: value for key, value in content.items() if key != "triton_config"}),
        ("kv_cache_config.", "kv_cache_config", content.get("kv_cache_config", {})),
        ("triton_config.", "triton_config", content.get("triton_config", {})),
    ]
    faults = []
    speculation = dict(content.get("speculative_config", {}))
    if speculation:
        decoding_type = speculation.pop("decoding_type", None)
        kinds = [kind for kind in ("draft_target", "eagle3", "mtp", "ngram") if name_in(version, kind) == decoding_type]
        if kinds:
            parts.append(("speculative_config.", kinds[0], speculation))
        else:
            faults.append(f"TensorRT-LLM {version} has no decoding_type {decoding_type}")
    for prefix, part, values in parts:
        known = fields_in(version, part)
        for key, value in values.items():
            if key not in known:
                faults.append(f"TensorRT-LLM {version} has no field {prefix}{key}")
            elif not _is_a(value, known[key]):
                faults.append(f"{prefix}{key} is {value!r}, expected {known[key]}")
    return faults


def remarks(spec: Spec) -> list[str]:
    """What is legal but worth knowing about this version, one sentence each, beginning with file, line and key."""
    where = spec.where(("engine", "version"))
    notes = []
    if _order(spec.engine.version) > _order(NEWEST_KNOWN):
        notes.append(
            f"{where}: the LLM API of TensorRT-LLM {spec.engine.version} is not known; "
            f"model.yaml has the field names of {NEWEST_KNOWN}"
        )
    if greedy_only(spec):
        notes.append(
            f"{where}: TensorRT-LLM {spec.engine.version} decodes greedily with method {spec.speculation.method}; "
            "requests that sample are refused"
        )
    return notes


def refusals(spec: Spec) -> Iterator[Refusal]:
    """Every setting that the LLM API cannot honour, in the order of the sections."""
    yield from _model_refusals(spec)
    yield from _speculation_refusals(spec)
    yield from _draft_length_refusals(spec)
    yield from _engine_refusals(spec)
    yield from _serving_refusals(spec)


def _model_refusals(spec: Spec) -> Iterator[Refusal]:
    target = spec.target
    for role, ref in spec.models.items():
        if role != "target" and ref is target:
            continue  # an early exit, which has no section of its own
        if role != "target":
            yield from _draft_refusals(role, ref, target)
        if ref.quantization == "int8_sq":
            yield Refusal(
                (*role_key(role), "quantization"),
                "the PyTorch backend has no int8 SmoothQuant",
                "use a checkpoint in fp8 (Hopper) or int4_awq",
            )
        if ref.kv_cache_dtype == "int8":
            yield Refusal(
                (*role_key(role), "kv_cache_dtype"), "the PyTorch backend has no int8 KV cache", "use auto, or fp8"
            )
    if spec.speculation.method == "early_exit" and target.quantization != "none":
        yield Refusal(
            ("target", "quantization"),
            f"the draft of early_exit is cut out of the target's weights, and {target.quantization} ones cannot be cut",
            "use quantization: none, or method ngram",
        )
    if target.world_size > spec.hardware.num_gpus:
        yield Refusal(
            ("hardware", "num_nodes"),
            f"the model needs {target.world_size} GPUs and one node has {spec.hardware.num_gpus}; the Triton model of "
            "the LLM API runs within one node",
            "lower target.tensor_parallel or target.pipeline_parallel, or use larger nodes",
        )


# One LLM(...) loads target and draft: these settings are one for both.
SHARED_WITH_DRAFT: tuple[str, ...] = ("dtype", "kv_cache_dtype", "tensor_parallel", "pipeline_parallel")


def _draft_refusals(role: str, ref: ModelRef, target: ModelRef) -> Iterator[Refusal]:
    for name in SHARED_WITH_DRAFT:
        ours, theirs = getattr(ref, name), getattr(target, name)
        if ours != theirs:
            yield Refusal(
                (*role_key(role), name),
                f"{ours} differs from the target's {theirs}; the LLM API loads both models with one setting",
                f"write {theirs}",
            )
    if ref.max_seq_len is not None and ref.max_seq_len != target.max_seq_len:
        yield Refusal(
            (*role_key(role), "max_seq_len"), "the LLM API has one max_seq_len for both models", "remove this key"
        )


def _speculation_refusals(spec: Spec) -> Iterator[Refusal]:
    speculation, version = spec.speculation, spec.engine.version
    method = speculation.method
    if method != "none" and drafting(spec) is None:
        yield Refusal(
            ("speculation", "method"),
            f"the LLM API has no method {method}",
            "use draft_target, early_exit, ngram, mtp or eagle (version 3)",
        )
        return
    if method == "eagle" and speculation.eagle:
        if speculation.eagle.version != 3:
            yield Refusal(("speculation", "eagle", "version"), "the LLM API takes EAGLE-3 heads only", "use version: 3")
        if speculation.eagle.choices:
            yield Refusal(
                ("speculation", "eagle", "choices"), "the LLM API drafts a chain, not a given tree", "remove this key"
            )
    if method == "ngram" and speculation.ngram and speculation.ngram.window:
        yield Refusal(
            ("speculation", "ngram", "window"), "the n-gram pool of the LLM API has no window", "remove this key"
        )
    if method != "none" and speculation.acceptance == "logits" and not name_in(version, "rejection_sampling"):
        yield Refusal(
            ("speculation", "acceptance"),
            f"TensorRT-LLM {version} accepts drafts by equality with the target's own sample only",
            "use acceptance: auto, or engine.version 1.3.0",
        )
    if method != "none" and spec.max_draft_len != speculation.num_draft_tokens:
        yield Refusal(
            ("engine", "max_draft_len"),
            f"the LLM API verifies what it drafts: {speculation.num_draft_tokens} tokens",
            "remove this key",
        )


def _draft_length_refusals(spec: Spec) -> Iterator[Refusal]:
    chosen, version, most = spec.serving.draft_length, spec.engine.version, spec.speculation.num_draft_tokens
    if chosen is None or drafting(spec) is None:
        return
    if chosen.policy == "adaptive":
        yield Refusal(
            ("serving", "draft_length", "policy"),
            "the LLM API does not adapt the draft length to what is accepted",
            "use policy: schedule, or fixed",
        )
    if chosen.policy != "schedule":
        return
    key: Key = ("serving", "draft_length", "schedule")
    smallest, length = next(iter(chosen.schedule.items()))
    if length != most:
        fix = f"write {smallest}: {most}"
        yield Refusal(key, f"{length} draft tokens at load {smallest}; the LLM API begins with all {most}", fix)
    elif _order(version) < _order(_SCHEDULE_TO_LARGEST_SINCE) and not _switches_off(spec):
        yield Refusal(
            key,
            f"the LLM API of TensorRT-LLM {version} drafts {most} tokens or none",
            f"write only {{N: {most}}}, or use engine.version 1.3.0",
        )


def _switches_off(spec: Spec) -> int | None:
    """The load up to which all tokens are drafted, when the schedule drafts none beyond; None when it goes by steps."""
    schedule = spec.serving.draft_length.schedule if spec.serving.draft_length else {}
    if not set(schedule.values()) <= {0, spec.speculation.num_draft_tokens}:
        return None
    lengths = list(schedule.values())
    if lengths != sorted(lengths, reverse=True):
        return None
    return max((load for load, length in schedule.items() if length), default=None)


def _engine_refusals(spec: Spec) -> Iterator[Refusal]:
    engine = spec.engine
    for key, wrong, reason in (
        ("build_options", bool(engine.build_options), "nothing is compiled on this track"),
        ("logits_dtype", engine.logits_dtype != "float32", "the PyTorch backend has no setting for it"),
        ("paged_context_fmha", not engine.paged_context_fmha, "the PyTorch backend always attends over paged context"),
    ):
        if wrong:
            yield Refusal(("engine", key), reason, "remove this key")
    least = _least_num_tokens(spec)
    if engine.max_num_tokens is not None and engine.max_num_tokens < least:
        yield Refusal(
            ("engine", "max_num_tokens"),
            f"{engine.max_num_tokens} is less than the {least} tokens that one forward pass must be able to take",
            f"use {least} or more, or serving.chunked_context: true",
        )


def _serving_refusals(spec: Spec) -> Iterator[Refusal]:
    serving = spec.serving
    for key, wrong, reason in (
        ("orchestrator", serving.orchestrator, "it is for the C++ backend; the LLM API starts its own processes"),
        ("spawn_processes", not serving.spawn_processes, "the LLM API starts its own processes"),
        ("fast_logits", serving.fast_logits, "draft and target are in one process already"),
        ("engine_parameters", bool(serving.engine_parameters), "they are parameters of the C++ backend"),
    ):
        if wrong:
            yield Refusal(("serving", key), reason, "remove this key")
    asked = serving.default_num_draft_tokens
    if asked is not None and asked != spec.speculation.num_draft_tokens:
        yield Refusal(
            ("serving", "default_num_draft_tokens"),
            "the LLM API drafts the same number of tokens for every request",
            "remove this key, or set speculation.num_draft_tokens",
        )
    for section in ("kv_cache_free_gpu_mem_fraction", "kv_cache_bytes", "gpu_device_ids"):
        values = getattr(serving, section)
        for role in ("draft", "middle"):
            if getattr(values, role) is not None and getattr(values, role) != values.target:
                yield Refusal(
                    ("serving", section, role),
                    "target and draft share the GPUs and the memory of one LLM",
                    "remove this key; the target's counts for both",
                )


def _least_num_tokens(spec: Spec) -> int:
    """Tokens that one forward pass takes at least: a whole prompt, or each request's last token and its drafts."""
    verified = spec.engine.max_batch_size * (1 + spec.speculation.num_draft_tokens)
    return verified if spec.serving.chunked_context else max(verified, spec.engine.max_input_len)


def _kv_cache(spec: Spec) -> dict[str, Any]:
    fraction = spec.serving.kv_cache_free_gpu_mem_fraction.target
    config: dict[str, Any] = {
        "enable_block_reuse": spec.engine.kv_cache_reuse,
        "free_gpu_memory_fraction": 0.9 if fraction is None else fraction,
        "tokens_per_block": spec.engine.tokens_per_block,
        "dtype": spec.target.kv_cache_dtype,
    }
    if spec.serving.kv_cache_bytes.target is not None:
        config["max_gpu_total_bytes"] = spec.serving.kv_cache_bytes.target
    return config


def _speculation(spec: Spec, kind: str, draft_path: str | None) -> dict[str, Any]:
    """The speculative_config section."""
    speculation, version = spec.speculation, spec.engine.version

    def name(thing: str) -> str:
        found = name_in(version, thing)
        assert found is not None, thing
        return found

    draft_len = "mtp_draft_len" if kind == "mtp" else "draft_len"
    config: dict[str, Any] = {"decoding_type": name(kind), name(draft_len): speculation.num_draft_tokens}
    if kind in ("draft_target", "eagle3"):
        config[name("draft_model")] = draft_path
    if kind == "ngram":
        config |= {
            "max_matching_ngram_size": (speculation.ngram or Ngram()).max_ngram,
            "is_keep_all": True,
            "is_use_oldest": False,  # what was written last is the likeliest to go on the same way
            "is_public_pool": False,  # a request drafts from its own text, not from that of other clients
        }
    switch = name_in(version, "sampling_switch")
    if switch is not None and kind in ONE_MODEL:
        config[switch] = True
    if speculation.acceptance == "logits":
        config[name("rejection_sampling")] = True
    if spec.serving.draft_length and spec.serving.draft_length.policy == "schedule":
        if _order(version) >= _order(_SCHEDULE_TO_LARGEST_SINCE):
            schedule = spec.serving.draft_length.schedule
            last = max(load for load, length in schedule.items() if length)  # beyond it nothing is drafted anyway
            config[name("draft_len_schedule")] = {load: schedule[load] for load in schedule if load <= last}
        else:
            config[name("max_concurrency")] = _switches_off(spec)
    return config


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind != "bool":
        return False
    return isinstance(value, _TYPES[kind])


def _order(version: str) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Sorts versions: 1.3.0rc2 < 1.3.0rc15 < 1.3.0 < 1.3.0.post1 < 1.3.1.

    Raises:
        ValueError: text that is no version.
    """
    match = _VERSION.fullmatch(version)
    if not match:
        raise ValueError(f"{version!r} is no version")
    numbers = [int(part) for part in match[1].split(".")]
    release = tuple(numbers + [0] * (3 - len(numbers)))
    if match[2] is not None:
        return release, (0, int(match[2]))
    return release, (1, int(match[3] or 0))
