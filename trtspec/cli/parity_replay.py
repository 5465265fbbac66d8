"""`trtspec parity replay`: verdicts again from a trace, without models."""

from __future__ import annotations

from pathlib import Path

import click

from trtspec.errors import EXIT_PARITY_FAILED


@click.command("parity replay")
@click.argument("trace", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON line at the end.")
@click.pass_context
def replay(ctx: click.Context, trace: Path, as_json: bool) -> None:
    """Judge again what TRACE has of regrets, transforms and the subject's own draws; loads no model.

    Returns 0 if nothing is wrong, 3 if a check finds a fault.
    """
    from trtspec.parity.replay import replay as judge
    from trtspec.parity.report import text
    from trtspec.parity.result import Report
    from trtspec.parity.trace import read

    recorded = read(trace)
    result = Report(name=trace.stem, checks=judge(recorded), settings=recorded.header)
    for check in result.checks:
        for line in (text.check_line(check), *text.finding_lines(check)):
            click.echo(line)
    click.echo(text.summary_line(result))
    if as_json:
        click.echo(text.to_json(result))
    ctx.exit(EXIT_PARITY_FAILED if result.failed else 0)
