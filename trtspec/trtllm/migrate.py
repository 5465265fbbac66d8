"""From a spec of compiled engines to one of the LLM API: what the keys become, what is lost, and why.

TensorRT-LLM 1.3 has no compiled engines and no C++ Triton backend. Knows the spec and the LLM API's settings; writes no
file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtspec.errors import TrtspecError
from trtspec.spec.marks import Key, dotted
from trtspec.spec.rules import BLS_METHODS
from trtspec.spec.schema import Spec
from trtspec.trtllm import llmapi

DEFAULT_VERSION = "1.3.0"
SUFFIX = "-llmapi"
METHODS = ("none", "ngram", "draft_target", "mtp")  # what --method may ask for; the others need settings of their own
# Settings of method sections that exist on both tracks stay; of these methods nothing does.
_NO_COUNTERPART = {
    "medusa": ("the PyTorch backend does not run Medusa heads", "eagle with EAGLE-3 heads, or draft_target, or ngram"),
    "tree": ("the LLM API verifies one chain of drafts, not a tree of a draft model's", "draft_target"),
    "cascade": ("one LLM has one drafter", "draft_target with the smaller or the middle model"),
    "lookahead": ("the PyTorch backend has no lookahead decoding", "ngram"),
    "redrafter": ("the PyTorch backend has no ReDrafter", "eagle with EAGLE-3 heads, or draft_target, or ngram"),
    "eagle": ("the PyTorch backend runs EAGLE-3 heads, and these are EAGLE-1", "eagle with EAGLE-3 heads, or ngram"),
}


@dataclass(frozen=True)
class Change:
    """One key that reads differently afterwards; None is a key that is not there."""

    key: str
    old: Any
    new: Any
    why: str


@dataclass(frozen=True)
class Loss:
    """Something that compiled engines do and the LLM API does not."""

    what: str
    why: str
    instead: str = ""


@dataclass(frozen=True)
class Migration:
    """The new spec as plain YAML values, and what became of the old one."""

    content: dict[str, Any]
    changes: list[Change]
    losses: list[Loss]


class NoCounterpart(TrtspecError):
    """The method of the spec does not exist on track llmapi.

    Attributes:
        losses: what the spec loses, this method first.
    """

    def __init__(self, problem: str, *, where: str, fix: str, losses: list[Loss]) -> None:
        super().__init__(problem, where=where, fix=fix)
        self.losses = losses


def migrate(
    spec: Spec, *, version: str = DEFAULT_VERSION, method: str | None = None, base_dir: Path | None = None
) -> Migration:
    """The counterpart of an engine-track spec on track llmapi.

    Args:
        spec: what to migrate.
        version: TensorRT-LLM version of the result.
        method: speculation method of the result, one of `METHODS`; by default that of the spec.
        base_dir: directory of the new file, to which its relative paths will be relative; that of the spec by default.

    Raises:
        NoCounterpart: the spec's method does not exist on track llmapi and no other is asked for.
        TrtspecError: the spec is one of track llmapi already, names no GPU, or lacks what `method` needs; no version.
    """
    if spec.engine.track == "llmapi":
        raise TrtspecError(
            "this spec is on track llmapi already", where=spec.where(("engine", "track")), fix="nothing to migrate"
        )
    if spec.hardware.gpu == "cpu":
        raise TrtspecError(
            "the LLM API needs a GPU, and hardware.gpu is cpu",
            where=spec.where(("hardware", "gpu")),
            fix="name it: --set hardware.gpu=H100-SXM",
        )
    if not llmapi.is_version(version):
        raise TrtspecError(f"{version!r} is no TensorRT-LLM version", where="--version", expected="such as 1.3.0")
    new = _New(spec, spec.model_dump(mode="json", exclude_unset=True), version)
    _speculation(new, method)
    _track(new)
    _models(new)
    _engine(new)
    _serving(new)
    _paths(new, base_dir or spec.base_dir)
    return Migration(new.content, new.changes, new.losses)


@dataclass
class _New:
    """The new spec while it is made from the old one."""

    spec: Spec
    content: dict[str, Any]
    version: str
    changes: list[Change] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)

    def get(self, key: Key) -> Any:
        """The value at `key`, None where the file does not say."""
        section: Any = self.content
        for part in key:
            section = section.get(part) if isinstance(section, dict) else None
        return section

    def set(self, key: Key, value: Any, why: str, old: Any = None) -> None:
        """Write a value; `old` is what holds now where the file does not say."""
        before = self.get(key) if self.get(key) is not None else old
        if before == value:
            return
        section = self.content
        for part in key[:-1]:
            section = section.setdefault(str(part), {})
        section[str(key[-1])] = value
        self.changes.append(Change(dotted(key), before, value, why))

    def drop(self, key: Key, why: str) -> bool:
        """Take a key out, and the section that is empty then; whether it was there."""
        old = self.get(key)
        if old is None:
            return False
        del self.get(key[:-1])[key[-1]]
        if len(key) > 1 and not self.get(key[:-1]):
            del self.get(key[:-2])[key[-2]]
        self.changes.append(Change(dotted(key), old, None, why))
        return True

    def lose(self, what: str, why: str, instead: str = "") -> None:
        self.losses.append(Loss(what, why, instead))


def _speculation(new: _New, wanted: str | None) -> None:
    speculation = new.spec.speculation
    old = speculation.method
    gone = (
        _NO_COUNTERPART.get(old) if old != "eagle" or (speculation.eagle and speculation.eagle.version == 1) else None
    )
    if gone:
        new.lose(f"method {old}", gone[0], gone[1])
    _lose_pipeline(new)
    if gone and wanted is None:
        ways = " or ".join(f"--method {method}" for method in METHODS if _ready(new.spec, method))
        raise NoCounterpart(
            f"method {old} does not exist on track llmapi: {gone[0]}; nearest: {gone[1]}",
            where=new.spec.where(("speculation", "method")),
            fix=f"choose with {ways}",
            losses=new.losses,
        )
    method = wanted or old
    if method != old:
        _change_method(new, method, gone[0] if gone else "asked for")
    if method == "ngram":
        new.drop(("speculation", "ngram", "window"), "the n-gram pool of the LLM API has no window")
    if method == "eagle":
        new.drop(("speculation", "eagle", "choices"), "the LLM API drafts a chain, not a given tree")
        new.drop(("speculation", "eagle", "max_non_leaves_per_layer"), "it belongs to the token tree of engines")
    if new.get(("speculation", "acceptance")) == "logits" and not llmapi.name_in(new.version, "rejection_sampling"):
        new.set(
            ("speculation", "acceptance"), "auto", f"TensorRT-LLM {new.version} has no acceptance by the draft's logits"
        )
        new.lose(
            "acceptance by the draft's logits",
            "drafts are accepted by equality with the target's own sample: as lossless, with a lower acceptance rate "
            "when sampling",
            f"--version {DEFAULT_VERSION}",
        )


def _ready(spec: Spec, method: str) -> bool:
    """Whether the spec has what `method` needs."""
    if method == "draft_target":
        return spec.speculation.draft is not None
    return method in ("none", "ngram")  # what a checkpoint holds is not known here


def _change_method(new: _New, method: str, why: str) -> None:
    spec = new.spec
    if method == "draft_target" and not _ready(spec, method):
        raise TrtspecError(
            "method draft_target needs a draft model, and this spec has none",
            where=spec.where(("speculation",)),
            fix="add one: --set speculation.draft.model=NAME, or use --method ngram",
        )
    old = spec.speculation
    for section in (old.method, *(["draft"] if method not in ("draft_target", "none") else [])):
        if section != method:
            new.drop(("speculation", section), f"it belongs to method {old.method}")
    new.set(("speculation", "method"), method, why)
    new.drop(("engine", "max_draft_len"), "the LLM API verifies what it drafts")
    key: Key = ("speculation", "num_draft_tokens")
    if method in ("none", "mtp"):
        new.drop(key, "the method decides it")
    elif old.derived_num_draft_tokens is not None or old.method == "none":
        depth = old.tree.depth if old.tree and old.method == "tree" else 4
        new.set(
            key, depth, "as deep as the tree was" if old.tree else "the default of a free choice", old.num_draft_tokens
        )
    if method == "ngram" and old.acceptance == "logits":
        new.set(("speculation", "acceptance"), "auto", "an n-gram has no logits")


def _lose_pipeline(new: _New) -> None:
    """What the models around the engines do."""
    new.lose(
        "models tensorrt_llm_bls, tensorrt_llm_bls_unary, ensemble, preprocessing and postprocessing",
        "the LLM takes text and gives text: one model, tensorrt_llm, which streams",
        "gRPC streams or HTTP generate_stream of tensorrt_llm; inputs are called streaming, sampling_param_max_tokens, "
        "sampling_param_temperature, ...",
    )
    new.lose(
        "inputs min_tokens, repetition_penalty, bad_words, end_id, embedding_bias_words and return_log_probs",
        "the public model of the LLM API has no such inputs",
    )
    new.lose(
        "outputs output_ids, total_target_passes and the acceptance figures of every answer",
        "the public model of the LLM API has other outputs",
        "acceptance_rate, total_accepted_draft_tokens and total_draft_tokens with "
        "sampling_param_return_perf_metrics: true",
    )
    speculation = new.spec.speculation
    if speculation.method not in BLS_METHODS:
        return
    new.lose(
        "inputs num_draft_tokens and use_draft_logits of a request",
        "the LLM drafts the same number of tokens for every request",
        "a second deployment with speculation.method: none",
    )
    new.lose("going on with the target alone when the draft fails", "one LLM holds both")
    if speculation.acceptance == "auto" and speculation.method != "ngram":
        new.lose(
            "acceptance by the draft's logits when sampling",
            "by default the LLM API accepts what equals the target's own sample: as lossless, but less is accepted",
            f"speculation.acceptance: logits, from TensorRT-LLM {DEFAULT_VERSION} on",
        )


def _track(new: _New) -> None:
    engine = new.spec.engine
    new.set(("engine", "track"), "llmapi", "TensorRT-LLM 1.3 and later compile no engines", engine.track)
    new.set(("engine", "runtime"), "tensorrt_llm", "the torch runtime does not serve the LLM API", engine.runtime)
    new.set(("engine", "version"), new.version, "the version that is to serve it (--version)", engine.version)
    new.content["engine"]["version"] = new.version  # also where it is the default: field names depend on it
    new.lose(
        "trtspec parity and trtspec generate",
        "they run engines, or talk to tensorrt_llm_bls",
        "a client of model tensorrt_llm; compare greedy answers with those of speculation.method: none",
    )


def _models(new: _New) -> None:
    for role, key in _roles(new):
        quantization = new.get((*key, "quantization"))
        if quantization == "int8_sq":
            new.set((*key, "quantization"), "none", "the PyTorch backend has no int8 SmoothQuant")
            new.lose(
                f"int8 SmoothQuant of the {role}",
                "the PyTorch backend has no kernels for it; without it the weights take twice the memory",
                "a checkpoint in fp8 (Hopper) or int4_awq",
            )
        elif quantization not in (None, "none") and new.get(("speculation", "method")) == "early_exit":
            new.set((*key, "quantization"), "none", "the draft is cut out of an unquantised checkpoint only")
            new.lose(
                f"{quantization} weights of the {role}",
                "the draft of early_exit is cut out of the checkpoint, and quantised ones cannot be cut",
                "method ngram, with a quantised checkpoint",
            )
        elif quantization not in (None, "none"):
            new.lose(
                f"quantisation of the {role} by trtspec build",
                f"the LLM API loads {quantization} weights, and does not make them",
                "a checkpoint that is quantised already (ModelOpt's Hugging Face export): name it as "
                f"{dotted((*key, 'model'))}",
            )
        if new.get((*key, "kv_cache_dtype")) == "int8":
            new.set((*key, "kv_cache_dtype"), "auto", "the PyTorch backend has no int8 KV cache")
            new.lose(f"int8 KV cache of the {role}", "the PyTorch backend has none", "kv_cache_dtype: fp8 (Hopper)")
    if new.drop(("calibration",), "nothing is quantised on this track"):
        new.lose("calibration", "nothing is quantised on this track")
    draft: Key = ("speculation", "draft")
    if new.get(("speculation", "method")) == "draft_target" and new.get(draft) is not None:
        for name in llmapi.SHARED_WITH_DRAFT:
            default = getattr(new.spec.target, name)
            value = new.get(("target", name)) if new.get(("target", name)) is not None else default
            old = getattr(new.spec.speculation.draft, name)
            new.set((*draft, name), value, "one LLM loads target and draft with one setting", old)
        if new.drop((*draft, "max_seq_len"), "the LLM API has one max_seq_len for both models"):
            new.lose("max_seq_len of the draft", "the LLM API has one for both models")


def _roles(new: _New) -> Iterator[tuple[str, Key]]:
    yield "target", ("target",)
    if new.get(("speculation", "draft")) is not None:
        yield "draft", ("speculation", "draft")


def _engine(new: _New) -> None:
    spec = new.spec
    for name, why in (
        ("paged_context_fmha", "the PyTorch backend always attends over paged context"),
        ("gather_generation_logits", "no logits leave the LLM"),
        ("logits_dtype", "no logits leave the LLM"),
        ("build_options", "nothing is compiled on this track"),
        ("max_draft_len", "the LLM API verifies what it drafts"),
    ):
        if new.drop(("engine", name), why):
            new.lose(f"engine.{name}", why)
    limit = new.get(("engine", "max_num_tokens"))
    least = max(spec.engine.max_input_len, spec.engine.max_batch_size * (1 + spec.speculation.num_draft_tokens))
    if limit is not None and limit < least and not spec.serving.chunked_context:
        new.drop(("engine", "max_num_tokens"), f"a whole prompt must fit into one pass: {least} tokens or more")


def _serving(new: _New) -> None:
    for name, why in (
        ("engine_parameters", "they are parameters of the C++ backend"),
        ("orchestrator", "the LLM API starts its own processes"),
        ("spawn_processes", "the LLM API starts its own processes"),
        ("fast_logits", "draft and target are in one process"),
        ("default_num_draft_tokens", "the LLM drafts the same number of tokens for every request"),
        ("max_concurrency", "requests are batched by the LLM, up to engine.max_batch_size"),
        ("plain_chunk_tokens", "the LLM streams token by token"),
        ("num_threads", "it is for the torch runtime"),
    ):
        if new.drop(("serving", name), why):
            new.lose(f"serving.{name}", why)
    for section, what in (
        ("kv_cache_free_gpu_mem_fraction", "part of the memory"),
        ("kv_cache_bytes", "KV cache"),
        ("gpu_device_ids", "GPUs"),
    ):
        for role in ("draft", "middle"):
            if new.drop(("serving", section, role), "target and draft share the GPUs and the KV cache of one LLM"):
                new.lose(f"{what} of the {role} alone", "target and draft share the GPUs and the KV cache of one LLM")
    new.drop(("parity", "num_draft_tokens"), "the LLM drafts the same number of tokens for every request")
    image = new.get(("serving", "image"))
    if image is not None:
        new.drop(("serving", "image"), f"it was chosen for TensorRT-LLM {new.spec.engine.version}")


def _paths(new: _New, base_dir: Path) -> None:
    """Results beside those of the old spec, not over them; relative paths as seen from the new file."""
    spec = new.spec
    elsewhere = base_dir.resolve() != spec.base_dir.resolve()

    def moved(text: str) -> str:
        if not elsewhere or os.path.isabs(os.path.expanduser(text)):
            return text
        relative = os.path.relpath(spec.path(text), base_dir.resolve())
        return relative if relative.startswith(".") else f"./{relative}"

    new.set(("name",), f"{spec.name}{SUFFIX}", "what is built stays beside the engines, not in their place", spec.name)
    for name in ("engines", "model_repo"):
        old = new.get(("output", name))
        if old is not None:
            new.set(("output", name), moved(old).rstrip("/") + SUFFIX, "beside the engines, not in their place")
    models: list[Key] = [("speculation", "eagle", "heads"), *((*key, "model") for _, key in _roles(new))]
    for key in [*models, ("parity", "prompts")]:
        text = new.get(key)
        # Anything else that a model is called is a hub name or an installed package.
        if text is not None and (key not in models or text.startswith(".") or spec.path(text).exists()):
            new.set(key, moved(text), "the new file is in another directory")
