"""The compile step against a stand-in compiler: options, refusals, failures, and what is left on disk."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trtllm_build_double as double
from click.testing import CliRunner

from trtspec.build.graph import FAILED, OK, Graph, Outcome, Step, Task
from trtspec.cli import main
from trtspec.errors import TrtspecError
from trtspec.runtime.engine import SPECULATIVE_MODES, EngineConfig
from trtspec.spec.load import load_spec
from trtspec.trtllm import compiler
from trtspec.trtllm.compiler import CompileJob
from trtspec.trtllm.host import Gpu, Host
from trtspec.trtllm.trtllm_build import OPTIONS, words

KINDS = {"text": {"text", "path"}, "int": {"integer"}, "flag": {"flag"}, "list": {"words"}}
H100, A100 = ("NVIDIA H100 80GB HBM3", "9.0"), ("NVIDIA A100-SXM4-80GB", "8.0")
STAMP = {"source": "org/model", "source_fingerprint": "f00", "spec_hash": "5bec"}
HOST = Host((Gpu(0, "NVIDIA H100 80GB HBM3", 90, 80 << 30, 0),), "590.44.01", "1.2.1", "10.14.1.48", "26.07", 8 << 30)


def job(root: Path, role: str = "target", *, mode: str | None = None, draft: int = 0, **changes: Any) -> CompileJob:
    number = next((number for number, name in SPECULATIVE_MODES.items() if name == mode), 1)
    limits = {
        "max_batch_size": 8,
        "max_input_len": 512,
        "max_seq_len": 1024,
        "max_num_tokens": 4096,
        "max_beam_width": 1,
        "max_draft_len": draft,
        "speculative_decoding_mode": number,
        "plugin_config": {"use_paged_context_fmha": True, "tokens_per_block": 32},
        "gather_generation_logits": True,
    }
    given = CompileJob(
        role=role,
        checkpoint_dir=root / "checkpoints" / role,
        out_dir=root / role,
        build_config=limits,
        mode=mode,
        version="1.2.1",
        logits_dtype="float32",
        sm=90,
    )
    return replace(given, **changes)


def with_limits(given: CompileJob, **limits: Any) -> CompileJob:
    return replace(given, build_config=given.build_config | limits)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Makes this a machine with GPUs and a compiler, both stand-ins."""
    return lambda **about: double.pretend(monkeypatch, tmp_path / "host", **about)


