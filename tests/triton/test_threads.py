"""The pipeline's threads: calls that come too late, responses in order, clients that left, phases in turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from trtspec.triton.models import threads
from trtspec.triton.models.phases import DRAFT, VERIFY, Phases
from trtspec.triton.models.threads import Departures, Outbox, Superseded, Watch, Workers

DEADLINE_S = 20.0
LATE_S = 0.1


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.close()


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """What a call may wait for that comes too late; let go at the end."""
    event = threading.Event()
    yield event
    event.set()


def num_threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


# Calls with a deadline


def test_a_call_in_time_gives_its_answer_in_the_thread_that_made_it(watch: Watch) -> None:
    rescued: list[object] = []
    assert watch.call(threading.get_ident, 20.0, lambda: rescued.append(0)) == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        watch.call(lambda: 1 // 0, 20.0, lambda: rescued.append(0))
    assert watch.call(lambda: time.sleep(3 * LATE_S), 20.0, lambda: rescued.append(0)) is None
    assert rescued == []


@pytest.mark.parametrize("ending", ["answers", "raises"])
def test_a_late_call_supersedes_its_thread_and_another_one_goes_on(
    watch: Watch, stuck: threading.Event, ending: str
) -> None:
    """Two workers, one of them stuck: meanwhile there are two that work, afterwards two in all."""
    workers, name = Workers(2, f"late {ending}"), f"late {ending}"
    seen: list[str] = []

    def call() -> None:
        stuck.wait(DEADLINE_S)
        if ending == "raises":
            raise RuntimeError("too late to matter")

    def task() -> None:
        try:
            watch.call(call, LATE_S, lambda: workers.add(lambda: seen.append("rescue")))
            seen.append("the late thread goes on")
        except Exception:
            seen.append("the late thread handles its error")

    workers.submit(task)
    until(lambda: seen == ["rescue"], "nobody goes on")
    together = threading.Barrier(3, timeout=DEADLINE_S)
    for _ in range(2):
        workers.submit(lambda: together.wait() and None)  # type: ignore[func-returns-value]
    together.wait()
    assert num_threads(name) == 3
    stuck.set()
    until(lambda: num_threads(name) == 2, "the late thread stays")
    workers.close()
    assert seen == ["rescue"]
    assert num_threads(name) == 0


def test_superseded_is_no_exception_that_somebody_would_handle() -> None:
    assert not issubclass(Superseded, Exception)


def test_every_late_call_is_rescued_once_while_others_go_on(watch: Watch, stuck: threading.Event) -> None:
    rescued: list[int] = []
    ended: list[int] = []

    def late(number: int) -> None:
        try:
            watch.call(lambda: stuck.wait(DEADLINE_S), LATE_S, lambda: rescued.append(number))
        except Superseded:
            ended.append(number)

    callers = [threading.Thread(target=late, args=(number,)) for number in range(8)]
    for caller in callers:
        caller.start()
    assert watch.call(lambda: "in time", 20.0, lambda: rescued.append(-1)) == "in time"
    until(lambda: len(rescued) == 8, "not all are rescued")
    time.sleep(3 * LATE_S)
    assert ended == []
    stuck.set()
    for caller in callers:
        caller.join(DEADLINE_S)
    assert sorted(rescued) == sorted(ended) == list(range(8))


def test_a_rescue_that_fails_is_not_the_end_of_deadlines(
    watch: Watch, stuck: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    rescued = threading.Event()

    def late(rescue: Callable[[], None]) -> None:
        with pytest.raises(Superseded):
            watch.call(lambda: stuck.wait(DEADLINE_S), LATE_S, rescue)

    first = threading.Thread(target=late, args=(lambda: 1 // 0,))
    first.start()
    until(lambda: "ZeroDivisionError" in capsys.readouterr().err, "the first rescue")
    second = threading.Thread(target=late, args=(rescued.set,))
    second.start()
    assert rescued.wait(DEADLINE_S)
    stuck.set()
    first.join()
    second.join()


def test_close_does_not_wait_for_ever_for_a_stuck_thread(
    monkeypatch: pytest.MonkeyPatch, stuck: threading.Event
) -> None:
    monkeypatch.setattr(threads, "_END_S", 0.3)
    workers = Workers(2, "stuck")
    done: list[int] = []
    workers.submit(lambda: stuck.wait(DEADLINE_S) and None)  # type: ignore[func-returns-value]
    for number in range(3):
        workers.submit(lambda number=number: done.append(number))
    begin = time.monotonic()
    workers.close()
    assert 0.3 <= time.monotonic() - begin < 5.0
    assert done == [0, 1, 2]  # what was submitted before is finished by the others


def test_close_waits_for_the_thread_in_a_late_ones_place(watch: Watch) -> None:
    """Of three workers the first is superseded while the end waits for it; its successor still has work to do."""
    workers, done = Workers(3, "ending"), threading.Event()
    begun = threading.Event()

    def successor() -> None:
        time.sleep(3 * LATE_S)
        done.set()

    def late() -> None:
        begun.set()
        time.sleep(3 * LATE_S)

    workers.submit(lambda: watch.call(late, LATE_S, lambda: workers.add(successor)))
    begun.wait(DEADLINE_S)
    workers.close()
    assert done.is_set()
    assert num_threads("ending") == 0


def test_tasks_that_no_thread_has_begun_are_counted(stuck: threading.Event) -> None:
    workers = Workers(2, "counted")
    for _ in range(5):
        workers.submit(lambda: stuck.wait(DEADLINE_S) and None)  # type: ignore[func-returns-value]
    until(lambda: workers.num_waiting == 3, "two are under way")
    stuck.set()
    until(lambda: workers.num_waiting == 0, "all are under way")
    workers.close()


# Responses


def test_the_outbox_keeps_the_order_and_sends_what_is_left() -> None:
    outbox, sent = Outbox(), []
    first = threading.Event()
    outbox.put(lambda: first.wait(DEADLINE_S) and None)  # type: ignore[func-returns-value]
    for number in range(200):
        outbox.put(lambda number=number: sent.append((number, threading.current_thread().name)))
    assert sent == []  # whoever puts does not wait
    first.set()
    outbox.close()
    assert sent == [(number, "outbox") for number in range(200)]


# Clients that left


def asking(leaves: bool = False) -> SimpleNamespace:
    """Counts how often it is asked."""
    client = SimpleNamespace(leaves=leaves, asked=0)

    def ask() -> bool:
        client.asked += 1
        return client.leaves

    client.ask = ask
    return client


def test_a_client_that_left_is_noticed_and_not_asked_again() -> None:
    departures, stays, leaves = Departures(), asking(), asking()
    watched = [departures.watch(client.ask) for client in (stays, leaves)]
    until(lambda: min(stays.asked, leaves.asked) >= 2, "both are asked")
    assert [departure() for departure in watched] == [False, False]
    leaves.leaves = True
    until(watched[1], "it has left")
    asked, others = leaves.asked, stays.asked
    until(lambda: stays.asked > others + 3, "the other one is asked")
    assert (leaves.asked, watched[0]()) == (asked, False)
    for departure in watched:
        departure.end()


def test_a_question_that_fails_is_not_asked_again_and_others_are() -> None:
    departures, asked = Departures(), []

    def broken() -> bool:
        asked.append(0)
        raise RuntimeError("the request is gone")

    failing, leaving = departures.watch(broken), departures.watch(lambda: bool(asked))
    until(leaving, "the other client's leaving")
    assert not failing()
    assert len(asked) == 1


def test_nobody_is_asked_after_the_end() -> None:
    departures, ended, other = Departures(), asking(), asking()
    departure, still = departures.watch(ended.ask), departures.watch(other.ask)
    until(lambda: ended.asked, "it is asked")
    departure.end()
    departure.end()
    asked, others = ended.asked, other.asked
    departure.ask()  # by somebody who still holds it
    until(lambda: other.asked > others + 3, "the other one is asked")
    assert (ended.asked, departure()) == (asked, False)
    still.end()


def test_the_end_waits_for_a_question_under_way() -> None:
    """The request must not be gone while it is asked."""
    under_way, answer = threading.Event(), threading.Event()

    def ask() -> bool:
        under_way.set()
        return answer.wait(DEADLINE_S)

    departure = Departures().watch(ask)
    assert under_way.wait(DEADLINE_S)
    end = threading.Thread(target=departure.end)
    end.start()
    end.join(LATE_S)
    assert end.is_alive()
    answer.set()
    end.join(DEADLINE_S)
    assert not end.is_alive()


def test_where_nobody_is_watched_nobody_is_asked_until_one_comes() -> None:
    departures, first = Departures(), asking()
    departure = departures.watch(first.ask)
    until(lambda: first.asked, "it is asked")
    departure.end()
    time.sleep(0.05)  # the asking thread rests
    second = asking(leaves=True)
    until(departures.watch(second.ask), "it is asked after a rest")
    assert second.asked == 1


# Phases


class Log:
    """Who is inside, and whether two phases ever were at the same time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = {DRAFT: 0, VERIFY: 0}
        self.most = {DRAFT: 0, VERIFY: 0}
        self.mixed = False

    def enters(self, phase: str) -> None:
        with self.lock:
            self.inside[phase] += 1
            self.most[phase] = max(self.most[phase], self.inside[phase])
            self.mixed |= bool(self.inside[DRAFT] and self.inside[VERIFY])

    def leaves(self, phase: str) -> None:
        with self.lock:
            self.inside[phase] -= 1


