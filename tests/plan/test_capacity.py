"""Replicas for a rate of requests: figures by hand and by simulation, what never grows or falls, and the command."""

from __future__ import annotations

import heapq
import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from plan_doubles import plan as plan_double

from trtspec.cli import main
from trtspec.plan.capacity import Demand, Replica, waiting_s
from trtspec.plan.layouts import arranged, layouts
from trtspec.plan.page import to_html
from trtspec.plan.planner import AssumedRate, Costs, Drafting, Outlook, Question, Unknown, make_plan
from trtspec.plan.result import Capacity, Fleet, Plan
from trtspec.plan.shapes import shape_of
from trtspec.spec.gpus import GPUS
from trtspec.spec.load import load_spec
from trtspec.spec.schema import Spec

SPEC = """\
version: 1
target: {model: t}
speculation: {method: draft_target, draft: {model: d}}
hardware: {gpu: H100-SXM, num_gpus: 2}
engine: {runtime: tensorrt_llm, max_batch_size: 8, max_input_len: 1024, max_seq_len: 4096}
serving: {max_concurrency: 8, orchestrator: true}
"""
BIG = ("--target-shape", "Llama-3.1-70B", "--draft-shape", "Llama-3.2-1B", "--acceptance", "0.7")
LENGTHS = ("--prompt-tokens", "1000", "--answer-tokens", "250")
ASKED = ("--rate", "20", *LENGTHS, "--latency-ms", "20", "--price", "2.5")


