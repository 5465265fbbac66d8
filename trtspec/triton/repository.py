"""Writes the Triton model repository of a pair of engines: one config.pbtxt a model, and the sources the models import.

The result runs on the stock TensorRT-LLM container and on the local server alike, needs nothing installed there, and
is the same byte for byte for the same input. Knows Triton's config messages and an engine's config.json; does not know
how engines are built or how a server is started.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.decoding.draft_length import DraftLength
from trtspec.decoding.methods import DRAFTS, METHODS, MIDDLES, written
from trtspec.runtime.engine import EngineConfig
from trtspec.triton import contract
from trtspec.triton.check import check_repository
from trtspec.triton.contract import LOGITS_DTYPES, Tensor
from trtspec.triton.engine_parameters import check_engine_parameters, engine_parameters
from trtspec.triton.pbtxt import flag, model_config, to_text
from trtspec.triton.replacing import replacing
from trtspec.trtllm.placement import check_placement

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    from trtspec.spec.schema import Spec

BLS, BLS_UNARY = "tensorrt_llm_bls", "tensorrt_llm_bls_unary"
ENGINE_MODELS = {"target": "tensorrt_llm"} | {role: f"tensorrt_llm_{role}" for role in (*MIDDLES, *DRAFTS)}
_SOURCES = Path(__file__).parent / "models"
_DECODING = Path(__file__).parents[1] / "decoding"
_TEXT_SOURCES = ("tensors.py", "tokenization.py")
_BLS_SOURCES = (
    "bls_answer.py",
    "bls_request.py",
    "engine_model.py",
    "metrics.py",
    "pace.py",
    "phases.py",
    "threads.py",
    *_TEXT_SOURCES,
)
_DRAFT_REST_S = "5"  # a draft that failed is left alone so long

Parameters = dict[str, str]


def write_repository(
    *,
    out_dir: Path,
    spec: Spec,
    engines: Mapping[str, Path],
    tokenizer_json: str,
    add_bos: bool = False,
    chat_template: str | None = None,
    kv_cache_bytes: Mapping[str, int] | None = None,
    kv_cache_fractions: Mapping[str, float] | None = None,
) -> Path:
    """Write the models preprocessing, tensorrt_llm, tensorrt_llm_ROLE of each engine that drafts (draft, middle,
    draft_2, ...), tensorrt_llm_bls (decoupled, for streams), tensorrt_llm_bls_unary (for infer and /generate),
    postprocessing and ensemble.

    Args:
        out_dir: the repository; an older one in its place is replaced whole.
        spec: limits, defaults, and the mount point under which the server sees the engines.
        engines: role -> engine directory with its config.json, for every model of the spec.
        tokenizer_json: text of the target's tokenizer.json.
        add_bos: put the BOS in front of every prompt, also when tokenizer.json does not say so.
        chat_template: Jinja template of the target, for clients that render conversations.
        kv_cache_bytes: role -> size of its KV cache in the torch runtime; its default where a role is missing.
        kv_cache_fractions: role -> part of the free GPU memory for its KV cache; the spec's where a role is missing.

    Returns:
        `out_dir`.

    Raises:
        TrtspecError: engines that do not fit the spec, parameters that the backend would refuse, or something else in
            place of `out_dir`.
    """
    check_engine_parameters(spec)
    check_placement(spec)
    configs = {role: EngineConfig.load(engines[role]) for role in ENGINE_MODELS if role in spec.models}
    tokens = _token_parameters(configs["target"], tokenizer_json, add_bos)
    batch, logits_dtype = spec.engine.max_batch_size, LOGITS_DTYPES[spec.engine.logits_dtype]
    models = [
        _python_model(
            "preprocessing",
            contract.PREPROCESSING_INPUTS,
            contract.PREPROCESSING_OUTPUTS,
            batch,
            {key: value for key, value in tokens.items() if key in contract.MODEL_PARAMETERS["preprocessing"]},
        ),
        _python_model(
            "postprocessing",
            contract.POSTPROCESSING_INPUTS,
            contract.POSTPROCESSING_OUTPUTS,
            batch,
            {"skip_special_tokens": "true"},
        ),
        *(
            _engine_model(
                role,
                spec,
                engine_parameters(
                    spec,
                    role,
                    engines[role].name,
                    fraction=_fraction(spec, role, kv_cache_fractions or {}),
                    kv_cache_bytes=(kv_cache_bytes or {}).get(role),
                ),
            )
            for role in configs
        ),
        *(_bls_model(name, spec, configs, tokens, chat_template) for name in (BLS, BLS_UNARY)),
        _ensemble(batch, logits_dtype),
    ]
    sources = {
        "preprocessing": ("preprocessing.py", _TEXT_SOURCES),
        "postprocessing": ("postprocessing.py", _TEXT_SOURCES),
        BLS: ("bls.py", _BLS_SOURCES),
        BLS_UNARY: ("bls.py", _BLS_SOURCES),
    }
    with replacing(out_dir) as staged:
        for config in models:
            version = staged / config.name / "1"
            version.mkdir(parents=True)
            (version.parent / "config.pbtxt").write_text(to_text(config), encoding="utf-8")
            if config.name in sources:
                _copy_sources(version, *sources[config.name])
                (version / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
            else:  # an empty version directory does not survive git or an archive
                (version / ".keep").touch()
        check_repository(staged, {ENGINE_MODELS[role]: engines[role] for role in configs}, shown_as=out_dir)
    return out_dir


def _engine_model(role: str, spec: Spec, parameters: Parameters) -> ModelConfig:
    """The config of one engine's model. It is not decoupled: the pipeline wants one whole answer a call."""
    from tritonclient.grpc import model_config_pb2 as pb

    config = model_config(
        ENGINE_MODELS[role],
        contract.ENGINE_INPUTS,
        contract.ENGINE_OUTPUTS,
        spec.engine.max_batch_size,
        parameters,
        backend="tensorrtllm",
        logits_dtype=LOGITS_DTYPES[spec.engine.logits_dtype],
    )
    config.dynamic_batching.preferred_batch_size.append(spec.engine.max_batch_size)
    config.dynamic_batching.default_queue_policy.max_queue_size = 0
    # Not KIND_GPU: the executor places its ranks itself, and this one also loads where there is no GPU.
    config.instance_group.append(pb.ModelInstanceGroup(count=1, kind=pb.ModelInstanceGroup.KIND_CPU))
    return config


