"""`trtspec train`: distil a small draft model from a target, or train Medusa heads on it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click


@click.group()
def train() -> None:
    """Train the parts of a speculation that do not come with the target."""


def _trainer_options(work: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options that every trainer has; `work` is what it makes, for the help texts."""
    options = (
        click.option("--target", required=True, help="Hugging Face directory, hub name, or package:NAME."),
        click.option("--gguf-file", help="GGUF file inside the target's directory."),
        click.option(
            "--output", required=True, type=click.Path(path_type=Path, file_okay=False), help=f"Where the {work} go."
        ),
        click.option(
            "--work-dir",
            type=click.Path(path_type=Path, file_okay=False),
            default=Path(".cache/train"),
            show_default=True,
            help="Answers and checkpoints, so that a stopped run goes on; trainers can share the answers.",
        ),
        click.option(
            "--prompts",
            type=click.Path(path_type=Path, dir_okay=False),
            default=Path("configs/prompts/quickstart.jsonl"),
            show_default=True,
            help=f"Prompts the {work} are measured on, never trained on.",
        ),
        click.option("--num-prompts", type=click.IntRange(min=1), help="Measure on so many of them [default: all]."),
        click.option(
            "--tokens",
            type=click.IntRange(min=1),
            default=400_000,
            show_default=True,
            help="Answer tokens to generate.",
        ),
        click.option("--steps", type=click.IntRange(min=1), help="Train so many steps."),
        click.option(
            "--minutes",
            type=click.FloatRange(min=0, min_open=True),
            help="Train so long [default: 40, without --steps].",
        ),
        click.option(
            "--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Processes that generate."
        ),
        click.option("--seed", type=int, default=0, show_default=True),
        click.option(
            "--resume/--no-resume", default=True, show_default=True, help="Go on with what is in the work directory."
        ),
        click.option("--measure-only", is_flag=True, help=f"Measure the {work} in --output again, and train nothing."),
        click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on the last line."),
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@train.command()
@click.option("--layers", type=click.IntRange(min=1), default=2, show_default=True, help="Decoder layers of the draft.")
@click.option(
    "--draft-vocab", type=click.IntRange(min=16), default=8192, show_default=True, help="Rows of the draft's head."
)
@_trainer_options("draft's files")
def draft(measure_only: bool, as_json: bool, steps: int | None, minutes: float | None, **settings: Any) -> None:
    """Distil a draft from the target's own answers: generate, train, measure.

    Every stage can be stopped at any time, and the same command goes on.
    """
    from trtspec.train.draft import DraftOptions, measure_draft, train_draft

    options = DraftOptions(steps=steps, minutes=minutes or (None if steps else 40.0), **settings)
    with _progress() as report:
        figures = (measure_draft if measure_only else train_draft)(options, report)
    if as_json:
        click.echo(json.dumps(figures))
        return
    for mode, categories in figures["modes"].items():
        for category, values in categories.items():
            length, rate = values["acceptance_length"]["4"], values["acceptance_rate"]["4"]
            click.echo(
                f"{mode}, {category}: {length:.2f} tokens a target pass, {100 * rate:.0f} % of 4 draft tokens accepted"
            )
    step = figures["step_ms"]
    click.echo(f"step: draft {step['draft']:.1f} ms, target {step['target']:.1f} ms")


@train.command()
@click.option("--heads", type=click.IntRange(min=1, max=8), default=4, show_default=True, help="Number of heads.")
@click.option("--layers", type=click.IntRange(min=1), default=2, show_default=True, help="Layers of each head.")
@click.option(
    "--vocab", type=click.IntRange(min=16), default=2048, show_default=True, help="Ids that are in every step's loss."
)
@_trainer_options("heads")
def medusa(measure_only: bool, as_json: bool, steps: int | None, minutes: float | None, **settings: Any) -> None:
    """Train Medusa heads on the target's own answers and hidden states: generate, train, measure.

    Every stage can be stopped at any time, and the same command goes on. The answers are those of `trtspec train
    draft`.
    """
    from trtspec.train.medusa import MedusaOptions, measure_medusa, train_medusa

    options = MedusaOptions(steps=steps, minutes=minutes or (None if steps else 40.0), **settings)
    with _progress() as report:
        figures = (measure_medusa if measure_only else train_medusa)(options, report)
    if as_json:
        click.echo(json.dumps(figures))
        return
    for mode, categories in figures["modes"].items():
        for category, values in categories.items():
            lengths = ", ".join(f"{length:.2f} ({tree})" for tree, length in values["tokens_per_pass"].items())
            click.echo(f"{mode}, {category}: tokens a target pass {lengths}")
        for head, (first, *_, fifth) in enumerate(categories["all"]["top_1_to_5"]):
            click.echo(f"{mode}, head {head}: first choice right {100 * first:.0f} %, first five {100 * fifth:.0f} %")


@contextmanager
def _progress() -> Iterator[Callable[[str, float, str], None]]:
    """A bar for every stage on a terminal; elsewhere a line when a stage begins or ends, and every half minute."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description:9}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as bars:
        tasks = {
            stage: bars.add_task(stage, total=1.0, note="", start=False) for stage in ("generate", "train", "measure")
        }

        def report(stage: str, done: float, note: str) -> None:
            bars.start_task(tasks[stage])
            bars.update(tasks[stage], completed=done, note=note)

        yield report


def _lines() -> Callable[[str, float, str], None]:
    last_stage, last_time = "", 0.0

    def report(stage: str, done: float, note: str) -> None:
        nonlocal last_stage, last_time
        now = time.monotonic()
        if stage != last_stage or done >= 1.0 or now - last_time > 30.0:
            click.echo(f"{stage}: {100 * done:.0f} % {note}", err=True)
            last_stage, last_time = stage, now

    return report
