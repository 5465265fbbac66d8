"""model.yaml of each version against tables of its fields that were written down apart from trtspec's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtspec.errors import TrtspecError
from trtspec.spec.load import load_spec
from trtspec.spec.schema import Spec
from trtspec.trtllm import llmapi
from trtspec.trtllm.llmapi import model_yaml

CONFIGS = Path(__file__).parents[2] / "configs"
FIELDS = Path(__file__).parents[1] / "triton" / "tensorrt_llm_double" / "tensorrt_llm" / "fields.py"
VERSIONS = ("1.2.1", "1.3.0rc3", "1.3.0", "1.4.0rc4")
METHODS = {
    "none": "method: none",
    "draft_target": "method: draft_target, num_draft_tokens: 5, draft: {model: org/draft}",
    "early_exit": "method: early_exit, num_draft_tokens: 5, early_exit: {layer: 8}",
    "ngram": "method: ngram, num_draft_tokens: 5, ngram: {max_ngram: 3}",
    "mtp": "method: mtp, num_draft_tokens: 3",
    "eagle": "method: eagle, eagle: {heads: org/heads, version: 3, num_layers: 5}",
}
Load = Callable[..., Spec]


@pytest.fixture(scope="module")
def double() -> Any:
    """The field tables of the double that stands for LLM(...)."""
    module_spec = importlib.util.spec_from_file_location("tensorrt_llm_double_fields", FIELDS)
    assert module_spec and module_spec.loader
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def check_arguments(double: Any) -> Callable[[dict[str, Any], str], None]:
    """The double's check of the arguments of LLM(...)."""
    return double.check_arguments  # type: ignore[no-any-return]


@pytest.mark.parametrize("version", VERSIONS)
def test_both_tables_name_the_same_fields(double: Any, version: str) -> None:
    """Written down twice from the same classes: what the double knows, trtspec knows too."""
    kinds = {llmapi.name_in(version, kind): kind for kind in ("draft_target", "eagle3", "mtp", "ngram")}
    assert set(kinds) == set(double.SPECULATIVE[version])
    for decoding_type, own in double.SPECULATIVE[version].items():
        ours = set(llmapi.fields_in(version, kinds[decoding_type]))
        assert double.BASE[version] | own <= ours, decoding_type
    assert set(llmapi.fields_in(version, "arguments")) <= double.ARGUMENTS


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """A spec of one method: `load("ngram", "engine.version=1.4.0rc4", ...)`."""

    def make(method: str, *overrides: str, version: str = "1.3.0") -> Spec:
        (tmp_path / "a.yaml").write_text(
            f"""
version: 1
target: {{model: org/target}}
speculation: {{{METHODS[method]}}}
hardware: {{gpu: H100-SXM, num_gpus: 8}}
engine: {{track: llmapi, runtime: tensorrt_llm, version: "{version}"}}
"""
        )
        return load_spec(tmp_path / "a.yaml", overrides)

    return make


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_accepted_by_every_version(
    load: Load, check_arguments: Callable[[dict[str, Any], str], None], method: str, version: str
) -> None:
    content = model_yaml(load(method, version=version))
    assert content.pop("triton_config") == {
        "max_batch_size": 0,
        "decoupled": True,
        "cancellation_check_period_ms": 100,
    }
    assert ("speculative_config" in content) == (method != "none")
    check_arguments(content, version)


SPECULATIVE = [
    ("draft_target", "1.2.1", {"decoding_type": "DraftTarget", "speculative_model_dir": "/engines/draft"}),
    ("draft_target", "1.3.0rc3", {"decoding_type": "Draft_Target", "speculative_model_dir": "/engines/draft"}),
    ("draft_target", "1.3.0", {"decoding_type": "Draft_Target", "speculative_model": "/engines/draft"}),
    ("early_exit", "1.4.0rc4", {"decoding_type": "Draft_Target", "speculative_model": "/engines/draft"}),
    ("eagle", "1.2.1", {"decoding_type": "Eagle", "speculative_model_dir": "/engines/heads"}),
    (
        "eagle",
        "1.3.0rc3",
        {"decoding_type": "Eagle3", "speculative_model_dir": "/engines/heads", "allow_advanced_sampling": True},
    ),
    ("eagle", "1.4.0rc4", {"decoding_type": "Eagle3", "speculative_model": "/engines/heads"}),
    ("mtp", "1.2.1", {"decoding_type": "MTP", "num_nextn_predict_layers": 3}),
    ("mtp", "1.3.0rc3", {"decoding_type": "MTP", "num_nextn_predict_layers": 3, "allow_advanced_sampling": True}),
    ("mtp", "1.3.0", {"decoding_type": "MTP", "max_draft_len": 3, "allow_advanced_sampling": True}),
    ("mtp", "1.4.0rc4", {"decoding_type": "MTP", "max_draft_len": 3}),
]


