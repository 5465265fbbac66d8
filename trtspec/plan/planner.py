"""The plan: what every method that the models allow would give, at every batch and draft length, and what fits.

Puts step times, acceptance and memory together. Does not know where they come from: the roofline and measured curves
are both `StepTimes`, a trace and an assumed rate both `Acceptance`. Reads no files and prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.plan.capacity import Demand, capacity
from trtspec.plan.cycle_cost import CycleCost, cycle_seconds
from trtspec.plan.drafting import Drafting
from trtspec.plan.layouts import drafts_apart
from trtspec.plan.memory import alternatives, memory_plan
from trtspec.plan.result import Assumed, Interval, MethodPlan, Plan, Point
from trtspec.plan.speedup import best_length, expected_tokens, needed_acceptance
from trtspec.plan.step_times import StepTimes
from trtspec.spec.gpus import Gpu
from trtspec.spec.rules import MAX_FREE_DRAFT_TOKENS
from trtspec.spec.schema import Spec, Speculation, Tree
from trtspec.trtllm.placement import device_ids
from trtspec.trtllm.support import check_support

if TYPE_CHECKING:
    from trtspec.plan.trace import Trace

CHAINS = ("draft_target", "early_exit", "ngram", "mtp")  # one proposer, whose acceptance one rate describes
RATES = tuple(percent / 100 for percent in range(50, 100, 5))
_PLAIN = Drafting("none", 0, roles=())
_DENSE = 64  # batches up to here are searched one by one, larger ones in steps of 8

Sizes = Mapping[str, ModelConfig]  # by role


@dataclass(frozen=True)
class Outlook:
    """What one way to draft emits.

    Attributes:
        tokens_per_pass: emitted tokens a target pass and sequence.
        interval: of it, at 95 %; both ends the same where it is assumed.
        proposer_passes: role -> forward passes of it a target pass; None: those of the draft length.
        drafted: draft tokens a cycle where they are fewer than the draft length; None: all.
    """

    tokens_per_pass: float
    interval: Interval
    proposer_passes: Mapping[str, float] | None = None
    drafted: float | None = None


class Acceptance(Protocol):
    """What drafts are worth."""

    @property
    def source(self) -> str:
        """Where it is known from, one line for people."""
        ...

    def of(self, spec: Spec, drafting: Drafting) -> Outlook:
        """What a drafting with the models of `spec` emits.

        Raises:
            TrtspecError: it is not known.
        """
        ...


@dataclass(frozen=True)
class Traced:
    """Acceptance of recorded answers.

    Attributes:
        trace: the answers.
        name: of the trace, for people.
        temperature: of the answers that count.
        check: raises TrtspecError where a spec's models are others than the trace's.
    """

    trace: Trace
    name: str
    temperature: float
    check: Callable[[Spec], None]

    @property
    def source(self) -> str:
        """`measured on 12 answers at temperature 0 (quickstart.trace.jsonl)`."""
        answers = sum(answer.temperature == self.temperature for answer in self.trace.answers)
        return f"measured on {answers} answers at temperature {self.temperature:g} ({self.name})"

    def of(self, spec: Spec, drafting: Drafting) -> Outlook:
        """By the trace, with a bootstrap interval over prompts; TrtspecError where it lacks a proposer."""
        from trtspec.plan.acceptance import expected, interval

        self.check(spec)
        found = expected(self.trace, drafting, self.temperature)
        return Outlook(
            found.length,
            interval(self.trace, drafting, self.temperature),
            found.proposer_passes,
            found.drafted / found.passes if found.passes else None,
        )


@dataclass(frozen=True)
class AssumedRate:
    """The same acceptance rate at every position, for one method; nothing is known of others."""

    rate: float
    method: str

    @property
    def source(self) -> str:
        """`assumed: ...`."""
        return f"assumed, not measured: every draft token is accepted with probability {self.rate:g}"

    def of(self, spec: Spec, drafting: Drafting) -> Outlook:
        """E = 1 + alpha + alpha^2 + ..., of the one method if it drafts chains."""
        if drafting.method != self.method or drafting.method not in CHAINS:
            raise TrtspecError("not measured: the assumed rate is that of another method")
        emitted = expected_tokens(self.rate, drafting.num_draft_tokens)
        return Outlook(emitted, (emitted, emitted))


@dataclass(frozen=True)
class Unknown:
    """No acceptance at all."""

    source: str = "not measured"

    def of(self, spec: Spec, drafting: Drafting) -> Outlook:
        """Raises TrtspecError."""
        raise TrtspecError("not measured: record a trace with trtspec bench acceptance")


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        gpu: a row of the catalogue.
        device_gb: memory of one GPU, or of the host.
        batches: sizes to plan for, rising.
        context: tokens in each sequence's cache, for step times.
        prompt: prompt tokens, for the time to first token.
        memory_batch: the batch that has to fit.
        memory_context: tokens of each of its sequences; None: as many as an engine takes.
        temperature: that acceptance is planned for.
        price: US dollars for a GPU hour.
        latency_ms: longest time per output token.
        max_draft_tokens: longest draft to consider.
        gpus: the catalogue, to find a GPU on which it would fit.
        demand: rate of requests to find replicas for; None: none.
        in_process: whether the torch runtime decodes within one process, and not a server: there a tree is verified in
            one pass, and an early exit is part of the target's engine.
    """

    gpu: Gpu
    device_gb: float
    batches: tuple[int, ...]
    context: int
    prompt: int
    memory_batch: int
    memory_context: int | None = None
    temperature: float = 0.0
    price: float | None = None
    latency_ms: float | None = None
    max_draft_tokens: int = 16
    gpus: Mapping[str, Gpu] = field(default_factory=dict)
    demand: Demand | None = None
    in_process: bool = False


