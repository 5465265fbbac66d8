"""`trtspec bench acceptance`: what every draft length, tree and cascade accepts on a team's own prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec.cli.common import config_argument, load, set_option
from trtspec.cli.spreading import Spreading, spreading_options

if TYPE_CHECKING:
    from rich.table import Table


@click.command("bench acceptance")
@config_argument
@set_option
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    required=True,
    help="JSON Lines with `prompt` (a text) or `messages` (a conversation), and optional `category` and `reference`.",
)
@click.option(
    "--temperature",
    "temperatures",
    type=click.FloatRange(min=0),
    multiple=True,
    help="Of the answers (repeatable); 0 is greedy  [default: 0].",
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Longest answer.")
@click.option("--num-prompts", type=click.IntRange(min=1), help="Prompts to take, spread over the file [default: all].")
@click.option("--raw", is_flag=True, help="Put texts to the models as they are, without the chat template.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the trace is written, for `trtspec plan` [default: .cache/plan/NAME.trace.jsonl].",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@spreading_options
def acceptance(
    config: Path,
    overrides: tuple[str, ...],
    prompts: Path,
    temperatures: tuple[float, ...],
    max_tokens: int,
    num_prompts: int | None,
    raw: bool,
    trace: Path | None,
    as_json: bool,
    spreading: Spreading,
) -> None:
    """Let the target of CONFIG answer prompts once, and its drafts read along; nothing needs to be built.

    All figures come from the recorded trace: acceptance length (tokens a target pass), rate and survival for every
    draft length, for trees and cascades, by category. The intervals are at 95 % over prompts. Interrupted, the same
    command goes on. Dealt out over several processes (--shard, or --executor slurm) the trace is that of one.
    """
    from trtspec.bench.figures import figures
    from trtspec.bench.record import record
    from trtspec.plan.drafting import Drafting
    from trtspec.prompts import read_prompts, spread

    spreading.check()
    part = spreading.part
    spec = load(config, overrides)
    drafting = Drafting.of(spec)
    chosen = spread(read_prompts(prompts, chats=True), num_prompts)
    path = trace or Path(".cache/plan") / f"{spec.name}.trace.jsonl"
    if spreading.executor == "slurm":
        directory = path.with_name(f"{path.name}.shards")
        spreading.run_on_slurm(spec, prompts, f"{spec.name}-acceptance", directory, num_gpus=1)
        return
    try:
        with _progress() as report:
            recorded = record(
                spec,
                chosen,
                path,
                temperatures=temperatures or (0.0,),
                max_tokens=max_tokens,
                raw=raw,
                report=report,
                shard=part,
                shards=spreading.shards,
            )
    except KeyboardInterrupt:
        kept = spreading.shards / part.file_name if part and spreading.shards else path
        click.echo(f"what is measured is kept in {kept}.partial; the same command goes on from there", err=True)
        raise
    if part:
        click.echo(f"shard {part}: {len(recorded.answers)} answers in {spreading.shards}")
        return
    found = figures(recorded, drafting) | {"trace": str(path)}
    if as_json:
        click.echo(json.dumps(found))
        return
    _show(found)


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for warning in found["warnings"]:
        console.print(f"warning: {warning}", markup=False, style="yellow")
    for name, mode in found["modes"].items():
        title = f"{found['spec']}, {found['method']}, {name}: {found['prompts']} prompts"
        rows = [*mode["lengths"], *mode["others"]]
        if rows:
            console.print(_table(title, "draft tokens", rows))
        if mode["categories"]:
            console.print(_table("by category, as the spec drafts", "category", list(mode["categories"].values())))
        needed = mode["more_prompts_needed"]
        if needed:
            console.print(f"{needed} more prompts would narrow the interval of the length to +-5 %")
        elif needed is None:
            console.print("one prompt says nothing of others: take several for an interval")
    if found["agreement_with_references"] is not None:
        share = 100 * found["agreement_with_references"]
        console.print(f"greedy answers and references have {share:.0f} % of their tokens in common (F1 over tokens)")
    console.print(f"trace: {found['trace']}", markup=False)


def _table(title: str, first: str, rows: list[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    table.add_column(first)
    for heading in ("prompts", "tokens a pass", "95 % interval", "rate", "first 1, 2, ... drafts accepted"):
        table.add_column(heading, justify="left" if heading.startswith("first") else "right")
    for row in rows:
        low, high = row["length_interval"]
        table.add_row(
            row["name"],
            str(row["prompts"]),
            f"{row['length']:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{row['rate']:.2f}",
            " ".join(f"{share:.2f}" for share in row["survival"]),
        )
    return table


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar where someone watches, a line for each new note otherwise; on standard error."""
    if not sys.stderr.isatty():
        last = ""

        def say(done: int, total: int, note: str) -> None:
            nonlocal last
            if note != last and total:
                click.echo(f"{done} of {total} answers: {note}", err=True)
            elif note != last:
                click.echo(note, err=True)
            last = note

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("loading the models", total=None)

        def show(done: int, total: int, note: str) -> None:
            if total:
                bars.update(task, completed=done, total=total, description=note)
            else:
                bars.console.print(note, markup=False, highlight=False)

        yield show
