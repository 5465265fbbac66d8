"""Showing a build while it runs: bars on a terminal, plain lines elsewhere.

Knows names, fractions and outcomes of steps, not what they do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from trtspec.build.graph import CACHED, Observer, Outcome

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_QUIET_SECONDS = 10.0  # plain lines: at most one a step in so many seconds


class Lines:
    """Plain lines, for files and pipes.

    Args:
        echo: prints one line.
        clock: seconds, monotonic.
    """

    def __init__(self, echo: Callable[[str], None] = click.echo, clock: Callable[[], float] = time.monotonic) -> None:
        self._echo = echo
        self._clock = clock
        self._last: dict[str, tuple[float, str]] = {}  # step -> when and what it was last heard of

    def started(self, name: str, reason: str) -> None:
        self._last[name] = self._clock(), ""
        self._echo(f"{name}: {reason}")

    def advance(self, name: str, fraction: float) -> None:
        last, said = self._last[name]
        text = f"{fraction:.0%}"
        if self._clock() - last >= _QUIET_SECONDS and text != said:
            self._last[name] = self._clock(), text
            self._echo(f"{name}: {text}")

    def note(self, name: str, text: str) -> None:
        self._echo(f"{name}: note: {text}")

    def finished(self, outcome: Outcome) -> None:
        self._echo(_ending(outcome))


class Bars:
    """One bar for each running step, and a line for each that has ended."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def started(self, name: str, reason: str) -> None:
        self._bars[name] = self._progress.add_task(f"{name} ({reason})", total=None)

    def advance(self, name: str, fraction: float) -> None:
        self._progress.update(self._bars[name], total=1.0, completed=fraction)

    def note(self, name: str, text: str) -> None:
        self._progress.console.print(f"{name}: note: {text}", markup=False, highlight=False)

    def finished(self, outcome: Outcome) -> None:
        if outcome.name in self._bars:
            self._progress.remove_task(self._bars.pop(outcome.name))
        self._progress.console.print(_ending(outcome), markup=False, highlight=False)


def _ending(outcome: Outcome) -> str:
    took = "" if outcome.status == CACHED else f" in {outcome.seconds:.1f} s"
    return f"{outcome.name}: {outcome.status}{took}"


@contextmanager
def observer(is_terminal: bool) -> Iterator[Observer]:
    """Bars where someone watches, lines otherwise, for the length of a `with` block."""
    if not is_terminal:
        yield Lines()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        yield Bars(progress)
