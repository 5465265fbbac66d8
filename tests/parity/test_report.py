"""What a reader of a report sees."""

from __future__ import annotations

import io
import json
import math

import pytest

from trtspec.parity.report import check_line, finding_lines, summary_line, table, to_json
from trtspec.parity.result import Check, Choice, Finding, Report, Verdict, worst
from trtspec.parity.statistics import Evidence

TIE = Finding(7, 3, Verdict.TIE, "another token", "run 7", Choice(5, "x", 4.999), Choice(6, "\n", 5.0))
FAULT = Finding(9, 0, Verdict.FAULT, "stops early", "run 9", Choice(99, "", -math.inf), Choice(6, "y", 5.0))
LAW = Finding(None, None, Verdict.FAULT, "bonus tokens: too many", "run all")


def check(name: str, verdict: Verdict, *findings: Finding) -> Check:
    statistics = (Evidence("all", 10, 0.5, 0.25, "words"),)
    return Check(name, "engines", "it is so", verdict, "10 tokens compared", findings, statistics, 1.25)


def report(*checks: Check) -> Report:
    return Report("demo", checks, {"seed": 0})


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([Verdict.PASS, Verdict.TIE], Verdict.TIE),
        ([Verdict.TIE, Verdict.INCONCLUSIVE, Verdict.PASS], Verdict.INCONCLUSIVE),
        ([Verdict.INCONCLUSIVE, Verdict.FAULT], Verdict.FAULT),
        ([Verdict.NOT_APPLICABLE, Verdict.PASS], Verdict.PASS),
        ([Verdict.NOT_APPLICABLE], Verdict.NOT_APPLICABLE),
        ([], Verdict.NOT_APPLICABLE),
    ],
)
def test_the_worst_verdict_counts(verdicts: list[Verdict], expected: Verdict) -> None:
    assert worst(verdicts) == expected


def test_plain_lines() -> None:
    made = check("greedy", Verdict.FAULT, TIE, FAULT, LAW)
    assert check_line(made) == "engines, greedy: fault in 1.2 s: 10 tokens compared"
    assert finding_lines(made) == [
        "engines, greedy: tie: prompt 7, token 3: another token; took 5 'x' (logit 4.9990), reference 6 '\\n' "
        "(logit 5.0000)",
        "  reproduce: run 7",
        "engines, greedy: fault: prompt 9, token 0: stops early; took 99 '' (logit -inf), reference 6 'y' "
        "(logit 5.0000)",
        "  reproduce: run 9",
        "engines, greedy: fault: bonus tokens: too many",
        "  reproduce: run all",
    ]


def test_the_summary_counts_verdicts_and_ties() -> None:
    made = report(check("greedy", Verdict.TIE, TIE), check("sampled", Verdict.PASS))
    assert not made.failed
    assert summary_line(made) == "parity of demo: tie (1 pass, 1 tie); 1 rounding tie, listed above"
    made = report(check("greedy", Verdict.FAULT, TIE, TIE, FAULT))
    assert made.failed
    assert summary_line(made) == "parity of demo: fault (1 fault); 2 rounding ties, listed above"


def test_json_holds_everything_and_is_valid() -> None:
    text = to_json(report(check("greedy", Verdict.FAULT, FAULT)))
    assert "\n" not in text
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (found,) = content["checks"]
    assert (content["verdict"], found["verdict"], found["hypothesis"]) == ("fault", "fault", "it is so")
    assert found["findings"][0]["chosen"] == {"id": 99, "text": "", "logit": None}
    assert found["statistics"][0]["p_value"] == 0.25


def test_the_table_shows_every_check() -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=160)
    console.print(table(report(check("greedy", Verdict.TIE, TIE), check("draws", Verdict.INCONCLUSIVE))))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(words in shown for words in ("greedy", "tie", "draws", "inconclusive", "it is so", "10 tokens"))
