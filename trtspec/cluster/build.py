"""Builds on Slurm: submitting the jobs of one spec or many, following them, cancelling them.

Slurm schedules and runs; this writes its input and reads its results. Steps that need no engine (opening the models,
the pair check, the plan) run here first, so that what can be refused is refused before anything waits in a queue.
Builds of several specs whose jobs look alike are submitted as arrays, one task a spec.
"""

from __future__ import annotations

import secrets
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trtspec.build.graph import CACHED, FAILED, SKIPPED, WOULD_RUN, Graph, Observer, Outcome, Report
from trtspec.build.output import explained
from trtspec.build.steps import build_graph
from trtspec.cluster import jobs, sbatch, slurm
from trtspec.cluster.events import Listener, outcome_fields, outcome_of
from trtspec.cluster.job import INTERRUPTED
from trtspec.cluster.jobs import Job, Submission
from trtspec.cluster.slurm import JobState, Options, SlurmError
from trtspec.errors import TrtspecError
from trtspec.spec.schema import Spec
from trtspec.trtllm.support import require_buildable

_LISTEN_S = 0.5  # between two looks at the events
_ASK_S = 2.0  # between two questions to Slurm
_LAG_S = 20.0  # that a result may take to appear here after its job has ended elsewhere
_SILENCE_S = 300.0  # that Slurm may not answer while jobs are followed
_SUBMITTING_S = 15.0  # that another process may take to submit what we then follow
_AGAIN = "run this again, what is finished is kept"


@dataclass(frozen=True)
class Request:
    """One spec to build.

    Attributes:
        spec: the spec.
        overrides: values of `--set` that it was loaded with.
        compile, force: options of the build.
    """

    spec: Spec
    overrides: tuple[str, ...] = ()
    compile: bool = True
    force: bool = False

    @property
    def engines_dir(self) -> Path:
        """Where the engines, and the files of the jobs, are."""
        return self.spec.engines_dir.resolve()


class Prefixed:
    """An observer that says whose steps it shows, where several builds are watched at once."""

    def __init__(self, observer: Observer, prefix: str) -> None:
        self._observer, self._prefix = observer, prefix

    def started(self, name: str, reason: str) -> None:
        self._observer.started(self._prefix + name, reason)

    def advance(self, name: str, fraction: float) -> None:
        self._observer.advance(self._prefix + name, fraction)

    def note(self, name: str, text: str) -> None:
        self._observer.note(self._prefix + name, text)

    def finished(self, outcome: Outcome) -> None:
        self._observer.finished(replace(outcome, name=self._prefix + outcome.name))


def build(
    requests: Sequence[Request],
    options: Options,
    observer: Observer,
    say: Callable[[str], None],
    finished: Callable[[int, Report], None] = lambda number, report: None,
) -> list[Report]:
    """Build specs on Slurm, or go on following the jobs that an earlier call has submitted.

    Args:
        requests: the specs; no two may have the same output.
        options: what the user says about jobs.
        observer: shows the steps.
        say: shows a line about jobs.
        finished: called with the number of a request and its report once it is over.

    Returns:
        One report a request.

    Raises:
        TrtspecError: Slurm refuses, a spec cannot be built, or jobs of another version of a spec are under way. Of
            several specs none is submitted then.
        KeyboardInterrupt: the jobs go on.
    """
    _check_outputs(requests)
    observers = _observers(requests, observer)
    running: dict[int, Submission] = {}
    for number, request in enumerate(requests):
        if submission := _running(request):
            running[number] = submission
            say(f"following jobs {', '.join(submission.ids)}, which build {submission.config}")
            for content in submission.before:
                observers[number].finished(outcome_of(content))
    reports: dict[int, Report] = {}
    if fresh := [number for number in range(len(requests)) if number not in running]:
        slurm.check(options)
        made = {}
        for number in fresh:
            report, submission = _prepare(requests[number], options, observers[number])
            if report.error:
                raise report.error
            if submission:
                made[number] = submission
            else:
                reports[number] = report
                finished(number, report)
        running |= _submit(made, requests, options, say)
    followed = {
        number: _Followed(submission, observers[number], options.partition) for number, submission in running.items()
    }
    try:
        for number, report in _follow(followed):
            reports[number] = report
            finished(number, report)
    except KeyboardInterrupt:
        ids = ", ".join(job for submission in running.values() for job in submission.ids)
        say(f"jobs {ids} go on; the same command follows them again, and with --cancel ends them")
        raise
    return [reports[number] for number in range(len(requests))]


