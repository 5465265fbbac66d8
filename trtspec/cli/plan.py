"""`trtspec plan`: choose settings of a speculation by what is measured; a module a subcommand, imported when used."""

from __future__ import annotations

import importlib

import click

# name -> what it does, its module in this package, and the command there
SUBCOMMANDS = {
    "exit": ("After which layer of the target to leave for drafts.", "plan_exit", "exit_"),
    "tree": ("The best token tree of Medusa heads for a number of nodes.", "plan_tree", "tree"),
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
