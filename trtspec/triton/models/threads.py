"""Threads of the pipeline: those that serve, and one each that sends, minds deadlines, asks whether clients have left.

A call between Triton's models can neither be cancelled nor ended at a deadline. It is made in the thread that needs its
answer, because handing it to another one costs as much as the call itself; a thread whose call takes too long is left
behind, and another one goes on in its place. Knows neither Triton's API nor decoding.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_WATCH_PERIOD_S = 0.05
_ASK_PERIOD_S = 0.01
_ASK_SHARE = 0.2  # of the time, at most, goes into asking
_END_S = 5.0  # longest wait for threads at the end


class Superseded(BaseException):
    """Ends a thread whose call came back after its deadline. Not an Exception: nobody is to handle it on the way."""


class Workers:
    """A number of threads that run tasks in their order.

    Args:
        count: tasks at the same time.
        name: of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        for _ in range(count):
            self.add(None)

    @property
    def num_waiting(self) -> int:
        """Tasks that no thread has begun."""
        return self._tasks.qsize()

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` when a thread is free. It raises nothing but Superseded."""
        self._tasks.put(task)

    def add(self, task: Callable[[], None] | None) -> None:
        """One more thread, which begins with `task`: in place of one that will end by Superseded."""
        thread = threading.Thread(target=self._work, args=(task,), name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Finish what was submitted; threads that wait for a call that never ends are left."""
        self._tasks.put(None)
        deadline = time.monotonic() + _END_S
        while (thread := self._living()) and (left := deadline - time.monotonic()) > 0:
            thread.join(left)

    def _living(self) -> threading.Thread | None:
        """One that has not ended; others may come in the place of those that are left behind."""
        return next((thread for thread in tuple(self._threads) if thread.is_alive()), None)

    def _work(self, task: Callable[[], None] | None) -> None:
        try:
            while True:
                if task is not None:
                    task()
                task = None  # all that it knows is not to be kept until the next one comes
                task = self._tasks.get()
                if task is None:
                    self._tasks.put(None)  # for the others
                    return
        except Superseded:
            self._threads.remove(threading.current_thread())


class _Call:
    """A call under way."""

    __slots__ = ("deadline", "late", "rescue")

    def __init__(self, deadline: float, rescue: Callable[[], None]) -> None:
        self.deadline = deadline
        self.rescue = rescue
        self.late = False


class Watch:
    """Makes calls that have a deadline."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._mind, name="watch", daemon=True).start()

    def call(self, function: Callable[[], T], timeout_s: float, rescue: Callable[[], None]) -> T:
        """`function()`, in this thread.

        Args:
            function: what may take too long.
            timeout_s: longest wait.
            rescue: called once, in another thread, when the time is over; has to see to it that somebody else does
                what this thread should have done.

        Raises:
            Superseded: the time was over before the function came back.
        """
        call = _Call(time.monotonic() + timeout_s, rescue)
        with self._lock:
            self._calls.add(call)
        try:
            return function()
        finally:
            with self._lock:
                self._calls.discard(call)
                late = call.late
            if late:
                raise Superseded

    def close(self) -> None:
        """Mind no further deadlines."""
        self._closed.set()

    def _mind(self) -> None:
        while not self._closed.wait(_WATCH_PERIOD_S):
            now = time.monotonic()
            with self._lock:
                late = [call for call in self._calls if call.deadline < now]
                for call in late:
                    call.late = True
                    self._calls.discard(call)
            for call in late:
                try:
                    call.rescue()
                except Exception:  # one call lost must not be the end of all deadlines
                    traceback.print_exc()


class Outbox:
    """Sends what is put in, in its order, in a thread of its own: a response is a round trip to the server process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="outbox", daemon=True)
        self._thread.start()

    def put(self, send: Callable[[], None]) -> None:
        """Call `send`, which raises nothing, when all that came before has been sent."""
        self._queue.put(send)

    def close(self) -> None:
        """Send what is left."""
        self._queue.put(None)
        self._thread.join(_END_S)

    def _send(self) -> None:
        while (send := self._queue.get()) is not None:
            send()
            del send


class Departure:
    """Whether the client of one request has left, as far as is known; to be ended before the request is answered."""

    def __init__(self, ask: Callable[[], bool], end: Callable[[Departure], None]) -> None:
        self._ask: Callable[[], bool] | None = ask
        self._end = end
        self._lock = threading.Lock()
        self._left = False

    def __call__(self) -> bool:
        """True once the client has left."""
        return self._left

    def ask(self) -> None:
        """Find out."""
        with self._lock:
            if self._ask is not None and not self._left:
                self._left = self._ask()

    def end(self) -> None:
        """Ask no more; the request is gone once its last response is sent."""
        with self._lock:
            self._ask = None
        self._end(self)


class Departures:
    """Asks in turn whether the clients of all requests under way have left.

    Asking is a round trip to the server process. A thread of its own makes it while the others wait for engines, every
    10 ms where there is time for it.
    """

    def __init__(self) -> None:
        self._watched: dict[Departure, None] = {}
        self._some = threading.Event()
        threading.Thread(target=self._ask, name="departures", daemon=True).start()

    def watch(self, ask: Callable[[], bool]) -> Departure:
        """Begin to ask `ask`."""
        departure = Departure(ask, self._forget)
        self._watched[departure] = None
        self._some.set()
        return departure

    def _forget(self, departure: Departure) -> None:
        self._watched.pop(departure, None)

    def _ask(self) -> None:
        while True:
            self._some.wait()
            begin = time.monotonic()
            self._ask_all()
            time.sleep(max(_ASK_PERIOD_S, (time.monotonic() - begin) * (1 / _ASK_SHARE - 1)))
            self._some.clear()
            if self._watched:
                self._some.set()

    def _ask_all(self) -> None:
        for departure in tuple(self._watched):
            try:
                departure.ask()
            except Exception:  # then it counts as there
                traceback.print_exc()
                departure.end()
