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


def telling_script(title: str, command: Sequence[str], code: Path) -> str:
    """A script that runs a command, and writes its exit code to a file when it has ended."""
    return (
        f"#!/bin/bash\n# {' '.join(title.split())}\ncode=0\n{shlex.join(command)} || code=$?\n"
        f'echo "$code" >{shlex.quote(f"{code}.tmp")}\nmv {shlex.quote(f"{code}.tmp")} {shlex.quote(str(code))}\n'
        'exit "$code"\n'
    )


def python(module: str, *words: str) -> list[str]:
    """The command that runs a module of this installation."""
    return [sys.executable, "-m", module, *words]