def write_checkpoint(directory: Path, world_size: int = 1, **config: Any) -> None:
    directory.mkdir(parents=True)
    content = {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "vocab_size": 280,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "mapping": {"world_size": world_size, "tp_size": world_size, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }
    (directory / "config.json").write_text(json.dumps(content | config))
    for rank in range(world_size):
        (directory / f"rank{rank}.safetensors").write_bytes(b"weights")


def compile_(given: CompileJob, gpu_ids: tuple[int, ...] = (0,), advance: Any = None) -> Path:
    """Compile as the build does: into a staging directory that is renamed when all is well."""
    staged = given.out_dir.with_name(f".{given.role}.staging") / given.role
    staged.parent.mkdir(parents=True)
    compiler.compile_engine(given, staged, STAMP, advance or (lambda fraction: None), gpu_ids)
    os.rename(staged, given.out_dir)
    return given.out_dir


# The options


def test_the_option_table_is_the_contracts() -> None:
    contract = json.loads(double.CONTRACT.read_text())
    assert OPTIONS.keys() == contract.keys()
    for name, facts in contract.items():
        option = OPTIONS[name]
        assert option.kind in KINDS[facts["kind"]], name
        assert set(option.choices) == set(facts.get("choices", [])), name
        if name != "kv_cache_type":  # the tool leaves it out, which means paged
            assert option.default == facts.get("default"), name


@pytest.mark.parametrize("mode", [None, *(name for name in SPECULATIVE_MODES.values() if name != "none")])
@pytest.mark.parametrize("quantization", ["none", "fp8", "int4_awq"])
def test_every_command_is_one_that_the_tool_takes(tmp_path: Path, mode: str | None, quantization: str) -> None:
    given = job(tmp_path, mode=mode, draft=5 if mode else 0, quantization=quantization, world_size=4)
    tool, *line = compiler.command(given)
    read = double.check(line)
    assert tool == "trtllm-build"
    assert (read.speculative_decoding_mode, read.max_draft_len) == (mode, 5 if mode else 0)
    assert Path(read.checkpoint_dir) == given.checkpoint_dir and Path(read.output_dir) == given.out_dir
    sizes = (read.max_batch_size, read.max_input_len, read.max_seq_len, read.max_num_tokens, read.max_beam_width)
    assert sizes == (8, 512, 1024, 4096, 1)
    switches = (read.kv_cache_type, read.remove_input_padding, read.use_paged_context_fmha, read.tokens_per_block)
    assert switches == ("paged", "enable", "enable", 32)
    assert (read.gpt_attention_plugin, read.workers, read.logits_dtype, read.log_level) == (
        "auto",
        4,
        "float32",
        "info",
    )
    assert read.gemm_plugin == ("disable" if quantization == "fp8" else "auto")


def test_an_engine_that_verifies_nothing_is_told_nothing_of_speculation(tmp_path: Path) -> None:
    line = compiler.command(job(tmp_path, "draft"))
    assert "--speculative_decoding_mode" not in line and "--max_draft_len" not in line


def test_tokens_in_one_step_are_enough_for_the_drafts_of_a_full_batch(tmp_path: Path) -> None:
    given = job(tmp_path, mode="medusa", draft=63)
    assert compiler.options(with_limits(given, max_num_tokens=100))["max_num_tokens"] == 8 * 64
    assert compiler.options(with_limits(given, max_num_tokens=513))["max_num_tokens"] == 513


def test_generation_logits_are_a_build_matter_before_version_1_only(tmp_path: Path) -> None:
    assert double.check(compiler.command(job(tmp_path, version="0.21.0"))[1:]).gather_generation_logits
    assert "--gather_generation_logits" not in compiler.command(job(tmp_path, version="1.0.0"))


@pytest.mark.parametrize(("size", "value"), [("max_batch_size", 513), ("max_draft_len", 257)])
def test_sizes_that_the_builder_refuses_for_eagle(tmp_path: Path, size: str, value: int) -> None:
    assert compiler.options(with_limits(job(tmp_path, mode="eagle", draft=63), **{size: value - 1}))
    with pytest.raises(TrtspecError, match=f"engine.{size}: {value} is too much for mode eagle; expected at most"):
        compiler.options(with_limits(job(tmp_path, mode="eagle", draft=63), **{size: value}))
    assert compiler.options(with_limits(job(tmp_path, mode="medusa", draft=63), **{size: value}))


def test_build_options_of_the_user_come_last_and_as_words_of_their_own(tmp_path: Path) -> None:
    chosen = {
        "gemm_plugin": "bfloat16",
        "multiple_profiles": "enable",
        "weight_streaming": True,
        "monitor_memory": False,
        "lora_plugin": "auto",
        "lora_target_modules": "attn_q attn_v",
        "input_timing_cache": "/cache dir/$(x)",
        "log_level": "verbose",
    }
    line = compiler.command(job(tmp_path, build_options=chosen))
    read = double.check(line[1:])
    assert (read.gemm_plugin, read.multiple_profiles, read.log_level) == ("bfloat16", "enable", "verbose")
    assert read.weight_streaming and not read.monitor_memory and "--monitor_memory" not in line
    assert read.lora_target_modules == ["attn_q", "attn_v"]
    assert read.input_timing_cache == "/cache dir/$(x)"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gem_plugin": "auto"}, "gem_plugin: trtllm-build has no such option; did you mean gemm_plugin?"),
        ({"--gemm-plugin": "auto"}, "did you mean gemm_plugin?"),
        ({"auto_parallel": 2}, "auto_parallel: trtllm-build has no such option"),
        ({"max_batch_size": 4}, "max_batch_size: is set by trtspec; leave it out: set engine.max_batch_size"),
        ({"max_draft_len": 4}, "set engine.max_draft_len"),
        ({"speculative_decoding_mode": "medusa"}, "set speculation.method"),
        ({"workers": 2}, "tensor_parallel"),
        ({"dry_run": True}, "trtspec build --dry-run"),
        ({"gemm_plugin": "int8"}, "'int8' does not fit; expected one of auto, float16"),
        ({"gemm_plugin": True}, "True does not fit; expected one of auto"),
        ({"context_fmha": True}, "True does not fit; expected enable or disable"),
        ({"weight_streaming": "yes"}, "'yes' does not fit; expected true or false"),
        ({"opt_num_tokens": "many"}, "'many' does not fit; expected an integer"),
        ({"max_lora_rank": True}, "True does not fit; expected an integer"),
        ({"input_timing_cache": "model.cache"}, "expected an absolute path"),
        ({"lora_target_modules": "attn_q nose"}, "'attn_q nose' does not fit"),
        ({"gather_context_logits": True}, "does not go with max_draft_len 4"),
        ({"gather_all_token_logits": True}, "does not go with max_draft_len 4"),
        ({"multiple_profiles": "enable", "opt_num_tokens": 64}, "does not go with multiple_profiles"),
        ({"streamingllm": "enable"}, "no longer supports it"),
        ({"gpt_attention_plugin": "disable"}, "a paged KV cache needs it"),
        ({"context_fmha": "disable"}, "attention over paged context is off without it"),
        ({"reduce_fusion": "enable"}, "more than one GPU"),
        ({"user_buffer": "enable"}, "works with reduce_fusion only"),
        ({"norm_quant_fusion": "enable"}, "NVFP4"),
        ({"gemm_swiglu_plugin": "fp8"}, "fp8 is for fp8 weights, not none"),
        ({"lora_dir": "/lora"}, "has no effect without lora_plugin"),
        ({"model_cls_name": "Mine"}, "needs model_cls_file too"),
    ],
)
def test_build_options_that_make_no_sense_are_refused_by_name(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrtspecError) as refused:
        compiler.options(job(tmp_path, mode="draft_tokens_external", draft=4, build_options=given))
    blamed = "opt_num_tokens" if "opt_num_tokens" in given else next(iter(given))
    assert str(refused.value).startswith(f"engine.build_options.{blamed}: ") and message in str(refused.value)


