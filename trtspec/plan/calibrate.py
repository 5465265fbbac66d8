"""Measures what forward passes take on this machine: the points of `Curves`.

Passes are those that the torch runtime makes in its cycles: on a CPU one over the new tokens of several sequences, each
with a cache of its own; a draft's single tokens several in a row, a verification with the logits of all its tokens. On
a GPU, where other engines will serve, rows of one batch, recorded as a CUDA graph and with the likeliest ids found on
the GPU. Each is warmed up once; then models take turns, point by point and round by round, so that what else the
machine does hits all alike, and the median counts. Knows models in memory and a clock; not specs' files, nor what the
times are used for.
"""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.decoding.methods import DRAFTS, METHODS
from trtspec.errors import TrtspecError
from trtspec.plan.curves import Curves, Measured, ModelCurve, Overhead, catalogue_name, sizes_of
from trtspec.plan.roofline import Roofline
from trtspec.plan.step_times import HEADS, StepTimes
from trtspec.spec.gpus import find_gpu
from trtspec.spec.schema import ModelRef

if TYPE_CHECKING:
    import torch

    from trtspec.plan.pairs import Pair
    from trtspec.runtime.engine import EngineConfig
    from trtspec.runtime.llama import KVCache, Llama
    from trtspec.runtime.passes import Step
    from trtspec.runtime.torch_runtime import TorchRuntime

_log = logging.getLogger(__name__)

Clock = Callable[[], float]
Pass = Callable[[], object]
Passes = Callable[[int, int, int], Pass | None]
"""Of batch, tokens and context the pass to measure; None: not measured there."""

_ROUNDS = 25  # more hardly move a median
_PREFILL_EVERY = 4  # rounds; a prefill takes as long as many steps
_FOR_PASSES = 0.75  # of the time; the rest is for whole cycles
_FEW = 3  # samples, of which a median says little
_BUSY = 0.2  # of a median, between its quartiles
_CYCLES = 6  # in one measurement of what is between the passes
_PROMPT = 24
_CHUNK = 16  # tokens of one call to an engine that drafts by itself
_CUT = " with fewer layers"
_MEMORY = 0.5  # of what is free, for all KV caches


@dataclass(frozen=True)
class Grid:
    """Where to measure.

    Attributes:
        batches: sequences in a pass.
        tokens: new tokens of each.
        contexts: tokens in each one's KV cache.
        prompts: lengths of prefills, of one sequence.
    """

    batches: tuple[int, ...]
    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]

    @property
    def slices(self) -> list[list[tuple[int, int, int]]]:
        """(batch, tokens, context) in groups that are of use only as a whole, the most useful first."""
        steps = [
            [(batch, tokens, context) for tokens in self.tokens] for batch in self.batches for context in self.contexts
        ]
        return [steps[0], [(1, prompt, 0) for prompt in self.prompts], *steps[1:]]


def grid(max_batch: int, most_tokens: int, max_context: int, max_prompt: int, device: str) -> Grid:
    """A grid up to these sizes: batches 1, 2, 4, ..., plain passes and verifications of 1, 2, 4, ..., two contexts."""
    batches = [1]
    while 2 * batches[-1] < max_batch:
        batches.append(2 * batches[-1])
    tokens = [1, 2]
    while 2 * tokens[-1] - 1 < most_tokens:
        tokens.append(2 * tokens[-1] - 1)
    longest = max(1, max_context - most_tokens)
    prompts = (32, 128, 512) if device == "cpu" else (128, 512, 2048)
    return Grid(
        tuple(sorted({*batches, max_batch})),
        tuple(sorted({*tokens[:most_tokens], most_tokens})),
        tuple(sorted({min(128, longest), min(2048, longest)})),
        tuple(sorted({min(prompt, max_prompt) for prompt in prompts})),
    )


