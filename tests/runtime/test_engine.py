"""Engine directories: what is written, what is refused when it is read, and which engines go together."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trtspec.errors import TrtspecError
from trtspec.models.source import HFSource, ModelSource, open_model
from trtspec.runtime.engine import EngineConfig, check_engine_pair, check_lookahead, write_torch_engine
from trtspec.runtime.torch_runtime import TorchRuntime


def write(source: ModelSource, out: Path, **keywords: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"dtype": "float32", "role": "target", "build_config": {}, "stamp": {}}
    return write_torch_engine(source, out, **defaults | keywords)


@pytest.fixture
def source(tiny_model_dir: Path) -> ModelSource:
    return open_model(str(tiny_model_dir))


@pytest.fixture
def engine(source: ModelSource, tmp_path: Path) -> Path:
    write(source, tmp_path / "engine")
    return tmp_path / "engine"


def test_config_has_the_shape_of_a_tensorrt_llm_engine(source: ModelSource, tmp_path: Path) -> None:
    out = tmp_path / "engines" / "target"
    stamp = {"version": "1.2.1", "spec_hash": "abc"}
    written = write(source, out, build_config={"max_seq_len": 256, "max_draft_len": 5}, stamp=stamp)
    content = json.loads((out / "config.json").read_text())
    assert list(content) == ["version", "pretrained_config", "build_config", "trtspec"]
    assert content["version"] == "1.2.1"
    expected = {
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "vocab_size": 280,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_size": 8,
        "intermediate_size": 64,
        "position_embedding_type": "rope_gpt_neox",
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
    }
    assert content["pretrained_config"].items() >= expected.items()
    limits = {"max_seq_len": 256, "max_draft_len": 5, "max_beam_width": 1, "speculative_decoding_mode": 2}
    assert content["build_config"].items() >= limits.items()
    assert content["build_config"]["plugin_config"]["use_paged_context_fmha"] is True
    assert content["trtspec"].items() >= {"runtime": "torch", "role": "target", "spec_hash": "abc"}.items()
    read = EngineConfig.load(out)
    assert read.to_json() == written.to_json() == content
    assert read.eos_token_ids == (2, 0)
    assert read.model == source.config


def test_weights_have_tensorrt_llm_names_and_the_models_values(source: ModelSource, engine: Path) -> None:
    weights = load_file(engine / "rank0.safetensors")
    name = "model.layers.1.self_attn"
    qkv = torch.cat([source.tensor(f"{name}.{part}_proj.weight") for part in "qkv"])
    assert torch.equal(weights["transformer.layers.1.attention.qkv.weight"], qkv)
    gate = source.tensor("model.layers.0.mlp.gate_proj.weight")
    assert torch.equal(weights["transformer.layers.0.mlp.fc.weight"], gate)
    assert torch.equal(weights["lm_head.weight"], source.tensor("lm_head.weight"))
    assert len(weights) == 3 + 2 * 7


def test_a_tied_head_is_stored_once(save_model: Callable[..., Path], tmp_path: Path) -> None:
    tied = open_model(str(save_model(tmp_path / "tied", tie_word_embeddings=True)))
    write(tied, tmp_path / "engine")
    assert "lm_head.weight" not in load_file(tmp_path / "engine" / "rank0.safetensors")
    runtime = TorchRuntime(tmp_path / "engine", kv_cache_bytes=1 << 22)
    weights = runtime._model.weights
    assert weights["lm_head.weight"].data_ptr() == weights["transformer.vocab_embedding.weight"].data_ptr()


def test_dtype_is_that_of_the_engine(source: ModelSource, tmp_path: Path) -> None:
    write(source, tmp_path / "engine", dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "engine" / "rank0.safetensors").values()} == {
        torch.bfloat16
    }


def test_progress_rises_to_one(source: ModelSource, tmp_path: Path) -> None:
    seen: list[float] = []
    write(source, tmp_path / "engine", progress=seen.append)
    assert len(seen) == 17
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


class FullDisk(HFSource):
    """A source whose second tensor meets a full disk."""

    def tensor(self, name: str) -> torch.Tensor:
        if name == "lm_head.weight":
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().tensor(name)


def test_a_failed_write_leaves_nothing_and_the_old_engine_in_place(tiny_model_dir: Path, engine: Path) -> None:
    before = {path.name: path.read_bytes() for path in engine.iterdir()}
    failing = FullDisk("tiny", tiny_model_dir)
    for out in (engine, engine.with_name("other")):
        with pytest.raises(TrtspecError, match=f"{out}: the engine cannot be written: No space left on device; make"):
            write(failing, out)
    assert [path.name for path in engine.parent.iterdir()] == ["engine"]
    assert {path.name: path.read_bytes() for path in engine.iterdir()} == before


def test_an_engine_is_replaced_as_a_whole(source: ModelSource, engine: Path) -> None:
    (engine / "rank1.safetensors").write_bytes(b"of an older build")
    for leftover in (".engine.tmp", ".engine.old"):  # of builds that were killed
        shutil.copytree(engine, engine.with_name(leftover))
    write(source, engine, role="draft")
    assert sorted(path.name for path in engine.iterdir()) == ["config.json", "rank0.safetensors"]
    assert EngineConfig.load(engine).stamp["role"] == "draft"
    assert [path.name for path in engine.parent.iterdir()] == ["engine"]


def test_no_place_to_write(source: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrtspecError, match="the engine cannot be written: Not a directory"):
        write(source, tmp_path / "file" / "engine")


def test_a_sequence_longer_than_the_models_context_is_refused(source: ModelSource, tmp_path: Path) -> None:
    with pytest.raises(TrtspecError, match=r"engine.max_seq_len: .* 1024 .*; expected at most 512"):
        write(source, tmp_path / "engine", build_config={"max_seq_len": 1024})


def test_another_family_is_refused_before_anything_is_written(source: ModelSource, tmp_path: Path) -> None:
    source.config = replace(source.config, model_type="gemma")
    with pytest.raises(TrtspecError, match="does not run"):
        write(source, tmp_path / "engine")
    assert list(tmp_path.iterdir()) == []


def edit(engine: Path, section: str | None, **values: Any) -> None:
    content = json.loads((engine / "config.json").read_text())
    (content[section] if section else content).update(values)
    (engine / "config.json").write_text(json.dumps(content))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("harm", "file", "message"),
    [
        (shutil.rmtree, "config.json", "no such engine; build it with"),
        (lambda engine: (engine / "config.json").unlink(), "config.json", "no such engine"),
        (lambda engine: cut(engine / "config.json", 100), "config.json", "not valid JSON"),
        (lambda engine: (engine / "config.json").write_text("[1]"), "config.json", "not the config of an engine"),
        (lambda engine: (engine / "config.json").write_text("{}"), "config.json", "not the config of an engine"),
        (
            lambda engine: (engine / "rank0.safetensors").unlink(),
            "rank0.safetensors",
            "missing.*build the engine",
        ),
        (lambda engine: cut(engine / "rank0.safetensors", 4), "rank0.safetensors", "cut short.*build the engine"),
        (lambda engine: cut(engine / "rank0.safetensors", 9000), "rank0.safetensors", "truncated.*build the engine"),
        (
            lambda engine: edit(engine, "trtspec", trtspec_version="9.0.0"),
            "config.json",
            r"made by trtspec 9\.0\.0, which is newer than this one, 0\.",
        ),
    ],
)
def test_broken_engines_are_refused_with_the_file_named(
    engine: Path, harm: Callable[[Path], object], file: str, message: str
) -> None:
    harm(engine)
    with pytest.raises(TrtspecError, match=message) as caught:
        EngineConfig.load(engine)
    assert caught.value.where == str(engine / file)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda engine: edit(engine, "trtspec", runtime="tensorrt_llm"), "does not say which checkpoint"),
        (lambda engine: edit(engine, None, trtspec={}), "does not say which checkpoint"),
        (lambda engine: edit(engine, "trtspec", model_config={"a": 1}), "model_config does not describe a model"),
        (
            lambda engine: edit(engine, "build_config", max_seq_len="long"),
            "build_config.max_seq_len is 'long'",
        ),
    ],
)
def test_the_torch_runtime_refuses_engines_that_it_cannot_run(
    engine: Path, harm: Callable[[Path], object], message: str
) -> None:
    harm(engine)
    with pytest.raises(TrtspecError, match=message) as caught:
        TorchRuntime(engine, kv_cache_bytes=1 << 22)
    assert caught.value.where == str(engine / "config.json")


def test_a_missing_tensor_is_named(source: ModelSource, engine: Path) -> None:
    content = json.loads((engine / "config.json").read_text())
    content["trtspec"]["model_config"]["num_hidden_layers"] = 3
    (engine / "config.json").write_text(json.dumps(content))
    with pytest.raises(TrtspecError, match=r"tensor transformer.layers.2.attention.dense.weight is missing \(7 in all"):
        TorchRuntime(engine, kv_cache_bytes=1 << 22)


def test_an_engine_of_trtllm_build_is_read(tmp_path: Path) -> None:
    content = {"version": "1.2.1", "pretrained_config": {"vocab_size": 7}, "build_config": {"max_draft_len": 4}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = EngineConfig.load(tmp_path)
    assert (config.runtime, config.version, config.vocab_size, config.max_draft_len) == ("tensorrt_llm", "1.2.1", 7, 4)


def pair(**draft: Any) -> tuple[EngineConfig, EngineConfig]:
    """Two engines that go together, but for what is given of the draft."""
    target = EngineConfig(
        path=Path("engines/target/config.json"),
        version="1.2.1",
        pretrained={"vocab_size": 32000},
        build={"max_draft_len": 10, "gather_generation_logits": True},
        stamp={"runtime": "torch"},
    )
    return target, replace(target, path=Path("engines/draft/config.json"), **draft)


@pytest.mark.parametrize(("max_draft_len", "num_draft_tokens"), [(0, 4), (10, 11)])
def test_more_drafts_than_the_target_verifies_are_refused_with_both_files(
    max_draft_len: int, num_draft_tokens: int
) -> None:
    target, draft = pair()
    target = replace(target, build={"max_draft_len": max_draft_len})
    with pytest.raises(TrtspecError) as caught:
        check_engine_pair(target, draft, num_draft_tokens, pipeline=Path("configs/chat.yaml"))
    for part in ("engines/target/config.json", "configs/chat.yaml", str(max_draft_len), str(num_draft_tokens)):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "draft",
    [
        {},
        {"pretrained": {"vocab_size": 31900}},  # padded to another multiple
        {"build": {"max_draft_len": 0, "gather_generation_logits": True}},
        {"build": {"gather_generation_logits": False}, "stamp": {}},  # TensorRT-LLM 1.2 gives them on request
    ],
)
def test_pairs_that_go_together(draft: dict[str, Any]) -> None:
    target, other = pair(**draft)
    check_engine_pair(target, other, 10, draft_logits=True)
    check_engine_pair(target, None, 10)


@pytest.mark.parametrize(
    ("draft", "parts"),
    [
        ({"version": "1.1.0"}, ("1.2.1", "1.1.0")),
        ({"pretrained": {"vocab_size": 49152}}, ("32000", "49152")),
        ({"build": {"gather_generation_logits": False}}, ("generation logits",)),
        ({"build": {"gather_generation_logits": False}, "stamp": {}, "version": "0.16.0"}, ("0.16.0", "1.2.1")),
    ],
)
def test_pairs_that_do_not_go_together_are_refused_with_both_files(
    draft: dict[str, Any], parts: tuple[str, ...]
) -> None:
    target, other = pair(**draft)
    with pytest.raises(TrtspecError) as caught:
        check_engine_pair(target, other, 10, draft_logits=True)
    for part in (*parts, "engines/target/config.json", "engines/draft/config.json"):
        assert part in str(caught.value)


def test_without_draft_logits_the_draft_need_not_return_them() -> None:
    target, draft = pair(build={"gather_generation_logits": False})
    check_engine_pair(target, draft, 10, draft_logits=False)


def compiled(directory: Path, *, world_size: int = 1, stamp: dict[str, Any] | None = None, **build: Any) -> Path:
    """The directory of an engine as trtllm-build and our compile step leave it; its ranks are stand-ins."""
    directory.mkdir(parents=True)
    content = {
        "version": "1.2.1",
        "pretrained_config": {"vocab_size": 7, "mapping": {"world_size": world_size}},
        "build_config": {"max_seq_len": 1028, "max_draft_len": 4, "speculative_decoding_mode": 2} | build,
    }
    (directory / "config.json").write_text(json.dumps(content))
    (directory / "trtspec.json").write_text(
        json.dumps({"runtime": "tensorrt_llm", "compiled": True, "sm": 90} | (stamp or {}))
    )
    for rank in range(world_size):
        (directory / f"rank{rank}.engine").write_text("STAND-IN")
    return directory


def test_the_stamp_of_a_compiled_engine_lies_beside_its_config(tmp_path: Path) -> None:
    config = EngineConfig.load(compiled(tmp_path / "target", world_size=2))
    assert (config.runtime, config.compiled, config.sm, config.world_size) == ("tensorrt_llm", True, 90, 2)
    prepared = compiled(tmp_path / "prepared", stamp={"compiled": False})
    (prepared / "rank0.engine").unlink()
    assert EngineConfig.load(prepared).compiled is False


@pytest.mark.parametrize("mode", [32, "EAGLE", "eagle", "SpeculativeDecodingMode.EAGLE"])
def test_the_mode_is_known_by_number_and_by_name(tmp_path: Path, mode: int | str) -> None:
    engine = EngineConfig.load(compiled(tmp_path / "engine", speculative_decoding_mode=mode))
    assert engine.speculative_decoding_mode == 32


def test_room_that_the_builder_added_for_drafts_is_not_the_users(tmp_path: Path) -> None:
    assert EngineConfig.load(compiled(tmp_path / "target")).max_seq_len == 1024
    plain = compiled(tmp_path / "draft", speculative_decoding_mode=1, max_draft_len=0, max_seq_len=1024)
    assert EngineConfig.load(plain).max_seq_len == 1024
    eagle = compiled(tmp_path / "eagle", speculative_decoding_mode=32, max_draft_len=63, max_seq_len=1091)
    edit(eagle, "pretrained_config", num_eagle_layers=4)
    assert EngineConfig.load(eagle).max_seq_len == 1024


@pytest.mark.parametrize(
    ("harm", "file", "message"),
    [
        (lambda engine: (engine / "rank1.engine").unlink(), "rank1.engine", "is missing; expected the engines of 2"),
        (lambda engine: (engine / "rank0.engine").write_text(""), "rank0.engine", "is empty"),
        (lambda engine: (engine / "trtspec.json").write_text("{"), "trtspec.json", "not valid JSON"),
        (lambda engine: (engine / "trtspec.json").write_text("[1]"), "config.json", "not the config of an engine"),
        (
            lambda engine: (engine / "trtspec.json").write_text('{"trtspec_version": "9.0.0"}'),
            "config.json",
            r"made by trtspec 9\.0\.0",
        ),
    ],
)
def test_broken_compiled_engines_are_refused_with_the_file_named(
    tmp_path: Path, harm: Callable[[Path], object], file: str, message: str
) -> None:
    engine = compiled(tmp_path / "target", world_size=2)
    harm(engine)
    with pytest.raises(TrtspecError, match=message) as caught:
        EngineConfig.load(engine)
    assert caught.value.where == str(engine / file)


def test_engines_of_two_versions_or_architectures_are_refused_with_both_named(tmp_path: Path) -> None:
    target = EngineConfig.load(compiled(tmp_path / "target"))
    draft = EngineConfig.load(compiled(tmp_path / "draft", speculative_decoding_mode=1, max_draft_len=0))
    check_engine_pair(target, draft, 4)
    for old, new in (
        (replace(target, version="0.16.0"), replace(draft, version="0.15.0")),
        (target, replace(draft, stamp=draft.stamp | {"sm": 80})),
    ):
        with pytest.raises(TrtspecError) as caught:
            check_engine_pair(old, new, 4)
        named = ("0.16.0", "0.15.0") if old is not target else ("sm_90", "sm_80")
        for part in (*named, str(target.path), str(draft.path)):
            assert part in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "draft_len"), [((4, 3, 4), 15), ((5, 5, 5), 39), ((7, 5, 3), 39), ((7, 7, 7), 83), ((4, 4, 4), 23)]
)
def test_lookahead_sizes_must_be_those_of_the_engine(
    tmp_path: Path, sizes: tuple[int, int, int], draft_len: int
) -> None:
    def engine(length: int, mode: int = 8) -> EngineConfig:
        build = {"max_draft_len": length, "speculative_decoding_mode": mode}
        return EngineConfig(tmp_path / "config.json", "1.2.1", {}, build, {})

    check_lookahead(engine(draft_len), *sizes)
    for other in (39, 15, 83):
        if other != draft_len:
            with pytest.raises(TrtspecError) as caught:
                check_lookahead(engine(other), *sizes, pipeline=Path("repo/tensorrt_llm/config.pbtxt"))
            for part in (str(other), str(draft_len), str(sizes), "repo/tensorrt_llm/config.pbtxt", str(tmp_path)):
                assert part in str(caught.value)
    with pytest.raises(TrtspecError, match="built for speculative decoding mode draft_tokens_external"):
        check_lookahead(engine(draft_len, mode=2), *sizes)


def test_lookahead_sizes_that_cannot_look_ahead_fit_no_engine(tmp_path: Path) -> None:
    build = {"max_draft_len": 15, "speculative_decoding_mode": 8}
    with pytest.raises(TrtspecError, match=r"max_draft_len is 15, but lookahead .* \(4, 1, 0\) draft 0"):
        check_lookahead(EngineConfig(tmp_path / "config.json", "1.2.1", {}, build, {}), 4, 1, 0)
