"""`trtspec inspect`: engines of the stand-in compiler and of others, on machines of several kinds."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trtllm_build_double as double
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.errors import TrtspecError
from trtspec.models.source import open_model
from trtspec.runtime.engine import write_torch_engine
from trtspec.trtllm import compiler
from trtspec.trtllm.compiler import CompileJob
from trtspec.trtllm.host import Gpu, Host
from trtspec.trtllm.inspect import inspect

H100 = Gpu(0, "NVIDIA H100 80GB HBM3", 90, 80 << 30, 0)
HOST = Host((H100, replace(H100, index=1)), "590.44.01", "1.2.1", None, "26.07", 8 << 30)


def job(root: Path, role: str, *, draft: int, world_size: int = 1) -> CompileJob:
    limits = {
        "max_batch_size": 4,
        "max_input_len": 512,
        "max_seq_len": 1024,
        "max_num_tokens": 2048,
        "max_beam_width": 1,
        "max_draft_len": draft,
        "speculative_decoding_mode": 2 if draft else 1,
        "plugin_config": {"use_paged_context_fmha": True, "tokens_per_block": 32},
    }
    mode = "draft_tokens_external" if draft else None
    checkpoint = root / "checkpoints" / role
    return CompileJob(role, checkpoint, root / role, limits, mode, "1.2.1", "float32", world_size=world_size, sm=90)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Compile an engine with the stand-in compiler, on a machine with two GPUs; the process then stays on it."""
    double.pretend(monkeypatch, tmp_path / "host")

    def build(role: str = "target", draft: int = 5, world_size: int = 1, compiled: bool = True) -> Path:
        given = job(tmp_path / "engines", role, draft=draft, world_size=world_size)
        given.checkpoint_dir.mkdir(parents=True)
        config = {
            "architecture": "LlamaForCausalLM",
            "dtype": "bfloat16",
            "vocab_size": 32000,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_size": 8,
            "intermediate_size": 64,
            "norm_epsilon": 1e-5,
            "hidden_act": "silu",
            "position_embedding_type": "rope_gpt_neox",
            "max_position_embeddings": 2048,
            "rotary_base": 10000.0,
            "mapping": {"world_size": world_size, "tp_size": world_size, "pp_size": 1},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        }
        (given.checkpoint_dir / "config.json").write_text(json.dumps(config))
        for rank in range(world_size):
            (given.checkpoint_dir / f"rank{rank}.safetensors").write_bytes(b"weights")
        stamp = {"source": "org/model", "source_fingerprint": "f00", "spec_hash": "5bec"}
        if compiled:
            compiler.compile_engine(given, given.out_dir, stamp, lambda fraction: None, range(world_size))
        else:
            compiler.prepare_engine(given, given.out_dir, stamp)
        return given.out_dir

    return build


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, words)])


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_fitting_engine_is_described_and_passes(engine: Callable[..., Path]) -> None:
    directory = engine(world_size=2)
    shown = run(directory)
    assert shown.exit_code == 0, shown.output
    for name, value in (
        ("state", "compiled"),
        ("role", "target"),
        ("model", "org/model"),
        ("architecture", "LlamaForCausalLM"),
        ("quantization", "FP8"),
        ("tensor_parallel", "2"),
        ("speculation", "draft_tokens_external"),
        ("max_draft_len", "5"),
        ("max_seq_len", "1024"),
        ("max_seq_len_with_drafts", "1029"),
        ("paged_context_fmha", "yes"),
        ("version", r"1\.2\.1"),
        ("sm", "sm_90"),
        ("gpu", "NVIDIA H100 80GB HBM3"),
        ("spec_hash", "5bec"),
    ):
        assert re.search(rf"^  {name} +{value}$", shown.output, re.MULTILINE), name
    assert shown.output.splitlines()[-1] == "fits this machine"


