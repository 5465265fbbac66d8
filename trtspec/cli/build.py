"""`trtspec build`: run the steps of a spec, or print what would run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec.cli.common import load, set_option
from trtspec.cli.spreading import slurm_options as options_of_jobs
from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.build.graph import Report
    from trtspec.cluster.slurm import Options
    from trtspec.spec.schema import Spec


@click.command()
@click.argument("configs", metavar="CONFIG...", nargs=-1, required=True, type=click.Path(path_type=Path))
@set_option
@click.option("--dry-run", is_flag=True, help="Print every step and command that would run; write nothing.")
@click.option("--force", is_flag=True, help="Run every step, cached or not (with --only: that step).")
@click.option("--no-compile", is_flag=True, help="Prepare everything but compiled engines, on a machine without a GPU.")
@click.option("--only", metavar="STEP", help="Run this step alone; those before it must be up to date.")
@click.option(
    "--executor",
    type=click.Choice(("local", "slurm")),
    default="local",
    show_default=True,
    help="Where the steps run: here, or as jobs on a Slurm cluster, one engine a job. The same command again follows "
    "jobs that are under way.",
)
@options_of_jobs
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def build(
    configs: tuple[Path, ...],
    overrides: tuple[str, ...],
    dry_run: bool,
    force: bool,
    no_compile: bool,
    only: str | None,
    executor: str,
    partition: str | None,
    account: str | None,
    time_limit: str | None,
    slurm_options: tuple[str, ...],
    cancel: bool,
    as_json: bool,
) -> None:
    """Build the engines and the Triton model repository that CONFIG describes.

    Steps whose inputs have not changed are cached; a build that failed or was killed goes on where it stopped. With
    --executor slurm several CONFIGs are built at the same time.
    """
    if executor == "slurm":
        from trtspec.cluster.slurm import Options, parse_options

        if only:
            raise click.UsageError("--only runs one step here; it does not go with --executor slurm")
        options = Options(partition, account, time_limit, parse_options(slurm_options))
        _on_slurm(configs, overrides, options, dry_run, cancel, force, not no_compile, as_json)
        return
    if cancel or partition or account or time_limit or slurm_options:
        raise click.UsageError("--partition, --account, --time, --slurm-option and --cancel need --executor slurm")
    if len(configs) > 1:
        raise click.UsageError("several CONFIGs need --executor slurm")
    begin = time.perf_counter()
    spec, report, error = None, None, None
    try:
        spec = load(configs[0], overrides)
        run = _preview if dry_run else _run
        report = run(spec, force=force, only=only, compile=not no_compile)
        error = report.error
    except TrtspecError as failure:
        error = failure
    seconds = time.perf_counter() - begin
    if spec and report and not error and not dry_run:
        _say_built(spec, report, only, seconds)
    if as_json:
        click.echo(json.dumps(_summary(spec, report, error, dry_run, seconds)))
    if error:
        raise error


def _say_built(spec: Spec, report: Report, only: str | None, seconds: float) -> None:
    what = only or f"{spec.engines_dir} and {spec.model_repo_dir}"
    done = f"built {what}" if report.changed else f"nothing to do, {what} up to date"
    click.echo(f"{done} ({seconds:.1f} s)")


def _on_slurm(
    configs: tuple[Path, ...],
    overrides: tuple[str, ...],
    options: Options,
    dry_run: bool,
    cancel: bool,
    force: bool,
    compile: bool,
    as_json: bool,
) -> None:
    """Submit and follow, cancel, or show what would be submitted."""
    from trtspec.build.progress import observer
    from trtspec.cluster import build as cluster

    begin = time.perf_counter()
    specs = [load(config, overrides) for config in configs]
    requests = [cluster.Request(spec, overrides, compile, force) for spec in specs]
    if cancel:
        cluster.cancel(requests, click.echo)
        return
    if dry_run:
        for line in cluster.preview(requests, options):
            click.echo(line)
        return
    summaries = [_summary(spec, None, None, False, 0.0) for spec in specs]
    errors = []

    def finished(number: int, report: Report) -> None:
        seconds = time.perf_counter() - begin
        summaries[number] = _summary(specs[number], report, report.error, False, seconds)
        if report.error:
            errors.append(report.error)
        else:
            _say_built(specs[number], report, None, seconds)

    try:
        with observer(sys.stdout.isatty()) as watching:
            cluster.build(requests, options, watching, click.echo, finished)
    except TrtspecError as failure:
        errors.append(failure)
    if as_json:
        content = summaries[0] if len(summaries) == 1 else {"command": "build", "builds": summaries}
        if errors:
            content |= {"ok": False, "error": "\n".join(map(str, errors))}
        click.echo(json.dumps(content))
    if errors:
        raise errors[0] if len(errors) == 1 else TrtspecError("\n".join(map(str, errors)))


def _run(spec: Spec, *, force: bool, only: str | None, compile: bool) -> Report:
    from trtspec.build.progress import observer
    from trtspec.build.steps import build_graph
    from trtspec.cluster.jobs import settle
    from trtspec.trtllm.support import require_buildable

    require_buildable(spec)
    settle(spec.engines_dir.resolve())
    with observer(sys.stdout.isatty()) as watching:
        return build_graph(spec, compile=compile).run(watching, force=force, only=only)


def _preview(spec: Spec, *, force: bool, only: str | None, compile: bool) -> Report:
    """Print the steps, also of a spec that this release cannot build, and then refuse that."""
    from trtspec.build.graph import Report
    from trtspec.build.steps import build_graph
    from trtspec.trtllm.support import require_buildable

    report = build_graph(spec, compile=compile).preview(force=force, only=only)
    for outcome in report.outcomes:
        click.echo(f"{outcome.name}: {outcome.status} ({outcome.reason})")
        for action in outcome.actions:
            click.echo(f"  {action}")
        if outcome.output:
            click.echo(f"  output: {outcome.output}")
    try:
        require_buildable(spec)
    except TrtspecError as refusal:
        return Report(report.outcomes, refusal)
    return report


def _summary(
    spec: Spec | None, report: Report | None, error: TrtspecError | None, dry_run: bool, seconds: float
) -> dict[str, Any]:
    steps = report.outcomes if report else []
    return {
        "command": "build",
        "ok": error is None,
        "error": str(error) if error else None,
        "dry_run": dry_run,
        "changed": bool(report and report.changed),
        "name": spec.name if spec else None,
        "engines": str(spec.engines_dir) if spec else None,
        "model_repo": str(spec.model_repo_dir) if spec else None,
        "seconds": round(seconds, 3),
        "steps": [
            {
                "name": step.name,
                "status": step.status,
                "reason": step.reason,
                "seconds": step.seconds,
                "input_hash": step.input_hash,
                "output": str(step.output) if step.output else None,
                "commands": list(step.actions),
            }
            for step in steps
        ],
    }
