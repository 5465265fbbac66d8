"""A stand-in for sbatch, squeue, sacct, scancel and sinfo, for machines without Slurm.

It knows the options that trtspec uses and refuses all others, so that a wrong one fails a test; a test against the real
programs checks that they know them too. Jobs are run as processes of this machine, a few at a time, by whoever calls
squeue. Everything is kept in $SLURM_DOUBLE: `calls` (a line of JSON a call), `jobs.json`, and `knobs.json`, by which a
test makes it misbehave: `hold` (the reason why no job starts), `refuse` (what sbatch says from the given job on),
`ends_as` (states in place of the true ones, by the job's name), `forgets` (jobs that have ended), `mute` (no answer).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OPTIONS = {
    "sbatch": {
        *("parsable", "nodes", "ntasks", "no-requeue", "kill-on-invalid-dep", "job-name", "output", "array", "gres"),
        *("dependency", "partition", "account", "time", "mem", "exclusive", "gpus-per-task", "ntasks-per-node"),
    },
    "squeue": {"noheader", "array", "states", "jobs", "format"},
    "sacct": {"noheader", "parsable2", "allocations", "jobs", "format"},
    "scancel": set(),
    "sinfo": {"noheader", "format", "partition", "list-reasons"},
}
PARTITIONS = {"main": "gpu:h100:2(S:0-1)", "old": "gpu:4", "plain": "(null)"}
HOME = Path(os.environ.get("SLURM_DOUBLE", "."))


def refuse(text: str) -> int:
    print(text, file=sys.stderr)
    return 1


def main(program: str, words: list[str]) -> int:
    with (HOME / "calls").open("a") as calls:
        calls.write(json.dumps([program, *words]) + "\n")
    options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    others = [word for word in words if not word.startswith("--")]
    if unknown := options.keys() - OPTIONS[program]:
        return refuse(f"{program}: unrecognized option '--{min(unknown)}'")
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        knobs = _read("knobs.json")
        if knobs.get("mute"):
            return refuse(f"{program}: error: Unable to contact slurm controller (connect failure)")
        jobs = _read("jobs.json")
        code = {"sbatch": sbatch, "squeue": squeue, "scancel": scancel, "sinfo": sinfo, "sacct": sacct}[program](
            options, others, jobs, knobs
        )
        (HOME / "jobs.json").write_text(json.dumps(jobs))
    return code


def sbatch(options: dict[str, str], others: list[str], jobs: dict[str, Any], knobs: dict[str, Any]) -> int:
    number = 1 + max((int(name.split("_")[0]) for name in jobs), default=0)
    if "refuse" in knobs and number >= knobs["refuse"][0]:
        return refuse(f"sbatch: error: {knobs['refuse'][1]}")
    if options.get("partition", "main") not in PARTITIONS:
        return refuse("sbatch: error: invalid partition specified: " + options["partition"])
    kind, _, needs = options.get("dependency", "").partition(":")
    first, _, last = options.get("array", "").partition("-")
    for task in range(int(first), int(last) + 1) if first else (None,):
        name = str(number) if task is None else f"{number}_{task}"
        jobs[name] = {
            "name": options["job-name"],
            "script": others[0],
            "task": task,
            "log": re.sub("%%|%a", lambda match, task=task: "%" if match[0] == "%%" else str(task), options["output"]),
            "needs": [need for need in jobs if _is_needed(need, kind, needs.split(":"), task)],
            "whatever": kind == "afterany",
            "limit": options.get("time", "UNLIMITED"),
            "state": "PENDING",
            "reason": "None",
        }
    print(number)
    return 0


def _is_needed(job: str, kind: str, needs: list[str], task: int | None) -> bool:
    """Whether a job must have ended: one that is named, or of an array its task of the same number, or all of them."""
    if kind == "aftercorr":
        return job in [f"{need}_{task}" for need in needs]
    return job.split("_")[0] in needs


def schedule(jobs: dict[str, Any], knobs: dict[str, Any]) -> None:
    """Start what may start, and see what has ended."""
    for name, job in jobs.items():
        if job["state"] == "RUNNING" and (HOME / f"{name}.code").exists():
            job["state"] = "COMPLETED" if (HOME / f"{name}.code").read_text().strip() == "0" else "FAILED"
            job["state"] = knobs.get("ends_as", {}).get(job["name"], job["state"])
    for name, job in jobs.items():
        if job["state"] != "PENDING":
            continue
        before = [state["state"] for need, state in jobs.items() if need in job["needs"]]
        if job["whatever"]:
            before = [state if state in ("RUNNING", "PENDING") else "COMPLETED" for state in before]
        if any(state not in ("COMPLETED", "RUNNING", "PENDING") for state in before):
            job["state"], job["reason"] = "CANCELLED", "DependencyNeverSatisfied"
        elif any(state != "COMPLETED" for state in before):
            job["reason"] = "Dependency"
        elif knobs.get("hold"):
            job["reason"] = knobs["hold"]
        else:
            job["state"], job["reason"] = "RUNNING", "None"
            text = 'bash "$0" >"$1" 2>&1; echo $? >"$2.tmp"; mv "$2.tmp" "$2"'
            task = {} if job["task"] is None else {"SLURM_ARRAY_TASK_ID": str(job["task"])}
            process = subprocess.Popen(
                ["bash", "-c", text, job["script"], job["log"], str(HOME / f"{name}.code")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **task},
                start_new_session=True,
            )
            job["pid"] = process.pid


def squeue(options: dict[str, str], others: list[str], jobs: dict[str, Any], knobs: dict[str, Any]) -> int:
    schedule(jobs, knobs)
    assert options["format"] == "%i|%T|%l|%r" and "array" in options and options["states"] == "all"
    known = {name for name, job in jobs.items() if not knobs.get("forgets") or job["state"] in ("PENDING", "RUNNING")}
    asked = options["jobs"].split(",")
    if len(asked) == 1 and not any(name.split("_")[0] == asked[0] for name in known):
        return refuse("slurm_load_jobs error: Invalid job id specified")
    for name, job in jobs.items():
        if name in known and name.split("_")[0] in asked:
            print(name, job["state"], job["limit"], job["reason"], sep="|")
    return 0


def sacct(options: dict[str, str], others: list[str], jobs: dict[str, Any], knobs: dict[str, Any]) -> int:
    if not knobs.get("accounting"):
        return refuse("Slurm accounting storage is disabled")
    for name in options["jobs"].split(","):
        if name in jobs:
            state = jobs[name]["state"]
            print(name, "CANCELLED by 0" if state == "CANCELLED" else state, jobs[name]["limit"], sep="|")
    return 0


def scancel(options: dict[str, str], others: list[str], jobs: dict[str, Any], knobs: dict[str, Any]) -> int:
    for name, job in jobs.items():
        if (name in others or name.split("_")[0] in others) and job["state"] in ("PENDING", "RUNNING"):
            if job["state"] == "RUNNING":
                os.killpg(job["pid"], signal.SIGTERM)
                time.sleep(0.1)
            job["state"] = "CANCELLED"
    return 0


def sinfo(options: dict[str, str], others: list[str], jobs: dict[str, Any], knobs: dict[str, Any]) -> int:
    if "list-reasons" in options:
        print("node7: " + knobs["drained"] if "drained" in knobs else "", end="\n" if "drained" in knobs else "")
        return 0
    wanted = {"%P": [f"{name}{'*' if name == 'main' else ''}" for name in PARTITIONS], "%G": list(PARTITIONS.values())}
    if "partition" in options:
        wanted["%G"] = [PARTITIONS[options["partition"]]]
    print(*wanted[options["format"]], sep="\n")
    return 0


def _read(name: str) -> dict[str, Any]:
    path = HOME / name
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).name, sys.argv[2:]))