def test_json_says_the_same(engine: Callable[..., Path]) -> None:
    directory = engine()
    answer = json.loads(run(directory, "--json").output)
    assert (answer["ok"], answer["kind"], answer["misfits"]) == (True, "engine", [])
    size = (directory / "rank0.engine").stat().st_size
    assert answer["facts"]["rank_bytes"] == [size] and answer["facts"]["sm"] == 90
    assert [gpu["sm"] for gpu in answer["host"]["gpus"]] == [90, 90] and answer["host"]["tensorrt_llm"] == "1.2.1"


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ({"gpus": ()}, r"needs 2 GPU\(s\) of sm_90, this machine has none"),
        ({"gpus": (H100,)}, "runs on 2 GPUs, this machine has 1"),
        (
            {"gpus": (H100, Gpu(1, "NVIDIA A100-SXM4-80GB", 80, 80 << 30, 0))},
            r"compiled for sm_90, but GPU 1 \(NVIDIA A100-SXM4-80GB\) is sm_80",
        ),
        ({"gpus": (H100, replace(H100, index=1, memory_bytes=10))}, r"GPU 1 \(NVIDIA H100 80GB HBM3\) has 0\.0 GiB"),
        ({"driver": "580.95.05"}, r"needs driver 590\.44\.01 or later, here it is 580\.95\.05"),
        ({"tensorrt_llm": "1.1.0", "container_tag": "26.02"}, r"1\.2\.1, newer than the 1\.1\.0 of container 26\.02"),
        ({"tensorrt_llm": None, "container_tag": "26.02"}, r"1\.2\.1, newer than the 1\.1\.0 of container 26\.02"),
        ({"tensorrt_llm": "1.3.0", "container_tag": None}, r"1\.2\.1, not the 1\.3\.0 of this machine"),
    ],
)
def test_a_machine_that_an_engine_does_not_fit(engine: Callable[..., Path], host: dict[str, Any], message: str) -> None:
    directory = engine(world_size=2)
    assert inspect(directory, HOST).misfits == []
    misfits = inspect(directory, replace(HOST, **host)).misfits
    assert len(misfits) == 1 and misfits[0].startswith(f"{directory}: ")
    assert re.search(message, misfits[0])


def test_an_engine_for_sm_80_on_an_sm_90_host_exits_1_with_both_named(engine: Callable[..., Path]) -> None:
    directory = engine()
    edit(directory / "trtspec.json", sm=80)
    shown = run(directory)
    assert shown.exit_code == 1
    assert f"error: {directory}: compiled for sm_80, but GPU 0 (NVIDIA H100 80GB HBM3) is sm_90" in shown.output
    assert "fits this machine" not in shown.output and "LlamaForCausalLM" in shown.output


def test_another_tensorrt_does_not_load_it(engine: Callable[..., Path]) -> None:
    directory = engine()
    edit(directory / "trtspec.json", tensorrt_version="10.14.1.48")
    assert inspect(directory, replace(HOST, tensorrt="10.14.1.48")).misfits == []
    (misfit,) = inspect(directory, replace(HOST, tensorrt="10.13.3.9")).misfits
    assert "10.14.1.48" in misfit and "10.13.3.9" in misfit


def test_partners(engine: Callable[..., Path]) -> None:
    target, draft = engine("target"), engine("draft", draft=0)
    for one, other in ((target, draft), (draft, target)):
        shown = run(one, "--partner", other)
        assert shown.exit_code == 0 and shown.output.splitlines()[-1] == f"fits this machine and {other}"
    edit(target / "config.json", version="0.16.0")
    edit(draft / "config.json", version="0.15.0")
    shown = run(target, "--partner", draft)
    assert shown.exit_code == 1
    (line,) = [line for line in shown.output.splitlines() if "0.15.0" in line]
    assert f"{target}/config.json: built by version 0.16.0, but {draft}/config.json by 0.15.0" in line