def test_all_faults_are_shown_at_once_each_with_its_place(tmp_path: Path) -> None:
    given = job(tmp_path, build_options={"nonsense": 1, "workers": 2})
    with pytest.raises(TrtspecError) as refused:
        compiler.check_options(given, lambda name: f"spec.yaml:7: {name}")
    lines = str(refused.value).splitlines()
    assert len(lines) == 2 and all(line.startswith("spec.yaml:7: ") for line in lines)


def test_the_builder_makes_room_for_drafts(tmp_path: Path) -> None:
    plain = compiler.resulting_config(job(tmp_path))
    assert (plain["max_seq_len"], plain["max_num_tokens"]) == (1024, 4096)
    drafts = compiler.resulting_config(with_limits(job(tmp_path, mode="medusa", draft=63), max_num_tokens=8))
    assert (drafts["max_seq_len"], drafts["max_num_tokens"]) == (1087, 512)
    assert compiler.resulting_config(job(tmp_path, mode="eagle", draft=63), 4)["max_seq_len"] == 1091


# The machine


def refusal(given: CompileJob, host: Host, gpu_ids: tuple[int, ...] = (0,)) -> str:
    with pytest.raises(TrtspecError) as refused:
        compiler.preflight(given, host, gpu_ids)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_machine_that_cannot_compile_is_refused_with_the_way_out(
    tmp_path: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = job(tmp_path)
    none = refusal(given, replace(HOST, gpus=()))
    assert "no GPU on this machine" in none
    assert "26.07-trtllm-python-py3" in none and "sm_90" in none and "trtspec build --no-compile" in none
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "trtllm-build is not on PATH" in refusal(given, HOST)
    machine()
    monkeypatch.setenv("PATH", f"{tmp_path}/host/bin")
    assert [gpu.index for gpu in compiler.preflight(given, HOST, (0,))] == [0]


@pytest.mark.parametrize("installed", ["1.2.0", "1.1.0", "1.3.0rc4"])
def test_another_version_is_refused_and_both_are_named(
    tmp_path: Path, machine: Callable[..., None], installed: str
) -> None:
    machine()
    message = refusal(job(tmp_path), replace(HOST, tensorrt_llm=installed))
    assert f"TensorRT-LLM {installed} is installed" in message and "engines of 1.2.1" in message
    assert f'engine.version: "{installed}"' in message


def test_another_architecture_is_refused_and_both_are_named(tmp_path: Path, machine: Callable[..., None]) -> None:
    machine()
    a100 = Gpu(1, "NVIDIA A100-SXM4-80GB", 80, 80 << 30, 0)
    mixed = replace(HOST, gpus=(*HOST.gpus, a100))
    message = refusal(job(tmp_path), mixed, (1,))
    assert "GPU 1 is a NVIDIA A100-SXM4-80GB (sm_80)" in message and "sm_90" in message
    assert compiler.preflight(job(tmp_path), mixed, (0,)) == [HOST.gpus[0]]
    assert compiler.preflight(job(tmp_path, sm=80), mixed, (1,)) == [a100]


def test_an_old_driver_is_refused(tmp_path: Path, machine: Callable[..., None]) -> None:
    machine()
    message = refusal(job(tmp_path), replace(HOST, driver="580.95.05"))
    assert "driver is 580.95.05" in message and "590.44.01 or later" in message
    assert compiler.preflight(job(tmp_path), replace(HOST, driver="600.1"), (0,))
    assert compiler.preflight(job(tmp_path), replace(HOST, driver=None), (0,))


def test_nothing_is_started_on_a_machine_without_a_gpu(tmp_path: Path, machine: Callable[..., None]) -> None:
    machine(gpus=[])
    write_checkpoint(tmp_path / "checkpoints" / "target")
    with pytest.raises(TrtspecError, match="no GPU on this machine"):
        compile_(job(tmp_path))
    assert not (tmp_path / ".build").exists() and not (tmp_path / "target").exists()


# Compiling


def test_an_engine_is_compiled_checked_and_stamped(tmp_path: Path, machine: Callable[..., None]) -> None:
    machine()
    write_checkpoint(tmp_path / "checkpoints" / "target", world_size=2)
    given = job(tmp_path, mode="draft_tokens_external", draft=4, world_size=2)
    seen: list[float] = []
    out = compile_(given, (0, 1), seen.append)
    assert {path.name for path in out.iterdir()} == {
        "config.json", "rank0.engine", "rank1.engine", "trtspec.json", "build.sh", "build.log", "model.cache",
    }  # fmt: skip
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(set(seen)) > 4
    stamp = json.loads((out / "trtspec.json").read_text())
    expected = {
        "runtime": "tensorrt_llm",
        "compiled": True,
        "role": "target",
        "source": "org/model",
        "spec_hash": "5bec",
        "tensorrt_llm_version": "1.2.1",
        "sm": 90,
        "gpu": "NVIDIA H100 80GB HBM3",
        "checkpoint": "../checkpoints/target",
        "command": compiler.command(given),
    }
    assert stamp.items() >= expected.items()
    engine = EngineConfig.load(out)
    assert engine.compiled and engine.sm == 90 and engine.world_size == 2 and engine.version == "1.2.1"
    assert engine.build["max_seq_len"] == 1028 and engine.max_seq_len == 1024 and engine.max_draft_len == 4
    log = (out / "build.log").read_text()
    assert log.startswith("[TensorRT-LLM] TensorRT-LLM version: 1.2.1") and log.count("Engine serialized") == 2
    assert double.MARK in (out / "rank0.engine").read_text()
    assert not given.log_path.exists()


def test_the_script_beside_an_engine_builds_it_again_wherever_it_is(
    tmp_path: Path, machine: Callable[..., None]
) -> None:
    machine()
    root = tmp_path / "it's a $HOME; dir"
    write_checkpoint(root / "checkpoints" / "target")
    given = job(root, mode="medusa", draft=7, build_options={"input_timing_cache": "/a b/$(touch injected)"})
    compiler.compile_engine(
        given, root / "target", STAMP | {"source": "odd\ntouch injected"}, lambda fraction: None, (0,)
    )
    first = EngineConfig.load(root / "target")
    moved = root.rename(tmp_path / "moved here") / "target"
    for name in ("config.json", "rank0.engine"):
        (moved / name).unlink()
    script = moved / "build.sh"
    assert os.access(script, os.X_OK) and "sm_90" in script.read_text() and "26.07" in script.read_text()
    subprocess.run([script], check=True, capture_output=True, timeout=30, cwd=tmp_path)
    again = EngineConfig.load(moved)
    changed = {"output_timing_cache": "model.cache"}
    assert again.build == first.build | changed and again.pretrained == first.pretrained
    assert double.MARK in (moved / "rank0.engine").read_text() and not any(tmp_path.rglob("injected*"))
    tool, *line = shlex.split(script.read_text().partition("exec ")[2].replace("\\\n", ""))
    read, asked = double.check(line), double.check(compiler.command(given)[1:])
    places = {"checkpoint_dir", "output_dir", "output_timing_cache"}
    assert tool == "trtllm-build"
    assert {name for name, value in vars(read).items() if value != getattr(asked, name)} == places


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("fail", "failed on the target (exit code 1): ValueError: Engine building failed because of STANDIN_MODE"),
        ("killed", "was killed on the target (signal 9), most likely because the machine ran out of memory"),
        ("half", "was killed on the target (signal 9)"),
        ("disk", "no space left on the disk (OSError: [Errno 28] No space left on device); free some space"),
        ("cuda_oom", "the GPU has too little free memory for this build (RuntimeError: CUDA out of memory. Tried"),
        ("arch", "the GPU's architecture cannot run this (RuntimeError: SmoothQuant is not supported on SM>=100.)"),
        ("driver", "versions do not match (RuntimeError: CUDA driver version is insufficient"),
        ("usage", "(exit code 2): trtllm-build: error: argument --max_batch_size: invalid int value: 'many'"),
        ("silent", "(exit code 3): this is the STAND-IN"),
    ],
)
def test_a_compiler_that_fails_is_one_line_and_its_log_is_kept(
    tmp_path: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, mode: str, message: str
) -> None:
    machine()
    monkeypatch.setenv("STANDIN_MODE", mode)
    write_checkpoint(tmp_path / "checkpoints" / "target")
    with pytest.raises(TrtspecError) as failed:
        compile_(job(tmp_path))
    assert message in str(failed.value) and "\n" not in str(failed.value)
    log = tmp_path / ".build" / "logs" / "target.log"
    assert failed.value.where == str(log) and "STAND-IN" in log.read_text()
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("lie_seq_len", "made an engine with max_seq_len 1023, 1024 was asked for"),
        ("no_rank", "trtllm-build reported success, but rank1.engine is missing; expected the engines of 2"),
        ("empty_rank", "rank0.engine is empty"),
        ("no_config", "reported success, but wrote no config.json"),
    ],
)
def test_an_engine_that_is_not_what_was_asked_for_is_refused(
    tmp_path: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, mode: str, message: str
) -> None:
    machine()
    monkeypatch.setenv("STANDIN_MODE", mode)
    write_checkpoint(tmp_path / "checkpoints" / "target", world_size=2)
    with pytest.raises(TrtspecError) as refused:
        compile_(job(tmp_path, mode="draft_tokens_external", draft=4, world_size=2))
    assert message in str(refused.value)
    assert refused.value.where == str(tmp_path / ".build" / "logs" / "target.log")


