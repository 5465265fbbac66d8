"""Writes the Triton model repository of a pair of engines: one config.pbtxt a model, and the sources the models import.

The result runs on the stock TensorRT-LLM container and on the local server alike, needs nothing installed there, and
is the same byte for byte for the same input. Knows Triton's config messages and an engine's config.json; does not know
how engines are built or how a server is started.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.errors import TrtspecError
from trtspec.runtime.engine import EngineConfig
from trtspec.triton import contract
from trtspec.triton.check import check_repository
from trtspec.triton.contract import Tensor

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    from trtspec.spec.schema import Spec

BLS, BLS_UNARY = "tensorrt_llm_bls", "tensorrt_llm_bls_unary"
ENGINE_MODELS = {"target": "tensorrt_llm", "draft": "tensorrt_llm_draft"}
_SOURCES = Path(__file__).parent / "models"
_DECODING = Path(__file__).parents[1] / "decoding"
_TEXT_SOURCES = ("tensors.py", "tokenization.py")
_BLS_SOURCES = ("bls_request.py", "engine_model.py", *_TEXT_SOURCES)
_DRAFT_REST_S = "5"  # a draft that failed is left alone so long
_WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"  # where the container has it

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
) -> Path:
    """Write the models preprocessing, tensorrt_llm, tensorrt_llm_draft (with a draft), tensorrt_llm_bls (decoupled, for
    streams), tensorrt_llm_bls_unary (for infer and /generate), postprocessing and ensemble.

    Args:
        out_dir: the repository; an older one in its place is replaced whole.
        spec: limits, defaults, and the mount point under which the server sees the engines.
        engines: `target` and, for speculation, `draft` -> engine directory with its config.json.
        tokenizer_json: text of the target's tokenizer.json.
        add_bos: put the BOS in front of every prompt, also when tokenizer.json does not say so.
        chat_template: Jinja template of the target, for clients that render conversations.
        kv_cache_bytes: role -> size of its KV cache in the torch runtime; its default where a role is missing.

    Returns:
        `out_dir`.

    Raises:
        TrtspecError: engines that do not fit the spec, or something else in place of `out_dir`.
    """
    configs = {role: EngineConfig.load(engines[role]) for role in ENGINE_MODELS if role in engines}
    tokens = _token_parameters(configs["target"], tokenizer_json, add_bos)
    batch = spec.engine.max_batch_size
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
        *(_engine_model(role, spec, engines[role].name, (kv_cache_bytes or {}).get(role)) for role in configs),
        *(_bls_model(name, spec, configs, tokens, chat_template) for name in (BLS, BLS_UNARY)),
        _ensemble(batch),
    ]
    sources = {
        "preprocessing": ("preprocessing.py", _TEXT_SOURCES),
        "postprocessing": ("postprocessing.py", _TEXT_SOURCES),
        BLS: ("bls.py", _BLS_SOURCES),
        BLS_UNARY: ("bls.py", _BLS_SOURCES),
    }
    with _replacing(out_dir) as staged:
        for model_config in models:
            version = staged / model_config.name / "1"
            version.mkdir(parents=True)
            (version.parent / "config.pbtxt").write_text(_text(model_config), encoding="utf-8")
            if model_config.name in sources:
                _copy_sources(version, *sources[model_config.name])
                (version / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
            else:  # an empty version directory does not survive git or an archive
                (version / ".keep").touch()
        check_repository(staged, {ENGINE_MODELS[role]: path for role, path in engines.items()}, shown_as=out_dir)
    return out_dir


def _engine_model(role: str, spec: Spec, directory: str, kv_cache_bytes: int | None) -> ModelConfig:
    """The target's or the draft's config; every value that is not the backend's default is here for a reason."""
    from tritonclient.grpc import model_config_pb2 as pb

    fraction = getattr(spec.serving.kv_cache_free_gpu_mem_fraction, role)
    parameters = {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": f"{spec.serving.mount_point.rstrip('/')}/{directory}",
        "batch_scheduler_policy": "guaranteed_no_evict",
        "max_beam_width": "1",
        # every cycle sends the whole context again: without reuse it would be computed again too
        "enable_kv_cache_reuse": _bool(spec.engine.kv_cache_reuse),
        # the pipeline reads the prompt back to check the answer
        "exclude_input_in_output": "false",
        "executor_worker_path": _WORKER,
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
    }
    if fraction is not None:
        parameters["kv_cache_free_gpu_mem_fraction"] = f"{fraction:g}"
    if kv_cache_bytes is not None:
        parameters["trtspec_kv_cache_bytes"] = str(kv_cache_bytes)
    config = _config(
        ENGINE_MODELS[role],
        contract.ENGINE_INPUTS,
        contract.ENGINE_OUTPUTS,
        spec.engine.max_batch_size,
        parameters,
        backend="tensorrtllm",
    )
    config.dynamic_batching.preferred_batch_size.append(spec.engine.max_batch_size)
    config.dynamic_batching.default_queue_policy.max_queue_size = 0
    config.instance_group.append(pb.ModelInstanceGroup(count=1, kind=pb.ModelInstanceGroup.KIND_CPU))
    return config


