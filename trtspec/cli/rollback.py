"""`trtspec rollback`: the version before serves again."""

from __future__ import annotations

from pathlib import Path

import click

from trtspec.cli.common import config_argument, load, set_option
from trtspec.cli.rollout import drain_option, interruptible, watch_option


@click.command()
@config_argument
@set_option
@watch_option
@drain_option
def rollback(config: Path, overrides: tuple[str, ...], watch: int, drain_timeout: float) -> None:
    """Let the version before serve again, without a gap, or take back a roll-out that was cut off.

    Where no server is running, the files are put back. CONFIG is only asked where they are.
    """
    from trtspec.rollout import roll

    with interruptible():
        roll.roll_back(load(config, overrides), roll.Options(watch, drain_timeout), click.echo)
