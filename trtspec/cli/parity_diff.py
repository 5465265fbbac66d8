"""`trtspec parity diff`: where two traces part."""

from __future__ import annotations

from pathlib import Path

import click

from trtspec.errors import EXIT_PARITY_FAILED, TrtspecError

TRACE = click.Path(path_type=Path, dir_okay=False)


@click.command("parity diff")
@click.argument("a", type=TRACE)
@click.argument("b", type=TRACE)
@click.option("--subject-a", help="Compare only the answers of this subject in A.")
@click.option("--subject-b", help="Compare only the answers of this subject in B.")
@click.option(
    "--ignore",
    multiple=True,
    help="A setting in which queries may differ (repeatable): num_draft_tokens, stream, logits or log_probs.",
)
@click.pass_context
def diff(
    ctx: click.Context, a: Path, b: Path, subject_a: str | None, subject_b: str | None, ignore: tuple[str, ...]
) -> None:
    """Show where the answers in traces A and B part, query by query.

    Returns 0 if all answers to the queries that both have are the same, 3 if some part. Nothing is judged: right
    answers may part at a rounding tie.
    """
    from trtspec.parity.trace import read
    from trtspec.parity.trace_diff import diff as compare

    result = compare(read(a), read(b), (subject_a, subject_b), ignore)
    for line in result.lines():
        click.echo(line)
    if not result.num_common:
        raise TrtspecError("the traces have no query in common", fix="try --ignore num_draft_tokens")
    ctx.exit(EXIT_PARITY_FAILED if result.partings else 0)
