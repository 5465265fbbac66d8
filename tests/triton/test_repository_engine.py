"""Engine models for the C++ backend, parameter by parameter and method by method, and what is refused about them.

Engines are prepared for real, from checkpoints of which only config.json is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig as PbConfig

from trtspec.build import limits
from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.spec.load import load_spec
from trtspec.spec.schema import Spec
from trtspec.triton import contract, launch
from trtspec.triton.check import check_repository
from trtspec.triton.engine_parameters import LEFT_UNSET
from trtspec.triton.repository import ENGINE_MODELS, write_repository
from trtspec.trtllm.compiler import CompileJob, prepare_engine
from trtspec.trtllm.placement import LOAD_ORDER

MODEL = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 280,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "eos_token_id": [2, 0],
    }
)
HEAD = """
version: 1
target: {model: t, dtype: float16, tensor_parallel: 2}
hardware: {gpu: H100-SXM, num_gpus: 4}
engine: {runtime: tensorrt_llm, max_batch_size: 4, max_input_len: 256, max_seq_len: 512}
"""
DRAFT_TARGET = "speculation: {method: draft_target, draft: {model: d, dtype: float16}}\nserving: {orchestrator: true}"
METHODS = {
    "none": "speculation: {method: none}",
    "draft_target": DRAFT_TARGET,
    "ngram": "speculation: {method: ngram}",
    "cascade": "speculation: {method: cascade, draft: {model: d, dtype: float16}, "
    "cascade: {num_draft_tokens: 2, middle: {model: m, dtype: float16}}}\nserving: {orchestrator: true}",
    "medusa": "speculation: {method: medusa, medusa: {heads: h, num_heads: 3, choices: [[0], [1], [0, 0], [0, 0, 2]]}}",
    "eagle": "speculation: {method: eagle, eagle: {heads: h, num_layers: 2, choices: [[0], [0, 1]]}}",
    "redrafter": "speculation: {method: redrafter, redrafter: {drafter: r}}",
    "lookahead": "speculation: {method: lookahead}",
}
_QUANT_ALGOS = {"none": None, "fp8": "FP8", "w4a8_awq": "W4A8_AWQ", "int8_sq": "W8A8_SQ_PER_CHANNEL"}


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., Spec]:
    """A spec of one of METHODS, with overrides as for `--set`."""

    def load(method: str, *overrides: str) -> Spec:
        (tmp_path / "s.yaml").write_text(f"{HEAD}{METHODS[method]}\n")
        return load_spec(tmp_path / "s.yaml", overrides)

    return load


@pytest.fixture
def written(tmp_path: Path, tiny_tokenizer_json: str) -> Callable[..., Path]:
    """The repository of a spec. Further arguments change the engines' config.json: role -> section -> keys."""

    def write(spec: Spec, fractions: dict[str, float] | None = None, **changes: dict[str, dict[str, Any]]) -> Path:
        engines = {role: prepare(spec, role, tmp_path / "engines") for role in spec.models}
        for role, sections in changes.items():
            file = engines[role] / "config.json"
            config = json.loads(file.read_text())
            for section, keys in sections.items():
                config[section] |= keys
            file.write_text(json.dumps(config))
        return write_repository(
            out_dir=tmp_path / "repository",
            spec=spec,
            engines=engines,
            tokenizer_json=tiny_tokenizer_json,
            kv_cache_fractions=fractions,
        )

    return write


