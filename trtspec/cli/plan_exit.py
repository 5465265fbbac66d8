"""`trtspec plan exit`: after which layer of the target to leave for drafts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trtspec.cli.common import config_argument, load, set_option, target_answers
from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.plan.exit import EarlyExit
    from trtspec.runtime.llama import Llama


@click.command("plan exit")
@config_argument
@set_option
@click.option("--layers", metavar="N,N,..", help="Exits to try, in layers [default: every one].")
@click.option(
    "--num-prompts", type=click.IntRange(min=1), help="Prompts of parity.prompts [default: parity.num_prompts]."
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Longest answer.")
@click.option("--max-draft-tokens", type=click.IntRange(1, 64), default=8, show_default=True, help="Most draft tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def exit(
    config: Path,
    overrides: tuple[str, ...],
    layers: str | None,
    num_prompts: int | None,
    max_tokens: int,
    max_draft_tokens: int,
    as_json: bool,
) -> None:
    """Measure what each early exit of the target of CONFIG proposes along its own greedy answers, and pick one.

    Nothing needs to be built. The speed-up is modelled: time goes with the weights that are read.
    """
    from trtspec.models.source import open_model
    from trtspec.plan.exit import exit_matches, judge

    spec = load(config, overrides)
    source = open_model(spec.target.model, gguf_file=spec.target.gguf_file, base_dir=spec.base_dir)
    exits = _exits(layers, source.config.num_hidden_layers)
    model, texts = target_answers(spec, source, num_prompts, max_tokens)
    click.echo(f"leaving after {len(exits)} layers", err=True)
    matches = [exit_matches(model, prompt, answer, exits) for prompt, answer in texts]
    judged = [judge(source.config, layer, [text[layer] for text in matches], max_draft_tokens) for layer in exits]
    best = max(judged, key=lambda each: each.speed_up)
    pays = best.speed_up > 1.0
    experts = _experts(model, [prompt + answer for prompt, answer in texts], best.num_draft_tokens + 1)
    if as_json:
        figures = {
            "num_layers": source.config.num_hidden_layers,
            "prompts": len(texts),
            "answer_tokens": sum(len(answer) for _, answer in texts),
            "exits": [asdict(each) for each in judged],
            "best": asdict(best) if pays else None,
            "experts": experts,
        }
        click.echo(json.dumps(figures))
        return
    for each in judged:
        click.echo(_line(each, source.config.num_hidden_layers))
    if experts:
        click.echo(
            f"{experts['tokens']} tokens touch {experts['measured']:.1f} of {source.config.num_experts} experts a layer"
            f" ({experts['bound']:.1f} if they chose independently, which the speed-up assumes)"
        )
    if not pays:
        click.echo("no early exit pays: each costs more than it saves; a draft model or n-gram look-up may")
        return
    click.echo(f"best: after layer {best.layer}, {best.num_draft_tokens} draft tokens; in the spec:")
    click.echo(
        f"speculation: {{method: early_exit, num_draft_tokens: {best.num_draft_tokens}, "
        f"early_exit: {{layer: {best.layer}}}}}"
    )


def _exits(layers: str | None, num_layers: int) -> list[int]:
    """The exits to try.

    Raises:
        TrtspecError: not numbers of layers, or not inside the model.
    """
    if layers is None:
        return list(range(1, num_layers))
    try:
        exits = sorted({int(part) for part in layers.split(",")})
    except ValueError as error:
        raise TrtspecError(f"{layers!r} is no list of layers", where="--layers", expected="such as 4,8,12") from error
    if not 1 <= exits[0] <= exits[-1] < num_layers:
        raise TrtspecError(
            f"{layers} is not inside the model", where="--layers", expected=f"layers from 1 to {num_layers - 1}"
        )
    return exits


def _experts(model: Llama, texts: list[list[int]], num_tokens: int) -> dict[str, float] | None:
    """Experts a layer that a verification touches: counted, and the bound; None for a dense model."""
    from trtspec.plan.experts import experts_touched, measured_experts

    config = model.config
    if not config.num_experts:
        return None
    return {
        "tokens": num_tokens,
        "measured": measured_experts(model, texts, num_tokens),
        "bound": experts_touched(config.num_experts, config.num_experts_per_token, num_tokens),
    }


def _line(each: EarlyExit, num_layers: int) -> str:
    return (
        f"after layer {each.layer:>3} of {num_layers}: next token right {100 * each.right:5.1f} %, with "
        f"{each.num_draft_tokens} draft tokens {100 * each.acceptance_rate:5.1f} % accepted, "
        f"{each.tokens_per_pass:.2f} tokens a pass; draft step {each.cost:.2f}, modelled speed-up {each.speed_up:.2f}"
    )