def make_plan(
    spec: Spec,
    sizes: Callable[[Spec], Sizes],
    times: Callable[[Spec, Sizes], StepTimes],
    acceptance: Acceptance,
    question: Question,
) -> Plan:
    """Plan a spec, and compare its method with the others that its models allow.

    Args:
        spec: what is to be served.
        sizes: of the models of a spec.
        times: step times of the models of a spec.
        acceptance: what drafts are worth.
        question: batches, context, price.

    Raises:
        TrtspecError: sizes or step times of the spec's own models are not known.
    """
    own_sizes = sizes(spec)
    costs = Costs(spec, times(spec, own_sizes), question)
    memory = memory_plan(spec, own_sizes, question.device_gb, question.memory_batch, question.memory_context)
    planned = [_method(each, sizes, times, acceptance, question) for each in variants(spec)]
    methods, (_, forecast) = tuple(method for method, _ in planned), planned[0]
    instead = [] if memory.fits else alternatives(spec, own_sizes, memory, question.gpus, question.gpu)

    def forecast_of(layout: Spec) -> Forecast:
        """Of the first method that has one. Acceptance does not depend on the layout."""
        known = next(each for _, each in planned if each is not None)
        models = sizes(layout)
        fits = memory_plan(layout, models, question.device_gb, question.memory_batch, question.memory_context)
        return Forecast(Costs(layout, times(layout, models), question), known.outlooks, fits.max_batch)

    serves = None
    if question.demand is not None:
        serves = capacity(question.demand, spec, own_sizes, planned, forecast_of)
    return Plan(
        name=spec.name,
        gpu=question.gpu.name,
        times_source=costs.times.source,
        acceptance_source=acceptance.source,
        temperature=question.temperature,
        context=question.context,
        prompt=question.prompt,
        batches=question.batches,
        max_batch=costs.searched[-1],
        methods=methods,
        memory=memory,
        acceptance_rate=_equal_rate(methods[0]),
        assumed=tuple(_assumed(costs)),
        break_even=_break_even(costs),
        nearest=instead[0] if instead else None,
        alternatives=tuple(instead[1:]),
        schedule=_schedule(forecast, methods[0].crossover) if forecast else {},
        fractions={row.role: row.fraction for row in memory.rows if row.fraction is not None} if memory.fits else {},
        price_per_gpu_hour=question.price,
        num_gpus=_num_gpus(spec),
        latency_ms=question.latency_ms,
        within_latency=_within(methods, question.latency_ms),
        capacity=serves,
    )


