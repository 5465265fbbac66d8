"""The jobs of a build: one for each stage of each engine, one for what comes after all engines.

A submission is kept under the engines directory, in `.build/slurm/`: `submission.json` (the jobs and their ids), and
for each job a folder with its script, log, events and the records of the steps it has run. Knows the step graph; not
how jobs are submitted or watched.

Jobs of one submission may run on several nodes at once and need no lock that reaches over nodes: each writes the
outputs of its own steps and its own folder, what depends on another job waits for it (Slurm's dependencies), and the
records are put together (`collect`) by one process when the jobs are over. Other builds are kept away by
`submission.json`, which is made with O_EXCL.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtspec.build.graph import Graph, Step
from trtspec.build.lock import output_lock
from trtspec.build.output import write_atomic
from trtspec.build.state import BuildState, StepRecord
from trtspec.cluster import slurm
from trtspec.errors import TrtspecError

FINISH = "finish"  # the job of what comes after all engines
_VERSION = 1


@dataclass(frozen=True)
class Job:
    """One job of a build.

    Attributes:
        name: of its step, or `FINISH`.
        steps: names of the steps it runs, in order.
        needs: names of the jobs that must have succeeded before.
        gpus: GPUs that it occupies.
        id: Slurm's; empty until it is submitted.
        log: file that Slurm writes what it prints to.
    """

    name: str
    steps: tuple[str, ...]
    needs: tuple[str, ...] = ()
    gpus: int = 0
    id: str = ""
    log: str = ""


@dataclass(frozen=True)
class Submission:
    """One build that was submitted.

    Attributes:
        engines_dir: of the spec.
        token: tells its jobs from those of an earlier submission.
        config, overrides, spec_hash: the spec as it was then.
        compile, force: options of the build.
        before: outcomes (`events.outcome_fields`) of the steps that ran, or were up to date, before any job.
        jobs: in the order of their needs.
    """

    engines_dir: Path
    token: str
    config: str
    overrides: tuple[str, ...]
    spec_hash: str
    compile: bool
    force: bool
    before: tuple[dict[str, Any], ...]
    jobs: tuple[Job, ...]

    @property
    def ids(self) -> list[str]:
        """Of the jobs that have been submitted."""
        return [job.id for job in self.jobs if job.id]

    @property
    def steps(self) -> list[str]:
        """Names of all steps that jobs run."""
        return [name for job in self.jobs for name in job.steps]

    def claim(self) -> None:
        """Write the file, which must not be there; the folders of an earlier submission go.

        Raises:
            TrtspecError: another submission has come first.
        """
        directory = place(self.engines_dir)
        directory.mkdir(parents=True, exist_ok=True)
        for entry in directory.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
        for job in self.jobs:
            folder(self.engines_dir, job.name).mkdir()
        try:
            with open(_file(self.engines_dir), "x", encoding="utf-8") as file:  # one writer, on network files too
                file.write(self._text())
        except FileExistsError:
            raise TrtspecError(
                "another build is being submitted here", where=str(self.engines_dir), fix="run this again to follow it"
            ) from None

    def save(self) -> None:
        """Replace the file."""
        write_atomic(_file(self.engines_dir), self._text())

    def numbered(self, job: str, job_id: str, log: str) -> Submission:
        """The same, with the id that Slurm gave to a job, and its log."""
        known = (replace(each, id=job_id, log=log) if each.name == job else each for each in self.jobs)
        return replace(self, jobs=tuple(known))

    def _text(self) -> str:
        return json.dumps({"version": _VERSION, **asdict(self), "engines_dir": str(self.engines_dir)}, indent=1) + "\n"


def read(engines_dir: Path) -> Submission | None:
    """The submission under an engines directory; None: there is none.

    Raises:
        TrtspecError: a file that is damaged or of another version.
    """
    path = _file(engines_dir)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("version") != _VERSION:
            raise ValueError("version")
        jobs = tuple(
            Job(**job | {"steps": tuple(job["steps"]), "needs": tuple(job["needs"])}) for job in content.pop("jobs")
        )
        tuples = {name: tuple(content.pop(name)) for name in ("overrides", "before")}
        return Submission(**content | tuples | {"jobs": jobs, "engines_dir": engines_dir})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise TrtspecError(
            "not the list of jobs that a build on Slurm keeps",
            where=str(path),
            fix="cancel the jobs of this build, if there are any (squeue, scancel), and remove the file",
        ) from None


def forget(engines_dir: Path) -> None:
    """Remove the submission, whose jobs are over; logs and scripts stay until the next."""
    _file(engines_dir).unlink(missing_ok=True)


def place(engines_dir: Path) -> Path:
    """Where the jobs of a build keep their files."""
    return engines_dir / ".build" / "slurm"


def folder(engines_dir: Path, job: str) -> Path:
    """Where one job keeps its files."""
    return place(engines_dir) / job.replace(":", "-")


def events_file(engines_dir: Path, job: str) -> Path:
    """What the job tells of its steps (`events`)."""
    return folder(engines_dir, job) / "events.jsonl"


def _file(engines_dir: Path) -> Path:
    return place(engines_dir) / "submission.json"


def is_stage(step: Step) -> bool:
    """Whether a step is a stage on the way to one engine, a job of its own."""
    return ":" in step.name


def split(graph: Graph) -> tuple[list[Step], list[Step], list[Step]]:
    """The steps that need no engine's stage, the stages, and the steps that need some; each in order."""
    before: list[Step] = []
    stages = [step for step in graph.steps if is_stage(step)]
    after: list[Step] = []
    behind = {step.name for step in stages}
    for step in graph.steps:
        if is_stage(step):
            continue
        if behind.isdisjoint(step.needs):
            before.append(step)
        else:
            after.append(step)
            behind.add(step.name)
    return before, stages, after


