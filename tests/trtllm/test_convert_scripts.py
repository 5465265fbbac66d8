"""TensorRT-LLM's own converters behind the same step: command lines, logs, failures. A double is in their place."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trtspec.errors import TrtspecError
from trtspec.models.source import open_model
from trtspec.spec.schema import Calibration, Eagle, ModelRef, Redrafter, Speculation
from trtspec.trtllm.convert import ConversionJob, actions, check_conversion, convert

DOUBLE = Path(__file__).with_name("convert_checkpoint_double.py")


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An examples directory with the double in every place where a script would be."""
    root = tmp_path / "examples"
    for directory in ("eagle", "redrafter", "models/core/llama", "models/core/qwen"):
        (root / directory).mkdir(parents=True)
        shutil.copy(DOUBLE, root / directory / "convert_checkpoint.py")
    monkeypatch.setenv("TRTSPEC_TRTLLM_EXAMPLES", str(root))
    return root


@pytest.fixture
def eagle_dir(tmp_path: Path) -> Path:
    """EAGLE-1 heads for a target of hidden size 32."""
    path = tmp_path / "eagle-heads"
    path.mkdir()
    save_file({"fc.weight": torch.zeros(32, 64), "fc.bias": torch.zeros(32)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"hidden_size": 32, "vocab_size": 280, "bias": True}))
    return path


def job_for(model: Path | str, method: str = "none", section: Any = None, **settings: Any) -> ConversionJob:
    own = {key: settings.pop(key) for key in list(settings) if key in ConversionJob.__dataclass_fields__}
    fields: dict[str, Any] = {
        "role": "target",
        "speculation": Speculation(method=method, **({method: section} if section else {})),
        "calibration": Calibration(),
        "calibration_path": None,
        "max_draft_len": 24,
        "heads_dir": None,
    }
    return ConversionJob(model=ModelRef(model=str(model), **settings), **fields | own)


def silent(value: Any) -> None:
    """Stands for a progress bar, or for the place of notes."""


