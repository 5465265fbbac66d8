"""The load test as one self-contained HTML page: does it pay, how fast is it, and how sure is that.

Knows reports; not how they are measured.
"""

from __future__ import annotations

from pathlib import Path

from trtspec.bench.serve import ADAPTIVE, ARMS, ON
from trtspec.bench.serve_plots import plots
from trtspec.bench.serve_report import Report, shown
from trtspec.report.page import render


def to_html(report: Report) -> str:
    """The page.

    Raises:
        TrtspecError: matplotlib is not installed.
    """
    speed_ups = {(each.load, each.arm): each for each in report.arms}
    return render(
        Path(__file__).with_name("serve_page.html.j2"),
        report=report,
        result=report.result,
        mood=_mood(report),
        arms={arm: ARMS[arm] for arm in report.result.arms},
        speed_ups=speed_ups,
        plots=plots(report),
        shown=shown,
    )


def _mood(report: Report) -> str:
    """good, bad or open: what the headline says of the first load, as a class of the page."""
    found = [each.whole for each in report.arms if each.arm in (ON, ADAPTIVE) and each.whole]
    if not found:
        return "none"
    return "good" if found[0].low > 1 else "bad" if found[0].high < 1 else "open"
