"""`trtspec plan`: the figures by hand, what is said where something is not known, and the command as a user has it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from trtspec.build.machine import hardware
from trtspec.cli import main
from trtspec.errors import TrtspecError
from trtspec.models.source import open_model
from trtspec.plan import inputs, planner
from trtspec.plan.curves import Curves, Measured, ModelCurve, sizes_of
from trtspec.plan.cycle_cost import CycleCost, cycle_seconds
from trtspec.plan.drafting import Drafting
from trtspec.plan.planner import CHAINS, AssumedRate, Outlook, Question, Unknown, make_plan, variants
from trtspec.plan.result import Plan
from trtspec.plan.shapes import shape_of
from trtspec.plan.sizes import ModelSizes
from trtspec.plan.speedup import expected_tokens
from trtspec.plan.trace import Answer, Model, Proposer, Trace, identity, line
from trtspec.spec.gpus import GPUS
from trtspec.spec.load import load_spec
from trtspec.spec.schema import Spec

SPEC = """\
version: 1
target: {model: t}
speculation:
  method: draft_target          # as served
  num_draft_tokens: 4
  draft: {model: d}
hardware: {gpu: H100-SXM}
engine: {runtime: tensorrt_llm, max_batch_size: 8, max_input_len: 1024, max_seq_len: 4096}
serving: {max_concurrency: 8}
"""
SHAPES = ("--target-shape", "Llama-3.1-8B", "--draft-shape", "Llama-3.2-1B")


@dataclass(frozen=True)
class Times:
    """A target pass of 20 ms, a draft pass of 1 ms; every further token of the batch costs the target 0.25 ms."""

    source: str = "by hand"

    def seconds(self, role: str, batch: int, tokens: int, context: int) -> float:
        return 1e-3 if role != "target" else 20e-3 + 0.25e-3 * (batch * tokens - 1)

    def overhead(self, batch: int) -> float:
        return 0.5e-3


@dataclass(frozen=True)
class Told:
    """Emits one more token for every two drafted, give or take a tenth; knows draft models only."""

    source: str = "told"

    def of(self, spec: Spec, drafting: Drafting) -> Outlook:
        if drafting.method != "draft_target":
            raise TrtspecError("not measured")
        emitted = 1 + drafting.num_draft_tokens / 2
        return Outlook(emitted, (0.9 * emitted, 1.1 * emitted), {"draft": drafting.num_draft_tokens + 1.0})


QUESTION = Question(
    GPUS["H100-SXM"], 80.0, (1, 2, 4, 8), context=1000, prompt=500, memory_batch=8, max_draft_tokens=6, gpus=GPUS
)


def sizes(spec: Spec) -> dict[str, Any]:
    return {role: shape_of("Llama-3.1-8B" if role == "target" else "Llama-3.2-1B") for role in spec.models}


def spec_of(directory: Path, *overrides: str, text: str = SPEC) -> Spec:
    (directory / "s.yaml").write_text(text)
    return load_spec(directory / "s.yaml", overrides)


def planned(spec: Spec, acceptance: Any = None, times: Any = None, **changes: Any) -> Plan:
    acceptance = acceptance or AssumedRate(0.7, "draft_target")
    return make_plan(spec, sizes, lambda *_: times or Times(), acceptance, replace(QUESTION, **changes))


# ---- figures


def test_a_point_by_hand(tmp_path: Path) -> None:
    """Batch 2, 3 drafts, alpha .7: E = 1 + .7 + .49 + .343; 3 draft passes, 8 tokens verified, .5 ms between."""
    (point,) = [
        point
        for point in planned(spec_of(tmp_path), price=3.0).own.points
        if (point.batch, point.num_draft_tokens) == (2, 3)
    ]
    emitted, cycle, plain = 2.533, 3 * 1.0 + (20 + 0.25 * 7) + 0.5, 20.25
    assert point.tokens_per_pass == pytest.approx(emitted)
    assert (point.cycle_ms, point.plain_ms) == (pytest.approx(cycle), pytest.approx(plain))
    assert point.speed_up == pytest.approx(emitted * plain / cycle)
    assert point.tokens_per_second == pytest.approx(2 * emitted / cycle * 1000)
    assert point.tpot_ms == pytest.approx(cycle / emitted)
    assert point.ttft_ms == pytest.approx((20 + 0.25 * 499) + 1.0 + cycle)  # both prefills, then a cycle
    assert point.cost_per_million == pytest.approx(3.0 / 3600 / (2 * emitted / cycle * 1000) * 1e6)


def test_every_gpu_costs(tmp_path: Path) -> None:
    """Times are the same in this double, so two GPUs are twice as dear as one."""
    split = ("target.tensor_parallel=2", "hardware.num_gpus=2", "serving.orchestrator=true")
    one, two = (planned(spec_of(tmp_path, *overrides), price=3.0) for overrides in ((), split))
    assert (one.num_gpus, two.num_gpus) == (1, 2)
    for cheap, dear in zip(one.own.points, two.own.points, strict=True):
        assert dear.cost_per_million == pytest.approx(2 * (cheap.cost_per_million or 0.0))
    assert planned(spec_of(tmp_path)).own.points[0].cost_per_million is None


def test_the_interval_of_acceptance_is_carried_through(tmp_path: Path) -> None:
    for point in planned(spec_of(tmp_path), Told()).own.points:
        low, high = point.speed_up_interval
        assert (low, high) == (pytest.approx(0.9 * point.speed_up), pytest.approx(1.1 * point.speed_up))
        # Told says that the draft runs once more than it drafts.
        verify = 20 + 0.25 * (point.batch * (point.num_draft_tokens + 1) - 1)
        assert point.cycle_ms == pytest.approx(point.num_draft_tokens + 1 + verify + 0.5)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_best_length_crossover_and_schedule_are_those_of_a_search(tmp_path: Path, rate: float) -> None:
    """By brute force over batches and lengths, with times that verification soon dominates."""

    @dataclass(frozen=True)
    class Steep(Times):
        def seconds(self, role: str, batch: int, tokens: int, context: int) -> float:
            return 2e-3 if role != "target" else 20e-3 * max(1.0, batch * tokens / 16)

    batches = (1, 4, 8, 40)
    found = planned(spec_of(tmp_path), AssumedRate(rate, "draft_target"), Steep(), batches=batches)

    def gains(batch: int) -> dict[int, float]:
        def target(tokens: int) -> float:
            return 20 * max(1.0, batch * tokens / 16)

        return {k: expected_tokens(rate, k) * target(1) / (2 * k + target(k + 1) + 0.5) for k in range(1, 7)}

    best = {batch: max(gains(batch), key=lambda k, batch=batch: gains(batch)[k]) for batch in range(1, 41)}
    pays = [batch for batch in best if gains(batch)[best[batch]] >= 1]
    assert {batch: point.num_draft_tokens for batch, point in found.own.best.items()} == {b: best[b] for b in batches}
    assert found.own.crossover == (max(pays) + 1 if pays else 1)
    assert found.own.crossover < 40
    loads = {*batches, 8, *([max(pays)] if pays else [])}
    assert found.schedule == {load: best[load] if load in pays else 0 for load in sorted(loads)}
    assert found.max_batch == 40


def test_the_rate_that_breaks_even_does(tmp_path: Path) -> None:
    found = planned(spec_of(tmp_path), Unknown())
    assert found.own.points == () and found.schedule == {}
    for batch, rate in found.break_even.items():
        assert rate is not None
        best = [
            planned(spec_of(tmp_path), AssumedRate(each, "draft_target"), batches=(batch,)).own.best[batch].speed_up
            for each in (rate, rate - 0.01)
        ]
        assert best[0] == pytest.approx(1.0, abs=1e-6)
        assert best[1] < 1
    assert f"at batch 1 it pays above a rate of {found.break_even[1]:.2f}" in found.headline
    table = {(each.acceptance_rate, each.batch): each for each in found.assumed}
    own = planned(spec_of(tmp_path), AssumedRate(0.8, "draft_target")).own
    for batch, point in own.best.items():
        assert table[0.8, batch].speed_up == pytest.approx(point.speed_up)
        assert table[0.8, batch].num_draft_tokens == point.num_draft_tokens


def test_the_rate_that_is_shown_is_the_one_that_was_assumed(tmp_path: Path) -> None:
    assert planned(spec_of(tmp_path)).acceptance_rate == pytest.approx(0.7)


def test_most_tokens_within_a_latency(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    everything = [point for method in planned(spec).methods for point in method.points]
    found = planned(spec, latency_ms=11.0)
    best = max((point for point in everything if point.tpot_ms <= 11.0), key=lambda point: point.tokens_per_second)
    assert found.within_latency == best
    assert planned(spec, latency_ms=0.1).within_latency is None
    # What does not fit is no answer, however fast.
    full = planned(spec, latency_ms=11.0, device_gb=23.0)
    assert full.memory.max_batch < 8
    assert full.within_latency is not None and full.within_latency.batch <= full.memory.max_batch


def test_draft_lengths_stay_within_what_the_engine_verifies(tmp_path: Path) -> None:
    found = planned(spec_of(tmp_path, "engine.max_draft_len=5"))
    assert {point.num_draft_tokens for point in found.own.points} == {1, 2, 3, 4, 5}


# ---- methods

ALL = """\
version: 1
target: {model: t}
speculation:
  method: draft_target
  draft: {model: d}
  early_exit: {layer: 8}
  cascade: {middle: {model: m}}
  tree: {branching: [3, 1]}
  medusa: {heads: h, acceptance: typical}
