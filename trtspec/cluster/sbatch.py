"""The scripts that Slurm runs. Every word in them is quoted; knows nothing of how they are submitted."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path


def script(title: str, commands: Sequence[Sequence[str]]) -> str:
    """A script that runs one command, or as a task of an array the one with its number.

    Args:
        title: a comment.
        commands: the words of each.
    """
    head = f"#!/bin/bash\n# {' '.join(title.split())}\n"
    if len(commands) == 1:
        return f"{head}exec {shlex.join(commands[0])}\n"
    cases = "".join(f"{number}) exec {shlex.join(command)} ;;\n" for number, command in enumerate(commands))
    return f'{head}case "$SLURM_ARRAY_TASK_ID" in\n{cases}esac\n'


def telling_script(title: str, command: Sequence[str], out: Path, code: Path) -> str:
    """A script that runs a command, puts what it prints into a file, and its exit code into another when it has ended.

    Messages and errors are left to the job's log.
    """
    written = shlex.quote(f"{code}.tmp")
    return (
        f"#!/bin/bash\n# {' '.join(title.split())}\ncode=0\n"
        f"{shlex.join(command)} >{shlex.quote(str(out))} || code=$?\n"
        f'echo "$code" >{written}\nmv {written} {shlex.quote(str(code))}\n'
        'exit "$code"\n'
    )


def python(module: str, *words: str) -> list[str]:
    """The command that runs a module of this installation."""
    return [sys.executable, "-m", module, *words]
