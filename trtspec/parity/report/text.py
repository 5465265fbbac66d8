"""A parity report as text: plain lines, a table for terminals, JSON.

Knows records, not how they came about.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trtspec.parity.report.advice import advice, advice_undecided
from trtspec.parity.result import Check, Choice, Part, Report, Verdict
from trtspec.report.page import printable

if TYPE_CHECKING:
    from rich.table import Table

_REPRODUCE = "  reproduce: "
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
    """Each difference of a check, or of one part of it: where, what, what to do, and how to see it again.

    What to do is said once for differences of one kind that follow each other.
    """
    lines, said = [], ""
    for finding in check.findings:
        if part is not None and finding.part != part:
            continue
        name = check.name if finding.part is None else f"{check.name}:{finding.part}"
        where = "" if finding.prompt is None else f" prompt {finding.prompt}, token {finding.position}:"
        tokens = f"; took {shown(finding.chosen)}, reference {shown(finding.expected)}" if finding.chosen else ""
        line = f"{check.subject}, {name}: {finding.verdict.value}:{where} {finding.problem}{tokens}"
        lines.append(printable(" ".join(line.splitlines())))
        if (next_step := advice(check, finding)) and next_step != said:
            lines.append(f"  next: {next_step}")
            said = next_step
        if finding.reproduce:
            lines.append(f"{_REPRODUCE}{finding.reproduce}")
    return lines


def part_lines(check: Check) -> list[str]:
    """What says more than the line of a check: parts that did not pass, and what lets the undecided decide."""
    lines = [f"  next: {next_step}"] if (next_step := advice_undecided(check)) else []
    for part in _telling(check):
        lines.append(f"  {check.name}:{part.name}: {part.verdict.value}: {part.evidence}")
        if next_step := advice_undecided(check, part):
            lines.append(f"    next: {next_step}")
    return lines


def wrapped(lines: Sequence[str], width: int) -> list[str]:
    """Lines for a terminal of so many columns. A command stays in one, so that it can be copied."""
    return [
        short
        for line in lines
        for short in (
            [line]
            if line.startswith(_REPRODUCE)
            else textwrap.wrap(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        )
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
    if not report.failed and (seen := _detectable(report)) is not None:
        words.append(f"a total variation of {seen:.2f} would have been found with probability 95 %")
    return "; ".join(words)


def summary_line(report: Report) -> str:
    """The verdict of the whole run."""
    return f"parity of {report.name}: {report.verdict.value} ({outcome(report)})"


def table(report: Report) -> Table:
    """The checks for a terminal, 80 columns and more: of parts, those that did not pass."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result = Table(title=f"parity of {report.name}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("check", no_wrap=True)
    result.add_column("verdict", min_width=len(Verdict.INCONCLUSIVE.value))
    result.add_column("evidence")
    result.add_column("s", justify="right", no_wrap=True)

    def add(name: str, whole: Check | Part, next_step: str, seconds: str = "") -> None:
        evidence = Text.assemble((whole.hypothesis, "dim"), "\n", whole.evidence)
        if next_step:
            evidence.append(f"\nnext: {next_step}")
        verdict = Text(whole.verdict.value, style=_COLOURS[whole.verdict])
        result.add_row(Text(name), verdict, evidence, seconds)

    subject = None
    for check in report.checks:
        if check.subject != subject:
            subject = check.subject
            result.add_section()
            result.add_row(Text(subject, style="bold"))
        add(f" {check.name}", check, advice_undecided(check), f"{check.seconds:.1f}")
        for part in _telling(check):
            add(f"  {part.name}", part, advice_undecided(check, part))
    return result


def to_json(report: Report, indent: int | None = None) -> str:
    """The whole report; numbers that JSON does not have are null."""
    return json.dumps(_finite(report.as_dict()), ensure_ascii=False, indent=indent)


def shown(choice: Choice | None) -> str:
    """A token with its text, quoted so that blanks are seen, and the reference's logit for it."""
    return "nothing" if choice is None else f"{choice.id} {choice.text!r} (logit {choice.logit:.4f})"


def _telling(check: Check) -> list[Part]:
    """The parts that say more than the verdict of the check."""
    return [part for part in check.parts if part.verdict not in (Verdict.PASS, Verdict.TIE)]


def _detectable(report: Report) -> float | None:
    """The total variation that would have been found in every subject whose sampling was checked."""
    best: dict[str, float] = {}
    for check in report.checks:
        if check.detectable is not None:
            best[check.subject] = min(check.detectable, best.get(check.subject, 1.0))
    return max(best.values(), default=None)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
