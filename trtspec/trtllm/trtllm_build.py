"""The options of `trtllm-build` 1.2.1 as data: types, choices, defaults, and which of them a spec may set itself.

Source: tensorrt_llm/commands/build.py and plugin/plugin.py of the 1.2 releases. Knows which values exclude each other;
does not know which values an engine needs (`trtspec.trtllm.compiler`), nor how the tool is run.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from trtspec.errors import TrtspecError

Value = str | int | bool


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        kind: `text`, `path`, `integer`, `flag` (given or not) or `words` (several values).
        default: what the tool takes when it is left out; None: it works something out.
        choices: the only values that are allowed; empty: any.
        owner: how a spec sets it instead of `engine.build_options`; empty: there.
    """

    kind: str
    default: Value | None = None
    choices: tuple[str, ...] = ()
    owner: str = ""


_SWITCH = ("enable", "disable")
_FP8 = ("fp8", "disable")
_TYPES = ("auto", "float16", "float32", "bfloat16", "int32", "disable")
_GEMM_TYPES = ("auto", "float16", "float32", "bfloat16", "int32", "fp8", "nvfp4", "disable")
_LEVELS = ("internal_error", "error", "warning", "info", "verbose")
_ATTENTION = ("qkv", "q", "k", "v", "dense")
_LORA_MODULES = (
    *(f"attn_{part}" for part in _ATTENTION),
    *(f"cross_attn_{part}" for part in _ATTENTION),
    *(f"{block}_{part}" for block in ("mlp", "moe") for part in ("h_to_4h", "4h_to_h", "gate", "router")),
    "mlp_gate_up",
)
_OUTPUT = "output.engines decides where engines are written"
_CHECKPOINT = "the build makes the checkpoint from the model that the spec names"
_SIZES = "the sizes are keys of the section engine"
_PAGED = "engines here always have a paged KV cache"