def variants(spec: Spec) -> Iterator[Spec]:
    """The spec, then the spec with each other method that its models and settings allow, plain decoding first."""
    yield spec
    speculation = spec.speculation
    allowed = {
        "none": True,
        "draft_target": speculation.draft is not None,
        "ngram": True,
        "tree": speculation.draft is not None,
        "cascade": speculation.draft is not None and speculation.cascade is not None,
        **{name: getattr(speculation, name) is not None for name in ("early_exit", "medusa", "mtp")},
    }
    for method, possible in allowed.items():
        if possible and method != speculation.method:
            settings = {key: value for key, value in dict(speculation).items() if key != "num_draft_tokens"}
            other = Speculation.model_validate({**settings, "method": method})
            engine = spec.engine.model_copy(update={"max_draft_len": None})
            yield spec.model_copy(update={"speculation": other, "engine": engine})


@dataclass(frozen=True)
class Costs:
    """What the cycles of a spec's method take."""

    spec: Spec
    times: StepTimes
    question: Question

    @property
    def draftings(self) -> tuple[Drafting, ...]:
        """What to consider: the size that the method's settings dictate, or all draft lengths up to a limit."""
        speculation = self.spec.speculation
        if speculation.method == "none":
            return (_PLAIN,)
        if speculation.derived_num_draft_tokens is not None:
            made = Drafting.of(self.spec)
            return (replace(made, chunk=self.spec.serving.plain_chunk_tokens) if made.method == "medusa" else made,)
        most = min(self.question.max_draft_tokens, self.spec.engine.max_draft_len or MAX_FREE_DRAFT_TOKENS)
        if speculation.method == "mtp":  # a module that goes on by itself is right less often
            most = min(most, speculation.num_draft_tokens)
        return tuple(Drafting.of(self.spec, length) for length in range(1, most + 1))

    @property
    def searched(self) -> tuple[int, ...]:
        """Batches at which to look for the one where plain decoding wins."""
        most = max(*self.question.batches, self.spec.engine.max_batch_size, self.spec.serving.max_concurrency)
        return tuple(sorted({*range(1, min(most, _DENSE) + 1), *range(_DENSE, most, 8), most}))

    def plain_s(self, batch: int) -> float:
        """Seconds of a plain pass."""
        return self.cycle_s(batch, _PLAIN)

    def cycle_s(self, batch: int, drafting: Drafting, outlook: Outlook | None = None) -> float:
        """Seconds of a cycle. Served, a tree is verified path by path, and an early exit is an engine of its own.

        A draft apart (`apart`) works while the target does, so that the sequences may go in two groups, one of which
        drafts while the other is verified: two times the longer of both takes a cycle then. That or all of them
        together, whichever is shorter; one sequence drafts and verifies in turn in any case.
        """
        whole = self._cycle(batch, drafting, outlook)
        if not self.apart or batch == 1 or whole.draft_s == 0:
            return whole.total
        half = self._cycle(math.ceil(batch / 2), drafting, outlook)
        return min(whole.total, 2 * max(half.draft_s, half.verify_s + half.overhead_s))

    def _cycle(self, batch: int, drafting: Drafting, outlook: Outlook | None) -> CycleCost:
        passes, drafted = (outlook.proposer_passes, outlook.drafted) if outlook else (None, None)
        context, in_process = self.question.context, self.question.in_process
        shared = in_process and self._same_type
        return cycle_seconds(
            self.times, drafting, batch, context, passes, engine_track=not in_process, drafted=drafted, shared=shared
        )

    @cached_property
    def apart(self) -> bool:
        """Whether what drafts has GPUs that the target has not."""
        return drafts_apart(self.spec)

    @property
    def num_gpus(self) -> int:
        """That all models occupy together."""
        return _num_gpus(self.spec)

    @property
    def _same_type(self) -> bool:
        """Whether an early exit can run in the target's own engine."""
        draft, target = self.spec.models.get("draft"), self.spec.models["target"]
        return draft is not None and draft.dtype == target.dtype

    def prefill_s(self) -> float:
        """Seconds in which all models read one prompt, one after the other."""
        return sum(self._prefills().values())

    def busy_s(self) -> float:
        """Seconds that each GPU is kept from decoding by one prompt: of a pipeline's stages each has a part of it, and
        what drafts apart reads it meanwhile."""
        models = self.spec.models
        target, *others = (seconds / models[role].pipeline_parallel for role, seconds in self._prefills().items())
        return max(target, sum(others)) if self.apart else target + sum(others)

    def _prefills(self) -> dict[str, float]:
        """Role -> seconds of one prompt; the target first."""
        return {role: self.times.seconds(role, 1, self.question.prompt, 0) for role in self.spec.models}


