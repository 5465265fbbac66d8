"""What is refused, what is not built yet, and the nearest combination, through the front door (`config validate`) and
the gate that a build passes first."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from click.testing import CliRunner

from trtspec.cli import main
from trtspec.errors import TrtspecError
from trtspec.spec.gpus import GPUS
from trtspec.spec.load import load_spec
from trtspec.spec.schema import GpuName, Method, ModelRef
from trtspec.trtllm.support import (
    ALTERNATIVES,
    BUILT,
    METHODS,
    QUANTIZATION_MIN_SM,
    Combination,
    check_support,
    refusals,
    require_buildable,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "draft_target": {"draft": {"model": "small"}},
    "tree": {"draft": {"model": "small"}},
    "cascade": {"draft": {"model": "small"}, "cascade": {"middle": {"model": "middle"}}},
    "early_exit": {"early_exit": {"layer": 8}},
    "medusa": {"medusa": {"heads": "h"}},
    "eagle": {"eagle": {"heads": "h"}},
    "redrafter": {"redrafter": {"drafter": "d"}},
}


def write_spec(path: Path, method: str, *, gpu: str = "H100-SXM", **engine: Any) -> Path:
    content = {
        "version": 1,
        "target": {"model": "big"},
        "speculation": {"method": method, **SETTINGS.get(method, {})},
        "hardware": {"gpu": gpu, "num_gpus": 1 if gpu == "cpu" else 8},
        "engine": {"runtime": "tensorrt_llm", **engine},
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def validate(path: Path, *overrides: str) -> tuple[int, list[str]]:
    """Exit code, and what was said, errors first, without `error: FILE:LINE: ` or `error: --set ` in front."""
    options = [part for override in overrides for part in ("--set", override)]
    result = CliRunner().invoke(main, ["config", "validate", str(path), *options])
    lines = [*result.stderr.splitlines(), *result.stdout.splitlines()]
    place = re.compile(rf"^(error: |note: )?({re.escape(str(path))}(:\d+)?: |--set )")
    return result.exit_code, [place.sub("", line) for line in lines]


# Method x where it runs, as the design says: what can be done at all.
TRACKS = {
    # method: (tensorrt_llm on track engine, track llmapi, torch)
    "none": (True, True, True),
    "draft_target": (True, True, True),
    "early_exit": (True, True, True),
    "ngram": (True, True, True),
    "tree": (True, False, True),
    "cascade": (True, False, True),
    "medusa": (True, False, True),
    "eagle": (True, False, False),  # EAGLE-1 heads; EAGLE-3 heads the other way round, see below
    "lookahead": (True, False, False),
    "mtp": (False, True, True),
    "redrafter": (True, False, False),
}


@pytest.mark.parametrize("method", TRACKS)
def test_each_method_on_each_track_and_runtime(tmp_path: Path, method: str) -> None:
    allowed = []
    for track, runtime in (("engine", "tensorrt_llm"), ("llmapi", "tensorrt_llm"), ("engine", "torch")):
        spec = load_spec(write_spec(tmp_path / "t.yaml", method, track=track, runtime=runtime))
        allowed.append(all(problem.not_built for problem in check_support(spec)))
    assert tuple(allowed) == TRACKS[method]


def test_the_table_covers_every_method_gpu_and_precision_of_the_schema() -> None:
    assert set(METHODS) == set(get_args(Method)) == set(TRACKS)
    assert list(GPUS) == list(get_args(GpuName))
    assert set(QUANTIZATION_MIN_SM) == set(get_args(ModelRef.model_fields["quantization"].annotation))


REFUSED: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "fp8 on A100": (
        "draft_target", "A100-80GB", ("target.quantization=fp8",),
        "target.quantization: A100-80GB (sm_80) has no fp8 arithmetic, which fp8 needs; nearest that works: "
        "target.quantization=none",
    ),
    "fp8 on A100 without speculation": (
        "none", "A100-40GB", ("target.quantization=fp8",),
        "target.quantization: A100-40GB (sm_80) has no fp8 arithmetic, which fp8 needs; nearest that works: "
        "target.quantization=int8_sq",
    ),
    "fp8 draft on A100": (
        "draft_target", "A100-80GB", ("speculation.draft.quantization=fp8",),
        "speculation.draft.quantization: A100-80GB (sm_80) has no fp8 arithmetic, which fp8 needs; nearest that "
        "works: speculation.draft.quantization=none",
    ),
    "fp8 cache on A100": (
        "none", "A100-80GB", ("target.kv_cache_dtype=fp8", "engine.kv_cache_reuse=false"),
        "target.kv_cache_dtype: A100-80GB (sm_80) has no fp8 KV cache; nearest that works: "
        "target.kv_cache_dtype=auto",
    ),
    "MTP on an engine": (
        "mtp", "H200", (),
        "speculation.method: method mtp is not available on track engine; nearest that works: engine.track=llmapi",
    ),
    "Medusa on the LLM API": (
        "medusa", "H100-SXM", ("engine.track=llmapi",),
        "speculation.method: method medusa is not available on track llmapi; nearest that works: "
        "engine.track=engine",
    ),
    "lookahead on the LLM API of 1.3": (
        "lookahead", "H100-SXM", ("engine.track=llmapi", "engine.version=1.3.0"),
        "speculation.method: method lookahead is not available on track llmapi; nearest that works: "
        "engine.version=1.2.1 engine.track=engine",
    ),
    "an engine of 1.3": (
        "draft_target", "H100-SXM", ("engine.version=1.3.0",),
        "engine.version: TensorRT-LLM 1.3.0 compiles no engines; the last that does is 1.2.1; nearest that works: "
        "engine.version=1.2.1",
    ),
    "the LLM API of old": (
        "none", "H100-SXM", ("engine.track=llmapi", "engine.version=0.16.0"),
        "engine.version: track llmapi needs TensorRT-LLM 1.2 or later, not 0.16.0; nearest that works: "
        "engine.version=1.2.1",
    ),
    "TensorRT-LLM without a GPU": (
        "draft_target", "cpu", (),
        "hardware.gpu: runtime tensorrt_llm needs a GPU; nearest that works: engine.runtime=torch",
    ),
    "the LLM API on torch": (
        "draft_target", "cpu", ("engine.track=llmapi", "engine.runtime=torch"),
        "engine.runtime: track llmapi runs on TensorRT-LLM only, not on the torch runtime; nearest that works: "
        "engine.track=engine",
    ),
    "EAGLE on torch": (
        "eagle", "cpu", ("engine.runtime=torch",),
        "speculation.method: the torch runtime does not run method eagle; nearest that works: "
        "speculation.method=draft_target",
    ),
    "quantised EAGLE": (
        "eagle", "H100-SXM", ("target.quantization=fp8",),
        "target.quantization: engines with method eagle run in float16 or bfloat16, not fp8; nearest that works: "
        "target.quantization=none",
    ),
    "EAGLE-3 heads on an engine": (
        "eagle", "H100-SXM", ("speculation.eagle.version=3",),
        "speculation.eagle.version: EAGLE-3 heads are not available on track engine; nearest that works: "
        "engine.track=llmapi",
    ),
    "EAGLE-1 heads on the LLM API": (
        "eagle", "H100-SXM", ("engine.track=llmapi",),
        "speculation.eagle.version: track llmapi takes EAGLE-3 heads only; nearest that works: engine.track=engine",
    ),
    "int4 and drafts": (
        "draft_target", "A100-80GB", ("target.quantization=int4_awq",),
        "target.quantization: engines with method draft_target run in float16, bfloat16 or fp8, not int4_awq; "
        "nearest that works: target.quantization=none",
    ),
    "float32 engine": (
        "draft_target", "H100-SXM", ("target.dtype=float32",),
        "target.dtype: engines with method draft_target run in float16, bfloat16 or fp8, not float32; nearest that "
        "works: target.dtype=bfloat16",
    ),
    "Medusa in a pipeline": (
        "medusa", "H100-SXM", ("target.pipeline_parallel=2",),
        "target.pipeline_parallel: engines with method medusa cannot be divided by pipeline_parallel; nearest that "
        "works: target.pipeline_parallel=1",
    ),
    "quantised on torch": (
        "draft_target", "H100-SXM", ("engine.runtime=torch", "target.quantization=int8_sq"),
        "target.quantization: the torch runtime does not run int8_sq weights; nearest that works: "
        "target.quantization=none",
    ),
    "split on torch": (
        "draft_target", "H100-SXM", ("engine.runtime=torch", "target.tensor_parallel=2"),
        "target.tensor_parallel: the torch runtime runs each model on one device; nearest that works: "
        "target.tensor_parallel=1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("method", "gpu", "overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_with_the_nearest_that_does(
    tmp_path: Path, method: str, gpu: str, overrides: tuple[str, ...], message: str
) -> None:
    path = write_spec(tmp_path / "t.yaml", method, gpu=gpu)
    code, lines = validate(path, *overrides)
    assert (code, lines) == (1, [message])
    with pytest.raises(TrtspecError) as caught:
        require_buildable(load_spec(path, overrides))
    assert message in str(caught.value)


def test_the_nearest_combination_is_one_that_works(tmp_path: Path) -> None:
    """For every refused mixture: apply what the message advises for its first problem until nothing is refused."""
    checked = 0
    for method, gpu, track, runtime in product(
        METHODS, ("cpu", "A100-80GB"), ("engine", "llmapi"), ("torch", "tensorrt_llm")
    ):
        path = write_spec(tmp_path / "t.yaml", method, gpu=gpu, track=track, runtime=runtime)
        problems = [problem for problem in check_support(load_spec(path)) if not problem.not_built]
        if not problems:
            continue
        advice = problems[0].nearest.split()
        changed = [word for word in advice if word.startswith("speculation.method=")]
        if changed:  # another method needs other sections: start from a file of that method
            path = write_spec(tmp_path / "t.yaml", changed[0].split("=")[1], gpu=gpu, track=track, runtime=runtime)
        spec = load_spec(path, advice)
        assert [problem for problem in check_support(spec) if not problem.not_built] == [], (method, gpu, track)
        checked += 1
    assert checked > 30


def test_what_is_not_built_yet_validates_but_is_refused_by_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a release that lacks a row."""
    monkeypatch.setattr("trtspec.trtllm.support.BUILT", BUILT - {("mtp", "engine", "torch")})
    path, overrides = write_spec(tmp_path / "t.yaml", "mtp"), ("engine.runtime=torch",)
    message = (
        "this release does not build method mtp for runtime torch yet; nearest that works: "
        "speculation.method=draft_target"
    )
    code, lines = validate(path, *overrides)
    assert code == 0
    assert [line.split(": ", 1)[-1] for line in lines[:1]] == [message]
    assert lines[1:] == ["valid"]
    with pytest.raises(TrtspecError) as caught:
        require_buildable(load_spec(path, overrides))
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize(
    ("method", "track", "runtime", "gpu"),
    [
        (*row, gpu)
        for row in sorted(BUILT)
        for gpu in ("A100-80GB", "H100-SXM", *(["cpu"] if row[2] == "torch" else []))
    ],
)
def test_what_is_built_passes(tmp_path: Path, method: str, track: str, runtime: str, gpu: str) -> None:
    eagle = ("speculation.eagle.version=3",) if (method, track) == ("eagle", "llmapi") else ()
    spec = load_spec(write_spec(tmp_path / "t.yaml", method, gpu=gpu, track=track, runtime=runtime), eagle)
    assert check_support(spec) == []
    require_buildable(spec)


