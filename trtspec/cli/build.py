"""`trtspec build`: run the steps of a spec, or print what would run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec.cli.common import config_argument, load, set_option
from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.build.graph import Report
    from trtspec.spec.schema import Spec


@click.command()
@config_argument
@set_option
@click.option("--dry-run", is_flag=True, help="Print every step and command that would run; write nothing.")
@click.option("--force", is_flag=True, help="Run every step, cached or not (with --only: that step).")
@click.option("--no-compile", is_flag=True, help="Prepare everything but compiled engines, on a machine without a GPU.")
@click.option("--only", metavar="STEP", help="Run this step alone; those before it must be up to date.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def build(
    config: Path,
    overrides: tuple[str, ...],
    dry_run: bool,
    force: bool,
    no_compile: bool,
    only: str | None,
    as_json: bool,
) -> None:
    """Build the engines and the Triton model repository that CONFIG describes.

    Steps whose inputs have not changed are cached; a build that failed or was killed goes on where it stopped.
    """
    begin = time.perf_counter()
    spec, report, error = None, None, None
    try:
        spec = load(config, overrides)
        run = _preview if dry_run else _run
        report = run(spec, force=force, only=only, compile=not no_compile)
        error = report.error
    except TrtspecError as failure:
        error = failure
    seconds = time.perf_counter() - begin
    if spec and report and not error and not dry_run:
        what = only or f"{spec.engines_dir} and {spec.model_repo_dir}"
        done = f"built {what}" if report.changed else f"nothing to do, {what} up to date"
        click.echo(f"{done} ({seconds:.1f} s)")
    if as_json:
        click.echo(json.dumps(_summary(spec, report, error, dry_run, seconds)))
    if error:
        raise error


def _run(spec: Spec, *, force: bool, only: str | None, compile: bool) -> Report:
    from trtspec.build.progress import observer
    from trtspec.build.steps import build_graph
    from trtspec.trtllm.support import require_buildable

    require_buildable(spec)
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
