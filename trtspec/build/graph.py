"""The step graph: the steps of a build in order, which of them must run and why, and running them.

A step runs when one of its inputs has changed or its output is damaged; otherwise it is cached. Steps that need GPUs
run side by side while there are GPUs for them, all others one at a time. Does not know what the steps do.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from trtspec.build.fingerprint import digest, digest_code
from trtspec.build.lock import output_lock
from trtspec.build.output import clear_staging, damage, explain, explained, record, staging_dir, swap_in, with_times_now
from trtspec.build.state import BuildState, StepRecord
from trtspec.errors import TrtspecError

CACHED, OK, FAILED, SKIPPED, WOULD_RUN = "cached", "ok", "failed", "skipped", "would run"

Results = Mapping[str, StepRecord]  # the steps that are up to date, by name


class Observer(Protocol):
    """Whoever shows a build while it runs; is called by one thread at a time."""

    def started(self, name: str, reason: str) -> None:
        """A step begins, because of `reason`."""

    def advance(self, name: str, fraction: float) -> None:
        """A running step is so far, 0..1."""

    def note(self, name: str, text: str) -> None:
        """A running step has something to say."""

    def finished(self, outcome: Outcome) -> None:
        """A step has ended, or need not run."""


@dataclass(frozen=True)
class Task:
    """What a running step is given.

    Attributes:
        results: the records of the steps that it needs.
        destination: where it writes its output; not there yet, its parent is.
        ran: names of the steps that ran in this build, rather than being cached.
        advance: reports progress, 0..1; raises KeyboardInterrupt once the build is to end, so call it often.
        note: says one line to the user.
        gpu_ids: numbers of the GPUs that are set aside for it, from 0.
    """

    results: Results
    destination: Path
    ran: Sequence[str]
    advance: Callable[[float], None]
    note: Callable[[str], None]
    gpu_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: unique in the graph.
        run: does the work and returns a JSON object that depends on the inputs alone (no times, no paths).
        inputs: every JSON value that the result depends on, by name, from the results of the needed steps.
        needs: names of the steps before it.
        output: the file or directory that `run` writes.
        actions: the commands, or the sentences, for what `run` does; results may be missing in a dry run.
        code: source of the package that decides the result, files or directories.
        peek: `run` only looks, and quickly, so that a dry run may run it to see more.
        gpus: GPUs that it occupies; such steps run side by side, in threads. It gets all there are if it wants more.
    """

    name: str
    run: Callable[[Task], dict[str, Any]]
    inputs: Callable[[Results], Mapping[str, Any]]
    actions: Callable[[Results], list[str]]
    needs: tuple[str, ...] = ()
    output: Path | None = None
    code: tuple[str, ...] = ()
    peek: bool = False
    gpus: int = 0


