"""`trtspec migrate`: a spec of compiled engines as one of the LLM API, and what that changes and loses."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec.cli.common import config_argument, load, set_option
from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.trtllm.migrate import Change, Loss

# trtspec.trtllm.migrate.METHODS, here again so that --help need not import the spec.
METHODS = ("none", "ngram", "draft_target", "mtp")
_WIDTH = 110  # of the comments in the new file


@click.command()
@config_argument
@set_option
@click.option("--version", help="TensorRT-LLM version of the result [default: 1.3.0].")
@click.option("--method", type=click.Choice(METHODS), help="Speculation method of the result [default: the spec's].")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write [default: CONFIG with -llmapi in its name].",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def migrate(
    config: Path, overrides: tuple[str, ...], version: str | None, method: str | None, output: Path | None, force: bool
) -> None:
    """Turn CONFIG, a spec of compiled engines (TensorRT-LLM up to 1.2), into one of the LLM API (1.3 and later).

    Prints every key that changes and everything that is lost, with the reason. Exit code 1 when the method of CONFIG
    does not exist there and --method names no other.
    """
    from trtspec.trtllm.migrate import DEFAULT_VERSION, SUFFIX, NoCounterpart
    from trtspec.trtllm.migrate import migrate as migrated

    spec = load(config, overrides)
    out = output or config.with_name(f"{config.stem}{SUFFIX}.yaml")
    if out.exists() and (not force or os.path.samefile(out, config)):
        fix = "choose another name with -o" if force else "choose another name with -o, or overwrite it with --force"
        raise TrtspecError("exists already", where=str(out), fix=fix)
    if not out.parent.is_dir():
        raise TrtspecError("no such directory", where=str(out.parent), fix="create it first")
    try:
        result = migrated(spec, version=version or DEFAULT_VERSION, method=method, base_dir=out.parent)
    except NoCounterpart as error:
        _show_losses(error.losses)
        raise
    _write(out, result.content, _header(config, result.content, result.losses))
    click.echo("changed:")
    for change in result.changes:
        click.echo(f"  {_changed(change)}")
    _show_losses(result.losses)
    click.echo(f"wrote {out}; next: trtspec check {out}")


def _write(out: Path, content: dict[str, Any], header: str) -> None:
    """Write the spec once it is known to load and to be one that the LLM API can honour."""
    import yaml

    from trtspec.trtllm import llmapi, support

    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
        spec = load(draft)
        refused = [support.describe(spec, p) for p in support.check_support(spec) if not p.not_built]
        if refused:
            raise TrtspecError("\n".join(refused))
        llmapi.model_yaml(spec)
        os.replace(draft, out)
    except TrtspecError as error:
        raise TrtspecError(str(error).replace(str(draft), str(out))) from None
    finally:
        draft.unlink(missing_ok=True)


def _header(config: Path, content: dict[str, Any], losses: Sequence[Loss]) -> str:
    """Comments of the old file do not come along; these say where the new one is from."""
    lines = [f"Made by trtspec migrate from {config.name}, for TensorRT-LLM {content['engine']['version']}.", ""]
    lines.append("Lost on the way:")
    for loss in losses:
        lines += textwrap.wrap(f"- {loss.what}: {loss.why}", _WIDTH, subsequent_indent="  ", break_long_words=False)
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _show_losses(losses: Sequence[Loss]) -> None:
    if losses:
        click.echo("lost:")
    for loss in losses:
        click.echo(f"  {loss.what}: {loss.why}" + (f"; instead: {loss.instead}" if loss.instead else ""))


def _changed(change: Change) -> str:
    if change.new is None:
        return f"{change.key}: {_shown(change.old)} is left out: {change.why}"
    old = "" if change.old is None else f"{_shown(change.old)} -> "
    return f"{change.key}: {old}{_shown(change.new)}: {change.why}"


def _shown(value: Any) -> str:
    import yaml

    return " ".join(str(yaml.safe_dump(value, default_flow_style=True, width=2**16)).removesuffix("...\n").split())