def prepare(spec: Spec, role: str, root: Path) -> Path:
    """The prepared engine of `role`, from a checkpoint without weights."""
    ref, speculation = spec.models[role], spec.speculation
    config = {
        "architecture": "LlamaForCausalLM",
        "dtype": ref.dtype,
        "vocab_size": MODEL.vocab_size,
        "mapping": {"world_size": ref.world_size, "tp_size": ref.world_size, "pp_size": 1},
        "quantization": {
            "quant_algo": _QUANT_ALGOS[ref.quantization],
            "kv_cache_quant_algo": None if ref.kv_cache_dtype == "auto" else ref.kv_cache_dtype.upper(),
        },
    }
    if role == "target" and speculation.medusa:
        config["num_medusa_heads"] = speculation.medusa.num_heads
    if role == "target" and speculation.eagle:
        config["num_eagle_layers"] = speculation.eagle.num_layers
    checkpoint = root / "checkpoints" / role
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps(config))
    job = CompileJob(
        role=role,
        checkpoint_dir=checkpoint,
        out_dir=root / role,
        build_config=limits.build_config(spec, role, None),
        mode=limits.mode(spec, role),
        version=spec.engine.version,
        logits_dtype=spec.engine.logits_dtype,
        world_size=ref.world_size,
        sm=spec.hardware.sm,
        quantization=ref.quantization,
    )
    stamp = {"eos_token_ids": [2, 0], "bos_token_id": 0, "pad_token_id": 2, "model_config": asdict(MODEL)}
    prepare_engine(job, root / role, stamp)
    return root / role


def config_of(repository: Path, model: str) -> PbConfig:
    return text_format.Parse((repository / model / "config.pbtxt").read_text(), PbConfig())


def parameters_of(repository: Path, role: str) -> dict[str, str]:
    config = config_of(repository, ENGINE_MODELS[role])
    return {key: value.string_value for key, value in config.parameters.items()}


def edit(repository: Path, model: str, change: Callable[[PbConfig], object]) -> Path:
    """Change a written config.pbtxt as a person might."""
    config = config_of(repository, model)
    change(config)
    file = repository / model / "config.pbtxt"
    file.write_text(text_format.MessageToString(config))
    return file


def faults(repository: Path, engines: dict[str, Path] | None = None) -> list[str]:
    with pytest.raises(TrtspecError) as refused:
        check_repository(repository, engines)
    return str(refused.value).split("\n")


