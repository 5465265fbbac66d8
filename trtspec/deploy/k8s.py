"""Kubernetes manifests of a spec: build Jobs on a shared volume, and the server, on one host a replica or on several.

Knows what the objects must say, which the templates in `manifests/` say in full, and takes what the container is
started with from where docker compose takes it. Talks to no cluster and schedules nothing.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from trtspec import __version__
from trtspec.build.output import explained, staging_dir, swap_in
from trtspec.deploy import ranks
from trtspec.deploy.hosts import PRODUCTS, ranks_of_hosts, sizes_of
from trtspec.errors import TrtspecError
from trtspec.models.source import PACKAGE_PREFIX
from trtspec.spec.schema import Spec
from trtspec.triton import compose, launch
from trtspec.triton.container import image_of, launch_options
from trtspec.trtllm.support import require_buildable

_TEMPLATES = Path(__file__).with_name("manifests")
_PROBE = Path(__file__).with_name("probe.py")  # not imported: it is at home in a pod
_SCRIPTS = "/opt/trtspec"  # where the compose file has the launcher
_VOLUME = "/data"
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_NAME = 40  # pods add their numbers and hashes, and 63 is the end
_EVERY_ADDRESS = [f"--{service}-address=0.0.0.0" for service in ("http", "grpc", "metrics")]
_BUSY_PART = 0.75  # of the texts that a server works on at the same time, at which one more is started
_LOCAL_KEYS = {"model", "heads", "drafter", "prompts"}  # of a spec, that may name something on this machine
_SERVER = ("configmap", "service", "poddisruptionbudget", "networkpolicy", "podmonitor")
_BUILD = ("persistentvolumeclaim", "configmap", "networkpolicy", "job")


@dataclass(frozen=True)
class Options:
    """What the cluster decides.

    Attributes:
        namespace: of all objects; None: whatever kubectl is set to.
        image: with trtspec in it, for the builds.
        storage_class: of the volume; None: the cluster's default.
        storage_size: of the volume, as Kubernetes writes it; None: from the sizes of the models.
        min_replicas, max_replicas: servers; equal: no autoscaler.
    """

    namespace: str | None = None
    image: str = f"trtspec:{__version__}"
    storage_class: str | None = None
    storage_size: str | None = None
    min_replicas: int = 1
    max_replicas: int = 2


def manifests(spec: Spec, options: Options) -> dict[str, str]:
    """File -> text, the same for the same spec and options.

    Raises:
        TrtspecError: a spec that no cluster can serve, or a name that Kubernetes does not take.
    """
    _require_gpus(spec)
    _require_name(spec.name, "name", spec.where(("name",)), f"--set name={_as_name(spec.name)}", _MAX_NAME)
    if options.namespace is not None:
        _require_name(options.namespace, "namespace", "--namespace", f"--namespace {_as_name(options.namespace)}", 63)
    require_buildable(spec)
    values = _values(spec, options)
    names = [*_SERVER, "deployment" if spec.hardware.num_nodes == 1 else "leaderworkerset"]
    names += ["horizontalpodautoscaler"] if options.max_replicas > options.min_replicas else []
    files = {f"build/{name}.yaml": _render(f"build_{name}", values) for name in _BUILD}
    files |= {f"{name}.yaml": _render(name, values) for name in names}
    files["build/kustomization.yaml"] = _render("build_kustomization", values | {"files": sorted(_BUILD)})
    files["kustomization.yaml"] = _render("kustomization", values | {"files": sorted(names)})
    return dict(sorted(files.items()))


def write(files: dict[str, str], out: Path) -> None:
    """Write all files into a directory, or none of them; those of an earlier run are replaced.

    Raises:
        TrtspecError: the directory holds other files, or cannot be written.
    """
    with explained(out):
        require_own(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = staging_dir(out.absolute())
        staged = staging / out.absolute().name
        for name, text in files.items():
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            (staged / name).write_text(text, encoding="utf-8")
        swap_in(out.absolute())


def require_own(out: Path) -> None:
    """Refuse a directory with files that are not manifests of this command.

    Raises:
        TrtspecError: it holds another file, or is a file.
    """
    if out.exists() and not out.is_dir():
        raise TrtspecError("is a file", where=str(out), expected="a directory", fix="choose another --out")
    known = {f"{path.name.removesuffix('.j2')}" for path in _TEMPLATES.glob("[!_]*.yaml.j2")}
    known = {f"build/{name.removeprefix('build_')}" if name.startswith("build_") else name for name in known}
    found = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir())
    if other := [name for name in found if name not in known]:
        raise TrtspecError(
            f"holds files that this command has not written: {', '.join(other[:3])}",
            where=str(out),
            expected="an empty directory, none, or the manifests of an earlier run",
            fix="choose another --out, or move them away",
        )


def _require_gpus(spec: Spec) -> None:
    if spec.engine.runtime != "tensorrt_llm" or spec.hardware.gpu == "cpu":
        key = ("hardware", "gpu") if spec.hardware.gpu == "cpu" else ("engine", "runtime")
        raise TrtspecError(
            "a cluster serves engines of TensorRT-LLM on GPUs",
            where=spec.where(key),
            expected="engine.runtime: tensorrt_llm, and hardware.gpu: one of " + ", ".join(PRODUCTS),
            fix="change both, or serve here with trtspec serve",
        )


def _require_name(name: str, what: str, where: str, fix: str, longest: int) -> None:
    if len(name) > longest or not _NAME.fullmatch(name):
        raise TrtspecError(
            f"{name!r} is no {what} for Kubernetes",
            where=where,
            expected=f"a letter, then letters, digits and dashes, all small, at most {longest}",
            fix=f"write {fix}",
        )


def _as_name(text: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:_MAX_NAME].strip("-")
    return name or "server"


def _values(spec: Spec, options: Options) -> dict[str, Any]:
    """The names that the templates use."""
    slots = ranks_of_hosts(spec)
    serve, num_gpus = launch_options(spec)
    several = len(slots) > 1
    if several and "--gpus" in serve:  # they are counted over all hosts there
        at = serve.index("--gpus")
        serve = serve[:at] + serve[at + 2 :]
    service = yaml.safe_load(compose.FILE.read_text(encoding="utf-8"))["services"][compose.SERVICE]
    start = [*shlex.split(service["command"])[:2], *serve, "--", *_EVERY_ADDRESS]
    timeout = f"{spec.serving.startup_timeout_s:g}"
    lead = ["python3", f"{_SCRIPTS}/ranks.py", "lead", "--slots", ",".join(map(str, slots)), "--timeout", timeout, "--"]
    scripts = [Path(launch.__file__), _PROBE, *([Path(ranks.__file__)] if several else [])]
    texts = {path.name: path.read_text(encoding="utf-8") for path in scripts}
    content, inputs = _cluster_spec(spec)
    sizes = sizes_of(spec)
    return {
        "name": spec.name,
        "options": options,
        "in_namespace": f" -n {options.namespace}" if options.namespace else "",
        "spec": spec,
        "sizes": sizes,
        "storage_size": options.storage_size or f"{sizes.storage_gb}G",
        "image": image_of(spec),
        "environment": dict(sorted(service["environment"].items())),
        "start": [*(lead if several else []), *start],
        "work": ["python3", f"{_SCRIPTS}/ranks.py", "work"],
        "probe": ["python3", f"{_SCRIPTS}/probe.py", *(["--llmapi"] if spec.engine.track == "llmapi" else [])],
        # A leader waits for its workers first, no longer than for the server.
        "startup_probes": math.ceil((1 + several) * spec.serving.startup_timeout_s / 10) + 1,
        "num_hosts": len(slots),
        "num_gpus": spec.hardware.num_gpus if several else num_gpus,
        "build_gpus": 0
        if spec.engine.track == "llmapi"
        else min(spec.hardware.num_gpus, sum(ref.world_size for ref in spec.models.values())),
        "products": PRODUCTS[spec.hardware.gpu],
        "metric": "nv_inference_pending_request_count"
        if spec.engine.track == "llmapi"
        else "trtspec_requests_in_flight",
        "busy": max(1, math.floor(_BUSY_PART * spec.serving.max_concurrency)),
        "volume": _VOLUME,
        "scripts": _SCRIPTS,
        "texts": texts,
        "digest": sha256("".join(texts.values()).encode()).hexdigest()[:16],
        "config": yaml.safe_dump(content, sort_keys=False, width=100),
        "inputs": inputs,
        "packages": sorted({ref.model for ref in spec.models.values() if ref.model.startswith(PACKAGE_PREFIX)}),
        "ranks_key": ranks.KEY,
    }


def _cluster_spec(spec: Spec) -> tuple[dict[str, Any], dict[str, str]]:
    """The spec as the builds read it, and what of this machine must be on the volume: path here -> path there."""
    inputs: dict[str, str] = {}

    def moved(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: moved(entry, name) for name, entry in value.items()}
        if isinstance(value, list):
            return [moved(entry) for entry in value]
        if key in _LOCAL_KEYS and isinstance(value, str) and (here := spec.path(value)).exists():
            taken = {there for path, there in inputs.items() if path != value}
            there = f"{_VOLUME}/inputs/{here.name}"
            inputs[value] = f"{there}-{len(taken)}" if there in taken else there
            return inputs[value]
        return value

    content = moved(spec.resolved())
    content["output"] = {"engines": f"{_VOLUME}/engines", "model_repo": f"{_VOLUME}/model_repo"}
    return content, inputs


def _render(name: str, values: dict[str, Any]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["block"] = lambda text, width: indent(text.rstrip("\n"), " " * width).lstrip(" ")
    environment.filters["q"] = lambda value: json.dumps(value, ensure_ascii=False)
    text: str = environment.get_template(f"{name}.yaml.j2").render(values)
    return text
