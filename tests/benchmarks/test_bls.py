"""The arithmetic of benchmarks/bls: ratios, lines through memory, counts that agree, metrics read; no server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

BLS = Path(__file__).parents[2] / "benchmarks" / "bls"
MIB = 1 << 20
PAGE = """
# HELP trtspec_requests_total Requests that ended
# TYPE trtspec_requests_total counter
trtspec_requests_total{model="a",finish_reason="stop"} 3
trtspec_requests_total{model="b",finish_reason="stop"} 2
trtspec_requests_total{model="b",finish_reason="length"} 1.5e3
trtspec_requests_in_flight{model="a"} 0
"""


@pytest.fixture(scope="module")
def bls() -> Iterator[SimpleNamespace]:
    """The modules, imported as if the directory had been started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BLS))
        import faults
        import load
        import serving
        import soak
        import throughput

        yield SimpleNamespace(faults=faults, load=load, serving=serving, soak=soak, throughput=throughput)


def test_series_are_summed_over_other_labels(bls: Any) -> None:
    series = bls.serving.parse_metrics(PAGE)
    assert bls.serving.by_label(series, "trtspec_requests_total", "finish_reason") == {"stop": 5, "length": 1500}
    assert bls.serving.by_label(series, "trtspec_requests_in_flight", "model") == {"a": 0}


def test_ports_are_three(bls: Any) -> None:
    assert len(set(bls.serving.free_ports().values())) == 3


def test_ratio_is_taken_round_by_round(bls: Any) -> None:
    mine, other = bls.throughput.Rates((9.0, 18.0, 4.0)), bls.throughput.Rates((10.0, 20.0, 8.0))
    assert mine.over(other).rounds == (0.9, 0.9, 0.5) and mine.over(other).median == 0.9
    assert str(mine) == "9.00 (4.00 to 18.00)"


@pytest.mark.parametrize(("fixed", "off", "better"), [(8.0, 5.0, "drafting"), (5.0, 8.0, "not drafting")])
def test_adaptive_is_measured_by_the_better_of_the_two(bls: Any, fixed: float, off: float, better: str) -> None:
    rates = {name: bls.throughput.Rates((rate,)) for name, rate in (("drafting", fixed), ("not drafting", off))}
    row = bls.throughput.Crowded(4, rates | {"adaptive": bls.throughput.Rates((6.0,))})
    assert (row.better, row.ratio.median) == (better, 0.75)


def test_a_line_is_found_exactly(bls: Any) -> None:
    seconds = [2.0 * number for number in range(300)]
    line = bls.soak.trend(seconds, [(100 + 36 * at / 3600) * MIB for at in seconds])
    assert line.slope == pytest.approx(36) and line.error == pytest.approx(0, abs=1e-6)
    assert line.mib == pytest.approx(100 + 36 * 299 / 3600) and not line.steady


def test_noise_is_no_growth_and_its_error_is_that_of_repetition(bls: Any) -> None:
    seconds = [2.0 * number for number in range(300)]
    lines = []
    for seed in range(200):
        random = Random(seed)
        lines.append(bls.soak.trend(seconds, [(100 + random.gauss(0, 1)) * MIB for _ in seconds]))
    spread = (sum(line.slope**2 for line in lines) / len(lines)) ** 0.5
    stated = (sum(line.error**2 for line in lines) / len(lines)) ** 0.5
    assert stated == pytest.approx(spread, rel=0.2)
    assert sum(line.steady for line in lines) > 190


def test_growth_too_small_to_matter_is_steady(bls: Any) -> None:
    assert bls.soak.Trend(mib=200.0, slope=1.9, error=0.01).steady
    assert not bls.soak.Trend(mib=200.0, slope=2.1, error=0.01).steady
    assert bls.soak.Trend(mib=200.0, slope=-50.0, error=0.01).steady