@pytest.mark.parametrize(("method", "version", "expected"), SPECULATIVE)
def test_renamed_fields(load: Load, method: str, version: str, expected: dict[str, Any]) -> None:
    config = model_yaml(load(method, version=version))["speculative_config"]
    if method != "mtp":
        assert config.pop("max_draft_len") == 5
    assert config == expected


@pytest.mark.parametrize("method", METHODS)
def test_the_overlap_scheduler_is_off_where_drafts_come_from_outside_the_model(load: Load, method: str) -> None:
    off = method in ("draft_target", "early_exit", "ngram")
    assert model_yaml(load(method)).get("disable_overlap_scheduler", False) == off


def test_an_ngram_drafts_from_its_own_text(load: Load) -> None:
    config = model_yaml(load("ngram"))["speculative_config"]
    assert (config["max_matching_ngram_size"], config["is_public_pool"]) == (3, False)


def test_the_example_of_deepseek_v3_renders(check_arguments: Callable[[dict[str, Any], str], None]) -> None:
    spec = load_spec(CONFIGS / "deepseek-v3-mtp-llmapi.yaml")
    content = model_yaml(spec)
    content.pop("triton_config")
    check_arguments(content, spec.engine.version)
    assert (content["model"], content["tensor_parallel_size"], content["dtype"]) == ("/engines/target", 8, "bfloat16")
    assert (content["max_batch_size"], content["max_input_len"]) == (32, 6144)
    assert (content["max_seq_len"], content["max_num_tokens"]) == (8192, 8192)
    assert content["kv_cache_config"] == {
        "enable_block_reuse": True,
        "free_gpu_memory_fraction": 0.8,
        "tokens_per_block": 32,
        "dtype": "auto",
    }
    assert content["speculative_config"]["max_draft_len"] == 1
    assert "trust_remote_code" not in content and "disable_overlap_scheduler" not in content


def test_settings_of_the_spec_reach_the_llm(load: Load) -> None:
    content = model_yaml(
        load(
            "draft_target",
            "target.trust_remote_code=true",
            "target.kv_cache_dtype=fp8",
            "speculation.draft.kv_cache_dtype=fp8",
            "speculation.acceptance=logits",
            "engine.kv_cache_reuse=false",
            "engine.tokens_per_block=64",
            "serving.chunked_context=true",
            "serving.kv_cache_bytes.target=1GiB",
            "serving.mount_point=/models/",
        ),
        draft_path="/elsewhere/draft",
    )
    assert content["trust_remote_code"] is content["enable_chunked_prefill"] is True
    assert content["model"] == "/models/target"
    assert content["kv_cache_config"] == {
        "enable_block_reuse": False,
        "free_gpu_memory_fraction": 0.9,
        "tokens_per_block": 64,
        "dtype": "fp8",
        "max_gpu_total_bytes": 2**30,
    }
    assert content["speculative_config"]["speculative_model"] == "/elsewhere/draft"
    assert content["speculative_config"]["use_rejection_sampling"] is True


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        ((), 8192),
        (("engine.max_input_len=20000", "engine.max_seq_len=30000"), 20000),
        (("engine.max_batch_size=4096",), 4096 * 6),
        (("engine.max_num_tokens=2048",), 2048),
        (("engine.max_num_tokens=1024", "engine.max_input_len=1500", "serving.chunked_context=true"), 1024),
    ],
)
def test_one_pass_takes_a_prompt_and_every_draft(load: Load, overrides: tuple[str, ...], tokens: int) -> None:
    assert model_yaml(load("ngram", *overrides))["max_num_tokens"] == tokens


