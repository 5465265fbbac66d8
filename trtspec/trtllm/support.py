"""What works with what: method x track x version x runtime x GPU x precision, as data, with the way out.

Two questions, kept apart: can TensorRT-LLM or the torch runtime do it at all (`refused`), and does this release of
trtspec build it (`not built yet`). Knows the spec; does not know how anything is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from trtspec.errors import TrtspecError
from trtspec.spec.gpus import GPUS
from trtspec.spec.marks import Key, dotted
from trtspec.spec.rules import role_key
from trtspec.spec.schema import Spec
from trtspec.trtllm.versions import RELEASES, has_engine_track, major_minor, release_for


@dataclass(frozen=True)
class Row:
    """How one method runs on each track (TensorRT-LLM's own name of the mode), None where it cannot."""

    engine: str | None
    llmapi: str | None
    torch: bool
    pipeline_parallel: bool = True
    fp8: bool = True


METHODS = {
    "none": Row(engine="none", llmapi="none", torch=True),
    "draft_target": Row(engine="draft_tokens_external", llmapi="DraftTarget", torch=True),
    "early_exit": Row(engine="draft_tokens_external", llmapi="DraftTarget", torch=True),
    "ngram": Row(engine="draft_tokens_external", llmapi="NGram", torch=True),
    "tree": Row(engine="draft_tokens_external", llmapi=None, torch=True),
    "cascade": Row(engine="draft_tokens_external", llmapi=None, torch=True),
    "medusa": Row(engine="medusa", llmapi=None, torch=True, pipeline_parallel=False),
    "mtp": Row(engine=None, llmapi="MTP", torch=True),
    "eagle": Row(engine="eagle", llmapi="Eagle3", torch=False, pipeline_parallel=False, fp8=False),
    "lookahead": Row(engine="lookahead_decoding", llmapi=None, torch=False),
    "redrafter": Row(engine="explicit_draft_tokens", llmapi=None, torch=False, pipeline_parallel=False),
}
FP8_MIN_SM = 89
# Quantisation and the compute capability (times ten) that it needs.
QUANTIZATION_MIN_SM = {"none": 80, "int8_sq": 80, "int4_awq": 80, "fp8": FP8_MIN_SM, "w4a8_awq": FP8_MIN_SM}
# What this release builds, as (method, track, runtime).
_BLS_METHODS = ("none", "draft_target", "early_exit", "ngram", "tree", "cascade")
BUILT = {
    *((method, "engine", "torch") for method in (*_BLS_METHODS, "medusa", "mtp")),
    *((method, "engine", "tensorrt_llm") for method in (*_BLS_METHODS, "medusa", "eagle", "lookahead", "redrafter")),
    *((method, "llmapi", "tensorrt_llm") for method in ("none", "draft_target", "early_exit", "ngram", "mtp", "eagle")),
}


@dataclass(frozen=True)
class Combination:
    """The settings that the table is about, for one of the spec's models."""

    method: str
    track: str
    runtime: str
    version: str
    gpu: str
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    eagle_version: int | None = None


# What changing a setting costs the user, for choosing the nearest combination, and the values worth trying.
ALTERNATIVES: dict[str, tuple[int, tuple[str | int, ...]]] = {
    "version": (1, ("1.2.1", "1.3.0")),
    "kv_cache_dtype": (1, ("auto",)),
    "dtype": (1, ("bfloat16",)),
    "pipeline_parallel": (2, (1,)),
    "tensor_parallel": (2, (1,)),
    "quantization": (2, ("int8_sq", "none")),
    "track": (3, ("engine", "llmapi")),
    "runtime": (4, ("tensorrt_llm", "torch")),
    "gpu": (5, ("H100-SXM",)),
    "method": (6, ("draft_target", "none")),
    "eagle_version": (7, (1, 3)),
}


@dataclass(frozen=True)
class Problem:
    """Why a spec cannot be built. `nearest` is what to set instead, as `key=value` words; `not_built` says that the
    systems can do it and only this release cannot."""

    key: Key
    reason: str
    nearest: str
    not_built: bool = False


def check_support(spec: Spec) -> list[Problem]:
    """Why this release cannot build `spec`, each with the nearest combination that works; empty when it can.

    Problems with `not_built` come only when nothing is refused outright.
    """
    combinations = {role: _combination(spec, role) for role in spec.models}
    problems: dict[tuple[Key, str], Problem] = {}
    for role, at in combinations.items():
        reasons = list(refusals(at))
        nearest = _words(at, role, _nearest(at, _is_possible)) if reasons else ""
        for name, reason in reasons:
            key = _key(name, role)
            problems.setdefault((key, reason), Problem(key, reason, nearest))
    if problems:
        return list(problems.values())
    target = combinations["target"]
    if _is_built(target):
        return []
    # Each word once: models share most settings.
    words = {
        word: None
        for role, at in combinations.items()
        for word in _words(at, role, _nearest(at, lambda other: _is_built(other) and _is_possible(other))).split()
    }
    return [Problem(*_missing(target), nearest=" ".join(words), not_built=True)]


def require_buildable(spec: Spec) -> None:
    """Refuse a spec that this release cannot build, before anything is started.

    Raises:
        TrtspecError: one line for each problem: file, line, key, reason, the nearest settings that work.
    """
    if problems := check_support(spec):
        raise TrtspecError("\n".join(describe(spec, problem) for problem in problems))


def describe(spec: Spec, problem: Problem) -> str:
    """One line for the user: where, why, and the way out."""
    fix = f"nearest that works: {problem.nearest}"
    return str(TrtspecError(problem.reason, where=spec.where(problem.key), fix=fix))


def remarks(spec: Spec) -> list[str]:
    """What is legal but worth knowing about the version, one sentence each."""
    version = spec.engine.version
    if spec.engine.runtime == "tensorrt_llm" and release_for(version) is None:
        newest = RELEASES[0]
        return [
            f"{spec.where(('engine', 'version'))}: no Triton container with TensorRT-LLM {version} is known; "
            f"the newest known is {newest.tag} with {newest.tensorrt_llm}"
        ]
    return []


def refusals(at: Combination) -> Iterator[tuple[str, str]]:
    """Every reason why the systems cannot run this combination, with the setting to blame."""
    if at.track == "llmapi" and at.runtime == "torch":
        yield "runtime", "track llmapi runs on TensorRT-LLM only, not on the torch runtime"
    elif at.runtime == "torch":
        yield from _torch_refusals(at)
    else:
        yield from _engine_refusals(at) if at.track == "engine" else _llmapi_refusals(at)
        yield from _gpu_refusals(at)


def _torch_refusals(at: Combination) -> Iterator[tuple[str, str]]:
    if not METHODS[at.method].torch:
        yield "method", f"the torch runtime does not run method {at.method}"
    if at.quantization != "none":
        yield "quantization", f"the torch runtime does not run {at.quantization} weights"
    if at.kv_cache_dtype != "auto":
        yield "kv_cache_dtype", f"the torch runtime has no {at.kv_cache_dtype} KV cache"
    for split in ("tensor_parallel", "pipeline_parallel"):
        if getattr(at, split) > 1:
            yield split, "the torch runtime runs each model on one device"


def _engine_refusals(at: Combination) -> Iterator[tuple[str, str]]:
    row, speculates = METHODS[at.method], at.method != "none"
    if not has_engine_track(at.version):
        yield (
            "version",
            f"TensorRT-LLM {at.version} compiles no engines; the last that does is {RELEASES[0].tensorrt_llm}",
        )
    if row.engine is None:
        yield "method", f"method {at.method} is not available on track engine"
    if at.eagle_version == 3:
        yield "eagle_version", "EAGLE-3 heads are not available on track engine"
    precisions = "float16, bfloat16 or fp8" if row.fp8 else "float16 or bfloat16"
    if speculates and at.quantization not in (("none", "fp8") if row.fp8 else ("none",)):
        yield "quantization", f"engines with method {at.method} run in {precisions}, not {at.quantization}"
    if speculates and at.dtype == "float32":
        yield "dtype", f"engines with method {at.method} run in {precisions}, not float32"
    if at.pipeline_parallel > 1 and not row.pipeline_parallel:
        yield "pipeline_parallel", f"engines with method {at.method} cannot be divided by pipeline_parallel"


def _llmapi_refusals(at: Combination) -> Iterator[tuple[str, str]]:
    if major_minor(at.version) < (1, 2):
        yield "version", f"track llmapi needs TensorRT-LLM 1.2 or later, not {at.version}"
    if METHODS[at.method].llmapi is None:
        yield "method", f"method {at.method} is not available on track llmapi"
    if at.eagle_version == 1:
        yield "eagle_version", "track llmapi takes EAGLE-3 heads only"


def _gpu_refusals(at: Combination) -> Iterator[tuple[str, str]]:
    sm = GPUS[at.gpu].sm
    if not sm:
        yield "gpu", "runtime tensorrt_llm needs a GPU"
        return
    if sm < QUANTIZATION_MIN_SM[at.quantization]:
        yield "quantization", f"{at.gpu} (sm_{sm}) has no fp8 arithmetic, which {at.quantization} needs"
    if sm < FP8_MIN_SM and at.kv_cache_dtype == "fp8":
        yield "kv_cache_dtype", f"{at.gpu} (sm_{sm}) has no fp8 KV cache"


def _is_possible(at: Combination) -> bool:
    return not any(refusals(at))


def _is_built(at: Combination) -> bool:
    return (at.method, at.track, at.runtime) in BUILT


def _missing(at: Combination) -> tuple[Key, str]:
    """What this release lacks for a combination that the systems can run."""
    return ("speculation", "method"), f"this release does not build method {at.method} for runtime {at.runtime} yet"


def _nearest(at: Combination, works: Callable[[Combination], bool]) -> Combination | None:
    """The combination that `works` with the cheapest changes, None when there is none."""
    names = list(ALTERNATIVES)
    options = [dict.fromkeys((getattr(at, name), *ALTERNATIVES[name][1])) for name in names]
    if at.eagle_version is None:
        options[names.index("eagle_version")] = {None: None}

    def cost(other: Combination) -> int:
        return sum(ALTERNATIVES[name][0] for name in names if getattr(other, name) != getattr(at, name))

    candidates = (replace(at, **dict(zip(names, values, strict=True))) for values in product(*options))
    return min((other for other in candidates if works(other)), key=cost, default=None)


def _words(at: Combination, role: str, other: Combination | None) -> str:
    """The settings in which `other` differs, as `key=value` words."""
    if other is None:
        return "nothing"
    names = [name for name in ALTERNATIVES if getattr(other, name) != getattr(at, name)]
    return " ".join(f"{dotted(_key(name, role))}={getattr(other, name)}" for name in names)


def _combination(spec: Spec, role: str) -> Combination:
    model, speculation, engine = spec.models[role], spec.speculation, spec.engine
    eagle = speculation.eagle if speculation.method == "eagle" else None
    return Combination(
        method=speculation.method,
        track=engine.track,
        runtime=engine.runtime,
        version=engine.version,
        gpu=spec.hardware.gpu,
        quantization=model.quantization,
        kv_cache_dtype=model.kv_cache_dtype,
        dtype=model.dtype,
        tensor_parallel=model.tensor_parallel,
        pipeline_parallel=model.pipeline_parallel,
        eagle_version=eagle.version if eagle else None,
    )


def _key(name: str, role: str) -> Key:
    """Where a setting of `Combination` stands in the spec."""
    if name == "method":
        return ("speculation", "method")
    if name == "eagle_version":
        return ("speculation", "eagle", "version")
    if name == "gpu":
        return ("hardware", "gpu")
    return ("engine", name) if name in ("track", "runtime", "version") else (*role_key(role), name)