@dataclass(frozen=True)
class Flat:
    """Every pass of the target takes 10 ms, of the draft 1 ms; a prompt 50 ms and 5 ms."""

    source: str = "by hand"

    def seconds(self, role: str, batch: int, tokens: int, context: int) -> float:
        return (10e-3 if role == "target" else 1e-3) * (1 if context else 5)

    def overhead(self, batch: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Rising(Flat):
    """The target takes 1 ms more for every token of the batch."""

    def seconds(self, role: str, batch: int, tokens: int, context: int) -> float:
        more = 1e-3 * batch * tokens if role == "target" and context else 0.0
        return super().seconds(role, batch, tokens, context) + more


def spec_of(directory: Path, *overrides: str) -> Spec:
    (directory / "s.yaml").write_text(SPEC)
    return load_spec(directory / "s.yaml", overrides)


def sizes(spec: Spec) -> dict[str, Any]:
    return {role: shape_of("Llama-3.1-8B" if role == "target" else "Llama-3.2-1B") for role in spec.models}


def planned(spec: Spec, demand: Demand, times: Any = None, rate: float | None = 0.7, **changes: Any) -> Plan:
    question = Question(
        GPUS["H100-SXM"], 80.0, (1, 2, 4, 8), context=1000, prompt=500, memory_batch=8, memory_context=1500,
        max_draft_tokens=6, demand=demand,
    )  # fmt: skip
    acceptance = Unknown() if rate is None else AssumedRate(rate, "draft_target")
    return make_plan(spec, sizes, lambda *_: times or Flat(), acceptance, replace(question, **changes))


def plain_of(spec: Spec, demand: Demand, times: Any = None, **changes: Any) -> Fleet:
    """What plain decoding takes."""
    found = planned(spec, demand, times, **changes).capacity
    assert found is not None
    return next(fleet for fleet in found.methods if fleet.method == "none")


# ---- the queue


def test_waiting_by_hand() -> None:
    """One server: C = a. Two: C = 2 r^2 / (1 + r), with r = a / 2."""
    assert waiting_s(1, 0.8, 1.0) == pytest.approx(math.log(0.8 / 0.05) / 0.2)
    assert waiting_s(2, 1.6, 1.0) == pytest.approx(math.log(2 * 0.64 / 1.8 / 0.05) / 0.4)
    assert waiting_s(1, 0.05, 1.0) == 0.0  # nineteen of twenty find it free
    assert waiting_s(8, 0.0, 1.0) == 0.0


def test_waiting_is_that_of_a_simulated_queue() -> None:
    """Customers come by chance, and take the server that is free first."""
    random, servers, rate, service = np.random.default_rng(3), 4, 1.8, 2.0
    free, now, waited = [0.0] * servers, 0.0, []
    for gap, takes in zip(random.exponential(1 / rate, 200_000), random.exponential(service, 200_000), strict=True):
        now += gap
        start = max(now, heapq.heappop(free))
        heapq.heappush(free, start + takes)
        waited.append(start - now)
    assert np.quantile(waited[1000:], 0.95) == pytest.approx(waiting_s(servers, rate, service), rel=0.08)


REPLICA = Replica(
    batch=4, num_draft_tokens=0, token_s=0.01, cycle_s=0.01, prefill_s=0.05, busy_s=0.05, answer_tokens=100
)


def test_a_replica_by_hand() -> None:
    """Four slots: four prefills of 50 ms and 100 tokens of 10 ms are 1.2 s in flight, of which 1.15 s are tokens."""
    assert REPLICA.in_flight_s == pytest.approx(1.2)
    assert REPLICA.most == pytest.approx(4 / 1.2)
    assert REPLICA.tpot_ms == pytest.approx(11.5)
    assert REPLICA.ttft_ms(0.0) == pytest.approx(70.0)  # a cycle under way, the prefill, a cycle
    assert replace(REPLICA, batch=1).tpot_ms == pytest.approx(10.0)


def served(replica: Replica, rate: float, requests: int) -> tuple[float, list[float]]:
    """In-flight batching, iteration by iteration: requests a second, and seconds to first token of each request.

    New requests are read one after another before the next cycle of all that are in flight; lengths of answers scatter
    by half their mean.
    """
    random = np.random.default_rng(5)
    comes = deque(np.cumsum(random.exponential(1 / rate, requests)))
    lengths = deque(np.maximum(1, np.rint(random.gamma(4, replica.answer_tokens / 4, requests))).astype(int))
    now, left, first, done = 0.0, list[int](), list[float](), 0
    while done < requests:
        if not left and comes and comes[0] > now:
            now = comes[0]
        fresh = []
        while comes and comes[0] <= now and len(left) < replica.batch:
            fresh.append(comes.popleft())
            left.append(int(lengths.popleft()))
            now += replica.prefill_s
        now += replica.cycle_s
        first += [now - came for came in fresh]
        left = [tokens - 1 for tokens in left if tokens > 1]
        done = len(first) - len(left)
    return requests / now, first


@pytest.mark.parametrize("replica", [REPLICA, replace(REPLICA, batch=16), replace(REPLICA, answer_tokens=20)])
def test_the_most_is_what_a_simulated_server_gives(replica: Replica) -> None:
    """All requests are there from the start: one server that always has the next one at hand."""
    assert served(replica, 1e9, 3000)[0] == pytest.approx(replica.most, rel=0.05)


@pytest.mark.parametrize("utilisation", [0.5, 0.7, 0.85])
@pytest.mark.parametrize("replica", [REPLICA, replace(REPLICA, batch=16), replace(REPLICA, answer_tokens=20)])
def test_time_to_first_token_is_on_the_safe_side(replica: Replica, utilisation: float) -> None:
    _, first = served(replica, utilisation * replica.most, 4000)
    assert np.quantile(first, 0.95) * 1e3 <= replica.ttft_ms(utilisation)


# ---- fleets


def test_a_fleet_by_hand(tmp_path: Path) -> None:
    """Plain, 15.1 ms a token: 10 + (B - 1) 50 / 100 <= 15.1 gives 11 slots, 1.55 s in flight, 7.10 requests/s."""
    fleet = plain_of(spec_of(tmp_path), Demand(20.0, 100), latency_ms=15.1, price=3.0)
    most = 11 / 1.55
    assert (fleet.batch, fleet.num_draft_tokens, fleet.num_gpus) == (11, 0, 1)
    assert fleet.most_requests_per_second == pytest.approx(most)
    assert fleet.replicas == math.ceil(20 / (0.7 * most)) == 5
    assert fleet.utilisation == pytest.approx(20 / (5 * most))
    assert fleet.tpot_ms == pytest.approx(15.0)
    assert fleet.cost_per_hour == pytest.approx(15.0)
    assert fleet.cost_per_million == pytest.approx(15.0 / 3600 / (20 * 100) * 1e6)
    assert plain_of(spec_of(tmp_path), Demand(20.0, 100)).cost_per_hour is None


def test_a_rate_that_fills_replicas_takes_no_more(tmp_path: Path) -> None:
    """Without a rest there is none too many: five times what one is planned for."""
    planned_for = 0.7 * 11 / 1.55
    for times, replicas in ((5.0, 5), (5.01, 6)):
        fleet = plain_of(spec_of(tmp_path), Demand(times * planned_for, 100), latency_ms=15.1)
        assert fleet.replicas == replicas


def test_drafting_takes_fewer_replicas_where_it_pays(tmp_path: Path) -> None:
    """Six drafts at .9 emit 5.22 tokens in 16 ms; both prompts are read one after the other."""
    found = planned(spec_of(tmp_path), Demand(20.0, 100), rate=0.9, latency_ms=15.1).capacity
    assert found is not None and found.own is not None
    emitted = sum(0.9**place for place in range(7))
    own, plain = found.own, found.methods[-1]
    assert (own.num_draft_tokens, plain.method) == (6, "none")
    assert own.most_requests_per_second == pytest.approx(own.batch / (own.batch * 0.055 + 100 * 0.016 / emitted))
    assert own.tpot_ms <= 15.1 < own.tpot_ms * (own.batch + 4) / own.batch  # the next batch on the grid is too slow
    assert found.methods[0] is own and found.cheapest is own
    assert own.replicas is not None and plain.replicas is not None and own.replicas <= plain.replicas


def test_more_requests_never_take_fewer_replicas(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    for ttft_ms in (None, 90.0):
        fleets = [plain_of(spec, Demand(rate, 100, ttft_ms), Rising()) for rate in (0.1, 10, 11, 40, 1e5)]
        assert all(fleet.problem is None for fleet in fleets)
        asked = [fleet.replicas or 0 for fleet in fleets]
        assert asked == sorted(asked) and asked[0] == 1 < asked[-1]


def test_a_tighter_latency_never_allows_a_larger_batch(tmp_path: Path) -> None:
    fleets = [
        plain_of(spec_of(tmp_path), Demand(5, 100), Rising(), latency_ms=ms) for ms in (99, 41, 26, 21, 15.6, 12.2)
    ]
    batches = [fleet.batch for fleet in fleets]
    assert batches == sorted(batches, reverse=True) and len(set(batches)) > 3
    replicas = [fleet.replicas or 0 for fleet in fleets]
    assert replicas[0] > 0 and replicas == sorted(replicas)


def test_a_short_time_to_first_token_is_paid_with_idle_replicas(tmp_path: Path) -> None:
    """Prefill and cycles take 70 ms: what is left is for waiting, which falls as replicas are less busy."""
    spec, found = spec_of(tmp_path), []
    for ttft_ms in (None, 200.0, 100.0, 80.0):
        fleet = plain_of(spec, Demand(50.0, 100, ttft_ms), latency_ms=15.1)
        assert fleet.problem is None and (ttft_ms is None or fleet.ttft_ms <= ttft_ms)
        found.append(fleet.replicas or 0)
    assert found == sorted(found) and found[-1] > found[0]


def test_less_busy_takes_more(tmp_path: Path) -> None:
    busy, idle = (
        plain_of(spec_of(tmp_path), Demand(20.0, 100, utilisation=part), latency_ms=15.1) for part in (0.9, 0.3)
    )
    assert (busy.replicas, idle.replicas) == (math.ceil(20 / 0.9 / 11 * 1.55), math.ceil(20 / 0.3 / 11 * 1.55))
    assert (idle.utilisation or 1) <= 0.3 < (busy.utilisation or 0) <= 0.9


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
@pytest.mark.parametrize(
    ("latency_ms", "ttft_ms", "problem"),
    [
        (5.0, None, "an output token takes 10 ms, at batch 1; asked for are 5"),
        (15.0, 50.0, "the first token takes 70 ms at least, at batch 1; asked for are 50"),
    ],
)
def test_nothing_feasible_names_what_comes_nearest(
    tmp_path: Path, latency_ms: float, ttft_ms: float | None, problem: str
) -> None:
    made = planned(spec_of(tmp_path), Demand(20.0, 100, ttft_ms), rate=None, latency_ms=latency_ms)
    assert made.capacity is not None
    (plain,) = made.capacity.methods
    assert (plain.problem, plain.replicas, plain.cost_per_hour) == (problem, None, None)
    assert made.capacity.cheapest is None
    assert made.capacity.headline.startswith("No feasible configuration for 20 requests/s of 100 tokens each: ")
    assert "No feasible configuration" in to_html(made)


def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path) -> None:
    made = planned(spec_of(tmp_path), Demand(20.0, 100), device_gb=16.5)
    assert made.capacity is not None and made.capacity.methods == ()
    assert any("it does not fit into memory" in note and "plain decoding" in note for note in made.capacity.notes)


# ---- layouts


def test_layouts_are_those_that_a_model_can_be_split_into(tmp_path: Path) -> None:
    def splits(shape: str, host_gpus: int = 8, **changes: Any) -> set[tuple[int, int]]:
        target = replace(shape_of(shape), **changes)
        found = (other.target for _, other in layouts(spec_of(tmp_path), target, host_gpus))
        return {(ref.tensor_parallel, ref.pipeline_parallel) for ref in found} - {(1, 1)}

    assert splits("Llama-3.1-70B") == {(t, p) for t in (1, 2, 4, 8, 16) for p in (1, 2, 4) if 1 < t * p <= 32}
    assert {tensor for tensor, _ in splits("Llama-3.1-70B", num_attention_heads=28, num_key_value_heads=4)} == {1, 2, 4}
    assert {tensor for tensor, _ in splits("Llama-3.1-70B", num_key_value_heads=3)} == {1}
    assert {pipeline for _, pipeline in splits("Llama-3.1-70B", num_hidden_layers=82)} == {1, 2}
    assert splits("Llama-3.1-70B", host_gpus=2) == {(2, 1), (1, 2), (2, 2), (1, 4), (2, 4), (4, 1), (4, 2), (8, 1)}


def test_a_layout_is_a_spec_that_can_be_served(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "serving.orchestrator=false", "serving.kv_cache_free_gpu_mem_fraction.draft=0.2")
    wide = arranged(spec, 8, 2, False, 8)
    assert (wide.target.world_size, wide.hardware.num_gpus, wide.hardware.num_nodes) == (16, 8, 2)
    assert wide.serving.orchestrator and not wide.serving.spawn_processes
    assert wide.serving.kv_cache_free_gpu_mem_fraction.draft is None
    beside = arranged(spec, 2, 1, True, 8)
    assert (beside.serving.gpu_device_ids.draft, beside.hardware.num_gpus) == ((2,), 3)


@pytest.mark.parametrize(("batch", "cycle_ms"), [(1, 13 + 4), (8, 2 * (10 + 4 * 4)), (40, 2 * (10 + 4 * 20))])
def test_a_draft_apart_works_while_the_target_does(tmp_path: Path, batch: int, cycle_ms: float) -> None:
    """Drafts of 3 ms a cycle, verification of 10 ms and 1 ms a token: together 13 + 4 B, two groups twice 10 + 2 B."""
    spec, outlook = spec_of(tmp_path), Outlook(2.0, (2.0, 2.0))
    question = Question(GPUS["H100-SXM"], 80.0, (1,), context=1000, prompt=500, memory_batch=8)
    drafting = Drafting.of(spec, 3)

    @dataclass(frozen=True)
    class Slow(Rising):
        def seconds(self, role: str, batch: int, tokens: int, context: int) -> float:
            return super().seconds(role, batch, tokens, context) * (1 if role == "target" else slower)

    slower = 1.0
    shares = Costs(spec, Slow(), question)
    apart = Costs(arranged(spec, 1, 1, True, 8), Slow(), question)
    assert (shares.apart, apart.apart, shares.num_gpus, apart.num_gpus) == (False, True, 1, 2)
    together = 13 + 4 * batch
    assert 1e3 * shares.cycle_s(batch, drafting, outlook) == pytest.approx(together)
    assert 1e3 * apart.cycle_s(batch, drafting, outlook) == pytest.approx(min(together, cycle_ms))
    assert (shares.busy_s(), apart.busy_s()) == (pytest.approx(0.055), pytest.approx(0.05))
    slower = 20.0  # drafts of 60 ms: groups hide the shorter of both
    longer = max(60, 10 + 4 * math.ceil(batch / 2))
    expected = min(70 + 4 * batch, 2 * longer) if batch > 1 else 70 + 4
    assert 1e3 * apart.cycle_s(batch, drafting, outlook) == pytest.approx(expected)


def test_stages_share_a_prompt(tmp_path: Path) -> None:
    question = Question(GPUS["H100-SXM"], 80.0, (1,), context=1000, prompt=500, memory_batch=8)
    costs = Costs(arranged(spec_of(tmp_path), 1, 2, False, 8), Flat(), question)
    assert (costs.prefill_s(), costs.busy_s()) == (pytest.approx(0.055), pytest.approx(0.05 / 2 + 0.005))


# ---- the command


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`trtspec plan` on a 70B model in fp8 on two GPUs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text(
        SPEC.replace("{model: t}", "{model: t, quantization: fp8, kv_cache_dtype: fp8, tensor_parallel: 2}").replace(
            "{model: d}", "{model: meta-llama/Llama-3.2-1B-Instruct}"
        )
    )
    return lambda *arguments: CliRunner().invoke(main, ["plan", "spec.yaml", *BIG, *arguments])


def capacity_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)["capacity"]
    return found


