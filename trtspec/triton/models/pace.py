"""How many tokens each cycle of the pipeline drafts, and what its cycles are counted as.

Knows the load of the process, the clock and the metrics; not Triton's requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from trtspec_decoding.cycle import Generation, Pace, Proposal, Verification
from trtspec_decoding.draft_length import DraftLength

from .engine_model import EngineModel
from .metrics import Metrics

# Of a plain call that is to show what passes take that several requests share: its first one they may not.
_TRIAL_TOKENS = 4


class Load:
    """Texts in this process, those that wait included.

    Args:
        most: that are worked on at the same time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._number = 0
        self._lock = threading.Lock()

    @property
    def in_flight(self) -> int:
        """Texts that engines may be called for now: what they cost does not depend on those that wait."""
        return min(self._number, self._most)

    def add(self, number: int) -> None:
        """So many more; fewer, if it is negative."""
        with self._lock:
            self._number += number


class MeasuredPace(Pace):
    """The pace of one generation.

    Args:
        lengths: chooses draft lengths; None: as much as there is room for.
        proposers: engines that propose to the target; while all of them rest after a failure, nothing is drafted.
        load: of the process.
        metrics: of the process.
    """

    def __init__(
        self, lengths: DraftLength | None, proposers: Sequence[EngineModel], load: Load, metrics: Metrics
    ) -> None:
        self._lengths = lengths
        self._running = lengths.running() if lengths else None
        self._proposers = proposers
        self._load = load
        self._metrics = metrics
        self._in_flight = 0
        self._length = 0
        self._target_seen = self._draft_seen = 0  # tokens of the context that each has read
        self._error: Exception | None = None
        self._late = False
        self._ended = self._began = self._proposed = time.perf_counter()

    def begin(self, generation: Generation) -> int | None:
        """The limit by load, acceptance and times; 0 while what drafts rests."""
        if self._late:  # the same cycle once more: it began before, and its time went into the draft
            generation.plain_limit = 1  # as where a draft fails: the next cycle may draft again
            return 0
        self._began, self._error, self._in_flight = time.perf_counter(), generation.draft_error, self._load.in_flight
        generation.draft_limit = generation.plain_limit = limit = None
        room = generation.draft_room
        if room and self._proposers and all(engine.resting for engine in self._proposers):
            self._metrics.fallback("draft_resting")
            limit = 0
        elif room and self._lengths and self._running:
            limit = self._lengths.choose(self._in_flight, self._running, room)
            if limit == 0 and self._running.trial:
                generation.plain_limit = 1 if self._in_flight == 1 else _TRIAL_TOKENS
        self._length = room if limit is None else limit
        return limit

    def proposed(self, generation: Generation, proposal: Proposal) -> None:
        """Takes the time, and counts what went wrong."""
        self._proposed = time.perf_counter()
        if not len(proposal.tokens) and generation.draft_error is not self._error and not self._late:
            self.draft_failed(generation.draft_error)
        self._late = False

    def draft_failed(self, error: Exception | None) -> None:
        """Counts a cycle that has no drafts because of `error`."""
        self._metrics.fallback(f"draft_{getattr(error, 'reason', 'nonsense')}")

    def draft_late(self, error: Exception) -> None:
        """The cycle begins again, and does without drafts."""
        self.draft_failed(error)
        self._late = True

    def verified(self, generation: Generation, proposal: Proposal, verification: Verification) -> None:
        """Counts the cycle."""
        now, context = time.perf_counter(), len(generation.context)
        drafted, accepted, emitted = len(proposal.tokens), verification.num_accepted, len(verification.tokens)
        draft_s, verify_s = self._proposed - self._began, now - self._proposed
        pipeline_s, self._ended = self._began - self._ended, now
        self._metrics.cycle(self._length, drafted, accepted, emitted, draft_s, verify_s, pipeline_s)
        if self._lengths and self._running and generation.draft_error is self._error:
            depth = proposal.depth
            self._running.update(depth, accepted)
            unread = context - min(self._target_seen, self._draft_seen if drafted else self._target_seen)
            self._lengths.observe(
                self._in_flight,
                drafted if self._lengths.whole else depth,
                self._began,
                now,
                passes=1 if drafted else max(1, emitted),
                fresh=unread,
            )
        self._target_seen = context + max(emitted - 1, 0)  # not its last token, which it has not read yet
        if drafted:
            self._draft_seen = context