def test_paged_attention_that_the_builder_turns_off_is_noticed(tmp_path: Path, machine: Callable[..., None]) -> None:
    machine()
    quantization = {"quant_algo": None, "kv_cache_quant_algo": "INT8"}
    write_checkpoint(tmp_path / "checkpoints" / "target", quantization=quantization)
    with pytest.raises(TrtspecError, match="with use_paged_context_fmha False, True was asked for"):
        compile_(job(tmp_path))


def test_a_tool_of_another_version_than_its_package_says_is_noticed(
    tmp_path: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tensorrt_llm=None)
    monkeypatch.setenv("STANDIN_VERSION", "1.2.0")
    write_checkpoint(tmp_path / "checkpoints" / "target")
    with pytest.raises(TrtspecError, match=r"engine of TensorRT-LLM 1\.2\.0, but the spec asks for 1\.2\.1"):
        compile_(job(tmp_path))


def test_a_checkpoint_of_which_a_rank_is_missing_is_what_the_tool_says(
    tmp_path: Path, machine: Callable[..., None]
) -> None:
    machine()
    write_checkpoint(tmp_path / "checkpoints" / "target", world_size=2)
    (tmp_path / "checkpoints" / "target" / "rank1.safetensors").unlink()
    with pytest.raises(TrtspecError, match=r"FileNotFoundError: rank1\.safetensors is missing"):
        compile_(job(tmp_path, world_size=2))


