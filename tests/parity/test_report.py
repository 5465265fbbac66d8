"""What a reader of a report sees."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml
from parity_doubles import trial
from parity_zoo import Sampler

from trtspec.decoding.sampling import GREEDY
from trtspec.errors import TrtspecError
from trtspec.parity import sampled, statistics
from trtspec.parity.checkpoint import CHECKPOINT_CHECKS
from trtspec.parity.checks import CHECKS
from trtspec.parity.report import FORMS, check_path, write
from trtspec.parity.report import advice as advice_module
from trtspec.parity.report.advice import advice, advice_undecided
from trtspec.parity.report.text import (
    check_line,
    finding_lines,
    part_lines,
    summary_line,
    table,
    to_json,
    wrapped,
)
from trtspec.parity.result import Check, Choice, Finding, Part, Report, Verdict, worst
from trtspec.parity.statistics import Evidence
from trtspec.parity.subjects import Answer

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


def own_advice(name: str, problem: str, part: str | None = None) -> str:
    """What is advised about one kind of problem; empty where only what is said of the whole check fits."""
    said = advice(check(name, Verdict.FAULT), replace(LAW, part=part, problem=problem))
    return "" if said in [row["advice"] for row in advice_module._rows() if not {"part", "when"} & set(row)] else said


def test_every_part_has_advice_of_its_own() -> None:
    parts = [(name, part) for name, kind in CHECKS.items() for part in kind.parts]
    assert [(name, part) for name, part in parts if not own_advice(name, "something", part)] == []
    assert [name for name in CHECKPOINT_CHECKS if not advice(check(name, Verdict.FAULT), LAW)] == []


def test_every_statistical_deviation_has_advice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words are those that the tests of the battery are given, or give."""
    words: set[str] = set()

    def recording(test: Callable[..., Evidence]) -> Callable[..., Evidence]:
        def recorded(*given: object) -> Evidence:
            result = test(*given)
            words.update(given[-1] if isinstance(given[-1], (tuple, list)) else (), [result.words])
            return result

        return recorded

    for name, test in vars(statistics).copy().items():
        if getattr(test, "__annotations__", {}).get("return") == "Evidence":
            monkeypatch.setattr(statistics, name, recording(test))
    stream, _ = sampled.collect(trial(num_samples=20), Sampler())
    sampled.judge(stream, 2)
    words -= {"no token", "no pair", "too little that could differ"}
    assert len(words) > 15
    assert [each for each in sorted(words) if not own_advice("sampled", f"a test: {each} (statistic 1)")] == []


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_every_misshapen_answer_has_advice_of_its_own(name: str) -> None:
    made = trial()
    query = made.query(made.cases[0], GREEDY, 0, max_tokens=3)
    answers = (
        Answer(((1, 0),), "ba", "stop"),
        Answer(((1, 2, 3, 4),), "bcde", "length"),
        Answer(((1,),), "b", "length"),
        Answer(((1,),), "b", "cancelled"),
        Answer(((1, 2),), "bb", "stop"),
    )
    problems = [wrong[1] for answer in answers if (wrong := made.misshapen(query, answer))]
    assert len(problems) == len(answers)
    assert [problem for problem in [*problems, "refused: no"] if not own_advice(name, problem)] == []


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ("logits of shape [3, 9] for 6 tokens of 9 ids: half as long, as 16-bit numbers read as float32 are", "type"),
        ("logits of shape [9, 9] for 6 tokens of 9 ids: +3 rows", "shape"),
        ("logits of shape [9, 9] for 6 tokens of 9 ids: the rows of the prompt's 4 tokens are included", "positions"),
        ("logits of shape [6, 8] for 6 tokens of 9 ids: 1 ids are missing", "shape"),
        ("no logits came, though they were asked for", "gather_generation_logits"),
        ("all 6 rows are equal", "copied"),
        ("12 % of the values are absurd (not a number, or beyond 99)", "type"),
        ("KL 1 (budget 0.1); 80 rows: each row is that of the token 1 before its own", "positions"),
        ("KL 1 (budget 0.1); 80 rows: scaled by 2, as by a temperature of 0.5, nobody asked for", "raw logits"),
        ("KL 1 (budget 0.1); 80 rows: no known trap explains it", "No known trap"),
    ],
)
def test_advice_about_logits_follows_the_trap(problem: str, words: str) -> None:
    assert words in own_advice("logits", problem, "generation-logits")


def test_what_is_undecided_has_advice() -> None:
    undecided = [("greedy", None), ("sampled", None), ("draws", None), ("logits", "generation-logits")]
    undecided += [("invariances", "same-seed"), ("invariances", "other-seed")]
    undecided += [("rules", "penalties"), ("degenerate", "acceptance")]
    for name, part in undecided:
        made = check(name, Verdict.INCONCLUSIVE)
        assert advice_undecided(made, part and Part(part, "", Verdict.INCONCLUSIVE, "")), (name, part)  # type: ignore[arg-type]
        assert not advice_undecided(replace(made, verdict=Verdict.PASS))
    seeds = Part("same-seed", "it repeats", Verdict.INCONCLUSIVE, "16 pairs")
    assert part_lines(replace(check("invariances", Verdict.PASS), parts=(seeds,))) == [
        "  invariances:same-seed: inconclusive: 16 pairs",
        f"    next: {advice_undecided(check('invariances', Verdict.INCONCLUSIVE), seeds)}",
    ]