COMMON = {
    "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
    "batch_scheduler_policy": "guaranteed_no_evict",
    "cancellation_check_period_ms": "100",
    "enable_chunked_context": "false",
    "enable_kv_cache_reuse": "true",
    "exclude_input_in_output": "false",
    "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
    "gpt_model_path": "/engines/target",
    "gpt_model_type": "inflight_fused_batching",
    "gpu_device_ids": "0,1",
    "max_beam_width": "1",
    "normalize_log_probs": "true",
    "num_nodes": "1",
    "speculative_decoding_fast_logits": "false",
}
OF_METHOD = {
    "none": {},
    "draft_target": {},
    "ngram": {},
    "cascade": {},
    "medusa": {"decoding_mode": "medusa", "medusa_choices": "{0}, {1}, {0, 0}, {0, 0, 2}"},
    "eagle": {"decoding_mode": "eagle", "eagle_choices": "{0}, {0, 1}"},
    "redrafter": {"decoding_mode": "redrafter"},
    "lookahead": {
        "decoding_mode": "lookahead",
        "lookahead_window_size": "4",
        "lookahead_ngram_size": "3",
        "lookahead_verification_set_size": "4",
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_the_target_is_told_everything_and_nothing_else(spec_of, written, method: str) -> None:
    repository = written(spec_of(method))
    assert parameters_of(repository, "target") == COMMON | OF_METHOD[method]
    others = {"draft": {"draft"}, "draft_target": {"draft"}, "cascade": {"draft", "middle"}}.get(method, set())
    for role in ("draft", "middle"):
        assert (repository / ENGINE_MODELS[role]).exists() == (role in others)
    for role in others:
        changed = {"gpt_model_path": f"/engines/{role}", "gpu_device_ids": "0"}
        assert parameters_of(repository, role) == COMMON | changed


@pytest.mark.parametrize("method", METHODS)
def test_no_engine_model_is_decoupled(spec_of, written, method: str) -> None:
    repository = written(spec_of(method))
    for model in set(ENGINE_MODELS.values()) & {path.name for path in repository.iterdir()}:
        config = config_of(repository, model)
        assert not config.model_transaction_policy.decoupled
        assert config.backend == "tensorrtllm"
        assert (config.max_batch_size, list(config.dynamic_batching.preferred_batch_size)) == (4, [4])


def test_every_parameter_of_the_backend_is_set_or_left_out_for_a_reason(spec_of, written, tmp_path: Path) -> None:
    settings = ["serving.orchestrator=true", "serving.spawn_processes=false"]
    spec = spec_of("draft_target", *settings, "serving.kv_cache_bytes.target=64MiB")
    placed = parameters_of(written(spec, {"target": 0.9, "draft": 0.1}), "target")
    set_somewhere = {*placed, *(name for names in OF_METHOD.values() for name in names), "trtspec_kv_cache_bytes"}
    assert set_somewhere | set(LEFT_UNSET) == set(contract.ENGINE_PARAMETERS)
    assert not set_somewhere & set(LEFT_UNSET)


def test_settings_of_the_spec_arrive(spec_of, written) -> None:
    spec = spec_of(
        "draft_target",
        "serving.spawn_processes=false",
        "serving.gpu_device_ids.target=[2, 3]",
        "serving.gpu_device_ids.draft=[1]",
        "serving.kv_cache_free_gpu_mem_fraction.draft=0.25",
        "serving.chunked_context=true",
        "serving.mount_point=/models/engines/",
        'serving.engine_parameters={cuda_graph_mode: "true", batch_scheduler_policy: max_utilization}',
    )
    repository = written(spec, {"target": 0.85, "draft": 0.25})
    given = {
        "batch_scheduler_policy": "max_utilization",
        "cuda_graph_mode": "true",
        "enable_chunked_context": "true",
    }
    assert parameters_of(repository, "target") == COMMON | given | {
        "gpt_model_path": "/models/engines/target",
        "gpu_device_ids": "2,3",
        "participant_ids": "2,3",
        "kv_cache_free_gpu_mem_fraction": "0.85",
    }
    assert parameters_of(repository, "draft") == COMMON | given | {
        "gpt_model_path": "/models/engines/draft",
        "gpu_device_ids": "1",
        "participant_ids": "1",
        "kv_cache_free_gpu_mem_fraction": "0.25",
    }


@pytest.mark.parametrize(("given", "text"), [("0.7", "0.7"), ("1.0", "1"), ("0.00005", "0.00005")])
def test_a_fraction_of_the_spec_needs_no_plan(spec_of, written, given: str, text: str) -> None:
    repository = written(spec_of("none", f"serving.kv_cache_free_gpu_mem_fraction.target={given}"))
    assert parameters_of(repository, "target")["kv_cache_free_gpu_mem_fraction"] == text


def test_fractions_of_the_plan_let_the_draft_load_before_the_target(spec_of, written) -> None:
    spec = spec_of("draft_target")
    fractions = limits.plan(spec, {"target": MODEL, "draft": MODEL})["kv_cache_fractions"]
    repository = written(spec, fractions)
    assert parameters_of(repository, "target")["kv_cache_free_gpu_mem_fraction"] == "0.9"
    assert 0 < float(parameters_of(repository, "draft")["kv_cache_free_gpu_mem_fraction"]) < 0.1


def test_the_container_loads_engines_in_the_order_of_the_plan() -> None:
    assert tuple(ENGINE_MODELS[role] for role in LOAD_ORDER) == launch.ENGINE_MODELS


def test_on_several_nodes_the_launcher_hands_out_the_gpus(spec_of, written) -> None:
    parameters = parameters_of(written(spec_of("none", "hardware.num_nodes=2")), "target")
    assert parameters["num_nodes"] == "2"
    assert "gpu_device_ids" not in parameters


@pytest.mark.parametrize(("given", "dtype"), [("float32", "TYPE_FP32"), ("float16", "TYPE_FP16")])
def test_logits_have_the_type_of_the_engine(spec_of, written, given: str, dtype: str) -> None:
    repository = written(spec_of("draft_target", f"engine.logits_dtype={given}"))
    tensors = {
        "tensorrt_llm": ("draft_logits", "context_logits", "generation_logits"),
        "tensorrt_llm_draft": ("draft_logits", "context_logits", "generation_logits"),
        "tensorrt_llm_bls": ("context_logits", "generation_logits"),
        "tensorrt_llm_bls_unary": ("context_logits", "generation_logits"),
        "ensemble": ("context_logits", "generation_logits"),
    }
    for model, names in tensors.items():
        config = config_of(repository, model)
        found = {tensor.name: tensor for tensor in (*config.input, *config.output)}
        for name in names:
            assert f"data_type: {dtype}\n" in text_format.MessageToString(found[name]), (model, name)


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ('{cuda_graph_mod: "true"}', "no parameter of the C++ backend's models; did you mean cuda_graph_mode?"),
        ('{decoding_mode: "top_k"}', "trtspec sets this parameter itself; set speculation.method instead"),
        ('{gpu_device_ids: "0"}', "trtspec sets this parameter itself; set serving.gpu_device_ids instead"),
        ('{max_beam_width: "4"}', "trtspec sets this parameter itself; remove it"),
        ('{cuda_graph_mode: "on"}', "'on' is no value for it; expected true or false"),
        ('{gpu_weights_percent: "1.5"}', "'1.5' is no value for it; expected a number from 0 to 1"),
        ('{kv_cache_host_memory_bytes: "1GiB"}', "'1GiB' is no value for it; expected a whole number"),
        ('{batch_scheduler_policy: "greedy"}', "'greedy' is no value for it; expected max_utilization or"),
    ],
)
def test_a_further_parameter_must_be_the_backends_and_the_users(
    spec_of, written, tmp_path: Path, parameter: str, message: str
) -> None:
    with pytest.raises(TrtspecError) as refused:
        written(spec_of("none", f"serving.engine_parameters={parameter}"))
    assert message in str(refused.value)
    assert "serving.engine_parameters" in str(refused.value)
    assert not (tmp_path / "repository").exists()