def _fraction(spec: Spec, role: str, derived: Mapping[str, float]) -> float | None:
    given: float | None = spec.serving.kv_cache_free_gpu_mem_fraction.of(role)
    return derived.get(role, given)


def _bls_model(
    name: str, spec: Spec, configs: Mapping[str, EngineConfig], tokens: Parameters, chat_template: str | None
) -> ModelConfig:
    """The speculative pipeline. One process serves many requests, so one instance is enough."""
    target, speculation = configs["target"], spec.speculation
    method = METHODS.get(speculation.method)
    # No engine proposes, or the target sees single paths: nothing can be accepted by logits.
    by_logits = bool(method and method.engines and not method.trees)
    parameters = {
        **tokens,
        "tensorrt_llm_model_name": ENGINE_MODELS["target"],
        "accumulate_tokens": "false",
        "method": speculation.method,
        "acceptance": speculation.acceptance if by_logits else "tokens",
        "greedy_only": flag(_decodes_greedily(spec)),
        "logits_dtype": LOGITS_DTYPES[spec.engine.logits_dtype],
        "num_draft_tokens": str(spec.default_num_draft_tokens if method else 0),
        "max_draft_len": str(target.max_draft_len),
        "max_input_len": str(target.build["max_input_len"]),
        "target_max_seq_len": str(target.max_seq_len),
        "exclude_input_in_output": flag(spec.serving.exclude_input_in_output),
        "skip_special_tokens": "true",
        "max_concurrency": str(spec.serving.max_concurrency),
        "max_queued": str(spec.serving.max_queued),
        "alternate_phases": flag(spec.alternates_phases),
        "plain_chunk_tokens": str(spec.serving.plain_chunk_tokens),
        "draft_rest_s": _DRAFT_REST_S,
        "call_timeout_s": f"{spec.serving.call_timeout_s:g}",
        "draft_timeout_s": f"{spec.serving.draft_timeout_s:g}",
    }
    for role in method.roles(configs) if method else ():
        parameters[f"tensorrt_llm_{role}_model_name"] = ENGINE_MODELS[role]
        parameters[f"{role}_max_seq_len"] = str(configs[role].max_seq_len)
        parameters[f"{role}_vocab_size"] = str(configs[role].vocab_size)
        parameters[f"{role}_returns_logits"] = flag(configs[role].returns_generation_logits)
    if method:
        settings = method.chosen(getattr(speculation, speculation.method, None))
        parameters |= {f"{speculation.method}_{name}": written(value) for name, value in settings.items()}
        if (chosen := spec.serving.draft_length) is not None:
            lengths = DraftLength(chosen.policy, target.max_draft_len, chosen.schedule, chosen.token_cost)
            parameters |= lengths.written()
    if chat_template is not None:
        parameters["chat_template"] = chat_template
    config = _python_model(
        name,
        contract.BLS_INPUTS,
        contract.BLS_OUTPUTS,
        spec.engine.max_batch_size,
        parameters,
        logits_dtype=LOGITS_DTYPES[spec.engine.logits_dtype],
    )
    config.model_transaction_policy.decoupled = name == BLS
    return config