def jobs_of(graph: Graph, todo: set[str]) -> list[Job]:
    """The jobs that run the steps named in `todo`, in the order of their needs."""
    _, stages, after = split(graph)
    mine = [step for step in stages if step.name in todo]
    names = {step.name for step in mine}
    jobs = [Job(step.name, (step.name,), tuple(n for n in step.needs if n in names), step.gpus) for step in mine]
    if rest := tuple(step.name for step in after if step.name in todo):
        last = names - {need for job in jobs for need in job.needs}
        jobs.append(Job(FINISH, rest, tuple(job.name for job in jobs if job.name in last)))
    return jobs


def with_ancestors(graph: Graph, names: Sequence[str]) -> list[Step]:
    """The steps with these names and all that they need, in order."""
    wanted = set(names)
    for step in reversed(graph.steps):
        if step.name in wanted:
            wanted.update(step.needs)
    return [step for step in graph.steps if step.name in wanted]


def records_of(engines_dir: Path) -> dict[str, StepRecord]:
    """The records of all steps, those that jobs have made since they were collected last among them."""
    records = dict(BuildState(engines_dir / ".build" / "state.json").records)
    for state in _job_states(engines_dir):
        records |= state.records
    return records


def save_records(engines_dir: Path, job: str, records: Mapping[str, StepRecord]) -> None:
    """Keep the records of a job's own steps where `collect` finds them."""
    state = BuildState(folder(engines_dir, job) / "records.json")
    state.records = dict(records)
    state.save()


def collect(engines_dir: Path) -> None:
    """Put the records that jobs have made into the build's own state.

    Raises:
        TrtspecError: another build holds the engines directory.
    """
    states = _job_states(engines_dir)
    if not states:
        return
    with output_lock(engines_dir / ".build" / "lock", engines_dir):
        state = BuildState(engines_dir / ".build" / "state.json")
        for made in states:
            state.records |= made.records
        state.save()
        for made in states:
            made.path.unlink(missing_ok=True)


def _job_states(engines_dir: Path) -> list[BuildState]:
    return [BuildState(path) for path in sorted(place(engines_dir).glob("*/records.json"))]


def settle(engines_dir: Path) -> None:
    """Take over what the jobs of an earlier submission have finished, so that another build can begin.

    Raises:
        TrtspecError: its jobs still wait or run, or whether they do cannot be found out.
    """
    submission = read(engines_dir)
    if submission is not None:
        command = f"trtspec build {submission.config} --executor slurm"
        try:
            states = slurm.states(submission.ids)
        except slurm.SlurmError as error:
            raise TrtspecError(
                f"Slurm jobs {', '.join(submission.ids)} may be building here ({error})",
                where=str(engines_dir),
                fix=f"run this where Slurm is; or, when they are over, remove {_file(engines_dir)}",
            ) from error
        if active := [job for job, state in states.items() if state.is_active]:
            raise TrtspecError(
                f"Slurm jobs {', '.join(active)} are building here",
                where=str(engines_dir),
                fix=f"follow them: {command}; or end them: {command} --cancel",
            )
        collect(engines_dir)
        forget(engines_dir)
    else:
        collect(engines_dir)


def touch_locks(engines_dir: Path, steps: Sequence[Step]) -> None:
    """Say of outputs under a directory of ours that they are ours: the graph looks for a lock file beside each."""
    for lock in _locks(engines_dir, steps):
        lock.touch()


def remove_locks(engines_dir: Path, steps: Sequence[Step]) -> None:
    """Remove the lock files that only jobs need, once the last of them is all that is left."""
    for lock in _locks(engines_dir, steps):
        lock.unlink(missing_ok=True)


def _locks(engines_dir: Path, steps: Sequence[Step]) -> list[Path]:
    outputs = [step.output for step in steps if step.output and step.output.exists()]
    return [path.with_name(f".{path.name}.lock") for path in outputs if path.is_relative_to(engines_dir)]
