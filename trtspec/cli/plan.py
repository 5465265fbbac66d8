"""`trtspec plan`: choose settings of a speculation by what is measured; a module a subcommand, imported when used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from trtspec.models.source import ModelSource
    from trtspec.runtime.llama import Llama
    from trtspec.spec.schema import Spec

# name -> what it does, its module in this package, and the command there
SUBCOMMANDS = {
    "exit": ("After which layer of the target to leave for drafts.", "plan_exit", "exit_"),
    "tree": ("The best token tree of Medusa heads or a draft model for a number of nodes.", "plan_tree", "tree"),
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        _, module, name = SUBCOMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"trtspec.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (text, _, _) in SUBCOMMANDS.items()])


@click.group(cls=_Lazy)
def plan() -> None:
    """Choose settings of a speculation by what is measured."""


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

    from trtspec.parity.prompts import read_prompts, spread
    from trtspec.plan.exit import greedy_answers
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
