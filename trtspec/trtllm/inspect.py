"""What an engine or a checkpoint on disk is, and whether it fits this host, this container and its partner.

Reads configs, stamps and sizes of files, and compares them with what the host says of itself. Runs nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import TrtspecError
from trtspec.runtime.engine import (
    CONFIG,
    NO_SPECULATION,
    SPECULATIVE_MODES,
    EngineConfig,
    check_engine_pair,
    version_numbers,
)
from trtspec.trtllm.checkpoint import Checkpoint, faults
from trtspec.trtllm.host import Host
from trtspec.trtllm.support import FP8_MIN_SM
from trtspec.trtllm.versions import RELEASES, release_for

_FP8_ALGORITHMS = ("FP8", "W4A8_AWQ")
# The parameter of a Triton model that names its engine, as protobuf prints it.
_ENGINE_PATH = re.compile(r'"gpt_model_path"\s*value:?\s*\{\s*string_value:\s*"([^"]+)"')


@dataclass(frozen=True)
class Inspection:
    """What was found.

    Attributes:
        kind: `engine` or `checkpoint`.
        facts: what it is, as JSON, in the order for showing; None where it is not known.
        misfits: why it cannot be used here, one line each; empty: it fits.
    """

    kind: str
    facts: dict[str, Any]
    misfits: list[str]


def inspect(directory: Path, host: Host, partner: Path | None = None) -> Inspection:
    """Look at an engine or a checkpoint.

    Args:
        directory: the engine or checkpoint.
        host: the machine and container that are to use it.
        partner: the engine that it is to work with, as target or draft.

    Raises:
        TrtspecError: neither of the two, or damaged beyond description.
    """
    if _kind(directory) == "checkpoint":
        checkpoint = Checkpoint.load(directory)
        misfits = [*faults(checkpoint), *_checkpoint_misfits(checkpoint, host)]
        if partner is not None:
            misfits.append(f"{directory}: a checkpoint has no partner; compile it first")
        return Inspection("checkpoint", _checkpoint_facts(checkpoint), misfits)
    engine = EngineConfig.load(directory)
    misfits = list(_engine_misfits(engine, host))
    if partner is not None:
        misfits += _partner_misfits(engine, EngineConfig.load(partner))
    return Inspection("engine", _engine_facts(engine), misfits)


def _kind(directory: Path) -> str:
    """`engine` or `checkpoint`, by the config; what is neither is refused."""
    path = directory / CONFIG
    expected = "the directory of an engine or of a TensorRT-LLM checkpoint"
    if not directory.is_dir():
        raise TrtspecError("no such directory", where=str(directory), expected=expected)
    if not path.is_file():
        engines = sorted(config.parent.name for config in directory.glob(f"*/{CONFIG}"))
        models = sorted(directory.glob("*/config.pbtxt"))
        if engines:
            fix = f"inspect one of those in it: {', '.join(engines)}"
        elif models:
            named = {path for model in models for path in _ENGINE_PATH.findall(model.read_text(encoding="utf-8"))}
            named_there = ", ".join(sorted(named)) or "none"
            fix = f"this is a Triton model repository; inspect the engines that it names: {named_there}"
        else:
            fix = None
        raise TrtspecError(f"no {CONFIG} here", where=str(directory), expected=expected, fix=fix)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "engine"  # whose loader says what is wrong
    if isinstance(content, dict) and "model_type" in content and "architecture" not in content:
        raise TrtspecError("a Hugging Face model", where=str(directory), expected=expected)
    return "checkpoint" if isinstance(content, dict) and "architecture" in content else "engine"


def _engine_facts(engine: EngineConfig) -> dict[str, Any]:
    stamp, pretrained, build = engine.stamp, engine.pretrained, engine.build
    plugins, mapping = build.get("plugin_config") or {}, pretrained.get("mapping") or {}
    quantization = pretrained.get("quantization") or {}
    directory = engine.path.parent
    mode = engine.speculative_decoding_mode
    return {
        "runtime": engine.runtime,
        "state": "compiled" if engine.compiled else "prepared, not compiled",
        "role": stamp.get("role"),
        "model": stamp.get("source"),
        "architecture": pretrained.get("architecture"),
        "dtype": pretrained.get("dtype"),
        "quantization": quantization.get("quant_algo"),
        "kv_cache_quantization": quantization.get("kv_cache_quant_algo"),
        "logits_dtype": pretrained.get("logits_dtype"),
        "vocab_size": pretrained.get("vocab_size"),
        "world_size": engine.world_size,
        "tensor_parallel": mapping.get("tp_size"),
        "pipeline_parallel": mapping.get("pp_size"),
        "speculation": SPECULATIVE_MODES.get(mode, f"unknown ({mode})"),
        "max_draft_len": engine.max_draft_len,
        "max_batch_size": build.get("max_batch_size"),
        "max_input_len": build.get("max_input_len"),
        "max_seq_len": engine.max_seq_len,
        "max_seq_len_with_drafts": build.get("max_seq_len"),
        "max_num_tokens": build.get("max_num_tokens"),
        "max_beam_width": build.get("max_beam_width"),
        "paged_context_fmha": plugins.get("use_paged_context_fmha"),
        "tokens_per_block": plugins.get("tokens_per_block"),
        "gemm_plugin": plugins.get("gemm_plugin"),
        "version": engine.version,
        "tensorrt_version": stamp.get("tensorrt_version"),
        "trtspec_version": stamp.get("trtspec_version"),
        "sm": engine.sm,
        "gpu": stamp.get("gpu"),
        "checkpoint": stamp.get("checkpoint"),
        "source_fingerprint": stamp.get("source_fingerprint"),
        "spec_hash": stamp.get("spec_hash"),
        "bytes": _bytes(directory),
        "rank_bytes": _rank_bytes(directory, ".engine" if engine.runtime == "tensorrt_llm" else ".safetensors"),
    }


def _checkpoint_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    config, record = checkpoint.config, checkpoint.record
    mapping, quantization = config.get("mapping") or {}, config.get("quantization") or {}
    return {
        "role": record.get("role"),
        "model": record.get("source"),
        "architecture": config.get("architecture"),
        "dtype": config.get("dtype"),
        "quantization": quantization.get("quant_algo"),
        "kv_cache_quantization": quantization.get("kv_cache_quant_algo"),
        "logits_dtype": config.get("logits_dtype"),
        "vocab_size": config.get("vocab_size"),
        "world_size": mapping.get("world_size"),
        "tensor_parallel": mapping.get("tp_size"),
        "pipeline_parallel": mapping.get("pp_size"),
        "max_draft_len": config.get("max_draft_len"),
        "producer": record.get("producer"),
        "trtspec_version": record.get("trtspec_version"),
        "source_fingerprint": record.get("source_fingerprint"),
        "spec_hash": record.get("spec_hash"),
        "bytes": _bytes(checkpoint.path),
        "rank_bytes": _rank_bytes(checkpoint.path, ".safetensors"),
    }


def _engine_misfits(engine: EngineConfig, host: Host) -> Iterator[str]:
    """Why this host cannot load an engine."""
    where = engine.path.parent
    if engine.runtime != "tensorrt_llm":
        return
    if not engine.compiled:
        yield f"{where}: not compiled yet; run its build.sh, or the same trtspec build, on a GPU host"
    else:
        try:
            engine.require_ranks()
        except TrtspecError as error:
            yield str(error)
    yield from _version_misfits(engine, host)
    if not host.gpus:
        architecture = f"sm_{engine.sm}" if engine.sm else "the architecture that it was compiled on"
        yield f"{where}: needs {engine.world_size} GPU(s) of {architecture}, this machine has none"
        return
    if engine.world_size > len(host.gpus):
        yield f"{where}: runs on {engine.world_size} GPUs, this machine has {len(host.gpus)}"
    rank_bytes = max(_rank_bytes(where, ".engine"), default=0)
    for gpu in host.gpus[: engine.world_size]:
        if engine.sm and gpu.sm and gpu.sm != engine.sm:
            yield f"{where}: compiled for sm_{engine.sm}, but GPU {gpu.index} ({gpu.name}) is sm_{gpu.sm}"
        if gpu.memory_bytes and rank_bytes > gpu.memory_bytes:
            needed, there = (f"{amount / 2**30:.1f} GiB" for amount in (rank_bytes, gpu.memory_bytes))
            yield f"{where}: a rank is {needed} large, GPU {gpu.index} ({gpu.name}) has {there}"


def _version_misfits(engine: EngineConfig, host: Host) -> Iterator[str]:
    """Why the installed TensorRT-LLM, TensorRT and driver cannot load an engine."""
    where = engine.path.parent
    release = next((release for release in RELEASES if release.tag == host.container_tag), None)
    installed = host.tensorrt_llm or (release and release.tensorrt_llm)
    here = f"container {host.container_tag}" if host.container_tag else "this machine"
    if installed and engine.version != installed:
        newer = version_numbers(engine.version) > version_numbers(installed)
        relation = "newer than" if newer else "not"
        yield (
            f"{where}: an engine of TensorRT-LLM {engine.version}, {relation} the {installed} of {here}, which loads "
            "its own engines only"
        )
    tensorrt = engine.stamp.get("tensorrt_version")
    if tensorrt and host.tensorrt and tensorrt != host.tensorrt:
        yield f"{where}: compiled by TensorRT {tensorrt}, {here} has {host.tensorrt}"
    needs = release_for(engine.version)
    if needs and host.driver and version_numbers(host.driver) < version_numbers(needs.driver):
        yield f"{where}: TensorRT-LLM {engine.version} needs driver {needs.driver} or later, here it is {host.driver}"


def _checkpoint_misfits(checkpoint: Checkpoint, host: Host) -> Iterator[str]:
    """Why the GPUs of this host could not run what is compiled from a checkpoint."""
    quantization = checkpoint.config.get("quantization") or {}
    used = (quantization.get("quant_algo"), quantization.get("kv_cache_quant_algo"))
    if fp8 := next((name for name in used if name in _FP8_ALGORITHMS), None):
        for gpu in host.gpus:
            if gpu.sm and gpu.sm < FP8_MIN_SM:
                on = f"GPU {gpu.index} ({gpu.name}) is sm_{gpu.sm}"
                yield f"{checkpoint.path}: {fp8} needs sm_{FP8_MIN_SM} or later, {on}"


def _partner_misfits(one: EngineConfig, other: EngineConfig) -> list[str]:
    """Why two engines cannot work together; the stamps or the draft lengths tell which is the target."""
    first_is_draft = one.stamp.get("role") == "draft" or (
        other.stamp.get("role") != "draft" and one.speculative_decoding_mode == NO_SPECULATION
    )
    target, draft = (other, one) if first_is_draft else (one, other)
    try:
        check_engine_pair(target, draft, 1)
    except TrtspecError as error:
        return [str(error)]
    return []


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _rank_bytes(directory: Path, suffix: str) -> list[int]:
    """Bytes of each rank's file, in order."""
    ranks = {path.stem.removeprefix("rank"): path.stat().st_size for path in directory.glob(f"rank*{suffix}")}
    return [ranks[number] for number in sorted(filter(str.isdigit, ranks), key=int)]
