"""The model repository as files: complete, reproducible, self-contained, refused when something in it cannot work."""

from __future__ import annotations

import filecmp
import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trtspec.errors import TrtspecError
from trtspec.triton.check import check_repository

MODELS = {
    "preprocessing",
    "tensorrt_llm",
    "tensorrt_llm_draft",
    "tensorrt_llm_bls",
    "tensorrt_llm_bls_unary",
    "postprocessing",
    "ensemble",
}


@pytest.fixture(scope="module")
def repository(pair: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pair.write(tmp_path_factory.mktemp("written") / "repository")


def config_of(repository: Path, model: str) -> ModelConfig:
    return text_format.Parse((repository / model / "config.pbtxt").read_text(), ModelConfig())


def parameters_of(repository: Path, model: str) -> dict[str, str]:
    return {key: value.string_value for key, value in config_of(repository, model).parameters.items()}


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def edit_engine(pair: SimpleNamespace, directory: Path, role: str, **build: object) -> dict[str, Path]:
    """Copies of the engines, one of them with another build_config."""
    engines = {name: Path(shutil.copytree(path, directory / name)) for name, path in pair.engines.items()}
    file = engines[role] / "config.json"
    config = json.loads(file.read_text())
    config["build_config"] |= build
    file.write_text(json.dumps(config))
    return engines


def test_all_models_are_there_under_their_public_names(repository: Path) -> None:
    assert {path.name for path in repository.iterdir()} == MODELS
    assert all(config_of(repository, name).name == name for name in MODELS)
    assert all((repository / name / "1").is_dir() for name in MODELS)


@pytest.mark.parametrize(
    ("model", "name", "dtype", "dims", "optional", "scalar", "ragged"),
    [
        ("tensorrt_llm", "input_ids", "TYPE_INT32", [-1], True, False, True),
        ("tensorrt_llm", "request_output_len", "TYPE_INT32", [1], False, True, False),
        ("tensorrt_llm", "draft_input_ids", "TYPE_INT32", [-1], True, False, True),
        ("tensorrt_llm", "draft_logits", "TYPE_FP32", [-1, -1], True, False, True),
        ("tensorrt_llm_draft", "stop_words_list", "TYPE_INT32", [2, -1], True, False, True),
        ("tensorrt_llm", "seed", "TYPE_UINT64", [1], True, True, False),
        ("tensorrt_llm", "encoder_input_features", "TYPE_FP16", [-1, -1], True, False, True),
        ("tensorrt_llm_bls", "text_input", "TYPE_STRING", [1], False, False, False),
        ("tensorrt_llm_bls", "image_input", "TYPE_FP16", [-1, 3, -1, -1], True, False, False),
        ("tensorrt_llm_bls", "use_draft_logits", "TYPE_BOOL", [1], True, True, False),
        ("tensorrt_llm_bls_unary", "num_draft_tokens", "TYPE_INT32", [1], True, False, False),
        ("preprocessing", "STOP_WORDS_DICT", "TYPE_STRING", [-1], True, False, False),
        ("ensemble", "lora_config", "TYPE_INT32", [-1, 3], True, False, True),
    ],
)
def test_inputs_are_declared_as_public_clients_expect(
    repository: Path, model: str, name: str, dtype: str, dims: list[int], optional: bool, scalar: bool, ragged: bool
) -> None:
    tensor = next(tensor for tensor in config_of(repository, model).input if tensor.name == name)
    declared = text_format.MessageToString(tensor)
    assert f"data_type: {dtype}\n" in declared
    assert list(tensor.dims) == dims
    assert (tensor.optional, tensor.HasField("reshape"), tensor.allow_ragged_batch) == (optional, scalar, ragged)


def test_the_same_files_serve_here_and_on_the_container(repository: Path, pair: SimpleNamespace) -> None:
    for role, model in (("target", "tensorrt_llm"), ("draft", "tensorrt_llm_draft")):
        config, parameters = config_of(repository, model), parameters_of(repository, model)
        assert config.backend == "tensorrtllm"
        assert [group.kind for group in config.instance_group] == [config.instance_group[0].KIND_CPU]
        assert not config.model_transaction_policy.decoupled
        assert parameters["gpt_model_path"] == f"/engines/{pair.engines[role].name}"
        assert parameters["gpt_model_type"] == "inflight_fused_batching"
        assert parameters["exclude_input_in_output"] == "false"
        assert parameters["enable_kv_cache_reuse"] == "true"
        assert parameters["trtspec_kv_cache_bytes"] == str(32 << 20)
        assert "decoding_mode" not in parameters
    assert config_of(repository, "tensorrt_llm_bls").model_transaction_policy.decoupled
    assert not config_of(repository, "tensorrt_llm_bls_unary").model_transaction_policy.decoupled


def test_no_placeholder_and_no_path_of_this_machine_is_left(repository: Path, pair: SimpleNamespace) -> None:
    texts = {name: content.decode() for name, content in tree(repository).items()}
    assert not [name for name, text in texts.items() if name.endswith(".pbtxt") and "${" in text]
    assert not [name for name, text in texts.items() if str(pair.root) in text]


def test_every_ensemble_tensor_is_wired_to_a_declared_one(repository: Path) -> None:
    config = config_of(repository, "ensemble")
    produced = {tensor.name for tensor in config.input}
    for step in config.ensemble_scheduling.step:
        declared = config_of(repository, step.model_name)
        assert set(step.input_map) <= {tensor.name for tensor in declared.input}
        assert set(step.output_map) <= {tensor.name for tensor in declared.output}
        required = {tensor.name for tensor in declared.input if not tensor.optional}
        assert required <= set(step.input_map)
        assert set(step.input_map.values()) <= produced, step.model_name
        produced |= set(step.output_map.values())
    assert {tensor.name for tensor in config.output} <= produced
    used = {tensor for step in config.ensemble_scheduling.step for tensor in step.input_map.values()}
    assert {tensor.name for tensor in config.input} <= used


def test_the_same_input_gives_the_same_bytes(repository: Path, pair: SimpleNamespace, tmp_path: Path) -> None:
    assert tree(pair.write(tmp_path / "again")) == tree(repository)


def test_an_older_repository_is_replaced_whole(pair: SimpleNamespace, tmp_path: Path) -> None:
    out = pair.write(tmp_path / "r")
    (out / "tensorrt_llm_bls" / "1" / "leftover.py").touch()
    speculation = pair.spec.speculation.model_copy(update={"method": "none", "num_draft_tokens": 0})
    pair.write(out, spec=pair.spec.model_copy(update={"speculation": speculation}))
    assert not (out / "tensorrt_llm_draft").exists()
    assert not (out / "tensorrt_llm_bls" / "1" / "leftover.py").exists()
    assert "tensorrt_llm_draft_model_name" not in parameters_of(out, "tensorrt_llm_bls")
    assert parameters_of(out, "tensorrt_llm_bls")["num_draft_tokens"] == "0"
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_a_refused_write_leaves_the_old_repository_and_no_rest(pair: SimpleNamespace, tmp_path: Path) -> None:
    out = pair.write(tmp_path / "r")
    before = tree(out)
    with pytest.raises(TrtspecError):
        pair.write(out, engines=edit_engine(pair, tmp_path / "engines", "target", max_draft_len=0))
    shutil.rmtree(tmp_path / "engines")
    assert tree(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_something_else_in_its_place_is_not_touched(pair: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("precious")
    with pytest.raises(TrtspecError, match=r"thesis: something else than a model repository"):
        pair.write(tmp_path / "thesis")
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter1.tex"]


@pytest.mark.parametrize("model", ["preprocessing", "postprocessing", "tensorrt_llm_bls", "tensorrt_llm_bls_unary"])
def test_models_import_nothing_that_the_container_lacks(repository: Path, model: str) -> None:
    script = textwrap.dedent(
        """
        import importlib, sys, types
        sys.path[:0] = [DIRECTORY + "/1", DIRECTORY]
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("trtspec", "torch", "transformers", "pydantic", "yaml", "scipy"):
                    raise AssertionError("imports " + name)
        sys.meta_path.insert(0, Refuse())
        utils = types.ModuleType("triton_python_backend_utils")
        utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
        sys.modules[utils.__name__] = utils
        print(importlib.import_module("1.model").TritonPythonModel.__name__)
        """
    ).replace("DIRECTORY", repr(str(repository / model)))
    done = subprocess.run([sys.executable, "-I", "-B", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "TritonPythonModel\n", done.stderr


def test_the_decoding_core_is_carried_as_it_is(repository: Path) -> None:
    import trtspec.decoding

    source = Path(trtspec.decoding.__file__).parent
    carried = repository / "tensorrt_llm_bls" / "1" / "trtspec_decoding"
    names = sorted(path.name for path in source.glob("*.py"))
    assert sorted(path.name for path in carried.iterdir()) == names
    assert filecmp.cmpfiles(source, carried, names, shallow=False)[0] == names


@pytest.mark.parametrize(
    ("model", "key", "hint"),
    [
        ("tensorrt_llm", "enable_kv_cache_reuze", "did you mean enable_kv_cache_reuse?"),
        ("tensorrt_llm_draft", "gpu_devices_ids", "did you mean gpu_device_ids?"),
        ("tensorrt_llm_bls_unary", "num_draft_token", "did you mean num_draft_tokens?"),
        ("postprocessing", "zzz", "known: skip_special_tokens"),
    ],
)
def test_a_parameter_that_the_model_does_not_know_is_refused(
    pair: SimpleNamespace, tmp_path: Path, model: str, key: str, hint: str
) -> None:
    file = pair.write(tmp_path / "r") / model / "config.pbtxt"
    file.write_text(file.read_text() + f'parameters {{ key: "{key}" value {{ string_value: "1" }} }}\n')
    with pytest.raises(TrtspecError) as refused:
        check_repository(tmp_path / "r")
    assert str(refused.value) == f"{file}: parameters.{key} is unknown to {model}; {hint}"


def test_parameters_of_the_container_pass(pair: SimpleNamespace, tmp_path: Path) -> None:
    file = pair.write(tmp_path / "r") / "tensorrt_llm_draft" / "config.pbtxt"
    file.write_text(file.read_text() + 'parameters { key: "gpu_device_ids" value { string_value: "1" } }\n')
    check_repository(tmp_path / "r")


def test_every_fault_of_a_hand_made_repository_is_named(pair: SimpleNamespace, tmp_path: Path) -> None:
    out = pair.write(tmp_path / "r")
    target, bls = out / "tensorrt_llm" / "config.pbtxt", out / "tensorrt_llm_bls" / "config.pbtxt"
    lines = target.read_text().split("\n")
    number = next(i for i, line in enumerate(lines) if "inflight_fused_batching" in line)
    lines[number] = '    string_value: "${batching_strategy}"'
    target.write_text("\n".join(lines))
    bls.write_text(bls.read_text().replace('key: "acceptance"', 'key: "acceptence"'))
    with pytest.raises(TrtspecError) as refused:
        check_repository(out)
    assert str(refused.value).split("\n") == [
        f"{target}:{number + 1}: ${{batching_strategy}} is not filled in; write a value",
        f"{bls}: parameters.acceptence is unknown to tensorrt_llm_bls; did you mean acceptance?",
    ]


def test_a_chat_template_may_hold_anything(pair: SimpleNamespace, tmp_path: Path) -> None:
    template = "{% for m in messages %}${{ m.content }}\n\"'\\\u00e9{% endfor %}"
    out = pair.write(tmp_path / "r", chat_template=template)
    assert parameters_of(out, "tensorrt_llm_bls")["chat_template"] == template


@pytest.mark.parametrize(
    ("max_draft_len", "num_draft_tokens", "fits"), [(0, 4, False), (10, 10, True), (10, 11, False)]
)
def test_the_target_must_verify_what_the_pipeline_drafts(
    pair: SimpleNamespace, tmp_path: Path, max_draft_len: int, num_draft_tokens: int, fits: bool
) -> None:
    speculation = pair.spec.speculation.model_copy(update={"num_draft_tokens": num_draft_tokens})
    spec = pair.spec.model_copy(update={"speculation": speculation})
    engines = edit_engine(pair, tmp_path / "engines", "target", max_draft_len=max_draft_len)
    if fits:
        pair.write(tmp_path / "r", spec=spec, engines=engines)
        return
    with pytest.raises(TrtspecError) as refused:
        pair.write(tmp_path / "r", spec=spec, engines=engines)
    assert str(engines["target"] / "config.json") in str(refused.value)
    assert str(tmp_path / "r" / "tensorrt_llm_bls" / "config.pbtxt") in str(refused.value)


@pytest.mark.parametrize(("role", "model"), [("target", "tensorrt_llm"), ("draft", "tensorrt_llm_draft")])
def test_cache_reuse_needs_paged_context_attention_in_each_engine(
    pair: SimpleNamespace, tmp_path: Path, role: str, model: str
) -> None:
    plugins = {"use_paged_context_fmha": False, "tokens_per_block": 32}
    engines = edit_engine(pair, tmp_path / "engines", role, plugin_config=plugins)
    with pytest.raises(TrtspecError) as refused:
        pair.write(tmp_path / "r", engines=engines)
    (line,) = str(refused.value).split("\n")
    assert f"{model}/config.pbtxt: enable_kv_cache_reuse needs paged context FMHA" in line
    assert str(engines[role] / "config.json") in line


def test_acceptance_by_logits_needs_a_draft_that_returns_them(pair: SimpleNamespace, tmp_path: Path) -> None:
    speculation = pair.spec.speculation.model_copy(update={"acceptance": "logits"})
    spec = pair.spec.model_copy(update={"speculation": speculation})
    engines = edit_engine(pair, tmp_path / "engines", "draft", gather_generation_logits=False)
    with pytest.raises(TrtspecError, match="cannot return generation logits"):
        pair.write(tmp_path / "r", spec=spec, engines=engines)


def test_no_engine_no_repository(pair: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(TrtspecError, match="no such engine"):
        pair.write(tmp_path / "r", engines={"target": tmp_path / "nowhere"})
    assert list(tmp_path.iterdir()) == []
