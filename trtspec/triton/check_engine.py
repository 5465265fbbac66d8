"""What the config of an engine model asks of its engine, and whether the engine can do it.

Knows the parameters of the C++ backend and what an engine's config.json says. Does not know the other models of the
repository; used when a repository is written and by the stand-in backend when it loads an engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from trtspec.errors import TrtspecError
from trtspec.runtime.engine import SPECULATIVE_MODES, EngineConfig, check_lookahead
from trtspec.triton.contract import LOGITS_DTYPES

# decoding_mode that an engine needs, by TensorRT-LLM's name of the mode that it was built for.
_DECODING_MODES = {
    "medusa": "medusa",
    "lookahead_decoding": "lookahead",
    "explicit_draft_tokens": "redrafter",
    "eagle": "eagle",
}
_LOOKAHEAD_SIZES = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
# The tree that the runtime takes when none is given (mc_sim_7b_63).
_DEFAULT_NODES, _DEFAULT_DEPTH = 63, 4


def engine_faults(
    parameters: Mapping[str, str], logits_dtype: str, engine: EngineConfig, where: Path | str
) -> Iterator[str]:
    """One line for each thing that the engine cannot do, with both files.

    Args:
        parameters: of the engine model's config.pbtxt, each with a value of the right kind.
        logits_dtype: of its generation_logits, such as FP32.
        engine: the engine that it names.
        where: the config.pbtxt.
    """
    yield from _cache_faults(parameters, engine, where)
    yield from _decoding_faults(parameters, engine, where)
    yield from _split_faults(parameters, engine, where)
    name = engine.pretrained.get("logits_dtype", "float32")
    if LOGITS_DTYPES.get(name) != logits_dtype:
        yield (
            f"{where}: generation_logits are {logits_dtype}, but {engine.path} was built with logits_dtype {name}; "
            "build the engine again, or set engine.logits_dtype to its type"
        )


def why_no_paged_context(engine: EngineConfig) -> str | None:
    """Why an engine has no paged context FMHA; None when it has it."""
    quantization = engine.pretrained.get("quantization") or {}
    cache, weights = quantization.get("kv_cache_quant_algo"), quantization.get("quant_algo")
    if not engine.build.get("plugin_config", {}).get("use_paged_context_fmha", False):
        return "was built without it; build with engine.paged_context_fmha: true and no INT8 KV cache"
    if cache == "INT8":
        return "has an INT8 KV cache, which turns it off; build with kv_cache_dtype: auto"
    if cache == "FP8" and not str(weights).startswith(("FP8", "W4A8")):
        return "has an FP8 KV cache without FP8 weights, which turns it off; build with quantization: fp8"
    return None


def parse_tree(text: str) -> list[tuple[int, ...]]:
    """The paths of a token tree in the backend's syntax."""
    return [tuple(map(int, path.split(","))) for path in re.findall(r"\{([\d, ]+)\}", text)]


def is_true(parameters: Mapping[str, str], name: str) -> bool:
    """Whether a flag is set, as the backend reads it."""
    return parameters.get(name) in ("true", "1")


def _cache_faults(parameters: Mapping[str, str], engine: EngineConfig, where: Path | str) -> Iterator[str]:
    for name in ("enable_kv_cache_reuse", "enable_chunked_context"):
        if is_true(parameters, name) and (reason := why_no_paged_context(engine)):
            yield f"{where}: {name} needs paged context FMHA, and {engine.path} {reason}"


def _decoding_faults(parameters: Mapping[str, str], engine: EngineConfig, where: Path | str) -> Iterator[str]:
    """The decoding mode is the one that the engine was built for, and its settings fit the engine."""
    mode = SPECULATIVE_MODES.get(engine.speculative_decoding_mode, "")
    needed, given = _DECODING_MODES.get(mode), parameters.get("decoding_mode")
    if needed != given and (needed or given in _DECODING_MODES.values()):
        yield (
            f"{where}: decoding_mode is {given or 'unset'}, but {engine.path} was built for mode {mode or 'unknown'}; "
            + (f"set it to {needed}" if needed else "remove it, or build the engine for it")
        )
    elif given == "lookahead":
        missing = [name for name in _LOOKAHEAD_SIZES if name not in parameters]
        if missing:
            yield f"{where}: {missing[0]} is missing; lookahead needs all of {', '.join(_LOOKAHEAD_SIZES)}"
            return
        window, ngram, verification = (int(parameters[name]) for name in _LOOKAHEAD_SIZES)
        try:
            check_lookahead(engine, window, ngram, verification, pipeline=Path(where))
        except TrtspecError as error:
            yield str(error)
    elif given in ("medusa", "eagle"):
        yield from _tree_faults(f"{given}_choices", parameters, engine, where)


def _tree_faults(name: str, parameters: Mapping[str, str], engine: EngineConfig, where: Path | str) -> Iterator[str]:
    paths = parse_tree(parameters[name]) if name in parameters else None
    nodes = _DEFAULT_NODES if paths is None else len(paths)
    depth = _DEFAULT_DEPTH if paths is None else max(map(len, paths))
    tree = f"{where}: {name} " + ("is unset, and the default tree" if paths is None else "is a tree that")
    if nodes > engine.max_draft_len:
        yield f"{tree} has {nodes} nodes, but max_draft_len is {engine.max_draft_len} in {engine.path}; remove nodes"
    built = (engine.stamp.get("speculation") or {}).get("choices")  # of the torch runtime: the tree is in the engine
    if built is not None and paths is not None and sorted(paths) != sorted(map(tuple, built)):
        yield f"{tree} is not the one that {engine.path} was built with; build the engine again, or set its tree"
    heads = "num_medusa_heads" if name == "medusa_choices" else "num_eagle_layers"
    deepest = engine.pretrained.get(heads)
    if isinstance(deepest, int) and depth > deepest:
        yield f"{tree} is {depth} deep, but {heads} is {deepest} in {engine.path}; shorten its paths"
    for path in paths or ():
        if len(path) > 1 and path[:-1] not in (paths or ()):
            yield f"{where}: {name} has the path {list(path)} without its parent {list(path[:-1])}; add it"


def _split_faults(parameters: Mapping[str, str], engine: EngineConfig, where: Path | str) -> Iterator[str]:
    """One GPU, and one MPI rank where ranks are named, for each rank of the engine."""
    for name, what in (("gpu_device_ids", "GPUs"), ("participant_ids", "MPI ranks")):
        for instance in filter(None, parameters.get(name, "").split(";")):
            numbers = instance.split(",")
            if len(set(numbers)) != engine.world_size or len(numbers) != engine.world_size:
                yield (
                    f"{where}: {name} is {instance!r}, but {engine.path} was built for {engine.world_size} ranks; "
                    f"name as many different {what}"
                )