@pytest.mark.parametrize(("gpus", "ids", "visible"), [(4, (1, 3), "1,3"), (2, (1, 3), "1"), (1, (0, 1, 2), "0")])
def test_the_compiler_sees_the_gpus_that_are_set_aside_for_it(
    tmp_path: Path,
    machine: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    ids: tuple[int, ...],
    visible: str,
) -> None:
    machine(gpus=[H100] * gpus)
    monkeypatch.setenv("STANDIN_TRACE", str(tmp_path / "trace"))
    write_checkpoint(tmp_path / "checkpoints" / "target")
    compile_(job(tmp_path), ids)
    assert json.loads((tmp_path / "trace").read_text().splitlines()[0])["gpus"] == visible


@pytest.mark.parametrize(("value", "visible"), [("2,0", "2"), ("1", "1"), ("", None), ("GPU-5e1f", None)])
def test_gpus_that_the_user_hides_are_left_alone(
    tmp_path: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, value: str, visible: str | None
) -> None:
    machine(gpus=[H100, H100, H100])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    monkeypatch.setenv("STANDIN_TRACE", str(tmp_path / "trace"))
    write_checkpoint(tmp_path / "checkpoints" / "target")
    if visible is None:
        with pytest.raises(TrtspecError, match="no GPU on this machine that CUDA_VISIBLE_DEVICES shows"):
            compile_(job(tmp_path))
    else:
        compile_(job(tmp_path))
        assert json.loads((tmp_path / "trace").read_text().splitlines()[0])["gpus"] == visible


