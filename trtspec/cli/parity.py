"""`trtspec parity`: checkpoints, engines and the running server against the reference sampler."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trtspec.cli.common import config_argument, load, set_option
from trtspec.errors import EXIT_PARITY_FAILED

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from trtspec.parity.result import Check
    from trtspec.parity.suite import Observer

CHECKS = ("greedy", "speculation", "sampled", "draws")
CHECKPOINT_CHECKS = ("format", "logits", "layers")


@click.command()
@config_argument
@set_option
@click.option(
    "--subject",
    type=click.Choice(["checkpoint", "engines", "server", "both"]),
    help="What to check; both: engines and server [default: the engines, for runtime tensorrt_llm the checkpoints, and "
    "the server of this spec if it is running].",
)
@click.option("--url", help="host:port of the server's gRPC; implies that the server is checked.")
@click.option("--prompts", type=click.Path(path_type=Path), help="Prompt file, JSON Lines; instead of parity.prompts.")
@click.option("--num-prompts", type=click.IntRange(min=1), help="Prompts to take from the file.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer to a prompt.")
@click.option(
    "--check",
    "checks",
    type=click.Choice(CHECKS + CHECKPOINT_CHECKS),
    multiple=True,
    help="Only this check (repeatable); format, logits and layers are those of checkpoints.",
)
@click.option("--prompt", type=click.IntRange(min=1), help="Only the prompt on this line of the file.")
@click.option("--if-changed", is_flag=True, help="Show the last good verdict again if nothing has changed since.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON line at the end.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write the report here, as JSON.")
@click.pass_context
def parity(
    ctx: click.Context,
    config: Path,
    overrides: tuple[str, ...],
    subject: str | None,
    url: str | None,
    prompts: Path | None,
    num_prompts: int | None,
    max_tokens: int | None,
    checks: tuple[str, ...],
    prompt: int | None,
    if_changed: bool,
    as_json: bool,
    report: Path | None,
) -> None:
    """Check that what was built from CONFIG answers as the reference sampler does.

    Returns 0 if it does (rounding ties are shown and pass), 3 if a check found a fault, 1 if it could not be checked.
    """
    if url and subject in ("engines", "checkpoint"):
        raise click.UsageError(f"--url says where a server is, but --subject {subject} does not check one")
    if subject and checks and not set(checks) & set(CHECKPOINT_CHECKS if subject == "checkpoint" else CHECKS):
        raise click.UsageError(f"--check {checks[0]} is no check of --subject {subject}")
    if if_changed and (as_json or report):
        raise click.UsageError("--if-changed may show an earlier verdict, of which there is no report")
    given = {"num_prompts": num_prompts, "max_tokens": max_tokens, "prompts": prompts and prompts.resolve()}
    overrides += tuple(f"parity.{key}={value}" for key, value in given.items() if value is not None)
    spec = load(config, overrides)
    if report is not None and not report.absolute().parent.is_dir():
        raise click.BadParameter(f"{report.absolute().parent} is no directory", param_hint="--report")

    from trtspec.build.output import write_atomic
    from trtspec.parity import record
    from trtspec.parity import report as reports
    from trtspec.parity.suite import Selection, run, server_url

    def reproduce(check: str, subject: str, number: int | None) -> str:
        words = ["trtspec", "parity", str(config), "--subject", subject.split()[0], "--check", check]
        words += [] if number is None else ["--prompt", str(number)]
        words += ["--url", url] if url and subject == "server" else []
        return shlex.join([*words, *(word for override in overrides for word in ("--set", override))])

    has_checkpoints = spec.engine.runtime == "tensorrt_llm"
    selection = Selection(
        engines=subject in ("engines", "both") or (subject is None and not has_checkpoints),
        server=True if subject in ("server", "both") or url else None if subject is None else False,
        checkpoint=subject == "checkpoint" or (subject is None and has_checkpoints and spec.engine.track == "engine"),
        url=url,
        checks=checks or CHECKS + CHECKPOINT_CHECKS,
        prompt=prompt,
    )
    checked = record.subject_of(spec, selection, server_url(spec, selection)) if if_changed else None
    if checked is not None and (lines := record.recall(spec, checked)) is not None:
        click.echo("\n".join(lines))
        return
    with _observer() as observer:
        result = run(spec, selection, reproduce, observer)
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(reports.table(result))
    for line in (line for check in result.checks for line in reports.finding_lines(check)):
        click.echo(line)
    click.echo(reports.summary_line(result))
    if checked is not None and not result.failed:
        record.save(spec, checked, [*map(reports.check_line, result.checks), reports.summary_line(result)])
    if report is not None:
        write_atomic(report, reports.to_json(result, indent=2) + "\n")
    if as_json:
        click.echo(reports.to_json(result))
    ctx.exit(EXIT_PARITY_FAILED if result.failed else 0)


class _Lines:
    """A line for each check that ends."""

    def started(self, check: str, subject: str) -> None:
        """Says what takes long before there is anything to see."""
        if check == "reference":
            click.echo(f"{check}: {subject}")

    def advance(self, fraction: float) -> None:
        """Nothing: lines are for files and pipes."""

    def finished(self, check: Check) -> None:
        from trtspec.parity.report import check_line

        click.echo(check_line(check))


class _Bar:
    """A bar for the running check; the table comes at the end."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def started(self, check: str, subject: str) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(f"{subject}, {check}", total=None)

    def advance(self, fraction: float) -> None:
        if self._task is not None:
            self._progress.update(self._task, total=1.0, completed=fraction)

    def finished(self, check: Check) -> None:
        """Nothing: the table shows it."""


@contextmanager
def _observer() -> Iterator[Observer]:
    if not sys.stdout.isatty():
        yield _Lines()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        yield _Bar(progress)