def measure(
    models: Mapping[str, Passes],
    grid: Grid,
    seconds: float,
    *,
    in_a_row: Mapping[str, int] | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, tuple[Measured, ...]]:
    """The points of each model, as many as there is time for; of a slice all or none.

    Args:
        models: role -> its passes.
        grid: where to measure.
        seconds: longest time; the pass that is under way is finished.
        in_a_row: role -> how many passes over single tokens follow each other, 1 if not given.
        clock: seconds.

    Raises:
        TrtspecError: not even the first slice and the prefills of each model were measured in this time.
    """
    end = clock() + seconds
    samples: dict[tuple[str, tuple[int, int, int]], list[float]] = defaultdict(list)
    prepared: dict[tuple[str, tuple[int, int, int]], Pass | None] = {}
    warm: set[tuple[str, int, int]] = set()
    for number, point, (role, passes) in (
        (number, point, model) for number in range(_ROUNDS) for point in chain(*grid.slices) for model in models.items()
    ):
        if clock() >= end:
            break
        batch, tokens, context = point
        if not context and number % _PREFILL_EVERY:
            continue
        if (role, point) not in prepared:
            prepared[role, point] = passes(batch, tokens, context)
        run = prepared[role, point]
        if run is None:
            continue
        if (role, batch, tokens) not in warm:
            run()
            warm.add((role, batch, tokens))
        repeats = (in_a_row or {}).get(role, 1) if tokens == 1 and context else 1
        begin = clock()
        for _ in range(repeats):
            run()
        samples[role, point].append((clock() - begin) / repeats)
    measured = {role: tuple(_measured(role, grid, prepared, samples)) for role in models}
    for role, points in measured.items():
        if not any(point.context for point in points) or (role != HEADS and all(point.context for point in points)):
            raise TrtspecError(
                f"{seconds:.0f} s were not enough to measure the {role} once", where="--seconds", fix="give more"
            )
    return measured


def _measured(
    role: str,
    grid: Grid,
    prepared: Mapping[tuple[str, tuple[int, int, int]], Pass | None],
    samples: Mapping[tuple[str, tuple[int, int, int]], list[float]],
) -> Iterator[Measured]:
    """The points of whole slices."""
    for points in grid.slices:
        known = [point for point in points if (role, point) in samples]
        if all(point in known or prepared.get((role, point), point) is None for point in points):
            for point in known:
                yield Measured(*point, *_summary(samples[role, point]))


def _summary(samples: Sequence[float]) -> tuple[float, float, int]:
    """Median, distance of the quartiles, number."""
    quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return statistics.median(samples), quartiles[2] - quartiles[0], len(samples)


def scaled(
    few: tuple[int, Sequence[Measured]], fewer: tuple[int, Sequence[Measured]], layers: int
) -> tuple[Measured, ...]:
    """Points of a model of `layers` layers, from those of its first ones: each layer takes what the last ones took.

    Args:
        few, fewer: number of layers, and points.
        layers: of the whole model.
    """
    (many, points), (less, others) = few, fewer
    shorter = {(point.batch, point.tokens, point.context): point for point in others}
    factor = (layers - many) / (many - less)
    answer = []
    for point in points:
        other = shorter.get((point.batch, point.tokens, point.context))
        if other is not None:
            slope = max(point.seconds - other.seconds, 0.0)
            spread = point.spread + factor * (point.spread + other.spread)
            answer.append(replace(point, seconds=point.seconds + factor * slope, spread=spread))
    return tuple(answer)


