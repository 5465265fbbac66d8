"""Figures, comparisons and reports of load tests that are made up, checked by hand."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from trtspec.bench import serve_report
from trtspec.bench.compare import (
    Factors,
    Planned,
    beside_arms,
    beside_old,
    beside_plan,
    check_old,
    check_plan,
    read_plan,
)
from trtspec.bench.load import Answer
from trtspec.bench.serve_figures import DECODING, WHOLE, between_tokens, cells, ratio
from trtspec.bench.serve_page import to_html
from trtspec.bench.serve_report import Report
from trtspec.bench.serve_result import CONCURRENCY, RATE, Load, Result, Row, Slice, read, to_csv, to_json
from trtspec.errors import TrtspecError
from trtspec.plan.result import MethodPlan, Point

ONE, FOUR = Load(CONCURRENCY, 1), Load(CONCURRENCY, 4)
SETTINGS: dict[str, Any] = {
    "prompts": {"file": "p.jsonl", "number": 3, "digest": "d1"},
    "loads": [{"kind": CONCURRENCY, "value": 1}],
    "arms": ["on", "off"],
    "num_draft_tokens": 4,
    "rounds": 2,
    "requests": None,
    "seconds": None,
    "warmup": None,
    "max_tokens": 8,
    "temperature": 0.0,
    "unique": False,
    "seed": 0,
}


def answer(*blocks: tuple[float, float], end: float | None = None, **more: Any) -> Answer:
    return Answer(sent_s=0.0, end_s=blocks[-1][0] if end is None else end, blocks=blocks, **more)


def row(arm: str, number: int, index: int, found: Answer, load: Load = ONE, planned_s: float = 0.0, **more: Any) -> Row:
    given = {"prompt": index + 1, "category": None, "repeats": 0} | more
    return Row(load, arm, number, index, planned_s=planned_s, answer=found, **given)


def result(rows: list[Row], **changes: Any) -> Result:
    """Its slices end with their last block."""
    pieces: dict[tuple[Load, str, int], float] = {}
    for each in rows:
        key = (each.load, each.arm, each.round)
        pieces[key] = max(pieces.get(key, 0.0), each.planned_s + each.answer.end_s)
    slices = tuple(Slice(*key, busy_s=busy_s) for key, busy_s in pieces.items())
    settings = SETTINGS | {"loads": [vars(load) for load in dict.fromkeys(each.load for each in rows)]}
    made = Result(settings, {"url": "h:1", "method": "draft_target"}, "2030-01-01", tuple(rows), slices)
    return replace(made, **changes)


def steady(seconds: dict[str, float], rounds: int = 2, load: Load = ONE) -> list[Row]:
    """Two answers a round: a first token after 1 s, then 4 tokens that take so many seconds in all."""
    return [
        row(arm, number, index, answer((1.0, 1.0), (1.0 + took, 4.0)), load)
        for number in range(1, rounds + 1)
        for arm, took in seconds.items()
        for index in range(2)
    ]


def test_tokens_of_a_block_share_its_time() -> None:
    gaps = between_tokens([answer((1.0, 2.0), (1.6, 3.0), (2.0, 1.0)), answer((5.0, 4.0))])
    assert gaps == pytest.approx([0.2, 0.2, 0.2, 0.4])


def test_cell_by_hand() -> None:
    rows = [
        row("on", 1, 0, answer((1.0, 1.0), (2.0, 4.0), drafted=8, accepted=3, passes=2, reused_blocks=2), repeats=1),
        row(
            "on", 1, 1, answer((0.5, 2.0), (1.0, 3.0), drafted=4, accepted=3, passes=2, reused_blocks=0), planned_s=2.0
        ),
        row("on", 1, 2, Answer(0.0, 9.0, error="refused", message="too many requests"), planned_s=2.5),
    ]
    # All clients were busy for 2.5 s; the second answer's last block comes at 3 s.
    (cell,) = cells(result(rows, slices=(Slice(ONE, "on", 1, 2.5),)))
    assert (cell.requests, cell.answered, cell.errors, cell.tokens) == (3, 2, {"refused": 1}, 10.0)
    assert cell.tokens_per_second == (pytest.approx(7 / 2.5),)
    assert cell.requests_per_second == (pytest.approx(7 / 2.5 / 5),)
    assert cell.first and cell.first.p50 == pytest.approx(0.75) and cell.first.p90 == pytest.approx(0.95)
    assert cell.between and cell.between.p50 == pytest.approx(0.25)
    assert cell.whole and cell.whole.p99 == pytest.approx(1.99)
    assert (cell.acceptance_rate, cell.acceptance_length) == (0.5, 2.5)
    assert (cell.repeated, cell.reused, cell.reused_blocks) == (1, 1, 1.0)


def test_what_is_not_known_is_none() -> None:
    (cell,) = cells(result([row("on", 1, 0, answer((1.0, 3.0)))]))
    assert (cell.between, cell.acceptance_rate, cell.acceptance_length, cell.reused) == (None, None, None, None)


def test_ratio_of_answers_that_are_all_alike_is_exact() -> None:
    rows = steady({"on": 1.0, "off": 4.0})
    on, off = ([each for each in rows if each.arm == arm] for arm in ("on", "off"))
    for kind, value in ((WHOLE, 5 / 2), (DECODING, 4.0)):
        found = ratio(on, off, kind)
        assert found is not None
        assert (found.value, found.low, found.high, found.rounds) == (*[pytest.approx(value)] * 3, 2)


def test_what_prompts_differ_by_cancels_out() -> None:
    """One prompt takes 20 times as long as another, always half as long with drafts: the interval has no width."""
    rows = [
        row(arm, number, index, answer((took * share, 5.0)))
        for number in (1, 2)
        for arm, share in (("on", 0.5), ("off", 1.0))
        for index, took in enumerate((1.0, 20.0, 3.0))
    ]
    found = ratio(rows_of(rows, "on"), rows_of(rows, "off"), WHOLE)
    assert found and (found.low, found.high) == (pytest.approx(2.0), pytest.approx(2.0))
    turned = [replace(each, index=(each.index + 1) % 3) for each in rows_of(rows, "off")]
    apart = ratio(rows_of(rows, "on"), turned, WHOLE)
    assert apart and apart.value == pytest.approx(2.0) and apart.high > 3


def test_intervals_hold_what_they_promise() -> None:
    """Rounds and prompts both scatter; the true ratio lies inside in about 95 of 100 load tests."""
    random, inside, tests = np.random.default_rng(3), 0, 60
    for _ in range(tests):
        rows = [
            row(arm, number, index, answer((scale * noise * random.lognormal(0, 0.2), 5.0)))
            for number in range(1, 9)
            for arm, scale in (("on", 1.0), ("off", 1.6))
            for noise in [random.lognormal(0, 0.1)]
            for index in range(6)
        ]
        found = ratio(rows_of(rows, "on"), rows_of(rows, "off"), WHOLE)
        assert found is not None
        inside += found.low <= 1.6 <= found.high
    assert 0.83 * tests <= inside <= tests


def rows_of(rows: list[Row], arm: str) -> list[Row]:
    return [each for each in rows if each.arm == arm]


def test_failed_requests_count_for_nothing() -> None:
    rows = steady({"on": 1.0, "off": 4.0})
    broken = [
        *rows,
        row("on", 1, 2, Answer(0.0, 100.0, error="error")),
        row("off", 1, 2, answer((1.0, 1.0), (5.0, 4.0))),
    ]
    found = ratio(rows_of(broken, "on"), rows_of(broken, "off"), WHOLE)
    assert found and found.value == pytest.approx(2.5)


@pytest.mark.parametrize("kind", [WHOLE, DECODING])
def test_nothing_to_compare_is_no_ratio(kind: str) -> None:
    silent = [row("on", 1, 0, Answer(0.0, 1.0, error="error"))]
    other = [row("off", 1, 0, answer((1.0, 1.0), (2.0, 1.0)))]
    assert ratio(silent, other, kind) is None and ratio(other, silent, kind) is None and ratio([], other, kind) is None


def test_one_block_an_answer_has_no_decoding_speed() -> None:
    rows = [row(arm, 1, 0, answer((1.0, 5.0))) for arm in ("on", "off")]
    (each,) = beside_arms(result(rows))
    assert each.whole and each.decoding is None


def test_arms_stand_beside_plain_decoding_or_the_first() -> None:
    found = beside_arms(result(steady({"on": 1.0, "off": 4.0}) + steady({"on": 3.0, "off": 1.0}, load=FOUR)))
    assert [(each.load, each.arm, each.base) for each in found] == [(ONE, "on", "off"), (FOUR, "on", "off")]
    assert [round(each.whole.value, 2) for each in found if each.whole] == [2.5, 0.5]
    settings = SETTINGS | {"arms": ["default", "adaptive"]}
    (each,) = beside_arms(result(steady({"default": 1.0, "adaptive": 4.0}), settings=settings))
    assert (each.arm, each.base) == ("adaptive", "default")


def test_an_old_load_test_stands_beside_the_new_one() -> None:
    new, old = result(steady({"on": 1.0, "off": 4.0})), result(steady({"on": 3.0, "off": 4.0}, rounds=3))
    check_old(new.settings, old, "old.json")
    found = {each.arm: each for each in beside_old(new, old)}
    assert found["on"].whole and found["on"].whole.value == pytest.approx(2.0)
    assert found["off"].whole and found["off"].whole.value == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_tokens": 64}, "max_tokens: 64, now 8"),
        ({"temperature": 0.7}, "temperature: 0.7, now 0.0"),
        ({"unique": True}, "unique: true, now false"),
        ({"seconds": 3.0}, "seconds: 3.0, now null"),
        ({"requests": 9}, "requests: 9, now null"),
        ({"prompts": {"file": "p.jsonl", "number": 3, "digest": "d2"}}, 'digest: "d2", now "d1"'),
    ],
)
def test_other_settings_cannot_be_compared_and_are_named(changes: dict[str, Any], named: str) -> None:
    old = result(steady({"on": 1.0}), settings=SETTINGS | changes)
    with pytest.raises(TrtspecError, match=re.escape(named)):
        check_old(SETTINGS, old, "old.json")


def test_settings_that_only_make_it_more_precise_may_differ() -> None:
    changes = {"rounds": 9, "warmup": 3, "seed": 5, "num_draft_tokens": 2}
    old = result(steady({"on": 1.0}), settings=SETTINGS | changes)
    check_old(SETTINGS, old, "old.json")
    assert any("num_draft_tokens of on: 2, now 4" in note for note in Report(result(steady({"on": 1.0})), old).notes)


def test_nothing_in_common_cannot_be_compared() -> None:
    old = result(steady({"on": 1.0}, load=FOUR))
    with pytest.raises(
        TrtspecError, match="no arm and load in common: on, off at 4 clients; this run has on, off at 1 c"
    ):
        check_old(SETTINGS, old, "old.json")


FACTORS = Factors(2.5, 600.0, 1000.0)
PLAN = [
    Planned(1, 4, 3.6, 3.4, 3.8, FACTORS),
    Planned(1, 2, 2.0, 2.0, 2.0, FACTORS),
    Planned(4, 4, 1.5, 1.5, 1.5, FACTORS),
]


def test_a_plan_is_held_against_decoding() -> None:
    (found,) = beside_plan(result(steady({"on": 1.0, "off": 4.0})), PLAN)
    assert found.planned.speed_up == 3.6 and found.measured.value == pytest.approx(4.0)
    assert found.deviation == pytest.approx(-0.1)
    assert found.factors is None  # nobody has said how many passes there were


def test_the_factors_of_a_measured_speed_up() -> None:
    """By hand: 4 tokens in 2 passes of 500 ms, plain a token a second; the first block and errors count for nothing."""
    rows = steady({"on": 1.0, "off": 4.0})
    made = result([replace(each, answer=replace(each.answer, passes=3)) for each in rows if each.arm == "on"])
    failed = row("on", 1, 7, answer((1.0, 1.0), (9.0, 4.0), passes=99, error="refused"))
    on, off = [*made.rows, failed], [each for each in rows if each.arm == "off"]
    factors = Factors.measured(on, off)
    assert factors == Factors(pytest.approx(2.0), pytest.approx(500.0), pytest.approx(1000.0))  # type: ignore[arg-type]
    decoding = ratio(made.rows, off, DECODING)
    assert factors and decoding
    assert decoding.value == pytest.approx(factors.tokens_per_pass * factors.plain_ms / factors.cycle_ms)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ["on"]}, "on over off"),
        ({"loads": [{"kind": CONCURRENCY, "value": 8}]}, "plans no batch size that is measured"),
        ({"loads": [{"kind": RATE, "value": 1}]}, "plans no batch size that is measured"),
        ({"num_draft_tokens": 3}, "with 3 draft tokens|with 3"),
    ],
)
def test_a_plan_of_something_else_is_refused(changes: dict[str, Any], message: str) -> None:
    check_plan(SETTINGS, PLAN, "plan.json")
    with pytest.raises(TrtspecError, match=message):
        check_plan(SETTINGS | changes, PLAN, "plan.json")


def test_a_plan_is_read_as_the_planner_writes_it(tmp_path: Path) -> None:
    point = Point(2, 4, 2.5, (2.4, 2.6), 30.0, 20.0, 1.7, (1.6, 1.8), 160.0, 12.0, 90.0)
    method = asdict(MethodPlan("draft_target", "a draft model", points=(point,)))
    (tmp_path / "plan.json").write_text(json.dumps({"methods": [method]}))
    assert read_plan(tmp_path / "plan.json") == [Planned(2, 4, 1.7, 1.6, 1.8, Factors(2.5, 30.0, 20.0))]


@pytest.mark.parametrize("text", ["", "[]", '{"methods": []}', '{"methods": [{"points": [{"batch": 1}]}]}', "\xff"])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text, encoding="latin-1")
    with pytest.raises(TrtspecError, match=r"plan.json: is no plan; expected what `trtspec plan --json` writes"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(TrtspecError, match="no such plan"):
        read_plan(tmp_path / "nothing.json")


def test_json_is_read_back_whole(tmp_path: Path) -> None:
    made = result(steady({"on": 0.25, "off": 4.0}), notes=("n",))
    path = tmp_path / "r.json"
    path.write_text(to_json(made, headline="h"))
    assert read(path) == made
    assert json.loads(path.read_text())["headline"] == "h"


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version": 1, "slices": []}', '{"version": 9, "slices": []}'])
def test_other_json_is_no_load_test(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(TrtspecError, match=r"r\.json: (cannot be read as JSON|is no load test|is damaged)"):
        read(tmp_path / "r.json")
    with pytest.raises(TrtspecError, match="no such file"):
        read(tmp_path / "other.json")


def test_csv_has_a_line_a_request() -> None:
    rows = [
        row("on", 1, 0, answer((1.0, 1.0), (2.0, 4.0), drafted=8, accepted=3, passes=2, finish="stop"), category="a,b"),
        row("off", 1, 0, Answer(0.5, 9.0, error="timed out", message='no "answer"')),
    ]
    first, second = csv.DictReader(io.StringIO(to_csv(result(rows))))
    assert (first["arm"], first["category"], first["first_token_s"], first["tokens"]) == ("on", "a,b", "1.0", "5.0")
    assert (first["drafted"], first["accepted"], first["target_passes"], first["finish"]) == ("8", "3", "2", "stop")
    assert (second["error"], second["message"], second["first_token_s"]) == ("timed out", 'no "answer"', "")


def report(**changes: Any) -> Report:
    rows = steady({"on": 1.0, "off": 4.0}) + steady({"on": 6.0, "off": 2.0}, load=FOUR)
    made = result(rows)
    return replace(Report(made, result(steady({"on": 2.0, "off": 4.0})), "old.json", PLAN, "plan.json"), **changes)


def test_headline_says_whether_it_pays_and_until_when() -> None:
    assert report().headline == (
        "It pays: 2.50 (2.50 to 2.50) times as fast with drafts at 1 client; slower than without from 4 clients on."
    )
    never = Report(result(steady({"on": 4.0, "off": 1.0})))
    assert never.headline == "It is slower: 0.40 (0.40 to 0.40) times as fast with drafts at 1 client."
    alone = Report(result(steady({"on": 4.0})))
    assert alone.headline == "2.0 tokens/s at 1 client (on)."


def test_a_plan_is_judged_where_it_is_most_off() -> None:
    assert report().about_plan == (
        "The plan is off by +350.0% at most: while decoding at 4 clients it said 1.50 times as fast, and measured are "
        "0.33 (0.33 to 0.33)."
    )
    assert report(plan=PLAN[:1]).about_plan == (
        "The plan is off by -10.0%: while decoding at 1 client it said 3.60 times as fast, and measured are "
        "4.00 (4.00 to 4.00)."
    )
    assert report(plan=()).about_plan is None


def test_lines_have_every_comparison() -> None:
    text = "\n".join(serve_report.lines(report()))
    assert "1 client, on against off: 2.50 (2.50 to 2.50) times as fast, 4.00 (4.00 to 4.00) while decoding" in text
    assert "1 client, on, against old.json: 1.50 (1.50 to 1.50) times as fast, 2.00 (2.00 to 2.00)" in text
    assert (
        "1 client, planned 3.60 (3.40 to 3.80), measured 4.00 (4.00 to 4.00) while decoding: deviation -10.0%" in text
    )
    assert "4 clients, off: " in text and "KV cache reused: not known" in text


def test_a_server_that_falls_behind_is_named() -> None:
    load = Load(RATE, 5.0)
    made = Report(result(steady({"on": 1.0}, load=load)))
    assert any(note.startswith("5 requests/s, on: only 1 requests/s were answered") for note in made.notes)
    assert not any("pile up" in note for note in Report(result(steady({"on": 1.0}))).notes)


def test_one_round_says_what_its_intervals_do_not_know() -> None:
    assert any("no noise between rounds" in n for n in Report(result(steady({"on": 1.0, "off": 2.0}, rounds=1))).notes)
    assert not any("no noise between rounds" in note for note in report().notes)


def test_table_fits_80_columns() -> None:
    slow = [
        replace(each, load=Load(RATE, 12.5), arm=arm, answer=answer((1.2345, 1.0), (16.5, 4.0), accepted=3, passes=2))
        for each in steady({"on": 1.0})
        for arm in ("off", "adaptive")
    ]
    settings = SETTINGS | {"arms": ["off", "adaptive"]}
    quick = [replace(each, load=ONE, answer=answer((0.0123, 1.0), (0.0761, 4.0))) for each in slow]
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(serve_report.table(Report(result([*quick, *slow], settings=settings))))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    for shown in (
        "12.5 requests/s",
        "adaptive",
        "12.3/12.3",
        "0.08/0.08",
        "1234/1234",
        "16.5/16.5",
        "3816/3816",
        "times",
    ):
        assert shown in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
def test_page_stands_alone_and_says_it_all() -> None:
    made = report(result=replace(report().result, notes=("<b>careful</b>",)))
    page = to_html(made)
    assert made.headline in page and "&lt;b&gt;careful" in page and "<b>careful" not in page
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids)) > 0
    assert not re.search(r'(src|href)="(?!#|data:)', page.replace("http://www.w3.org", ""))
    for title in ("Throughput", "Speed-up", "Time to first token", "Spread of the time between tokens, 4 clients"):
        assert f"<h3>{title}</h3>" in page
    assert page.count('role="img"') == 6 and "-10.0 %" in page and "old.json" in page
    assert page == to_html(made)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
def test_one_load_has_no_curves_over_loads() -> None:
    page = to_html(Report(result(steady({"on": 1.0, "off": 2.0}))))
    assert page.count('role="img"') == 1 and "Throughput" not in page


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
@pytest.mark.parametrize(("passes", "shown"), [(3, "2.50 / 2.00"), (0, "2.50 / -")])
def test_page_says_what_a_plan_that_is_off_has_wrong(passes: int, shown: str) -> None:
    rows = [replace(each, answer=replace(each.answer, passes=passes)) for each in steady({"on": 1.0, "off": 4.0})]
    page = to_html(Report(result(rows), plan=PLAN, plan_name="plan.json"))
    cells = {" ".join(cell.split()) for cell in re.findall(r'data-label="Tokens a pass">(.*?)</td>', page, re.DOTALL)}
    assert cells == {shown}