def _decodes_greedily(spec: Spec) -> bool:
    """Whether the target's engine verifies its own drafts greedily, whatever temperature a request asks for."""
    speculation, redrafter = spec.speculation, spec.speculation.redrafter
    if speculation.method == "medusa":
        return spec.engine.runtime == "tensorrt_llm"
    return bool(speculation.method == "redrafter" and redrafter and redrafter.greedy)


def _ensemble(max_batch_size: int, logits_dtype: str) -> ModelConfig:
    """Plain decoding by the target alone, as a fixed graph: preprocessing, tensorrt_llm, postprocessing."""
    config = model_config(
        "ensemble",
        contract.ENSEMBLE_INPUTS,
        contract.ENSEMBLE_OUTPUTS,
        max_batch_size,
        {},
        logits_dtype=logits_dtype,
    )
    config.platform = "ensemble"
    given = {tensor.name for tensor in contract.ENSEMBLE_INPUTS}
    to_engine = {contract.ENGINE_RENAMES.get(name, name): name for name in given}
    engine_names = {tensor.name for tensor in contract.ENGINE_INPUTS} - set(contract.ENGINE_FROM_PREPROCESSING)
    engine_in = {engine: name for engine, name in to_engine.items() if engine in engine_names}
    passed_on = {t.name for t in contract.ENSEMBLE_OUTPUTS} & {t.name for t in contract.ENGINE_OUTPUTS}
    engine_out = {"output_ids": "_TOKENS_BATCH", "sequence_length": "_SEQUENCE_LENGTH"} | {n: n for n in passed_on}
    steps: list[tuple[str, Mapping[str, str], Mapping[str, str]]] = [
        ("preprocessing", *contract.PREPROCESSING_MAP),
        (ENGINE_MODELS["target"], {**engine_in, **contract.ENGINE_FROM_PREPROCESSING}, engine_out),
        ("postprocessing", *contract.POSTPROCESSING_MAP),
    ]
    for model, inputs, outputs in steps:
        step = config.ensemble_scheduling.step.add(model_name=model, model_version=-1)
        step.input_map.update(inputs)
        step.output_map.update(outputs)
    return config


def _python_model(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    max_batch_size: int,
    parameters: Parameters,
    logits_dtype: str = "FP32",
) -> ModelConfig:
    from tritonclient.grpc import model_config_pb2 as pb

    config = model_config(
        name, inputs, outputs, max_batch_size, parameters, backend="python", logits_dtype=logits_dtype
    )
    config.instance_group.append(pb.ModelInstanceGroup(count=1, kind=pb.ModelInstanceGroup.KIND_CPU))
    return config


def _token_parameters(target: EngineConfig, tokenizer_json: str, add_bos: bool) -> Parameters:
    """Special ids and their texts, from the target's stamp and the tokenizer."""
    from tokenizers import Tokenizer

    end_ids, bos_id, pad_id = target.eos_token_ids, target.stamp.get("bos_token_id"), target.stamp.get("pad_token_id")
    end_id = end_ids[0] if end_ids else None
    parameters = {
        "add_bos": flag(add_bos),
        "vocab_size": str(target.vocab_size),
        "end_ids": ",".join(map(str, end_ids)),
        "end_id": str(-1 if end_id is None else end_id),
        "pad_id": str(pad_id if pad_id is not None else end_id or 0),
    }
    if bos_id is not None:
        parameters["bos_token_id"] = str(bos_id)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    for key, token_id in (("bos_token", bos_id), ("eos_token", end_id)):
        token = None if token_id is None else tokenizer.id_to_token(token_id)
        if token is not None:
            parameters[key] = token
    return parameters


def _copy_sources(version: Path, model: str, modules: Iterable[str]) -> None:
    shutil.copyfile(_SOURCES / model, version / "model.py")
    for module in modules:
        shutil.copyfile(_SOURCES / module, version / module)
    if model == "bls.py":
        package = version / "trtspec_decoding"
        package.mkdir()
        for source in sorted(_DECODING.glob("*.py")):
            shutil.copyfile(source, package / source.name)
