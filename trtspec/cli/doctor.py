"""`trtspec doctor`: what this machine can do, what it lacks, and what to do about it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trtspec.cli.common import load, set_option
from trtspec.errors import EXIT_ERROR

if TYPE_CHECKING:
    from trtspec.trtllm.doctor import Diagnosis

_STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@set_option
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def doctor(ctx: click.Context, config: Path | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check this machine; with CONFIG, against what that spec needs here. Exit code 1 if something needed is broken."""
    from trtspec.trtllm.doctor import diagnose
    from trtspec.trtllm.host import look

    if config is None and overrides:
        raise click.UsageError("--set needs a CONFIG to override")
    diagnosis = diagnose(look(), load(config, overrides) if config is not None else None)
    if as_json:
        click.echo(json.dumps(diagnosis.to_json(), indent=2))
    else:
        (_show_table if sys.stdout.isatty() else _show_lines)(diagnosis)
        for each in diagnosis.works:
            click.echo(f"works here: {each}")
        for each, why in diagnosis.lacks.items():
            click.echo(f"does not work here: {each} ({why})")
    if not diagnosis.healthy:
        ctx.exit(EXIT_ERROR)


def _show_lines(diagnosis: Diagnosis) -> None:
    for found in diagnosis.findings:
        click.echo(f"{found.status}: {found.check}: {found.text}" + (f"; {found.fix}" if found.fix else ""))


def _show_table(diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "check", "found", "what to do")
    for found in diagnosis.findings:
        status = Text(found.status, style=_STYLES[found.status])
        table.add_row(status, *(Text(part) for part in (found.check, found.text, found.fix)))
    Console().print(table)
