"""The plan's schedule, load -> draft tokens, in the words of what serves: the BLS model, TensorRT-LLM's LLM API, vLLM.

Knows what each of them can be told. Does not know how a schedule is found (`planner`) nor how it gets into a spec
(`apply`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from trtspec.decoding.draft_length import DraftLength
from trtspec.plan.result import MethodPlan, Plan
from trtspec.spec.rules import BLS_METHODS
from trtspec.spec.schema import DraftLength as DraftLengthSection
from trtspec.spec.schema import Spec
from trtspec.trtllm import llmapi

Schedule = Mapping[int, int]

# One version of each kind: told a largest load, told lengths by load.
LLMAPI_VERSIONS = ("1.2.1", llmapi.NEWEST_KNOWN)
_LLMAPI_KEYS = ("decoding_type", "max_draft_len", "num_nextn_predict_layers", "max_concurrency", "draft_len_schedule")
# Our method -> vLLM's; those that propose trees or chain models it does not have.
_VLLM_METHODS = {
    "draft_target": "draft_model",
    "ngram": "ngram",
    "medusa": "medusa",
    "mtp": "mtp",
    "eagle": "eagle",
}
_VLLM_SINCE = "0.24"
# Ranges end somewhere; vLLM cuts them at its own --max-num-seqs.
_VLLM_MOST_SEQUENCES = 1024


@dataclass(frozen=True)
class Rendering:
    """The schedule for one system.

    Attributes:
        system: what serves, with the versions that this is for.
        text: what to write there; empty where the system cannot be told.
        note: where to write it, or why it cannot be done.
    """

    system: str
    text: str
    note: str


def compact(schedule: Schedule) -> dict[int, int]:
    """The same lengths at every load, with one entry for each run of equal ones, and none for zeros at the end.

    A schedule that never drafts keeps one entry.
    """
    loads = sorted(schedule)
    runs = {
        load: schedule[load]
        for load, after in zip(loads, [*loads[1:], None], strict=True)
        if after is None or schedule[after] != schedule[load]
    }
    if len(runs) > 1 and not runs[loads[-1]]:
        del runs[loads[-1]]
    return runs


def renderings(plan: Plan) -> list[Rendering]:
    """The schedule of the plan's own method for every system; empty where the plan has none."""
    if not plan.schedule:
        return []
    return [
        _bls(plan.own.method, compact(plan.schedule)),
        *(_llmapi(plan.own, compact(plan.schedule), version) for version in LLMAPI_VERSIONS),
        _vllm(plan.own.method, compact(plan.schedule)),
    ]


def with_schedule(spec: Spec, plan: MethodPlan, schedule: Schedule) -> Spec | None:
    """The spec with the draft length and the schedule that its track can be told; None: it drafts nothing.

    The LLM API begins with all draft tokens at the smallest load. Where it also drafts all of them or none, it does so
    up to the largest load at which all of them pay. Methods inside a compiled engine, and those whose settings say how
    many tokens they draft, keep their length.
    """
    lengths = compact(schedule)
    most = next(iter(lengths.values())) if spec.engine.track == "llmapi" else max(lengths.values())
    if not most:
        return None
    if spec.speculation.derived_num_draft_tokens is None:
        spec = _updated(spec, "speculation", num_draft_tokens=most)
    most = spec.speculation.num_draft_tokens
    whole = spec.speculation.method == "tree"
    lengths = compact({load: most if whole and length else min(length, most) for load, length in lengths.items()})
    if spec.engine.track == "engine":
        return _scheduled(spec, lengths) if spec.speculation.method in BLS_METHODS else spec
    stepped = _scheduled(spec, lengths)
    if not _is_refused(stepped):
        return stepped
    # Loads at which the plan has nothing to say of this length are judged by the schedule.
    gains = {point.batch: point.speed_up for point in plan.points if point.num_draft_tokens == most}
    until = 0
    for load in sorted(lengths.keys() | {load for load in gains if load <= max(lengths)}):
        if not (gains[load] > 1 if load in gains else lengths.get(load) == most):
            break
        until = load
    return _scheduled(spec, {until: most}) if until else None


