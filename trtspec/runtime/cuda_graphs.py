"""CUDA graphs of the narrow passes: one token, or the verification of a few drafts, launched as a whole.

Not yet run on a GPU. What was tested, on a CPU, is the pass in its fixed form and what decides about graphs.

On a GPU a narrow pass takes as long as Python needs to launch its kernels one by one. A graph has recorded the kernels
of one pass with the addresses they work on, and launches them at once; so nothing in the pass may depend on a number
that changes. Its first position is a tensor, and attention goes over the whole capacity of the KV cache, masked.

A graph holds for the cache that it was recorded over: another sequence's is other memory. Each cache therefore has
graphs of its own, which go when it goes. One static cache for all, with sequences copied in and out, would need fewer
recordings, but everything that touches a sequence's cache between two passes (shared prefixes, accepted paths of trees,
drafting modules) would have to know where its contents are at the moment. As a recording costs a few passes, only a
width that recurs on a cache gets one. The graphs' memory is not part of the budget of the KV caches.

The head stays outside: what a call wants of it (how many rows, logits or the likeliest id) differs.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from trtspec.models.config import ModelConfig
from trtspec.runtime.llama import KVCache, Llama

_EAGER_PASSES = 2  # of a width on a cache, before one is recorded

Step = Callable[[], torch.Tensor]
Recorder = Callable[[Step], tuple[torch.Tensor, Callable[[], None]]]
"""Records a step; gives its static result, and what runs it again, writing to that result."""

_log = logging.getLogger(__name__)
_recording = threading.Lock()  # one recording at a time in a process, as PyTorch demands


@dataclass(frozen=True)
class _Graph:
    """The recorded pass of one width over one cache.

    Attributes:
        input_ids: int64 `[1, width]`, what a replay reads.
        start: int64 `[1]`, the same.
        states: `[1, width, hidden]`, what it writes.
        replay: runs it.
    """

    input_ids: torch.Tensor
    start: torch.Tensor
    states: torch.Tensor
    replay: Callable[[], None]

    def __call__(self, input_ids: torch.Tensor, start: int) -> torch.Tensor:
        self.input_ids.copy_(input_ids)
        self.start.fill_(start)
        self.replay()
        return self.states.clone()  # the next replay, of any graph, may write there


@dataclass
class _Widths:
    """What a cache has seen: how many passes of each width, and the graphs of those that recurred."""

    passes: Counter[int] = field(default_factory=Counter)
    graphs: dict[int, _Graph] = field(default_factory=dict)


class GraphedLlama(Llama):
    """A `Llama` on a GPU that replays graphs of its passes over one row of at most `widest` tokens.

    Trees, batches, wider passes and mixtures of experts, whose shapes depend on the routing, run as they do without.
    So does everything after a recording has failed, which is logged.

    Args:
        config, weights, device, activations: those of `Llama`.
        widest: tokens in the widest pass that gets a graph.
        record: for tests; CUDA's graphs otherwise.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        device: str | torch.device,
        activations: Mapping[str, Callable[[torch.Tensor, int | None], torch.Tensor]] | None = None,
        *,
        widest: int,
        record: Recorder | None = None,
    ) -> None:
        super().__init__(config, weights, device, activations)
        self._widest = 0 if config.num_experts else widest
        self._record = record or CudaRecorder(self.device)
        self._caches: WeakKeyDictionary[KVCache, _Widths] = WeakKeyDictionary()

    def hidden(
        self,
        input_ids: torch.Tensor,
        cache: KVCache | None,
        start: int | torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As that of `Llama`."""
        batch, width = input_ids.shape
        fixed = mask is None and positions is None and batch == 1 and 1 <= width <= self._widest
        # What does not fit into the cache is refused there; a graph would not notice.
        if cache is None or not isinstance(start, int) or not fixed or start + width > cache.capacity:
            return super().hidden(input_ids, cache, start, mask=mask, positions=positions)
        known = self._caches.setdefault(cache, _Widths())
        if width not in known.graphs:
            known.passes[width] += 1
            if known.passes[width] <= _EAGER_PASSES:
                return super().hidden(input_ids, cache, start)
            try:
                known.graphs[width] = self._recorded(input_ids, cache, start)
            except RuntimeError as error:
                _log.warning("no CUDA graphs, passes are launched kernel by kernel: %s", str(error).partition("\n")[0])
                self._widest = 0
                self._caches.clear()
                return super().hidden(input_ids, cache, start)
        return known.graphs[width](input_ids, start)

    def _recorded(self, input_ids: torch.Tensor, cache: KVCache, start: int) -> _Graph:
        ids, begin = input_ids.clone(), torch.tensor([start], device=self.device)
        layers = range(self.config.num_hidden_layers)

        def step() -> torch.Tensor:
            return self.norm(self.run(layers, self.embed(ids), cache, begin, end=cache.capacity))

        return _Graph(ids, begin, *self._record(step))


class CudaRecorder:
    """Records CUDA graphs that share their memory: what one leaves there holds until the next one runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._first: torch.cuda.CUDAGraph | None = None  # kept for good: the shared memory goes with its last graph

    def __call__(self, step: Step) -> tuple[torch.Tensor, Callable[[], None]]:
        with _recording, torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            # Once without recording, on the same stream: libraries set up what they need at first use. A step that runs
            # twice writes the same twice.
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                step()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            pool = None if self._first is None else self._first.pool()
            try:
                # Other threads may go on using the GPU meanwhile.
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    states = step()
            finally:
                torch.cuda.set_stream(current)  # a recording that fails at its end leaves its own stream in place
            self._first = self._first or graph
        return states, graph.replay
