"""Forward passes that several requests share: who joins whom, and that nobody's answer depends on the company."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trtspec.decoding.engine_call import Cancelled, EngineRequest, EngineResult
from trtspec.decoding.sampling import SamplingParams
from trtspec.decoding.token_tree import ROOT
from trtspec.errors import TrtspecError
from trtspec.models.source import open_model
from trtspec.runtime import batching
from trtspec.runtime.batching import Batcher
from trtspec.runtime.llama import Llama, Span, load_weights
from trtspec.runtime.torch_runtime import TorchRuntime

VOCAB = 280
SAMPLED = SamplingParams(temperature=0.9, top_k=50, frequency_penalty=0.1)


def never() -> bool:
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---- threads


class Work:
    """What a batcher runs: notes the batches, holds those with item 0 until told to go on, and fails as items say."""

    def __init__(self, most: int = 100) -> None:
        self.batches: list[list[object]] = []
        self.go_on = threading.Event()
        self.batcher: Batcher[object, object] = Batcher(self.run, most)

    def run(self, items: list[object]) -> list[object]:
        self.batches.append(items)
        if 0 in items:
            assert self.go_on.wait(20)
        for item in items:
            if isinstance(item, BaseException):
                raise item
        return [("done", item) for item in items]

    def ask(self, item: object, size: int = 1, cancelled: Callable[[], bool] = never) -> object:
        return self.batcher(item, size, cancelled)

    def waiting(self, number: int) -> None:
        wait_until(lambda: len(self.batcher._queue) == number)

    @property
    def idle(self) -> bool:
        return not self.batcher._queue and not self.batcher._batch and not self.batcher._members


@pytest.fixture
def work() -> Iterator[Work]:
    """After each test nothing waits and nothing runs."""
    work = Work()
    yield work
    assert work.idle


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as pool:
        yield pool


def test_who_waits_at_the_same_time_is_served_together(work: Work, pool: ThreadPoolExecutor) -> None:
    first = pool.submit(work.ask, 0)
    wait_until(lambda: bool(work.batches))
    others = [pool.submit(work.ask, item) for item in range(1, 9)]
    work.waiting(8)
    work.go_on.set()
    assert first.result(20) == ("done", 0)
    assert [other.result(20) for other in others] == [("done", item) for item in range(1, 9)]
    assert [sorted(batch) for batch in work.batches] == [[0], list(range(1, 9))]  # type: ignore[type-var]


def test_a_batch_has_a_bound_and_what_is_large_does_not_wait_longer(pool: ThreadPoolExecutor) -> None:
    work = Work(most=10)
    futures = [pool.submit(work.ask, 0)]
    wait_until(lambda: bool(work.batches))
    for place, (item, size) in enumerate((("a", 4), ("b", 7), ("c", 6), ("d", 50), ("e", 3), ("f", 1))):
        futures.append(pool.submit(work.ask, item, size))
        work.waiting(place + 1)
    work.go_on.set()
    for future in futures:
        future.result(20)
    assert work.batches == [[0], ["a", "c"], ["b", "e"], ["d"], ["f"]]
    assert work.idle


def test_only_those_fail_that_fail_alone(work: Work, pool: ThreadPoolExecutor) -> None:
    first = pool.submit(work.ask, 0)
    wait_until(lambda: bool(work.batches))
    faults = [ValueError("one"), TrtspecError("two")]
    futures = [pool.submit(work.ask, item) for item in (1, faults[0], 2, faults[1], 3)]
    work.waiting(5)
    work.go_on.set()
    assert first.result(20) == ("done", 0)
    assert [future.exception(20) for future in futures] == [None, faults[0], None, faults[1], None]
    with pytest.raises(ValueError, match="alone"):
        work.ask(ValueError("alone"))
    assert work.ask(4) == ("done", 4)


def test_who_is_cancelled_or_dies_while_waiting_is_left_out(work: Work, pool: ThreadPoolExecutor) -> None:
    stop = threading.Event()

    def die() -> bool:
        if stop.is_set():
            raise ZeroDivisionError
        return False

    first = pool.submit(work.ask, 0)
    wait_until(lambda: bool(work.batches))
    futures = [
        pool.submit(work.ask, item, 1, cancelled) for item, cancelled in ((1, stop.is_set), (2, die), (3, never))
    ]
    work.waiting(3)
    stop.set()
    with pytest.raises(Cancelled):
        futures[0].result(20)
    with pytest.raises(ZeroDivisionError):
        futures[1].result(20)
    with pytest.raises(Cancelled):
        work.ask(4, 1, lambda: True)
    assert work.batches == [[0]]
    work.go_on.set()
    assert (first.result(20), futures[2].result(20)) == (("done", 0), ("done", 3))
    assert work.batches == [[0], [3]]


def test_a_thread_that_dies_in_its_turn_leaves_the_work_of_others_to_them(work: Work, pool: ThreadPoolExecutor) -> None:
    first = pool.submit(work.ask, 0)
    wait_until(lambda: bool(work.batches))
    dies = pool.submit(work.ask, KeyboardInterrupt())
    work.waiting(1)
    others = [pool.submit(work.ask, item) for item in (1, 2, 3)]
    work.waiting(4)
    work.go_on.set()
    assert isinstance(dies.exception(20), KeyboardInterrupt)
    assert [future.result(20) for future in (first, *others)] == [("done", item) for item in range(4)]


def test_nobody_leaves_what_another_thread_is_working_on(pool: ThreadPoolExecutor) -> None:
    """A sequence may be released only after the pass that writes to it."""
    running, go_on, stop, ended = (threading.Event() for _ in range(4))

    def run(items: list[int]) -> list[int]:
        if 2 in items:
            running.set()
            assert go_on.wait(20)
        ended.set()
        return items

    def second() -> None:
        with pytest.raises(Cancelled):
            batcher(2, 1, stop.is_set)
        assert ended.is_set()

    batcher = Batcher(run, 10)
    with batcher.alone(never):
        futures = [pool.submit(batcher, 1, 1, never)]
        wait_until(lambda: len(batcher._queue) == 1)
        futures.append(pool.submit(second))
        wait_until(lambda: len(batcher._queue) == 2)
    assert running.wait(20)
    stop.set()
    time.sleep(2 * batching._ASK_S)
    assert not futures[1].done()
    go_on.set()
    for future in futures:
        future.result(20)


def test_nothing_runs_beside_what_runs_alone(work: Work, pool: ThreadPoolExecutor) -> None:
    work.go_on.set()
    with work.batcher.alone(never):
        future = pool.submit(work.ask, 1)
        work.waiting(1)
        with pytest.raises(Cancelled), work.batcher.alone(lambda: True):
            pass
        assert not work.batches
    assert future.result(20) == ("done", 1)


def test_members_are_waited_for_a_moment(work: Work, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that no test would survive, so that its length does not matter; who is alone does not wait at all."""

    def ask(item: object) -> object:
        with work.batcher.member(announced=item == 2):
            return work.ask(item)

    work.batcher._window_s = 1000.0
    assert ask(1) == ("done", 1)
    work.batcher._window_s = 1000.0
    work.batcher.announce()
    first = pool.submit(ask, 1)
    work.waiting(1)
    assert (ask(2), first.result(20)) == (("done", 2), ("done", 1))
    assert work.batches == [[1], [1, 2]]

    work.batcher._window_s = 1000.0
    with work.batcher.member():
        first = pool.submit(ask, 3)
        work.waiting(1)
        with work.batcher.absent():
            assert first.result(20) == ("done", 3)