def test_fast_logits_are_refused_with_the_reason(spec_of, written) -> None:
    settings = ("serving.fast_logits=true", "serving.spawn_processes=false")
    with pytest.raises(TrtspecError, match=r"serving\.fast_logits: the pipeline takes the end ids out"):
        written(spec_of("draft_target", *settings))


def test_split_models_side_by_side_need_an_orchestrator(spec_of, written) -> None:
    with pytest.raises(TrtspecError, match=r"serving\.orchestrator: 2 engine models.*set serving\.orchestrator: true"):
        written(spec_of("draft_target", "serving.orchestrator=false"))


# What an engine's config.json says -> (method, the keys changed, the fault; {engine} is the engine's config.json).
ENGINE_FAULTS: dict[str, tuple[str, dict[str, dict[str, Any]], str]] = {
    "no paged context": (
        "none",
        {"build_config": {"plugin_config": {"use_paged_context_fmha": False}}},
        "enable_kv_cache_reuse needs paged context FMHA, and {engine} was built without it",
    ),
    "int8 cache": (
        "none",
        {"pretrained_config": {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "INT8"}}},
        "enable_kv_cache_reuse needs paged context FMHA, and {engine} has an INT8 KV cache, which turns it off",
    ),
    "fp8 cache, other weights": (
        "none",
        {"pretrained_config": {"quantization": {"quant_algo": "W4A16_AWQ", "kv_cache_quant_algo": "FP8"}}},
        "enable_kv_cache_reuse needs paged context FMHA, and {engine} has an FP8 KV cache without FP8 weights",
    ),
    "lookahead of other sizes": (
        "lookahead",
        {"build_config": {"max_draft_len": 39}},
        "max_draft_len is 39, but lookahead sizes (window, ngram, verification) (4, 3, 4) in {pbtxt} draft 15",
    ),
    "engine of another method": (
        "lookahead",
        {"build_config": {"speculative_decoding_mode": 4}},
        "decoding_mode is lookahead, but {engine} was built for mode medusa; set it to medusa",
    ),
    "medusa engine without its mode": (
        "none",
        {"build_config": {"speculative_decoding_mode": 4}},
        "decoding_mode is unset, but {engine} was built for mode medusa; set it to medusa",
    ),
    "plain engine with a mode": (
        "medusa",
        {"build_config": {"speculative_decoding_mode": 2}},
        "decoding_mode is medusa, but {engine} was built for mode draft_tokens_external; remove it",
    ),
    "too few draft slots": (
        "medusa",
        {"build_config": {"max_draft_len": 3}},
        "medusa_choices is a tree that has 4 nodes, but max_draft_len is 3 in {engine}",
    ),
    "too few heads": (
        "medusa",
        {"pretrained_config": {"num_medusa_heads": 2}},
        "medusa_choices is a tree that is 3 deep, but num_medusa_heads is 2 in {engine}",
    ),
    "too few eagle layers": (
        "eagle",
        {"pretrained_config": {"num_eagle_layers": 1}},
        "eagle_choices is a tree that is 2 deep, but num_eagle_layers is 1 in {engine}",
    ),
    "logits of another type": (
        "none",
        {"pretrained_config": {"logits_dtype": "float16"}},
        "generation_logits are FP32, but {engine} was built with logits_dtype float16",
    ),
    "split otherwise": (
        "none",
        {"pretrained_config": {"mapping": {"world_size": 4}}},
        "gpu_device_ids is '0,1', but {engine} was built for 4 ranks",
    ),
}