def test_eight_threads_never_draft_while_one_verifies_and_none_starves() -> None:
    phases, log, rounds = Phases(), Log(), [0] * 8

    def generation(number: int) -> None:
        for cycle in range(25):
            for phase in (DRAFT, VERIFY):
                call = object()
                phases.enter(phase, call, number)
                log.enters(phase)
                time.sleep(0.0005 * ((number + cycle) % 3))
                log.leaves(phase)
                phases.leave(call)
            rounds[number] += 1

    crowd = [threading.Thread(target=generation, args=(number,), daemon=True) for number in range(8)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join(DEADLINE_S)
    assert rounds == [25] * 8
    assert not log.mixed
    assert log.most[DRAFT] > 1 and log.most[VERIFY] > 1


class Call:
    """A call in a thread of its own."""

    def __init__(self, phases: Phases, phase: str, request: object = None) -> None:
        self.phases, self.request, self.begun = phases, request or self, threading.Event()
        self.thread = threading.Thread(target=self._enter, args=(phase,), daemon=True)
        self.thread.start()

    def _enter(self, phase: str) -> None:
        self.phases.enter(phase, self, self.request)
        self.begun.set()

    def leave(self) -> None:
        self.phases.leave(self)

    def waits(self) -> bool:
        return not self.begun.wait(LATE_S / 2)


def test_those_that_waited_begin_together_and_nobody_overtakes_them() -> None:
    phases = Phases()
    first, second = Call(phases, DRAFT), Call(phases, DRAFT)
    assert first.begun.wait(DEADLINE_S) and second.begun.wait(DEADLINE_S)
    waiting = [Call(phases, VERIFY), Call(phases, VERIFY)]
    assert all(call.waits() for call in waiting)
    late = Call(phases, DRAFT)  # would go on for ever if it could join
    assert late.waits()
    first.leave()
    assert all(call.waits() for call in (*waiting, late))
    second.leave()
    assert all(call.begun.wait(DEADLINE_S) for call in waiting)
    assert late.waits()
    for call in waiting:
        call.leave()
    assert late.begun.wait(DEADLINE_S)
    late.leave()
    assert Call(phases, VERIFY).begun.wait(DEADLINE_S)  # nobody is inside: no phase holds


def test_a_call_left_behind_frees_the_phase_once() -> None:
    phases = Phases()
    stuck = Call(phases, DRAFT)
    assert stuck.begun.wait(DEADLINE_S)
    waiting = Call(phases, VERIFY)
    assert waiting.waits()
    stuck.leave()  # at its deadline
    assert waiting.begun.wait(DEADLINE_S)
    draft = Call(phases, DRAFT)
    stuck.leave()  # when it comes back at last
    assert draft.waits()
    waiting.leave()
    assert draft.begun.wait(DEADLINE_S)


def test_requests_fall_into_step() -> None:
    """They begin out of step and their calls take different times: soon each phase has all of them."""
    phases, together = Phases(), []
    inside, lock = [0], threading.Lock()

    def generation(number: int) -> None:
        time.sleep(0.004 * number)
        for _ in range(25):
            for phase, takes_s in ((DRAFT, 0.02), (VERIFY, 0.03)):
                phases.enter(phase, call := object(), number)
                with lock:
                    inside[0] += 1
                time.sleep(takes_s * (1 + 0.1 * number) / 2)
                together.append(inside[0])
                time.sleep(takes_s * (1 + 0.1 * number) / 2)
                with lock:
                    inside[0] -= 1
                phases.leave(call)

    crowd = [threading.Thread(target=generation, args=(number,), daemon=True) for number in range(3)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join(DEADLINE_S)
    settled = together[30:120]
    assert len(together) == 150 and settled.count(3) > 0.8 * len(settled)


def test_who_has_left_is_waited_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = Phases()
    gone, other = Call(phases, DRAFT, "gone"), Call(phases, DRAFT, "other")
    assert gone.begun.wait(DEADLINE_S) and other.begun.wait(DEADLINE_S)
    gone.leave()
    other.leave()
    monkeypatch.setattr(phases, "_begin_by_s", time.monotonic() + 4 * LATE_S)
    verifies = Call(phases, VERIFY, "other")
    assert verifies.waits(), "one of the two may come yet"
    assert verifies.begun.wait(DEADLINE_S), "nobody came"
    verifies.leave()


def test_who_is_alone_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = Phases()
    for name in ("_WINDOW", "_LONGEST_WINDOW_S"):
        monkeypatch.setattr(f"trtspec.triton.models.phases.{name}", 1e9)
    for phase in (DRAFT, VERIFY, DRAFT, DRAFT, VERIFY):
        call = Call(phases, phase, "alone")
        assert call.begun.wait(DEADLINE_S)
        call.leave()
