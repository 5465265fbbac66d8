"""The command line. Commands are imported when they are called, so that `trtspec --help` stays fast.

Knows the names of the commands and how errors are shown; each command lives in its own module. Nothing imports this
package.
"""

from __future__ import annotations

import errno
import importlib
import traceback
from difflib import get_close_matches
from typing import Any

import click

from trtspec import __version__
from trtspec.errors import EXIT_ERROR, EXIT_INTERRUPTED, TrtspecError

# name -> what it does; the command object is trtspec.cli.<name>:<name>, of two words trtspec.cli.<both>:<second>.
COMMANDS = {
    "config": "Write, validate and show spec files.",
    "check": "Check that target and draft pair and that this release can build the spec.",
    "build": "Build engines and the Triton model repository.",
    "serve": "Start the Triton server on a built repository.",
    "stop": "Stop a server started with serve --detach.",
    "generate": "Stream text from a running server.",
    "parity": "Check checkpoints, engines and server against the reference sampler.",
    "parity diff": "Show where the answers in two traces part.",
    "parity replay": "Judge a trace again, without models.",
    "inspect": "Say what an engine or a checkpoint is, and whether it fits this host and its partner.",
    "doctor": "Check driver, GPUs, container, versions, disk and ports of this host.",
    "plan": "Say whether it pays, with how many draft tokens, what fits, and where plain decoding wins.",
    "plan calibrate": "Measure what passes of the models take on this machine.",
    "plan tree": "Find the best token tree of Medusa heads or a draft model.",
    "plan exit": "Find the layer of the target to leave after for drafts.",
    "bench acceptance": "Measure on your prompts what every draft length, tree and cascade accepts.",
    "bench serve": "Load a running server, with speculation and without, and report its times.",
    "deploy k8s": "Write Kubernetes manifests that build and serve a spec.",
    "deploy slurm": "Write an sbatch script that serves over several GPUs or nodes.",
    "rollout": "Bring a new build into the running server without a gap.",
    "rollback": "Let the version before serve again.",
    "migrate": "Turn a spec for compiled engines into one for the LLM API.",
    "train": "Train draft models and Medusa heads.",
}


class LazyGroup(click.Group):
    """A group that imports a command when it is called, and turns every error into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"trtspec.cli.{cmd_name.replace(' ', '_')}"), cmd_name.split()[-1])
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if " ".join(args[:2]) in COMMANDS:
            args = [" ".join(args[:2]), *args[2:]]
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" Commands: {', '.join(COMMANDS)}."
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click shows these itself
        except (Exception, KeyboardInterrupt) as error:
            if ctx.params.get("debug"):
                traceback.print_exception(error)
            for line in _message(error).splitlines():
                click.echo(f"error: {line}", err=True)
            code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", EXIT_ERROR)
        ctx.exit(code)


def _message(error: BaseException) -> str:
    """What an exception means to the user: one line, or one for each problem of a TrtspecError."""
    if isinstance(error, TrtspecError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    place = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{place}no space left on the disk; free some and run again"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{place}no permission ({error.strerror}); choose another place or change its permissions"
    if place:
        return f"{place}{getattr(error, 'strerror', error)}"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("trtspec"):
        return f"the Python package {error.name} is not installed; install the extra that holds it (see README)"
    message = " ".join(str(error).split())
    return f"internal error: {type(error).__name__}: {message}; run with trtspec --debug for the traceback"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.version_option(__version__, prog_name="trtspec", message="%(prog)s %(version)s")
def main(debug: bool) -> None:
    """Build, serve and check speculative decoding on TensorRT-LLM and Triton, from one YAML file."""