def _bls_model(
    name: str, spec: Spec, configs: Mapping[str, EngineConfig], tokens: Parameters, chat_template: str | None
) -> ModelConfig:
    """The speculative pipeline. One process serves many requests, so one instance is enough."""
    target, draft = configs["target"], configs.get("draft")
    parameters = {
        **tokens,
        "tensorrt_llm_model_name": ENGINE_MODELS["target"],
        "accumulate_tokens": "false",
        "acceptance": spec.speculation.acceptance,
        "num_draft_tokens": str(spec.default_num_draft_tokens if draft else 0),
        "max_draft_len": str(target.max_draft_len),
        "max_input_len": str(target.build["max_input_len"]),
        "target_max_seq_len": str(target.max_seq_len),
        "exclude_input_in_output": _bool(spec.serving.exclude_input_in_output),
        "skip_special_tokens": "true",
        "max_concurrency": str(spec.serving.max_concurrency),
        "plain_chunk_tokens": str(spec.serving.plain_chunk_tokens),
        "draft_rest_s": _DRAFT_REST_S,
        "call_timeout_s": f"{spec.serving.call_timeout_s:g}",
    }
    if draft is not None:
        parameters["tensorrt_llm_draft_model_name"] = ENGINE_MODELS["draft"]
        parameters["draft_max_seq_len"] = str(draft.max_seq_len)
        parameters["draft_vocab_size"] = str(draft.vocab_size)
        parameters["draft_returns_logits"] = _bool(draft.returns_generation_logits)
    if chat_template is not None:
        parameters["chat_template"] = chat_template
    config = _python_model(name, contract.BLS_INPUTS, contract.BLS_OUTPUTS, spec.engine.max_batch_size, parameters)
    config.model_transaction_policy.decoupled = name == BLS
    return config


def _ensemble(max_batch_size: int) -> ModelConfig:
    """Plain decoding by the target alone, as a fixed graph: preprocessing, tensorrt_llm, postprocessing."""
    config = _config("ensemble", contract.ENSEMBLE_INPUTS, contract.ENSEMBLE_OUTPUTS, max_batch_size, {})
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
    name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], max_batch_size: int, parameters: Parameters
) -> ModelConfig:
    from tritonclient.grpc import model_config_pb2 as pb

    config = _config(name, inputs, outputs, max_batch_size, parameters, backend="python")
    config.instance_group.append(pb.ModelInstanceGroup(count=1, kind=pb.ModelInstanceGroup.KIND_CPU))
    return config


def _config(
    name: str,
    inputs: Iterable[Tensor],
    outputs: Iterable[Tensor],
    max_batch_size: int,
    parameters: Parameters,
    backend: str = "",
) -> ModelConfig:
    from tritonclient.grpc import model_config_pb2 as pb

    config = pb.ModelConfig(name=name, backend=backend, max_batch_size=max_batch_size)
    for tensor in inputs:
        entry = config.input.add(
            name=tensor.name,
            data_type=f"TYPE_{tensor.dtype}",
            dims=tensor.dims,
            optional=tensor.optional,
            allow_ragged_batch=tensor.ragged,
        )
        if tensor.scalar:
            entry.reshape.SetInParent()
    for tensor in outputs:
        config.output.add(name=tensor.name, data_type=f"TYPE_{tensor.dtype}", dims=tensor.dims)
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


def _token_parameters(target: EngineConfig, tokenizer_json: str, add_bos: bool) -> Parameters:
    """Special ids and their texts, from the target's stamp and the tokenizer."""
    from tokenizers import Tokenizer

    end_ids, bos_id, pad_id = target.eos_token_ids, target.stamp.get("bos_token_id"), target.stamp.get("pad_token_id")
    end_id = end_ids[0] if end_ids else None
    parameters = {
        "add_bos": _bool(add_bos),
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


def _text(config: ModelConfig) -> str:
    from google.protobuf import text_format

    # map entries are printed in the order of their keys, everything else in the order of its declaration
    return str(text_format.MessageToString(config, as_utf8=True))


def _copy_sources(version: Path, model: str, modules: Iterable[str]) -> None:
    shutil.copyfile(_SOURCES / model, version / "model.py")
    for module in modules:
        shutil.copyfile(_SOURCES / module, version / module)
    if model == "bls.py":
        package = version / "trtspec_decoding"
        package.mkdir()
        for source in sorted(_DECODING.glob("*.py")):
            shutil.copyfile(source, package / source.name)


class _replacing:
    """Context of a staging directory that takes the place of `out_dir` when the block ends without an error."""

    def __init__(self, out_dir: Path) -> None:
        self._out_dir = out_dir

    def __enter__(self) -> Path:
        out = self._out_dir
        if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / BLS / "config.pbtxt").is_file())):
            raise TrtspecError(
                "something else than a model repository is here",
                where=str(out),
                fix="move it away or choose another output.model_repo",
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        self._staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        staged = self._staging / "new"
        staged.mkdir()
        return staged

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                if self._out_dir.exists():
                    os.rename(self._out_dir, self._staging / "old")
                os.rename(self._staging / "new", self._out_dir)
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)


def _bool(value: bool) -> str:
    return "true" if value else "false"
