"""What the commands share that can be dealt out over processes, by hand or over a Slurm cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from trtspec.cluster.slurm import Options
    from trtspec.shard import Shard
    from trtspec.spec.schema import Spec

F = TypeVar("F", bound=Callable[..., Any])
_OF_JOBS = ("partition", "account", "time_limit", "slurm_options", "cancel")


def slurm_options(command: F) -> F:
    """The options about jobs, as parameters `partition`, `account`, `time_limit`, `slurm_options` and `cancel`."""
    options = (
        click.option("--partition", help="Slurm: partition of the jobs."),
        click.option("--account", help="Slurm: account that the jobs are charged to."),
        click.option("--time", "time_limit", metavar="LIMIT", help="Slurm: time limit of each job, such as 2:00:00."),
        click.option(
            "--slurm-option",
            "slurm_options",
            metavar="KEY=VALUE",
            multiple=True,
            help="Slurm: another option of sbatch for the jobs (repeatable), such as mem=64G or gres=gpu:h100:2.",
        ),
        click.option("--cancel", is_flag=True, help="Slurm: end the jobs of this command; what is finished is kept."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def spreading_options(command: F) -> F:
    """The options of dealing out, given to the command as one parameter `spreading`."""

    def called(*positional: Any, **given: Any) -> Any:
        spreading = Spreading(**{name: given.pop(name) for name in Spreading.__dataclass_fields__})
        return command(*positional, spreading=spreading, **given)

    result: Any = update_wrapper(called, command)
    options = (
        click.option("--shard", metavar="I/N", help="Record this part alone, into --shards: part I of N."),
        click.option(
            "--shards",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="DIR",
            help="Without --shard: take what shards have recorded here, and do what is missing.",
        ),
        click.option(
            "--executor",
            type=click.Choice(("local", "slurm")),
            default="local",
            show_default=True,
            help="Where it runs: here, or as an array of jobs on a Slurm cluster, and a last one that merges. The same "
            "command again follows jobs that are under way.",
        ),
        click.option("--num-shards", type=click.IntRange(min=1), help="Slurm: jobs of the array."),
        slurm_options,
    )
    for option in reversed(options):
        result = option(result)
    return cast(F, result)


@dataclass(frozen=True)
class Spreading:
    """What the user says about dealing out; the options of these names."""

    shard: str | None
    shards: Path | None
    executor: str
    num_shards: int | None
    partition: str | None
    account: str | None
    time_limit: str | None
    slurm_options: tuple[str, ...]
    cancel: bool

    def check(self) -> None:
        """Raise UsageError for options that do not go together."""
        if self.shard and not self.shards:
            raise click.UsageError("--shard needs --shards, the directory that it is recorded into")
        if self.executor == "local":
            if self.num_shards or any(getattr(self, name) for name in _OF_JOBS):
                names = "--num-shards, --partition, --account, --time, --slurm-option and --cancel"
                raise click.UsageError(f"{names} need --executor slurm")
        elif self.shard:
            raise click.UsageError("--shard does one part here; it does not go with --executor slurm")
        elif not (self.num_shards or self.cancel):
            raise click.UsageError("--executor slurm needs --num-shards, the number of jobs that it is dealt out over")

    @property
    def part(self) -> Shard | None:
        """The shard to record here.

        Raises:
            TrtspecError: not I/N.
        """
        from trtspec.shard import Shard

        return Shard.parse(self.shard) if self.shard else None

    def run_on_slurm(
        self, spec: Spec, prompts: Path, name: str, directory: Path, num_gpus: int, of_merge: Collection[str] = ()
    ) -> None:
        """Run the command at hand with these options as jobs, show what the last one prints, and exit with its code.

        Args:
            spec: whose GPUs the jobs ask for.
            prompts: file of the prompts.
            name: of the jobs.
            directory: for shards, scripts and logs; where `shards` is not given.
            num_gpus: of each job.
            of_merge: parameters of the command that only the last job is given.

        Raises:
            TrtspecError: see `cluster.spread.run`.
        """
        from trtspec.build.fingerprint import digest, digest_file
        from trtspec.build.progress import Lines, observer
        from trtspec.cluster import slurm
        from trtspec.cluster import spread as cluster

        directory = (self.shards or directory).resolve()
        if self.cancel:
            cluster.cancel(directory, click.echo)
            return
        num, options = self.num_shards or 1, self._options()
        context, ours = click.get_current_context(), set(Spreading.__dataclass_fields__)
        begin, into = [sys.executable, "-m", "trtspec"], ["--shards", str(directory)]
        shard = [*begin, *words_of(context, ours | set(of_merge)), *into, "--shard"]
        gpus = ""
        if spec.hardware.gpu != "cpu":
            slurm.check(options)
            gpus = slurm.gpu_request(spec.hardware.gpu, num_gpus, options.partition)
        spread = cluster.Spread(
            shards=[[*shard, f"{number}/{num}"] for number in range(1, num + 1)],
            merge=[*begin, *words_of(context, ours), *into],
            directory=directory,
            name=name,
            gpus=gpus,
            made_of="" if self.shards else digest([spec.hash(), digest_file(prompts), shard]),
        )
        say = partial(click.echo, err=True)
        with observer(True) if sys.stdout.isatty() else nullcontext(Lines(say)) as watching:
            code, out = cluster.run(spread, options, watching, say)
        click.echo(out, nl=False)
        context.exit(code)

    def _options(self) -> Options:
        from trtspec.cluster.slurm import Options, parse_options

        return Options(self.partition, self.account, self.time_limit, parse_options(self.slurm_options))


def words_of(context: click.Context, but: Collection[str] = ()) -> list[str]:
    """The words that call the command at hand as the user has called it, but for some parameters."""
    words = (context.info_name or "").split()
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in but or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        values = value if isinstance(value, tuple) else [value]
        if isinstance(parameter, click.Argument):
            words += map(str, values)
        elif getattr(parameter, "is_flag", False):
            words += parameter.opts[:1]
        else:
            words += [f"{parameter.opts[0]}={each}" for each in values]
    return words