@dataclass(frozen=True)
class Forecast:
    """Costs and outlooks of one method: its speed at any batch. Batches above `max_batch` do not fit."""

    costs: Costs
    outlooks: tuple[tuple[Drafting, Outlook], ...]
    max_batch: int

    def points(self, batch: int) -> Iterator[Point]:
        """A point for each draft length."""
        return (self._point(batch, *each) for each in self.outlooks)

    def best(self, batch: int) -> Point:
        """That with the largest speed-up."""
        return max(self.points(batch), key=lambda point: point.speed_up)

    def _point(self, batch: int, drafting: Drafting, outlook: Outlook) -> Point:
        cycle, plain, price = self.costs.cycle_s(batch, drafting, outlook), self.costs.plain_s(batch), None
        tokens_per_second = batch * outlook.tokens_per_pass / cycle
        if self.costs.question.price is not None:
            price = self.costs.question.price * _num_gpus(self.costs.spec) / 3600 / tokens_per_second * 1e6
        low, high = outlook.interval
        return Point(
            batch=batch,
            num_draft_tokens=drafting.num_draft_tokens,
            tokens_per_pass=outlook.tokens_per_pass,
            interval=outlook.interval,
            cycle_ms=1e3 * cycle,
            plain_ms=1e3 * plain,
            speed_up=outlook.tokens_per_pass * plain / cycle,
            speed_up_interval=(low * plain / cycle, high * plain / cycle),
            tokens_per_second=tokens_per_second,
            tpot_ms=1e3 * cycle / outlook.tokens_per_pass,
            ttft_ms=1e3 * (self.costs.prefill_s() + cycle),
            cost_per_million=price,
            fits=batch <= self.max_batch,
        )


def _method(
    spec: Spec,
    sizes: Callable[[Spec], Sizes],
    times: Callable[[Spec, Sizes], StepTimes],
    acceptance: Acceptance,
    question: Question,
) -> tuple[MethodPlan, Forecast | None]:
    """One method. What is not known of it becomes a note, what cannot be built is refused; then nothing is forecast."""
    method, medusa = spec.speculation.method, spec.speculation.medusa
    made = MethodPlan(method, _title(spec), not (method == "medusa" and medusa and medusa.acceptance == "typical"))
    if problems := check_support(spec):
        return replace(made, refused=f"{problems[0].reason}; nearest that works: {problems[0].nearest}"), None
    try:
        models = sizes(spec)
        costs = Costs(spec, times(spec, models), question)
        nothing = Outlook(1.0, (1.0, 1.0))
        outlooks = tuple((each, acceptance.of(spec, each) if each != _PLAIN else nothing) for each in costs.draftings)
        memory = memory_plan(spec, models, question.device_gb, question.memory_batch, question.memory_context)
        forecast = Forecast(costs, outlooks, memory.max_batch)
        points = tuple(point for batch in question.batches for point in forecast.points(batch))
        wins = None if method == "none" else _crossover(forecast)
    except TrtspecError as error:
        return replace(made, notes=(str(error),)), None
    notes = () if memory.fits else (f"does not fit: {memory.problem}",)
    return replace(made, points=points, crossover=wins, notes=notes), forecast