hardware: {gpu: cpu}
engine: {runtime: torch, max_draft_len: 5, max_input_len: 1024}
"""


def test_all_methods_that_the_models_allow_the_own_one_first(tmp_path: Path) -> None:
    allowed = [each.speculation.method for each in variants(spec_of(tmp_path, text=ALL))]
    assert allowed == ["draft_target", "none", "ngram", "tree", "cascade", "early_exit", "medusa"]
    own = [each.speculation.method for each in variants(spec_of(tmp_path, "speculation.method=ngram"))]
    assert own == ["ngram", "none", "draft_target", "tree"]
    for each in variants(spec_of(tmp_path, text=ALL)):
        assert each.speculation.num_draft_tokens <= (each.engine.max_draft_len or 64)


def test_what_is_not_measured_is_said_and_what_cannot_be_built_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "engine.track=llmapi", "engine.version=1.3.0")
    methods = {method.method: method for method in planned(spec, Told()).methods}
    assert methods["ngram"].notes == ("not measured",) and not methods["ngram"].points
    assert methods["tree"].refused is not None
    assert methods["tree"].refused.startswith("method tree is not available on track llmapi; nearest that works: ")
    assert methods["none"].points[0].speed_up == 1 and methods["none"].crossover is None
    assert methods["draft_target"].refused is None and methods["draft_target"].points


def test_lossy_methods_are_marked(tmp_path: Path) -> None:
    lossless = {method.method: method.lossless for method in planned(spec_of(tmp_path, text=ALL), Unknown()).methods}
    assert [name for name, value in lossless.items() if not value] == ["medusa"]


def test_a_rate_is_that_of_one_method(tmp_path: Path) -> None:
    methods = planned(spec_of(tmp_path)).methods
    assert [method.method for method in methods if method.points] == ["draft_target", "none"]
    with pytest.raises(TrtspecError, match="one acceptance rate does not describe method tree"):
        inputs.assumed_rate(spec_of(tmp_path, text=SPEC.replace("draft_target", "tree").replace("4\n", "10\n")), 0.5)
    assert "tree" not in CHAINS


def test_an_early_exit_keeps_layers_of_the_targets_shape(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "speculation.method=early_exit", "speculation.early_exit.layer=8")
    found = ModelSizes({"target": "Llama-3.1-8B", "draft": "Llama-3.2-1B"})(spec)
    assert found["draft"] == replace(found["target"], num_hidden_layers=8)
    with pytest.raises(TrtspecError, match="the first 99 of 32 layers are no smaller model"):
        ModelSizes({"target": "Llama-3.1-8B"})(
            spec_of(tmp_path, "speculation.method=early_exit", "speculation.early_exit.layer=99")
        )


@pytest.mark.parametrize("in_process", [True, False])
def test_a_server_verifies_path_by_path_and_runs_an_early_exit_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: bool
) -> None:
    told: list[tuple[bool, bool]] = []

    def cycle(*args: Any, **more: Any) -> CycleCost:
        told.append((more["shared"], more["engine_track"]))
        return cycle_seconds(*args, **more)

    monkeypatch.setattr(planner, "cycle_seconds", cycle)
    spec = spec_of(tmp_path, "speculation.method=early_exit", "speculation.early_exit.layer=8", "engine.runtime=torch")
    question = replace(QUESTION, in_process=in_process)
    planner.Costs(spec, Times(), question).cycle_s(1, Drafting.of(spec))
    assert told == [(in_process, not in_process)]


def test_modules_predict_as_far_as_the_spec_says(tmp_path: Path) -> None:
    """One that goes on by itself is right less often, so that a rate says nothing of it."""
    text = SPEC.replace("draft_target ", "mtp ").replace("num_draft_tokens: 4", "num_draft_tokens: 2")
    spec = spec_of(tmp_path, "engine.track=llmapi", "engine.version=1.3.0", text=text)
    found = planned(spec, AssumedRate(0.85, "mtp"))
    assert {point.num_draft_tokens for point in found.own.points} == {1, 2}


# ---- sentences


@pytest.mark.parametrize(
    ("gain", "spread", "sentence"),
    [
        (1.5, 0.1, "It pays: "),
        (1.05, 0.1, "It may pay: "),
        (0.95, 0.1, "It may pay: 0.95 times plain decoding (95 %: 0.85 to 1.05) at batch 1 with 1 draft token."),
        (0.8, 0.1, "It does not pay: 0.80 times"),
    ],
)
def test_the_headline_is_as_sure_as_the_interval(tmp_path: Path, gain: float, spread: float, sentence: str) -> None:
    made = planned(spec_of(tmp_path))
    point = replace(made.own.points[0], speed_up=gain, speed_up_interval=(gain - spread, gain + spread))
    made = replace(made, methods=(replace(made.own, points=(point,)), *made.methods[1:]))
    assert made.headline.startswith(sentence)


# ---- the command


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`trtspec plan` on SPEC in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def plan(*arguments: str, text: str = SPEC) -> Result:
        (tmp_path / "spec.yaml").write_text(text)
        return CliRunner().invoke(main, ["plan", "spec.yaml", *arguments])

    return plan


def test_tables_are_readable_in_80_columns(run: Callable[..., Result]) -> None:
    result = run(*SHAPES, "--acceptance", "0.7", "--price", "2.5", "--latency-ms", "10")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert "…" not in result.output
    assert "assumed, not measured" in result.output
    for said in (
        "It pays: ",
        "fits, and so does",
        "plain decoding",
        "draft tokens by requests",
        "$ / 10^6",
        "within 10 ms",
    ):
        assert said in result.output, said


def test_without_acceptance_there_is_a_table_that_is_labelled(run: Callable[..., Result]) -> None:
    result = run(*SHAPES)
    assert result.exit_code == 0, result.output
    assert "assumption, not measured" in result.output
    assert "pays above" in result.output


def test_json_holds_everything(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run(*SHAPES, "--acceptance", "0.7", "--batch", "8, 1", "--context", "2048", "--json", "-")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["fits"] is True and plan["headline"].startswith("It pays")
    assert plan["batches"] == [1, 8] and plan["context"] == 2048
    assert plan["memory"]["batch"] == 8 and plan["memory"]["context"] == 2048
    own = plan["methods"][0]
    assert {point["num_draft_tokens"] for point in own["points"]} == set(range(1, 17))
    best = max((point for point in own["points"] if point["batch"] == 8), key=lambda point: point["speed_up"])
    assert own["best"]["8"] == best
    assert plan["schedule"]["8"] == best["num_draft_tokens"]
    assert set(plan["fractions"]) == {"draft", "target"}
    written = run(*SHAPES, "--acceptance", "0.7", "--json", "plan.json")
    assert "It pays" in written.output
    assert json.loads((tmp_path / "plan.json").read_text())["batches"] == [1, 2, 4, 8, 16, 32, 64]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "spec.yaml"]


def test_nothing_feasible_is_an_answer(run: Callable[..., Result]) -> None:
    big = ("--target-shape", "Llama-3.1-70B", "--draft-shape", "Llama-3.2-1B", "--acceptance", "0.7")
    result = run(*big, "--json", "-")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["fits"] is False
    assert plan["nearest"].startswith("target.tensor_parallel=4")
    assert plan["headline"].startswith("It does not fit: GPU 0 has 80 GB")
    text = run(*big).output
    assert "no feasible configuration" in text and "nearest: target.tensor_parallel=4" in " ".join(text.split())
    assert not any(point["fits"] for point in plan["methods"][0]["points"])


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "much", "-0.0"])
def test_nonsense_prices_are_refused(run: Callable[..., Result], value: str) -> None:
    result = run(*SHAPES, f"--price={value}")
    assert result.exit_code == 2
    assert f"Invalid value for '--price': {value} is no number above 0" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--acceptance", "1.5"], "1.5 is no number of at least 0 and at most 1"),
        (["--acceptance", "nan"], "nan is no number of at least 0 and at most 1"),
        (["--batch", "1,x"], "'1,x' is no list of numbers"),
        (["--batch", "0"], "'0' is no list of numbers"),
        (["--context", "5000"], "5000 tokens are more than the target's engine takes; expected at most 4096"),
        (["--gpu", "B900"], "no figures of a GPU 'B900'; expected one of cpu, A100-40GB"),
        (["--gpu", "cpu"], "cpu has no roofline: its speed is not on a data sheet; measure it: trtspec plan calibrate"),
        (["--middle-shape", "Llama-3.1-8B"], "--middle-shape: the spec has no middle model"),
        (["--draft-shape", "Lama"], "no shape 'Lama'; expected one of "),
        (["--trace", "t.jsonl"], "t.jsonl: the trace cannot be read: No such file"),
        (["--trace", "t.jsonl", "--acceptance", "0.5"], "give one of them"),
        (["--calibration", "c.json"], "c.json: cannot be read (No such file"),
        (["--gpu-file", "g.yaml"], "g.yaml: cannot be read"),
        (["--json", "no/such/p.json"], "no/such/p.json: cannot be written"),
        (["--apply", "--gpu", "H200"], "--apply writes a plan of CONFIG as it is"),
        (["--apply", "--set", "engine.max_batch_size=4"], "--apply writes a plan of CONFIG as it is"),
    ],
)
def test_bad_input_is_one_clear_line(run: Callable[..., Result], arguments: list[str], said: str) -> None:
    given = SHAPES if "--draft-shape" not in arguments else SHAPES[:2]
    result = run(*given, *arguments)
    assert result.exit_code in (1, 2)
    assert said in " ".join(result.output.split()), result.output
    assert "internal error" not in result.output


def test_a_model_that_is_nowhere_says_how_to_go_on(run: Callable[..., Result]) -> None:
    result = run("--acceptance", "0.5")
    assert result.exit_code == 1
    assert "no such model directory: its sizes are not known; name a known shape with --target-shape" in result.output


def test_a_gpu_of_ones_own(run: Callable[..., Result], tmp_path: Path) -> None:
    row = "Mine: {sm: 100, memory_gb: 192, bandwidth_gb_per_s: 8000, dense_tflops: {bfloat16: 2250}, sources: [me]}\n"
    (tmp_path / "gpus.yaml").write_text(row)
    mine = ("--gpu-file", "gpus.yaml", "--gpu", "Mine")
    result = run(*SHAPES, "--acceptance", "0.7", *mine, "--json", "-")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["gpu"] == "Mine" and plan["memory"]["device_gb"] == 192
    known = json.loads(run(*SHAPES, "--acceptance", "0.7", "--json", "-").stdout)
    plain, faster = (each["methods"][0]["points"][0]["plain_ms"] for each in (known, plan))
    assert faster / plain == pytest.approx(3350 / 8000, rel=0.01)
    (tmp_path / "gpus.yaml").write_text(row.replace("100", "70"))
    assert "older than every GPU" in run(*SHAPES, *mine).output


# ---- measurements


def measured(spec: Spec, directory: Path) -> Curves:
    """Step times of a spec's two models on this machine: a target pass 10 ms and 1 ms a token, a draft pass 1 ms."""

    def curve(role: str) -> ModelCurve:
        config = open_model(spec.models[role].model, base_dir=spec.base_dir).config
        ms = (lambda tokens: 10 + tokens) if role == "target" else (lambda tokens: 1)
        points = [
            Measured(batch, tokens, context, 1e-3 * ms(batch * tokens), 0.0, 5)
            for batch in (1, 2)
            for tokens in (1, 5)
            for context in (0, 8, 64)
            if context or batch == 1
        ]
        return ModelCurve(role, sizes_of(config), "float32", config.num_hidden_layers, tuple(points))

    return Curves(
        "cpu", hardware()["cpu"], None, 1, {}, "2026-01-02T03:04:05Z", "by hand",
        {role: curve(role) for role in spec.models},
    )  # fmt: skip


