"""The report as one self-contained HTML page: verdict first, then each check with its evidence, faults and plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trtspec import __version__
from trtspec.parity.report.advice import advice
from trtspec.parity.report.plots import plots
from trtspec.parity.report.text import headline, outcome
from trtspec.parity.result import Check, Report, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

_CLASSES: Mapping[Verdict, str] = {
    Verdict.PASS: "good",
    Verdict.TIE: "good",
    Verdict.FAULT: "bad",
    Verdict.INCONCLUSIVE: "open",
    Verdict.NOT_APPLICABLE: "none",
}


def to_html(report: Report) -> str:
    """The page.

    Raises:
        TrtspecError: matplotlib is not there.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8"))
    text: str = template.render(
        report=report,
        headline=headline(report),
        outcome=outcome(report),
        version=__version__,
        classes=_CLASSES,
        plots={id(check): _plots(report, check) for check in report.checks},
        advice=advice,
        id=id,
    )
    return text


def _plots(report: Report, check: Check) -> list[tuple[str, str]]:
    return list(plots(check, report.settings))
