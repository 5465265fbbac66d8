"""`trtspec check`: do the models pair, and can this release build them. Reads configs and tokenizers, no weights."""

from __future__ import annotations

from pathlib import Path

import click

from trtspec.cli.common import config_argument, load, set_option
from trtspec.errors import EXIT_ERROR

_WORDS = {"accept": "accept", "accept_with_note": "accept, with a note", "refuse": "refuse"}


@click.command()
@config_argument
@set_option
@click.pass_context
def check(ctx: click.Context, config: Path, overrides: tuple[str, ...]) -> None:
    """Check that the models of CONFIG pair and that this release can build it. Exit code 1 if not."""
    from trtspec.models.pair import check_pair
    from trtspec.models.source import open_model
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

    target = open_model(spec.target.model, gguf_file=spec.target.gguf_file, base_dir=spec.base_dir)
    proposers = {role: ref for role, ref in spec.models.items() if role != "target"}
    if not proposers:
        click.echo(f"pair: method {spec.speculation.method} has no draft model to compare with {target.name}")
    for role, ref in proposers.items():
        draft = open_model(ref.model, gguf_file=ref.gguf_file, base_dir=spec.base_dir, target=target)
        outcome = check_pair(target, draft)
        refused |= outcome.verdict == "refuse"
        click.echo(f"pair: {target.name} with {role} {draft.name}: {_WORDS[outcome.verdict]}")
        for reason in outcome.reasons:
            click.echo(f"  {reason}")
    if refused:
        ctx.exit(EXIT_ERROR)
