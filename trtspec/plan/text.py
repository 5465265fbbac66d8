"""A plan as text for a terminal of 80 columns and more.

Knows how a `Plan` is shown; neither how it is made, nor HTML (`page`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trtspec.plan.result import Capacity, Fleet, MethodPlan, Plan, Point
from trtspec.plan.schedule import compact

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_COLUMNS = 4  # batches side by side


def renderables(plan: Plan) -> Iterator[RenderableType]:
    """The parts of the plan from top to bottom, for a rich console."""
    from rich.text import Text

    yield Text(f"plan of {plan.name} on {plan.gpu}", style="bold")
    yield Text(plan.headline, style="green" if plan.fits and not plan.own.refused else "red")
    yield from map(Text, (f"step times: {plan.times_source}", f"acceptance: {plan.acceptance_source}"))
    yield Text(f"\n{_memory_title(plan)}")
    yield _memory(plan)
    yield from map(Text, _feasible(plan))
    if plan.own.points:
        yield Text(f"\n{plan.own.title} by batch, at {plan.context} tokens of context and {plan.prompt} of prompt")
        yield _points(plan)
        if not all(point.fits for point in plan.own.points):
            yield Text("* does not fit")
    if len(plan.methods) > 1:
        yield Text("\nspeed-up of each method with its best draft length (in brackets)")
        yield _methods(plan)
        yield from map(Text, _remarks(plan))
    if plan.assumed and not plan.own.points:
        yield Text("\nassumption, not measured: speed-up (draft tokens) by acceptance rate")
        yield _assumed(plan)
    if plan.capacity is not None:
        yield from _capacity(plan, plan.capacity)
    yield from map(Text, _closing(plan))


def _table(*columns: str, left: Sequence[str] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        first = column in left
        table.add_column(column, justify="left" if first else "right", no_wrap=not first, overflow="fold")
    return table


def _memory_title(plan: Plan) -> str:
    memory = plan.memory
    where = "memory" if plan.gpu == "cpu" else "memory of each GPU"
    return (
        f"{where}, {memory.device_gb:.1f} GB, in the order of loading, for {memory.batch} sequences of "
        f"{memory.context} tokens"
    )


def _memory(plan: Plan) -> Table:
    first = [] if plan.gpu == "cpu" else ["GPU"]
    columns = ("model", "weights", "buffers", "KV cache", "needed", "fraction", "left")
    table = _table(*first, *columns, left=["model"])
    for row in sorted(plan.memory.rows, key=lambda row: row.gpu):
        table.add_row(
            *([str(row.gpu)] if first else []),
            row.role,
            f"{row.weights_gb:.2f}",
            f"{row.activations_gb + row.logits_gb + row.context_gb:.2f}",
            f"{row.kv_cache_gb:.2f}",
            f"{row.kv_needed_gb:.2f}",
            "-" if row.fraction is None else f"{row.fraction:g}",
            f"{row.left_gb:.2f}",
        )
    return table


def _feasible(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    if memory.fits:
        yield f"fits, and so does every batch up to {memory.max_batch} at this length"
    else:
        yield f"no feasible configuration: {memory.problem}"
        yield f"nearest: {plan.nearest}" if plan.nearest else "nothing near to it fits either"
        yield from (f"or:      {other}" for other in plan.alternatives)
    yield from (f"note: {note}" for note in memory.notes)


def _points(plan: Plan) -> Table:
    price = ["$ / 10^6\ntokens"] if plan.price_per_gpu_hour is not None else []
    columns = ("draft\ntokens", "tokens\n/ pass", "speed-\nup", "95 %\n", "tokens\n/ s", "TPOT\nms", "plain\nms")
    table = _table("batch\n", *columns, "TTFT\nms", *price)
    for point in plan.own.best.values():
        table.add_row(
            f"{point.batch} " if point.fits else f"{point.batch}*",
            str(point.num_draft_tokens),
            f"{point.tokens_per_pass:.2f}",
            f"{point.speed_up:.2f}",
            _between(point),
            *map(_figure, (point.tokens_per_second, point.tpot_ms, point.plain_ms, point.ttft_ms)),
            *([] if point.cost_per_million is None else [_figure(point.cost_per_million)]),
            style="dim" if point.speed_up <= 1 and plan.own.method != "none" else None,
        )
    return table


def _figure(value: float) -> str:
    """Three significant digits, and whole numbers from 100 on."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def _between(point: Point) -> str:
    low, high = point.speed_up_interval
    return f"{low:.2f}-{high:.2f}" if high > low else "-"


def _methods(plan: Plan) -> Table:
    batches = _some(plan.batches)
    table = _table("method\n", *(f"batch\n{batch}" for batch in batches), "plain wins\nfrom batch", left=["method\n"])
    for method in plan.methods:
        best = method.best
        cells = (f"{best[b].speed_up:.2f} ({best[b].num_draft_tokens})" if b in best else "-" for b in batches)
        table.add_row(method.title + ("" if method.lossless else " (lossy)"), *cells, _wins(method, plan))
    return table


def _wins(method: MethodPlan, plan: Plan) -> str:
    if method.refused:
        return "refused"
    if not method.points or method.method == "none":
        return "-"
    return f"above {plan.max_batch}" if method.crossover is None else str(method.crossover)


