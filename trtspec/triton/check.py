"""Faults of a model repository that a server would only meet at run time, or never report.

Knows config.pbtxt, its parameters, and what the pipeline asks of engines. Does not start anything.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.errors import TrtspecError
from trtspec.triton import contract

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig


def check_repository(
    repository: Path, engines: Mapping[str, Path] | None = None, *, shown_as: Path | None = None
) -> None:
    """Refuse a repository with template values left unfilled, parameters that no model knows, or engines that do not
    fit.

    Args:
        repository: directory of the models.
        engines: engine model name -> engine directory, where the engines are at hand.
        shown_as: path to name in messages instead of `repository`.

    Raises:
        TrtspecError: the faults, one a line, each with its file and key.
    """
    configs: dict[str, ModelConfig] = {}
    faults: list[str] = []
    for path in sorted(repository.glob("*/config.pbtxt")):
        shown = (shown_as or repository) / path.relative_to(repository)
        text = path.read_text(encoding="utf-8")
        unfilled = _unfilled(text)
        faults += [f"{shown}:{line}: {name} is not filled in; write a value" for line, name in unfilled]
        if unfilled:
            continue
        config = _parse(text, shown)
        configs[config.name] = config
        values = {key: value.string_value for key, value in config.parameters.items()}
        faults += _unknown_keys(config.name, values, config.backend, shown)
    if not configs and not faults:
        raise TrtspecError("no model here", where=str(repository), fix="run `trtspec build` first")
    faults += _engine_faults(shown_as or repository, configs, engines or {})
    if faults:
        raise TrtspecError("\n".join(faults))


def _unknown_keys(model: str, values: Mapping[str, str], backend: str, where: Path) -> list[str]:
    if backend == "tensorrtllm":
        known = contract.ENGINE_PARAMETERS
    else:
        known = contract.MODEL_PARAMETERS.get(model, frozenset())
    if not known:
        return []
    return [
        f"{where}: parameters.{key} is unknown to {model}; {_did_you_mean(key, known)}"
        for key in sorted(set(values) - known)
    ]


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint naming the closest of `known`, or listing them all."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"


def _unfilled(text: str) -> list[tuple[int, str]]:
    """Line number and name of every `${...}` outside a chat template, which may hold anything."""
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        start = line.find("${")
        if start >= 0 and "{%" not in line and "{{" not in line:
            found.append((number, line[start : line.find("}", start) + 1] or line[start:]))
    return found


def _parse(text: str, where: Path) -> ModelConfig:
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise TrtspecError(f"not a model config: {error}", where=str(where)) from None


def _engine_faults(shown: Path, configs: Mapping[str, ModelConfig], engines: Mapping[str, Path]) -> list[str]:
    """What the pipeline asks of the engines and they cannot do."""
    from trtspec.runtime.engine import EngineConfig, check_engine_pair

    loaded = {model: EngineConfig.load(path) for model, path in engines.items() if model in configs}
    faults = []
    for model, engine in loaded.items():
        reuse = configs[model].parameters["enable_kv_cache_reuse"].string_value == "true"
        if reuse and not engine.build.get("plugin_config", {}).get("use_paged_context_fmha", False):
            faults.append(
                f"{shown / model / 'config.pbtxt'}: enable_kv_cache_reuse needs paged context FMHA, and {engine.path} "
                "was built without it; build with engine.paged_context_fmha: true and no INT8 KV cache"
            )
    for name, config in configs.items():
        values = {key: value.string_value for key, value in config.parameters.items()}
        target = loaded.get(values.get("tensorrt_llm_model_name", ""))
        if target is None:
            continue
        wanted = int(values["num_draft_tokens"])
        try:
            check_engine_pair(
                target,
                loaded.get(values.get("tensorrt_llm_draft_model_name", "")),
                wanted,
                pipeline=shown / name / "config.pbtxt",
                draft_logits=wanted > 0 and values["acceptance"] == "logits",
            )
        except TrtspecError as error:
            faults.append(str(error))
    return faults
