"""The schedule in the words of the systems that serve."""

from __future__ import annotations

import json

import pytest
import yaml
from plan_doubles import plan, point

from trtspec.decoding.draft_length import DraftLength
from trtspec.plan.result import MethodPlan, Plan
from trtspec.plan.schedule import Rendering, compact, renderings, with_schedule
from trtspec.spec.schema import Spec

STEPS = {1: 4, 2: 4, 4: 4, 8: 2, 16: 0}


def rendered(made: Plan) -> dict[str, Rendering]:
    """By the first word that tells the systems apart."""
    names = ("bls", "1.2.1", "1.4.0rc4", "vllm")
    return dict(zip(names, renderings(made), strict=True))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (STEPS, {4: 4, 8: 2}),
        ({1: 4, 2: 0, 4: 4}, {1: 4, 2: 0, 4: 4}),
        ({8: 2, 4: 4}, {4: 4, 8: 2}),
        ({1: 0, 8: 0}, {8: 0}),
        ({16: 3}, {16: 3}),
    ],
)
def test_equal_neighbours_are_one_entry(schedule: dict[int, int], expected: dict[int, int]) -> None:
    assert list(compact(schedule).items()) == list(expected.items())
    before, after = (DraftLength("schedule", 4, dict(sorted(each.items()))) for each in (schedule, compact(schedule)))
    for load in range(1, 40):
        chosen = [policy.choose(load, policy.running(), 4) for policy in (before, after)]
        assert chosen[0] == chosen[1], load


def test_the_bls_model_reads_what_is_shown() -> None:
    bls = rendered(plan(schedule=STEPS))["bls"]
    assert yaml.safe_load(bls.text) == {"serving": {"draft_length": {"policy": "schedule", "schedule": {4: 4, 8: 2}}}}
    parameters = {"draft_length_policy": "schedule", "draft_length_schedule": bls.note.rsplit(" ")[-1].rstrip(".")}
    assert DraftLength.parse(parameters, 4).schedule == {4: 4, 8: 2}


@pytest.mark.parametrize("method", ["medusa", "mtp", "eagle"])
def test_engines_that_draft_inside_know_no_schedule(method: str) -> None:
    bls = rendered(plan(method, schedule=STEPS))["bls"]
    assert bls.text == "" and "always the same number" in bls.note


@pytest.mark.parametrize(
    ("method", "old", "new"),
    [
        ("draft_target", "DraftTarget", "Draft_Target"),
        ("early_exit", "DraftTarget", "Draft_Target"),
        ("ngram", "NGram", "NGram"),
        ("eagle", "Eagle", "Eagle3"),
    ],
)
def test_the_llm_api_is_told_by_steps_or_by_one_load(method: str, old: str, new: str) -> None:
    """1.2 drafts all or none: up to the load where 4 tokens still pay, 16, although others would be better there."""
    shown = rendered(plan(method, schedule=STEPS | {16: 1}))
    assert yaml.safe_load(shown["1.2.1"].text)["speculative_config"] == {
        "decoding_type": old,
        "max_draft_len": 4,
        "max_concurrency": 16,
    }
    assert yaml.safe_load(shown["1.4.0rc4"].text)["speculative_config"] == {
        "decoding_type": new,
        "max_draft_len": 4,
        "draft_len_schedule": {4: 4, 8: 2, 16: 1},
    }


def test_the_only_load_of_an_old_llm_api_is_where_all_tokens_pay() -> None:
    losing = MethodPlan("draft_target", "", points=tuple(point(b, 4, 0.75, speed_up=3.9 - b / 2) for b in (1, 4, 8)))
    shown = rendered(plan(schedule=STEPS, methods=(losing,)))
    assert yaml.safe_load(shown["1.2.1"].text)["speculative_config"]["max_concurrency"] == 4


def test_the_llm_api_begins_with_all_tokens() -> None:
    shown = rendered(plan(schedule={1: 2, 4: 4, 8: 1}))
    assert yaml.safe_load(shown["1.4.0rc4"].text)["speculative_config"] == {
        "decoding_type": "Draft_Target",
        "max_draft_len": 2,
        "draft_len_schedule": {4: 2, 8: 1},
    }


def test_vllm_gets_ranges_that_end_without_drafts() -> None:
    """Its last length goes on for every larger batch, and the plan's does not."""
    vllm = rendered(plan(schedule=STEPS))["vllm"]
    config = json.loads(vllm.text.split("'")[1])
    assert config == {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 8, 2], [9, 1024, 0]],
    }


@pytest.mark.parametrize("method", ["tree", "cascade"])
def test_what_a_system_does_not_have_is_said(method: str) -> None:
    shown = rendered(plan(method, schedule=STEPS))
    assert shown["bls"].text
    for name in ("1.2.1", "1.4.0rc4", "vllm"):
        assert shown[name].text == "" and f"no method {method}" in shown[name].note


def test_a_schedule_without_drafts_leaves_speculation_out() -> None:
    shown = rendered(plan(schedule={1: 0, 8: 0}))
    for name in ("1.2.1", "1.4.0rc4", "vllm"):
        assert shown[name].text == "" and "out" in shown[name].note
    assert renderings(plan(schedule={})) == []


def test_a_tree_is_drafted_whole_or_not_at_all() -> None:
    tree = Spec.model_validate(
        {
            "version": 1,
            "target": {"model": "t"},
            "speculation": {"method": "tree", "draft": {"model": "d"}, "tree": {"branching": [2, 2]}},
        }
    )
    made = with_schedule(tree, plan("tree").own, {4: 6, 8: 3, 16: 0})
    assert made is not None and made.serving.draft_length is not None
    assert made.serving.draft_length.schedule == {8: 6}
    assert made.speculation.num_draft_tokens == 6