def calibrate(pair: Pair, grid: Grid, seconds: float, *, clock: Clock = time.perf_counter) -> Curves:
    """Measure the models of a pair and what a cycle takes between their passes.

    That is the time of short real cycles (greedy, of the method) less the time inside of their passes, which are timed
    in the same cycles. Of an engine that drafts by itself, what its heads and the scores of one token take, which come
    after the pass there, is subtracted too.

    Args:
        pair: models in memory, all on one device.
        grid: where to measure; batches whose KV caches take more than half of the free memory are left out.
        seconds: longest time.
        clock: seconds.

    Raises:
        TrtspecError: too little time or memory to measure anything.
    """
    import torch

    from trtspec.build.machine import hardware, versions

    begun = clock()
    device = pair.models["target"].model.device
    batches, remarks = _batches_that_fit(pair, grid)
    asked = replace(grid, batches=batches)
    makers: dict[str, Passes] = {}
    for role, each in pair.models.items():
        makers[role] = passes_of(each.model, asked, each.scores_all)
        if each.fewer is not None:
            makers[role + _CUT] = passes_of(each.fewer, asked, each.scores_all)
    if pair.heads:
        makers[HEADS] = _heads_of(pair)
    drafts = [name for name in makers if name.removesuffix(_CUT) in DRAFTS]
    in_a_row = dict.fromkeys(drafts, max(1, pair.num_draft_tokens))
    points = measure(makers, asked, _FOR_PASSES * seconds, in_a_row=in_a_row, clock=clock)
    models = {}
    for role, each in pair.models.items():
        layers, found = each.model.config.num_hidden_layers, points[role]
        if each.fewer is not None:
            fewer = (each.fewer.config.num_hidden_layers, points[role + _CUT])
            found = scaled((layers, found), fewer, each.config.num_hidden_layers)
        models[role] = ModelCurve(each.name, sizes_of(each.config), each.dtype, layers, found)
    if pair.heads:
        target = models["target"]
        models[HEADS] = replace(target, name=f"{pair.method} on {target.name}", points=points[HEADS])
    missing = sum(map(len, asked.slices)) - len(points["target"])
    if missing:
        remarks.append(f"stopped after {seconds:.0f} s: {missing} points of the target are not measured")
    steps = [point for point in points["target"] if point.context]
    fewest, spread = (
        min(each.repeats for each in steps),
        statistics.median(each.spread / each.seconds for each in steps),
    )
    if fewest < _FEW:
        remarks.append(f"some points were measured fewer than {_FEW} times: give more --seconds")
    elif spread > _BUSY:
        remarks.append(f"quartiles lie {100 * spread:.0f} % apart: measure again while the machine is quiet")
    machine = hardware()
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else machine["cpu"]
    curves = Curves(
        device=device.type,
        name=name,
        gpu=catalogue_name(name) if on_gpu else None,
        threads=None if on_gpu else torch.get_num_threads(),
        versions=versions(),
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        how="rows of a batch, CUDA graphs" if on_gpu else "passes of the torch runtime",
        models=models,
        remarks=tuple(remarks),
    )
    together = (1,) if on_gpu else batches  # on a GPU the torch runtime makes a pass for each sequence
    curves = replace(curves, overheads=_overheads(pair, curves, together, seconds - (clock() - begun), clock))
    return replace(curves, roofline=_against_roofline(pair, curves)) if curves.gpu else curves


def _against_roofline(pair: Pair, curves: Curves) -> dict[str, float]:
    """Role -> median over all points of the measured time in units of the roofline's."""
    refs = {
        role: (each.config, ModelRef.model_validate({"model": each.name, "dtype": each.dtype}))
        for role, each in pair.models.items()
    }
    roofline = Roofline(refs, find_gpu(str(curves.gpu)))
    return {role: statistics.median(deviations(curves, roofline, role)) for role in refs}


def deviations(curves: Curves, times: StepTimes, role: str) -> list[float]:
    """Measured time of each point of a model, in units of what other step times say."""
    points = curves.models[role].points
    return [each.seconds / times.seconds(role, each.batch, each.tokens, each.context) for each in points]


def passes_of(model: Llama, grid: Grid, scores_all: bool) -> Passes:
    """The passes of one model, over caches that are filled with noise: fresh memory would be read too fast."""
    from trtspec.runtime.llama import KVCache
    from trtspec.runtime.passes import pass_over

    capacity = max(*grid.prompts, max(grid.contexts) + max(grid.tokens))
    cache = model.new_cache(max(grid.batches), capacity)
    for store in (cache.k, cache.v):
        store.normal_()
    if model.device.type == "cuda":
        return _graphs_of(model, cache, scores_all)
    rows = [KVCache(cache.k[:, row : row + 1], cache.v[:, row : row + 1]) for row in range(max(grid.batches))]

    def make(batch: int, tokens: int, context: int) -> Pass:
        return pass_over(model, rows[:batch], tokens, context, tokens if scores_all and context else 1)

    return make