def test_problems_of_both_models_are_reported(tmp_path: Path) -> None:
    overrides = ("target.quantization=fp8", "speculation.draft.quantization=fp8", "engine.version=1.3.0")
    code, lines = validate(write_spec(tmp_path / "t.yaml", "draft_target", gpu="A100-80GB"), *overrides)
    assert code == 1
    blamed = ["engine.version", "target.quantization", "speculation.draft.quantization"]
    assert [line.split(": ")[0] for line in lines] == blamed


def test_an_unknown_version_is_a_note(tmp_path: Path) -> None:
    path = write_spec(tmp_path / "t.yaml", "none", track="llmapi", version="1.3.0rc7")
    code, lines = validate(path)
    assert code == 0
    assert lines[0] == (
        "engine.version: no Triton container with TensorRT-LLM 1.3.0rc7 is known; the newest known is 26.07 with 1.2.1"
    )


def test_refusals_name_settings_that_exist() -> None:
    """Whatever the table says, the setting to blame is one that the nearest-combination search can change."""
    named = {
        name
        for method, track, runtime, gpu in product(
            METHODS, ("engine", "llmapi"), ("torch", "tensorrt_llm"), ("cpu", "H100-SXM")
        )
        for name, _ in refusals(Combination(method, track, runtime, "1.2.1", gpu))
    }
    assert named and named <= set(ALTERNATIVES)
    assert set(ALTERNATIVES) == set(Combination.__dataclass_fields__)
