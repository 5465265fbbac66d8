"""Loops that send requests at the same time: no server, only clocks and threads."""

from __future__ import annotations

import math
import threading
import time

import pytest

from trtspec.bench.load import closed_loop, in_turn, open_loop, poisson


def test_clients_share_the_numbers_and_are_never_more_than_asked_for() -> None:
    lock = threading.Lock()
    taken: list[int] = []
    busy: list[int] = [0]
    most = 0

    def work(number: int, planned: float) -> None:
        nonlocal most
        with lock:
            taken.append(number)
            busy[0] += 1
            most = max(most, busy[0])
        time.sleep(0.01)
        with lock:
            busy[0] -= 1

    closed_loop(3, work, threading.Event(), requests=20)
    assert sorted(taken) == list(range(20)) and most == 3


def test_all_clients_are_busy_until_the_first_finds_nothing() -> None:
    """Two clients, one with a long request: the other is done with the rest at 0.2 s, the whole ends at 0.5 s."""
    begin = time.monotonic()
    busy_s = closed_loop(2, lambda number, _: time.sleep(0.5 if number == 0 else 0.1), threading.Event(), requests=3)
    assert time.monotonic() - begin >= 0.5
    assert 0.2 <= busy_s < 0.5


def test_a_closed_loop_may_end_by_time() -> None:
    begin, planned = time.monotonic(), []
    closed_loop(2, lambda _, at: (planned.append(at), time.sleep(0.02))[-1], threading.Event(), seconds=0.3)
    assert time.monotonic() - begin >= 0.3
    assert len(planned) >= 2 and max(planned) - begin < 0.3


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """No coordinated omission: requests that take 0.3 s arrive every 10 ms, and their time counts from then."""
    begin, found = time.monotonic(), {}

    def work(number: int, planned: float) -> None:
        time.sleep(0.3)
        found[number] = planned - begin

    ended = open_loop([0.01 * number for number in range(10)], work, threading.Event())
    assert found == {number: pytest.approx(0.01 * number, abs=5e-3) for number in range(10)}
    assert 0.39 <= ended < 10 * 0.3


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_the_first_error_ends_the_others_and_is_raised(loop: str) -> None:
    stop, done = threading.Event(), []

    def work(number: int, planned: float) -> None:
        if number == 1:
            raise ValueError("no")
        time.sleep(0.05)
        done.append(number)

    with pytest.raises(ValueError, match="no"):
        if loop == "closed":
            closed_loop(2, work, stop, requests=1000)
        else:
            open_loop([0.02 * number for number in range(1000)], work, stop)
    assert stop.is_set() and len(done) < 10


def test_arrivals_are_poisson_and_the_same_for_the_same_seed() -> None:
    times = poisson(4.0, 1, requests=4000)
    pauses = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = sum(pauses) / len(pauses)
    spread = math.sqrt(sum((pause - mean) ** 2 for pause in pauses) / len(pauses))
    assert mean == pytest.approx(0.25, rel=0.05) and spread == pytest.approx(0.25, rel=0.07)
    assert times == poisson(4.0, 1, requests=4000) != poisson(4.0, 2, requests=4000)


def test_arrivals_may_end_by_time() -> None:
    times = poisson(50.0, 3, seconds=2.0)
    assert 60 < len(times) < 140 and times[-1] < 2.0


def test_everyone_is_first_in_turn() -> None:
    orders = [in_turn(["a", "b", "c"], number) for number in range(3)]
    assert [order[0] for order in orders] == ["a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
