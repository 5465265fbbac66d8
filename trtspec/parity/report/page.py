"""The report as one self-contained HTML page: verdict and faults first, then each check with its evidence and plots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trtspec.parity.report.advice import advice, advice_undecided
from trtspec.parity.report.plots import plots
from trtspec.parity.report.text import headline, outcome, shown
from trtspec.parity.result import Check, Finding, Report, Verdict
from trtspec.report.page import render

_CLASSES: Mapping[Verdict, str] = {
    Verdict.PASS: "good",
    Verdict.TIE: "good",
    Verdict.FAULT: "bad",
    Verdict.INCONCLUSIVE: "open",
    Verdict.NOT_APPLICABLE: "none",
}


@dataclass(frozen=True)
class _Kind:
    """Findings of one check, and of one part of it, that ask for the same.

    Attributes:
        part, verdict: theirs.
        advice: what to do next.
        findings: at least one, in order of appearance.
    """

    part: str | None
    verdict: Verdict
    advice: str
    findings: list[Finding] = field(default_factory=list)


def to_html(report: Report) -> str:
    """The page.

    Raises:
        TrtspecError: matplotlib is not installed.
    """
    checks = [
        (number, check, _kinds(check), list(plots(check, report.settings, f"c{number}")))
        for number, check in enumerate(report.checks, 1)
    ]
    return render(
        Path(__file__).with_name("page.html.j2"),
        report=report,
        checks=checks,
        headline=headline(report),
        outcome=outcome(report),
        classes=_CLASSES,
        advice_undecided=advice_undecided,
        shown=shown,
    )


def _kinds(check: Check) -> list[_Kind]:
    """The findings that something has to be done about, by what that is."""
    kinds: dict[tuple[str | None, Verdict, str], _Kind] = {}
    for finding in check.findings:
        if not finding.verdict.passes:
            key = (finding.part, finding.verdict, advice(check, finding))
            kinds.setdefault(key, _Kind(*key)).findings.append(finding)
    return list(kinds.values())