REFUSED = [
    ("none", ["target.quantization=int8_sq"], "target.quantization: the PyTorch backend has no int8 SmoothQuant"),
    ("early_exit", ["target.quantization=fp8"], "target.quantization: the draft of early_exit is cut out of"),
    ("none", ["target.kv_cache_dtype=int8"], "target.kv_cache_dtype: the PyTorch backend has no int8 KV cache"),
    ("draft_target", ["target.tensor_parallel=2"], "speculation.draft.tensor_parallel: 1 differs from the target's 2"),
    ("draft_target", ["speculation.draft.dtype=float16"], "speculation.draft.dtype: float16 differs"),
    ("draft_target", ["speculation.draft.max_seq_len=1500"], "speculation.draft.max_seq_len: the LLM API has one"),
    ("eagle", ["speculation.eagle.version=1"], "speculation.eagle.version: the LLM API takes EAGLE-3 heads only"),
    ("ngram", ["speculation.ngram.window=64"], "speculation.ngram.window: the n-gram pool"),
    ("ngram", ["engine.max_draft_len=9"], "engine.max_draft_len: the LLM API verifies what it drafts: 5 tokens"),
    ("ngram", ["engine.max_num_tokens=512"], "engine.max_num_tokens: 512 is less than the 1024 tokens"),
    (
        "none",
        ["engine.build_options.gemm_plugin=auto"],
        "engine.build_options.gemm_plugin: nothing is compiled on this track",
    ),
    ("none", ["engine.logits_dtype=float16"], "engine.logits_dtype: the PyTorch backend has no setting for it"),
    ("none", ["engine.paged_context_fmha=false"], "engine.paged_context_fmha: the PyTorch backend always"),
    (
        "none",
        ["serving.engine_parameters={cuda_graph_mode: 'true'}"],
        "serving.engine_parameters: they are parameters of",
    ),
    ("none", ["serving.orchestrator=true"], "serving.orchestrator: it is for the C++ backend"),
    ("ngram", ["serving.default_num_draft_tokens=2"], "serving.default_num_draft_tokens: the LLM API drafts the same"),
    (
        "draft_target",
        ["serving.kv_cache_free_gpu_mem_fraction.draft=0.2"],
        "serving.kv_cache_free_gpu_mem_fraction.draft: target and draft share",
    ),
    (
        "mtp",
        ["serving.draft_length.policy=adaptive"],
        "serving.draft_length.policy: the LLM API does not adapt the draft length to what is accepted; use policy: "
        "schedule, or fixed",
    ),
    (
        "ngram",
        ["serving.draft_length={policy: schedule, schedule: {4: 3, 8: 2}}"],
        "serving.draft_length.schedule: 3 draft tokens at load 4; the LLM API begins with all 5; write 4: 5",
    ),
    (
        "ngram",
        ["engine.version=1.3.0rc3", "serving.draft_length={policy: schedule, schedule: {4: 5, 8: 2}}"],
        "serving.draft_length.schedule: the LLM API of TensorRT-LLM 1.3.0rc3 drafts 5 tokens or none; write only "
        "{N: 5}, or use engine.version 1.3.0",
    ),
    (
        "ngram",
        ["engine.version=1.2.1", "serving.draft_length={policy: schedule, schedule: {4: 5, 8: 0, 16: 5}}"],
        "serving.draft_length.schedule: the LLM API of TensorRT-LLM 1.2.1 drafts 5 tokens or none",
    ),
    (
        "none",
        ["target.tensor_parallel=16", "hardware.num_nodes=2"],
        "hardware.num_nodes: the model needs 16 GPUs and one node has 8",
    ),
    (
        "draft_target",
        ["speculation.acceptance=logits", "engine.version=1.2.1"],
        "speculation.acceptance: TensorRT-LLM 1.2.1 accepts drafts by equality",
    ),
]


@pytest.mark.parametrize(("method", "overrides", "message"), REFUSED)
def test_what_the_llm_api_cannot_honour_is_refused(load: Load, method: str, overrides: list[str], message: str) -> None:
    with pytest.raises(TrtspecError) as refused:
        model_yaml(load(method, *overrides))
    assert any(message in line for line in str(refused.value).splitlines()), refused.value


SCHEDULES = {
    # by steps: the largest load of each, and nothing beyond the last
    ("1.3.0", "{4: 5, 8: 2, 16: 0}"): {"draft_len_schedule": {4: 5, 8: 2}},
    ("1.3.0", "{4: 5, 8: 0, 16: 2}"): {"draft_len_schedule": {4: 5, 8: 0, 16: 2}},
    ("1.4.0rc4", "{8: 5}"): {"draft_len_schedule": {8: 5}},
    # on or off
    ("1.2.1", "{4: 5, 8: 5, 16: 0}"): {"max_concurrency": 8},
    ("1.3.0rc3", "{8: 5}"): {"max_concurrency": 8},
}


@pytest.mark.parametrize("method", ["ngram", "draft_target", "mtp", "eagle"])
@pytest.mark.parametrize(("version", "schedule"), SCHEDULES)
def test_a_schedule_of_draft_lengths_is_the_llms(
    load: Load, check_arguments: Callable[[dict[str, Any], str], None], method: str, version: str, schedule: str
) -> None:
    most = ("speculation.num_draft_tokens=5",)
    plain = model_yaml(load(method, *most, version=version))
    setting = f"serving.draft_length={{policy: schedule, schedule: {schedule}}}"
    content = model_yaml(load(method, *most, setting, version=version))
    check_arguments({key: value for key, value in content.items() if key != "triton_config"}, version)
    assert content["speculative_config"] == plain["speculative_config"] | SCHEDULES[version, schedule]


