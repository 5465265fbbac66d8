"""`trtspec parity`: checkpoints, engines and the running server against the reference sampler."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trtspec.cli.common import load, set_option
from trtspec.cli.spreading import Spreading, spreading_options
from trtspec.errors import EXIT_PARITY_FAILED

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from trtspec.parity.result import Check
    from trtspec.parity.suite import Observer
    from trtspec.spec.schema import Spec

SUBJECTS = ("checkpoint", "engines", "server", "engine-model", "runner", "trace")
CHECKS = ("greedy", "sampled", "draws", "logits", "invariances", "rules", "degenerate")
CHECKPOINT_CHECKS = ("format", "logits", "layers")
_REMOTE = {"server", "engine-model"}


def _check_names(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """NAME or NAME:PART of checks that exist."""
    from trtspec.parity.checks import CHECKS as kinds

    known = (*CHECKS, *CHECKPOINT_CHECKS)
    for value in values:
        name, colon, part = value.partition(":")
        if name not in known:
            raise click.BadParameter(f"{name!r} is no check; expected one of {', '.join(dict.fromkeys(known))}")
        parts = kinds[name].parts if name in kinds else ()
        if colon and part not in parts:
            raise click.BadParameter(f"{name} has no part {part!r}; it has {', '.join(parts) or 'none'}")
    return values


@click.command(
    epilog="See also: trtspec parity diff A B (where two traces part), trtspec parity replay TRACE (verdicts from a "
    "trace alone)."
)
@click.argument("config", type=click.Path(path_type=Path), required=False)
@set_option
@click.option(
    "--subject",
    "subjects",
    type=click.Choice(SUBJECTS),
    multiple=True,
    help="What to check (repeatable) [default: the engines, for runtime tensorrt_llm the checkpoints, and the server "
    "of this spec if it is running]. engine-model is the server's target model, asked directly; runner is "
    "TensorRT-LLM's, on a GPU host; trace is a recorded run.",
)
@click.option(
    "--url",
    help="host:port of the server's gRPC; implies that the server is checked. Without CONFIG it is one that trtspec "
    "serve started here, or, with --target, any with the tensors of upstream's repository.",
)
@click.option(
    "--target",
    metavar="MODEL",
    help="Without CONFIG: the model that the server at --url has to answer like, as target.model of a spec: a "
    "directory, a hub name or package:NAME. What the server computes in is the model's own type, unless said otherwise "
    "with --set target.dtype=bfloat16.",
)
@click.option(
    "--trace", type=click.Path(path_type=Path, dir_okay=False), help="Trace that --subject trace answers from."
)
@click.option("--prompts", type=click.Path(path_type=Path), help="Prompt file, JSON Lines; instead of parity.prompts.")
@click.option("--num-prompts", type=click.IntRange(min=1), help="Prompts to take from the file.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer to a prompt.")
@click.option(
    "--check",
    "checks",
    metavar="NAME[:PART]",
    multiple=True,
    callback=_check_names,
    help=f"Only this check, or one part of it (repeatable): {', '.join(CHECKS)}; of checkpoints: "
    f"{', '.join(CHECKPOINT_CHECKS)}.",
)
@click.option("--prompt", type=click.IntRange(min=1), help="Only the prompt on this line of the file.")
@click.option("--budget", help="What the sampled check may draw: 2000 (tokens), 90s or 5m.")
@click.option("--plan", "only_plan", is_flag=True, help="Only say what the run would draw and what it could see.")
@click.option("--if-changed", is_flag=True, help="Show the last good verdict again if nothing has changed since.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON line at the end.")
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    help="Write the report here: .json, .xml (JUnit), .html, or a folder for all of them, traces, and a script that "
    "reproduces each fault.",
)
@spreading_options
@click.pass_context
def parity(
    ctx: click.Context,
    config: Path | None,
    overrides: tuple[str, ...],
    subjects: tuple[str, ...],
    url: str | None,
    target: str | None,
    trace: Path | None,
    prompts: Path | None,
    num_prompts: int | None,
    max_tokens: int | None,
    checks: tuple[str, ...],
    prompt: int | None,
    budget: str | None,
    only_plan: bool,
    if_changed: bool,
    as_json: bool,
    report: Path | None,
    spreading: Spreading,
) -> None:
    """Check that what was built from CONFIG, or a server without it, answers as the reference sampler does.

    Returns 0 if it does (rounding ties are shown and pass), 3 if a check found a fault, 1 if it could not be checked.
    Dealt out over several processes (--shard, or --executor slurm), the report is that of one: shards answer what is
    known to be asked, and one process judges.
    """
    spreading.check()
    part, on_slurm = spreading.part, spreading.executor == "slurm"
    if target and config:
        raise click.UsageError("--target is for a server without a spec, and CONFIG names the target itself")
    if not config and not url:
        raise click.UsageError("give CONFIG, or where a server is: --url HOST:PORT")
    if not config and set(subjects) - _REMOTE:
        raise click.UsageError(f"--subject {min(set(subjects) - _REMOTE)} needs CONFIG")
    if target and if_changed:
        raise click.UsageError("--if-changed compares what CONFIG built, and --target is without it")
    if url and subjects and not _REMOTE & set(subjects):
        raise click.UsageError(f"--url says where a server is, but --subject {subjects[0]} does not check one")
    if trace and "trace" not in subjects:
        raise click.UsageError("--trace is what --subject trace answers from")
    for name in {check.partition(":")[0] for check in checks}:
        if subjects and not any(name in (CHECKPOINT_CHECKS if it == "checkpoint" else CHECKS) for it in subjects):
            raise click.UsageError(f"--check {name} is no check of --subject {', '.join(subjects)}")
    if if_changed and (as_json or report):
        raise click.UsageError("--if-changed may show an earlier verdict, of which there is no report")
    if (part or on_slurm) and (only_plan or if_changed or not config):
        raise click.UsageError("dealing out needs CONFIG, and goes with neither --plan nor --if-changed")
    if part and (as_json or report):
        raise click.UsageError("a shard has no report; ask for it where the shards are put together: without --shard")
    given = {"num_prompts": num_prompts, "max_tokens": max_tokens, "prompts": prompts and prompts.resolve()}
    overrides += tuple(f"parity.{key}={value}" for key, value in given.items() if value is not None)
    spec = _spec(config, url or "", target, overrides)

    from trtspec.parity import record
    from trtspec.parity import report as reports
    from trtspec.parity.report import text
    from trtspec.parity.suite import Selection, answer_shard, check_dealt_out, command, plan, run, server_url

    if report is not None:
        reports.check_path(report)

    has_checkpoints = spec.engine.runtime == "tensorrt_llm"
    usual = (
        () if has_checkpoints and spec.engine.track != "engine" else ("checkpoint" if has_checkpoints else "engines",)
    )
    selection = Selection(
        subjects=subjects or (("server",) if url else usual),
        if_running=not (subjects or url or part),
        url=url,
        target=target,
        checks=checks or (*CHECKS, *CHECKPOINT_CHECKS),
        prompt=prompt,
        budget=budget,
        trace=trace,
        traces=report if report is not None and reports.is_folder(report) else None,
        shards=spreading.shards,
    )
    if on_slurm:
        check_dealt_out(spec, selection)
        directory = spec.engines_dir / ".parity-shards"
        name, num_gpus = f"{spec.name}-parity", spec.hardware.num_gpus
        spreading.run_on_slurm(spec, spec.prompts_path, name, directory, num_gpus, of_merge=("as_json", "report"))
        return
    if part:
        with progress() as observer:
            recorded = answer_shard(spec, selection, part, observer)
        click.echo("\n".join(recorded))
        return
    if spreading.shards and not set(selection.subjects) & {"engines", "runner"}:
        raise click.UsageError("--shards has answers of --subject engines or runner, and neither is checked")
    if only_plan:
        click.echo("\n".join(plan(spec, selection)))
        return
    checked = record.subject_of(spec, selection, server_url(spec, selection)) if if_changed else None
    if checked is not None and (lines := record.recall(spec, checked)) is not None:
        click.echo("\n".join(lines))
        return
    if selection.traces:
        selection.traces.mkdir(exist_ok=True)
    with progress() as observer:
        result = run(spec, selection, command(str(config) if config else None, selection, overrides), observer)
    lines = [line for check in result.checks for line in text.finding_lines(check)]
    lines.append(text.summary_line(result))
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        console.print(text.table(result))
        lines = text.wrapped(lines, console.width)
    for line in lines:
        click.echo(line)
    if checked is not None and not result.failed:
        record.save(spec, checked, [*map(text.check_line, result.checks), text.summary_line(result)])
    if report is not None:
        reports.write(result, report)
        click.echo(f"report: {report / 'report.html' if reports.is_folder(report) else report}", err=True)
    if as_json:
        click.echo(text.to_json(result))
    ctx.exit(EXIT_PARITY_FAILED if result.failed else 0)


def _spec(config: Path | None, url: str, target: str | None, overrides: tuple[str, ...]) -> Spec:
    """What CONFIG says; without it, what the server was built from, or what makes a model the reference."""
    if config:
        return load(config, overrides)
    from trtspec.parity.served import spec_of_model, spec_of_server

    return spec_of_model(target, overrides) if target else spec_of_server(url, overrides)


class _Lines:
    """A line for each check that ends."""

    def started(self, check: str, subject: str) -> None:
        """Says what takes long before there is anything to see."""
        if check in ("reference", "shards"):
            click.echo(f"{check}: {subject}")

    def advance(self, fraction: float) -> None:
        """Nothing: lines are for files and pipes."""

    def finished(self, check: Check) -> None:
        from trtspec.parity.report.text import check_line, part_lines

        for line in (check_line(check), *part_lines(check)):
            click.echo(line)


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
def progress() -> Iterator[Observer]:
    """Shows a run of checks: as a bar on a terminal, else in lines."""
    if not sys.stdout.isatty():
        yield _Lines()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as shown:
        yield _Bar(shown)
