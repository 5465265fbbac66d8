"""What the speculative pipeline does, as counters on Triton's own metrics endpoint.

A change of a Triton metric is a round trip to the server process, so numbers are added up in here and a thread writes
them twice a second. Knows Triton's metrics; not requests, engines or decoding.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import triton_python_backend_utils as pb_utils

_WRITE_PERIOD_S = 0.5
_CLOSE_S = 5.0
_MAX_CYCLES = 4096  # that wait to be added up


class Family(NamedTuple):
    """One metric; every series of it carries the label `model`, and `label` where there is one."""

    help: str
    label: str | None = None
    known: tuple[str, ...] = ()  # there from the start with 0: a series that begins at 1 shows no increase


IN_FLIGHT = "trtspec_requests_in_flight"  # the only gauge
FAMILIES = {
    IN_FLIGHT: Family("Requests under way"),
    "trtspec_requests_total": Family(
        "Requests that ended", "finish_reason", ("stop", "length", "cancelled", "refused", "error")
    ),
    "trtspec_cycles_total": Family("Cycles: a proposal, perhaps an empty one, and its verification"),
    "trtspec_emitted_tokens_total": Family("Tokens that came out of cycles"),
    "trtspec_target_passes_total": Family("Passes of the target: one a verification, one a token of plain decoding"),
    "trtspec_drafts_total": Family("Cycles in which something was drafted"),
    "trtspec_draft_tokens_total": Family("Draft tokens that were verified"),
    "trtspec_accepted_tokens_total": Family("Draft tokens that were accepted"),
    "trtspec_accepted_at_position_total": Family("Cycles in which at least so many were accepted", "position"),
    "trtspec_draft_length_total": Family("Cycles by the draft length that was chosen for them", "length"),
    "trtspec_draft_seconds_total": Family("Time that cycles spent drafting"),
    "trtspec_verify_seconds_total": Family("Time that cycles spent in the target"),
    "trtspec_pipeline_seconds_total": Family("Time that cycles spent in the pipeline itself"),
    "trtspec_fallbacks_total": Family(
        "Cycles that the target made without the drafts they should have had",
        "reason",
        ("draft_failed", "draft_timeout", "draft_resting", "draft_nonsense", "draft_missing"),
    ),
    "trtspec_target_errors_total": Family("Calls of the target that failed", "kind", ("failed", "timeout")),
}

_Series = tuple[str, str]  # name, and the value of its label or ""


class _Cycle(NamedTuple):
    """One cycle, see `Metrics.cycle`."""

    chosen: int
    drafted: int
    accepted: int
    emitted: int
    draft_s: float
    verify_s: float
    pipeline_s: float


class Metrics:
    """The metrics of one model process; made once, in `initialize`. All methods may be called from any thread.

    Args:
        model_name: value of the label `model`.
        max_draft_len: longest draft, in tokens; its positions and lengths are there from the start.
        counts_passes: False where the engine drafts by itself: how many passes it made is then unknown here, and
            `trtspec_target_passes_total` stays 0.
    """

    def __init__(self, model_name: str, *, max_draft_len: int = 0, counts_passes: bool = True) -> None:
        self._model_name = model_name
        self._counts_passes = counts_passes
        self._lock = threading.Lock()
        self._in_flight = 0
        self._unwritten: Counter[_Series] = Counter()
        self._cycles: deque[_Cycle] = deque()
        self._families = {
            name: pb_utils.MetricFamily(
                name=name,
                description=family.help,
                kind=pb_utils.MetricFamily.GAUGE if name == IN_FLIGHT else pb_utils.MetricFamily.COUNTER,
            )
            for name, family in FAMILIES.items()
        }
        for family in self._families.values():
            # A process that ends would delete its series in the server, also where the next process of this model is
            # there already and has the same ones: its counts would go into freed memory. Never deleted, they go on
            # counting after a reload.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(family))
        self._metrics: dict[_Series, Any] = {}
        known = {name: family.known if family.label else ("",) for name, family in FAMILIES.items()}
        known["trtspec_accepted_at_position_total"] = tuple(map(str, range(1, max_draft_len + 1)))
        known["trtspec_draft_length_total"] = tuple(map(str, range(max_draft_len + 1)))
        self._write({(name, value): 0 for name, values in known.items() for value in values})
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write_often, name="metrics", daemon=True)
        self._writer.start()

    def request_began(self) -> None:
        """A request is under way."""
        with self._lock:
            self._in_flight += 1

    def request_ended(self, finish_reason: str) -> None:
        """A request that began has been answered.

        Args:
            finish_reason: `stop`, `length`, `cancelled`, `refused` (the request was wrong) or `error`.
        """
        with self._lock:
            self._in_flight -= 1
            self._unwritten["trtspec_requests_total", finish_reason] += 1

    def cycle(
        self,
        chosen: int,
        drafted: int,
        accepted: int,
        emitted: int,
        draft_s: float,
        verify_s: float,
        pipeline_s: float,
    ) -> None:
        """A cycle is over.

        Args:
            chosen: draft length that was wanted, in tokens.
            drafted: draft tokens that were verified.
            accepted: how many of them were accepted.
            emitted: tokens that came out, the target's own included.
            draft_s, verify_s: seconds in the engines that draft, and in the target.
            pipeline_s: seconds of the rest of the cycle.
        """
        # Added up later, in the thread that writes: a cycle is short.
        self._cycles.append(_Cycle(chosen, drafted, accepted, emitted, draft_s, verify_s, pipeline_s))
        if len(self._cycles) > _MAX_CYCLES:
            self._add_up()

    def _add_up(self) -> None:
        """Take the cycles that wait into the counts."""
        with self._lock:
            counts = self._unwritten
            while self._cycles:
                cycle = self._cycles.popleft()
                counts["trtspec_cycles_total", ""] += 1
                counts["trtspec_emitted_tokens_total", ""] += cycle.emitted
                counts["trtspec_draft_length_total", str(cycle.chosen)] += 1
                counts["trtspec_draft_seconds_total", ""] += cycle.draft_s  # type: ignore[assignment]
                counts["trtspec_verify_seconds_total", ""] += cycle.verify_s  # type: ignore[assignment]
                counts["trtspec_pipeline_seconds_total", ""] += cycle.pipeline_s  # type: ignore[assignment]
                if self._counts_passes:
                    counts["trtspec_target_passes_total", ""] += 1 if cycle.drafted else cycle.emitted
                if cycle.drafted:
                    counts["trtspec_drafts_total", ""] += 1
                    counts["trtspec_draft_tokens_total", ""] += cycle.drafted
                    counts["trtspec_accepted_tokens_total", ""] += cycle.accepted
                    for position in range(1, cycle.accepted + 1):
                        counts["trtspec_accepted_at_position_total", str(position)] += 1

    def fallback(self, reason: str) -> None:
        """A cycle had to do without drafts: `draft_failed`, `draft_timeout`, `draft_resting`, `draft_nonsense`, ..."""
        with self._lock:
            self._unwritten["trtspec_fallbacks_total", reason] += 1

    def target_error(self, kind: str) -> None:
        """The target did not answer a call: `failed` or `timeout`."""
        with self._lock:
            self._unwritten["trtspec_target_errors_total", kind] += 1

    def close(self) -> None:
        """Write what is left; what is counted afterwards is lost."""
        self._closing.set()
        self._writer.join(_CLOSE_S)

    def _write_often(self) -> None:
        failing = closing = False
        while not closing:
            closing = self._closing.wait(_WRITE_PERIOD_S)
            self._add_up()
            with self._lock:
                counts, self._unwritten = self._unwritten, Counter()
            try:
                self._write(counts)
                failing = False
            except Exception as error:  # never a reason to stop serving
                if not failing:
                    pb_utils.Logger.log_warn(f"{self._model_name}: metrics cannot be written: {error!r}")
                failing = True

    def _write(self, counts: Mapping[_Series, float]) -> None:
        for series, count in counts.items():
            metric = self._metric(series)
            if count:
                metric.increment(count)
        # Written every time, as an older process of this model may have left its own number when it ended.
        self._metric((IN_FLIGHT, "")).set(self._in_flight)

    def _metric(self, series: _Series) -> Any:
        if series not in self._metrics:
            name, value = series
            label = FAMILIES[name].label
            labels = {"model": self._model_name} | ({label: value} if label else {})
            self._metrics[series] = self._families[name].Metric(labels=labels)
        return self._metrics[series]
