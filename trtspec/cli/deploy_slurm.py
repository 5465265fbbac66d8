"""`trtspec deploy slurm`: write the job that serves a built spec over one node or several."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from trtspec.cli.common import config_argument, load, set_option


@click.command("deploy slurm")
@config_argument
@set_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory to write to, which all nodes see [default: deploy/slurm/NAME].",
)
@click.option("--partition", help="Partition of the job.")
@click.option("--account", help="Account that the job is charged to.")
@click.option("--time", "time_limit", metavar="LIMIT", help="Time limit of the job, such as 7-00:00:00.")
@click.option(
    "--slurm-option", "slurm_options", metavar="KEY=VALUE", multiple=True, help="Another option of sbatch (repeatable)."
)
@click.option("--mpi", default="pmix", show_default=True, help="How srun connects the ranks (srun --mpi=list).")
@click.option("--no-container", is_flag=True, help="Run in the job's own environment instead of the spec's image.")
@click.option("--dry-run", is_flag=True, help="Print the files; write nothing.")
def slurm(
    config: Path,
    overrides: tuple[str, ...],
    out: Path | None,
    partition: str | None,
    account: str | None,
    time_limit: str | None,
    slurm_options: tuple[str, ...],
    mpi: str,
    no_container: bool,
    dry_run: bool,
) -> None:
    """Write an sbatch script that serves what was built from CONFIG, with a leader and a rank for every further GPU.

    Slurm starts the ranks; the image needs no ssh. On a cluster the GPUs are asked for by the name that nodes have.
    """
    from trtspec.build.output import explained, write_atomic
    from trtspec.cluster.serving import SCRIPT, serving_files
    from trtspec.cluster.slurm import Options, gpu_request, parse_options

    spec = load(config, overrides)
    options = Options(partition, account, time_limit, parse_options(slurm_options))
    num = spec.hardware.num_gpus
    named = {"gres", "gpus", "gpus-per-node"} & set(options.more)
    gpus = f"gpu:{num}" if named or not shutil.which("sinfo") else gpu_request(spec.hardware.gpu, num, partition)
    files = serving_files(spec, options, gpus, mpi=mpi, container=not no_container)
    if dry_run:
        for name in (name for name in files if not name.endswith(".py")):
            click.echo(f"# {name}\n{files[name]}")
        return
    directory = out or Path("deploy/slurm") / spec.name
    with explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomic(directory / name, text)
    click.echo(f"wrote {directory}; start it: cd {directory} && sbatch {SCRIPT}")
