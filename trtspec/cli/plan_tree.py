"""`trtspec plan tree`: the best token tree of Medusa heads for a number of nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec.cli.common import load, set_option
from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.plan.tree import Accuracies


@click.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@set_option
@click.option(
    "--accuracies",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON file with how often each rank of each head is right, [head][rank], or with that under `accuracies`, as "
    "acceptance.json of `trtspec train medusa` has it.",
)
@click.option(
    "--measure", is_flag=True, help="Measure the heads of CONFIG on its prompts, also where they have figures."
)
@click.option("--nodes", type=click.IntRange(min=1, max=63), required=True, help="Most nodes of the tree.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the tree, as .png or .svg (needs matplotlib)."
)
@click.option(
    "--work-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".cache/train"),
    show_default=True,
    help="Where the target's answers are kept that heads are measured on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print tree and figures as JSON.")
def tree(
    config: Path | None,
    overrides: tuple[str, ...],
    file: Path | None,
    measure: bool,
    nodes: int,
    plot: Path | None,
    work_dir: Path,
    as_json: bool,
) -> None:
    """Find the tree with the most expected tokens a target pass, as `choices` for the spec.

    How often heads are right is taken from --accuracies, or from acceptance.json beside the heads of CONFIG, or
    measured on the prompts of CONFIG.
    """
    from trtspec.models.medusa import DEFAULT_CHOICES
    from trtspec.plan.tree import best_tree, chain, draw, expected_tokens

    if (config is None) == (file is None):
        raise click.UsageError("Give CONFIG or --accuracies, one of them.")
    if file is not None and (measure or overrides):
        raise click.UsageError("--measure and --set need CONFIG.")
    found = _read(file) if file is not None else _of_spec(config, overrides, measure, work_dir)  # type: ignore[arg-type]
    best = best_tree(found, nodes)
    if not best:
        raise TrtspecError("no head is ever right", where=str(file or config), fix="train the heads longer")
    trees = {f"this tree of {len(best)} nodes": best, f"a chain of {len(found)}": chain(len(found))}
    if len(found) >= max(map(len, DEFAULT_CHOICES)):
        trees[f"the default tree of {len(DEFAULT_CHOICES)} nodes"] = list(DEFAULT_CHOICES)
    expected = {name: expected_tokens(each, found) for name, each in trees.items()}
    if plot is not None:
        draw(best, found, plot, f"{len(best)} nodes, {expected_tokens(best, found):.2f} tokens a target pass expected")
    if as_json:
        figures = {"choices": best, "expected_tokens_per_pass": expected}
        click.echo(json.dumps(figures))
        return
    for name, tokens in expected.items():
        click.echo(f"# {tokens:.2f} tokens a target pass expected: {name}")
    click.echo("choices:")
    for path in best:
        click.echo(f"  - {list(path)}")


def _of_spec(config: Path, overrides: tuple[str, ...], measure: bool, work_dir: Path) -> Accuracies:
    """What the heads of a spec are worth: their own figures, or measured."""
    from trtspec.models.source import locate

    spec = load(config, overrides)
    medusa = spec.speculation.medusa
    if medusa is None:
        raise TrtspecError(
            f"method {spec.speculation.method} has no heads to plan a tree for",
            where=spec.where(("speculation", "method")),
            expected="method medusa",
        )
    directory = locate(medusa.heads, spec.base_dir, ("*.json", "*.safetensors", "*.pt"))
    recorded = directory / "acceptance.json"
    if recorded.is_file() and not measure:
        return _read(recorded)[: medusa.num_heads]

    from trtspec.models.source import open_model
    from trtspec.plan.tree import accuracies_of
    from trtspec.train.measure import read_prompts
    from trtspec.train.medusa import measured_ranks

    prompts = read_prompts(spec.prompts_path)
    target = open_model(spec.target.model, gguf_file=spec.target.gguf_file, base_dir=spec.base_dir)
    target.check()
    click.echo(f"measuring {directory} on {len(prompts)} prompts", err=True)
    return accuracies_of(measured_ranks(target, directory, prompts, work_dir))[: medusa.num_heads]


def _read(path: Path) -> list[list[float]]:
    """Accuracies in a JSON file.

    Raises:
        TrtspecError: none there, or numbers that are no chances.
    """
    expected = "[head][rank], numbers from 0 to 1 that add up to 1 at most for each head"
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrtspecError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise TrtspecError(f"not valid JSON ({error})", where=str(path), expected=expected) from error
    found = content.get("accuracies") if isinstance(content, dict) else content
    rows: list[Any] = found if isinstance(found, list) else []
    chances = [p for row in rows if isinstance(row, list) for p in row]
    if not chances or not all(isinstance(row, list) and row for row in rows):
        raise TrtspecError("no accuracies in it", where=str(path), expected=expected)
    if not all(isinstance(p, int | float) and 0 <= p <= 1 for p in chances):
        raise TrtspecError("no accuracies in it", where=str(path), expected=expected)
    if any(sum(row) > 1.001 for row in rows):
        raise TrtspecError("the ranks of a head are right more often than always", where=str(path), expected=expected)
    return [[float(p) for p in row] for row in rows]