def test_those_who_came_together_are_expected_together(work: Work, pool: ThreadPoolExecutor) -> None:
    """The first one back after a pause waits a moment for as many as there were before it; but not once more."""

    def ask(item: object) -> object:
        with work.batcher.member():
            return work.ask(item)

    first = pool.submit(ask, 0)
    wait_until(lambda: work.batches == [[0]])
    second = pool.submit(ask, 1)  # finds the first one under way
    work.waiting(1)
    work.go_on.set()
    assert (first.result(20), second.result(20)) == (("done", 0), ("done", 1))
    assert work.batches == [[0], [1]]

    work.batcher._window_s = 1000.0
    first = pool.submit(ask, 2)
    work.waiting(1)
    assert (ask(3), first.result(20)) == (("done", 3), ("done", 2))
    assert work.batches[2:] == [[2, 3]]

    work.batcher._window_s = 0.01
    assert ask(4) == ("done", 4)
    work.batcher._window_s = 1000.0
    assert ask(5) == ("done", 5)


# ---- one pass over several sequences


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_spans_are_what_each_is_alone(tiny_model_dir: Path, rng: np.random.Generator, dtype: torch.dtype) -> None:
    """States, and what stands in the caches: one token, several, a tree, a prompt; caches of different length."""
    source = open_model(str(tiny_model_dir))
    model = Llama(source.config, {name: weight.to(dtype) for name, weight in load_weights(source).items()})
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    shapes = [(7, 1, {}), (300, 5, {}), (20, 4, {"mask": mask, "positions": torch.tensor([0, 1, 1, 2])}), (0, 33, {})]
    ids = [torch.from_numpy(rng.integers(3, VOCAB, start + length)) for start, length, _ in shapes]
    caches = [[model.new_cache(1, 50 + len(each)) for each in ids] for _ in range(2)]
    for filled in caches:
        for cache, tokens, (start, _, _) in zip(filled, ids, shapes, strict=True):
            if start:
                model.hidden(tokens[None, :start], cache, 0)
    expected = [
        model.hidden(tokens[None, start:], cache, start, **places)[0]
        for tokens, cache, (start, _, places) in zip(ids, caches[0], shapes, strict=True)
    ]
    spans = [
        Span(length, cache, start, **places) for cache, (start, length, places) in zip(caches[1], shapes, strict=True)
    ]
    new = torch.cat([tokens[start:] for tokens, (start, _, _) in zip(ids, shapes, strict=True)])
    found = model.hidden_of_spans(new, spans)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}
    torch.testing.assert_close(found, torch.cat(expected), **close)
    for one, other in zip(*caches, strict=True):
        torch.testing.assert_close(one.k, other.k, **close)
        torch.testing.assert_close(one.v, other.v, **close)
    short = Span(4, model.new_cache(1, 5), 2)
    with pytest.raises(TrtspecError, match="the KV cache holds 5 positions, 6 are needed"):
        model.hidden_of_spans(new[:5], [Span(1, caches[1][0], 8), short])


