"""`trtspec plan tree`: the best token tree of Medusa heads or a draft model for a number of nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec.cli.common import load, set_option, target_answers
from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.plan.tree import Accuracies, Node
    from trtspec.spec.schema import Spec

_MAX_TOKENS = 64


@click.command("plan tree")
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
    "--depth",
    type=click.IntRange(1, 64),
    help="Most levels of a draft model's tree [default: those of speculation.tree; for method draft_target "
    "speculation.num_draft_tokens].",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="Prompt file that a draft model is measured on; instead of parity.prompts.",
)
@click.option("--num-prompts", type=click.IntRange(min=1), help="Prompts to take of it [default: parity.num_prompts].")
@click.option("--max-tokens", type=click.IntRange(min=1), help=f"Longest answer to a prompt [default: {_MAX_TOKENS}].")
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
    depth: int | None,
    prompts: Path | None,
    num_prompts: int | None,
    max_tokens: int | None,
    plot: Path | None,
    work_dir: Path,
    as_json: bool,
) -> None:
    """Find the tree with the most expected tokens a target pass, as it is written in the spec.

    Method medusa: as `choices`. How often heads are right is taken from --accuracies, or from acceptance.json beside
    the heads of CONFIG, or measured on the prompts of CONFIG.

    Methods tree and draft_target: as `branching`. How often the draft model is right is measured along the target's own
    greedy answers to the prompts of CONFIG. Nothing needs to be built.
    """
    from trtspec.models.medusa import DEFAULT_CHOICES
    from trtspec.plan.tree import best_tree, chain, draw, expected_tokens

    if (config is None) == (file is None):
        raise click.UsageError("Give CONFIG or --accuracies, one of them.")
    if file is not None and (measure or overrides):
        raise click.UsageError("--measure and --set need CONFIG.")
    spec = None
    if config is not None:
        spec = load(config, (*overrides, *([f"parity.prompts={prompts.resolve()}"] if prompts else [])))
        if spec.speculation.method in ("tree", "draft_target"):
            _plan_draft(spec, nodes, depth, num_prompts, max_tokens or _MAX_TOKENS, plot, as_json)
            return
    of_drafts = {"depth": depth, "prompts": prompts, "num-prompts": num_prompts, "max-tokens": max_tokens}
    if given := [f"--{name}" for name, value in of_drafts.items() if value is not None]:
        raise click.UsageError(f"{', '.join(given)}: only for draft models, that is methods tree and draft_target.")
    found = _read(file) if file is not None else _of_heads(spec, measure, work_dir)  # type: ignore[arg-type]
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


def _plan_draft(
    spec: Spec,
    nodes: int,
    depth: int | None,
    num_prompts: int | None,
    max_tokens: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """The best branching for the draft model of a spec, with what other trees are worth beside it.

    Every level has figures of its own, see `draft_ranks`; ranks behind `NUM_RANKS` count as never right.
    """
    import torch

    from trtspec.build.sources import Sources
    from trtspec.models.pair import check_pair
    from trtspec.plan.draft import draft_ranks
    from trtspec.plan.tree import (
        accuracies_of,
        best_branching,
        best_tree,
        branching_tree,
        chain,
        draw,
        expected_tokens,
        tokens_per_pass,
    )
    from trtspec.runtime.llama import check_family
    from trtspec.spec.schema import Tree
    from trtspec.train.answers import load_target
    from trtspec.train.heads import NUM_RANKS

    method = spec.speculation.method
    now = (spec.speculation.tree or Tree()) if method == "tree" else None
    if now is not None and now.drafts:
        raise TrtspecError(
            f"the trees of {1 + len(now.drafts)} drafts are merged, and plans are for one draft",
            where=spec.where(("speculation", "tree", "drafts")),
            fix="plan for the first one alone: --set speculation.tree.drafts=[]",
        )
    depth = depth or (now.depth if now else spec.speculation.num_draft_tokens)
    sources = Sources(spec)
    target, draft = sources.open("target"), sources.open("draft")
    verdict = check_pair(target, draft)
    if verdict.verdict == "refuse":
        raise TrtspecError(verdict.reasons[0], where=spec.where(("speculation", "draft")), fix="see `trtspec check`")
    check_family(draft.config)
    draft.check()
    _, texts = target_answers(spec, target, num_prompts, max_tokens)
    click.echo(f"measuring {draft.name} along them", err=True)
    model = load_target(draft, getattr(torch, spec.models["draft"].dtype))
    levels = max(depth, now.depth if now else 0)
    ranks = [draft_ranks(model, prompt, answer, levels, target.config.vocab_size) for prompt, answer in texts]
    found = accuracies_of(ranks, NUM_RANKS)
    best = best_branching(found[:depth], nodes)
    if not best:
        where = spec.where(("speculation", "draft"))
        raise TrtspecError("the draft is never right", where=where, fix="take another draft, or more prompts")
    tree, free = branching_tree(best), best_tree(found[:depth], nodes)
    trees: dict[str, list[Node]] = {
        f"branching {list(best)}, {len(tree)} nodes": tree,
        f"a chain of {len(best)}": chain(len(best)),
    }
    if now is not None and now.branching != best:
        trees[f"branching {list(now.branching)} of the spec, {now.num_nodes} nodes"] = branching_tree(now.branching)
    trees[f"the best tree of {len(free)} nodes of any shape, which no branching exceeds"] = free
    expected = {name: expected_tokens(each, found) for name, each in trees.items()}
    walked = {name: tokens_per_pass(each, ranks) for name, each in trees.items()}
    if plot is not None:
        draw(tree, found, plot, f"branching {list(best)}, {expected_tokens(tree, found):.2f} tokens a pass expected")
    if as_json:
        figures = {
            "branching": best,
            "accuracies": found,
            "answer_tokens": sum(len(answer) for _, answer in texts),
            "prompts": len(texts),
            "expected_tokens_per_pass": expected,
            "tokens_per_pass": walked,
        }
        click.echo(json.dumps(figures))
        return
    for level, vector in enumerate(found, 1):
        click.echo(f"# level {level}: ranks right {', '.join(f'{100 * right:.1f}' for right in vector[:5])} %")
    for name, each in trees.items():
        tokens = expected[name]
        gain = "" if each is tree else f"; gained over it: {100 * (expected_tokens(tree, found) / tokens - 1):.0f} %"
        click.echo(f"# {tokens:.2f} tokens a target pass expected, {walked[name]:.2f} along the answers: {name}{gain}")
    click.echo(f"speculation: {{method: tree, tree: {{branching: {list(best)}}}}}")


def _of_heads(spec: Spec, measure: bool, work_dir: Path) -> Accuracies:
    """What the heads of a spec are worth: their own figures, or measured."""
    from trtspec.models.source import locate

    medusa = spec.speculation.medusa
    if spec.speculation.method != "medusa" or medusa is None:
        raise TrtspecError(
            f"method {spec.speculation.method} has no tree that is planned",
            where=spec.where(("speculation", "method")),
            expected="method medusa, tree or draft_target",
            fix="use `trtspec plan exit`" if spec.speculation.method == "early_exit" else None,
        )
    directory = locate(medusa.heads, spec.base_dir, ("*.json", "*.safetensors", "*.pt"))
    recorded = directory / "acceptance.json"
    if recorded.is_file() and not measure:
        return _read(recorded)[: medusa.num_heads]

    from trtspec.models.source import open_model
    from trtspec.plan.tree import accuracies_of
    from trtspec.prompts import read_prompts
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