def test_a_target_that_verifies_nothing_has_no_partner(engine: Callable[..., Path]) -> None:
    target, draft = engine("target", draft=0), engine("draft", draft=0)
    shown = run(target, "--partner", draft)
    assert shown.exit_code == 1 and "max_draft_len is 0" in shown.output


def test_a_prepared_engine_does_not_fit_yet(engine: Callable[..., Path]) -> None:
    directory = engine(compiled=False)
    shown = run(directory)
    assert shown.exit_code == 1
    assert "prepared, not compiled" in shown.output and "run its build.sh" in shown.output
    subprocess.run([directory / "build.sh"], check=True, capture_output=True, timeout=30)
    shown = run(directory)
    assert shown.exit_code == 0 and re.search("^  state +compiled$", shown.output, re.MULTILINE)


def test_an_engine_without_our_stamp_is_described_as_far_as_its_config_goes(engine: Callable[..., Path]) -> None:
    directory = engine()
    (directory / "trtspec.json").unlink()
    found = inspect(directory, HOST)
    assert found.misfits == []
    assert (found.facts["architecture"], found.facts["max_draft_len"]) == ("LlamaForCausalLM", 5)
    assert found.facts["sm"] is None and found.facts["model"] is None
    (directory / "rank0.engine").unlink()
    (misfit,) = inspect(directory, HOST).misfits
    assert "rank0.engine: is missing" in misfit


def test_an_engine_of_the_torch_runtime_fits_anywhere(tiny_model_dir: Path, tmp_path: Path) -> None:
    source = open_model(str(tiny_model_dir))
    write_torch_engine(source, tmp_path / "engine", dtype="float32", role="target", build_config={}, stamp={})
    found = inspect(tmp_path / "engine", Host((), None, None, None, None, None))
    assert (found.facts["runtime"], found.misfits) == ("torch", [])


def test_a_checkpoint_with_a_rank_missing_is_described_and_refused(engine: Callable[..., Path]) -> None:
    checkpoint = engine(world_size=2).parent / "checkpoints" / "target"
    (checkpoint / "rank1.safetensors").unlink()
    shown = run(checkpoint, "--json")
    answer = json.loads(shown.stdout)
    assert shown.exit_code == 1 and (answer["kind"], answer["ok"]) == ("checkpoint", False)
    assert answer["facts"]["tensor_parallel"] == 2 and answer["facts"]["quantization"] == "FP8"
    assert any("rank1.safetensors" in misfit for misfit in answer["misfits"])
    a100 = replace(HOST, gpus=(Gpu(0, "NVIDIA A100-SXM4-80GB", 80, 80 << 30, 0),))
    assert any("FP8 needs sm_89 or later, GPU 0" in misfit for misfit in inspect(checkpoint, a100).misfits)
    assert not any("sm_89" in misfit for misfit in inspect(checkpoint, HOST).misfits)


def test_what_is_neither_is_refused_with_what_to_look_at(
    engine: Callable[..., Path], tiny_model_dir: Path, tmp_path: Path
) -> None:
    engines = engine().parent
    (tmp_path / "repo" / "tensorrt_llm").mkdir(parents=True)
    (tmp_path / "repo" / "tensorrt_llm" / "config.pbtxt").write_text(
        'parameters {\n  key: "gpt_model_path"\n  value {\n    string_value: "/engines/target"\n  }\n}\n'
    )
    for directory, message in (
        (tmp_path / "nowhere", "no such directory; expected the directory of an engine"),
        (tmp_path / "repo" / "tensorrt_llm", "no config.json here"),
        (engines, "inspect one of those in it: target"),
        (tmp_path / "repo", "a Triton model repository; inspect the engines that it names: /engines/target"),
        (tiny_model_dir, "a Hugging Face model"),
    ):
        with pytest.raises(TrtspecError) as refused:
            inspect(directory, HOST)
        assert message in str(refused.value) and refused.value.where == str(directory)
    shown = run(tmp_path / "nowhere", "--json")
    assert shown.exit_code == 1 and json.loads(shown.stdout)["ok"] is False
