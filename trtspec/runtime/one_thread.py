"""One thread in which a server computes, whoever asks for it.

Every thread that calls torch gets OpenMP threads of its own. Once a process has more of these than cores, libgomp has
them sleep between two operators instead of waiting awake, and a small forward pass takes a fifth longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits

T = TypeVar("T")


class OneThread:
    """Calls functions one after the other, all in the same thread; a function may call it again."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._ident = self._pool.submit(threading.get_ident).result()

    def __call__(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises."""
        if threading.get_ident() == self._ident:
            return work()
        return self._pool.submit(work).result()

    def close(self) -> None:
        """Finish what is under way; nothing more can be called."""
        self._pool.shutdown()


def without_openmp_threads() -> None:
    """Have the thread that calls this compute all by itself, what little it computes outside that one thread."""
    torch.get_num_threads()  # torch sets the number of a thread when it first asks for it
    threadpool_limits(1, user_api="openmp")
