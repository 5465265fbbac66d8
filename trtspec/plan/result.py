"""What `trtspec plan` found: points, methods, memory, and the plan that holds them.

Plain records. Knows neither how they are made (`planner`) nor how they are shown (`text`, `page`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Interval = tuple[float, float]


@dataclass(frozen=True)
class Point:
    """What one batch size and draft length give. Times in milliseconds, `interval`s low and high at 95 %.

    Attributes:
        batch: sequences in flight.
        num_draft_tokens: proposed to the target a cycle; 0 is plain decoding.
        tokens_per_pass: emitted tokens a target pass and sequence, the bonus token counts.
        interval: of tokens_per_pass; both ends the same where it is an assumption.
        cycle_ms: drafting, verification and what lies between.
        plain_ms: one plain pass of the target at this batch.
        speed_up: tokens_per_pass x plain_ms / cycle_ms.
        speed_up_interval: `interval` carried through.
        tokens_per_second: of the whole batch.
        tpot_ms: time per output token of one sequence.
        ttft_ms: time to first token: the prefills of all models and a first cycle.
        cost_per_million: US dollars for a million output tokens; None without a price.
        fits: whether the models and their caches have room at this batch and the plan's context.
    """

    batch: int
    num_draft_tokens: int
    tokens_per_pass: float
    interval: Interval
    cycle_ms: float
    plain_ms: float
    speed_up: float
    speed_up_interval: Interval
    tokens_per_second: float
    tpot_ms: float
    ttft_ms: float
    cost_per_million: float | None = None
    fits: bool = True


@dataclass(frozen=True)
class MethodPlan:
    """One method with the plan's models.

    Attributes:
        method: as in speculation.method.
        title: method and who drafts, for people.
        lossless: whether the output is distributed as the target's own.
        points: by batch, then draft length; empty where nothing is known.
        crossover: batch from which on plain decoding is faster than every draft length; None: none up to the plan's
            `max_batch`.
        notes: what to know of the figures, such as "not measured".
        refused: why the method cannot be planned or built with this spec, and the way out; None: it can.
    """

    method: str
    title: str
    lossless: bool = True
    points: tuple[Point, ...] = ()
    crossover: int | None = None
    notes: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def best(self) -> dict[int, Point]:
        """Batch -> its fastest point."""
        best: dict[int, Point] = {}
        for point in self.points:
            if point.batch not in best or point.speed_up > best[point.batch].speed_up:
                best[point.batch] = point
        return best


@dataclass(frozen=True)
class Assumed:
    """What an acceptance rate that nobody measured would give: the best draft length at one batch."""

    acceptance_rate: float
    batch: int
    num_draft_tokens: int
    speed_up: float


@dataclass(frozen=True)
class MemoryRow:
    """What one model holds on one GPU, in the order of loading. GB of 10^9 bytes.

    Attributes:
        gpu: its number; 0 also for the host's memory.
        role: target, draft, middle, ...
        weights_gb: weights of this rank, heads included.
        kv_cache_gb: what the cache gets when the model loads.
        kv_needed_gb: what the asked batch and context need of it.
        activations_gb: largest live buffers of a pass.
        logits_gb: logits that are gathered.
        context_gb: CUDA context and libraries of the process.
        left_gb: free on this GPU when the model has loaded.
        fraction: of what is free, for the cache; None where caches have no fraction (torch runtime).
    """

    gpu: int
    role: str
    weights_gb: float
    kv_cache_gb: float
    kv_needed_gb: float
    activations_gb: float
    logits_gb: float
    context_gb: float
    left_gb: float
    fraction: float | None = None


@dataclass(frozen=True)
class Memory:
    """Whether the models fit.

    Attributes:
        device_gb: memory of one GPU, or of the host.
        batch: sequences that are asked for.
        context: tokens that the caches are to hold of each.
        rows: by GPU in the order of loading; what was reached where the models do not fit.
        notes: what to know of the figures.
        problem: why the models do not fit at the asked batch and context; None: they do.
        max_batch: largest batch that fits at the asked context; 0: none.
    """

    device_gb: float
    batch: int
    context: int
    rows: tuple[MemoryRow, ...]
    notes: tuple[str, ...] = ()
    problem: str | None = None
    max_batch: int = 0

    @property
    def fits(self) -> bool:
        """Whether the models and their caches have room at the asked batch and context."""
        return self.problem is None


@dataclass(frozen=True)
class Fleet:
    """Replicas of one kind that together serve a rate of requests, or why none do; see `trtspec.plan.capacity`.

    Attributes:
        method: as in speculation.method.
        title: method and who drafts, for people.
        own: whether method and layout are the spec's own.
        tensor_parallel: of the target.
        pipeline_parallel: of the target.
        draft_apart: whether what drafts has GPUs of its own; None: no further model drafts.
        hosts: that one replica lies on.
        num_gpus: of one replica, all its models together.
        batch: most sequences in flight of one replica.
        num_draft_tokens: proposed to the target a cycle; 0 is plain decoding.
        most_requests_per_second: of one replica with all its slots taken.
        planned_requests_per_second: of one replica, that keeps the targets; 0: none does.
        tpot_ms: time per output token with all slots taken, the prefills of other requests included.
        ttft_ms: time to first token that 95 % of the requests keep, waiting included.
        settings: what to set in the spec for it, as `key=value` words; empty where the spec says all of it.
        replicas: that are needed; None: none keep the targets, see `problem`.
        utilisation: part of what the replicas could do at most that the rate takes.
        cost_per_hour: US dollars for all replicas; None without a price.
        cost_per_million: US dollars for a million output tokens at the rate.
        problem: which target no batch keeps; the figures are then those that come nearest.
    """

    method: str
    title: str
    own: bool
    tensor_parallel: int
    pipeline_parallel: int
    draft_apart: bool | None
    hosts: int
    num_gpus: int
    batch: int
    num_draft_tokens: int
    most_requests_per_second: float
    planned_requests_per_second: float
    tpot_ms: float
    ttft_ms: float
    settings: str = ""
    replicas: int | None = None
    utilisation: float | None = None
    cost_per_hour: float | None = None
    cost_per_million: float | None = None
    problem: str | None = None

    @property
    def all_gpus(self) -> int | None:
        """GPUs of all replicas."""
        return None if self.replicas is None else self.replicas * self.num_gpus


@dataclass(frozen=True)
class Capacity:
    """What serves a rate of requests.

    Attributes:
        rate: requests a second.
        answer_tokens: mean output tokens of a request.
        utilisation: that is not exceeded.
        ttft_ms: target of the time to first token, which 95 % of the requests are to keep; None: not given.
        methods: the spec's layout with each method of which something is known, the cheapest first.
        layouts: the spec's method with the target split otherwise, or with the draft elsewhere, the cheapest first.
        notes: what is left out, and why.
    """

    rate: float
    answer_tokens: int
    utilisation: float
    ttft_ms: float | None
    methods: tuple[Fleet, ...]
    layouts: tuple[Fleet, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def own(self) -> Fleet | None:
        """The spec as it is; None: nothing is known of it."""
        return next((fleet for fleet in self.methods if fleet.own), None)

    @property
    def by_layout(self) -> list[Fleet]:
        """The layouts, the spec's own among them; the cheapest first."""
        own = [self.own] if self.own else []
        return sorted([*own, *self.layouts], key=lambda each: (each.replicas is None, each.all_gpus or each.num_gpus))

    @property
    def cheapest(self) -> Fleet | None:
        """What takes the fewest GPUs of all, the spec as it is where nothing takes fewer; None: nothing is feasible."""
        able = [fleet for fleet in (*self.methods, *self.layouts) if fleet.replicas is not None]
        return min(able, key=lambda fleet: (fleet.all_gpus or 0, not fleet.own), default=None)

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        asked = f"{self.rate:g} requests/s of {self.answer_tokens} tokens each"
        best = self.cheapest
        if best is None:
            nearest = min((*self.methods, *self.layouts), key=lambda fleet: fleet.tpot_ms, default=None)
            return f"No feasible configuration for {asked}{f': {nearest.problem}' if nearest else ''}."
        cost = "" if best.cost_per_hour is None else f", ${best.cost_per_hour:,.2f} an hour"
        own = "" if best.own else f" with {best.title}, TP {best.tensor_parallel} x PP {best.pipeline_parallel}"
        return f"{asked} take {counted(best.replicas, 'replica')} ({counted(best.all_gpus, 'GPU')}){own}{cost}."


