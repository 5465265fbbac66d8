"""The plots of a load test's page, as SVG elements. Knows reports and matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trtspec.bench.compare import Beside, Planned
from trtspec.bench.serve_figures import Cell, between_tokens
from trtspec.bench.serve_report import Report
from trtspec.bench.serve_result import CONCURRENCY, RATE
from trtspec.report.plots import COLOURS, INK, MARKERS, Plot, legend_below, svg

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

_NAMES = {CONCURRENCY: "clients at the same time", RATE: "requests that arrive per second"}
_SUFFIXES = {CONCURRENCY: "", RATE: ", open loop"}
_TIMES = (
    ("first", "Time to first token", 1e3, "ms"),
    ("between", "Time between tokens", 1e3, "ms"),
    ("whole", "Time of a whole answer", 1.0, "s"),
)
_POINTS = 400  # of a curve


def plots(report: Report) -> list[Plot]:
    """All that the report has figures for.

    Raises:
        TrtspecError: matplotlib is not installed.
    """
    kinds = [kind for kind in (CONCURRENCY, RATE) if any(load.kind == kind for load in report.result.loads)]
    return [plot for kind in kinds for plot in (*_curves(report, kind), *_spread(report, kind))]


def _curves(report: Report, kind: str) -> Iterator[Plot]:
    """Over the loads of one kind; none over a single one."""
    cells = [cell for cell in report.cells if cell.load.kind == kind]
    sides = [each for each in report.arms if each.load.kind == kind and each.whole]
    planned = [each.planned for each in report.predicted] if kind == CONCURRENCY else []
    arms, x = report.result.arms, _NAMES[kind]

    def image(name: str, label: str, draw: Callable[[Axes], None]) -> tuple[str]:
        def over_loads(axes: Axes) -> None:
            draw(axes)
            _finish(axes, cells, x)

        return (svg(f"{label} over {x}", f"{name}-{kind}-", over_loads),)

    if len({cell.load for cell in cells}) < 2:
        return
    yield Plot(
        f"Throughput{_SUFFIXES[kind]}",
        "Generated tokens per second of the whole server: the median over rounds; bars reach from the slowest round to "
        "the fastest.",
        image("speed", "tokens per second", partial(_draw_speeds, cells=cells, arms=arms)),
    )
    if sides:
        yield Plot(
            f"Speed-up{_SUFFIXES[kind]}",
            f"How many times as fast as {sides[0].base}, with 95 % intervals; above the dotted line it pays. Decoding "
            "leaves out prompts and queues."
            + (" Crosses are the plan's, to be held against decoding." if planned else ""),
            image("speed-up", "speed-up", partial(_draw_speed_ups, sides=sides, arms=arms, planned=planned)),
        )
    for name, title, scale, unit in _TIMES:
        yield Plot(
            f"{title}{_SUFFIXES[kind]}",
            f"{title} in {unit}: what half of all stay below (p50) and what one in 100 exceeds (p99).",
            image(name, title.lower(), partial(_draw_times, cells, arms, name, scale, unit)),
        )


def _draw_speeds(axes: Axes, cells: Sequence[Cell], arms: Sequence[str]) -> None:
    for arm in arms:
        mine = _of_arm(cells, arm)
        middle = [cell.speed for cell in mine]
        below = [cell.speed - min(cell.tokens_per_second) for cell in mine]
        above = [max(cell.tokens_per_second) - cell.speed for cell in mine]
        loads = [cell.load.value for cell in mine]
        axes.errorbar(loads, middle, yerr=[below, above], capsize=2, label=arm, **_style(arms, arm))
    axes.set_ylabel("tokens/s of the server", fontsize=9, color=INK)


def _draw_speed_ups(axes: Axes, sides: Sequence[Beside], arms: Sequence[str], planned: Sequence[Planned]) -> None:
    axes.axhline(1, color=INK, lw=0.9, ls=":")
    base = sides[0].base
    for number, (arm, decoding) in enumerate((arm, decoding) for arm in arms for decoding in (False, True)):
        found = [(each.load.value, each.decoding if decoding else each.whole) for each in sides if each.arm == arm]
        points = [(load, ratio) for load, ratio in found if ratio]
        if not points:
            continue
        ends = [[ratio.value - ratio.low for _, ratio in points], [ratio.high - ratio.value for _, ratio in points]]
        axes.errorbar(
            [load * 1.006**number for load, _ in points],  # beside each other
            [ratio.value for _, ratio in points],
            yerr=ends,
            capsize=2,
            label=f"{arm}, {'decoding' if decoding else 'whole answers'}",
            **_style(arms, arm, second=decoding),
        )
    if planned:
        batches, speeds = [each.batch for each in planned], [each.speed_up for each in planned]
        axes.plot(batches, speeds, ls="none", marker="x", ms=9, mew=2, color=INK, label="planned (decoding)")
    axes.set_ylabel(f"times as fast as {base}", fontsize=9, color=INK)


def _draw_times(cells: Sequence[Cell], arms: Sequence[str], name: str, scale: float, unit: str, axes: Axes) -> None:
    for arm in arms:
        found = [(cell.load.value, getattr(cell, name)) for cell in _of_arm(cells, arm)]
        points = [(load, each) for load, each in found if each is not None]
        for centile in ("p50", "p99"):
            axes.plot(
                [load for load, _ in points],
                [getattr(each, centile) * scale for _, each in points],
                label=f"{arm}, {centile}",
                **_style(arms, arm, second=centile == "p99"),
            )
    axes.set_ylabel(unit, fontsize=9, color=INK)


def _spread(report: Report, kind: str) -> Iterator[Plot]:
    """How the times between tokens spread at the largest load of a kind: a speculative server's come in bursts."""
    result = report.result
    load = max(load for load in result.loads if load.kind == kind)
    samples = {
        arm: between_tokens(row.answer for row in result.rows_of(load, arm) if row.answer.error is None)
        for arm in result.arms
    }
    samples = {arm: seconds for arm, seconds in samples.items() if len(seconds) > 1}
    if samples:
        yield Plot(
            f"Spread of the time between tokens, {load}",
            "Curves further left are faster. A block of n tokens that comes d ms after the block before counts as n "
            "tokens of d/n ms each.",
            (
                svg(
                    f"distribution of the time between tokens at {load}",
                    f"spread-{kind}-",
                    partial(_draw_spread, samples, result.arms),
                ),
            ),
        )