@pytest.mark.parametrize("case", ENGINE_FAULTS)
def test_what_the_engine_cannot_do_is_one_line_with_both_files(spec_of, written, tmp_path: Path, case: str) -> None:
    method, changes, message = ENGINE_FAULTS[case]
    with pytest.raises(TrtspecError) as refused:
        written(spec_of(method), target=changes)
    (line,) = str(refused.value).split("\n")
    engine = tmp_path / "engines" / "target" / "config.json"
    pbtxt = tmp_path / "repository" / "tensorrt_llm" / "config.pbtxt"
    assert message.format(engine=engine, pbtxt=pbtxt) in line
    assert str(pbtxt) in line
    assert str(engine) in line
    assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize("algorithm", ["FP8", "W4A8_AWQ"])
def test_an_fp8_cache_with_fp8_arithmetic_can_be_reused(spec_of, written, algorithm: str) -> None:
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}
    repository = written(spec_of("none"), target={"pretrained_config": {"quantization": quantization}})
    assert parameters_of(repository, "target")["enable_kv_cache_reuse"] == "true"


def test_chunked_context_needs_paged_context_too(spec_of, written) -> None:
    plugins = {"build_config": {"plugin_config": {"use_paged_context_fmha": False}}}
    spec = spec_of("none", "serving.chunked_context=true", "engine.kv_cache_reuse=false")
    with pytest.raises(TrtspecError, match="enable_chunked_context needs paged context FMHA"):
        written(spec, target=plugins)


@pytest.mark.parametrize(
    ("heads", "max_draft_len", "message"),
    [
        (4, 63, None),
        (3, 63, "medusa_choices is unset, and the default tree is 4 deep, but num_medusa_heads is 3"),
        (4, 62, "medusa_choices is unset, and the default tree has 63 nodes, but max_draft_len is 62"),
    ],
)
def test_the_default_tree_needs_four_heads_and_63_slots(
    spec_of, written, heads: int, max_draft_len: int, message: str | None
) -> None:
    spec = spec_of("medusa", "speculation.medusa={heads: h, num_heads: 4}")
    changes = {"pretrained_config": {"num_medusa_heads": heads}, "build_config": {"max_draft_len": max_draft_len}}
    if message is None:
        assert "medusa_choices" not in parameters_of(written(spec, target=changes), "target")
        return
    with pytest.raises(TrtspecError, match=message):
        written(spec, target=changes)


