"""`trtspec generate`: stream text from a running server, and say how fast it came and how well drafts were accepted."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec.cli.common import load, set_option

if TYPE_CHECKING:
    from trtspec.triton.client import Client, GenerationStats


@click.command()
@click.argument("prompt")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Spec file whose server is asked, wherever it listens; instead of --url.",
)
@set_option
@click.option("--url", help="host:port of the server's gRPC [default: 127.0.0.1:8001].")
@click.option("-n", "--max-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Longest answer.")
@click.option("--min-tokens", type=click.IntRange(min=0), help="Shortest answer.")
@click.option("-t", "--temperature", type=click.FloatRange(min=0), help="0 or unset is greedy.")
@click.option("--top-k", type=click.IntRange(min=0), help="Sample among the k likeliest tokens; 0 is off.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Sample within this probability mass.")
@click.option("--repetition-penalty", type=click.FloatRange(min=0, min_open=True))
@click.option("--presence-penalty", type=float)
@click.option("--frequency-penalty", type=float)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="The same seed gives the same text again.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text (repeatable).")
@click.option("--bad-word", "bad_words", multiple=True, metavar="TEXT", help="Never generate this (repeatable).")
@click.option("--num-draft-tokens", type=click.IntRange(min=0), help="Draft tokens a cycle; 0 decodes plainly.")
@click.option("--system", metavar="TEXT", help="System message before the prompt.")
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without the model's chat template.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Longest wait for the whole answer, in seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line at the end instead of the text.")
def generate(
    prompt: str,
    config: Path | None,
    overrides: tuple[str, ...],
    url: str | None,
    system: str | None,
    raw: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Send PROMPT (- reads it from standard input) to a running server and stream the answer.

    The text goes to standard output, the figures to standard error.
    """
    from trtspec.triton.client import DEFAULT_URL, Client

    if config and url:
        raise click.UsageError("--config and --url both say where the server is; give one")
    if raw and system is not None:
        raise click.UsageError("--system needs the chat template that --raw leaves out")
    prompt = sys.stdin.read() if prompt == "-" else prompt
    if not prompt:
        raise click.BadParameter("is empty", param_hint="PROMPT")
    with Client(_url_of(config, overrides) if config else url or DEFAULT_URL) as client:
        text = prompt if raw else _chat_prompt(client, prompt, system)
        pieces, stats = [], None
        for chunk in client.generate(text, **settings):
            pieces.append(chunk.text)
            stats = chunk.stats
            if not as_json:
                click.echo(chunk.text, nl=False)
                sys.stdout.flush()
    assert stats is not None
    if as_json:
        click.echo(json.dumps({"text": "".join(pieces), **_figures(stats)}, ensure_ascii=False))
    else:
        click.echo()
        click.echo(_summary(stats), err=True)


def _url_of(config: Path, overrides: tuple[str, ...]) -> str:
    """Where the server of a spec listens: where it was really started, else where the spec says."""
    from trtspec.triton.server import state_dir_of
    from trtspec.triton.server_state import connect_host, running

    spec = load(config, overrides)
    state = running(state_dir_of(spec))
    return state.grpc_url if state else f"{connect_host(spec.serving.host)}:{spec.serving.grpc_port}"


def _chat_prompt(client: Client, prompt: str, system: str | None) -> str:
    """The prompt in the model's own chat template; as it is, with a word about it, where the model has none."""
    from trtspec.models.tokenizer import render_chat

    info = client.info()
    if info.chat_template is None and system is None:
        click.echo("note: the model has no chat template; the prompt is sent as it is", err=True)
        return prompt
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return render_chat(info.chat_template, messages, True, **info.special_tokens)


def _figures(stats: GenerationStats) -> dict[str, Any]:
    derived = {
        "tokens_per_second": stats.tokens_per_second,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_length": stats.acceptance_length,
    }
    return asdict(stats) | derived


def _summary(stats: GenerationStats) -> str:
    first = "" if stats.seconds_to_first_text is None else f", first text after {stats.seconds_to_first_text:.2f} s"
    speed = f"{stats.tokens} tokens in {stats.seconds:.2f} s: {stats.tokens_per_second:.1f} tokens/s{first}"
    if not stats.drafted:
        return f"{speed}; no drafts"
    return (
        f"{speed}; acceptance rate {stats.acceptance_rate:.2f} ({stats.accepted} of {stats.drafted} draft tokens), "
        f"acceptance length {stats.acceptance_length:.2f} tokens per target pass"
    )