OPTIONS = {
    # what is compiled, and where to
    "checkpoint_dir": Option("path", owner=_CHECKPOINT),
    "model_config": Option("path", owner=_CHECKPOINT),
    "build_config": Option("path", owner=_SIZES),
    "model_cls_file": Option("path"),
    "model_cls_name": Option("text"),
    "output_dir": Option("path", "engine_outputs", owner=_OUTPUT),
    # sizes
    "max_batch_size": Option("integer", 2048, owner="set engine.max_batch_size"),
    "max_input_len": Option("integer", 1024, owner="set engine.max_input_len"),
    "max_seq_len": Option("integer", owner="set engine.max_seq_len"),
    "max_beam_width": Option("integer", 1, owner="engines here decode one beam"),
    "max_num_tokens": Option("integer", 8192, owner="set engine.max_num_tokens"),
    "opt_num_tokens": Option("integer"),
    "max_encoder_input_len": Option("integer", 1024),
    "max_prompt_embedding_table_size": Option("integer", 0),
    # KV cache
    "kv_cache_type": Option("text", "paged", ("continuous", "paged", "disabled"), owner=_PAGED),
    "paged_kv_cache": Option("text", owner=_PAGED),
    # how TensorRT builds
    "input_timing_cache": Option("path"),
    "output_timing_cache": Option("path", "model.cache", owner="the timing cache is kept beside the engine"),
    "profiling_verbosity": Option("text", "layer_names_only", ("layer_names_only", "detailed", "none")),
    "strip_plan": Option("flag", False, owner="an engine without its weights cannot be served"),
    "weight_sparsity": Option("flag", False),
    "weight_streaming": Option("flag", False),
    "fast_build": Option("flag", False),
    "workers": Option("integer", 1, owner="set by tensor_parallel and pipeline_parallel of the model"),
    "log_level": Option("text", "info", _LEVELS),
    "enable_debug_output": Option("flag", False),
    "visualize_network": Option("path"),
    "dry_run": Option("flag", False, owner="use trtspec build --dry-run"),
    "monitor_memory": Option("flag", False),
    # logits
    "logits_dtype": Option("text", None, ("float16", "float32"), owner="set engine.logits_dtype"),
    "gather_context_logits": Option("flag", False),
    "gather_generation_logits": Option("flag", False, owner="set engine.gather_generation_logits"),
    "gather_all_token_logits": Option("flag", False),
    # LoRA
    "lora_dir": Option("words"),
    "lora_ckpt_source": Option("text", "hf", ("hf", "nemo")),
    "lora_target_modules": Option("words", None, _LORA_MODULES),
    "max_lora_rank": Option("integer", 64),
    # speculation
    "speculative_decoding_mode": Option(
        "text",
        None,
        ("draft_tokens_external", "lookahead_decoding", "medusa", "explicit_draft_tokens", "eagle"),
        owner="set speculation.method",
    ),
    "max_draft_len": Option("integer", 0, owner="set engine.max_draft_len"),
    # plugins
    "bert_attention_plugin": Option("text", "auto", _TYPES),
    "gpt_attention_plugin": Option("text", "auto", _TYPES),
    "gemm_plugin": Option("text", None, _GEMM_TYPES),
    "gemm_swiglu_plugin": Option("text", "disable", _FP8),
    "fp8_rowwise_gemm_plugin": Option("text", "disable", _TYPES),
    "nccl_plugin": Option("text", "auto", _TYPES),
    "lora_plugin": Option("text", "disable", _TYPES),
    "dora_plugin": Option("text", "disable", _SWITCH),
    "moe_plugin": Option("text", "auto", _TYPES),
    "mamba_conv1d_plugin": Option("text", "auto", _TYPES),
    "low_latency_gemm_plugin": Option("text", "disable", _FP8),
    "low_latency_gemm_swiglu_plugin": Option("text", "disable", _FP8),
    "gemm_allreduce_plugin": Option("text", "disable", ("float16", "bfloat16", "disable")),
    # features
    "context_fmha": Option("text", "enable", _SWITCH),
    "bert_context_fmha_fp32_acc": Option("text", "disable", _SWITCH),
    "remove_input_padding": Option("text", "enable", _SWITCH, owner="in-flight batching needs packed input"),
    "tokens_per_block": Option("integer", 32, owner="set engine.tokens_per_block"),
    "use_paged_context_fmha": Option("text", "enable", _SWITCH, owner="set engine.paged_context_fmha"),
    "use_fp8_context_fmha": Option("text", "enable", _SWITCH),
    "fuse_fp4_quant": Option("text", "disable", _SWITCH),
    "multiple_profiles": Option("text", "disable", _SWITCH),
    "paged_state": Option("text", "enable", _SWITCH),
    "streamingllm": Option("text", "disable", _SWITCH),
    "norm_quant_fusion": Option("text", "disable", _SWITCH),
    "reduce_fusion": Option("text", "disable", _SWITCH),
    "user_buffer": Option("text", "disable", _SWITCH),
    "use_fused_mlp": Option("text", "enable", _SWITCH),
    "pp_reduce_scatter": Option("text", "disable", _SWITCH),
}


def words(options: Mapping[str, Value]) -> list[str]:
    """The options as words of a command line; a flag that is false is left out."""
    line: list[str] = []
    for name, value in options.items():
        kind = OPTIONS[name].kind
        if kind == "flag":
            line += [f"--{name}"] if value else []
        else:
            line += [f"--{name}", *(shlex.split(str(value)) if kind == "words" else [str(value)])]
    return line


def check_build_options(
    given: Mapping[str, Value],
    *,
    max_draft_len: int,
    world_size: int,
    quantization: str,
    paged_context_fmha: bool,
    where: Callable[[str], str] = "engine.build_options.{}".format,
) -> None:
    """Refuse options that do not exist, that the build sets itself, or that do not go with the engine.

    Args:
        given: `engine.build_options` of a spec.
        max_draft_len: draft tokens that the engine verifies in one pass.
        world_size: GPUs that the engine runs on.
        quantization: of the model, as the spec names it.
        paged_context_fmha: whether the engine is to have attention over paged context.
        where: place of an option, for messages.

    Raises:
        TrtspecError: every fault, one a line.
    """
    faults = [fault for name, value in given.items() if (fault := _fault(name, value, where(name)))]
    if not faults:
        engine = _Engine(max_draft_len, world_size, quantization, paged_context_fmha)
        faults = [TrtspecError(problem, where=where(name), fix=fix) for name, problem, fix in _conflicts(given, engine)]
    if faults:
        raise TrtspecError("\n".join(map(str, faults))) if len(faults) > 1 else faults[0]


