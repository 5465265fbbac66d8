"""How many replicas serve a rate of requests, of which layout, and what they cost.

A replica is one server with B slots, each of which a request holds for its prefill and its N output tokens. All slots
taken, a request spends

    W = B p + N t        seconds: its own prefill, those of the B - 1 that come meanwhile, and its tokens

with p what a prompt keeps the GPUs from decoding and t the time per output token in a batch of B. In steady state every
slot takes a new request once in W, hence the B - 1. By Little's law (J. Little, A Proof for the Queuing Formula L = λW,
Operations Research 9, 1961) a replica then answers B / W requests a second, and each sees (W - p) / N seconds a token,
which is what the target of the time per output token is held against. With pipeline_parallel k a prompt keeps each of
the k stages busy for a k-th of its time (p), while it takes all of it itself; where fewer than k sequences are in
flight, stages idle (the bubble): a pass then takes as long as with k.

Time to first token is waiting, the cycle under way, the prefill and a first cycle. Waiting for a slot is that of B
servers of W each with Poisson arrivals and exponential times (M/M/c: A. K. Erlang 1917; `waiting_s`); for prefills that
came before, that of one server of p and the cycle that follows, or W / B if that is shorter. Each is taken at its 95th
percentile, and the two are added. Where lengths of answers scatter by half their mean, a simulated server waits less;
where they scatter by all of it, about as long.

A fleet shares the rate evenly. Not modelled: bursts, prompts that the KV cache already has, hosts that are not full.
Knows forecasts of methods; reads no files and prints nothing.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.plan.layouts import HOST_GPUS, layouts, require_buildable
from trtspec.plan.result import Capacity, Fleet, MethodPlan
from trtspec.spec.schema import Spec

if TYPE_CHECKING:
    from trtspec.plan.planner import Forecast

PERCENTILE = 0.95
_PERCENT = range(1, 101)


@dataclass(frozen=True)
class Demand:
    """What is to be served.

    Attributes:
        rate: requests a second, of all replicas together.
        answer_tokens: mean output tokens of a request.
        ttft_ms: longest time to first token, for 95 % of the requests; None: any.
        utilisation: part of what a replica can do at most that it is planned for; below 1.
        host_gpus: GPUs of a host.
    """

    rate: float
    answer_tokens: int
    ttft_ms: float | None = None
    utilisation: float = 0.7
    host_gpus: int = HOST_GPUS


def waiting_s(servers: int, rate: float, service_s: float) -> float:
    """95th percentile of the seconds that a request waits for one of `servers`, in an M/M/c queue.

    With a = rate x service_s, Erlang's B(c) = a B(c - 1) / (c + a B(c - 1)), and the probability to wait
    C = B / (1 - (1 - B) a / c); longer than s wait C exp(-s (c / service_s - rate)). `rate` is below
    servers / service_s.
    """
    load, blocked = rate * service_s, 1.0
    for server in range(1, servers + 1):
        blocked = load * blocked / (server + load * blocked)
    waits = blocked / (1 - (1 - blocked) * load / servers)
    return max(0.0, math.log(max(waits, 1e-300) / (1 - PERCENTILE)) / (servers / service_s - rate))


@dataclass(frozen=True)
class Replica:
    """One server with `batch` slots; see the module.

    Attributes:
        batch: B.
        num_draft_tokens: that it drafts with all slots taken.
        token_s: t, of one sequence when none else is in prefill.
        cycle_s: of all slots.
        prefill_s: until a prompt is read.
        busy_s: p.
        answer_tokens: N.
    """

    batch: int
    num_draft_tokens: int
    token_s: float
    cycle_s: float
    prefill_s: float
    busy_s: float
    answer_tokens: int

    @property
    def in_flight_s(self) -> float:
        """W."""
        return self.batch * self.busy_s + self.answer_tokens * self.token_s

    @property
    def most(self) -> float:
        """Requests a second with all slots taken."""
        return self.batch / self.in_flight_s

    @property
    def tpot_ms(self) -> float:
        """Time per output token with all slots taken."""
        return 1e3 * (self.in_flight_s - self.busy_s) / self.answer_tokens

    def ttft_ms(self, utilisation: float) -> float:
        """Time to first token at the 95th percentile, with this part of `most` requests a second; below 1."""
        rate = utilisation * self.most
        waiting = waiting_s(self.batch, rate, self.in_flight_s)
        if self.batch > 1:  # a single slot has nobody's prefill before it
            waiting += waiting_s(1, rate, min(self.busy_s + self.cycle_s, 1 / self.most))
        return 1e3 * (waiting + self.cycle_s + self.prefill_s + self.cycle_s)

    def within(self, ttft_ms: float | None, utilisation: float) -> float:
        """The largest part of `most`, up to `utilisation`, that keeps the time to first token; 0: none does."""
        if ttft_ms is None or self.ttft_ms(utilisation) <= ttft_ms:
            return utilisation
        kept = bisect_right(_PERCENT, ttft_ms, key=lambda percent: self.ttft_ms(utilisation * percent / 100))
        return utilisation * kept / 100


def fleet(forecast: Forecast, demand: Demand, title: str, spec: Spec, own: bool = False) -> Fleet:
    """The fewest replicas that serve `demand`, each with the batch with which it can take most requests.

    Args:
        forecast: of one method and layout.
        demand: what is to be served.
        title: of the method, for people.
        spec: as it is written; what differs becomes `Fleet.settings`.
        own: whether method and layout are those of `spec`.

    Returns:
        It has a `problem` where no batch keeps the targets.

    Raises:
        TrtspecError: no sequence fits into memory.
    """
    costs = forecast.costs
    choices = [_replica(forecast, batch, demand.answer_tokens) for batch in _batches(forecast)]
    if not choices:
        raise TrtspecError("it does not fit into memory")
    chosen, share, problem = _chosen(choices, demand, costs.question.latency_ms)
    figures, planned = dict[str, Any](problem=problem), share * chosen.most
    if problem is None:
        replicas = math.ceil(demand.rate / planned - 1e-9)
        share = demand.rate / (replicas * chosen.most)
        figures = {"replicas": replicas, "utilisation": share}
        if (price := costs.question.price) is not None:
            hour = price * replicas * costs.num_gpus
            million = hour / 3600 / (demand.rate * demand.answer_tokens) * 1e6
            figures |= {"cost_per_hour": hour, "cost_per_million": million}
    target = costs.spec.target
    return Fleet(
        method=costs.spec.speculation.method,
        title=title,
        own=own,
        tensor_parallel=target.tensor_parallel,
        pipeline_parallel=target.pipeline_parallel,
        draft_apart=costs.apart if len(costs.spec.models) > 1 else None,
        hosts=costs.spec.hardware.num_nodes,
        num_gpus=costs.num_gpus,
        batch=chosen.batch,
        num_draft_tokens=chosen.num_draft_tokens,
        most_requests_per_second=chosen.most,
        planned_requests_per_second=planned,
        tpot_ms=chosen.tpot_ms,
        ttft_ms=chosen.ttft_ms(share),
        settings=" ".join(_changes(spec.model_dump(mode="json"), _set_to(costs.spec, chosen).model_dump(mode="json"))),
        **figures,
    )


def _chosen(choices: list[Replica], demand: Demand, latency_ms: float | None) -> tuple[Replica, float, str | None]:
    """What takes most requests within the targets, and how busy it may be; or what is nearest, 0, and the problem."""
    quick = [each for each in choices if latency_ms is None or each.tpot_ms <= latency_ms]
    if not quick:
        nearest = min(choices, key=lambda each: each.tpot_ms)
        took, asked = f"an output token takes {nearest.tpot_ms:.3g} ms", latency_ms
    else:
        shares = [each.within(demand.ttft_ms, demand.utilisation) for each in quick]
        share, best = max(zip(shares, quick, strict=True), key=lambda each: each[0] * each[1].most)
        if share > 0:
            return best, share, None
        nearest = min(quick, key=lambda each: each.ttft_ms(0.0))
        took, asked = f"the first token takes {nearest.ttft_ms(0.0):.3g} ms at least", demand.ttft_ms
    return nearest, 0.0, f"{took}, at batch {nearest.batch}; asked for are {asked:g}"


def capacity(
    demand: Demand,
    spec: Spec,
    sizes: Mapping[str, ModelConfig],
    methods: Iterable[tuple[MethodPlan, Forecast | None]],
    forecast_of: Callable[[Spec], Forecast],
) -> Capacity:
    """What serves `demand`: the spec's layout with each method, and its method in other layouts.

    Args:
        demand: rate, lengths, targets.
        spec: as it is written.
        sizes: of its models, by role.
        methods: the spec's own first, each with its forecast; None: nothing is known of it.
        forecast_of: forecast of the first of these methods that has one, with another layout; raises TrtspecError
            where step times are not known.
    """
    known = [(method, forecast) for method, forecast in methods if forecast is not None]
    found, elsewhere, left_out = list[Fleet](), list[Fleet](), dict[str, list[str]]()

    def add(fleets: list[Fleet], name: str, made: Callable[[], Fleet]) -> None:
        try:
            fleets.append(made())
        except TrtspecError as error:
            left_out.setdefault(str(error), []).append(name)

    def laid_out(layout: Spec) -> Fleet:
        require_buildable(layout)
        return fleet(forecast_of(layout), demand, known[0][0].title, spec)

    for method, forecast in known:
        title = method.title + ("" if method.lossless else " (lossy)")
        add(found, title, partial(fleet, forecast, demand, title, spec, method.method == spec.speculation.method))
    if known and spec.engine.runtime == "tensorrt_llm":
        for name, layout in layouts(known[0][1].costs.spec, sizes["target"], demand.host_gpus):
            add(elsewhere, name, partial(laid_out, layout))
    return Capacity(
        rate=demand.rate,
        answer_tokens=demand.answer_tokens,
        utilisation=demand.utilisation,
        ttft_ms=demand.ttft_ms,
        methods=tuple(sorted(found, key=_order)),
        layouts=tuple(sorted(elsewhere, key=_order)),
        notes=tuple(f"left out: {', '.join(names)}: {problem}" for problem, names in left_out.items()),
    )


def _batches(forecast: Forecast) -> list[int]:
    """That fit: all up to 8, then four in each doubling, and those that the spec and the question name."""
    spec, question, most = forecast.costs.spec, forecast.costs.question, forecast.max_batch
    grid = {round(2 ** (quarter / 4)) for quarter in range(4 * most.bit_length())} | {*range(1, 9), most}
    named = {*question.batches, spec.engine.max_batch_size, spec.serving.max_concurrency}
    return sorted(batch for batch in grid | named if 1 <= batch <= most)


def _replica(forecast: Forecast, batch: int, answer_tokens: int) -> Replica:
    point, costs = forecast.best(batch), forecast.costs
    return Replica(
        batch=batch,
        num_draft_tokens=point.num_draft_tokens,
        token_s=point.tpot_ms / 1e3,
        cycle_s=point.cycle_ms / 1e3,
        prefill_s=costs.prefill_s(),
        busy_s=costs.busy_s(),
        answer_tokens=answer_tokens,
    )


def _set_to(spec: Spec, replica: Replica) -> Spec:
    """The spec with batch and draft length of a replica."""
    speculation = spec.speculation
    if speculation.method != "none" and speculation.derived_num_draft_tokens is None:
        speculation = speculation.model_copy(update={"num_draft_tokens": replica.num_draft_tokens})
    return spec.model_copy(
        update={
            "speculation": speculation,
            "engine": spec.engine.model_copy(update={"max_batch_size": replica.batch}),
            "serving": spec.serving.model_copy(update={"max_concurrency": replica.batch}),
        }
    )


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """What differs, as `key=value` words for --set."""
    for key, value in new.items():
        before = old.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            yield from _changes(before, value, f"{prefix}{key}.")
        elif before != value:
            yield f"{prefix}{key}={json.dumps(value, separators=(',', ':'))}"


def _order(each: Fleet) -> tuple[bool, int, float]:
    """Feasible ones first, then by GPUs, which is what they cost; of the same number that with more to spare."""
    return each.replicas is None, each.all_gpus or each.num_gpus, each.utilisation or each.tpot_ms