def cancel(requests: Sequence[Request], say: Callable[[str], None]) -> None:
    """End the jobs of these builds; steps that have finished are kept.

    Raises:
        TrtspecError: Slurm refuses, or jobs have not ended after two minutes.
    """
    found = [each for each in (jobs.read(request.engines_dir) for request in requests) if each]
    states = slurm.states([each for submission in found for each in submission.ids])
    active = [job for job, state in states.items() if state.is_active]
    slurm.end(active)
    for submission in found:
        jobs.settle(submission.engines_dir)
    say(f"cancelled jobs {', '.join(active)}; finished steps are kept" if active else "no jobs to cancel")


def preview(requests: Sequence[Request], options: Options) -> Iterator[str]:
    """The jobs that `build` would submit, as far as can be said without running anything, with their scripts.

    Raises:
        TrtspecError: as `build`.
    """
    _check_outputs(requests)
    slurm.check(options)
    for request in requests:
        graph = build_graph(request.spec, compile=request.compile)
        report = graph.preview(force=request.force)
        if report.error:
            raise report.error
        todo = {outcome.name for outcome in report.outcomes if outcome.status == WOULD_RUN}
        for job in jobs.jobs_of(graph, todo):
            submission = _submission(request, [], [job], token="TOKEN")
            after = [f"--dependency={_AFTER[False]}:{':'.join(f'<{need}>' for need in job.needs)}"] if job.needs else []
            yield f"sbatch {' '.join([*map(shlex.quote, _words(submission, job, options, request.spec)), *after])}"
            yield from (f"  {line}" for line in _script([submission], job).splitlines())


_AFTER = {False: "afterok", True: "aftercorr"}  # by whether it is an array: a task waits for those of its number


def _running(request: Request) -> Submission | None:
    """The jobs that build this spec already, to be followed.

    Raises:
        TrtspecError: they build another version of it.
    """
    deadline = time.monotonic() + _SUBMITTING_S
    while submission := jobs.read(request.engines_dir):
        if submission.spec_hash != request.spec.hash():
            if any(state.is_active for state in slurm.states(submission.ids).values()):
                raise TrtspecError(
                    f"jobs {', '.join(submission.ids)} build an earlier version of this spec",
                    where=str(request.spec.source),
                    fix="undo the change to follow them, or end them with --cancel",
                )
            jobs.settle(request.engines_dir)
        elif all(job.id for job in submission.jobs):
            return submission
        elif time.monotonic() > deadline:  # whoever submitted these has died over it
            slurm.cancel(submission.ids)
            jobs.forget(request.engines_dir)
        else:
            time.sleep(_LISTEN_S)
    return None


def _check_outputs(requests: Sequence[Request]) -> None:
    seen: dict[Path, Spec] = {}
    for request in requests:
        for output in (request.engines_dir, request.spec.model_repo_dir.resolve()):
            if output in seen:
                raise TrtspecError(
                    f"{request.spec.source} and {seen[output].source} write to the same directory",
                    where=str(output),
                    fix="give each spec a name or an output of its own",
                )
            seen[output] = request.spec


def _observers(requests: Sequence[Request], observer: Observer) -> list[Observer]:
    if len(requests) == 1:
        return [observer]
    names = [request.spec.name for request in requests]
    shown = names if len(set(names)) == len(names) else [str(request.spec.source) for request in requests]
    return [Prefixed(observer, f"{name}/") for name in shown]


def _prepare(request: Request, options: Options, observer: Observer) -> tuple[Report, Submission | None]:
    """Run the steps that need no engine, and see which jobs the others take; no submission: none, or an error."""
    require_buildable(request.spec)
    jobs.settle(request.engines_dir)
    graph = build_graph(request.spec, compile=request.compile)
    before = jobs.split(graph)[0]
    report = Graph(before, graph.root).run(observer, force=request.force)
    if report.error:
        later = [Outcome(s.name, SKIPPED, "an earlier step failed") for s in graph.steps if s not in before]
        return Report([*report.outcomes, *later], report.error), None
    looked = Graph(graph.steps, graph.root).preview(force=request.force)
    ran = {outcome.name for outcome in report.outcomes}
    done = [*report.outcomes, *(each for each in looked.outcomes if each.name not in ran and each.status == CACHED)]
    for outcome in done[len(report.outcomes) :]:
        observer.finished(outcome)
    todo = {each.name for each in looked.outcomes if each.name not in ran and each.status == WOULD_RUN}
    if not todo:
        return Report(done), None
    submission = _submission(request, done, jobs.jobs_of(graph, todo), token=secrets.token_hex(8))
    for job in submission.jobs:
        _words(submission, job, options, request.spec)  # refuses GPUs that no node has, before anything is submitted
    return report, submission