def test_eagle_heads_are_converted_by_the_script(
    examples: Path, eagle_dir: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    section = Eagle(heads="org/heads", num_layers=3, max_non_leaves_per_layer=5)
    job = job_for(tiny_model_dir, "eagle", section, heads_dir=eagle_dir, tensor_parallel=2)
    out = tmp_path / "target"
    (line,) = actions(job, out)
    facts = convert(job, open_model(str(tiny_model_dir)), out, {"source": "x"}, silent, silent)
    assert shlex.split(line) == [
        *("python3", str(examples / "eagle/convert_checkpoint.py"), "--model_dir", str(tiny_model_dir)),
        *("--eagle_model_dir", str(eagle_dir), "--max_draft_len", "24", "--num_eagle_layers", "3"),
        *("--max_non_leaves_per_layer", "5", "--dtype", "bfloat16", "--tp_size", "2", "--workers", "1"),
        *("--output_dir", str(out)),
    ]
    config = json.loads((out / "config.json").read_text())
    assert config["argv"] == shlex.split(line)[2:]
    assert config["logits_dtype"] == "float32"
    assert facts["producer"] == json.loads((out / "trtspec.json").read_text())["producer"]
    assert facts["world_size"] == 2
    assert (out / "convert.log").read_text() == "[TensorRT-LLM] double of eagle\n"


def test_redrafter_starts_from_a_checkpoint_of_the_base(examples: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("modelopt", reason="the base is converted by NVIDIA ModelOpt")
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    with pytest.raises(TrtspecError, match=r"no ReDrafter head: model\.safetensors or model\.pt is missing"):
        check_conversion(
            job_for(tiny_model_dir, "redrafter", Redrafter(drafter="d"), heads_dir=drafter),
            open_model(str(tiny_model_dir)).config,
        )
    (drafter / "model.pt").touch()
    section = Redrafter(drafter="org/drafter", num_beams=3, draft_len_per_beam=4, greedy=False)
    job = job_for(tiny_model_dir, "redrafter", section, heads_dir=drafter)
    out = tmp_path / "target"
    base, line = actions(job, out)
    assert base.startswith(f"convert {tiny_model_dir} to a TensorRT-LLM checkpoint in {out / 'base'} with NVIDIA")
    convert(job, open_model(str(tiny_model_dir)), out, {}, silent, silent)
    argv = json.loads((out / "config.json").read_text())["argv"]
    assert argv == shlex.split(line)[2:]
    assert argv == [
        *("--base_model_checkpoint_dir", str(out / "base"), "--drafter_model_dir", str(drafter)),
        *("--redrafter_num_beams", "3", "--redrafter_draft_len_per_beam", "4", "--dtype", "bfloat16"),
        *("--tp_size", "1", "--workers", "1", "--output_dir", str(out), "--redrafter_no_greedy_search"),
    ]
    assert not (out / "base").exists()


def test_float32_and_other_families_go_to_their_familys_script(
    examples: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    job = job_for(tiny_model_dir, dtype="float32", pipeline_parallel=2)
    convert(job, open_model(str(tiny_model_dir)), tmp_path / "c", {}, silent, silent)
    assert json.loads((tmp_path / "c/config.json").read_text())["double"] == "llama"
    line = actions(job_for("m", tensor_parallel=4), tmp_path, "qwen3_moe")[-1]
    assert str(examples / "models/core/qwen/convert_checkpoint.py") in shlex.split(line)
    shutil.move(examples / "models/core/llama", examples / "llama")  # where older versions have it
    assert str(examples / "llama/convert_checkpoint.py") in shlex.split(actions(job, tmp_path)[-1])


def test_a_model_that_is_no_directory_is_written_as_one_first(
    examples: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    from trtspec.models.surgery import truncated

    job = job_for(tiny_model_dir, dtype="float32")
    convert(job, truncated(open_model(str(tiny_model_dir)), 1), tmp_path / "c", {}, silent, silent)
    argv = json.loads((tmp_path / "c/config.json").read_text())["argv"]
    assert argv[:2] == ["--model_dir", str(tmp_path / "c/base")]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        *("config.json", "convert.log", "rank0.safetensors", "trtspec.json")
    ]


def test_a_failure_is_told_in_the_scripts_words_and_the_log_is_kept(
    examples: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL_WITH", "Unsupported rope type")
    job = job_for(tiny_model_dir, dtype="float32", log_path=tmp_path / "target.log")
    with pytest.raises(
        TrtspecError, match=r"target.log: .* exit code 1: ValueError: Unsupported rope type; "
    ) as caught:
        convert(job, open_model(str(tiny_model_dir)), tmp_path / "c", {}, silent, silent)
    assert "\n" not in str(caught.value)
    log = (tmp_path / "target.log").read_text()
    assert "[I] half way" in log and "Traceback" in log


def test_an_interrupt_stops_the_script(
    examples: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLEEP_AND_WRITE_PID", str(tmp_path / "pid"))
    job = job_for(tiny_model_dir, dtype="float32")

    def interrupt() -> None:
        deadline = time.monotonic() + 20
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        convert(job, open_model(str(tiny_model_dir)), tmp_path / "c", {}, silent, silent)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_script_that_writes_no_weights_is_no_success(
    examples: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRITE_NOTHING", "1")
    with pytest.raises(TrtspecError, match=r"without rank0\.safetensors"):
        convert(
            job_for(tiny_model_dir, dtype="float32"),
            open_model(str(tiny_model_dir)),
            tmp_path / "c",
            {},
            silent,
            silent,
        )


def test_without_tensorrt_llm_the_container_is_named(
    tiny_model_dir: Path, eagle_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTSPEC_TRTLLM_EXAMPLES", str(tmp_path / "nowhere"))
    job = job_for(tiny_model_dir, "eagle", Eagle(heads="org/heads"), heads_dir=eagle_dir, version="1.1.0")
    with pytest.raises(TrtspecError, match=r"nowhere/eagle/convert_checkpoint\.py: EAGLE heads .* container .*26\.02-"):
        convert(job, open_model(str(tiny_model_dir)), tmp_path / "c", {}, silent, silent)
    assert not (tmp_path / "c").exists()
    monkeypatch.delenv("TRTSPEC_TRTLLM_EXAMPLES")
    assert shlex.split(actions(job, tmp_path)[0])[1] == "/app/examples/eagle/convert_checkpoint.py"


def test_bad_eagle_heads_are_refused_before_any_conversion(
    examples: Path, eagle_dir: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    save_file({"fc.weight": torch.zeros(32, 64)}, eagle_dir / "model.safetensors")
    job = job_for(tiny_model_dir, "eagle", Eagle(heads="org/heads"), heads_dir=eagle_dir)
    with pytest.raises(TrtspecError, match=r"bias: true, but tensor fc\.bias is missing"):
        convert(job, open_model(str(tiny_model_dir)), tmp_path / "c", {}, silent, silent)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("method", "section", "settings", "changes", "message"),
    [
        ("eagle", Eagle(heads="h"), {"quantization": "fp8"}, {}, r"quantization fp8 cannot be had with eagle heads"),
        ("eagle", Eagle(heads="h"), {}, {"model_type": "qwen2"}, r"engines of the Llama family only"),
        ("none", None, {"quantization": "int8_sq"}, {"model_type": "qwen3_moe"},
         r"quantization int8_sq cannot be had with family qwen3_moe; set target.quantization: none"),
        ("none", None, {}, {"model_type": "gemma3_text"}, r"family gemma3_text .* cannot be converted; expected one"),
    ],
)  # fmt: skip
def test_what_the_scripts_cannot_do_is_refused(
    tiny_model_dir: Path,
    method: str,
    section: Any,
    settings: dict[str, Any],
    changes: dict[str, Any],
    message: str,
    save_model: Callable[..., Path],
) -> None:
    from dataclasses import replace

    config = replace(open_model(str(tiny_model_dir)).config, **changes)
    with pytest.raises(TrtspecError, match=message):
        check_conversion(job_for("m", method, section, **settings), config)