def test_what_is_printed(run: Callable[..., Result]) -> None:
    result = run(*ASKED, "--ttft-ms", "1000")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert max(map(len, result.output.splitlines())) <= 80 and "…" not in result.output
    for words in (
        "20 requests/s of 250 tokens each take ",
        "an hour.",
        "prompts of 1000 tokens, at most 70% busy, 20 ms a token, the first after 1000 ms in 95 %",
        "replicas by method",
        "Llama-3.2-1B-Instruct",
        "2 x 1 (spec)",
        "the target lies on several hosts of 8 GPUs, and what joins them is not known",
        "then: trtspec deploy k8s CONFIG --out DIR --replicas ",
    ):
        assert words in said, words


def test_json_has_methods_and_layouts(run: Callable[..., Result]) -> None:
    found = capacity_of(run(*ASKED, "--json", "-"))
    assert (found["rate"], found["answer_tokens"], found["utilisation"]) == (20, 250, 0.7)
    methods = {each["method"]: each for each in found["methods"]}
    assert set(methods) == {"draft_target", "none"} and methods["draft_target"]["own"]
    for each in found["methods"] + [each for each in found["layouts"] if each["problem"] is None]:
        assert each["tpot_ms"] <= 20
        assert each["replicas"] == math.ceil(20 / each["planned_requests_per_second"])
        assert each["cost_per_hour"] == pytest.approx(2.5 * each["replicas"] * each["num_gpus"])
    order = [each["replicas"] * each["num_gpus"] for each in found["layouts"] if each["replicas"]]
    assert order == sorted(order)
    splits = {(each["tensor_parallel"], each["pipeline_parallel"], each["draft_apart"]) for each in found["layouts"]}
    assert {(2, 1, True), (4, 1, False), (8, 1, False), (2, 2, False)} <= splits and (2, 1, False) not in splits
    assert all(tensor * pipeline <= 8 for tensor, pipeline, _ in splits)