def _submission(request: Request, before: Sequence[Outcome], made: Sequence[Job], token: str) -> Submission:
    return Submission(
        engines_dir=request.engines_dir,
        token=token,
        config=str(request.spec.source),
        overrides=request.overrides,
        spec_hash=request.spec.hash(),
        compile=request.compile,
        force=request.force,
        before=tuple(outcome_fields(outcome) for outcome in before),
        jobs=tuple(made),
    )


def _words(submission: Submission, job: Job, options: Options, spec: Spec, num_tasks: int = 1) -> list[str]:
    """Arguments of sbatch for one job, but for what it waits for; several tasks are an array."""
    log = str(_log(submission, job.name)).replace("%", "%%")
    words = ["--nodes=1", "--ntasks=1", "--no-requeue", "--kill-on-invalid-dep=yes"]
    words += [f"--job-name=trtspec-{spec.name}-{job.name}", f"--output={log}{'.%a' if num_tasks > 1 else ''}"]
    if num_tasks > 1:
        words.append(f"--array=0-{num_tasks - 1}")
    if job.gpus and not {"gres", "gpus", "gpus-per-node"} & set(options.more):
        words.append(f"--gres={slurm.gpu_request(spec.hardware.gpu, job.gpus, options.partition)}")
    return [*words, *options.words()]


def _log(submission: Submission, job: str) -> Path:
    return jobs.folder(submission.engines_dir, job) / "log"


def _script(submissions: Sequence[Submission], job: Job) -> str:
    title = f"{job.name} of {', '.join(each.config for each in submissions)}; written by trtspec build"
    rows = [(str(each.engines_dir), each.token, job.name) for each in submissions]
    return sbatch.script(title, [sbatch.python("trtspec.cluster.job", *row) for row in rows])


def _submit(
    made: Mapping[int, Submission], requests: Sequence[Request], options: Options, say: Callable[[str], None]
) -> dict[int, Submission]:
    """Submit; builds whose jobs look alike together, each job as an array. What fails halfway is cancelled."""
    alike: dict[object, list[int]] = defaultdict(list)
    for number, submission in made.items():
        alike[requests[number].spec.hardware.gpu, submission.jobs].append(number)
    claimed: dict[int, Submission] = {}
    submitted: list[str] = []
    try:
        for number, submission in made.items():
            with explained(submission.engines_dir):
                submission.claim()
            claimed[number] = submission
        for numbers in alike.values():
            first, is_array = made[numbers[0]], len(numbers) > 1
            ids: dict[str, str] = {}
            for job in first.jobs:
                script = jobs.folder(first.engines_dir, job.name) / "job.sh"
                script.write_text(_script([made[number] for number in numbers], job), encoding="utf-8")
                words = _words(first, job, options, requests[numbers[0]].spec, len(numbers))
                waits = [f"--dependency={_AFTER[is_array]}:{':'.join(ids[need] for need in job.needs)}"]
                job_id = ids[job.name] = str(slurm.submit(script, words + (waits if job.needs else [])))
                submitted.append(job_id)
                for task, number in enumerate(numbers):
                    task_id = f"{job_id}_{task}" if is_array else job_id
                    log = str(_log(first, job.name)) + (f".{task}" if is_array else "")
                    claimed[number] = claimed[number].numbered(job.name, task_id, log)
                    claimed[number].save()
                say(f"{job.name}: job {job_id}" + (f", an array of {len(numbers)}" if is_array else ""))
    except BaseException:
        if submitted:
            slurm.cancel(submitted)
        for submission in claimed.values():
            jobs.forget(submission.engines_dir)
        raise
    return claimed


