"""`trtspec check`: do the models pair, and can this release build them. Reads configs and tokenizers, no weights."""

from __future__ import annotations

from pathlib import Path

import click

from trtspec.cli.common import config_argument, load, set_option
from trtspec.errors import EXIT_ERROR, TrtspecError

_WORDS = {"accept": "accept", "accept_with_note": "accept, with a note", "refuse": "refuse"}


@click.command()
@config_argument
@set_option
@click.pass_context
def check(ctx: click.Context, config: Path, overrides: tuple[str, ...]) -> None:
    """Check that the models of CONFIG pair and that this release can build it. Exit code 1 if not."""
    from trtspec.build.sources import Sources
    from trtspec.build.steps import check_plan
    from trtspec.models.pair import check_pair
    from trtspec.spec import rules
    from trtspec.trtllm import support

    spec = load(config, overrides)
    problems = support.check_support(spec)
    refused = bool(problems)
    for note in (*rules.remarks(spec), *support.remarks(spec)):
        click.echo(f"note: {note}")
    click.echo(f"support: {'refuse' if problems else 'accept'}")
    for problem in problems:
        click.echo(f"  {support.describe(spec, problem)}")

    sources = Sources(spec)
    target = sources.open("target")
    if not spec.pairs:
        click.echo(f"pair: method {spec.speculation.method} has no draft model to compare with {target.name}")
    for verifier, role in spec.pairs:
        draft = sources.open(role)
        outcome = check_pair(sources.open(verifier), draft, verifier=verifier)
        refused |= outcome.verdict == "refuse"
        if verifier != "target":  # what else there is to say of it was said beside the target
            if outcome.verdict == "refuse":
                click.echo(f"pair: {verifier} with {role} {draft.name}: refuse\n  {outcome.reasons[0]}")
            continue
        click.echo(f"pair: {target.name} with {role} {draft.name}: {_WORDS[outcome.verdict]}")
        for reason in outcome.reasons:
            click.echo(f"  {reason}")
    if not refused:
        try:
            check_plan(spec)
        except TrtspecError as refusal:
            refused = True
            click.echo(f"plan: refuse\n  {refusal}")
        else:
            click.echo("plan: accept")
    if refused:
        ctx.exit(EXIT_ERROR)