@pytest.mark.parametrize("setting", ["{}", "{policy: fixed}", "{policy: fixed, schedule: {4: 2}}"])
def test_fixed_draft_lengths_change_nothing_in_the_llm(load: Load, setting: str) -> None:
    assert model_yaml(load("ngram", f"serving.draft_length={setting}")) == model_yaml(load("ngram"))
    plain = load("none", "serving.draft_length={policy: schedule, schedule: {4: 2}}")
    assert model_yaml(plain) == model_yaml(load("none"))


@pytest.mark.parametrize("method", ["medusa", "tree", "cascade", "lookahead", "redrafter"])
def test_a_method_without_counterpart_is_refused(load: Load, method: str) -> None:
    sections = {
        "medusa": "medusa: {heads: org/heads}",
        "tree": "draft: {model: org/draft}",
        "cascade": "draft: {model: org/draft}, cascade: {middle: {model: org/middle}}",
        "lookahead": "lookahead: {}",
        "redrafter": "redrafter: {drafter: org/drafter}",
    }
    METHODS["temporary"] = f"method: {method}, {sections[method]}"
    try:
        with pytest.raises(TrtspecError, match=f"speculation.method: the LLM API has no method {method}"):
            model_yaml(load("temporary"))
    finally:
        del METHODS["temporary"]


def test_a_field_that_a_version_does_not_have_cannot_be_written() -> None:
    content = {"model": "m", "kv_cache_config": {"tokens_per_block": "32", "disk_cache_size": 1}, "max_tokens": 3}
    content["speculative_config"] = {"decoding_type": "MTP", "max_draft_len": 1, "use_rejection_sampling": True}
    assert llmapi.unknown_fields(content, "1.2.1") == [
        "TensorRT-LLM 1.2.1 has no field max_tokens",
        "kv_cache_config.tokens_per_block is '32', expected int",
        "TensorRT-LLM 1.2.1 has no field kv_cache_config.disk_cache_size",
        "TensorRT-LLM 1.2.1 has no field speculative_config.use_rejection_sampling",
    ]
    content["speculative_config"] = {"decoding_type": "Eagle3", "max_draft_len": 1}
    assert "TensorRT-LLM 1.2.1 has no decoding_type Eagle3" in llmapi.unknown_fields(content, "1.2.1")


def test_the_check_stands_between_a_wrong_name_and_the_file(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(llmapi.NAMES, "draft_model", (("1.2.0rc0", "draft_model_path"),))
    with pytest.raises(TrtspecError, match=r"has no field speculative_config\.draft_model_path"):
        model_yaml(load("draft_target"))


@pytest.mark.parametrize(
    ("thing", "version", "name"),
    [
        ("draft_len_schedule", "1.2.1", None),
        ("draft_len_schedule", "1.3.0rc1", "draft_len_schedule"),
        ("max_concurrency", "1.2.1", "max_concurrency"),
        ("gate_window", "1.3.0rc15", "acceptance_window"),
        ("gate_window", "1.3.0", "acceptance_rate_window_size"),
        ("mtp_draft_len", "1.3.0rc14", "num_nextn_predict_layers"),
        ("mtp_draft_len", "1.3.0rc15", "max_draft_len"),
        ("eagle3", "9.9.9", "Eagle3"),
    ],
)
def test_names_by_version(thing: str, version: str, name: str | None) -> None:
    assert llmapi.name_in(version, thing) == name
    if name and thing not in ("eagle3",):
        part = "mtp" if thing == "mtp_draft_len" else "draft_target"
        assert name in llmapi.fields_in(version, part)


def test_a_version_that_nobody_knows_yet_gets_the_newest_names_and_a_remark(load: Load) -> None:
    spec = load("mtp", version="1.7.0")
    newest = model_yaml(load("mtp", version="1.4.0rc4"))
    assert model_yaml(spec) == newest
    (remark,) = llmapi.remarks(spec)
    assert "engine.version: the LLM API of TensorRT-LLM 1.7.0 is not known" in remark
    assert llmapi.remarks(load("mtp")) == []


@pytest.mark.parametrize(
    ("method", "version", "greedy_only", "penalties"),
    [
        ("mtp", "1.2.1", True, False),
        ("mtp", "1.3.0", False, False),
        ("eagle", "1.2.1", True, False),
        ("draft_target", "1.2.1", False, True),
        ("draft_target", "1.3.0", False, False),
        ("ngram", "1.4.0rc4", False, True),
        ("none", "1.2.1", False, True),
    ],
)
def test_what_requests_may_ask_for(load: Load, method: str, version: str, greedy_only: bool, penalties: bool) -> None:
    spec = load(method, version=version)
    assert (llmapi.greedy_only(spec), llmapi.penalties(spec)) == (greedy_only, penalties)
    assert len(llmapi.remarks(spec)) == greedy_only