def _draw_spread(samples: Mapping[str, np.ndarray], arms: Sequence[str], axes: Axes) -> None:
    import numpy as np

    for arm, seconds in samples.items():
        ordered = np.sort(seconds) * 1e3
        points = np.linspace(0, len(ordered) - 1, min(len(ordered), _POINTS)).astype(int)
        axes.plot(ordered[points], 100 * (points + 1) / len(ordered), label=arm, color=_style(arms, arm)["color"])
    axes.set_xlim(0, max(float(np.percentile(seconds, 99.5)) for seconds in samples.values()) * 1e3)
    axes.set_ylim(0, 101)
    axes.set_xlabel("ms", fontsize=9, color=INK)
    axes.set_ylabel("% of tokens at most so long", fontsize=9, color=INK)
    legend_below(axes)


def _of_arm(cells: Sequence[Cell], arm: str) -> list[Cell]:
    return sorted((cell for cell in cells if cell.arm == arm), key=lambda cell: cell.load)


def _style(arms: Sequence[str], arm: str, second: bool = False) -> dict[str, Any]:
    """Of an arm's curve; its second one is dashed."""
    number = list(arms).index(arm)
    dashed = {"ls": "--", "mfc": "white"} if second else {}
    return {"color": COLOURS[number], "marker": MARKERS[number], "ms": 4.5, "lw": 1.4, **dashed}


def _finish(axes: Axes, cells: Sequence[Cell], x: str) -> None:
    """Loads on a logarithmic axis, each with its number, and the legend."""
    loads = sorted({cell.load.value for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [f"{value:g}" for value in loads])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylim(bottom=0)
    legend_below(axes, columns=2)
