"""The benchmark of plans on small random models: what it prints has to hang together. Speed is not asserted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from small_specs import SPECULATION

from trtspec.bench.compare import read_plan
from trtspec.bench.load import Answer
from trtspec.bench.serve_report import Report
from trtspec.bench.serve_result import CONCURRENCY, Load, Slice
from trtspec.bench.serve_result import Result as LoadTest
from trtspec.bench.serve_result import Row as LoadRow
from trtspec.cli import main as trtspec
from trtspec.plan import calibrate as measuring

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MAX_TOKENS = 24
ONE = Load(CONCURRENCY, 1)


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The script, imported as if it had been started; step times are measured twice, however much time there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.setattr(measuring, "_ROUNDS", 2)
        patch.setattr(torch, "set_num_threads", lambda count: None)
        import prediction

        patch.setattr(prediction, "hardware", lambda: {"cores": torch.get_num_threads()})
        yield prediction


def invoke(benchmark: ModuleType, configs: dict[str, Path], *words: str) -> Result:
    root = configs["tree"].parent
    threads = ("--set", f"serving.num_threads={torch.get_num_threads()}", "--set", "hardware.gpu=cpu")
    files = ("--prompt-file", str(root / "prompts.jsonl"), "--work-dir", str(root / "predicted"))
    options = (
        *files,
        *threads,
        "--max-tokens",
        str(MAX_TOKENS),
        "--seconds",
        "60",
        "--prompts",
        "1",
        "--rounds",
        "1",
        *words,
    )
    return CliRunner().invoke(benchmark.main, [*map(str, configs.values()), *options])


@pytest.fixture(scope="module")
def result(benchmark: ModuleType, configs: dict[str, Path]) -> Result:
    return invoke(benchmark, configs)


def rows_of(result: Result) -> dict[str, dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return {row["method"]: row for row in json.loads(result.stdout.splitlines()[-1])["rows"]}


def test_every_method_has_a_plan_beside_its_measurement(result: Result) -> None:
    assert list(rows_of(result)) == list(SPECULATION)
    assert f"of {len(SPECULATION)}" in result.stdout


@pytest.mark.parametrize("method", SPECULATION)
def test_the_factors_of_a_speed_up_are_beside_each_other(result: Result, method: str) -> None:
    row = rows_of(result)[method]
    for side in (row["planned"], row["measured"]):
        assert side["speed_up"] == pytest.approx(side["tokens_per_pass"] * side["plain_ms"] / side["cycle_ms"])
        assert side["low"] <= side["speed_up"] <= side["high"]
    assert row["deviation"] == pytest.approx(row["planned"]["speed_up"] / row["measured"]["speed_up"] - 1)
    # The same answers; but the first pass is not timed, and the last one may end early.
    assert row["planned"]["tokens_per_pass"] == pytest.approx(row["measured"]["tokens_per_pass"], rel=0.15)


def test_compared_by_hand(benchmark: ModuleType) -> None:
    """Two rounds of two prompts: 3 passes for 6 tokens in 6 s each, plain a token a second."""
    from contenders import Pass, Timed

    drafted = [Timed((), 6, 6.0, (Pass(3, 1, 0.0, 1.0),) * 3)] * 4
    plain = [Timed((), 6, 6.0 + number) for number in (0, 1, 1, 0)]
    plan = benchmark.Side(1.3, 1.0, 1.5, 2.0, 2e3, 1.3e3)
    row = benchmark.compared("draft_target", 3, plan, drafted, plain, 2)
    assert row.measured.speed_up == pytest.approx(26 / 24)
    assert 1.0 <= row.measured.low < row.measured.speed_up < row.measured.high <= 7 / 6
    assert (row.measured.tokens_per_pass, row.measured.cycle_ms) == (2.0, pytest.approx(2e3))
    assert row.measured.plain_ms == pytest.approx(26e3 / 24)
    assert row.deviation == pytest.approx(1.3 / (26 / 24) - 1)


def test_served_it_goes_by_the_commands(
    benchmark: ModuleType, configs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a server that is made up: 2 tokens a pass, passes of 3 s, plain tokens of 2 s."""
    ran: list[str] = []

    def answered(arm: str, *later: float, passes: int) -> LoadRow:
        answer = Answer(0.0, 1 + later[0], ((1.0, 1.0), (1 + later[0], later[1])), passes=passes)
        return LoadRow(ONE, arm, 1, 0, 1, None, 0, 0.0, answer)

    def command(*words: object) -> None:
        line = [str(word) for word in words]
        ran.append(line[0])
        if line[0] == "plan":
            made = CliRunner().invoke(trtspec, line)
            assert made.exit_code == 0, made.output
        if line[0] == "bench":
            rows = (answered("on", 9.0, 6.0, passes=4), answered("off", 12.0, 6.0, passes=7))
            slices = tuple(Slice(ONE, arm, 1, 10.0) for arm in ("on", "off"))
            plan = read_plan(Path(line[line.index("--plan") + 1]))
            settings = {"arms": ["on", "off"], "num_draft_tokens": plan[0].num_draft_tokens}
            text = Report(LoadTest(settings, {}, "2030-01-01", rows, slices), plan=plan).as_json()
            Path(line[line.index("--json") + 1]).write_text(text)

    monkeypatch.setattr(benchmark, "command", command)
    two = {method: configs[method] for method in ("medusa", "tree")}
    outcome = invoke(benchmark, two, "--served")
    (row,) = rows_of(outcome).values()
    assert "medusa is left out" in outcome.stderr
    assert ran == ["plan", "serve", "bench", "stop"]
    assert row["method"] == "tree"
    found = {"speed_up": 4 / 3, "low": 4 / 3, "high": 4 / 3, "tokens_per_pass": 2, "cycle_ms": 3e3, "plain_ms": 2e3}
    assert row["measured"] == pytest.approx(found)
    assert 1 < row["planned"]["tokens_per_pass"] <= 3  # a tree of two levels


def test_the_server_is_stopped_where_the_load_test_fails(
    benchmark: ModuleType, configs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[object] = []

    def command(*words: object) -> None:
        ran.append(words[0])
        if words[0] == "bench":
            raise benchmark.TrtspecError("trtspec bench serve failed with code 1")

    monkeypatch.setattr(benchmark, "command", command)
    outcome = invoke(benchmark, {"tree": configs["tree"]}, "--served")
    assert outcome.exit_code == 1 and "trtspec bench serve failed" in outcome.stderr
    assert ran == ["plan", "serve", "bench", "stop"]
