"""A plan as one self-contained HTML page: the answer in one sentence, then memory, speed, methods and the schedule."""

from __future__ import annotations

from pathlib import Path

from trtspec.plan.plots import capacity_plot, memory_bars, memory_plot, plots
from trtspec.plan.result import Interval, Plan, Point
from trtspec.plan.schedule import compact, renderings
from trtspec.report.page import render


def to_html(plan: Plan) -> str:
    """The page.

    Raises:
        TrtspecError: matplotlib is not installed.
    """
    return render(
        Path(__file__).with_name("page.html.j2"),
        plan=plan,
        verdict=_verdict(plan),
        cards=_cards(plan),
        memory=memory_plot(plan),
        bars=memory_bars(plan),
        plots=list(plots(plan)),
        replicas=capacity_plot(plan),
        schedule=compact(plan.schedule) if plan.schedule else {},
        renderings=renderings(plan),
        priced=plan.price_per_gpu_hour is not None,
        number=number,
        between=between,
    )


def number(value: float) -> str:
    """Three significant digits, and whole numbers from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def between(interval: Interval, form: str = "%s") -> str:
    """An interval in a form; empty where its ends are the same, since nothing was measured."""
    low, high = interval
    return form % f"{low:.2f} to {high:.2f}" if high > low else ""


def _verdict(plan: Plan) -> str:
    """The class of the banner."""
    if not plan.fits or plan.own.refused:
        return "bad"
    best = plan.own.best.get(plan.batches[0])
    if plan.own.method == "none":
        return "none"
    low, high = best.speed_up_interval if best else (0.0, 0.0)
    return "good" if 1 < low < high else "open"  # an assumed acceptance has no interval


def _cards(plan: Plan) -> list[tuple[str, str, str]]:
    """Name, figure and a remark for each of the figures that decide."""
    cards = []
    batch, crossover = plan.batches[0], plan.own.crossover
    best = plan.own.best.get(batch)
    if best and plan.own.method != "none":
        rest = between(best.speed_up_interval, "95 %%: %s") or "at the assumed acceptance rate"
        cards.append((f"Speed-up at batch {batch}", f"{best.speed_up:.2f} times", rest))
        remark = f"{number(best.tokens_per_pass)} tokens a target pass"
        cards.append((f"Draft tokens at batch {batch}", str(best.num_draft_tokens), remark))
        where = f"from batch {crossover}" if crossover else "nowhere"
        cards.append(("Plain decoding wins", where, "" if crossover else f"up to batch {plan.max_batch}"))
    elif (needed := plan.break_even.get(batch)) is not None:
        cards.append((f"Pays at batch {batch}", f"above {needed:.2f}", "acceptance rate of a draft token"))
    if plan.memory.rows:
        left = min(row.left_gb for row in plan.memory.rows)
        figure = f"{left:.1f} GB left" if plan.fits else "too little"
        largest = plan.memory.max_batch
        remark = f"fits up to batch {largest} of {plan.memory.context} tokens" if largest else "no batch fits"
        cards.append(("Memory", figure, remark))
    if plan.latency_ms is not None:
        within = plan.within_latency
        figure = f"{number(within.tokens_per_second)} tokens/s" if within else "not reached"
        remark = f"batch {within.batch}, {within.num_draft_tokens} draft tokens" if within else ""
        cards.append((f"Within {plan.latency_ms:g} ms per token", figure, remark))
    if plan.capacity is not None:
        fleet = plan.capacity.cheapest
        figure = "not feasible" if fleet is None else f"{fleet.replicas} of {fleet.num_gpus} GPUs"
        cost = f", ${number(fleet.cost_per_hour)} an hour" if fleet and fleet.cost_per_hour is not None else ""
        remark = f"{fleet.title}, batch {fleet.batch}{cost}" if fleet else ""
        cards.append((f"Replicas for {plan.capacity.rate:g} requests/s", figure, remark))
    if cheapest := min(
        (point for point in plan.own.points if point.fits and point.cost_per_million), key=_cost, default=None
    ):
        remark = f"for a million output tokens at batch {cheapest.batch}"
        cards.append(("Lowest cost", f"${number(_cost(cheapest))}", remark))
    return cards


def _cost(point: Point) -> float:
    return point.cost_per_million or 0.0