def counted(number: int | None, noun: str) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{number} {noun}{'s' * (number != 1)}"


@dataclass(frozen=True)
class Plan:
    """The answer to: does it fit, does it pay, with how many draft tokens, and until which batch.

    Attributes:
        name: of the spec.
        gpu: catalogue name, or cpu.
        times_source: where step times come from, one line.
        acceptance_source: where acceptance comes from, one line.
        temperature: that acceptance is planned for.
        context: tokens in each sequence's cache, for step times; `memory` has a context of its own.
        prompt: prompt tokens, for the time to first token.
        batches: that were asked for, rising.
        max_batch: largest batch that was searched for a crossover.
        methods: the spec's own first, then plain decoding, then the others.
        memory: of the spec's own method.
        acceptance_rate: that gives the spec's own method the tokens per pass it has, were it the same at every
            position; None: nothing is known.
        assumed: best draft length and speed-up over acceptance rates, by batch; an assumption, not a measurement.
        break_even: batch -> acceptance rate above which speculation pays; None: no rate does.
        nearest: the nearest feasible configuration, in one sentence; None where this one is feasible or none is.
        alternatives: further changes of the spec that would be feasible, the nearest first.
        schedule: load -> draft tokens of the spec's own method; empty where nothing is known.
        fractions: role -> fraction of free memory for the KV cache.
        price_per_gpu_hour: US dollars; None: not given.
        num_gpus: that the models occupy together.
        latency_ms: target of the time per output token; None: not given.
        within_latency: the point with most tokens per second that fits and meets latency_ms; None: none does.
        warnings: what may make the plan wrong.
        capacity: what serves a rate of requests; None: no rate was given.
    """

    name: str
    gpu: str
    times_source: str
    acceptance_source: str
    temperature: float
    context: int
    prompt: int
    batches: tuple[int, ...]
    max_batch: int
    methods: tuple[MethodPlan, ...]
    memory: Memory
    acceptance_rate: float | None = None
    assumed: tuple[Assumed, ...] = ()
    break_even: Mapping[int, float | None] = field(default_factory=dict)
    nearest: str | None = None
    alternatives: tuple[str, ...] = ()
    schedule: Mapping[int, int] = field(default_factory=dict)
    fractions: Mapping[str, float] = field(default_factory=dict)
    price_per_gpu_hour: float | None = None
    num_gpus: int = 1
    latency_ms: float | None = None
    within_latency: Point | None = None
    warnings: tuple[str, ...] = ()
    capacity: Capacity | None = None

    @property
    def fits(self) -> bool:
        """Whether the spec's own models fit at the asked batch and context."""
        return self.memory.fits

    @property
    def own(self) -> MethodPlan:
        """The spec's own method."""
        return self.methods[0]

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        if not self.fits:
            return f"It does not fit: {self.memory.problem}."
        if self.own.refused:
            return f"It cannot be built: {self.own.refused}."
        if self.own.method == "none":
            return "Plain decoding: nothing is proposed."
        if not self.own.points:
            needed = self.break_even.get(self.batches[0], 0.0)
            if needed is None:
                return f"It does not pay at batch {self.batches[0]}, whatever is accepted."
            above = f"; at batch {self.batches[0]} it pays above a rate of {needed:.2f}" if needed else ""
            return f"How much is accepted is not measured{above}."
        first = self.own.best[self.batches[0]]
        low, high = first.speed_up_interval
        between = f" (95 %: {low:.2f} to {high:.2f})" if high > low else ""
        pays = "It pays" if low > 1 else "It may pay" if high > 1 else "It does not pay"
        until = f"it pays up to batch {self.max_batch} at least"
        if self.own.crossover:
            until = f"plain decoding wins from batch {self.own.crossover} on"
        tokens = f"{first.num_draft_tokens} draft token{'s' * (first.num_draft_tokens > 1)}"
        return (
            f"{pays}: {first.speed_up:.2f} times plain decoding{between} at batch {first.batch} with {tokens}"
            f"{f'; {until}' if first.speed_up > 1 else ''}."
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, with the `headline`s, `fits`, and `best` (batch -> point) of every method; keys are text."""
        answer = asdict(self)
        for method, each in zip(self.methods, answer["methods"], strict=True):
            each["best"] = {str(batch): asdict(point) for batch, point in method.best.items()}
        for table in ("break_even", "schedule"):
            answer[table] = {str(load): value for load, value in answer[table].items()}
        if self.capacity is not None:
            answer["capacity"]["headline"] = self.capacity.headline
        return {"headline": self.headline, "fits": self.fits, **answer}