def traced(spec: Spec, accepted: float, answers: int = 6) -> str:
    """A trace of answers of 20 tokens each, in which the draft is right at this share of the places."""
    models = {
        role: Model(ref.model, 280, identity(open_model(ref.model, base_dir=spec.base_dir)))
        for role, ref in spec.models.items()
    }
    rng = np.random.default_rng(7)
    made = Trace(spec.name, "draft_target", models, 8, 20, 0)
    lines = [line(made.header())]
    for number in range(1, answers + 1):
        rank = np.where(rng.random(20) < accepted, 0, 3)
        proposer = Proposer(rank=rank, top=np.where(rank == 0, 5, 6))
        answer = Answer(number, None, 0.0, tuple(range(10)), (5,) * 20, np.full(20, 0.5), {"draft": proposer})
        lines.append(line(answer.to_json()))
    return "".join(lines)


@pytest.fixture
def small(tiny_model_dir: Path, tiny_draft_dir: Path) -> str:
    """A spec of two tiny models that are here."""
    return f"""\
version: 1
name: small
target: {{model: {tiny_model_dir}, dtype: float32}}
speculation:
  method: draft_target          # as served
  num_draft_tokens: 4
  draft: {{model: {tiny_draft_dir}, dtype: float32}}
hardware: {{gpu: cpu}}
engine: {{runtime: torch, max_batch_size: 2, max_input_len: 64, max_seq_len: 128}}
serving: {{num_threads: 1, max_concurrency: 2, kv_cache_bytes: {{target: 64MiB, draft: 64MiB}}}}
"""