def _graphs_of(model: Llama, cache: KVCache, scores_all: bool) -> Passes:
    """The passes of a model on a GPU, each recorded once; launched kernel by kernel where that does not work."""
    import torch

    from trtspec.runtime.cuda_graphs import CudaRecorder

    record, layers = CudaRecorder(model.device), range(model.config.num_hidden_layers)

    def make(batch: int, tokens: int, context: int) -> Pass:
        ids = torch.randint(model.config.vocab_size, (batch, tokens), device=model.device)
        begin, num_rows = torch.tensor([context], device=model.device), tokens if scores_all and context else 1

        def step() -> torch.Tensor:
            states = model.run(layers, model.embed(ids), cache, begin, end=context + tokens)
            return model.scores(model.norm(states[:, -num_rows:])).argmax(-1)

        run: Pass = step
        if not model.config.num_experts and context:  # the shapes of experts depend on the routing
            try:
                with torch.inference_mode():
                    _, run = record(step)
            except RuntimeError as error:
                _log.warning("no CUDA graph of %d x %d tokens: %s", batch, tokens, str(error).partition("\n")[0])

        def synchronised() -> None:
            with torch.inference_mode():
                run()
            torch.cuda.synchronize(model.device)

        return synchronised

    return make


def _heads_of(pair: Pair) -> Passes:
    """What heads or modules take to draft for one token of each sequence, one sequence after the other."""
    import torch

    from trtspec.runtime.medusa import Medusa
    from trtspec.runtime.mtp import Modules

    model = pair.models["target"].model
    config = _engine("target", pair, model)
    medusa, modules = Medusa.of_engine(config, model), Modules.of_engine(config, model)
    state = torch.randn(1, model.config.hidden_size, device=model.device).to(model.dtype)

    def draft(cache: KVCache, context: int) -> object:
        import numpy as np

        if medusa is not None:
            return medusa.drafter.tree(state[0], len(medusa.drafter.shape))
        assert modules is not None
        return modules.propose(cache, context, state, np.array([1], dtype=np.int32), 1)

    def make(batch: int, tokens: int, context: int) -> Pass | None:
        if tokens != 1 or not context:
            return None
        cache = model.new_cache(1, context + 2, modules.num_modules if modules else 0)

        def run() -> None:
            with torch.inference_mode():
                for _ in range(batch):
                    draft(cache, context)

        return run

    return make


def _engine(role: str, pair: Pair, model: Llama) -> EngineConfig:
    """The config of an engine without files."""
    from trtspec.runtime.engine import EngineConfig

    config = model.config
    return EngineConfig(
        path=Path("memory", role, "config.json"),
        version="torch",
        pretrained={"vocab_size": config.vocab_size, "dtype": str(model.dtype).removeprefix("torch.")},
        build={
            "max_seq_len": min(_PROMPT + _tokens(pair), config.max_position_embeddings),
            "max_draft_len": 64 + pair.num_draft_tokens,
            "gather_generation_logits": True,
        },
        stamp={
            "runtime": "torch",
            "model_config": asdict(config) | {"eos_token_ids": list(config.eos_token_ids)},
            "speculation": dict(pair.heads or {}) if role == "target" else {},
        },
    )


def _tokens(pair: Pair) -> int:
    """Most tokens that the cycles of one measurement emit, the first one included, and room for one more."""
    return (_CYCLES + 2) * (pair.num_draft_tokens + 1) if pair.method in METHODS else 3 * _CHUNK


def _batches_that_fit(pair: Pair, grid: Grid) -> tuple[tuple[int, ...], list[str]]:
    """Batches whose KV caches fit beside the models, and a word about those that do not."""
    room = _MEMORY * _free_memory(pair.models["target"].model.device)
    capacity = max(*grid.prompts, max(grid.contexts) + max(grid.tokens))
    models = [model for each in pair.models.values() for model in (each.model, each.fewer) if model is not None]
    row = sum(model.new_cache(1, 1).nbytes for model in models) * capacity
    fitting = tuple(batch for batch in grid.batches if batch * row <= room)
    if not fitting:
        raise TrtspecError(
            f"the KV caches of one sequence of {capacity} tokens need {row / 1e9:.1f} GB",
            expected=f"at most {room / 1e9:.1f} GB",
            fix="lower engine.max_seq_len",
        )
    left_out = grid.batches[len(fitting) :]
    remark = f"batches above {fitting[-1]} are not measured: their KV caches need more than {room / 1e9:.1f} GB"
    return fitting, [remark] if left_out else []