def test_advice_is_said_once_for_differences_of_one_kind() -> None:
    """And what would steer a terminal is not printed."""
    wild = replace(LAW, problem="bonus\x1b[31m\ntokens")
    lines = finding_lines(check("greedy", Verdict.FAULT, FAULT, replace(FAULT, reproduce=""), wild))
    assert [line.split(":")[0] for line in lines if line.startswith(" ")] == [
        *("  next", "  reproduce"),
        *("  next", "  reproduce"),
    ]
    assert lines[-3] == "engines, greedy: fault: bonus\ufffd[31m tokens"


def test_the_terminal_report_fits_80_columns() -> None:
    """A table without a word cut off, and lines that are wrapped, but for commands, which are copied."""
    from rich.console import Console

    command = (
        "trtspec parity my.yaml --subject engines --check greedy --prompt 9 " + "--set output.engines=elsewhere " * 3
    )
    long = replace(FAULT, problem="another token, " * 12, reproduce=command, part="generation-logits")
    parts = (
        Part("generation-logits", "they are the reference's", Verdict.FAULT, "80 rows " * 9),
        Part("log-probs", "they are, too", Verdict.NOT_APPLICABLE, "none"),
        Part("other", "it is fine", Verdict.PASS, "so it is"),
    )
    made = report(
        replace(check("logits", Verdict.FAULT, long), parts=parts), check("invariances", Verdict.INCONCLUSIVE)
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(table(made))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= 80
    assert "\u2026" not in shown and "generation-logits" in shown and "not applicable" in " ".join(shown.split())
    assert "it is fine" not in shown

    plain = finding_lines(made.checks[0])
    lines = wrapped(plain, 80)
    assert [line for line in lines if len(line) > 80] == [f"  reproduce: {command}"]
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(plain).split())
    assert all(line.startswith(("engines, ", "  next", "  reproduce", "    ")) for line in lines)


def test_the_summary_says_what_would_be_seen_in_each_subject() -> None:
    """In the one that was looked at least; nothing if there is a fault."""
    coarse, fine = (replace(check("sampled", Verdict.PASS), detectable=seen) for seen in (0.4, 0.1))
    assert "variation of 0.10" in summary_line(report(coarse, fine))
    assert "variation of 0.40" in summary_line(report(fine, replace(coarse, subject="server")))
    assert "variation" not in summary_line(report(fine, check("greedy", Verdict.FAULT, FAULT)))


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


class Page(HTMLParser):
    """The ids, links and attributes of a page; every element has to be closed where it should be."""

    VOID = ("meta", "link", "br", "use")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [] if tag in self.VOID else [tag]
        self.ids.update(value for name, value in attrs if name == "id" and value)
        self.links += [value for name, value in attrs if name in ("href", "xlink:href", "src") and value]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open = self.open[:-1] if tag not in self.VOID else self.open

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self.open.pop() == tag


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
def test_the_page_begins_with_what_failed() -> None:
    """Each fault is named with its first difference, and linked; every id is there once, also those of plots."""
    made = with_parts()
    wrong = replace(FAULT, chosen=Choice(5, " the", 4.0))
    bins = {"first tokens, prompt 3": [[30.0, 28.5], [10.0, 11.5]]}
    draws = replace(check("draws", Verdict.INCONCLUSIVE), data=bins)
    page = FORMS[".html"](replace(made, checks=(check("greedy", Verdict.FAULT, wrong, wrong), *made.checks, draws)))
    top = page[page.index("What failed") : page.index("<h2>Checks")]
    for words in ("engines, greedy</a>", "stops early", "Prompt 9, token 0", "5 &#39; the&#39;", "rules:stop-words"):
        assert words in top
    assert "The first of 2 differences" in top and "1 more like this" in page
    assert page.count("<svg") == 4 and "\x00" not in page and "<metadata" not in page
    assert advice_undecided(draws) in page

    parsed = Page(page)
    assert [name for name, number in parsed.ids.items() if number > 1] == []
    assert {link[1:] for link in parsed.links if link != "data:,"} <= set(parsed.ids)
    assert "What failed" not in FORMS[".html"](report(check("greedy", Verdict.PASS)))


def test_without_matplotlib_a_page_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("report.html", "report"):
        with pytest.raises(TrtspecError, match=r"matplotlib, which is not installed; pip install 'trtspec\[plots\]'"):
            check_path(tmp_path / name)
    for name in ("report.json", "report.xml"):
        check_path(tmp_path / name)


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