def test_what_is_to_be_set_gives_what_was_promised(run: Callable[..., Result]) -> None:
    """Each layout's settings, given with --set, make it the spec's own, with the same figures."""
    layouts = capacity_of(run(*ASKED, "--json", "-"))["layouts"]
    some = [each for each in layouts if (each["tensor_parallel"], each["pipeline_parallel"]) in ((2, 1), (4, 2))]
    assert len(some) == 2 and some[0]["draft_apart"] != some[1]["draft_apart"]
    for each in some:
        sets = [part for word in each["settings"].split() for part in ("--set", word)]
        own = next(fleet for fleet in capacity_of(run(*ASKED, *sets, "--json", "-"))["methods"] if fleet["own"])
        for key in ("batch", "replicas", "num_gpus", "num_draft_tokens", "draft_apart", "hosts", "cost_per_hour"):
            assert own[key] == each[key], key
        assert own["tpot_ms"] == pytest.approx(each["tpot_ms"])
        assert own["settings"] == ""


def test_the_network_between_hosts_counts(run: Callable[..., Result]) -> None:
    def over_hosts(gbps: str) -> dict[tuple[int, int], float]:
        found = capacity_of(run(*ASKED[:-4], "--network-gbps", gbps, "--json", "-"))["layouts"]
        return {(e["tensor_parallel"], e["pipeline_parallel"]): e["tpot_ms"] for e in found if e["hosts"] == 2}

    slow, fast = over_hosts("10"), over_hosts("400")
    assert {(16, 1), (8, 2), (4, 4)} == set(slow) == set(fast)
    assert all(slow[split] > fast[split] for split in slow)
    few = capacity_of(run(*ASKED, "--host-gpus", "4", "--network-gbps", "400", "--json", "-"))
    assert {(each["hosts"], each["num_gpus"]) for each in few["layouts"] if each["num_gpus"] > 4} == {(2, 8), (4, 16)}


