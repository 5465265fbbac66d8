"""The plots of a plan's page. Knows the records of `result`; a plot that has nothing to show is left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from trtspec.plan.result import Capacity, Fleet, Interval, MemoryRow, MethodPlan, Plan, Point
from trtspec.report.plots import BAND, COLOURS, INK, MARKERS, SOFT, WIDE, Plot, legend_below, name_axes, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Colour = str | tuple[float, float, float, float]
_HATCH = "////"
_BAR_HEIGHT = 0.62
_RATES = 200  # points of a curve over the rate of requests
_LABEL_ROOM = 0.07  # part of a bar that a label needs


def memory_plot(plan: Plan) -> Plot | None:
    """What each GPU holds; None without rows."""
    rows = plan.memory.rows
    if not rows:
        return None
    bars = memory_bars(plan)
    size = (WIDE[0], 1.7 + 0.5 * len(bars))
    words = "; ".join(
        f"{name}: " + ", ".join(f"{row.role} {_held(row):.1f} GB" for row in held) for name, held in bars.items()
    )
    label = f"Memory of {plan.memory.device_gb:g} GB. {words}."
    return Plot(
        "Memory by GPU" if plan.gpu != "cpu" else "Memory of the host",
        "In the order of loading. The full part of a KV cache is what the asked batch and context need, the hatched "
        "part what it gets beyond that. The line is the memory there is.",
        (svg(label, "memory-", partial(_draw_memory, plan=plan, bars=bars), size),),
    )


def capacity_plot(plan: Plan) -> Plot | None:
    """Replicas over the rate of requests; None where nothing is feasible."""
    fleets = [fleet for fleet in plan.capacity.methods if fleet.replicas is not None] if plan.capacity else []
    if plan.capacity is None or not fleets:
        return None
    words = "; ".join(f"{fleet.title} {fleet.all_gpus}" for fleet in fleets)
    label = f"GPUs over requests per second; for {plan.capacity.rate:g} a second: {words}."
    return Plot(
        f"{'Cost' if plan.price_per_gpu_hour is not None else 'GPUs'} over the rate of requests",
        "Each step is one more replica, for the methods that keep what was asked for. The line is the rate that was "
        "asked for.",
        (svg(label, "capacity-", partial(_draw_capacity, plan=plan, found=plan.capacity, fleets=fleets)),),
    )


def memory_bars(plan: Plan) -> dict[str, list[MemoryRow]]:
    """Name of a bar -> rows of one GPU; GPUs that hold the same are one bar."""
    held: dict[tuple[tuple[object, ...], ...], list[int]] = {}
    by_gpu: dict[int, list[MemoryRow]] = {}
    for row in plan.memory.rows:
        by_gpu.setdefault(row.gpu, []).append(row)
    for gpu, rows in by_gpu.items():
        held.setdefault(tuple((row.role, row.weights_gb, row.kv_cache_gb, row.left_gb) for row in rows), []).append(gpu)
    return {"host" if plan.gpu == "cpu" else _gpus(gpus): by_gpu[gpus[0]] for gpus in held.values()}


def plots(plan: Plan) -> Iterator[Plot]:
    """Speed-up over draft length, batch and acceptance, and latency against throughput."""
    own = plan.own
    if len({point.num_draft_tokens for point in own.points if point.num_draft_tokens}) > 1:
        best = own.best[plan.batches[0]]
        yield Plot(
            "Speed-up over draft length",
            f"{own.title}: a curve for each batch size with a dot at its best length, and the 95 % interval of the "
            "smallest where acceptance was measured. Above the line at 1 speculation is faster than plain decoding.",
            (
                svg(
                    f"Speed-up over draft length for batches {_listed(plan.batches)}; at batch {best.batch} the best "
                    f"is {best.speed_up:.2f} times with {best.num_draft_tokens} draft tokens.",
                    "length-",
                    partial(_draw_lengths, plan=plan),
                ),
            ),
        )
    if drafting := [method for method in plan.methods if _drafted(method)]:
        ends = "; ".join(
            f"{method.title} {curve[0].speed_up:.2f} at batch {curve[0].batch}, {curve[-1].speed_up:.2f} at batch "
            f"{curve[-1].batch}"
            for method in drafting
            for curve in [_drafted(method)]
        )
        draw = partial(_draw_batches, plan=plan, drafting=drafting)
        yield Plot(
            "Speed-up over batch size",
            "Each method with its best draft length at that batch; a cross marks the batch from which plain decoding "
            "is at least as fast. What does not fit into memory is hollow.",
            (svg(f"Speed-up over batch size: {ends}.", "batch-", draw),),
        )
    if plan.assumed:
        yield Plot(
            "Speed-up over acceptance rate",
            f"What {own.title} would give at acceptance rates that are the same at every position, each with the best "
            "draft length for it, which stands at the curve of the smallest batch. A cross is where it begins to pay.",
            (svg(_acceptance_label(plan), "acceptance-", partial(_draw_acceptance, plan=plan)),),
        )
    if served := [method for method in plan.methods if method.points]:
        most = "; ".join(
            f"{method.title} up to {max(point.tokens_per_second for point in method.points):.0f}" for method in served
        )
        draw = partial(_draw_latency, plan=plan, served=served)
        yield Plot(
            "Latency against throughput",
            "Each method with its best draft length, from the smallest batch at the bottom to the largest; the numbers "
            "are batches. Left and up is better. What does not fit into memory is hollow.",
            (svg(f"Tokens per second over time per output token: {most} tokens per second.", "latency-", draw),),
        )


def _draw_memory(axes: Axes, plan: Plan, bars: dict[str, list[MemoryRow]]) -> None:
    device = plan.memory.device_gb
    roles = list(dict.fromkeys(row.role for row in plan.memory.rows))
    colours = dict(zip(roles, COLOURS, strict=False))
    names = list(bars)
    for place, rows in enumerate(bars.values()):
        left = 0.0
        for row in rows:
            needed = min(row.kv_needed_gb, row.kv_cache_gb)
            other = row.activations_gb + row.logits_gb + row.context_gb
            for width, alpha, hatch, words in (
                (row.weights_gb, 1.0, None, f"{row.weights_gb:.1f}"),
                (needed, 0.55, None, f"{row.kv_cache_gb:.1f}"),
                (row.kv_cache_gb - needed, 0.3, _HATCH, ""),
                (other, 0.18, None, ""),
            ):
                if width <= 0:
                    continue
                axes.barh(
                    place,
                    width,
                    _BAR_HEIGHT,
                    left,
                    color=colours[row.role],
                    alpha=alpha,
                    hatch=hatch,
                    ec="white",
                    lw=0.6,
                )
                if words and width > _LABEL_ROOM * device:
                    colour = "white" if alpha == 1.0 else INK
                    axes.text(left + width / 2, place, words, ha="center", va="center", fontsize=8, color=colour)
                left += width
        free = f"{rows[-1].left_gb:.1f} GB left" if plan.fits else "too little"
        axes.text(max(left, device) * 1.015, place, free, va="center", fontsize=8, color=SOFT)
    for role in roles:
        for alpha, words in ((1.0, "weights"), (0.55, "KV cache"), (0.18, "buffers, context")):
            axes.bar(0, 0, color=colours[role], alpha=alpha, label=f"{role}: {words}")
    axes.axvline(device, color=INK, lw=1.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.2 * max(device, axes.get_xlim()[1] / 1.05))
    axes.grid(False, axis="y")
    name_axes(axes, f"{plan.memory.device_gb:g} GB each" if len(bars) > 1 else "", "GB (10⁹ bytes)", "")
    legend_below(axes, columns=len(roles))


def _draw_lengths(axes: Axes, plan: Plan) -> None:
    import matplotlib

    shades = matplotlib.colormaps["viridis"]
    batches = sorted({point.batch for point in plan.own.points})
    for number, batch in enumerate(batches):
        colour = shades(0.9 * number / max(1, len(batches) - 1))
        curve = sorted(
            (point for point in plan.own.points if point.batch == batch and point.num_draft_tokens),
            key=lambda point: point.num_draft_tokens,
        )
        lengths = [0, *(point.num_draft_tokens for point in curve)]
        if number == 0:
            _band(axes, lengths, [(1.0, 1.0), *(point.speed_up_interval for point in curve)], colour)
        axes.plot(lengths, [1.0, *(point.speed_up for point in curve)], color=colour, lw=1.5, label=f"batch {batch}")
        best = max(curve, key=lambda point: point.speed_up)
        if best.speed_up > 1:
            axes.plot(best.num_draft_tokens, best.speed_up, "o", color=colour, ms=6)
    _line_at_one(axes)
    axes.locator_params(axis="x", integer=True)
    name_axes(axes, plan.own.title, "draft tokens a cycle", "speed-up (times plain decoding)")
    legend_below(axes, columns=4)


def _draw_batches(axes: Axes, plan: Plan, drafting: Sequence[MethodPlan]) -> None:
    for method in drafting:
        colour, marker = _look(plan, method)
        curve = _drafted(method)
        batches = [point.batch for point in curve]
        if method is plan.own:
            _band(axes, batches, [point.speed_up_interval for point in curve], colour)
        axes.plot(batches, [point.speed_up for point in curve], color=colour, lw=2 if method is plan.own else 1.2)
        _mark(axes, [(point.batch, point.speed_up, point.fits) for point in curve], colour, marker, method.title)
        if method.crossover:
            axes.plot(method.crossover, 1.0, "x", color=colour, ms=9, mew=2.2)
    crossings = [method.crossover for method in drafting if method.crossover]
    if plan.own.crossover:
        _note_line(axes, plan.own.crossover, f"plain decoding wins\nfrom batch {plan.own.crossover}", COLOURS[0])
    _line_at_one(axes)
    doublings = [2**power for power in range(12) if plan.batches[-1] < 2**power <= max(crossings, default=0)]
    _batch_axis(axes, [*plan.batches, *doublings])
    x = "batch size (sequences in flight)"
    name_axes(axes, "best draft length of each method", x, "speed-up (times plain decoding)")
    legend_below(axes, columns=2)


def _draw_acceptance(axes: Axes, plan: Plan) -> None:
    import matplotlib

    shades = matplotlib.colormaps["viridis"]
    batches = sorted({each.batch for each in plan.assumed})
    for number, batch in enumerate(batches):
        colour = shades(0.9 * number / max(1, len(batches) - 1))
        curve = sorted((each for each in plan.assumed if each.batch == batch), key=lambda each: each.acceptance_rate)
        axes.plot(
            [each.acceptance_rate for each in curve],
            [each.speed_up for each in curve],
            color=colour,
            lw=1.5,
            label=f"batch {batch}",
        )
        needed = plan.break_even.get(batch)
        if needed is not None and curve[0].acceptance_rate <= needed <= curve[-1].acceptance_rate:
            axes.plot(needed, 1.0, "x", color=colour, ms=8, mew=2)
        if number == 0:
            for each in curve[:: max(1, len(curve) // 5)]:
                axes.annotate(
                    str(each.num_draft_tokens),
                    (each.acceptance_rate, each.speed_up),
                    xytext=(-3, 3),
                    textcoords="offset points",
                    ha="right",
                    fontsize=8,
                    color=INK,
                )
    if plan.acceptance_rate is not None:
        _note_line(axes, plan.acceptance_rate, f"this plan: {plan.acceptance_rate:.2f}", INK)
    _line_at_one(axes)
    name_axes(axes, plan.own.title, "acceptance rate of a draft token", "speed-up (times plain decoding)")
    legend_below(axes, columns=4)


def _draw_latency(axes: Axes, plan: Plan, served: Sequence[MethodPlan]) -> None:
    for method in served:
        colour, marker = _look(plan, method)
        curve = sorted(method.best.values(), key=lambda point: point.batch)
        axes.plot(
            [point.tpot_ms for point in curve],
            [point.tokens_per_second for point in curve],
            color=colour,
            lw=2 if method is plan.own else 1.2,
        )
        marks = [(point.tpot_ms, point.tokens_per_second, point.fits) for point in curve]
        _mark(axes, marks, colour, marker, method.title)
        for point in curve if method is plan.own else ():
            axes.annotate(
                str(point.batch),
                (point.tpot_ms, point.tokens_per_second),
                xytext=(-5, 4),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color=INK,
            )
    if plan.within_latency is not None:
        best = plan.within_latency
        label = "most tokens per second within it"
        axes.plot(best.tpot_ms, best.tokens_per_second, "o", ms=11, mfc="none", mec=INK, mew=1.3, label=label)
    rates = [point.tokens_per_second for method in served for point in method.points]
    if max(rates) > 20 * min(rates):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    if plan.latency_ms is not None:
        low, high = axes.get_xlim()
        high = max(high, 1.02 * plan.latency_ms) if plan.latency_ms < 1.5 * high else high
        axes.axvspan(low, min(high, plan.latency_ms), color=BAND, alpha=0.5, lw=0, zorder=0)
        axes.axvline(plan.latency_ms, color=INK, lw=1, ls="--", label=f"asked for: {plan.latency_ms:g} ms")
        axes.set_xlim(low, high)  # one far off would leave no room for the curves
    name_axes(axes, "", "time per output token (ms)", "tokens per second, whole batch")
    legend_below(axes, columns=2)


def _draw_capacity(axes: Axes, plan: Plan, found: Capacity, fleets: Sequence[Fleet]) -> None:
    price = plan.price_per_gpu_hour
    rates = [2 * found.rate * place / _RATES for place in range(1, _RATES + 1)]
    places = [method.method for method in plan.methods]
    for fleet in fleets:
        each = fleet.num_gpus * (price or 1.0)
        y = [each * math.ceil(rate / fleet.planned_requests_per_second - 1e-9) for rate in rates]
        colour, width = COLOURS[places.index(fleet.method) % len(COLOURS)], 2.0 if fleet.own else 1.2
        axes.step(rates, y, where="pre", color=colour, lw=width, label=fleet.title)
    axes.set_xlim(0, 2 * found.rate)
    axes.set_ylim(bottom=0)
    _note_line(axes, found.rate, f"asked for: {found.rate:g}", INK)
    name_axes(axes, "", "requests per second", "US dollars an hour" if price is not None else "GPUs")
    legend_below(axes, columns=2)


def _mark(axes: Axes, marks: Sequence[tuple[float, float, bool]], colour: str, marker: str, title: str) -> None:
    """Points of a curve; hollow where they do not fit."""
    for number, (x, y, fits) in enumerate(marks):
        axes.plot(
            x, y, marker, color=colour, ms=5, mfc=colour if fits else "white", label=title if number == 0 else None
        )


def _look(plan: Plan, method: MethodPlan) -> tuple[str, str]:
    """Colour and marker, the same in every plot."""
    place = plan.methods.index(method) % len(COLOURS)
    return COLOURS[place], MARKERS[place]


def _band(axes: Axes, places: Sequence[int], intervals: Sequence[Interval], colour: Colour) -> None:
    low, high = zip(*intervals, strict=True)
    axes.fill_between(places, low, high, color=colour, alpha=0.12, lw=0)


def _note_line(axes: Axes, x: float, words: str, colour: str) -> None:
    """A vertical line, named on the side where there is more room."""
    axes.axvline(x, color=colour, lw=0.9, ls="--")
    low, high = axes.get_xlim()
    left = x > (low + high) / 2
    axes.annotate(
        words,
        (x, axes.get_ylim()[1]),
        xytext=(-4 if left else 4, -2),
        textcoords="offset points",
        ha="right" if left else "left",
        va="top",
        fontsize=8,
        color=colour,
    )


def _line_at_one(axes: Axes) -> None:
    axes.axhline(1.0, color=INK, lw=1)
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, min(low, 0.8)), max(high, 1.2))


def _batch_axis(axes: Axes, batches: Sequence[int]) -> None:
    """Doublings are equally far apart."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()


def _drafted(method: MethodPlan) -> list[Point]:
    """The fastest point with drafts at each batch, by batch: below 1 where plain decoding wins."""
    best: dict[int, Point] = {}
    for point in method.points:
        if point.num_draft_tokens and (point.batch not in best or point.speed_up > best[point.batch].speed_up):
            best[point.batch] = point
    return [best[batch] for batch in sorted(best)]


def _acceptance_label(plan: Plan) -> str:
    batch = min(each.batch for each in plan.assumed)
    words = ", ".join(
        f"{each.speed_up:.2f} at rate {each.acceptance_rate:.2f}" for each in plan.assumed if each.batch == batch
    )
    return f"Speed-up over acceptance rate; at batch {batch}: {words}."


def _held(row: MemoryRow) -> float:
    return row.weights_gb + row.kv_cache_gb + row.activations_gb + row.logits_gb + row.context_gb


def _gpus(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"GPU {numbers[0]}"
    together = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"GPUs {numbers[0]} to {numbers[-1]}" if together else f"GPUs {_listed(numbers)}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
