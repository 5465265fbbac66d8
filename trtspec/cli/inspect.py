"""`trtspec inspect`: what an engine or a checkpoint is, and whether it fits this host and its partner."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.trtllm.inspect import Inspection


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--partner", metavar="DIR", type=click.Path(path_type=Path), help="The engine it is to work with.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def inspect(directory: Path, partner: Path | None, as_json: bool) -> None:
    """Say what the engine or TensorRT-LLM checkpoint in DIRECTORY is, and whether this host and container can use it.

    Exit code 0: it fits; 1: it does not, with the reasons.
    """
    from trtspec.trtllm.host import look
    from trtspec.trtllm.inspect import inspect as look_at

    host = look()
    found, error = None, None
    try:
        found = look_at(directory, host, partner)
        if found.misfits:
            error = TrtspecError("\n".join(found.misfits))
    except TrtspecError as failure:
        error = failure
    if as_json:
        answer = {
            "command": "inspect",
            "ok": error is None,
            "error": str(error) if error else None,
            "path": str(directory),
            "partner": str(partner) if partner else None,
            "kind": found.kind if found else None,
            "facts": found.facts if found else None,
            "misfits": found.misfits if found else [],
            "host": asdict(host),
        }
        click.echo(json.dumps(answer))
    elif found:
        for line in _lines(directory, found):
            click.echo(line)
        if error is None:
            click.echo("fits this machine" + (f" and {partner}" if partner else ""))
    if error:
        raise error


def _lines(directory: Path, found: Inspection) -> list[str]:
    """The known facts, one a line."""
    width = max(map(len, found.facts)) + 2
    known = {name: value for name, value in found.facts.items() if value not in (None, [])}
    return [f"{found.kind} {directory}", *(f"  {name:<{width}}{_shown(name, value)}" for name, value in known.items())]


def _shown(name: str, value: Any) -> str:
    if name == "bytes":
        return f"{value} ({value / 2**30:.2f} GiB)"
    if name == "sm":
        return f"sm_{value}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "yes" if value is True else "no" if value is False else str(value)
