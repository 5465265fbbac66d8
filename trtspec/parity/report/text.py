"""A parity report as text: plain lines, a table for terminals, JSON.

Knows records, not how they came about.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from trtspec.parity.report.advice import advice
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


def finding_lines(check: Check, part: str | None = None) -> list[str]:
    """Each difference of a check, or of one part of it: where, what, what to do, and how to see it again."""
    lines = []
    for finding in check.findings:
        if part is not None and finding.part != part:
            continue
        name = check.name if finding.part is None else f"{check.name}:{finding.part}"
        where = "" if finding.prompt is None else f" prompt {finding.prompt}, token {finding.position}:"
        tokens = f"; took {_shown(finding.chosen)}, reference {_shown(finding.expected)}" if finding.chosen else ""
        lines.append(f"{check.subject}, {name}: {finding.verdict.value}:{where} {finding.problem}{tokens}")
        if next_step := advice(check, finding):
            lines.append(f"  next: {next_step}")
        lines.append(f"  reproduce: {finding.reproduce}")
    return lines


def part_lines(check: Check) -> list[str]:
    """The parts of a check that say more than its verdict: those that did not pass."""
    return [
        f"  {check.name}:{part.name}: {part.verdict.value}: {part.evidence}"
        for part in check.parts
        if part.verdict not in (Verdict.PASS, Verdict.TIE)
    ]


def headline(report: Report) -> str:
    """The verdict of the whole run in a few words."""
    words = {
        Verdict.FAULT: "Fault: the output is not what the reference would emit",
        Verdict.INCONCLUSIVE: "Nothing wrong was found, but the evidence is too weak",
        Verdict.NOT_APPLICABLE: "Nothing was checked",
    }
    return words.get(report.verdict, "Pass: the output is what the reference would emit")


def outcome(report: Report) -> str:
    """How many checks came out how, and what would have been seen."""
    counts = {verdict: sum(check.verdict == verdict for check in report.checks) for verdict in Verdict}
    words = [", ".join(f"{number} {verdict.value}" for verdict, number in counts.items() if number)]
    if ties := sum(finding.verdict == Verdict.TIE for check in report.checks for finding in check.findings):
        words.append(f"{ties} rounding tie{'s' * (ties > 1)}, listed")
    if seen := [check.detectable for check in report.checks if check.detectable is not None]:
        words.append(f"a total variation of {min(seen):.2f} would have been found with probability 95 %")
    return "; ".join(words)


def summary_line(report: Report) -> str:
    """The verdict of the whole run."""
    return f"parity of {report.name}: {report.verdict.value} ({outcome(report)})"


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
        for part in check.parts:
            result.add_row(
                "",
                Text(f"  {part.name}"),
                Text(part.verdict.value, style=_COLOURS[part.verdict]),
                Text(part.evidence),
                "",
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
