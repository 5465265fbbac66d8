"""`trtspec deploy k8s`: write or print the Kubernetes manifests of a spec."""

from __future__ import annotations

import re
from pathlib import Path

import click

from trtspec.cli.common import config_argument, load, set_option

_QUANTITY = re.compile(r"[1-9]\d*(\.\d+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")


def _replicas(context: click.Context, option: click.Parameter, value: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,3})(?::([1-9]\d{0,3}))?", value)
    if not match:
        raise click.BadParameter(f"{value!r} is not like 2 or 1:4")
    first = int(match[1])
    last = int(match[2] or first)
    if last < first:
        raise click.BadParameter(f"{value!r}: the second number is the larger one, as in {last}:{first}")
    return first, last


def _size(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is not None and not _QUANTITY.fullmatch(value):
        raise click.BadParameter(f"{value!r} is no size; expected one such as 500Gi")
    return value


@click.command("deploy k8s")
@config_argument
@set_option
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=True), help="Directory to write.")
@click.option("--dry-run", is_flag=True, help="Print the files; write nothing.")
@click.option("--namespace", metavar="NAME", help="Namespace of all objects [default: that of kubectl].")
@click.option("--image", metavar="IMAGE", help="Image of docker/Dockerfile, for the builds [default: trtspec:VERSION].")
@click.option("--storage-class", metavar="NAME", help="Storage class of the shared volume [default: the cluster's].")
@click.option(
    "--storage-size", metavar="SIZE", callback=_size, help="Its size, such as 500Gi [default: from the models]."
)
@click.option(
    "--replicas",
    metavar="MIN:MAX",
    default="1:2",
    show_default=True,
    callback=_replicas,
    help="Servers, for the autoscaler; one number writes none.",
)
def k8s(
    config: Path,
    overrides: tuple[str, ...],
    out: Path,
    dry_run: bool,
    namespace: str | None,
    image: str | None,
    storage_class: str | None,
    storage_size: str | None,
    replicas: tuple[int, int],
) -> None:
    """Write Kubernetes manifests that build and serve CONFIG, for `kubectl apply -k`.

    Build jobs on a shared volume; the server as a Deployment, or as a LeaderWorkerSet where its target needs several
    hosts; Service, probes, disruption budget, autoscaler, PodMonitor and network policies. No cluster is asked.
    """
    from trtspec.deploy.k8s import Options, manifests, require_own, write

    given = {"image": image} if image else {}
    options = Options(
        namespace=namespace,
        storage_class=storage_class,
        storage_size=storage_size,
        min_replicas=replicas[0],
        max_replicas=replicas[1],
        **given,
    )
    files = manifests(load(config, overrides), options)
    if dry_run:
        require_own(out)
        for name, text in files.items():
            click.echo(f"---\n# {out / name}\n{text}", nl=False)
        return
    write(files, out)
    click.echo(f"wrote {len(files)} files to {out}; its kustomization.yaml says how to go on")