# ---- requests


class Passes:
    """Counts a runtime's forward passes, and the requests' parts in them."""

    def __init__(self, runtime: TorchRuntime) -> None:
        self._run = runtime._passes._run
        self.number = self.steps = 0
        runtime._passes._run = self  # type: ignore[assignment]

    def __call__(self, steps: list) -> list:
        self.number += 1
        self.steps += len(steps)
        return self._run(steps)


def assert_idle(runtime: TorchRuntime) -> None:
    passes = runtime._passes
    assert (len(passes._queue), len(passes._batch), passes._members) == (0, 0, 0)
    assert not any(sequence.in_use for sequence in runtime._cache._sequences)


def assert_same(found: EngineResult, expected: EngineResult) -> None:
    assert found.output_ids.tolist() == expected.output_ids.tolist()
    assert found.num_accepted == expected.num_accepted
    for name in ("generation_logits", "log_probs"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.fixture
def mixed(target: TorchRuntime, rng: np.random.Generator) -> list[EngineRequest]:
    """Eight kinds of requests, with inputs that share a beginning or not; drafts are right in part."""
    beginning = rng.integers(3, VOCAB, 11).astype(np.int32)
    requests = []
    for number, length in enumerate((1, 9, 14, 30, 3, 21, 8, 5)):
        prompt = rng.integers(3, VOCAB, length).astype(np.int32)
        if number % 2:
            prompt = np.concatenate([beginning, prompt])
        requests.append(
            EngineRequest(prompt, 12, replace(SAMPLED, seed=number) if number in (1, 2) else SamplingParams())
        )
    requests[2] = replace(requests[2], return_generation_logits=True, return_log_probs=True)
    requests[3] = replace(requests[3], return_generation_logits=True)
    for number in (4, 5, 6, 7):
        drafts = target.execute(replace(requests[number], max_new_tokens=6)).output_ids.copy()
        drafts[number - 3] = 3  # at another place in each
        parents = np.array([ROOT, 0, 0, 1, 2, ROOT], np.int32) if number > 5 else None
        requests[number] = replace(
            requests[number],
            max_new_tokens=7,
            draft_tokens=drafts,
            draft_parents=parents,
            return_generation_logits=number in (5, 7),
        )
    return requests


@pytest.fixture
def alone(target_engine: Path, mixed: list[EngineRequest]) -> list[EngineResult]:
    """The answers to requests each of which is its runtime's only one."""
    return [TorchRuntime(target_engine, kv_cache_bytes=1 << 22).execute(request) for request in mixed]


@pytest.fixture
def unused(mixed: list[EngineRequest], alone: list[EngineResult]) -> int:
    """A token that is in none of the requests and answers."""
    used = [request.input_ids for request in mixed] + [result.output_ids for result in alone]
    used += [request.draft_tokens for request in mixed if request.draft_tokens is not None]
    return min(set(range(10, VOCAB)) - set(np.concatenate(used).tolist()))


def test_the_answer_is_the_same_alone_and_in_company(
    target: TorchRuntime, mixed: list[EngineRequest], alone: list[EngineResult], pool: ThreadPoolExecutor
) -> None:
    """Each of eight threads asks everything, from another request on."""
    passes = Passes(target)

    def ask(thread: int) -> list[EngineResult]:
        order = [(thread + place) % len(mixed) for place in range(len(mixed))]
        answers = {number: target.execute(mixed[number]) for number in order}
        return [answers[number] for number in range(len(mixed))]

    for answers in pool.map(ask, range(8)):
        for found, expected in zip(answers, alone, strict=True):
            assert_same(found, expected)
    assert passes.number < passes.steps
    assert_idle(target)


def test_announced_requests_share_every_pass(
    target: TorchRuntime, rng: np.random.Generator, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "_WINDOW", 1e6)  # as long as it takes
    monkeypatch.setattr(batching, "_LONGEST_WINDOW_S", 10.0)
    target._passes._window_s = 10.0
    requests = [EngineRequest(rng.integers(3, VOCAB, 5 + n).astype(np.int32), 10) for n in range(8)]
    passes = Passes(target)
    for _ in requests:
        target.announce()
    futures = [pool.submit(target.execute, request, announced=True) for request in requests]
    assert [len(future.result(60).output_ids) for future in futures] == [10] * 8
    assert (passes.number, passes.steps) == (10, 80)
    target.announce()
    with pytest.raises(TrtspecError, match="0 new tokens"):
        target.execute(replace(requests[0], max_new_tokens=0), announced=True)
    assert_idle(target)


def test_a_request_that_fails_or_is_cancelled_disturbs_nobody(
    target: TorchRuntime,
    mixed: list[EngineRequest],
    alone: list[EngineResult],
    unused: int,
    pool: ThreadPoolExecutor,
) -> None:
    """One token's states are no numbers."""
    name = "transformer.vocab_embedding.weight"
    target._model.weights[name] = target._model.weights[name].clone()
    target._model.weights[name][unused] = torch.nan
    poisoned = np.array([5, unused, 6], np.int32)
    faulty = [
        EngineRequest(poisoned, 9),
        EngineRequest(poisoned, 9, SAMPLED),
        EngineRequest(poisoned, 3, draft_tokens=np.array([8, 9], np.int32)),
    ]

    def soon() -> Callable[[], bool]:
        asked = iter(range(100))
        return lambda: next(asked) > 3

    for _ in range(3):
        futures = [pool.submit(target.execute, request) for request in mixed]
        failing = [pool.submit(target.execute, request) for request in faulty]
        cancelled = [pool.submit(target.execute, mixed[number], cancelled=soon()) for number in (0, 1)]
        for found, expected in zip(futures, alone, strict=True):
            assert_same(found.result(60), expected)
        for future in failing:
            assert isinstance(future.exception(60), TrtspecError)
        for future in cancelled:
            assert isinstance(future.exception(60), Cancelled)
    assert_idle(target)


def test_a_pass_that_fails_fails_for_its_cause_alone(
    target: TorchRuntime,
    mixed: list[EngineRequest],
    alone: list[EngineResult],
    unused: int,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, joined_failed = Llama._layer, threading.Event()

    def layer(self: Llama, number: int, x: torch.Tensor, *rest: object) -> torch.Tensor:
        if number == 0 and (x == self.weights["transformer.vocab_embedding.weight"][unused]).all(dim=-1).any():
            if x.shape[1] > 3:
                joined_failed.set()
            raise RuntimeError("the device burns")
        return run(self, number, x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Llama, "_layer", layer)
    for _ in range(20):
        futures = [pool.submit(target.execute, request) for request in mixed]
        burning = pool.submit(target.execute, EngineRequest(np.array([5, unused, 6], np.int32), 9))
        for found, expected in zip(futures, alone, strict=True):
            assert_same(found.result(60), expected)
        assert "the device burns" in str(burning.exception(60))
        if joined_failed.is_set():
            break
    assert joined_failed.is_set()
    assert_idle(target)


def test_many_requests_that_come_go_and_are_cancelled_leave_nothing_behind(
    target_engine: Path, mixed: list[EngineRequest], alone: list[EngineResult], rng: np.random.Generator
) -> None:
    """Also where there is no room for all of them at once."""
    one = 2 * 2 * 2 * 8 * 4 * 256
    target = TorchRuntime(target_engine, kv_cache_bytes=5 * one)
    chosen = rng.integers(0, len(mixed), 200)
    patience = [int(n) if n < 14 else None for n in rng.integers(0, 28, 200)]

    def ask(number: int, patience: int | None) -> EngineResult | None:
        asked = iter(range(10_000))
        try:
            return target.execute(mixed[number], cancelled=lambda: patience is not None and next(asked) >= patience)
        except Cancelled:
            return None

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, chosen, patience))
    for number, limit, answer in zip(chosen, patience, answers, strict=True):
        assert answer is not None or limit is not None
        if answer is not None:
            assert_same(answer, alone[number])
    assert None in answers
    assert_idle(target)


def test_a_request_in_flight_lends_its_input_alone(target: TorchRuntime, rng: np.random.Generator) -> None:
    """What it has generated, or been given as drafts, may be written over while it is copied."""
    prompt = rng.integers(3, VOCAB, 20).astype(np.int32)
    text = np.concatenate([prompt, target.execute(EngineRequest(prompt, 8)).output_ids])
    inside: list[EngineResult] = []
    asked = 0

    def look() -> bool:
        nonlocal asked
        asked += 1
        if asked == 5:  # four of eight tokens are generated
            with ThreadPoolExecutor(1) as pool:
                inside.append(pool.submit(target.execute, EngineRequest(text, 1)).result(20))
        return False

    target.execute(EngineRequest(prompt, 8), cancelled=look)
    assert inside[0].reused_tokens == len(prompt)
