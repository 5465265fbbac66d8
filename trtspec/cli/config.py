"""`trtspec config`: write, validate and show spec files, and print their JSON Schema."""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path

import click
import yaml

from trtspec.cli.common import config_argument, load, set_option
from trtspec.errors import TrtspecError


@click.group()
def config() -> None:
    """Write, validate and show spec files."""


@config.command()
@click.argument("path", type=click.Path(path_type=Path), default=Path("trtspec.yaml"))
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(path: Path, force: bool) -> None:
    """Write a commented starter file to PATH (trtspec.yaml by default)."""
    if path.exists() and not path.is_file():
        raise TrtspecError("is not a file", where=str(path), fix="name a file, such as trtspec.yaml")
    if path.exists() and not force:
        raise TrtspecError("exists already", where=str(path), fix="choose another name, or overwrite it with --force")
    if not path.parent.is_dir():
        raise TrtspecError("no such directory", where=str(path.parent), fix="create it first")
    starter = resources.files("trtspec.spec").joinpath("starter.yaml").read_text(encoding="utf-8")
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(starter, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    click.echo(f"wrote {path}; next: trtspec check {path}")


@config.command()
@config_argument
@set_option
def validate(config: Path, overrides: tuple[str, ...]) -> None:
    """Say what is wrong with CONFIG: every problem with file, line and key. Exit code 1 if there is one."""
    from trtspec.spec import rules
    from trtspec.trtllm import support

    spec = load(config, overrides)
    problems = support.check_support(spec)
    refused = [support.describe(spec, problem) for problem in problems if not problem.not_built]
    if refused:
        raise TrtspecError("\n".join(refused))
    for note in (*rules.remarks(spec), *support.remarks(spec), *(support.describe(spec, p) for p in problems)):
        click.echo(f"note: {note}")
    click.echo(f"{config}: valid")


@config.command()
@config_argument
@set_option
def show(config: Path, overrides: tuple[str, ...]) -> None:
    """Print CONFIG as YAML with overrides applied and every default filled in."""
    content = load(config, overrides).resolved()
    click.echo(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), nl=False)


@config.command()
def schema() -> None:
    """Print the JSON Schema of spec files, for completion and checks in an editor."""
    from trtspec.spec.schema import Spec

    click.echo(
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema"} | Spec.model_json_schema(), indent=2)
    )
