"""A server's computing in one thread: the same answers, and no other thread has OpenMP threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from trtspec.decoding.engine_call import EngineRequest
from trtspec.runtime.one_thread import OneThread, without_openmp_threads
from trtspec.runtime.torch_runtime import TorchRuntime


def openmp_threads() -> int:
    """Threads that OpenMP would use in the thread that calls this."""
    torch.zeros(1 << 20)  # so that torch sets it
    return max(each["num_threads"] for each in threadpool_info() if each["user_api"] == "openmp")


def test_what_many_threads_ask_for_happens_in_one() -> None:
    one = OneThread()
    with ThreadPoolExecutor(4) as pool:
        idents = set(pool.map(lambda _: one(threading.get_ident), range(20)))
    assert len(idents) == 1 and threading.get_ident() not in idents
    assert one(lambda: one(threading.get_ident)) in idents  # it may call itself
    with pytest.raises(ZeroDivisionError):
        one(lambda: 1 // 0)
    one.close()


def test_a_thread_without_openmp_threads_stays_so() -> None:
    before, one = torch.get_num_threads(), OneThread()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1, initializer=without_openmp_threads) as pool:
            assert pool.submit(openmp_threads).result() == 1
            assert one(openmp_threads) == 2
            assert pool.submit(openmp_threads).result() == 1
    finally:
        torch.set_num_threads(before)
        one.close()


def test_an_engine_computes_there_and_answers_as_ever(target_engine: Path) -> None:
    request = EngineRequest(np.arange(3, 20, dtype=np.int32), 6)
    expected = TorchRuntime(target_engine, kv_cache_bytes=1 << 22).execute(request).output_ids
    one, calls = OneThread(), []

    def here(work: object) -> object:
        calls.append(threading.get_ident())
        return one(work)  # type: ignore[arg-type]

    runtime = one(lambda: TorchRuntime(target_engine, kv_cache_bytes=1 << 22, here=here))
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: runtime.execute(request).output_ids.tolist(), range(3)))
    assert answers == [expected.tolist()] * 3
    assert len(calls) >= 6
    one.close()