def test_the_compiler_and_its_children_end_when_the_build_is_interrupted(
    tmp_path: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    child = tmp_path / "child"
    # A compiler that starts a worker, prints nothing and does not care about SIGTERM.
    double.write_program(
        tmp_path / "host" / "bin" / "trtllm-build",
        "# STAND-IN for a trtllm-build that hangs\n"
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "worker = os.fork()\n"
        f"if worker: open({str(child)!r}, 'w').write(str(worker))\n"
        "time.sleep(60)\n",
    )
    monkeypatch.setattr("trtspec.trtllm.compiler_run._GRACE_S", 0.2)
    write_checkpoint(tmp_path / "checkpoints" / "target")

    def interrupt(fraction: float) -> None:
        if child.exists() and child.read_text():
            raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compile_(job(tmp_path), advance=interrupt)
    assert time.monotonic() - begin < 10
    assert _gone(int(child.read_text()))


def _gone(pid: int) -> bool:
    """Whether a process ends soon (a zombie that nobody waits for has ended)."""

    def ended() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    return _soon(ended)


def _soon(happened: Callable[[], bool], within_s: float = 30.0) -> bool:
    """Whether something happens within a time that is only needed if it does not."""
    deadline = time.monotonic() + within_s
    while not (there := happened()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return there


# Preparing


@pytest.mark.parametrize(
    ("mode", "draft", "checkpoint"),
    [
        (None, 0, {}),
        ("draft_tokens_external", 4, {}),
        ("medusa", 63, {"architecture": "MedusaForCausalLM", "max_draft_len": 63}),
        ("eagle", 63, {"architecture": "EagleForCausalLM", "max_draft_len": 63, "num_eagle_layers": 4}),
        ("explicit_draft_tokens", 25, {"redrafter_num_beams": 5, "redrafter_draft_len_per_beam": 5}),
        ("lookahead_decoding", 15, {}),
    ],
)
def test_a_prepared_engine_says_what_the_compiled_one_will(
    tmp_path: Path, machine: Callable[..., None], mode: str | None, draft: int, checkpoint: dict[str, Any]
) -> None:
    write_checkpoint(tmp_path / "checkpoints" / "target", **checkpoint)
    given = job(tmp_path, mode=mode, draft=draft)
    compiler.prepare_engine(given, tmp_path / "prepared", STAMP)
    assert {path.name for path in (tmp_path / "prepared").iterdir()} == {"config.json", "trtspec.json", "build.sh"}
    prepared = EngineConfig.load(tmp_path / "prepared")
    assert not prepared.compiled and prepared.sm == 90 and prepared.stamp["gpu"] is None
    machine()
    compiled = EngineConfig.load(compile_(given))
    assert prepared.version == compiled.version and prepared.pretrained == compiled.pretrained
    assert prepared.max_seq_len == compiled.max_seq_len == 1024
    for name in (*compiler._KEPT, "max_num_tokens", "max_input_len", "kv_cache_type", "gather_generation_logits"):
        assert prepared.build[name] == compiled.build[name], name
    plugins = prepared.build["plugin_config"]
    assert plugins.items() <= compiled.build["plugin_config"].items()
    assert (tmp_path / "prepared" / "build.sh").read_text() == (given.out_dir / "build.sh").read_text()


def test_a_checkpoint_that_is_not_there_cannot_be_prepared(tmp_path: Path) -> None:
    with pytest.raises(TrtspecError, match=r"checkpoints/target/config\.json: cannot be read"):
        compiler.prepare_engine(job(tmp_path), tmp_path / "prepared", STAMP)


# Several engines at once, in a graph


class Silent:
    """An observer that shows nothing."""

    def started(self, name: str, reason: str) -> None: ...

    def advance(self, name: str, fraction: float) -> None: ...

    def note(self, name: str, text: str) -> None: ...

    def finished(self, outcome: Outcome) -> None: ...


def graph(root: Path, gpus: int, **needed: int) -> Graph:
    """One step for the engine of each role in `needed`, with the GPUs that it needs."""

    def step(role: str, count: int) -> Step:
        given = job(root, role)

        def run(task: Task) -> dict[str, Any]:
            return compiler.compile_engine(given, task.destination, STAMP, task.advance, task.gpu_ids)

        return Step(
            f"engine:{role}",
            run,
            inputs=lambda results: {"options": compiler.options(given)},
            actions=lambda results: [" ".join(compiler.command(given))],
            output=root / role,
            gpus=count,
        )

    return Graph([step(role, count) for role, count in needed.items()], root, gpus=gpus)


def runs(trace: Path) -> dict[int, tuple[str, float, float]]:
    """pid -> GPUs, start and end of every run of the stand-in."""
    entries = [json.loads(line) for line in trace.read_text().splitlines()]
    ends = {entry["pid"]: entry["at"] for entry in entries if entry["event"] == "end"}
    return {e["pid"]: (e["gpus"], e["at"], ends[e["pid"]]) for e in entries if e["event"] == "start"}


@pytest.mark.parametrize(("gpus", "overlap"), [(2, True), (1, False)])
def test_engines_are_compiled_side_by_side_while_there_are_gpus(
    tmp_path: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, gpus: int, overlap: bool
) -> None:
    machine(gpus=[H100] * gpus)
    monkeypatch.setenv("STANDIN_SLEEP", "0.5")
    monkeypatch.setenv("STANDIN_TRACE", str(tmp_path / "trace"))
    for role in ("target", "draft"):
        write_checkpoint(tmp_path / "checkpoints" / role)
    report = graph(tmp_path, gpus, target=1, draft=1).run(Silent())
    assert [outcome.status for outcome in report.outcomes] == [OK, OK]
    first, second = sorted(runs(tmp_path / "trace").values(), key=lambda run: run[1])
    assert (second[1] < first[2]) is overlap
    assert {first[0], second[0]} == ({"0", "1"} if overlap else {"0"})


def test_a_finished_engine_is_kept_when_another_fails_and_the_next_build_goes_on_from_there(
    tmp_path: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    for role in ("target", "draft"):
        write_checkpoint(tmp_path / "checkpoints" / role)
    monkeypatch.setenv("STANDIN_MODE", "half@/draft")
    report = graph(tmp_path, 2, target=1, draft=1).run(Silent())
    assert {outcome.name: outcome.status for outcome in report.outcomes} == {
        "engine:target": OK,
        "engine:draft": FAILED,
    }
    log = tmp_path / ".build" / "logs" / "draft.log"
    assert str(report.error).startswith(f"{log}: trtllm-build was killed on the draft") and log.exists()
    assert (tmp_path / "target" / "rank0.engine").exists() and not (tmp_path / "draft").exists()
    monkeypatch.setenv("STANDIN_MODE", "")
    report = graph(tmp_path, 2, target=1, draft=1).run(Silent())
    assert [(o.name, o.status) for o in report.outcomes if o.status == OK] == [("engine:draft", OK)]
    assert report.error is None and EngineConfig.load(tmp_path / "draft").compiled


def pids(trace: Path) -> list[int]:
    """Processes of the stand-in that have begun."""
    return [json.loads(line)["pid"] for line in trace.read_text().splitlines()] if trace.exists() else []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_compilers_and_keeps_nothing_half(
    tmp_path: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    machine()
    monkeypatch.setenv("STANDIN_SLEEP", "60")
    trace = tmp_path / "trace"
    monkeypatch.setenv("STANDIN_TRACE", str(trace))
    for role in ("target", "draft"):
        write_checkpoint(tmp_path / "checkpoints" / role)

    def send() -> None:
        _soon(lambda: len(pids(trace)) == 2)
        os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)
    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        graph(tmp_path, 2, target=1, draft=1).run(Silent())
    sender.join()
    assert len(pids(trace)) == 2 and all(_gone(pid) for pid in pids(trace))
    assert not any(path.name.endswith(".staging") for path in tmp_path.iterdir())
    assert not (tmp_path / "target").exists() and not (tmp_path / "draft").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_does_not_keep_a_compiler_from_being_ended(
    tmp_path: Path, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    monkeypatch.setenv("STANDIN_SLEEP", "60")
    monkeypatch.setenv("STANDIN_TRACE", str(tmp_path / "trace"))
    for role in ("target", "draft"):
        write_checkpoint(tmp_path / "checkpoints" / role)
    here = Path(__file__)
    code = f"import sys, pathlib; sys.path.insert(0, {str(here.parent)!r}); import {here.stem} as test\n"
    code += f"test.graph(pathlib.Path({str(tmp_path)!r}), 2, target=1, draft=1).run(test.Silent())\n"
    build = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert _soon(lambda: len(pids(tmp_path / "trace")) == 2)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        build.send_signal(number)
        time.sleep(0.03)
    _, said = build.communicate(timeout=30)
    assert said.strip().endswith("KeyboardInterrupt")
    assert all(_gone(pid) for pid in pids(tmp_path / "trace"))
    assert not any(path.name.endswith(".staging") for path in tmp_path.iterdir())


CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_command_of_the_example_configs_is_one_that_the_tool_takes(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    spec = load_spec(config)
    shown = CliRunner().invoke(main, ["build", "--dry-run", str(config)]).output
    lines = [shlex.split(line) for line in shown.splitlines() if line.strip().startswith("trtllm-build ")]
    compiles = spec.engine.runtime == "tensorrt_llm" and spec.engine.track == "engine"
    assert len(lines) == (len(spec.models) if compiles else 0)
    for _, *line in lines:
        read = double.check(line)
        is_draft = Path(read.output_dir).name == "draft"
        assert (read.max_draft_len > 0) is (not is_draft and spec.speculation.method != "none")


def test_words_of_flags_and_lists() -> None:
    given = {"fast_build": True, "dry_run": False, "lora_dir": "/a '/b c'", "workers": 2}
    assert words(given) == ["--fast_build", "--lora_dir", "/a", "/b c", "--workers", "2"]


def test_the_stand_in_refuses_what_the_contract_does_not_know() -> None:
    for line in (["--auto_parallel", "2"], ["--gemm_plugin", "int8"], ["--max_batch_size", "many"], ["stray"]):
        done = subprocess.run(
            [sys.executable, "-IS", double.__file__, *line], capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 2 and "error:" in done.stderr
