"""A parity report as text: plain lines, a table for terminals, JSON.

Knows records, not how they came about.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from trtspec.parity.result import Check, Choice, Report, Verdict

if TYPE_CHECKING:
    from rich.table import Table

_COLOURS = {
    Verdict.PASS: "green",
    Verdict.TIE: "green",
    Verdict.FAULT: "bold red",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.NOT_APPLICABLE: "dim",
}


def check_line(check: Check) -> str:
    """One check in one line."""
    return f"{check.subject}, {check.name}: {check.verdict.value} in {check.seconds:.1f} s: {check.evidence}"


def finding_lines(check: Check) -> list[str]:
    """Each difference of a check: where, what, and how to see it again."""
    lines = []
    for finding in check.findings:
        where = "" if finding.prompt is None else f" prompt {finding.prompt}, token {finding.position}:"
        tokens = f"; took {_shown(finding.chosen)}, reference {_shown(finding.expected)}" if finding.chosen else ""
        lines.append(f"{check.subject}, {check.name}: {finding.verdict.value}:{where} {finding.problem}{tokens}")
        lines.append(f"  reproduce: {finding.reproduce}")
    return lines


def summary_line(report: Report) -> str:
    """The verdict of the whole run."""
    counts = {verdict: sum(check.verdict == verdict for check in report.checks) for verdict in Verdict}
    parts = [f"{number} {verdict.value}" for verdict, number in counts.items() if number]
    ties = sum(finding.verdict == Verdict.TIE for check in report.checks for finding in check.findings)
    note = f"; {ties} rounding tie{'s' * (ties > 1)}, listed above" if ties else ""
    return f"parity of {report.name}: {report.verdict.value} ({', '.join(parts)}){note}"


def table(report: Report) -> Table:
    """The checks for a terminal."""
    from rich.table import Table
    from rich.text import Text

    result = Table(title=f"parity of {report.name}", title_justify="left")
    for heading in ("subject", "check", "verdict", "evidence", "s"):
        result.add_column(heading, justify="right" if heading == "s" else "left")
    for check in report.checks:
        result.add_row(
            check.subject,
            Text.assemble(check.name, "\n", (check.hypothesis, "dim")),
            Text(check.verdict.value, style=_COLOURS[check.verdict]),
            Text(check.evidence),
            f"{check.seconds:.1f}",
        )
    return result


def to_json(report: Report, indent: int | None = None) -> str:
    """The whole report; numbers that JSON does not have are null."""
    return json.dumps(_finite(report.as_dict()), ensure_ascii=False, indent=indent)


def _shown(choice: Choice | None) -> str:
    return "nothing" if choice is None else f"{choice.id} {choice.text!r} (logit {choice.logit:.4f})"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
