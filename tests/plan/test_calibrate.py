"""Measured step times: what lies between the points, whose curves they are, how they are measured, and the command."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from trtspec.build.machine import hardware
from trtspec.build.sources import Sources
from trtspec.cli import main
from trtspec.decoding.engine_call import EngineRequest
from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.models.source import open_model
from trtspec.plan import calibrate as measuring
from trtspec.plan import pairs
from trtspec.plan.calibrate import Grid, Pass, deviations, grid, measure, scaled
from trtspec.plan.curves import Curves, Measured, ModelCurve, Overhead, catalogue_name, shipped, sizes_of
from trtspec.plan.roofline import Roofline
from trtspec.plan.shapes import shape_names, shape_of
from trtspec.plan.step_times import HEADS
from trtspec.runtime.llama import FAMILIES, Llama
from trtspec.runtime.torch_runtime import TorchRuntime
from trtspec.spec.gpus import find_gpu
from trtspec.spec.load import load_spec
from trtspec.spec.schema import ModelRef, Spec

CPU = hardware()["cpu"]
TIMES = {  # (batch, tokens, context): seconds
    (1, 1, 100): 1.0, (1, 3, 100): 2.0, (1, 1, 300): 1.4, (1, 3, 300): 3.0,
    (4, 1, 100): 4.0, (4, 3, 100): 6.0, (4, 1, 300): 6.0, (4, 3, 300): 9.0,
    (1, 10, 0): 2.0, (1, 30, 0): 4.0,
}  # fmt: skip


def model_curve(config: ModelConfig, times: dict[tuple[int, int, int], float] = TIMES) -> ModelCurve:
    points = tuple(Measured(*point, seconds, 0.0, 3) for point, seconds in times.items())
    return ModelCurve("a model", sizes_of(config), "float32", config.num_hidden_layers, points)


def curves_of(*roles: str, config: ModelConfig | None = None, **changes: Any) -> Curves:
    """Curves of this CPU with one thread, of the same times for each role."""
    curve = model_curve(config or shape_of("SmolLM2-135M"))
    made = Curves("cpu", CPU, None, 1, {"torch": "2"}, "2030-01-02T03:04:05Z", "by hand", dict.fromkeys(roles, curve))
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("at", "seconds"),
    [
        ((1, 1, 100), 1.0),
        ((1, 2, 100), 1.5),  # half way between 1 and 3 tokens
        ((1, 3, 200), 2.5),  # half way between the contexts
        ((2, 3, 100), 2.0 + 4.0 / 3),  # a third of the way from batch 1 to 4
        ((2, 2, 200), 1.85 + (6.25 - 1.85) / 3),  # all of them
        ((1, 20, 0), 3.0),  # a prefill
        ((2, 10, 0), 3.0),  # of two sequences: as one of 20 tokens, which is shorter than 2 x 2.0
        ((2, 30, 0), 8.0),  # longer than what was measured together: one after the other
    ],
)
def test_between_points_times_are_linear(at: tuple[int, int, int], seconds: float) -> None:
    curves = curves_of("target")
    assert curves.seconds("target", *at) == pytest.approx(seconds)
    assert curves.notes == ()


@pytest.mark.parametrize(
    ("at", "seconds", "note"),
    [
        ((1, 5, 100), 3.0, "target: tokens 5 is outside of what was measured (1 to 3); the nearest slope goes on"),
        ((1, 1, 500), 1.8, "target: context 500 is outside of what was measured (100 to 300)"),
        ((6, 1, 100), 6.0, "target: batch 6 is outside of what was measured (1 to 4)"),
        ((1, 1, 50), 0.9, "target: context 50 is"),
        ((1, 50, 0), 6.0, "target: prompt 50 is outside of what was measured (10 to 30)"),
        ((1, 1, 0), 1.1, "target: prompt 1 is"),
    ],
)
def test_outside_the_nearest_slope_goes_on_with_a_note(at: tuple[int, int, int], seconds: float, note: str) -> None:
    curves = curves_of("target")
    assert curves.seconds("target", *at) == pytest.approx(seconds)
    (said,) = curves.notes
    assert said.startswith(note)


def test_outside_times_never_fall_with_more_work_nor_below_what_is_in_proportion() -> None:
    times = {(1, 1, 100): 2.0, (1, 3, 100): 1.0, (1, 10, 0): 1.0, (1, 20, 0): 5.0}
    curves = replace(curves_of(), models={"target": model_curve(shape_of("SmolLM2-135M"), times)})
    assert curves.seconds("target", 1, 9, 100) == 1.0
    assert curves.seconds("target", 1, 5, 0) == 0.5  # the slope alone would give -1
    assert curves.seconds("target", 8, 1, 900) == 2.0  # one batch and one context: nothing is known of others
    assert len(curves.notes) == 4


def test_a_note_names_the_farthest_that_was_asked_for() -> None:
    curves = curves_of("target", remarks=("a remark",))
    for batch in (5, 9, 7):
        curves.seconds("target", batch, 1, 100)
    assert [note.split(";")[0] for note in curves.notes] == [
        "a remark", "target: batch 9 is outside of what was measured (1 to 4)",
    ]  # fmt: skip


def test_overheads_and_models_that_are_not_measured() -> None:
    assert curves_of("target").overhead(3) == 0.0
    measured = curves_of("target", overheads=(Overhead(1, 0.1, 0.0, 2), Overhead(3, 0.3, 0.0, 2)))
    assert (measured.overhead(2), measured.overhead(5)) == (pytest.approx(0.2), pytest.approx(0.5))
    with pytest.raises(TrtspecError, match="have no draft"):
        measured.seconds("draft", 1, 1, 100)
    only_steps = replace(curves_of(), models={HEADS: model_curve(shape_of("SmolLM2-135M"), {(1, 1, 100): 1.0})})
    with pytest.raises(TrtspecError, match="have no prefill of the heads"):
        only_steps.seconds(HEADS, 1, 8, 0)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    curves = curves_of(
        "target", "draft", overheads=(Overhead(1, 0.1, 0.01, 2),), roofline={"target": 1.5}, remarks=("one",)
    )
    curves.seconds("target", 99, 1, 100)  # what was asked for is no part of it
    path = tmp_path / "new" / "curves.json"
    curves.write(path)
    assert Curves.read(path) == curves
    assert Curves.read(path).notes == ("one",)
    assert [each.name for each in path.parent.iterdir()] == ["curves.json"]
    with pytest.raises(TrtspecError, match="cannot be written"):
        curves.write(path / "inside a file.json")


def broken(change: Callable[[dict[str, Any]], object]) -> str:
    content = json.loads(curves_of("target", overheads=(Overhead(1, 0.1, 0.01, 2),)).written())
    change(content)
    return json.dumps(content)


def point(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["models"]["target"]["points"][0]
    return found


def two_prefills_of_one_length(content: dict[str, Any]) -> None:
    first = {**point(content), "tokens": 8, "context": 0}
    content["models"]["target"]["points"] += [{**first, "batch": 97}, {**first, "batch": 98}]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no step times"),
        ("[1]", "holds no step times"),
        (broken(lambda content: content.update(version=2)), "version 2 of the format; expected 1"),
        (broken(lambda content: content.pop("threads")), "threads"),
        (broken(lambda content: content.update(more=1)), "more"),
        (broken(lambda content: point(content).update(seconds=-1.0)), "no point"),
        (broken(lambda content: point(content).update(seconds=0)), "0 seconds"),
        (broken(lambda content: point(content).update(seconds=float("nan"))), "no point"),
        (broken(lambda content: point(content).update(batch="1")), "no point"),
        (broken(lambda content: point(content).pop("tokens")), "holds no step times"),
        (broken(lambda content: content["models"]["target"].update(points=[])), "without a step"),
        (broken(lambda content: content["models"]["target"]["points"].append(point(content))), "measured twice"),
        (broken(two_prefills_of_one_length), "8 tokens, context 0 is measured twice"),
        (broken(lambda content: content["overheads"][0].pop("batch")), "batch"),
        (None, "No such file"),
    ],
)
def test_broken_files_are_refused_in_one_line(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "curves.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TrtspecError) as caught:
        Curves.read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    assert reason in message and "trtspec plan calibrate" in message


@pytest.fixture
def spec_of(tiny_model_dir: Path, tiny_draft_dir: Path, tmp_path: Path) -> Callable[..., Spec]:
    """A spec of the tiny pair with one thread; keywords are sections."""

    def make(method: str = "draft_target", **sections: Any) -> Spec:
        draft = {"model": str(tiny_draft_dir), "dtype": "float32"}
        content = {
            "version": 1,
            "target": {"model": str(tiny_model_dir), "dtype": "float32"} | sections.pop("target", {}),
            "speculation": {"method": method, "num_draft_tokens": 3, "draft": draft} | sections.pop("speculation", {}),
            "hardware": {"gpu": "cpu"},
            "engine": {"max_batch_size": 2, "max_seq_len": 256, "max_input_len": 64},
            "serving": {"num_threads": 1},
        }
        if method == "tree":
            del content["speculation"]["num_draft_tokens"]
        path = tmp_path / "tiny.yaml"
        path.write_text(json.dumps(content | sections))
        return load_spec(path)

    return make


def test_curves_of_the_same_models_on_the_same_device_are_taken(
    spec_of: Callable[..., Spec], tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = open_model(str(tiny_model_dir)).config
    models = {"target": config, "draft": config}
    curves = curves_of("target", "draft", config=config)
    curves.check(spec_of(), models)
    curves.check(spec_of("ngram"), {"target": config})
    assert curves.source == f"measured on {CPU}, 1 thread, 2030-01-02"

    replace(curves, name="another CPU").write(tmp_path / "shipped" / "a.json")
    assert shipped(spec_of(), models, tmp_path / "shipped") is None
    curves.write(tmp_path / "shipped" / "b.json")
    assert shipped(spec_of(), models, tmp_path / "shipped") == curves
    assert shipped(spec_of(), models) is None  # none comes with trtspec yet


@pytest.mark.parametrize(
    ("curves", "sections", "message"),
    [
        ({"name": "other"}, {}, f"were measured on other; expected some on this machine's {CPU}"),
        ({"device": "cuda", "name": "a GPU"}, {}, "were measured on a GPU; expected some on the CPU"),
        ({"threads": 7}, {}, "with 7 CPU threads; expected some with 1 (serving.num_threads"),
        ({}, {"hardware": {"gpu": "H200"}}, f"were measured on {CPU}; expected some on hardware.gpu H200"),
        ({"gpu": "H200"}, {"hardware": {"gpu": "H100-SXM"}}, "were measured on H200; expected some on"),
        ({"models": {}}, {}, "have no target; expected some of target, draft"),
        ({}, {"target": {"dtype": "bfloat16"}}, "a target with dtype float32; expected some with bfloat16"),
    ],
)
def test_curves_of_others_are_refused(
    spec_of: Callable[..., Spec], tiny_model_dir: Path, curves: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    config = open_model(str(tiny_model_dir)).config
    found = curves_of("target", "draft", config=config, **curves)
    with pytest.raises(TrtspecError) as caught:
        found.check(spec_of(**sections), {"target": config, "draft": config})
    assert message in str(caught.value) and str(caught.value).endswith("measure again with `trtspec plan calibrate`")


def test_curves_of_another_model_split_or_without_heads_are_refused(
    spec_of: Callable[..., Spec], tiny_model_dir: Path
) -> None:
    config = open_model(str(tiny_model_dir)).config
    spec, curves = spec_of(), curves_of("target", "draft", config=config)
    with pytest.raises(
        TrtspecError, match=r"another draft, a model \(num_hidden_layers 2\); expected some of one with 3"
    ):
        curves.check(spec, {"target": config, "draft": replace(config, num_hidden_layers=3)})
    for change, message in (
        ({"quantization": "fp8"}, "quantization none; expected some with fp8"),
        ({"tensor_parallel": 2}, "on one GPU; expected some on 2"),
    ):
        changed = spec.model_copy(update={"target": spec.target.model_copy(update=change)})
        with pytest.raises(TrtspecError, match=message):
            curves.check(changed, {"target": config})
    mtp = spec.model_copy(update={"speculation": spec.speculation.model_copy(update={"method": "mtp"})})
    with pytest.raises(TrtspecError, match="nothing that drafts in the target, as method mtp"):
        curves.check(mtp, {"target": config})


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("Tesla T4", None),
    ],
)
def test_names_of_gpus(name: str, gpu: str | None) -> None:
    assert catalogue_name(name) == gpu


class Machine:
    """A clock that passes move on, and what ran."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ran: list[tuple[str, int, int, int]] = []

    def clock(self) -> float:
        return self.now

    def model(self, role: str, cost: Callable[[int, int, int], float], first: float = 1.0) -> measuring.Passes:
        """Its passes take `cost`; the first of each width `first` times as long."""
        seen: set[tuple[int, int]] = set()

        def make(batch: int, tokens: int, context: int) -> Pass:
            def run() -> None:
                self.ran.append((role, batch, tokens, context))
                self.now += cost(batch, tokens, context) * (1.0 if (batch, tokens) in seen else first)
                seen.add((batch, tokens))

            return run

        return make


