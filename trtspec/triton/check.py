"""Faults of a model repository that a server would only meet at run time, or never report.

Knows config.pbtxt, its parameters, and what the pipeline asks of engines. Does not start anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.decoding.methods import DRAFTS, MIDDLES
from trtspec.errors import TrtspecError
from trtspec.runtime.engine import EngineConfig, check_engine_pair
from trtspec.triton import contract
from trtspec.triton.check_engine import engine_faults, is_true

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
        values = _values(config)
        faults += parameter_faults(config.name, values, config.backend, shown)
    if not configs and not faults:
        raise TrtspecError("no model here", where=str(repository), fix="run `trtspec build` first")
    if faults:  # what follows reads values
        raise TrtspecError("\n".join(faults))
    faults += _engine_model_faults(shown_as or repository, configs)
    faults += _pipeline_faults(shown_as or repository, configs, engines or {})
    if faults:
        raise TrtspecError("\n".join(faults))


def parameter_faults(model: str, values: Mapping[str, str], backend: str, where: Path | str) -> list[str]:
    """Parameters that the model does not know, and values that the backend cannot read."""
    engine_model = backend == "tensorrtllm"
    known = contract.ENGINE_PARAMETERS.keys() if engine_model else contract.MODEL_PARAMETERS.get(model, frozenset())
    if not known:
        return []
    faults = [
        f"{where}: parameters.{key} is unknown to {model}; {contract.did_you_mean(key, known)}"
        for key in sorted(set(values) - known)
    ]
    if engine_model:
        for key in sorted(set(values) & known):
            if words := contract.wrong_value(key, values[key]):
                faults.append(f"{where}: parameters.{key} is {values[key]!r}; expected {words}")
    return faults


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


def _engine_model_faults(shown: Path, configs: Mapping[str, ModelConfig]) -> Iterator[str]:
    """What the pipeline asks of the config of engine models, alone and side by side."""
    models = {name: _values(config) for name, config in configs.items() if config.backend == "tensorrtllm"}
    ranks: dict[str, str] = {"0": "the orchestrator"}  # MPI rank -> who has it
    fast = [name for name, values in models.items() if is_true(values, "speculative_decoding_fast_logits")]
    for name, values in models.items():
        where = shown / name / "config.pbtxt"
        if configs[name].model_transaction_policy.decoupled:
            yield f"{where}: model_transaction_policy.decoupled is true, but the pipeline wants one answer a call"
        if is_true(values, "exclude_input_in_output"):
            yield f"{where}: exclude_input_in_output is true, but the pipeline reads the prompt back; write false"
        for rank in filter(None, values.get("participant_ids", "").replace(";", ",").split(",")):
            if ranks.setdefault(rank, name) != name:
                yield f"{where}: participant_ids has rank {rank}, which belongs to {ranks[rank]}; name another"
        if fast and name not in fast:
            yield f"{where}: speculative_decoding_fast_logits is off, but {fast[0]} has it on; set it on all or none"
        if name in fast and not values.get("participant_ids"):
            yield f"{where}: speculative_decoding_fast_logits needs an orchestrator and participant_ids; name its ranks"


def _pipeline_faults(shown: Path, configs: Mapping[str, ModelConfig], engines: Mapping[str, Path]) -> Iterator[str]:
    """What the configs ask of the engines and they cannot do."""
    loaded = {model: EngineConfig.load(path) for model, path in engines.items() if model in configs}
    for model, engine in loaded.items():
        yield from engine_faults(
            _values(configs[model]), _logits_dtype(configs[model]), engine, shown / model / "config.pbtxt"
        )
    for name, config in configs.items():
        values = _values(config)
        if values.get("tensorrt_llm_model_name") in loaded:
            yield from _pair_faults(shown / name / "config.pbtxt", values, loaded)


def _pair_faults(where: Path, values: Mapping[str, str], loaded: Mapping[str, EngineConfig]) -> Iterator[str]:
    """Each engine of a pipeline verifies what the one below it proposes."""
    target, wanted = loaded[values["tensorrt_llm_model_name"]], int(values["num_draft_tokens"])
    drafts, middles = (
        [loaded.get(values.get(f"tensorrt_llm_{role}_model_name", "")) for role in roles] for roles in (DRAFTS, MIDDLES)
    )
    chain = [target, *filter(None, middles)]
    counts = [wanted, *(int(values["cascade_num_draft_tokens"]) for _ in chain[1:])]
    pairs = list(zip(chain, [*chain[1:], drafts[0]], counts, strict=True))
    pairs += [(target, other, wanted) for other in drafts[1:] if other is not None]
    for verifies, proposes, count in pairs:
        try:
            check_engine_pair(
                verifies,
                proposes,
                count,
                pipeline=where,
                draft_logits=count > 0 and values["acceptance"] == "logits",
            )
        except TrtspecError as error:
            yield str(error)


def _values(config: ModelConfig) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


def _logits_dtype(config: ModelConfig) -> str:
    """Such as FP32."""
    from tritonclient.grpc.model_config_pb2 import DataType

    output = next(output for output in config.output if output.name == "generation_logits")
    return str(DataType.Name(output.data_type)).removeprefix("TYPE_")
