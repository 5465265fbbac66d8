"""What a reader of a report sees."""

from __future__ import annotations

import io
import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml

from trtspec.errors import TrtspecError
from trtspec.parity.checks import CHECKS
from trtspec.parity.report import FORMS, check_path, write
from trtspec.parity.report import advice as advice_module
from trtspec.parity.report.advice import advice
from trtspec.parity.report.text import check_line, finding_lines, summary_line, table, to_json
from trtspec.parity.result import Check, Choice, Finding, Part, Report, Verdict, worst
from trtspec.parity.statistics import Evidence

TIE = Finding(7, 3, Verdict.TIE, "another token", "run 7", Choice(5, "x", 4.999), Choice(6, "\n", 5.0))
FAULT = Finding(9, 0, Verdict.FAULT, "stops early", "run 9", Choice(99, "", -math.inf), Choice(6, "y", 5.0))
LAW = Finding(None, None, Verdict.FAULT, "bonus tokens: too many", "run all")


def check(name: str, verdict: Verdict, *findings: Finding) -> Check:
    statistics = (Evidence("all", 10, 0.5, 0.25, "words"),)
    return Check(name, "engines", "it is so", verdict, "10 tokens compared", findings, statistics, seconds=1.25)


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
        f"  next: {advice(made, FAULT)}",
        "  reproduce: run 9",
        "engines, greedy: fault: bonus tokens: too many",
        f"  next: {advice(made, LAW)}",
        "  reproduce: run all",
    ]
    assert advice(made, FAULT).startswith("Compare the end ids")
    assert advice(made, LAW).startswith("Replay the one prompt")
    assert advice(made, TIE) == ""


def test_every_check_has_advice_that_its_findings_can_reach() -> None:
    rows = yaml.safe_load(Path(advice_module.__file__).with_suffix(".yaml").read_text())
    assert {row["check"] for row in rows} >= set(CHECKS)
    for name in CHECKS:
        assert advice(check(name, Verdict.FAULT), LAW), name


def test_the_summary_counts_verdicts_and_ties() -> None:
    made = report(check("greedy", Verdict.TIE, TIE), check("sampled", Verdict.PASS))
    assert not made.failed
    assert summary_line(made) == "parity of demo: tie (1 pass, 1 tie; 1 rounding tie, listed)"
    made = report(check("greedy", Verdict.FAULT, TIE, TIE, FAULT))
    assert made.failed
    assert summary_line(made) == "parity of demo: fault (1 fault; 2 rounding ties, listed)"


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


def with_parts() -> Report:
    """A report with everything in it that a page or a machine could stumble over."""
    lost = replace(FAULT, problem="<b>& a \x00 character", part="stop-words", prompt=2, reproduce="sh -c 'exit 3'")
    parts = (
        Part("stop-words", "it stops", Verdict.FAULT, "1 of 2"),
        Part("utf-8", "whole characters", Verdict.NOT_APPLICABLE, "no such text"),
        Part("penalties", "they count", Verdict.PASS, "3 of 3"),
    )
    rules = replace(check("rules", Verdict.FAULT, lost), parts=parts, statistics=())
    greedy = replace(
        check("greedy", Verdict.TIE, TIE),
        data={"prompts": [7], "regrets": [[0.0, 0.001, 0.0]], "accepted_per_place": [3, 2, 1]},
    )
    histogram = {"by odds, all tokens": [30] + [3] * 19, "by id, bonus tokens": [0] * 20, "acceptance by place": []}
    law = replace(check("sampled", Verdict.FAULT, LAW), data=histogram, detectable=0.25)
    return report(greedy, law, rules, check("draws", Verdict.INCONCLUSIVE))


def test_junit_has_a_case_for_each_part() -> None:
    """A fault fails; what is inconclusive or not applicable is skipped with its reason; a tie passes."""
    text = (FORMS[".xml"])(with_parts())
    cases = {case.get("name"): case for case in ET.fromstring(text).iter("testcase")}
    assert list(cases) == ["greedy", "sampled", "rules:stop-words", "rules:utf-8", "rules:penalties", "draws"]
    outcome = {name: [child.tag for child in case] for name, case in cases.items()}
    assert outcome == {
        "greedy": ["system-out"],
        "sampled": ["failure"],
        "rules:stop-words": ["failure"],
        "rules:utf-8": ["skipped"],
        "rules:penalties": ["system-out"],
        "draws": ["skipped"],
    }
    assert "<b>& a \ufffd character" in str(cases["rules:stop-words"][0].text)
    suite = next(ET.fromstring(text).iter("testsuite"))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("6", "2", "2")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
def test_the_page_is_self_contained_and_says_what_to_do() -> None:
    page = FORMS[".html"](with_parts())
    assert page.count("<svg") == 3  # two of greedy, one histogram: the other has no tokens
    for address in ("http://", "https://", "src=", "url("):
        outside = [line for line in page.splitlines() if address in line and "www.w3.org" not in line]
        assert not [line for line in outside if "url(#" not in line and "purl.org" not in line], address
    assert "&lt;b&gt;&amp; a" in page and "<b>& a" not in page
    for words in ("Fault: the output is not", "What to do next", "penalties", "0.25 (total variation)", "no such text"):
        assert words in page
    assert page == FORMS[".html"](with_parts())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
def test_a_folder_has_all_forms_and_a_script_for_each_fault(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    write(with_parts(), folder)
    assert {path.name for path in folder.iterdir()} == {"report.json", "report.xml", "report.html", "reproduce"}
    scripts = sorted((folder / "reproduce").iterdir())
    assert [script.name for script in scripts] == ["01-engines-sampled.sh", "02-engines-rules-stop-words-prompt-2.sh"]
    assert subprocess.run([scripts[1]], check=False).returncode == 3  # what the finding's command returns
    assert "# <b>& a" in scripts[1].read_text()

    write(report(check("greedy", Verdict.PASS)), folder)
    assert not list((folder / "reproduce").iterdir())


@pytest.mark.parametrize("name", ["report.pdf", "nowhere/report.html", "file/report"])
def test_a_place_that_no_report_fits_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrtspecError):
        check_path(tmp_path / name)
