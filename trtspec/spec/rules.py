"""Constraints between the keys of a spec, and remarks on settings that are legal but wasteful.

Knows what has to agree (draft lengths, parallel sizes, KV cache settings, a method and its sections). Does not read
files and does not know which combinations this release can build (see `trtspec.trtllm.support`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from trtspec.spec.marks import Key
from trtspec.spec.schema import Choices, ModelRef, Spec, serving_key

MAX_FREE_DRAFT_TOKENS = 64
MAX_TREE_NODES = 256
MAX_CHOICES = 63  # nodes of a tree that heads inside the engine fill
DEFAULT_TREE_LEVELS = 4  # of the tree of 63 nodes
NEEDS_DRAFT = ("draft_target", "tree", "cascade")
# Methods whose loop runs outside the engine: target and drafts are called once or more a cycle.
BLS_METHODS = ("draft_target", "early_exit", "ngram", "tree", "cascade")
_SECTIONS = ("medusa", "eagle", "redrafter", "early_exit", "ngram", "tree", "cascade", "mtp", "lookahead")
# What a method cannot do without, in its section.
_REQUIRED = {
    "medusa": "heads",
    "eagle": "heads",
    "redrafter": "drafter",
    "early_exit": "layer",
    "cascade": "middle.model",
}
# The engine verifies exactly what its decoder proposes; a longer draft is as wrong as a shorter one.
_EXACT_DRAFT_LEN = ("lookahead", "redrafter")


@dataclass(frozen=True)
class Broken:
    """One broken rule: the key to blame, what is wrong, what to do."""

    key: Key
    problem: str
    fix: str


def broken_rules(spec: Spec) -> list[Broken]:
    """Every rule that `spec` breaks, in the order of the sections."""
    rules = (_sections, _layers, _draft_lengths, _trees, _acceptance, _machine, _devices, _draft_policy, _engine)
    return [broken for rule in rules for broken in rule(spec)]


def remarks(spec: Spec) -> list[str]:
    """What is legal but probably not meant, one sentence each, beginning with the file, line and key."""
    return [f"{spec.where(key)}: {text}" for key, text in _remarks(spec)]


def _sections(spec: Spec) -> Iterator[Broken]:
    """The method has the draft and the settings that it needs; those of other methods may stand beside them."""
    speculation, method = spec.speculation, spec.speculation.method
    if method in NEEDS_DRAFT and speculation.draft is None:
        yield Broken(("speculation",), f"method {method} needs a draft model", "add speculation.draft.model")
    if method in _REQUIRED and getattr(speculation, method) is None:
        problem, fix = f"method {method} needs its settings", f"add speculation.{method}.{_REQUIRED[method]}"
        yield Broken(("speculation",), problem, fix)


def _layers(spec: Spec) -> Iterator[Broken]:
    """Only models that propose are cut."""
    if spec.target.num_layers is not None:
        problem = "the target is what the output is measured by, and is not cut"
        yield Broken(("target", "num_layers"), problem, "remove this key; a draft or middle model may have it")


def _draft_lengths(spec: Spec) -> Iterator[Broken]:
    """What is proposed, what the engine can verify, and what serving and parity ask for agree."""
    speculation, method, count = spec.speculation, spec.speculation.method, spec.speculation.num_draft_tokens
    key: Key = ("speculation", "num_draft_tokens")
    if method == "none":
        return
    if method == "lookahead" and speculation.lookahead:
        w, n, g = (
            speculation.lookahead.window_size,
            speculation.lookahead.ngram_size,
            speculation.lookahead.verification_set_size,
        )
        if w < 2 or n < 2 or g < 1:
            yield Broken(
                ("speculation", "lookahead"),
                f"window {w}, n-gram {n}, verification set {g} cannot look ahead",
                "use a window and an n-gram of 2 or more and a verification set of 1 or more",
            )
            return
    derived = speculation.derived_num_draft_tokens
    if derived is not None and count != derived:
        fix = f"remove this key, or write {derived}"
        yield Broken(key, f"{count} does not fit the settings of {method}, which give {derived}", fix)
    if derived is None and not 1 <= count <= MAX_FREE_DRAFT_TOKENS:
        fix = "set speculation.method: none for plain decoding" if count == 0 else "use fewer"
        yield Broken(key, f"{count} is not between 1 and {MAX_FREE_DRAFT_TOKENS} as method {method} needs", fix)
    modules = speculation.mtp.num_modules if speculation.mtp else 1
    # The torch runtime goes on drafting with the last module; the LLM API does so with a single one only.
    if method == "mtp" and modules > 1 and count != modules and spec.engine.track == "llmapi":
        yield Broken(key, f"{count} does not fit {modules} MTP modules", f"remove this key, or write {modules}")

    limit = spec.max_draft_len
    if limit < count or (method in _EXACT_DRAFT_LEN and limit != count):
        yield Broken(
            ("engine", "max_draft_len"),
            f"{limit} does not fit the {count} draft tokens of {spec.where(key)}",
            f"remove this key, or write {count}",
        )
        return
    for asking in (("serving", "default_num_draft_tokens"), ("parity", "num_draft_tokens")):
        asked = getattr(getattr(spec, asking[0]), asking[1])
        if asked is not None and asked > limit:
            fix = f"use at most {limit}, or raise engine.max_draft_len"
            yield Broken(asking, f"{asked} draft tokens, but the target engine verifies at most {limit}", fix)


def _trees(spec: Spec) -> Iterator[Broken]:
    speculation = spec.speculation
    if speculation.method == "tree" and speculation.tree and speculation.tree.num_nodes > MAX_TREE_NODES:
        problem = f"the tree has {speculation.tree.num_nodes} nodes, more than {MAX_TREE_NODES}"
        yield Broken(("speculation", "tree", "branching"), problem, "use fewer children or levels")
    if speculation.method == "medusa" and speculation.medusa:
        heads = speculation.medusa.num_heads
        if speculation.medusa.choices:
            yield from _choices("medusa", speculation.medusa.choices, heads, "num_heads")
        elif heads < DEFAULT_TREE_LEVELS:
            problem = f"the default tree has {DEFAULT_TREE_LEVELS} levels, more than there are heads"
            yield Broken(("speculation", "medusa", "num_heads"), problem, "set speculation.medusa.choices")
    if speculation.method == "eagle" and speculation.eagle and speculation.eagle.choices:
        yield from _choices("eagle", speculation.eagle.choices, speculation.eagle.num_layers, "num_layers")


def _choices(section: str, choices: Choices, depth: int, depth_key: str) -> Iterator[Broken]:
    """A token tree lists every node once, its parents too, and is no deeper than there are heads."""
    key: Key = ("speculation", section, "choices")
    for index, path in enumerate(choices):
        if len(path) > depth:
            fix = f"shorten it, or raise speculation.{section}.{depth_key}"
            yield Broken((*key, index), f"path {list(path)} is deeper than {depth_key} {depth}", fix)
        if len(path) > 1 and path[:-1] not in choices:
            yield Broken((*key, index), f"the parent of path {list(path)} is missing", f"add {list(path[:-1])}")
    for path, times in Counter(choices).items():
        if times > 1:
            yield Broken(key, f"path {list(path)} is listed {times} times", "list every path once")
    if len(choices) > MAX_CHOICES:
        yield Broken(key, f"the tree has {len(choices)} nodes, more than {MAX_CHOICES}", "remove some")


def _acceptance(spec: Spec) -> Iterator[Broken]:
    key: Key = ("speculation", "acceptance")
    method, acceptance = spec.speculation.method, spec.speculation.acceptance
    if method == "ngram" and acceptance == "logits":
        yield Broken(key, "method ngram has no draft logits", "use acceptance: tokens")
    if method == "tree" and acceptance == "logits":
        problem = "the server verifies a tree path by path and accepts by equality, not by logits"
        yield Broken(key, problem, "use acceptance: auto, or tokens")
    if method == "tree" and not spec.engine.gather_generation_logits:
        problem = "the draft engine cannot return the logits that a tree grows from"
        yield Broken(("engine", "gather_generation_logits"), problem, "use true")
        return
    medusa = spec.speculation.medusa if method == "medusa" else None
    if medusa and medusa.acceptance == "typical" and spec.engine.runtime == "tensorrt_llm":
        problem = "the Medusa mode of TensorRT-LLM accepts by equality with its greedy token only"
        yield Broken(("speculation", "medusa", "acceptance"), problem, "use lossless, or engine.runtime: torch")
    wants_logits = method in BLS_METHODS and method != "ngram" and acceptance != "tokens"
    if wants_logits and not spec.engine.gather_generation_logits:
        yield Broken(
            ("engine", "gather_generation_logits"),
            f"the draft engine cannot return the logits that acceptance: {acceptance} asks for",
            "use true, or speculation.acceptance: tokens",
        )


def _machine(spec: Spec) -> Iterator[Broken]:
    gpus = spec.hardware.total_gpus
    if spec.hardware.gpu == "cpu" and gpus > 1:
        yield Broken(("hardware", "num_gpus"), f"gpu is cpu, but {gpus} GPUs are asked for", "name the GPU, or use 1")
    for role, model in spec.models.items():
        if model.world_size > gpus:
            yield Broken(
                (*role_key(role), "tensor_parallel"),
                f"tensor_parallel {model.tensor_parallel} x pipeline_parallel {model.pipeline_parallel} needs "
                f"{model.world_size} GPUs, but hardware has {gpus}",
                "lower them, or raise hardware.num_gpus or hardware.num_nodes",
            )


def _devices(spec: Spec) -> Iterator[Broken]:
    """Every model gets as many GPUs of a node as it is split over; processes and fast logits go together."""
    serving = spec.serving
    for role, model in spec.models.items():
        devices: tuple[int, ...] | None = serving.gpu_device_ids.of(role)
        if devices is None:
            continue
        key: Key = ("serving", "gpu_device_ids", serving_key(role))
        if len(devices) != len(set(devices)) or len(devices) != model.world_size:
            problem = f"{list(devices)} are not the {model.world_size} different GPUs that the {role} is split over"
            yield Broken(key, problem, "name each GPU once, tensor_parallel x pipeline_parallel of them")
        elif max(devices) >= spec.hardware.num_gpus:
            problem = f"GPU {max(devices)} does not exist, hardware has {spec.hardware.num_gpus}"
            yield Broken(key, problem, "count from 0, or raise hardware.num_gpus")
    if not serving.spawn_processes and not serving.orchestrator:
        problem = "without orchestrator no processes are started at all"
        yield Broken(("serving", "spawn_processes"), problem, "remove this key, or set serving.orchestrator: true")
    if serving.fast_logits and (serving.spawn_processes or not serving.orchestrator):
        problem = "logits go from GPU to GPU only between processes that the launcher starts"
        fix = "set serving.orchestrator: true and serving.spawn_processes: false, or remove this key"
        yield Broken(("serving", "fast_logits"), problem, fix)
    if serving.chunked_context and not spec.engine.paged_context_fmha:
        problem = "long prompts cannot be cut without paged context FMHA"
        yield Broken(("serving", "chunked_context"), problem, "set engine.paged_context_fmha: true, or remove this key")


def _draft_policy(spec: Spec) -> Iterator[Broken]:
    """Draft lengths by load are those of a method that drafts out here, and no longer than what it drafts at most."""
    chosen, method, count = spec.serving.draft_length, spec.speculation.method, spec.speculation.num_draft_tokens
    if chosen is None or chosen.policy == "fixed" or method == "none":
        return
    key: Key = ("serving", "draft_length")
    if method not in BLS_METHODS and spec.engine.track == "engine":
        problem = f"method {method} drafts inside the target's engine, always the same number of tokens"
        yield Broken((*key, "policy"), problem, "use fixed, or remove serving.draft_length")
        return
    for load, length in chosen.schedule.items() if chosen.policy == "schedule" else ():
        place: Key = (*key, "schedule", str(load))
        if length > count:
            fix = f"use at most {count}, or raise speculation.num_draft_tokens"
            yield Broken(place, f"{length} draft tokens, but a cycle proposes at most {count}", fix)
        elif method == "tree" and 0 < length < count:
            problem = f"{length} draft tokens are a part of the tree, which is made whole or not at all"
            yield Broken(place, problem, f"write {count}, or 0")


def _engine(spec: Spec) -> Iterator[Broken]:
    engine = spec.engine
    for role in spec.models:
        limit = spec.max_seq_len(role)
        if engine.max_input_len >= limit:
            yield Broken(
                ("engine", "max_input_len"),
                f"{engine.max_input_len} leaves no room for output in the {role}'s max_seq_len {limit}",
                "lower it, or raise max_seq_len",
            )
    if engine.track == "engine" and engine.kv_cache_reuse:
        for role, model in spec.models.items():
            if cause := _why_no_paged_context(spec, model):
                yield Broken(
                    ("engine", "kv_cache_reuse"),
                    f"the {role} engine cannot reuse its KV cache: {cause[0]}",
                    f"{cause[1]}, or set engine.kv_cache_reuse: false",
                )
    ports = {"http_port": spec.serving.http_port, "grpc_port": spec.serving.grpc_port}
    ports["metrics_port"] = spec.serving.metrics_port
    for port, times in Counter(ports.values()).items():
        if times > 1:
            names = [name for name, value in ports.items() if value == port]
            yield Broken(("serving", names[-1]), f"port {port} is used for {' and '.join(names)}", "use another port")


def _why_no_paged_context(spec: Spec, model: ModelRef) -> tuple[str, str] | None:
    """Why the engine of `model` is built without paged context FMHA, and the way out; None when it is built with it."""
    if not spec.engine.paged_context_fmha:
        return "it is built without paged context FMHA", "set engine.paged_context_fmha: true"
    if model.kv_cache_dtype == "int8":
        return "an int8 KV cache turns paged context FMHA off", "use kv_cache_dtype: auto"
    if model.kv_cache_dtype == "fp8" and model.quantization not in ("fp8", "w4a8_awq"):
        return "an fp8 KV cache without fp8 activations turns paged context FMHA off", "use quantization: fp8"
    return None


def role_key(role: str) -> Key:
    """Where the model of a role stands in the spec."""
    kind, _, number = role.partition("_")
    if number:  # draft_2 is the first further one
        section = {"draft": ("tree", "drafts"), "middle": ("cascade", "middles")}[kind]
        return ("speculation", *section, int(number) - 2)
    return {
        "target": ("target",),
        "draft": ("speculation", "draft"),
        "middle": ("speculation", "cascade", "middle"),
    }[role]


def _remarks(spec: Spec) -> Iterator[tuple[Key, str]]:
    speculation, method = spec.speculation, spec.speculation.method
    for section in ("draft", *_SECTIONS):
        used = method in NEEDS_DRAFT if section == "draft" else method == section
        if not used and getattr(speculation, section) is not None:
            yield ("speculation", section), f"unused, because method is {method}"
    if method in ("medusa", "eagle") and spec.max_draft_len > speculation.num_draft_tokens:
        unused = spec.max_draft_len - speculation.num_draft_tokens
        yield ("engine", "max_draft_len"), f"{unused} of {spec.max_draft_len} draft slots are never used"
    if spec.engine.runtime == "torch":
        for section, key in (("engine", "build_options"), ("serving", "engine_parameters")):
            if getattr(getattr(spec, section), key):
                yield (section, key), "unused, because engine.runtime is torch"
    if method in BLS_METHODS and not spec.engine.kv_cache_reuse:
        yield ("engine", "kv_cache_reuse"), "without it every cycle computes the whole text again"
    for role in spec.models:
        if spec.max_seq_len(role) < spec.max_seq_len("target"):
            yield (
                (*role_key(role), "max_seq_len"),
                (f"texts longer than {spec.max_seq_len(role)} tokens are decoded without the {role} model"),
            )