def _crossover(forecast: Forecast) -> int | None:
    """The batch from which on plain decoding wins; the speed-up of a mixture of experts falls, rises and falls."""
    searched = forecast.costs.searched
    pays = [place for place, batch in enumerate(searched) if forecast.best(batch).speed_up >= 1]
    first = pays[-1] + 1 if pays else 0
    return searched[first] if first < len(searched) else None


def _title(spec: Spec) -> str:
    speculation, names = spec.speculation, {role: ref.model.split("/")[-1] for role, ref in spec.models.items()}
    if speculation.method == "none":
        return "plain decoding"
    if speculation.method == "draft_target":
        return f"draft model {names['draft']}"
    if speculation.method == "early_exit" and speculation.early_exit:
        return f"the target's first {speculation.early_exit.layer} layers"
    if speculation.method == "tree":
        branching = "x".join(map(str, (speculation.tree or Tree()).branching))
        return f"token tree {branching} of {names['draft']}"
    if speculation.method == "cascade":
        return f"cascade of {names['draft']} and {names['middle']}"
    if speculation.method == "medusa":
        return f"Medusa heads, {speculation.num_draft_tokens} nodes"
    return {"ngram": "n-grams of the text", "mtp": "the target's own modules"}.get(
        speculation.method, speculation.method
    )


def _relative_costs(costs: Costs, batch: int) -> list[float]:
    """Cycles with 1, 2, ... draft tokens in plain passes."""
    plain = costs.plain_s(batch)
    return [costs.cycle_s(batch, drafting) / plain for drafting in costs.draftings]


def _assumed(costs: Costs) -> Iterator[Assumed]:
    """What rates that nobody measured would give; of chains."""
    if costs.spec.speculation.method not in CHAINS:
        return
    for batch in costs.question.batches:
        relative = _relative_costs(costs, batch)
        for rate in RATES:
            gains = [expected_tokens(rate, length) / cost for length, cost in enumerate(relative, 1)]
            length, gain = best_length(lambda length, gains=gains: gains[length - 1], len(gains))  # type: ignore[misc]
            yield Assumed(rate, batch, length, gain)


def _break_even(costs: Costs) -> dict[int, float | None]:
    if costs.spec.speculation.method not in CHAINS:
        return {}
    return {batch: needed_acceptance(_relative_costs(costs, batch)) for batch in costs.question.batches}


def _equal_rate(method: MethodPlan) -> float | None:
    """The rate that, the same at every position, emits as much as the method's best point at the first batch."""
    if method.method not in CHAINS or not method.points:
        return None
    best = next(iter(method.best.values()))
    # What one length needs to break even at a cost of so many plain passes.
    return needed_acceptance([math.inf] * (best.num_draft_tokens - 1) + [best.tokens_per_pass])


def _schedule(forecast: Forecast, wins: int | None) -> dict[int, int]:
    """Load -> draft tokens with the largest speed-up, 0 where plain decoding wins."""
    spec, question = forecast.costs.spec, forecast.costs.question
    if spec.speculation.method == "none":
        return {}
    loads = {*question.batches, spec.serving.max_concurrency, *([wins - 1] if wins and wins > 1 else [])}
    best = {load: forecast.best(load) for load in sorted(loads)}
    return {load: point.num_draft_tokens if point.speed_up > 1 else 0 for load, point in best.items()}


def _within(methods: Sequence[MethodPlan], latency_ms: float | None) -> Point | None:
    """Of the spec's own method and plain decoding, the point with most tokens per second that meets the latency."""
    if latency_ms is None:
        return None
    own, plain = methods[0], next((method for method in methods if method.method == "none"), methods[0])
    points = [point for point in (*own.points, *plain.points) if point.fits and point.tpot_ms <= latency_ms]
    return max(points, key=lambda point: point.tokens_per_second, default=None)


def _num_gpus(spec: Spec) -> int:
    if spec.engine.runtime == "torch":
        return 1
    return len({gpu for gpus in device_ids(spec).values() for gpu in gpus})
