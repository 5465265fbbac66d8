"""What the commands share: the CONFIG argument and `--set`. Knows click; imports the spec only when one is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from trtspec.models.source import ModelSource
    from trtspec.runtime.llama import Llama
    from trtspec.spec.schema import Spec

config_argument = click.argument("config", type=click.Path(path_type=Path))
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override one value of the spec (repeatable), such as --set speculation.num_draft_tokens=6.",
)


def load(config: Path, overrides: tuple[str, ...] = ()) -> Spec:
    """The validated spec in `config` with `overrides` applied.

    Raises:
        TrtspecError: the file or an override is wrong.
    """
    from trtspec.spec.load import load_spec

    return load_spec(config, overrides)


def target_answers(
    spec: Spec, source: ModelSource, num_prompts: int | None, max_tokens: int
) -> tuple[Llama, list[tuple[list[int], list[int]]]]:
    """The target of a spec, and (prompt, answer) of its greedy answers to the spec's prompts.

    Args:
        source: the target.
        num_prompts: how many, spread over the file; None: parity.num_prompts.
        max_tokens: longest answer.

    Raises:
        TrtspecError: no prompts, or a model that is damaged or that the torch runtime does not run.
    """
    import torch

    from trtspec.plan.exit import greedy_answers
    from trtspec.prompts import read_prompts, spread
    from trtspec.runtime.llama import check_family
    from trtspec.train.answers import load_target
    from trtspec.train.generate import prompt_ids
    from trtspec.train.prompts import Prompt

    check_family(source.config)
    source.check()
    prompts = spread(read_prompts(spec.prompts_path), num_prompts or spec.parity.num_prompts)
    chats = source.chat_template is not None
    ids = [
        prompt_ids(Prompt("plan", ({"role": "user", "content": each.text},) if chats else (), each.text), source)
        for each in prompts
    ]
    model = load_target(source, getattr(torch, spec.target.dtype))
    click.echo(f"answering {len(ids)} prompts", err=True)
    return model, greedy_answers(model, ids, max_tokens, source.config.eos_token_ids)
