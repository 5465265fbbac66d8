"""Spreading one command over an array of jobs, and a last job that puts together what they have left.

A part is `i/n`: everything that has a number, such as prompts, is dealt out in turn. Knows command lines; not what they
measure or how it is put together.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trtspec.build.output import explained, write_atomic
from trtspec.cluster import sbatch, slurm
from trtspec.cluster.slurm import JobState, Options, SlurmError
from trtspec.errors import EXIT_ERROR, TrtspecError

_ASK_S = 2.0
_LOOK_S = 0.2
_LAG_S = 20.0  # that the last file may take to appear here
_SILENCE_S = 300.0
_LOG, _CODE = "merge.log", "merge.code"
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """One of `of` parts, by its `number` from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """The part that `i/n` says.

        Raises:
            TrtspecError: it says none.
        """
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise TrtspecError("no part", where=f"--shard {text}", expected="I/N, such as 2/8, with I from 1 to N")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def mine(self, items: Sequence[T]) -> list[T]:
        """Every `of`-th of the items, beginning with its own number."""
        return list(items[self.number - 1 :: self.of])


def spread(
    parts: Sequence[Sequence[str]],
    last: Sequence[str],
    directory: Path,
    name: str,
    options: Options,
    say: Callable[[str], None],
) -> int:
    """Run commands as tasks of an array, and when all have ended a last one; wait, and show what that printed.

    The last job runs whatever became of the tasks: it refuses by itself what is missing, and names it.

    Args:
        parts: the words of each task's command.
        last: those of the last job.
        directory: for scripts and logs; all nodes see it. Made if it is not there.
        name: of the jobs.
        options: what the user says about jobs.
        say: shows a line.

    Returns:
        The exit code of the last command.

    Raises:
        TrtspecError: Slurm refuses, or ends the last job, or a task by its time limit.
        KeyboardInterrupt: the jobs go on.
    """
    slurm.check(options)
    directory = directory.resolve()
    with explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _CODE).unlink(missing_ok=True)
        write_atomic(directory / "parts.sh", sbatch.script(name, parts))
        write_atomic(directory / "merge.sh", sbatch.telling_script(name, last, directory / _CODE))
    place = str(directory).replace("%", "%%")
    words = ["--nodes=1", "--ntasks=1", "--no-requeue", *options.words()]
    tasks = [f"--array=0-{len(parts) - 1}", f"--output={place}/part.%a.log", f"--job-name={name}"]
    array = str(slurm.submit(directory / "parts.sh", [*words, *tasks]))
    try:
        merge = [f"--dependency=afterany:{array}", f"--output={place}/{_LOG}", f"--job-name={name}-merge"]
        final = str(slurm.submit(directory / "merge.sh", [*words, *merge]))
    except BaseException:
        slurm.cancel([array])
        raise
    say(f"job {array}, an array of {len(parts)}; then job {final}, which puts the parts together")
    ids = [*(f"{array}_{task}" for task in range(len(parts))), final]
    try:
        states = _wait(ids, say)
    except KeyboardInterrupt:
        say(
            f"jobs {array} and {final} go on, the result will be in {directory / _LOG}; "
            f"to end them: scancel {array} {final}"
        )
        raise
    return _result(states, final, directory, say)


def _wait(ids: Sequence[str], say: Callable[[str], None]) -> dict[str, JobState]:
    """Wait until all jobs have ended; says how many have, and why others wait."""
    said, reason = -1, ""
    answered_at = None
    while True:
        try:
            states = slurm.states(ids)
            answered_at = time.monotonic()
        except SlurmError:
            if answered_at is None or time.monotonic() - answered_at > _SILENCE_S:
                raise
            time.sleep(_ASK_S)
            continue
        active = [state for state in states.values() if state.is_active]
        if len(ids) - len(active) != said:
            said = len(ids) - len(active)
            say(f"{said} of {len(ids)} jobs have ended")
        waits = next((s.reason for s in active if s.is_waiting and s.reason not in ("", "Dependency", "Priority")), "")
        if waits and waits != reason:
            say(f"waiting: {waits}")
        reason = waits
        if not active:
            return states
        time.sleep(_ASK_S)


def _result(states: Mapping[str, JobState], final: str, directory: Path, say: Callable[[str], None]) -> int:
    """Show what the last job printed, once it is here; returns its exit code."""
    deadline = time.monotonic() + _LAG_S
    while not (directory / _CODE).exists():
        if states[final].state not in ("COMPLETED", "FAILED", "") or time.monotonic() > deadline:
            how = states[final].state or "Slurm has forgotten how"
            raise TrtspecError(
                f"job {final} ended ({how}) without a result",
                where=str(directory / _LOG),
                fix="run this again; what is finished is kept",
            )
        time.sleep(_LOOK_S)
    for line in (directory / _LOG).read_text(encoding="utf-8", errors="replace").splitlines():
        say(line)
    code = int((directory / _CODE).read_text())
    late = [job for job, state in states.items() if state.state == "TIMEOUT"]
    if late and code == EXIT_ERROR:
        raise TrtspecError(
            f"jobs {', '.join(late)} were ended by their time limit of {states[late[0]].time_limit}",
            fix="run this again with a longer --time; what is finished is kept",
        )
    return code