class _Followed:
    """A build whose jobs are followed: what they have told, and what has become of them."""

    def __init__(self, submission: Submission, observer: Observer, partition: str | None) -> None:
        self.submission, self._observer, self._partition = submission, observer, partition
        engines_dir = submission.engines_dir
        self._listeners = {job.name: Listener(jobs.events_file(engines_dir, job.name)) for job in submission.jobs}
        self._told: dict[str, str] = {}  # job -> the reason for its waiting that was shown last
        self._ended_at: dict[str, float] = {}  # job -> when Slurm said first that it is over
        self._over: dict[str, TrtspecError | None] = {}  # job -> its error
        self._outcomes: dict[str, Outcome] = {outcome.name: outcome for outcome in map(outcome_of, submission.before)}

    @property
    def is_over(self) -> bool:
        """Whether every job is."""
        return len(self._over) == len(self.submission.jobs)

    def listen(self, states: Mapping[str, JobState]) -> None:
        """Show what is new; `states` of jobs by id."""
        for job in self.submission.jobs:
            if job.name in self._over:
                continue
            state = states.get(job.id, JobState("PENDING"))
            listener = self._listeners[job.name]
            listener.listen(self._observer)
            if listener.has_ended and listener.error != INTERRUPTED:
                self._end(job, TrtspecError(listener.error) if listener.error else None)
            elif state.is_active:
                self._ended_at.pop(job.name, None)
                if state.is_waiting:
                    self._tell_reason(job, state.reason)
            elif job.id in states:
                self._ended(job, state)

    def report(self) -> Report:
        """What has become of every step."""
        errors = [error for error in self._over.values() if error is not None]
        names = [*(content["name"] for content in self.submission.before), *self.submission.steps]
        return Report([self._outcomes[name] for name in names], errors[0] if errors else None)

    def _ended(self, job: Job, state: JobState) -> None:
        """Slurm says that the job is over, and it has told no result."""
        listener = self._listeners[job.name]
        if not listener.running and not listener.outcomes:  # Slurm ends what waits for a failed job
            if any(self._failed(need) for need in job.needs):
                self._end(job, None)
                return
            if any(need not in self._over for need in job.needs):
                return
        began = self._ended_at.setdefault(job.name, time.monotonic())
        lagging = state.state in ("COMPLETED", "FAILED", "") and time.monotonic() - began < _LAG_S
        if not lagging:
            self._end(job, slurm.ending(f"job {job.id} ({job.name})", state, Path(job.log), _AGAIN))

    def _failed(self, name: str) -> bool:
        """Whether not every step of a job that is over was good."""
        steps = next(job.steps for job in self.submission.jobs if job.name == name)
        return name in self._over and any(self._outcomes[step].status in (FAILED, SKIPPED) for step in steps)

    def _end(self, job: Job, error: TrtspecError | None) -> None:
        """Take down the outcome of every step of a job that is over."""
        self._over[job.name] = error
        listener = self._listeners[job.name]
        waiting = error
        for step in job.steps:
            outcome = listener.outcomes.get(step)
            if outcome is None and waiting is not None:  # this one was running when the job was ended
                outcome, waiting = Outcome(step, FAILED, str(waiting)), None
                self._observer.finished(outcome)
            self._outcomes[step] = outcome or Outcome(step, SKIPPED, "an earlier step failed")

    def _tell_reason(self, job: Job, reason: str) -> None:
        if not slurm.is_telling(reason) or reason == self._told.get(job.name):
            return
        self._told[job.name] = reason
        self._observer.note(job.name, slurm.waiting(job.id, reason, self._partition))


def _follow(followed: Mapping[int, _Followed]) -> Iterator[tuple[int, Report]]:
    """Follow builds until all are over; each is given out with its report when it is.

    Raises:
        SlurmError: Slurm does not answer, now or for several minutes.
    """
    left = dict(followed)
    states: dict[str, JobState] = {}
    answered_at: float | None = None
    asked_at = float("-inf")
    while left:
        now = time.monotonic()
        if now - asked_at >= _ASK_S:
            asked_at = now
            try:
                states = slurm.states([job for each in left.values() for job in each.submission.ids])
                answered_at = now
            except SlurmError:
                if answered_at is None or now - answered_at > _SILENCE_S:
                    raise
        for number, each in list(left.items()):
            each.listen(states)
            if each.is_over:
                del left[number]
                jobs.collect(each.submission.engines_dir)
                jobs.forget(each.submission.engines_dir)
                yield number, each.report()
        if left:
            time.sleep(_LISTEN_S)