def test_a_spec_over_several_hosts_needs_the_network(run: Callable[..., Result]) -> None:
    sets = ("hardware.num_gpus=1", "hardware.num_nodes=2", "serving.spawn_processes=false")
    given = [part for word in sets for part in ("--set", word)]
    result = run(*given)
    assert result.exit_code == 1
    assert "what joins them is not known; give it for each GPU in 10^9 bits a second, such as --network-gbps 400" in (
        " ".join(result.output.split())
    )
    assert run(*given, "--network-gbps", "400").exit_code == 0


def test_a_latency_that_nothing_keeps_is_an_answer(run: Callable[..., Result]) -> None:
    result = run(*ASKED[:-4], "--latency-ms", "0.5")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "No feasible configuration for 20 requests/s of 250 tokens each: an output token takes " in said
    assert "asked for are 0.5" in said and "--replicas" not in said


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--rate=-1", *LENGTHS], 2, "'--rate': -1 is no number above 0"),
        (["--rate=nan", *LENGTHS], 2, "'--rate': nan is no number above 0"),
        (["--rate=inf", *LENGTHS], 2, "'--rate': inf is no number above 0"),
        (["--rate=1", *LENGTHS, "--ttft-ms=0"], 2, "'--ttft-ms': 0 is no number above 0"),
        (["--rate=1", *LENGTHS, "--utilisation=1"], 2, "1 is no number above 0 and at most 0.99"),
        (["--rate=1", "--answer-tokens=0"], 2, "'--answer-tokens': 0 is not in the range"),
        (["--rate=1", *LENGTHS, "--host-gpus=0"], 2, "'--host-gpus': 0 is not in the range"),
        (["--rate=1", *LENGTHS, "--network-gbps=nan"], 2, "'--network-gbps': nan is no number above 0"),
        (["--ttft-ms=100"], 2, "--ttft-ms belongs to --rate"),
        (["--rate=1"], 1, "--rate: how many tokens an answer has is not known; give their mean, such as"),
        (["--rate=1", "--prompt-tokens=4000", "--answer-tokens=200"], 1, "expected at most 4096 together"),
    ],
)
def test_bad_input_is_one_clear_line(run: Callable[..., Result], arguments: list[str], code: int, said: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, said in " ".join(result.output.split())) == (code, True), result.output