def _free_memory(device: torch.device) -> int:
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Watch:
    """Adds up how long a pass of some engine was under way, and counts the target's, one for each sequence."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._begun = 0.0
        self.reset()

    def reset(self) -> None:
        """Begin again, while no pass is under way."""
        self.seconds = 0.0
        self.num_verified = 0

    def around(self, role: str) -> Callable[[Llama, list[Step]], list[Any]]:
        """`run_pass` of the engine in `role`, watched."""
        from trtspec.runtime.passes import run_pass

        def run(model: Llama, steps: list[Step]) -> list[Any]:
            with self._lock:
                if self._under_way == 0:
                    self._begun = self._clock()
                self._under_way += 1
            try:
                return run_pass(model, steps)
            finally:
                with self._lock:
                    self._under_way -= 1
                    if self._under_way == 0:
                        self.seconds += self._clock() - self._begun
                    self.num_verified += len(steps) * (role == "target")

        return run


def _overheads(
    pair: Pair, curves: Curves, batches: Sequence[int], seconds: float, clock: Clock
) -> tuple[Overhead, ...]:
    """What cycles take outside of their passes, batch by batch in turn; none for plain decoding or without time."""
    from trtspec.runtime.kv_cache import BLOCK
    from trtspec.runtime.torch_runtime import TorchRuntime

    if pair.method == "none":
        return ()
    end = clock() + seconds
    watch = _Watch(clock)
    samples: dict[int, list[float]] = {batch: [] for batch in batches}
    positions = 2 * (max(batches) + 1) * (_PROMPT + _tokens(pair) + BLOCK)
    runtimes = {
        role: TorchRuntime.of_model(
            _engine(role, pair, each.model),
            each.model,
            kv_cache_bytes=positions * each.model.new_cache(1, 1).nbytes,
            run=watch.around(role),
        )
        for role, each in pair.models.items()
    }
    for number in range(_ROUNDS):
        for batch in batches:
            if clock() >= end:
                break
            between = _between(pair, runtimes, watch, batch, number, clock)
            samples[batch].append(between - _head_seconds(pair, batch, clock) if pair.heads else between)
    drafts = {"medusa": 1, "mtp": pair.num_draft_tokens}.get(pair.method, 0)
    overheads = []
    for batch, (median, spread, count) in ((batch, _summary(each)) for batch, each in samples.items() if each):
        drafting = drafts and drafts * curves.seconds(HEADS, batch, 1, curves.models[HEADS].points[0].context)
        overheads.append(Overhead(batch, max(median - drafting, 0.0), spread, count))
    return tuple(overheads)


def _head_seconds(pair: Pair, batch: int, clock: Clock) -> float:
    """Of the scores of one token of each sequence: in a measured pass, but made after it where the engine drafts by
    itself."""
    import torch

    model = pair.models["target"].model
    states = torch.ones(batch, model.config.hidden_size).to(model.device, model.dtype)
    begin = clock()
    with torch.inference_mode():
        model.scores(states)[0, 0].item()
    return clock() - begin


def _between(
    pair: Pair, runtimes: Mapping[str, TorchRuntime], watch: _Watch, batch: int, number: int, clock: Clock
) -> float:
    """Seconds of a cycle of `batch` sequences outside of the passes, over some cycles until the first text ends."""
    from trtspec.decoding.cycle import Request
    from trtspec.runtime.local import speculate

    done = threading.Event()
    in_engine = pair.method not in METHODS
    vocab = pair.models["target"].config.vocab_size
    texts = []
    for row in range(batch):
        prompt = [(7919 * (number * 64 + row) + 104729 * place) % vocab for place in range(_PROMPT)]
        request = Request(prompt, _tokens(pair) - 1, num_draft_tokens=pair.num_draft_tokens, plain_chunk_tokens=_CHUNK)
        text = speculate(
            "none" if in_engine else pair.method, runtimes, request, settings=pair.settings, cancelled=done.is_set
        )
        next(text)  # the prefill
        texts.append(islice(text, 1 if in_engine else _CYCLES))
    watch.reset()

    def finish(text: Iterator[object]) -> None:
        try:
            for _ in text:
                pass
        finally:
            done.set()

    begin = clock()
    with ThreadPoolExecutor(batch) as threads:
        list(threads.map(finish, texts))
    return max(clock() - begin - watch.seconds, 0.0) * batch / max(watch.num_verified, 1)
