"""Work that many threads bring and that is done together: whoever has the turn takes along all who wait for it.

There is no thread of its own, so work that comes alone is done at once, by the thread that brings it. Knows threads and
a queue; not models, nor what the work is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from trtspec.decoding.engine_call import Cancelled

_ASK_S = 0.05  # how often a waiting thread asks whether its work is still wanted
# Work waits for that of other members for this share of what the last batch took. Without, the first thread that comes
# back from a batch would go on alone, and the others together after it: two batches where one would do.
_WINDOW = 0.1
_LONGEST_WINDOW_S = 0.005

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Place(Generic[Item, Result]):
    """One thread's work in the queue; all but `item` and `size` is guarded by the batcher's lock."""

    __slots__ = ("done", "error", "item", "result", "size", "wake")

    item: Item
    result: Result

    def __init__(self, lock: threading.Lock, size: int) -> None:
        self.size = size
        self.error: Exception | None = None
        self.done = False
        self.wake = threading.Condition(lock)


class Batcher(Generic[Item, Result]):
    """Runs batches, one at a time, of what threads bring.

    The first in the queue is always served, and takes along those behind it that still fit. So what is large waits no
    longer than what is small.

    Args:
        run: the results of some items, in their order. A batch that fails is run again item by item, so that only
            those fail that fail alone: until then, running an item must leave nothing behind that matters.
        most: of the sizes of a batch's items together; an item of this size or more is run alone.
    """

    def __init__(self, run: Callable[[list[Item]], list[Result]], most: int) -> None:
        self._run = run
        self._most = most
        self._lock = threading.Lock()
        self._queue: deque[_Place[Item, Result]] = deque()
        self._batch: list[_Place[Item, Result]] = []  # under way; the thread of the first one runs it
        self._members = self._most_members = 0  # now, and at a time since there were none
        self._expected = 0  # members at a time before that: those who came together are likely to come together again
        self._window_s = _LONGEST_WINDOW_S

    def __call__(self, item: Item, size: int, cancelled: Callable[[], bool]) -> Result:
        """The result of one item.

        Args:
            size: 1 or more.
            cancelled: asked before, and from time to time while waiting.

        Raises:
            Cancelled: `cancelled` said so before the item was begun.
            Exception: whatever `run` raises for this item alone.
        """
        place: _Place[Item, Result] = _Place(self._lock, size)
        place.item = item
        with self._turn(place, cancelled):
            if not place.done:
                self._run_batch(self._batch)
        if place.error is not None:
            raise place.error
        return place.result

    @contextmanager
    def alone(self, cancelled: Callable[[], bool]) -> Iterator[None]:
        """A turn without a batch: nothing runs beside the `with` block.

        Raises:
            Cancelled: `cancelled` said so before its turn.
        """
        with self._turn(_Place(self._lock, self._most), cancelled):
            yield

    def announce(self) -> None:
        """Count a member whose thread has yet to start; it is to enter `member(announced=True)`."""
        self._count(1)

    @contextmanager
    def member(self, announced: bool = False) -> Iterator[None]:
        """For the length of a `with` block, this thread brings one item after another: others wait a moment for it."""
        if not announced:
            self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Within `member`, while this thread waits for something else."""
        self._count(-1)
        try:
            yield
        finally:
            self._count(1)

    @contextmanager
    def _turn(self, place: _Place[Item, Result], cancelled: Callable[[], bool]) -> Iterator[None]:
        """Queue up; goes on when the place is done or has the turn, which ends with the `with` block."""
        if cancelled():
            raise Cancelled
        try:
            with self._lock:
                self._queue.append(place)
                self._wake_first()
            while not self._due(place):
                if cancelled():
                    raise Cancelled
            yield
        finally:
            with self._lock:
                if self._batch and self._batch[0] is place:
                    self._end_batch()
                # What another thread is working on cannot be taken out of its hands.
                place.wake.wait_for(lambda: place not in self._batch)
                if place in self._queue:
                    self._queue.remove(place)
                self._wake_first()

    def _due(self, place: _Place[Item, Result]) -> bool:
        """Wait a while; whether the place is done, or has the turn and a batch."""
        with self._lock:
            first = place.wake.wait_for(lambda: place.done or self._is_first(place), _ASK_S)
            if not first or place.done:
                return first
            if place.size < self._most:
                place.wake.wait_for(lambda: len(self._queue) >= max(self._members, self._expected), self._window_s)
            self._take_batch()
            return True

    def _take_batch(self) -> None:
        first, *others = self._queue
        batch, room = [first], self._most - first.size
        for other in others:
            if other.size <= room:
                batch.append(other)
                room -= other.size
        self._expected = 0
        self._batch, self._queue = batch, deque(other for other in others if other not in batch)

    def _run_batch(self, batch: list[_Place[Item, Result]]) -> None:
        began = time.monotonic()
        try:
            for place, result in zip(batch, self._run([place.item for place in batch]), strict=True):
                place.result, place.done = result, True
        except Exception:
            if len(batch) == 1:
                raise
            for place in batch:
                try:
                    (place.result,) = self._run([place.item])
                except Exception as error:
                    place.error = error
                place.done = True
        self._window_s = min(_WINDOW * (time.monotonic() - began), _LONGEST_WINDOW_S)

    def _end_batch(self) -> None:
        """Let go all but the first of a batch; what a thread that dies leaves undone is next."""
        others, self._batch = self._batch[1:], []
        self._queue.extendleft(other for other in reversed(others) if not other.done)
        for other in others:
            other.wake.notify()

    def _is_first(self, place: _Place[Item, Result]) -> bool:
        return not self._batch and self._queue[0] is place

    def _wake_first(self) -> None:
        if self._queue and not self._batch:
            self._queue[0].wake.notify()

    def _count(self, change: int) -> None:
        with self._lock:
            self._members += change
            self._most_members = max(self._most_members, self._members)
            if change < 0:
                self._expected = 0 if self._members else self._most_members
            if not self._members:
                self._most_members = 0
            self._wake_first()