@pytest.mark.parametrize("broken", ["middle", "middle_2"])
def test_each_engine_of_a_cascade_verifies_what_the_one_below_proposes(
    spec_of, written, tmp_path: Path, broken: str
) -> None:
    spec = spec_of("cascade", "speculation.cascade.middles=[{model: n, dtype: float16}]")
    with pytest.raises(TrtspecError) as refused:
        written(spec, **{broken: {"build_config": {"max_draft_len": 1}}})
    lines = str(refused.value).split("\n")  # the two pipelines say the same
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"{tmp_path / 'engines' / broken / 'config.json'}: max_draft_len is 1")
        assert "num_draft_tokens 2" in line


# A hand-made change of config.pbtxt -> (model, the change, the fault).
HAND_MADE: dict[str, tuple[str, Callable[[PbConfig], object], str]] = {
    "decoupled": (
        "tensorrt_llm_draft",
        lambda config: setattr(config.model_transaction_policy, "decoupled", True),
        "model_transaction_policy.decoupled is true, but the pipeline wants one answer a call",
    ),
    "prompt left out": (
        "tensorrt_llm",
        lambda config: setattr(config.parameters["exclude_input_in_output"], "string_value", "true"),
        "exclude_input_in_output is true, but the pipeline reads the prompt back; write false",
    ),
    "no number": (
        "tensorrt_llm",
        lambda config: setattr(config.parameters["cancellation_check_period_ms"], "string_value", "0.1s"),
        "parameters.cancellation_check_period_ms is '0.1s'; expected a whole number",
    ),
    "a rank of the orchestrator": (
        "tensorrt_llm",
        lambda config: setattr(config.parameters["participant_ids"], "string_value", "0,1"),
        "participant_ids has rank 0, which belongs to the orchestrator; name another",
    ),
    "fast logits without ranks": (
        "tensorrt_llm",
        lambda config: setattr(config.parameters["speculative_decoding_fast_logits"], "string_value", "1"),
        "speculative_decoding_fast_logits needs an orchestrator and participant_ids; name its ranks",
    ),
    "a tree in other words": (
        "tensorrt_llm",
        lambda config: setattr(config.parameters["medusa_choices"], "string_value", "[[0], [1]]"),
        "parameters.medusa_choices is '[[0], [1]]'; expected paths such as \"{0}, {1}, {0, 0}\"",
    ),
}


@pytest.mark.parametrize("case", HAND_MADE)
def test_a_repository_changed_by_hand_is_checked_again(spec_of, written, case: str) -> None:
    model, change, message = HAND_MADE[case]
    file = edit(written(spec_of("draft_target")), model, change)
    assert f"{file}: {message}" in faults(file.parents[1])


def test_two_models_cannot_share_a_rank(spec_of, written) -> None:
    repository = written(spec_of("draft_target", "serving.spawn_processes=false"))
    edit(
        repository,
        "tensorrt_llm_draft",
        lambda config: setattr(config.parameters["participant_ids"], "string_value", "3"),
    )
    (fault,) = faults(repository)
    assert "participant_ids has rank 3, which belongs to tensorrt_llm" in fault


def test_fast_logits_are_for_both_models_or_none(spec_of, written) -> None:
    repository = written(spec_of("draft_target", "serving.spawn_processes=false"))
    file = edit(
        repository,
        "tensorrt_llm",
        lambda config: setattr(config.parameters["speculative_decoding_fast_logits"], "string_value", "true"),
    )
    (fault,) = faults(repository)
    assert fault.startswith(f"{repository / 'tensorrt_llm_draft' / 'config.pbtxt'}: speculative_decoding_fast_logits")
    assert f"but {file.parent.name} has it on" in fault


def test_a_tree_lists_every_parent(spec_of, written, tmp_path: Path) -> None:
    repository = written(spec_of("medusa"))
    edit(
        repository,
        "tensorrt_llm",
        lambda config: setattr(config.parameters["medusa_choices"], "string_value", "{0}, {1, 0}"),
    )
    (fault,) = faults(repository, {"tensorrt_llm": tmp_path / "engines" / "target"})
    assert "medusa_choices has the path [1, 0] without its parent [1]; add it" in fault
