"""`trtspec rollout`: a new build comes into a running server without a gap."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from trtspec.cli.common import config_argument, load, set_option
from trtspec.cli.parity import CHECKS

watch_option = click.option(
    "--watch",
    type=click.IntRange(0),
    default=8,
    show_default=True,
    help="Requests that a version must answer after the switch, else it is taken back.",
)
drain_option = click.option(
    "--drain-timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="S",
    help="Longest wait for requests of the version before, in seconds.",
)


@click.command()
@config_argument
@set_option
@click.option("--status", is_flag=True, help="Show the versions and what is under way, and end.")
@click.option("--prune", is_flag=True, help="Remove the versions that are neither served nor the one before, and end.")
@click.option(
    "--check",
    "checks",
    metavar="NAME",
    multiple=True,
    type=click.Choice(CHECKS),
    help=f"Judge the new version by this check alone (repeatable): {', '.join(CHECKS)} [default: all].",
)
@watch_option
@drain_option
def rollout(
    config: Path,
    overrides: tuple[str, ...],
    status: bool,
    prune: bool,
    checks: tuple[str, ...],
    watch: int,
    drain_timeout: float,
) -> None:
    """Bring what CONFIG describes now into the server that trtspec serve started for it, without a gap.

    What changed is built as the next version beside the one that serves, judged by trtspec parity on a server of its
    own, loaded beside the old one, and asked by clients from then on; requests in flight end on the old version. A
    fault found by parity leaves all as it was and returns 3; a version that does not load or answer is taken back and
    returns 1. The same command goes on with what was cut off.
    """
    if status and prune:
        raise click.UsageError("--status and --prune are two different things to do")

    from trtspec.rollout import roll

    spec = load(config, overrides)
    if status:
        click.echo("\n".join(roll.status(spec)))
        return
    if prune:
        gone = roll.prune(spec)
        click.echo(f"removed version {', '.join(map(str, gone))}" if gone else "no version to remove")
        return

    from trtspec.build.progress import observer
    from trtspec.cli.parity import progress

    options = roll.Options(watch, drain_timeout, checks or CHECKS)
    with interruptible():
        roll.roll_out(spec, options, click.echo, lambda: observer(sys.stdout.isatty()), progress)


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside a `with` block SIGTERM and SIGHUP interrupt as Ctrl-C does, so that what began is taken back or kept."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