@pytest.fixture
def laid_out(run: Callable[..., Result], small: str, tmp_path: Path) -> Spec:
    """Trace and calibration where the commands leave them."""
    (tmp_path / "spec.yaml").write_text(small)
    spec = load_spec(tmp_path / "spec.yaml")
    inputs.trace_path(spec).parent.mkdir(parents=True)
    inputs.trace_path(spec).write_text(traced(spec, 0.8))
    measured(spec, tmp_path).write(inputs.calibration_path(spec))
    return spec


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
def test_from_measurement_to_the_spec(run: Callable[..., Result], small: str, laid_out: Spec, tmp_path: Path) -> None:
    """Trace and calibration are found, the plan is written into the spec, and a second time there is nothing to do."""
    result = run("--batch", "1,2", "--json", "plan.json", "--html", "plan.html", "--apply", text=small)
    assert result.exit_code == 0, result.output
    assert "measured on 6 answers at temperature 0 (small.trace.jsonl)" in " ".join(result.output.split())
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["times_source"].startswith("measured on ")
    assert plan["context"] == 20  # 10 of the prompt, and half of 20
    assert plan["prompt"] == 10
    methods = {method["method"]: method for method in plan["methods"]}
    assert methods["draft_target"]["points"] and methods["ngram"]["points"]
    low, high = plan["methods"][0]["best"]["1"]["interval"]
    assert low < plan["methods"][0]["best"]["1"]["tokens_per_pass"] < high
    best = plan["methods"][0]["best"]["1"]
    emitted, drafts = best["tokens_per_pass"], best["num_draft_tokens"]
    assert best["cycle_ms"] == pytest.approx(drafts + 10 + drafts + 1)
    assert best["speed_up"] == pytest.approx(emitted * 11 / best["cycle_ms"])
    assert (tmp_path / "plan.html").read_text().startswith("<!")
    text = (tmp_path / "spec.yaml").read_text()
    assert f"num_draft_tokens: {max(plan['schedule'].values())}" in text and "# as served" in text
    again = CliRunner().invoke(main, ["plan", "spec.yaml", "--batch", "1,2", "--apply"])
    assert again.exit_code == 0 and "says all of it already" in again.output
    assert (tmp_path / "spec.yaml").read_text() == text