@dataclass(frozen=True)
class _Engine:
    max_draft_len: int
    world_size: int
    quantization: str
    paged_context_fmha: bool


def _fault(name: str, value: Value, where: str) -> TrtspecError | None:
    """What is wrong with one option by itself."""
    option = OPTIONS.get(name)
    if option is None:
        plain = name.lstrip("-").replace("-", "_")
        close = get_close_matches(plain, OPTIONS, n=1)
        fix = f"did you mean {close[0]}?" if close else "see trtllm-build --help"
        return TrtspecError("trtllm-build has no such option", where=where, fix=fix)
    if option.owner:
        return TrtspecError("is set by trtspec", where=where, fix=f"leave it out: {option.owner}")
    expected = _expected(option, value)
    return TrtspecError(f"{value!r} does not fit", where=where, expected=expected) if expected else None


def _expected(option: Option, value: Value) -> str | None:
    """What a value of this option looks like, None when `value` is one."""
    choices = " or ".join(option.choices) if len(option.choices) < 3 else f"one of {', '.join(option.choices)}"
    if option.kind == "flag":
        return None if isinstance(value, bool) else "true or false"
    if option.kind == "integer":
        return None if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else "an integer"
    if option.kind == "path":
        # The tool may run in another directory than the one that holds the spec.
        return None if isinstance(value, str) and Path(value).is_absolute() else "an absolute path"
    parts = str(value).split() if option.kind == "words" else [value]
    if option.choices and not set(parts) <= set(option.choices):
        return choices
    return None if isinstance(value, str) and value else "text"


def _conflicts(given: Mapping[str, Value], engine: _Engine) -> Iterator[tuple[str, str, str]]:
    """Options that the tool would refuse or quietly ignore for this engine: name, problem, way out."""

    def on(name: str) -> bool:
        return given.get(name, OPTIONS[name].default) not in ("disable", False, None)

    for name in ("gather_context_logits", "gather_all_token_logits"):
        if on(name) and engine.max_draft_len:
            yield name, f"does not go with max_draft_len {engine.max_draft_len}", "leave it out"
    if on("multiple_profiles") and "opt_num_tokens" in given:
        yield "opt_num_tokens", "does not go with multiple_profiles: enable", "leave one of them out"
    if on("streamingllm"):
        yield "streamingllm", "TensorRT-LLM no longer supports it", "leave it out"
    if not on("gpt_attention_plugin"):
        yield "gpt_attention_plugin", "a paged KV cache needs it", "set auto or leave it out"
    if not on("context_fmha") and engine.paged_context_fmha:
        fix = "leave it out, or set engine.paged_context_fmha and engine.kv_cache_reuse to false"
        yield "context_fmha", "attention over paged context is off without it", fix
    if on("reduce_fusion") and engine.world_size == 1:
        yield "reduce_fusion", "is for engines on more than one GPU", "leave it out"
    if on("user_buffer") and not on("reduce_fusion"):
        yield "user_buffer", "works with reduce_fusion only", "add reduce_fusion: enable"
    if on("norm_quant_fusion"):
        yield "norm_quant_fusion", f"is for NVFP4 weights, not {engine.quantization}", "leave it out"
    for name in ("gemm_plugin", "gemm_swiglu_plugin", "low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin"):
        if given.get(name) == "fp8" and engine.quantization != "fp8":
            yield name, f"fp8 is for fp8 weights, not {engine.quantization}", "leave it out, or set quantization: fp8"
    for name in ("lora_dir", "lora_target_modules"):
        if name in given and not on("lora_plugin"):
            yield name, "has no effect without lora_plugin", "add lora_plugin: auto"
    for name, other in (("model_cls_file", "model_cls_name"), ("model_cls_name", "model_cls_file")):
        if name in given and other not in given:
            yield name, f"needs {other} too", f"add {other}"
