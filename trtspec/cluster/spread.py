"""One command over an array of jobs, a shard each, and a last job that puts together what they have left.

The last job runs when all tasks have ended, whatever became of them: it does by itself what is missing. So a task that
was killed costs time and nothing else. Knows command lines; not what they measure or how it is put together.

Everything is kept in one directory, which all nodes see: scripts, logs, and `jobs.json`, by which the same command
follows the jobs again. What the last job prints goes to `out`, its exit code to `code` when it has ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trtspec.build.fingerprint import digest
from trtspec.build.graph import FAILED, OK, Observer, Outcome
from trtspec.build.lock import output_lock
from trtspec.build.output import explained, write_atomic
from trtspec.cluster import sbatch, slurm
from trtspec.cluster.slurm import JobState, Options, SlurmError
from trtspec.errors import EXIT_OK, EXIT_PARITY_FAILED, TrtspecError

MERGE = "merge"
_ASK_S = 2.0  # between two questions to Slurm
_LOOK_S = 0.2  # between two looks for a result that is late
_LAG_S = 20.0  # that the result may take to appear here
_SILENCE_S = 300.0  # that Slurm may not answer while jobs are followed
_JOBS, _OUT, _LOG, _CODE, _MADE_OF = "jobs.json", "out", "merge.log", "code", "made_of"


@dataclass(frozen=True)
class Spread:
    """What is run.

    Attributes:
        shards: the words of each task's command.
        merge: those of the last job's.
        directory: for scripts, logs and results.
        name: of the jobs.
        gpus: generic resources that each job asks for, such as `gpu:h100:1`; empty for none.
        made_of: digest of all that the shards depend on, where the directory is trtspec's own: what a run of something
            else has left in it is removed.
    """

    shards: Sequence[Sequence[str]]
    merge: Sequence[str]
    directory: Path
    name: str
    gpus: str = ""
    made_of: str = ""


@dataclass(frozen=True)
class _Jobs:
    """What was submitted: digest of the commands, the array and its size, and the last job."""

    commands: str
    array: str
    size: int
    merge: str

    @property
    def names(self) -> dict[str, str]:
        """What each job is called, by its id."""
        tasks = {f"{self.array}_{task}": f"shard {task + 1}/{self.size}" for task in range(self.size)}
        return {**tasks, self.merge: MERGE}


def run(spread: Spread, options: Options, observer: Observer, say: Callable[[str], None]) -> tuple[int, str]:
    """Submit, or follow what an earlier call has submitted, until the last job has ended.

    Returns:
        The exit code of the last command, and what it printed.

    Raises:
        TrtspecError: Slurm refuses, jobs of another command are under way here, or the last job has no result.
        KeyboardInterrupt: the jobs go on.
    """
    directory, commands = spread.directory, digest([spread.made_of, list(map(list, spread.shards)), list(spread.merge)])
    with explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with output_lock(directory / ".lock", directory):
            found = _read(directory)
            if found is not None and found.commands != commands:
                if active := _active(found):
                    raise TrtspecError(
                        f"jobs {', '.join(active)} of another command work here",
                        where=str(directory),
                        fix="say what it said to follow them, or end them with --cancel",
                    )
                found = None
            if found is None:
                _clear(spread, say)
                found = _submit(spread, commands, options)
                ids = f"job {found.array}, an array of {found.size}, then job {found.merge}"
                say(f"submitted {ids}, which puts the shards together")
            else:
                say(f"following jobs {found.array} and {found.merge}")
    try:
        state, seconds = _follow(found, observer, directory, options.partition)
    except KeyboardInterrupt:
        say(
            f"jobs {found.array} and {found.merge} go on; the same command follows them again, and with --cancel ends "
            "them"
        )
        raise
    try:
        result = _result(found, state, directory)
    except TrtspecError as error:
        observer.finished(Outcome(MERGE, FAILED, str(error), seconds))
        raise
    observer.finished(Outcome(MERGE, OK, "", seconds))
    return result


def cancel(directory: Path, say: Callable[[str], None]) -> None:
    """End the jobs; what they have recorded is kept.

    Raises:
        TrtspecError: Slurm refuses, or jobs have not ended after two minutes.
    """
    found = _read(directory)
    active = _active(found) if found else []
    slurm.end(active)
    (directory / _JOBS).unlink(missing_ok=True)
    say(f"cancelled jobs {', '.join(active)}; what is recorded is kept" if active else "no jobs to cancel")


def _clear(spread: Spread, say: Callable[[str], None]) -> None:
    """Remove what was recorded of something else."""
    mark = spread.directory / _MADE_OF
    if spread.made_of and (mark.read_text() if mark.exists() else "") != spread.made_of:
        old = [path for pattern in ("*.jsonl", "*.jsonl.*") for path in spread.directory.glob(pattern)]
        for path in old:
            path.unlink()
        if old:
            say(f"removed {len(old)} shards of other prompts or another spec from {spread.directory}")
        write_atomic(mark, spread.made_of)


def _submit(spread: Spread, commands: str, options: Options) -> _Jobs:
    slurm.check(options)
    directory, name = spread.directory, f"trtspec-{spread.name}"
    (directory / _CODE).unlink(missing_ok=True)
    write_atomic(directory / "shards.sh", sbatch.script(f"shards of {spread.name}", spread.shards))
    merge = sbatch.telling_script(f"merge of {spread.name}", spread.merge, directory / _OUT, directory / _CODE)
    write_atomic(directory / "merge.sh", merge)
    place = str(directory).replace("%", "%%")
    words = ["--nodes=1", "--ntasks=1", "--no-requeue"]
    if spread.gpus and not {"gres", "gpus", "gpus-per-node"} & set(options.more):
        words.append(f"--gres={spread.gpus}")
    words += options.words()
    tasks = [f"--job-name={name}", f"--array=0-{len(spread.shards) - 1}", f"--output={place}/shard.%a.log"]
    array = str(slurm.submit(directory / "shards.sh", [*words, *tasks]))
    submitted = [array]
    try:
        last = [f"--job-name={name}-merge", f"--output={place}/{_LOG}", f"--dependency=afterany:{array}"]
        submitted.append(str(slurm.submit(directory / "merge.sh", [*words, *last])))
        found = _Jobs(commands, array, len(spread.shards), submitted[-1])
        write_atomic(directory / _JOBS, json.dumps(asdict(found), indent=1) + "\n")
    except BaseException:
        slurm.cancel(submitted)
        raise
    return found


def _read(directory: Path) -> _Jobs | None:
    path = directory / _JOBS
    try:
        return _Jobs(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise TrtspecError(
            "not the list of jobs that is kept here",
            where=str(path),
            fix="cancel the jobs, if there are any (squeue, scancel), and remove the file",
        ) from None


def _active(found: _Jobs) -> list[str]:
    return [job for job, state in slurm.states(list(found.names)).items() if state.is_active]


def _follow(found: _Jobs, observer: Observer, directory: Path, partition: str | None) -> tuple[JobState, float]:
    """Wait until all jobs have ended, and show each as a step; returns how the last one ended, and its seconds."""
    begun: dict[str, float] = {}
    ended: dict[str, tuple[JobState, float]] = {}
    told = ""
    answered_at: float | None = None
    while len(ended) < len(found.names):
        try:
            states = slurm.states(list(found.names))
            answered_at = time.monotonic()
        except SlurmError:
            if answered_at is None or time.monotonic() - answered_at > _SILENCE_S:
                raise
            time.sleep(_ASK_S)
            continue
        for job, name in found.names.items():
            state = states[job]
            if job in ended:
                continue
            if job not in begun and not state.is_waiting:
                begun[job] = time.monotonic()
                observer.started(name, f"job {job}")
            if not state.is_active:
                ended[job] = state, time.monotonic() - begun[job]
                if job != found.merge:
                    outcome = _outcome(job, name, *ended[job], directory)
                    if outcome.status == FAILED:
                        observer.note(name, outcome.reason)
                    observer.finished(outcome)
        waiting = (job for job, state in states.items() if state.is_waiting and slurm.is_telling(state.reason))
        if (first := next(waiting, None)) and states[first].reason != told:
            told = states[first].reason
            observer.note(found.names[first], slurm.waiting(first, told, partition))
        if len(ended) < len(found.names):
            time.sleep(_ASK_S)
    return ended[found.merge]


def _outcome(job: str, name: str, state: JobState, seconds: float, directory: Path) -> Outcome:
    if state.state in ("COMPLETED", ""):
        return Outcome(name, OK, "", seconds)
    log = directory / f"shard.{job.partition('_')[2]}.log"
    why = slurm.ending(f"job {job}", state, log, "the merge does what is missing")
    return Outcome(name, FAILED, str(why), seconds)


def _result(found: _Jobs, state: JobState, directory: Path) -> tuple[int, str]:
    """What the last job said, once it is here."""
    log = directory / _LOG
    deadline = time.monotonic() + _LAG_S
    while not (directory / _CODE).exists():
        if state.state not in ("COMPLETED", "FAILED", "") or time.monotonic() > deadline:
            (directory / _JOBS).unlink(missing_ok=True)
            again = "run this again, what is finished is kept"
            raise slurm.ending(f"job {found.merge} ({MERGE})", state, log, again)
        time.sleep(_LOOK_S)
    code = int((directory / _CODE).read_text())
    (directory / _JOBS).unlink(missing_ok=True)
    if code not in (EXIT_OK, EXIT_PARITY_FAILED):
        problem = slurm.last_line(log).removeprefix("error: ")
        raise TrtspecError(problem, fix=f"the whole log is {log}; what is finished is kept")
    return code, (directory / _OUT).read_text(encoding="utf-8", errors="replace")