def test_too_few_samples_are_refused(bls: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4 samples in 10 pieces"):
        bls.soak.trend([1, 2, 3, 4], [1, 1, 1, 1])
    with pytest.raises(Exception, match="too few samples"):
        bls.soak.run(tmp_path, seconds=30, warmup_s=20, period_s=1, clients=1)


def test_a_request_that_was_not_answered_is_not_steady(bls: Any) -> None:
    assert bls.soak.Soaked({}, {"stop": 4, "left": 1}).steady
    assert not bls.soak.Soaked({}, {"stop": 4, "hung": 1}).steady


SEEN = {"stop": 5, "length": 7, "refused": 3, "left": 2}


@pytest.mark.parametrize(
    ("counted", "faults"),
    [
        ({"stop": 5, "length": 7, "refused": 3, "cancelled": 2}, []),
        ({"stop": 6, "length": 7, "refused": 3, "cancelled": 1}, []),  # one ended before it was found to have left
        ({"stop": 5, "length": 7, "refused": 3}, []),  # they left before they were seen
        ({"stop": 4, "length": 7, "refused": 3, "cancelled": 2}, ["stop: 4 counted, 5 seen, 2 left"]),
        ({"stop": 5, "length": 7, "refused": 3, "cancelled": 1, "error": 1}, []),
        (
            {"stop": 5, "length": 7, "refused": 3, "cancelled": 3},
            ["cancelled: 3 counted, 2 left", "18 counted, 17 sent, 2 left"],
        ),
        (
            {"stop": 8, "length": 7, "refused": 3},
            ["stop: 8 counted, 5 seen, 2 left", "18 counted, 17 sent, 2 left"],
        ),
        ({"stop": 7, "length": 9, "refused": 3}, ["19 counted, 17 sent, 2 left"]),
    ],
)
def test_counts_agree_with_what_clients_saw(bls: Any, counted: dict[str, int], faults: list[str]) -> None:
    assert bls.faults.miscounts(SEEN, counted) == faults


def test_a_request_that_hung_has_to_be_counted(bls: Any) -> None:
    counted = {"stop": 5, "length": 7, "refused": 3}
    assert bls.faults.miscounts(SEEN | {"hung": 1}, counted) == ["15 counted, 18 sent, 2 left"]


def test_texts_are_those_of_the_request_alone(bls: Any) -> None:
    load = bls.load
    ask = load.Ask("p", 9, num_draft_tokens=5, stream=True)
    alone = {load.Ask("p", 9): "abcd"}
    assert load.is_right(load.Outcome(ask, "stop", "abcd"), alone)
    assert not load.is_right(load.Outcome(ask, "stop", "abc"), alone)
    leaving = replace(ask, leave_after=1)
    assert load.is_right(load.Outcome(leaving, "left", "ab"), alone)
    assert not load.is_right(load.Outcome(leaving, "left", "b"), alone)
    drawn = replace(ask, seed=1)
    assert drawn.alone is None and load.is_right(load.Outcome(drawn, "stop", "anything"), alone)
    assert replace(drawn, num_draft_tokens=0).alone == load.Ask("p", 9, seed=1)


GOOD: dict[str, Any] = {
    "wanted": 1,
    "wrong": [],
    "stuck": 0,
    "counted": {"stop": 1, "refused": 1, "cancelled": 1},
    "in_flight": 0.0,
    "pending": {"m": 0.0},
    "drafted": 4,
    "kills": 2,
    "revivals": 2,
}


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, set()),
        ({"stuck": 1}, {"no hang"}),
        ({"in_flight": 1.0}, {"no leak"}),
        ({"pending": {"m": 1.0}}, {"no leak"}),
        ({"wanted": 2}, {"enough answered"}),
        ({"counted": {"stop": 1}}, {"all counted"}),
        ({"drafted": 0}, {"draft comes back"}),
        ({"drafted": None}, {"draft comes back"}),
        ({"revivals": 1}, {"draft comes back"}),
        ({"revivals": 3}, {"draft comes back"}),
        ({"revivals": 1, "restarts": 1, "counted": {"stop": 1}}, set()),
        ({"revivals": 0, "restarts": 1}, {"draft comes back"}),
        ({"restarts": 1, "kinds": ("stop", "refused", "left", "lost")}, set()),
        ({"kinds": ("stop", "refused", "left", "lost")}, {"no error", "server comes back"}),
        ({"kinds": ("stop", "refused", "left", "hung")}, {"no hang"}),
        ({"kinds": ("stop", "refused", "left", "error")}, {"no error", "all counted"}),
        ({"kinds": ("stop", "refused", "left", "left", "cancelled")}, {"no error"}),
        ({"kinds": ("stop", "left", "left")}, {"queue limit felt"}),
    ],
)
def test_every_promise_can_be_broken(bls: Any, changes: dict[str, Any], broken: set[str]) -> None:
    seen = {**GOOD, "kinds": ("stop", "refused", "left"), **changes}
    outcomes = [bls.load.Outcome(bls.load.Ask("p", 9), kind) for kind in seen.pop("kinds")]
    findings = bls.faults.judge(bls.faults.Aftermath(outcomes=outcomes, **seen))
    assert {finding.promise for finding in findings if not finding.kept} == broken


def test_a_wrong_text_is_shown(bls: Any) -> None:
    outcomes = [bls.load.Outcome(bls.load.Ask("p", 9), kind, "oops") for kind in ("stop", "refused", "left")]
    after = bls.faults.Aftermath(**GOOD | {"outcomes": outcomes, "wrong": outcomes[:1]})
    (finding,) = [found for found in bls.faults.judge(after) if not found.kept]
    assert finding.promise == "no wrong text" and "oops" in finding.found


def test_load_is_of_every_kind(bls: Any) -> None:
    random = Random(1)
    asks = [bls.load.mixed(random, 0.15) for _ in range(300)]
    assert {ask.num_draft_tokens for ask in asks} == {0, None, 3, 5}
    assert {ask.stream for ask in asks} == {True, False} and {bool(ask.stop) for ask in asks} == {True, False}
    assert 50 < sum(ask.seed is not None for ask in asks) < 130
    assert 20 < sum(ask.leave_after is not None for ask in asks) < 80


@pytest.mark.parametrize("given", ["0", "1,x", ""])
def test_numbers_of_clients_are_checked(given: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BLS))
        import importlib.util

        spec = importlib.util.spec_from_file_location("bls_main", BLS / "__main__.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        result = CliRunner().invoke(module.main, ["throughput", "--clients", given])
    assert result.exit_code == 2 and "expected numbers from 1 on" in result.output
