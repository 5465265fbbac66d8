"""A load test with everything that is put beside it, as lines, as a table for a terminal, and as JSON.

Knows results and comparisons; not how they are measured, and no HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from trtspec.bench.compare import Beside, Planned, Predicted, beside_arms, beside_old, beside_plan, server_changes
from trtspec.bench.serve import ADAPTIVE, ON
from trtspec.bench.serve_figures import Cell, Percentiles, Ratio, cells
from trtspec.bench.serve_result import Result, to_json

if TYPE_CHECKING:
    from rich.table import Table

_WORDS = {ON: "drafts", ADAPTIVE: "the adaptive draft length"}


@dataclass(frozen=True)
class Report:
    """Everything that is shown.

    Attributes:
        result: what was measured.
        old, old_name: an earlier one to put beside it, if any.
        plan, plan_name: points of a plan, if any.
    """

    result: Result
    old: Result | None = None
    old_name: str = ""
    plan: Sequence[Planned] = ()
    plan_name: str = ""

    @cached_property
    def cells(self) -> list[Cell]:
        """Every arm at every load."""
        return cells(self.result)

    @cached_property
    def arms(self) -> list[Beside]:
        """Every arm beside plain decoding."""
        return beside_arms(self.result)

    @cached_property
    def olds(self) -> list[Beside]:
        """New beside old."""
        return beside_old(self.result, self.old) if self.old else []

    @cached_property
    def predicted(self) -> list[Predicted]:
        """The plan beside what was measured."""
        return beside_plan(self.result, self.plan)

    @cached_property
    def notes(self) -> list[str]:
        """What to know of the figures."""
        notes = list(self.result.notes)
        for cell in self.cells:
            if cell.falls_behind:
                notes.append(
                    f"{cell.load}, {cell.arm}: only {cell.request_rate:.2g} requests/s were answered: requests pile up,"
                    " and latencies grow for as long as the load lasts"
                )
        if self.old and (changes := server_changes(self.result, self.old)):
            notes.append(f"against {self.old_name} the server has changed: {'; '.join(changes)}")
        if self.arms and max(cell.rounds for cell in self.cells) == 1:
            notes.append("one round: intervals hold for the prompts, and know no noise between rounds")
        return notes

    @cached_property
    def headline(self) -> str:
        """Does it pay, in one sentence."""
        drafting = [each for each in self.arms if each.arm in (ON, ADAPTIVE) and each.whole]
        if not drafting:
            best = max(self.cells, key=lambda cell: cell.speed)
            return f"{best.speed:.1f} tokens/s at {best.load} ({best.arm})."
        first = next((each for each in drafting if each.arm == ON), drafting[0])
        mine = [each for each in drafting if (each.arm, each.load.kind) == (first.arm, first.load.kind)]
        assert first.whole
        text = f"{_pays(first.whole)} with {_WORDS[first.arm]} at {first.load}"
        loses = [each for each in mine[1:] if each.whole and each.whole.high < 1]
        if loses and first.whole.high >= 1:
            text += f"; slower than without from {loses[0].load} on"
        elif len(mine) > 1 and (last := mine[-1].whole):
            text += f", {last.value:.2f} times at {mine[-1].load}"
        return text + "."

    @cached_property
    def about_plan(self) -> str | None:
        """How far the plan is off, where it is most, in one sentence; None: there is none."""
        if not self.predicted:
            return None
        worst = max(self.predicted, key=lambda each: abs(each.deviation))
        at = f"{worst.planned.batch} client{'s' * (worst.planned.batch != 1)}"
        most = " at most" if len(self.predicted) > 1 else ""
        return (
            f"The plan is off by {worst.deviation:+.1%}{most}: while decoding at {at} it said "
            f"{worst.planned.speed_up:.2f} times as fast, and measured are {worst.measured}."
        )

    def as_json(self) -> str:
        """The result with its figures, as text; `serve_result.read` reads it."""
        return to_json(
            self.result,
            headline=self.headline,
            cells=[
                asdict(cell) | {"tokens_per_second_median": cell.speed, "requests_per_second_median": cell.request_rate}
                for cell in self.cells
            ],
            ratios=[asdict(each) for each in self.arms],
            against_old={"file": self.old_name, "ratios": [asdict(each) for each in self.olds]} if self.old else None,
            against_plan={
                "file": self.plan_name,
                "points": [asdict(each) | {"deviation": each.deviation} for each in self.predicted],
            }
            if self.plan
            else None,
        )


def lines(report: Report) -> list[str]:
    """Every figure in words, a line a cell and a line a comparison."""
    found = [_cell_line(cell) for cell in report.cells]
    return found + beside_lines(report)


def beside_lines(report: Report) -> list[str]:
    """The comparisons, the notes and the headline."""
    found = [f"{each.load}, {each.arm} against {each.base}: {_speeds(each)}" for each in report.arms]
    found += [f"{each.load}, {each.arm}, against {report.old_name}: {_speeds(each)}" for each in report.olds]
    for each in report.predicted:
        plan, planned, measured = each.planned, each.planned.factors, each.factors
        found.append(
            f"{plan.batch} client{'s' * (plan.batch != 1)}, planned {plan.speed_up:.2f} ({plan.low:.2f} to "
            f"{plan.high:.2f}), measured {each.measured} while decoding: deviation {each.deviation:+.1%}"
        )
        if measured:
            found[-1] += (
                f"; planned and measured tokens a pass {planned.tokens_per_pass:.2f} and "
                f"{measured.tokens_per_pass:.2f}, cycle {planned.cycle_ms:.1f} and {measured.cycle_ms:.1f} ms, plain "
                f"pass {planned.plain_ms:.1f} and {measured.plain_ms:.1f} ms"
            )
    return [*found, *(f"note: {note}" for note in report.notes), report.headline]


def table(report: Report) -> Table:
    """The cells for a terminal, 80 columns."""
    from rich import box
    from rich.table import Table

    result = Table(
        title="p50/p99 in ms to first token and between tokens, in s of whole answers",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,  # the box has a blank between columns
    )
    for name in ("load", "arm"):
        result.add_column(name, no_wrap=True)
    for name in ("tokens/s", "first", "between", "answer", "length", "times"):
        result.add_column(name, justify="right", no_wrap=True)
    speed_ups = {(each.load, each.arm): each.whole for each in report.arms}
    load = None
    for cell in report.cells:
        if load is not None and cell.load != load:
            result.add_section()
        speed_up = speed_ups.get((cell.load, cell.arm))
        result.add_row(
            "" if cell.load == load else str(cell.load),
            cell.arm,
            _short(cell.speed),
            _ends(cell.first, 1e3),
            _ends(cell.between, 1e3),
            _ends(cell.whole, 1),
            shown(cell.acceptance_length, ".2f"),
            f"{speed_up.value:.2f}" if speed_up else "",
        )
        load = cell.load
    return result


def shown(value: float | None, form: str) -> str:
    """A figure, or a dash where it is not known."""
    return "-" if value is None else format(value, form)


def _ends(found: Percentiles | None, scale: float) -> str:
    return "-" if found is None else f"{_short(found.p50 * scale)}/{_short(found.p99 * scale)}"


def _short(value: float) -> str:
    """Three digits, more only before the point, and two at most behind it."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _cell_line(cell: Cell) -> str:
    failed = "".join(f", {number} {kind}" for kind, number in cell.errors.items())
    reused = (
        "not known"
        if cell.reused_blocks is None
        else f"{cell.reused_blocks:.1f} blocks on average in {cell.reused} requests"
    )
    return (
        f"{cell.load}, {cell.arm}: {cell.speed:.1f} tokens/s, {cell.request_rate:.2f} requests/s; p50/p90/p99: first "
        f"token {_all(cell.first, 1e3, '.0f')} ms, between tokens {_all(cell.between, 1e3, '.1f')} ms, whole answer "
        f"{_all(cell.whole, 1, '.2f')} s; acceptance rate {shown(cell.acceptance_rate, '.2f')}, length "
        f"{shown(cell.acceptance_length, '.2f')}; {cell.answered} of {cell.requests} answered{failed}; "
        f"KV cache reused: {reused}"
    )


def _all(found: Percentiles | None, scale: float, form: str) -> str:
    return "-" if found is None else "/".join(f"{value * scale:{form}}" for value in (found.p50, found.p90, found.p99))


def _speeds(each: Beside) -> str:
    decoding = f", {each.decoding} while decoding" if each.decoding else ""
    return f"{each.whole or 'not known'} times as fast{decoding}"


def _pays(ratio: Ratio) -> str:
    """What an interval says of a speed-up."""
    if ratio.low > 1:
        return f"It pays: {ratio} times as fast"
    return f"It is slower: {ratio} times as fast" if ratio.high < 1 else f"No clear difference: {ratio} times as fast"
