"""Slurm's programs: submitting, asking how jobs are, cancelling, and what the nodes offer.

Every call is an argument list with a deadline. Knows job ids and Slurm's words for states; not what a job does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtspec.errors import TrtspecError

_DEADLINE_S = 60.0
_ENDING_S = 120.0  # that cancelled jobs may take to end
_LOOK_S = 0.5  # between two looks whether they have
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_ACTIVE = {*_WAITING, "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT", "COMPLETING"}
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|infinite|unlimited", re.IGNORECASE)


class SlurmError(TrtspecError):
    """Slurm refused, or does not answer."""


@dataclass(frozen=True)
class JobState:
    """How one job is.

    Attributes:
        state: Slurm's word, such as PENDING; empty where Slurm has forgotten the job.
        reason: why it waits, in Slurm's words; empty where there is none.
        time_limit: as Slurm writes it.
    """

    state: str = ""
    reason: str = ""
    time_limit: str = ""

    @property
    def is_active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in _ACTIVE

    @property
    def is_waiting(self) -> bool:
        """Whether it has not begun."""
        return self.state in _WAITING


@dataclass(frozen=True)
class Options:
    """What the user says about jobs.

    Attributes:
        partition, account, time: options of sbatch with these names; None leaves them to Slurm.
        more: further long options of sbatch without the dashes, such as `mem` -> `64G`; "" is an option without a
            value.
    """

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    more: Mapping[str, str] = field(default_factory=dict)

    def words(self) -> list[str]:
        """Arguments for sbatch."""
        named = {"partition": self.partition, "account": self.account, "time": self.time}
        given = {name: value for name, value in named.items() if value is not None} | dict(self.more)
        return [f"--{name}={value}" if value else f"--{name}" for name, value in given.items()]


# What trtspec sets itself, or what would change how a job is run.
_OURS = {"array", "dependency", "job-name", "output", "error", "parsable", "no-requeue", "requeue", "wrap", "wait"}
_OURS |= {"kill-on-invalid-dep", "chdir", "nodes", "ntasks", "test-only", "help", "usage", "version"}


def parse_options(texts: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE` or `KEY` of each text, as `Options.more` has them.

    Raises:
        TrtspecError: no name of an option, or one that trtspec sets itself.
    """
    found = {}
    for text in texts:
        name, _, value = text.lstrip("-").partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise TrtspecError(
                f"{name!r} is no option of sbatch", where=f"--slurm-option {text}", expected="such as mem=64G"
            )
        if name in _OURS:
            raise TrtspecError("trtspec sets this option itself", where=f"--slurm-option {text}", fix="leave it out")
        found[name] = value
    return found


def check(options: Options) -> None:
    """Refuse what Slurm would refuse, with the words for it.

    Raises:
        TrtspecError: Slurm's programs are not here, Slurm does not answer, or no such partition or time.
    """
    if shutil.which("sbatch") is None:
        raise TrtspecError(
            "Slurm's sbatch is not on the PATH", where="--executor slurm", fix="run this on a login node of the cluster"
        )
    if options.time is not None and not _TIME.fullmatch(options.time):
        raise TrtspecError("no time limit", where=f"--time {options.time}", expected="minutes, HH:MM:SS or D-HH:MM:SS")
    known = {line.rstrip("*") for line in _ask(["sinfo", "--noheader", "--format=%P"]).split()}
    for name in (options.partition or "").split(","):
        if name and name not in known:
            raise TrtspecError(
                f"Slurm has no partition {name!r}",
                where="--partition",
                expected=f"one of {', '.join(sorted(known))}",
            )


def gpu_request(gpu: str, num: int, partition: str | None) -> str:
    """The generic resource that asks for `num` GPUs of the spec's type on one node, such as `gpu:h100:2`.

    A node whose GPUs have no type is taken as it is; the build itself looks at the GPU.

    Args:
        gpu: name in the catalogue of GPUs, such as `H100-SXM`.
        num: GPUs of one node.
        partition: where they must be; None: anywhere.

    Raises:
        TrtspecError: no node has them; names what there is.
    """
    where = [] if partition is None else [f"--partition={partition}"]
    text = _ask(["sinfo", "--noheader", "--format=%G", *where])
    there = {(match[1] or "", int(match[2])) for match in re.finditer(r"\bgpu:(?:([^:,()\s]+):)?(\d+)", text)}
    family, size = gpu.split("-")[0].lower(), re.search(r"\d+GB", gpu)
    for kind, count in sorted(there, reverse=True):
        named = re.search(r"\d+gb", kind.lower())
        fits = re.search(rf"(?<![a-z0-9]){family}(?![0-9])", kind.lower()) and not (
            size and named and size[0].lower() != named[0]
        )
        if count >= num and (fits or not kind):
            return f"gpu:{kind}:{num}" if kind else f"gpu:{num}"
    has = ", ".join(sorted(f"gpu:{kind}:{count}" if kind else f"gpu:{count}" for kind, count in there))
    raise TrtspecError(
        f"no node{f' of partition {partition}' if partition else ''} has {num} {gpu} GPU{'s' if num > 1 else ''}",
        where="hardware.gpu",
        expected=f"one of {has}" if has else "a cluster with GPUs (sinfo shows none)",
        fix="choose another --partition, or say what they are called: --slurm-option gres=gpu:TYPE:COUNT",
    )


def submit(script: Path, words: Sequence[str]) -> int:
    """Submit a script with these arguments of sbatch; returns the job's id.

    Raises:
        SlurmError: Slurm's reason.
    """
    return int(_ask(["sbatch", "--parsable", *words, str(script)]).split(";")[0])