SMALL = Grid(batches=(1, 2), tokens=(1, 3), contexts=(10, 90), prompts=(8,))


@pytest.mark.parametrize("rounds", [1, 25])
def test_measured_is_what_passes_take_without_their_first_one(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    monkeypatch.setattr(measuring, "_ROUNDS", rounds)
    machine = Machine()
    costs = {
        "target": lambda batch, tokens, context: batch * tokens + context / 1000,
        "draft": lambda batch, tokens, context: 0.5 * batch,
    }
    points = measure(
        {role: machine.model(role, cost, first=50.0) for role, cost in costs.items()},
        SMALL, seconds=1e6, in_a_row={"draft": 4}, clock=machine.clock,
    )  # fmt: skip
    for role, cost in costs.items():
        assert {(each.batch, each.tokens, each.context) for each in points[role]} == {
            (batch, tokens, context) for batch in (1, 2) for tokens in (1, 3) for context in (10, 90)
        } | {(1, 8, 0)}
        for each in points[role]:
            assert each.seconds == pytest.approx(cost(each.batch, each.tokens, each.context))
            assert each.spread == pytest.approx(0.0, abs=1e-9)
            assert each.repeats == (rounds if each.context else -(-rounds // 4))


def test_models_take_turns_and_drafts_run_in_a_row() -> None:
    machine = Machine()
    models = {role: machine.model(role, lambda *_: 1.0) for role in ("target", "draft")}
    measure(models, SMALL, seconds=1e6, in_a_row={"draft": 3}, clock=machine.clock)
    later = machine.ran[machine.ran.index(("target", 1, 1, 10), 5) :]  # after the round that warms up
    step, verification = ("target", 1, 1, 10), ("target", 1, 3, 10)
    assert later[:6] == [step, *[("draft", 1, 1, 10)] * 3, verification, ("draft", 1, 3, 10)]


def test_a_median_forgets_what_else_the_machine_did() -> None:
    machine = Machine()
    calls = iter(range(10_000))
    models = {"target": machine.model("target", lambda *_: 30.0 if next(calls) % 5 == 4 else 1.0)}
    points = measure(models, replace(SMALL, batches=(1,)), seconds=1e6, clock=machine.clock)["target"]
    steps = [each for each in points if each.context]
    assert {each.seconds for each in steps} == {1.0} and all(each.repeats == 25 for each in steps)


def test_without_more_time_whole_slices_are_kept() -> None:
    """The first pass of each width is not timed; the last slice is begun but not finished, its pass is."""
    machine = Machine()
    models = {"target": machine.model("target", lambda *_: 1.0)}
    points = measure(models, SMALL, seconds=12.5, clock=machine.clock)["target"]
    assert machine.now == pytest.approx(113.0)
    assert {(each.batch, each.context) for each in points} == {(1, 10), (1, 0), (1, 90), (2, 10)}
    assert {each.repeats for each in points} == {1}


def test_few_repeats_and_a_busy_machine_are_said(spec_of: Callable[..., Spec], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("none")
    pair, places = pairs.pair_of_spec(spec, Sources(spec), "cpu"), Grid((1,), (1,), (16,), (8,))
    for rounds, times, remark in (
        (1, 1.0, "some points were measured fewer than 3 times"),
        (8, 0.3, "lie 150 % apart"),
    ):
        clock = iter(np.cumsum([times, 1.0] * 10_000))
        monkeypatch.setattr(measuring, "_ROUNDS", rounds)
        points = {
            "target": (Measured(1, 1, 16, times, 1.5 * times * (rounds > 1), rounds), Measured(1, 8, 0, 1.0, 0.0, 1))
        }
        monkeypatch.setattr(measuring, "measure", lambda *_, points=points, **__: points)
        (said,) = measuring.calibrate(pair, places, 60.0, clock=lambda clock=clock: float(next(clock))).remarks
        assert remark in said


def test_too_little_time_is_an_error() -> None:
    machine = Machine()
    with pytest.raises(TrtspecError, match="--seconds: 2 s were not enough to measure the target once; give more"):
        measure({"target": machine.model("target", lambda *_: 1.0)}, SMALL, seconds=2.0, clock=machine.clock)


def test_what_is_not_measured_of_a_model_is_left_out() -> None:
    machine = Machine()
    heads = machine.model(HEADS, lambda *_: 1.0)
    models = {HEADS: lambda batch, tokens, context: heads(batch, tokens, context) if tokens == 1 and context else None}
    points = measure(models, SMALL, seconds=1e6, clock=machine.clock)[HEADS]
    assert {(each.batch, each.tokens, each.context) for each in points} == {
        (batch, 1, context) for batch in (1, 2) for context in (10, 90)
    }


def test_layers_that_were_not_made_take_what_the_last_ones_took() -> None:
    """4 layers take 1.0 + 4 x 0.25, 2 layers 1.0 + 2 x 0.25, so 10 take 3.5."""
    few = [Measured(1, 1, 10, 2.0, 0.1, 5), Measured(2, 1, 10, 1.0, 0.1, 5)]
    fewer = [Measured(1, 1, 10, 1.5, 0.1, 5), Measured(2, 1, 10, 1.1, 0.1, 5)]
    whole, noisy = scaled((4, few), (2, fewer), 10)
    assert whole.seconds == pytest.approx(3.5) and whole.spread == pytest.approx(0.1 + 3 * 0.2)
    assert noisy.seconds == 1.0  # layers never take less than nothing


@pytest.mark.parametrize(
    ("arguments", "batches", "tokens", "contexts", "prompts"),
    [
        ((4, 9, 2048, 1536, "cpu"), (1, 2, 4), (1, 2, 3, 5, 9), (128, 2039), (32, 128, 512)),
        ((6, 6, 4096, 4096, "cuda"), (1, 2, 4, 6), (1, 2, 3, 5, 6), (128, 2048), (128, 512, 2048)),
        ((1, 1, 64, 20, "cpu"), (1,), (1,), (63,), (20,)),
        ((2, 2, 100, 64, "cpu"), (1, 2), (1, 2), (98,), (32, 64)),
    ],
)
def test_grids(
    arguments: tuple[int, int, int, int, str],
    batches: tuple[int, ...],
    tokens: tuple[int, ...],
    contexts: tuple[int, ...],
    prompts: tuple[int, ...],
) -> None:
    assert grid(*arguments) == Grid(batches, tokens, contexts, prompts)


def test_passes_that_overlap_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's pass of 2 s begins 1 s before the end of the target's of 3 s: 4 s together, then 1 s more."""
    machine = Machine()
    watch = measuring._Watch(machine.clock)
    target, draft = watch.around("target"), watch.around("draft")

    def run_pass(model: Any, steps: list[Any]) -> list[Any]:
        machine.now += model
        if steps == ["first", "second"]:
            draft(2.0, ["one"])
        return steps

    monkeypatch.setattr("trtspec.runtime.passes.run_pass", run_pass)
    target, draft = watch.around("target"), watch.around("draft")
    assert target(2.0, ["first", "second"]) == ["first", "second"]
    assert (watch.seconds, watch.num_verified) == (pytest.approx(4.0), 2)
    draft(1.0, ["one"])
    assert (watch.seconds, watch.num_verified) == (pytest.approx(5.0), 2)


def test_how_far_off_other_step_times_are() -> None:
    config = shape_of("SmolLM2-135M")
    ref = ModelRef(model="any", dtype="bfloat16")
    roofline = Roofline({"target": (config, ref)}, find_gpu("H200"))
    times = {at: 1.25 * roofline.seconds("target", *at) for at in TIMES}
    curves = replace(curves_of(), models={"target": model_curve(config, times)})
    assert deviations(curves, roofline, "target") == pytest.approx([1.25] * len(TIMES))


@pytest.fixture
def two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much time there is, so that a busy machine makes no difference."""
    monkeypatch.setattr(measuring, "_ROUNDS", 2)


@pytest.mark.usefixtures("two_rounds")
@pytest.mark.parametrize(
    ("method", "speculation"),
    [
        ("none", {}),
        ("draft_target", {}),
        ("ngram", {}),
        ("early_exit", {"early_exit": {"layer": 1}}),
        ("tree", {"tree": {"branching": [2, 1]}}),
        ("cascade", {}),
    ],
)
def test_every_method_is_measured(
    spec_of: Callable[..., Spec], tiny_draft_dir: Path, method: str, speculation: dict[str, Any]
) -> None:
    if method == "cascade":
        middle = {"model": str(tiny_draft_dir), "dtype": "float32"}
        speculation = {"cascade": {"middle": middle, "num_draft_tokens": 2}}
    spec = spec_of(method, speculation=speculation)
    pair = pairs.pair_of_spec(spec, Sources(spec), "cpu")
    whole = {"target", "middle", "draft" if method == "tree" else ""} & spec.models.keys()
    assert {role for role, each in pair.models.items() if each.scores_all} == whole
    if method == "early_exit":  # the target's own weights, not a copy
        target, draft = (pair.models[role].model.weights for role in ("target", "draft"))
        assert draft["lm_head.weight"].data_ptr() == target["lm_head.weight"].data_ptr()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        curves = measuring.calibrate(pair, grid(2, 4, 256, 64, "cpu"), seconds=60.0)
    finally:
        torch.set_num_threads(threads)
    assert set(curves.models) == set(spec.models)
    curves.check(spec, {role: each.config for role, each in pair.models.items()})
    batches = [] if method == "none" else [1, 2]
    assert [each.batch for each in curves.overheads] == batches
    assert all(each.seconds > 0.0 for each in curves.overheads if each.batch == 1)
    assert curves.seconds("target", 2, 4, 128) > 0.0


@pytest.mark.usefixtures("two_rounds")
def test_heads_are_measured_apart(spec_of: Callable[..., Spec], tmp_path: Path) -> None:
    (tmp_path / "heads").mkdir()
    shapes = {"weight": (32, 32), "bias": (32,)}
    layer = {f"{head}.0.linear.{kind}": torch.zeros(shape) for head in range(2) for kind, shape in shapes.items()}
    save_file(layer, tmp_path / "heads" / "medusa_lm_head.safetensors")
    medusa = {"heads": "./heads", "num_heads": 2, "choices": [[0], [1], [0, 0]]}
    spec = spec_of("medusa", speculation={"medusa": medusa, "num_draft_tokens": 3})
    pair = pairs.pair_of_spec(spec, Sources(spec), "cpu")
    curves = measuring.calibrate(pair, grid(2, 4, 256, 64, "cpu"), seconds=60.0)
    assert set(curves.models) == {"target", HEADS}
    assert {(each.batch, each.tokens) for each in curves.models[HEADS].points} == {(1, 1), (2, 1)}
    curves.check(spec.model_copy(update={"serving": spec.serving.model_copy(update={"num_threads": curves.threads})}),
                 {"target": pair.models["target"].config})  # fmt: skip
    assert [each.batch for each in curves.overheads] == [1, 2]
    assert not any("outside of what was measured" in note for note in curves.notes)


def test_of_an_engine_that_drafts_by_itself_heads_and_logits_are_no_overhead(
    spec_of: Callable[..., Spec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10 s outside of the passes, 3 modules of 1 s and logits of 2 s leave 5 s."""
    spec = spec_of("none")
    pair = replace(
        pairs.pair_of_spec(spec, Sources(spec), "cpu"), method="mtp", num_draft_tokens=3, heads={"method": "none"}
    )
    monkeypatch.setattr(measuring, "_between", lambda *_: 10.0)
    monkeypatch.setattr(measuring, "_head_seconds", lambda *_: 2.0)
    curves = replace(curves_of(), models={HEADS: model_curve(shape_of("SmolLM2-135M"), {(1, 1, 100): 1.0})})
    (overhead,) = measuring._overheads(pair, curves, [1], 60.0, Machine().clock)
    assert overhead.seconds == pytest.approx(5.0)


@pytest.mark.usefixtures("two_rounds")
def test_modules_are_measured_apart(
    spec_of: Callable[..., Spec], save_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = save_model(tmp_path / "mtp", num_nextn_predict_layers=1)
    tensors = load_file(path / "model.safetensors")
    module = {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.1." in name
    }
    norms = {f"model.layers.2.{name}.weight": torch.ones(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    joint = {"model.layers.2.eh_proj.weight": torch.randn(32, 64) / 8}
    save_file(tensors | module | norms | joint, path / "model.safetensors")
    speculation = {"mtp": {"num_modules": 1}, "num_draft_tokens": 1}
    spec = spec_of("mtp", target={"model": str(path)}, speculation=speculation)
    pair = pairs.pair_of_spec(spec, Sources(spec), "cpu")
    curves = measuring.calibrate(pair, grid(1, 2, 256, 64, "cpu"), seconds=60.0)
    assert set(curves.models) == {"target", HEADS}
    assert curves.seconds(HEADS, 1, 1, 128) > 0.0 and len(curves.overheads) == 1


def test_a_model_in_memory_answers_as_its_engine_does(spec_of: Callable[..., Spec], tiny_model_dir: Path) -> None:
    spec = spec_of()
    pair = pairs.pair_of_spec(spec, Sources(spec), "cpu")
    model = pair.models["target"].model
    runtime = TorchRuntime.of_model(measuring._engine("target", pair, model), model, kv_cache_bytes=1 << 22)
    prompt = np.arange(3, 12, dtype=np.int32)
    answer = runtime.execute(EngineRequest(prompt, 6)).output_ids.tolist()
    ids = prompt.tolist()
    for token in answer:
        logits = model.forward(torch.tensor([ids]), model.new_cache(1, 32), 0, num_logits=1)
        assert token == int(logits.argmax())
        ids.append(token)


def test_graphs_of_a_gpu_are_passes_over_rows(monkeypatch: pytest.MonkeyPatch, spec_of: Callable[..., Spec]) -> None:
    """On a CPU, with a recorder that runs again what it was given: the ids are those of a plain forward pass."""
    recorded: list[torch.Tensor] = []

    def recorder(device: torch.device) -> Callable[..., Any]:
        def record(step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
            recorded.append(step())
            return recorded[-1], lambda: recorded.append(step())

        return record

    monkeypatch.setattr("trtspec.runtime.cuda_graphs.CudaRecorder", recorder)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    spec = spec_of()
    model = pairs.pair_of_spec(spec, Sources(spec), "cpu").models["target"].model
    cache = model.new_cache(3, 40)
    seen = torch.randint(model.config.vocab_size, (3, 16))
    model.forward(seen, cache, 0)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: seen[:, :4])
    run = measuring._graphs_of(model, cache, scores_all=True)(3, 4, 16)
    assert run is not None
    run()
    expected = model.forward(seen[:, :4], cache, 16)
    assert len(recorded) == 2 and recorded[1].tolist() == expected.argmax(-1).tolist()
    prefill = measuring._graphs_of(model, cache, scores_all=True)(1, 4, 0)
    assert prefill is not None and prefill() is None
    assert len(recorded) == 2  # not recorded


@pytest.mark.usefixtures("two_rounds")
@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_of_every_family_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = family in ("mixtral", "qwen2_moe", "qwen3_moe")
    small = replace(
        shape_of("SmolLM2-135M"), model_type=family, vocab_size=64, hidden_size=16, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_size=4, intermediate_size=24, max_position_embeddings=256,
        attn_bias=family == "qwen2", qk_layernorm=family.startswith("qwen3"), tie_word_embeddings=family == "qwen2",
        num_experts=4 * experts, num_experts_per_token=2 * experts, moe_intermediate_size=12 * experts,
        shared_expert_intermediate_size=20 * (family == "qwen2_moe"),
    )  # fmt: skip
    monkeypatch.setattr(pairs, "shape_of", lambda name: small)
    pair = pairs.pair_of_shapes("big", "small", "float32", "cpu", layers=2)
    target = pair.models["target"]
    assert target.model.config.num_hidden_layers == 2 and target.fewer is not None
    assert target.fewer.config.num_hidden_layers == 1
    assert isinstance(target.model, Llama)
    logits = target.model.forward(torch.tensor([[1, 2, 3]]), target.model.new_cache(1, 4), 0)
    assert logits.shape == (1, 3, 64) and bool(logits.isfinite().all())
    curves = measuring.calibrate(pair, Grid((1,), (1, 2), (16,), (8,)), seconds=60.0)
    assert curves.models["target"].shape == sizes_of(small) and curves.models["target"].layers_measured == 2


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", "calibrate", *map(str, arguments)])


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_rounds: None) -> Path:
    """The working directory, and the threads of PyTorch are put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    return tmp_path


def test_the_command_measures_a_spec(in_tmp: Path, spec_of: Callable[..., Spec], tiny_model_dir: Path) -> None:
    spec = spec_of()
    result = run(spec.source, "--seconds", 90)
    assert result.exit_code == 0, result.output
    path = in_tmp / ".cache/plan/tiny.calibration.json"
    curves = Curves.read(path)
    config = open_model(str(tiny_model_dir)).config
    replace(curves, threads=1).check(spec, {"target": config, "draft": config})
    assert curves.device == "cpu" and curves.versions["torch"] == torch.__version__
    assert "a CPU has no roofline to compare with" in result.stdout
    assert "target   batch 1   tokens after 128" in result.stdout
    assert f"written to {path.relative_to(in_tmp)}" in result.stdout
    assert {each.tokens for each in curves.models["target"].points if each.context} == {1, 2, 3, 5, 9}
    assert curves.overhead(1) > 0.0


def test_the_command_measures_named_shapes_by_few_layers(in_tmp: Path) -> None:
    result = run(
        "--shape", "SmolLM2-135M", "--dtype", "float32", "--layers", 2, "--max-batch-size", 1, "--max-draft-len", 1,
        "--device", "cpu", "--seconds", 200, "--out", "shapes.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    curve = Curves.read(in_tmp / "shapes.json").models["target"]
    assert (curve.layers_measured, curve.shape["num_hidden_layers"]) == (2, 30)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give CONFIG or --shape, one of them"),
        (["SPEC", "--shape", "Llama-3.1-8B"], 2, "give CONFIG or --shape, one of them"),
        (["SPEC", "--layers", 4], 2, "--draft-shape and --layers go with --shape"),
        (["--shape", "Llama-9"], 1, "no shape 'Llama-9'; expected one of"),
        (["--shape", "Llama-3.1-8B", "--device", "cuda"], 1, "--device cuda: PyTorch finds no GPU on this machine"),
        (["SPEC", "--set", "hardware.gpu=H200"], 1, "hardware.gpu: PyTorch finds no GPU"),
        (["none.yaml"], 1, "none.yaml"),
        (["SPEC", "--seconds", 0], 2, "--seconds"),
        (["SPEC", "--seconds", "nan"], 2, "--seconds: nan is no time"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    in_tmp: Path,
    spec_of: Callable[..., Spec],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[object],
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = spec_of()
    result = run(*(spec.source if each == "SPEC" else each for each in arguments))
    assert result.exit_code == code and message in result.stderr, result.output
    assert not (in_tmp / ".cache").exists()


def test_a_gpu_that_is_not_the_specs_is_refused(
    in_tmp: Path, spec_of: Callable[..., Spec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 PCIe")
    result = run(spec_of().source, "--set", "hardware.gpu=H200")
    assert result.exit_code == 1
    assert "hardware.gpu: this machine has NVIDIA H100 PCIe; expected H200" in result.stderr


def test_the_script_for_gpu_hosts_asks_for_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "benchmarks" / "calibrate_gpu.sh").read_text()
    (command,) = re.findall(r"^trtspec plan calibrate (.*)", text.replace("\\\n", " "), re.MULTILINE)
    words = shlex.split(command)
    assert {words[words.index(option) + 1] for option in ("--shape", "--draft-shape")} <= set(shape_names())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(*words)
    assert result.exit_code == 1 and "finds no GPU" in result.stderr


def test_a_quantised_model_is_not_measured(spec_of: Callable[..., Spec]) -> None:
    spec = spec_of()
    quantised = spec.model_copy(update={"target": spec.target.model_copy(update={"quantization": "fp8"})})
    with pytest.raises(TrtspecError, match="passes of a target with quantization fp8 cannot be measured by the torch"):
        pairs.pair_of_spec(quantised, Sources(quantised), "cpu")