# ---- the page


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
def test_the_page_has_tables_and_a_plot() -> None:
    fleet = Fleet(
        method="draft_target", title="1B proposes", own=True, tensor_parallel=2, pipeline_parallel=1,
        draft_apart=False, hosts=1, num_gpus=2, batch=16, num_draft_tokens=4, most_requests_per_second=8.0,
        planned_requests_per_second=5.6, tpot_ms=12.5, ttft_ms=310.0, replicas=4, utilisation=0.63,
        cost_per_hour=20.0, cost_per_million=1.11, settings="engine.max_batch_size=16",
    )  # fmt: skip
    slow = replace(fleet, own=False, tensor_parallel=1, replicas=None, utilisation=None, problem="too <slow>")
    found = Capacity(20.0, 250, 0.7, 500.0, (fleet,), (slow,), ("left out: TP 16",))
    text = to_html(plan_double(capacity=found, price_per_gpu_hour=2.5))
    for words in (
        "How many replicas?",
        "20 requests/s of 250 tokens each take 4 replicas (8 GPUs), $20.00 an hour.",
        "Replicas for 20 requests/s",
        "engine.max_batch_size=16",
        "too &lt;slow&gt;",
        "left out: TP 16",
        'aria-label="GPUs over requests per second; for 20 a second: 1B proposes 8."',
        "US dollars an hour",
    ):
        assert words in text, words
    assert "first one 500 ms for 95 % of the requests" in text