def states(ids: Collection[str]) -> dict[str, JobState]:
    """How jobs are, by id (`12`, or `12_0` for one of an array); those that Slurm has forgotten have no state.

    Raises:
        SlurmError: Slurm does not answer.
    """
    if not ids:
        return {}
    known = _by_squeue(ids)
    if missing := [each for each in ids if each not in known]:
        known |= _by_sacct(missing)
    return {each: known.get(each, JobState()) for each in ids}


def cancel(ids: Sequence[str]) -> None:
    """Cancel jobs; those that have ended do not matter.

    Raises:
        SlurmError: Slurm's reason, such as another user's job.
    """
    _ask(["scancel", *ids])


def end(ids: Sequence[str]) -> None:
    """Cancel jobs, and wait until they have ended.

    Raises:
        TrtspecError: Slurm refuses, or they have not ended after two minutes.
    """
    if not ids:
        return
    cancel(ids)
    deadline = time.monotonic() + _ENDING_S
    while left := [job for job, state in states(ids).items() if state.is_active]:
        if time.monotonic() > deadline:
            raise TrtspecError(
                f"jobs {', '.join(left)} have not ended after {_ENDING_S:.0f} s", fix="look at them with squeue"
            )
        time.sleep(_LOOK_S)


def is_telling(reason: str) -> bool:
    """Whether a reason for waiting says more than that others are first."""
    return reason not in ("", "None", "Dependency", "Priority")


def waiting(job: str, reason: str, partition: str | None) -> str:
    """Why a job waits, with what is wrong with the nodes of its partition."""
    nodes = drained_because(partition) if "Node" in reason else ""
    return f"job {job} waits: {reason}" + (f" ({nodes})" if nodes else "")


def ending(who: str, state: JobState, log: Path, again: str) -> TrtspecError:
    """Why a job ended without a result.

    Args:
        who: the job.
        state: how it ended.
        log: what it printed.
        again: what to do.
    """
    if state.state == "TIMEOUT":
        return TrtspecError(
            f"{who} was ended by its time limit of {state.time_limit}", fix=f"{again}; give it more with --time"
        )
    if state.state == "CANCELLED":
        return TrtspecError(f"{who} was cancelled", fix=again)
    if state.state == "OUT_OF_MEMORY":
        return TrtspecError(f"{who} ran out of memory", fix=f"{again}; give it more with --slurm-option mem=SIZE")
    if state.state in ("NODE_FAIL", "BOOT_FAIL"):
        return TrtspecError(f"the node of {who} failed", fix=again)
    if state.state in ("PREEMPTED", "DEADLINE", "REVOKED"):
        return TrtspecError(f"{who} was ended by Slurm ({state.state})", fix=again)
    how = f"ended ({state.state})" if state.state else "has ended, and Slurm has forgotten how,"
    return TrtspecError(f"{who} {how} without a result: {last_line(log)}", where=str(log), fix=again)


def last_line(log: Path) -> str:
    """The last line of what a job printed, or that there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "it has left no log"
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")


def drained_because(partition: str | None = None) -> str:
    """Why nodes are down or drained, in their administrators' words; empty where none is."""
    where = [] if partition is None else [f"--partition={partition}"]
    try:
        lines = _ask(["sinfo", "--noheader", "--list-reasons", "--format=%N: %E", *where]).splitlines()
    except SlurmError:
        return ""
    return ", ".join(dict.fromkeys(line.strip() for line in lines if line.strip()))


def _by_squeue(ids: Collection[str]) -> dict[str, JobState]:
    jobs = ",".join(sorted({each.partition("_")[0] for each in ids}))
    try:
        text = _ask(["squeue", "--noheader", "--array", "--states=all", f"--jobs={jobs}", "--format=%i|%T|%l|%r"])
    except SlurmError as error:
        if "Invalid job id" in error.problem:
            return {}
        raise
    rows = (line.split("|", 3) for line in text.splitlines())
    return {
        job: JobState(state, "" if reason == "None" else reason, limit)
        for job, state, limit, reason in (row for row in rows if len(row) == 4)
    }


def _by_sacct(ids: Collection[str]) -> dict[str, JobState]:
    """What the accounting knows, on clusters that have one."""
    try:
        which = ["--allocations", f"--jobs={','.join(ids)}"]
        text = _ask(["sacct", "--noheader", "--parsable2", *which, "--format=JobID,State,Timelimit"])
    except SlurmError:
        return {}
    rows = (line.split("|") for line in text.splitlines())
    return {row[0]: JobState(row[1].split()[0], "", row[2]) for row in rows if len(row) == 3 and row[1]}


def _ask(command: Sequence[str]) -> str:
    """What a program prints.

    Raises:
        SlurmError: it is not here, fails, or takes longer than a minute.
    """
    program = command[0]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_DEADLINE_S,
        )
    except FileNotFoundError:
        raise SlurmError(
            f"Slurm's {program} is not on the PATH", fix="run this on a login node of the cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{program} has not answered in {_DEADLINE_S:.0f} s", fix="run this again later") from None
    except OSError as error:
        raise SlurmError(f"{program} cannot be run: {error.strerror}") from None
    if done.returncode:
        said = [line.removeprefix(f"{program}: ").removeprefix("error: ") for line in done.stderr.splitlines()]
        raise SlurmError("; ".join(line.strip() for line in said if line.strip()) or "failed", where=program)
    return done.stdout