def _remarks(plan: Plan) -> Iterator[str]:
    """What is said of the methods, each once; that the own one does not fit has been said."""
    said: dict[str, list[str]] = {}
    for method in plan.methods:
        notes = () if method is plan.own and method.points else method.notes
        for text in [f"refused: {method.refused}"] if method.refused else notes:
            said.setdefault(text, []).append(method.title)
    yield from (f"{', '.join(titles)}: {text}" for text, titles in said.items())


def _assumed(plan: Plan) -> Table:
    batches = _some(plan.batches)
    table = _table("rate", *(f"batch {batch}" for batch in batches))
    found = {(each.acceptance_rate, each.batch): each for each in plan.assumed}
    for rate in dict.fromkeys(each.acceptance_rate for each in plan.assumed):
        cells = [found[rate, batch] for batch in batches]
        table.add_row(f"{rate:.2f}", *(f"{each.speed_up:.2f} ({each.num_draft_tokens})" for each in cells))
    needed = (plan.break_even.get(batch) for batch in batches)
    table.add_section()
    table.add_row("pays above", *("never" if rate is None else f"{rate:.2f}" for rate in needed))
    return table


def _capacity(plan: Plan, found: Capacity) -> Iterator[RenderableType]:
    from rich.text import Text

    feasible = found.cheapest is not None
    yield Text(f"\n{found.headline}", style="green" if feasible else "red")
    within = f", {plan.latency_ms:g} ms a token" if plan.latency_ms is not None else ""
    within += f", the first after {found.ttft_ms:g} ms in 95 %" if found.ttft_ms is not None else ""
    yield Text(f"prompts of {plan.prompt} tokens, at most {found.utilisation:.0%} busy{within}")
    if found.methods:
        yield Text("\nreplicas by method")
        yield _fleets(found.methods, plan)
    if found.layouts:
        yield Text(f"\nreplicas by layout (TP x PP, * over several hosts), {found.layouts[0].title}")
        yield _fleets(found.by_layout, plan, by_layout=True)
    yield from (Text(f"{_layout(each)}: {each.problem}") for each in (*found.methods, *found.layouts) if each.problem)
    yield from map(Text, found.notes)
    best = found.cheapest
    if best is not None and best.settings:
        yield Text(f"to set for the fewest GPUs: {best.settings}")
    if best is not None and plan.gpu != "cpu":
        yield Text(f"then: trtspec deploy k8s CONFIG --out DIR --replicas {best.replicas}")


def _layout(fleet: Fleet) -> str:
    where = "" if fleet.draft_apart is None else ", draft apart" if fleet.draft_apart else ", draft shares"
    return f"{fleet.title}, TP {fleet.tensor_parallel} x PP {fleet.pipeline_parallel}{where}"


def _fleets(fleets: Sequence[Fleet], plan: Plan, by_layout: bool = False) -> Table:
    price = ["$ / h\n", "$ / M\ntokens"] if plan.price_per_gpu_hour is not None else []
    names = ("TP x PP\n", "draft\n") if by_layout else ("method\n",)
    columns = ("batch\n(drafts)", "repli-\ncas", "GPUs\n", "busy\n", "TPOT\nms", "TTFT\nms")
    table = _table(*names, *columns, *price, left=names)
    for each in fleets:
        split = f"{each.tensor_parallel} x {each.pipeline_parallel}{'*' * (each.hosts > 1)}"
        draft = "-" if each.draft_apart is None else "apart" if each.draft_apart else "shares"
        mine = " (spec)" if each.own else ""
        table.add_row(
            *((split + mine, draft) if by_layout else (each.title + mine,)),
            f"{each.batch} ({each.num_draft_tokens})",
            "-" if each.replicas is None else f"{each.replicas}",
            "-" if each.all_gpus is None else f"{each.all_gpus}",
            "-" if each.utilisation is None else f"{each.utilisation:.0%}",
            *map(_figure, (each.tpot_ms, each.ttft_ms)),
            *("-" if cost is None else _figure(cost) for cost in (each.cost_per_hour, each.cost_per_million) if price),
            style="dim" if each.problem else None,
        )
    return table


def _some(batches: Sequence[int]) -> list[int]:
    """The first, the last, and some in between."""
    if len(batches) <= _COLUMNS:
        return list(batches)
    last = len(batches) - 1
    return [batches[round(place * last / (_COLUMNS - 1))] for place in range(_COLUMNS)]


def _closing(plan: Plan) -> Iterator[str]:
    if plan.schedule:
        rows = ", ".join(f"{load}: {length}" for load, length in compact(plan.schedule).items())
        yield f"\ndraft tokens by requests in flight: {{{rows}}}, 0 beyond"
    if plan.latency_ms is not None:
        best = plan.within_latency
        found = "nothing that fits"
        if best is not None:
            found = (
                f"batch {best.batch} with {best.num_draft_tokens} draft tokens, {best.tokens_per_second:.0f} tokens/s"
            )
        yield f"most tokens/s within {plan.latency_ms:g} ms a token: {found}"
    yield from (f"warning: {warning}" for warning in plan.warnings)