def test_a_trace_of_other_models(
    run: Callable[..., Result], small: str, laid_out: Spec, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Named, it is an error; found at the usual place, it is left out and that is said."""
    other = save_model(tmp_path / "other", seed=5)
    text = small.replace(str(laid_out.target.model), str(other))
    named_one = run("--trace", str(inputs.trace_path(laid_out)), text=text)
    assert named_one.exit_code == 1
    assert "the trace was recorded with another target" in named_one.output
    found = run("--json", "-", text=text)
    assert found.exit_code == 0, found.output
    plan = json.loads(found.stdout)
    assert plan["acceptance_source"] == "not measured"
    assert any("is not used: " in warning and "another target" in warning for warning in plan["warnings"])


def test_a_temperature_that_was_not_recorded(run: Callable[..., Result], small: str, laid_out: Spec) -> None:
    result = run("--trace", str(inputs.trace_path(laid_out)), "--temperature", "0.7", text=small)
    assert result.exit_code == 1
    assert "no answers of temperature 0.7; expected one of 0; record them" in result.output


def test_a_calibration_of_other_models(run: Callable[..., Result], small: str, laid_out: Spec) -> None:
    """On a CPU there is nothing else to plan with; on a GPU the data sheet is."""
    threads = small.replace("num_threads: 1", "num_threads: 3")
    named_one = run("--calibration", str(inputs.calibration_path(laid_out)), text=threads)
    assert named_one.exit_code == 1 and "with 1 CPU threads" in named_one.output
    assert "cpu has no roofline" in run(text=threads).output
    on_gpu = run("--gpu", "H200", "--json", "-", text=small)
    assert on_gpu.exit_code == 0, on_gpu.output
    plan = json.loads(on_gpu.stdout)
    assert plan["times_source"].startswith("roofline of H200")
    assert any("calibration.json is not used" in warning for warning in plan["warnings"])


def test_beyond_what_was_measured_is_said(run: Callable[..., Result], small: str, laid_out: Spec) -> None:
    plan = json.loads(run("--batch", "1,16", "--json", "-", text=small).stdout)
    assert any(re.match(r"target: batch \d+ is outside of what was measured", text) for text in plan["warnings"])


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ((), "the measured step times are of another draft"),
        (("--gpu", "H200"), "the trace was recorded with another draft"),
    ],
)
def test_methods_with_other_models_than_what_was_measured_are_not_guessed(
    run: Callable[..., Result], small: str, laid_out: Spec, arguments: tuple[str, ...], note: str
) -> None:
    """An early exit has a draft too, but it is not the one that was recorded and timed."""
    text = small.replace("  num_draft_tokens: 4\n", "  num_draft_tokens: 4\n  early_exit: {layer: 1}\n")
    methods = {each["method"]: each for each in json.loads(run("--json", "-", *arguments, text=text).stdout)["methods"]}
    assert methods["draft_target"]["points"]
    assert methods["early_exit"]["points"] == [] and note in methods["early_exit"]["notes"][0]


@pytest.mark.parametrize(
    ("given", "batches", "warned"),
    [
        ((), "1,2", False),  # in step by default, in the torch runtime
        (("serving.alternate_phases=false",), "1,2", True),
        (("serving.alternate_phases=false",), "1", False),
        (("serving.alternate_phases=false", "speculation.method=ngram"), "1,2", False),
        (("engine.runtime=tensorrt_llm", "hardware.gpu=H200"), "1,2", True),
        (("engine.runtime=tensorrt_llm", "hardware.gpu=H200", "engine.track=llmapi"), "1,2", False),
    ],
)
def test_requests_out_of_step_are_warned_of(
    run: Callable[..., Result], small: str, laid_out: Spec, given: tuple[str, ...], batches: str, warned: bool
) -> None:
    settings = [word for each in given for word in ("--set", each)]
    result = run("--batch", batches, "--json", "-", *settings, text=small)
    assert result.exit_code == 0, result.output
    warnings = json.loads(result.stdout)["warnings"]
    assert any("serving.alternate_phases: true puts them in step" in warning for warning in warnings) is warned