def _bls(method: str, schedule: Schedule) -> Rendering:
    system = "The BLS model (engine track)"
    if method not in BLS_METHODS:
        return Rendering(system, "", f"{method} drafts inside the target's engine, always the same number of tokens.")
    section = {"serving": {"draft_length": {"policy": "schedule", "schedule": dict(schedule)}}}
    written = DraftLength("schedule", max(schedule.values()), schedule).written()["draft_length_schedule"]
    return Rendering(
        system,
        yaml.safe_dump(section, sort_keys=False),
        f"Into the spec, as --apply does; in config.pbtxt it is the parameter draft_length_schedule, {written}.",
    )


def _llmapi(plan: MethodPlan, schedule: Schedule, version: str) -> Rendering:
    system = f"TensorRT-LLM's LLM API {version}"
    spec = _bare(plan.method, version, max(schedule.values()))
    if spec is None:
        return Rendering(system, "", f"The LLM API has no method {plan.method}.")
    made = with_schedule(spec, plan, schedule)
    if made is None:
        return Rendering(system, "", "The plan drafts nothing at the smallest load: leave speculative_config out.")
    config = llmapi.model_yaml(made)["speculative_config"]
    section = {"speculative_config": {key: config[key] for key in _LLMAPI_KEYS if key in config}}
    return Rendering(
        system,
        yaml.safe_dump(section, sort_keys=False),
        "Into model.yaml, beside the keys of the draft; trtspec build writes it from serving.draft_length.",
    )


def _vllm(method: str, schedule: Schedule) -> Rendering:
    system = f"vLLM {_VLLM_SINCE} and newer"
    if method not in _VLLM_METHODS:
        return Rendering(system, "", f"vLLM has no method {method}.")
    if not any(schedule.values()):
        return Rendering(system, "", "The plan drafts nothing at any load: leave --speculative-config out.")
    ranges, first = [], 1
    for load, length in schedule.items():
        ranges.append([first, load, length])
        first = load + 1
    if ranges[-1][2]:  # the last length would go on for all larger batches
        ranges.append([first, max(first, _VLLM_MOST_SEQUENCES), 0])
    config = {
        "method": _VLLM_METHODS[method],
        "num_speculative_tokens": max(schedule.values()),
        "num_speculative_tokens_per_batch_size": ranges,
    }
    return Rendering(
        system,
        f"--speculative-config '{json.dumps(config)}'\n",
        "Each range is first batch, last batch, draft tokens; add the keys of the draft. vLLM has tried it with EAGLE "
        "heads, not with every method, and ignores it with data parallelism. Older versions cannot be told about load.",
    )


def _bare(method: str, version: str, num_draft_tokens: int) -> Spec | None:
    """A spec of the method for the LLM API with nothing else in it; None: the LLM API does not have the method."""
    known: dict[str, dict[str, Any]] = {
        "draft_target": {"draft": {"model": "draft"}},
        "early_exit": {"early_exit": {"layer": 1}},
        "ngram": {},
        "mtp": {},
        "eagle": {"eagle": {"heads": "heads", "version": 3, "num_layers": max(num_draft_tokens, 1)}},
    }
    if method not in known:
        return None
    length = {} if method == "eagle" else {"num_draft_tokens": max(num_draft_tokens, 1)}
    return Spec.model_validate(
        {
            "version": 1,
            "target": {"model": "target"},
            "speculation": {"method": method, **length, **known[method]},
            "engine": {"track": "llmapi", "version": version},
        }
    )


def _is_refused(spec: Spec) -> bool:
    """Whether the LLM API of the spec's version cannot be told this schedule."""
    return any(refusal.key[:2] == ("serving", "draft_length") for refusal in llmapi.refusals(spec))


def _scheduled(spec: Spec, schedule: Schedule) -> Spec:
    given = spec.serving.draft_length or DraftLengthSection()
    section = given.model_copy(update={"policy": "schedule", "schedule": dict(schedule)})
    return _updated(spec, "serving", draft_length=section)


def _updated(spec: Spec, section: str, **values: object) -> Spec:
    return spec.model_copy(update={section: getattr(spec, section).model_copy(update=values)})