@dataclass(frozen=True)
class Outcome:
    """What became of one step: its status, why, and how long it took (seconds)."""

    name: str
    status: str
    reason: str
    seconds: float = 0.0
    input_hash: str | None = None
    output: Path | None = None
    actions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The outcomes of all steps in order, and the error that ended the build, if any."""

    outcomes: list[Outcome]
    error: TrtspecError | None = None

    @property
    def changed(self) -> bool:
        """Whether any step ran."""
        return any(outcome.status in (OK, FAILED) for outcome in self.outcomes)


class Graph:
    """The steps of one build and their state under `root`, the engines directory, on a machine with `gpus` GPUs.

    Raises:
        ValueError: a step needs one that does not exist, or the needs form a circle.
    """

    def __init__(self, steps: Sequence[Step], root: Path, *, gpus: int = 0) -> None:
        by_name = {step.name: step for step in steps}
        if missing := {need for step in steps for need in step.needs} - by_name.keys():
            raise ValueError(f"no such step: {', '.join(sorted(missing))}")
        # graphlib's CycleError is a ValueError
        order = TopologicalSorter({step.name: step.needs for step in steps}).static_order()
        self.steps = [by_name[name] for name in order]
        self.root = root
        self.gpus = gpus
        self.state = BuildState(root / ".build" / "state.json")

    def run(self, observer: Observer, *, force: bool = False, only: str | None = None) -> Report:
        """Run what must run, in order, saving the state after every step.

        After a failure nothing new is started; steps that run beside the failed one end, and are kept. Ctrl-C,
        SIGTERM and SIGHUP end all that runs.

        Args:
            force: run although cached.
            only: this step alone; the steps before it must be up to date.

        Raises:
            TrtspecError: another build holds an output, an output is not ours to replace, `only` is unknown, or a
                step before it is out of date.
        """
        selected = self._select(only)
        with explained(self.root), self._locked(), _interruptible():
            self.state = BuildState(self.state.path)  # another build may have ended between reading and locking
            for step in self.steps:
                if step.output:
                    clear_staging(step.output)
            build = _Build(self, observer, force, only)
            with ThreadPoolExecutor(max(self.gpus, 1)) as threads:
                try:
                    build.run([step for step in self.steps if step in selected], threads)
                finally:
                    build.stop.set()  # ends what still runs when this is left by an exception
        not_run = "an earlier step failed" if build.error else "not asked for"
        outcomes = [build.outcomes.get(step.name, Outcome(step.name, SKIPPED, not_run)) for step in self.steps]
        return Report(outcomes, build.error)

    def preview(self, *, force: bool = False, only: str | None = None) -> Report:
        """What `run` would do; writes nothing. Steps that only look are run, so that their refusals show.

        Raises:
            TrtspecError: `only` is unknown.
        """
        selected = self._select(only)
        outcomes = []
        results: dict[str, StepRecord] = {}
        error = None
        for step in self.steps:
            if step not in selected:
                outcomes.append(Outcome(step.name, SKIPPED, "not asked for"))
                continue
            if waits_for := [need for need in step.needs if need not in results]:
                outcomes.append(self._outcome(step, WOULD_RUN, f"after {', '.join(waits_for)}", None, results))
                continue
            inputs, reason = self._examine(step, results, forced=force and only in (None, step.name))
            if only and step.name != only and reason:
                error = error or _out_of_date(step.name, only, reason)
            outcome = self._outcome(step, WOULD_RUN if reason else CACHED, reason or "unchanged", inputs, results)
            if not reason:
                results[step.name] = self.state.records[step.name]
            elif step.peek:
                try:
                    facts = step.run(Task(results, Path(), (), lambda fraction: None, lambda text: None))
                    results[step.name] = StepRecord(inputs, facts)
                except TrtspecError as failure:
                    outcome = self._outcome(step, FAILED, str(failure), inputs, results)
                    error = error or failure
            outcomes.append(outcome)
        return Report(outcomes, error)

    def _select(self, only: str | None) -> list[Step]:
        """All steps, or `only` and those before it."""
        if only is None:
            return self.steps
        if only not in [step.name for step in self.steps]:
            names = ", ".join(step.name for step in self.steps)
            raise TrtspecError(f"this build has no step {only!r}", where="--only", expected=f"one of {names}")
        wanted = {only}
        for step in reversed(self.steps):
            if step.name in wanted:
                wanted.update(step.needs)
        return [step for step in self.steps if step.name in wanted]

    def _examine(self, step: Step, results: Results, *, forced: bool) -> tuple[dict[str, str], str | None]:
        """Digests of the step's inputs, and why it must run (None: it need not)."""
        inputs = {name: digest(value) for name, value in step.inputs(results).items()}
        inputs["code"] = digest_code(*step.code)
        last = self.state.records.get(step.name)
        if last is None:
            return inputs, "not built yet"
        changed = [name for name in {**last.inputs, **inputs} if last.inputs.get(name) != inputs.get(name)]
        if changed:
            return inputs, f"changed: {', '.join(changed)}"
        fault = damage(step.output, last.files) if step.output else None
        return inputs, fault or ("forced" if forced else None)

    def _keep(self, step: Step) -> None:
        """Remember that a cached output was looked at."""
        last = self.state.records[step.name]
        if step.output and (files := with_times_now(step.output, last.files)) != last.files:
            self.state.records[step.name] = replace(last, files=files)
            self.state.save()

    def _outcome(
        self,
        step: Step,
        status: str,
        reason: str,
        inputs: dict[str, str] | None,
        results: Results,
        seconds: float = 0.0,
    ) -> Outcome:
        actions = tuple(step.actions(results))
        return Outcome(
            step.name, status, reason, round(seconds, 3), digest(inputs) if inputs else None, step.output, actions
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the engines directory and of every output outside it."""
        locks = {self.root: self.root / ".build" / "lock"}
        for step in self.steps:
            if step.output and not step.output.is_relative_to(self.root):
                locks[step.output] = step.output.with_name(f".{step.output.name}.lock")
        for step in self.steps:
            if step.output:
                _check_ours(step.output, locks.get(step.output, locks[self.root]))
        with ExitStack() as stack:
            for guarded, lock in locks.items():
                stack.enter_context(output_lock(lock, guarded))
            yield


class _Build:
    """One run of a graph: what has come of its steps so far, and what runs now."""

    def __init__(self, graph: Graph, observer: Observer, force: bool, only: str | None) -> None:
        self.graph, self.observer, self.force, self.only = graph, observer, force, only
        self.outcomes: dict[str, Outcome] = {}
        self.results: dict[str, StepRecord] = {}
        self.ran: list[str] = []
        self.error: TrtspecError | None = None
        self.stop = threading.Event()
        self.free = set(range(graph.gpus))
        self.running: dict[Future[tuple[Outcome, TrtspecError | None]], tuple[int, ...]] = {}
        self._lock = threading.Lock()  # guards the state and the observer against the threads of running steps

    def run(self, steps: Sequence[Step], threads: ThreadPoolExecutor) -> None:
        """Run `steps`, which are in the order of their needs; ends when they have, or when the first has failed."""
        waiting = list(steps)
        while self.running or (waiting and not self.error):
            step = None if self.error else next(filter(self._may_start, waiting), None)
            if step is None:
                self._join()
                continue
            waiting.remove(step)
            inputs, reason = self._examine(step)
            if reason is None:
                with self._lock:
                    self.graph._keep(step)
                self._finished(self.graph._outcome(step, CACHED, "unchanged", inputs, self.results), None)
            elif gpu_ids := tuple(sorted(self.free)[: step.gpus]):
                self.free -= set(gpu_ids)
                job = (step, inputs, reason, dict(self.results), tuple(self.ran), gpu_ids)
                self.running[threads.submit(self._execute, *job)] = gpu_ids
            else:
                self._finished(*self._execute(step, inputs, reason, self.results, tuple(self.ran), ()))

    def _may_start(self, step: Step) -> bool:
        """Whether all that a step needs is there. With nothing running, the first in order always may."""
        if not self.running:
            return True
        ready = all(need in self.results for need in step.needs)
        return ready and 0 < min(step.gpus, self.graph.gpus) <= len(self.free)

    def _join(self) -> None:
        """Wait until a running step has ended."""
        for done in wait(self.running, return_when=FIRST_COMPLETED).done:
            self.free |= set(self.running.pop(done))
            self._finished(*done.result())

    def _examine(self, step: Step) -> tuple[dict[str, str], str | None]:
        """Digests of the step's inputs, and why it must run."""
        forced = self.force and self.only in (None, step.name)
        inputs, reason = self.graph._examine(step, self.results, forced=forced)
        if self.only and step.name != self.only and reason:
            raise _out_of_date(step.name, self.only, reason)
        return inputs, reason

    def _finished(self, outcome: Outcome, error: TrtspecError | None) -> None:
        self.outcomes[outcome.name] = outcome
        if outcome.status != CACHED:
            self.ran.append(outcome.name)
        if error is None:
            self.results[outcome.name] = self.graph.state.records[outcome.name]
        self.error = self.error or error
        with self._lock:
            self.observer.finished(outcome)

    def _execute(
        self,
        step: Step,
        inputs: dict[str, str],
        reason: str,
        results: Results,
        ran: Sequence[str],
        gpu_ids: tuple[int, ...],
    ) -> tuple[Outcome, TrtspecError | None]:
        """Run one step, in any thread."""
        graph = self.graph

        def advance(fraction: float) -> None:
            if self.stop.is_set():
                raise KeyboardInterrupt
            with self._lock:
                self.observer.advance(step.name, fraction)

        def note(text: str) -> None:
            with self._lock:
                self.observer.note(step.name, text)

        with self._lock:
            self.observer.started(step.name, reason)
        begin = time.perf_counter()
        destination = staging_dir(step.output) / step.output.name if step.output else Path()
        try:
            if step.output:
                destination.parent.mkdir(parents=True)
            facts = step.run(Task(results, destination, ran, advance, note, gpu_ids))
            if step.output:
                swap_in(step.output)
            made = StepRecord(
                inputs=inputs,
                facts=facts,
                files=record(step.output) if step.output else {},
                seconds=round(time.perf_counter() - begin, 3),
                finished_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                actions=step.actions(results),
            )
            with self._lock:
                graph.state.records[step.name] = made
                graph.state.save()
            status, error = OK, None
        except (TrtspecError, OSError) as failure:
            error = explain(failure, step.output or graph.root) if isinstance(failure, OSError) else failure
            if step.output and error.where:  # what is staged is gone by now; the user knows the place it was for
                error.where = error.where.replace(str(destination), str(step.output))
            status, reason = FAILED, str(error)
        finally:
            if step.output:
                clear_staging(step.output)
        return graph._outcome(step, status, reason, inputs, results, time.perf_counter() - begin), error


@contextmanager
def _interruptible() -> Iterator[None]:
    """Inside a `with` block SIGTERM and SIGHUP interrupt as Ctrl-C does, and only once: what runs is ended in peace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    every = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in every if signal.getsignal(number) != signal.SIG_IGN]

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, lambda number, frame: None)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _check_ours(output: Path, lock: Path) -> None:
    """Refuse to replace what no build has written: ours has a lock file beside it."""
    if lock.exists() or not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    raise TrtspecError(
        "exists and was not written by trtspec build",
        where=str(output),
        fix="move it away, or set output.engines and output.model_repo to other directories",
    )


def _out_of_date(step: str, only: str, reason: str) -> TrtspecError:
    return TrtspecError(
        f"step {step} is not up to date ({reason})", where=f"--only {only}", fix=f"run it first: --only {step}"
    )
