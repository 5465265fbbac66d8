"""The step graph: the steps of a build in order, which of them must run and why, and running them.

A step runs when one of its inputs has changed or its output is damaged; otherwise it is cached. Does not know what
the steps do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, Protocol

from trtspec.build.fingerprint import digest, digest_code
from trtspec.build.lock import output_lock
from trtspec.build.output import clear_staging, damage, explain, explained, record, staging_dir, swap_in, with_times_now
from trtspec.build.state import BuildState, StepRecord
from trtspec.errors import TrtspecError

CACHED, OK, FAILED, SKIPPED, WOULD_RUN = "cached", "ok", "failed", "skipped", "would run"

Results = Mapping[str, StepRecord]  # the steps that are up to date, by name


class Observer(Protocol):
    """Whoever shows a build while it runs."""

    def started(self, name: str, reason: str) -> None:
        """A step begins, because of `reason`."""

    def advance(self, fraction: float) -> None:
        """The running step is so far, 0..1."""

    def note(self, text: str) -> None:
        """The running step has something to say."""

    def finished(self, outcome: Outcome) -> None:
        """A step has ended, or need not run."""


@dataclass(frozen=True)
class Task:
    """What a running step is given.

    Attributes:
        results: the records of the steps that it needs.
        destination: where it writes its output; not there yet, its parent is.
        ran: names of the steps that ran in this build, rather than being cached.
        advance: reports progress, 0..1.
        note: says one line to the user.
    """

    results: Results
    destination: Path
    ran: Sequence[str]
    advance: Callable[[float], None]
    note: Callable[[str], None]


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
    """

    name: str
    run: Callable[[Task], dict[str, Any]]
    inputs: Callable[[Results], Mapping[str, Any]]
    actions: Callable[[Results], list[str]]
    needs: tuple[str, ...] = ()
    output: Path | None = None
    code: tuple[str, ...] = ()
    peek: bool = False


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
    """The steps of one build and their state under `root`, the engines directory.

    Raises:
        ValueError: a step needs one that does not exist, or the needs form a circle.
    """

    def __init__(self, steps: Sequence[Step], root: Path) -> None:
        by_name = {step.name: step for step in steps}
        if missing := {need for step in steps for need in step.needs} - by_name.keys():
            raise ValueError(f"no such step: {', '.join(sorted(missing))}")
        # graphlib's CycleError is a ValueError
        order = TopologicalSorter({step.name: step.needs for step in steps}).static_order()
        self.steps = [by_name[name] for name in order]
        self.root = root
        self.state = BuildState(root / ".build" / "state.json")

    def run(self, observer: Observer, *, force: bool = False, only: str | None = None) -> Report:
        """Run what must run, in order, saving the state after every step; stop at the first failure.

        Args:
            force: run although cached.
            only: this step alone; the steps before it must be up to date.

        Raises:
            TrtspecError: another build holds an output, an output is not ours to replace, `only` is unknown, or a
                step before it is out of date.
        """
        selected = self._select(only)
        with explained(self.root), self._locked():
            self.state = BuildState(self.state.path)  # another build may have ended between reading and locking
            for step in self.steps:
                if step.output:
                    clear_staging(step.output)
            outcomes: list[Outcome] = []
            results: dict[str, StepRecord] = {}
            ran: list[str] = []
            error = None
            for step in self.steps:
                if error or step not in selected:
                    outcomes.append(Outcome(step.name, SKIPPED, "an earlier step failed" if error else "not asked for"))
                    continue
                inputs, reason = self._examine(step, results, forced=force and only in (None, step.name))
                if only and step.name != only and reason:
                    raise _out_of_date(step.name, only, reason)
                if reason:
                    outcome, error = self._execute(step, inputs, reason, results, ran, observer)
                    ran.append(step.name)
                else:
                    self._keep(step)
                    outcome = self._outcome(step, CACHED, "unchanged", inputs, results)
                if not error:
                    results[step.name] = self.state.records[step.name]
                outcomes.append(outcome)
                observer.finished(outcome)
        return Report(outcomes, error)

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

    def _execute(
        self,
        step: Step,
        inputs: dict[str, str],
        reason: str,
        results: Results,
        ran: Sequence[str],
        observer: Observer,
    ) -> tuple[Outcome, TrtspecError | None]:
        observer.started(step.name, reason)
        begin = time.perf_counter()
        destination = staging_dir(step.output) / step.output.name if step.output else Path()
        try:
            if step.output:
                destination.parent.mkdir(parents=True)
            facts = step.run(Task(results, destination, tuple(ran), observer.advance, observer.note))
            if step.output:
                swap_in(step.output)
            self.state.records[step.name] = StepRecord(
                inputs=inputs,
                facts=facts,
                files=record(step.output) if step.output else {},
                seconds=round(time.perf_counter() - begin, 3),
                finished_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                actions=step.actions(results),
            )
            self.state.save()
            status, error = OK, None
        except (TrtspecError, OSError) as failure:
            error = explain(failure, step.output or self.root) if isinstance(failure, OSError) else failure
            if step.output and error.where:  # what is staged is gone by now; the user knows the place it was for
                error.where = error.where.replace(str(destination), str(step.output))
            status, reason = FAILED, str(error)
        finally:
            if step.output:
                clear_staging(step.output)
        outcome = self._outcome(step, status, reason, inputs, results, time.perf_counter() - begin)
        return outcome, error

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
