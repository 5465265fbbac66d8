"""What a build shows while it runs."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from trtspec.build.graph import CACHED, FAILED, OK, Observer, Outcome
from trtspec.build.progress import Bars, Lines


def show(observer: Observer) -> None:
    observer.finished(Outcome("resolve", CACHED, "unchanged"))
    observer.started("engine:target", "changed: limits")
    for hundredths in range(0, 101):
        observer.advance("engine:target", hundredths / 100)
    observer.note("engine:target", "the draft [is] short")
    observer.finished(Outcome("engine:target", OK, "changed: limits", 12.34, output=Path("x")))
    observer.started("repository", "not built yet")
    observer.finished(Outcome("repository", FAILED, "no space", 0.5))


def test_lines_say_little_and_not_too_often() -> None:
    shown: list[str] = []
    now = iter(range(1000))  # a second a call: 101 fractions take 101 seconds
    show(Lines(shown.append, clock=lambda: float(next(now))))
    assert shown[:2] == ["resolve: cached", "engine:target: changed: limits"]
    assert shown[-4:] == [
        "engine:target: note: the draft [is] short",
        "engine:target: ok in 12.3 s",
        "repository: not built yet",
        "repository: failed in 0.5 s",
    ]
    percentages = [line for line in shown if line.endswith("%")]
    assert 5 <= len(percentages) <= 10 and all(line.startswith("engine:target: ") for line in percentages)


def test_bars_end_with_the_same_lines() -> None:
    terminal = io.StringIO()
    with Progress(console=Console(file=terminal, force_terminal=True, width=200), transient=True) as progress:
        show(Bars(progress))
        assert progress.task_ids == []
    for line in (
        "resolve: cached",
        "engine:target: note: the draft [is] short",
        "engine:target: ok in 12.3 s",
        "repository: failed in 0.5 s",
    ):
        assert line in terminal.getvalue()


def side_by_side(observer: Observer) -> None:
    observer.started("engine:target", "not built yet")
    observer.started("engine:draft", "not built yet")
    for hundredths in range(0, 101):
        observer.advance("engine:target", hundredths / 200)
        observer.advance("engine:draft", 0.25)
    observer.note("engine:draft", "small")
    observer.finished(Outcome("engine:draft", OK, "not built yet", 3.0))
    observer.advance("engine:target", 0.75)
    observer.finished(Outcome("engine:target", OK, "not built yet", 5.0))


def test_lines_of_steps_that_run_side_by_side_name_the_step() -> None:
    shown: list[str] = []
    now = iter(range(1000))
    side_by_side(Lines(shown.append, clock=lambda: float(next(now))))
    assert [line for line in shown if line.startswith("engine:draft")] == [
        "engine:draft: not built yet",
        "engine:draft: 25%",  # said once, although it is heard of all the time
        "engine:draft: note: small",
        "engine:draft: ok in 3.0 s",
    ]
    assert sum(line.startswith("engine:target") and line.endswith("%") for line in shown) > 4


def test_each_running_step_has_a_bar_until_it_ends() -> None:
    terminal = io.StringIO()
    with Progress(console=Console(file=terminal, force_terminal=True, width=200), transient=True) as progress:
        bars = Bars(progress)
        bars.started("engine:target", "not built yet")
        bars.started("engine:draft", "not built yet")
        bars.advance("engine:draft", 0.5)
        assert [(task.description, task.completed) for task in progress.tasks] == [
            ("engine:target (not built yet)", 0),
            ("engine:draft (not built yet)", 0.5),
        ]
        bars.finished(Outcome("engine:target", OK, "not built yet", 1.0))
        assert [task.description for task in progress.tasks] == ["engine:draft (not built yet)"]
