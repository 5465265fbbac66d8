"""Whether this machine can do what trtspec does: convert, compile, serve. Each check says what it found and what to do.

Knows what TensorRT-LLM and the containers ask of a host. Starts and changes nothing; every question to another program
has a deadline. A lack is a problem only where a spec needs the thing on this very machine, else a warning.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtspec.errors import TrtspecError
from trtspec.runtime.engine import version_numbers
from trtspec.spec.gpus import GPUS
from trtspec.trtllm.host import Gpu, Host, answer, package_version, release_of_image, release_of_tag
from trtspec.trtllm.versions import RELEASES, Release, has_engine_track, release_for

if TYPE_CHECKING:
    from trtspec.spec.schema import Spec

Status = Literal["ok", "warning", "problem"]

PYTHONS = ((3, 10), (3, 12))  # oldest and newest that trtspec runs on
MODELOPT = "0.37.0"  # what TensorRT-LLM 1.2.1 pins
BUILD_COMMAND = "trtllm-build"
_BUSY_PART = 0.1  # of a GPU's memory in use, from which others count as there
_DISK_FLOOR = 20 * 2**30  # bytes, where the models' sizes are not known
_SHM_FLOOR = 256 * 2**20  # bytes: a long prompt's tensors pass through it several times
_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One answer: which check, how serious, what was found, what to do about it (empty when nothing is to be done)."""

    check: str
    status: Status
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All answers, and what works on this machine.

    Attributes:
        findings: in the order for showing.
        works: what can be done here.
        lacks: what cannot be done here -> why.
    """

    findings: list[Finding]
    works: list[str]
    lacks: dict[str, str]

    @property
    def healthy(self) -> bool:
        """Whether nothing that is needed here is broken."""
        return all(finding.status != "problem" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "healthy": self.healthy}


@dataclass(frozen=True)
class _Patient:
    """What is examined: the host, and the spec if there is one."""

    host: Host
    spec: Spec | None

    @property
    def wants_engines(self) -> bool:
        """The spec asks for compiled engines."""
        return self.spec is not None and self.spec.engine.runtime == "tensorrt_llm" and not self.wants_llmapi

    @property
    def wants_llmapi(self) -> bool:
        """The spec asks for the LLM API."""
        return self.spec is not None and self.spec.engine.track == "llmapi"

    @property
    def wants_gpu(self) -> bool:
        """The spec is for GPUs, and this machine has some: then what is missing for them is a problem."""
        return bool(self.host.gpus) and (self.wants_engines or self.wants_llmapi)

    @property
    def release(self) -> Release | None:
        """The container that goes with the spec; without a spec the newest. None: none is known."""
        if self.spec is None:
            return RELEASES[0]
        image = self.spec.serving.image
        return release_of_image(image) if image else release_for(self.spec.engine.version)

    def lack(self, needed: bool) -> Status:
        """How serious it is that something is missing."""
        return "problem" if needed else "warning"


def diagnose(host: Host, spec: Spec | None = None) -> Diagnosis:
    """Run all checks; with a spec, against what it asks for."""
    patient = _Patient(host, spec)
    findings = [finding for check in _CHECKS for finding in check(patient)]
    works, lacks = _abilities(patient, {finding.check: finding for finding in findings})
    return Diagnosis(findings, works, lacks)


def _python(patient: _Patient) -> Iterator[Finding]:
    version = platform.python_version()
    oldest, newest = PYTHONS
    if oldest <= version_numbers(version)[:2] <= newest:
        yield Finding("python", "ok", version)
    else:
        wanted = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
        yield Finding(
            "python", "problem", f"{version}, trtspec needs {wanted}", "make the environment with another one"
        )


def _packages(patient: _Patient) -> Iterator[Finding]:
    numpy = package_version("numpy")
    if numpy is None or version_numbers(numpy) >= (2,):
        text = f"{numpy or 'not installed'}: Triton's Python backend fails on strings and numbers with numpy 2"
        yield Finding("numpy", "problem", text, "pip install 'numpy<2'")
    else:
        yield Finding("numpy", "ok", numpy)
    modelopt, needed = package_version("nvidia-modelopt"), patient.wants_engines
    install = f"pip install 'nvidia-modelopt=={MODELOPT}'"
    if modelopt is None:
        text = "not installed: checkpoints cannot be converted here"
        yield Finding("modelopt", patient.lack(needed), text, install)
    elif version_numbers(modelopt) != version_numbers(MODELOPT):
        yield Finding("modelopt", "warning", f"{modelopt}; TensorRT-LLM 1.2.1 goes with {MODELOPT}", install)
    else:
        yield Finding("modelopt", "ok", modelopt)
    pytriton = package_version("nvidia-pytriton")
    if pytriton is not None:
        yield Finding("local server", "ok", f"nvidia-pytriton {pytriton}")
    else:
        needed = patient.spec is not None and not patient.wants_gpu and not patient.wants_llmapi
        text = "nvidia-pytriton is not installed: no serving without a GPU host"
        yield Finding("local server", patient.lack(needed), text, "pip install 'trtspec[local-server]'")


def _gpus(patient: _Patient) -> Iterator[Finding]:
    host, spec = patient.host, patient.spec
    if not host.gpus:
        text = "none that nvidia-smi shows"
        if patient.wants_engines or patient.wants_llmapi:
            yield Finding("gpu", "warning", text, "compile and serve this spec on a GPU host")
        elif spec is None:
            yield Finding("gpu", "warning", text, "engines are compiled and served on a GPU host")
        else:
            yield Finding("gpu", "ok", f"{text}; the torch runtime needs none")
        return
    names = ", ".join(f"{gpu.index}: {gpu.name}{_size(gpu)}" for gpu in host.gpus)
    if spec is None or not patient.wants_gpu:
        yield Finding("gpu", "ok", names)
    else:
        wanted, count = GPUS[spec.hardware.gpu], spec.hardware.num_gpus
        other = next((gpu for gpu in host.gpus[:count] if gpu.sm is not None and gpu.sm != wanted.sm), None)
        if other is not None:
            asked = f"the spec is for {spec.hardware.gpu}, sm_{wanted.sm}"
            text = f"GPU {other.index} ({other.name}) is sm_{other.sm}, {asked}"
            yield Finding("gpu", "problem", text, "set hardware.gpu to what is here, or use another host")
        elif len(host.gpus) < count:
            text = f"{len(host.gpus)} here, the spec is for {count}"
            yield Finding("gpu", "problem", text, "lower hardware.num_gpus and tensor_parallel, or use another host")
        else:
            yield Finding("gpu", "ok", names)
    for gpu in host.gpus:
        if gpu.memory_bytes and gpu.used_bytes and gpu.used_bytes > _BUSY_PART * gpu.memory_bytes:
            text = f"{gpu.used_bytes / _GIB:.1f} of {gpu.memory_bytes / _GIB:.1f} GiB of GPU {gpu.index} are in use"
            fix = "end what runs there (see nvidia-smi): KV caches are sized by what is free"
            yield Finding("gpu memory", "warning", text, fix)


def _driver(patient: _Patient) -> Iterator[Finding]:
    driver, release = patient.host.driver, patient.release
    if driver is None:
        if patient.host.gpus or patient.spec is None:
            yield Finding("driver", "warning", "no NVIDIA driver answers", "needed on GPU hosts only")
        return
    if release is None or version_numbers(driver) >= version_numbers(release.driver):
        yield Finding("driver", "ok", driver)
        return
    text = f"{driver}; container {release.tag} (CUDA {release.cuda}) needs {release.driver} or later"
    older = next((each for each in RELEASES if version_numbers(each.driver) <= version_numbers(driver)), None)
    fix = f"upgrade the driver to {release.driver}"
    if older is not None:
        fix += f', or use container {older.tag} with engine.version: "{older.tensorrt_llm}"'
    # Data-centre GPUs can run newer CUDA on some older driver branches, which is nothing to build a service on unseen.
    yield Finding(
        "driver", patient.lack(patient.wants_gpu), text, f"{fix}; CUDA forward compatibility is not relied on"
    )


def _container(patient: _Patient) -> Iterator[Finding]:
    host, spec, tag = patient.host, patient.spec, patient.host.container_tag
    if tag is None:
        if spec is not None and (patient.wants_engines or patient.wants_llmapi) and patient.release is None:
            if spec.serving.image:
                text = f"what TensorRT-LLM {spec.serving.image} has is not known"
                yield Finding("container", "warning", text, f"see that it is {spec.engine.version}")
            else:
                text = f"none with TensorRT-LLM {spec.engine.version} is known"
                fix = f'set engine.version: "{RELEASES[0].tensorrt_llm}", or serving.image'
                yield Finding("container", patient.lack(patient.wants_gpu), text, fix)
        elif patient.release is not None and (spec is None or patient.wants_engines or patient.wants_llmapi):
            text = f"this is none; {patient.release.tag} has TensorRT-LLM {patient.release.tensorrt_llm}"
            yield Finding("container", "ok", text)
        return
    inside = release_of_tag(tag)
    has = host.tensorrt_llm or (inside.tensorrt_llm if inside else None)
    if spec is None or not (patient.wants_engines or patient.wants_llmapi):
        yield Finding("container", "ok", f"{tag}, TensorRT-LLM {has or 'unknown'}")
    elif has is None:
        yield Finding("container", "warning", f"what TensorRT-LLM {tag} has is not known", "see docker/README.md")
    elif version_numbers(has) != version_numbers(spec.engine.version):
        text = f"{tag} has TensorRT-LLM {has}, the spec asks for {spec.engine.version}"
        other = patient.release
        fix = f'set engine.version: "{has}"' + (f", or use container {other.tag}" if other and other.tag != tag else "")
        yield Finding("container", "problem", text, fix)
    else:
        yield Finding("container", "ok", f"{tag}, TensorRT-LLM {has}")


def _compiler(patient: _Patient) -> Iterator[Finding]:
    """TensorRT-LLM itself and its compiler, for compiled engines."""
    if patient.wants_llmapi or (patient.spec is not None and not patient.wants_engines):
        return
    host, spec = patient.host, patient.spec
    # Outside the container a GPU host serves; engines are compiled inside.
    needed = patient.wants_gpu and host.container_tag is not None
    image = patient.release.image if patient.release else "a container with TensorRT-LLM"
    inside = f"compile in the image of docker/Dockerfile, on {image}"
    if host.tensorrt_llm is None:
        yield Finding("tensorrt_llm", patient.lack(needed), "not installed", inside)
    elif spec is not None and version_numbers(host.tensorrt_llm) != version_numbers(spec.engine.version):
        text = f"{host.tensorrt_llm}, the spec asks for {spec.engine.version}"
        fix = f'set engine.version: "{host.tensorrt_llm}", or {inside}'
        yield Finding("tensorrt_llm", patient.lack(patient.wants_gpu), text, fix)
    elif not has_engine_track(host.tensorrt_llm):
        text = f"{host.tensorrt_llm} has no compiled engines any more"
        yield Finding("tensorrt_llm", "warning", text, "use engine.track: llmapi, see trtspec migrate")
    else:
        yield Finding("tensorrt_llm", "ok", host.tensorrt_llm)
    place = shutil.which(BUILD_COMMAND)
    if place:
        yield Finding(BUILD_COMMAND, "ok", place)
    else:
        yield Finding(BUILD_COMMAND, patient.lack(needed), "not on PATH: nothing is compiled here", inside)


def _docker(patient: _Patient) -> Iterator[Finding]:
    host = patient.host
    if not host.gpus or host.container_tag is not None or (patient.spec is not None and not patient.wants_gpu):
        return
    status = patient.lack(patient.wants_gpu)
    server = answer(["docker", "version", "--format", "{{.Server.Version}}"])
    if server is None:
        there = shutil.which("docker")
        text = "the daemon does not answer this user" if there else "not installed: no serving in the container"
        fix = "start it, or join the group docker" if there else "install Docker Engine with the compose plugin"
        yield Finding("docker", status, text, fix)
        return
    compose = answer(["docker", "compose", "version", "--short"])
    if compose is None:
        yield Finding("docker", status, f"{server.strip()} without compose", "install the compose plugin (v2)")
    else:
        yield Finding("docker", "ok", f"{server.strip()}, compose {compose.strip()}")
    toolkit = next(filter(shutil.which, ("nvidia-container-runtime-hook", "nvidia-ctk")), None)
    runtimes = answer(["docker", "info", "--format", "{{json .Runtimes}}"]) or "{}"
    if toolkit or "nvidia" in _names(runtimes):
        yield Finding("container toolkit", "ok", toolkit or "runtime nvidia")
    else:
        text = "docker has no runtime for NVIDIA GPUs"
        yield Finding("container toolkit", status, text, "install the NVIDIA Container Toolkit and restart docker")
    image = (patient.spec and patient.spec.serving.image) or (patient.release and patient.release.image)
    if image and answer(["docker", "image", "inspect", "--format", "{{.Id}}", image]) is None:
        yield Finding("image", "warning", f"{image} is not on this host", f"docker pull {image}")
    elif image:
        yield Finding("image", "ok", image)


def _disk(patient: _Patient) -> Iterator[Finding]:
    place = patient.spec.engines_dir if patient.spec else Path.cwd()
    needed = _written_bytes(patient.spec) if patient.spec else None
    try:
        free = shutil.disk_usage(_existing(place)).free
    except OSError as error:
        yield Finding("disk", "problem", f"{place}: {error.strerror}", "choose another output.engines")
        return
    text, fix = f"{free / _GIB:.1f} GiB free for {place}", "free some space, or choose another output.engines"
    if free >= (_DISK_FLOOR if needed is None else needed):
        yield Finding("disk", "ok", text)
    elif needed is None:
        yield Finding("disk", "warning", f"{text}; engines of large models need more", fix)
    else:
        yield Finding("disk", "problem", f"{text}, a build writes about {needed / _GIB:.1f} GiB", fix)


def _shared_memory(patient: _Patient) -> Iterator[Finding]:
    host, spec = patient.host, patient.spec
    if host.shm_bytes is None:
        yield Finding("shared memory", "problem", "there is no /dev/shm", "mount a tmpfs there")
        return
    floor, fix = _SHM_FLOOR, "enlarge /dev/shm (docker run --shm-size)"
    if host.container_tag is not None and spec is not None:
        floor = spec.serving.shm_size
    text = f"/dev/shm has {host.shm_bytes / _GIB:.2g} GiB"
    if host.shm_bytes >= floor:
        yield Finding("shared memory", "ok", text)
    else:
        yield Finding("shared memory", "warning", f"{text}, {floor / _GIB:.2g} are wanted", fix)


def _ports(patient: _Patient) -> Iterator[Finding]:
    from trtspec.triton.ports import require_free
    from trtspec.triton.server import state_dir_of
    from trtspec.triton.server_state import running

    spec = patient.spec
    address, wanted = "127.0.0.1", {"--http-port": 8000, "--grpc-port": 8001, "--metrics-port": 8002}
    if spec is not None:
        serving = spec.serving
        address = serving.host
        wanted = dict(zip(wanted, (serving.http_port, serving.grpc_port, serving.metrics_port), strict=True))
        try:
            state = running(state_dir_of(spec))
        except TrtspecError:  # docker does not say whether its container is there
            state = None
        if state is not None:
            yield Finding("ports", "ok", f"in use by the server of this spec (gRPC {state.grpc_url})")
            return
    try:
        require_free(address, wanted)
    except TrtspecError as error:
        yield Finding("ports", patient.lack(spec is not None), f"{error.where}: {error.problem}", error.fix or "")
    else:
        yield Finding("ports", "ok", f"{', '.join(map(str, wanted.values()))} of {address} are free")


def _outputs(patient: _Patient) -> Iterator[Finding]:
    spec = patient.spec
    if spec is None:
        return
    for place in (spec.engines_dir, spec.model_repo_dir):
        above = _existing(place)
        if not above.is_dir():
            yield Finding("output", "problem", f"{above} is no directory", "move it away, or choose another output")
        elif not os.access(above, os.W_OK | os.X_OK):
            fix = "change its owner or mode, or choose another output"
            yield Finding("output", "problem", f"{above} cannot be written", fix)
        else:
            yield Finding("output", "ok", f"{place} can be written")


_CHECKS: tuple[Callable[[_Patient], Iterator[Finding]], ...] = (
    *(_python, _packages, _gpus, _driver, _container, _compiler, _docker, _disk, _shared_memory, _ports, _outputs),
)


def _abilities(patient: _Patient, findings: dict[str, Finding]) -> tuple[list[str], dict[str, str]]:
    """What works on this machine, and what does not, with the reason."""
    host = patient.host
    no_gpu = "" if host.gpus else "no GPU"

    def fault(check: str) -> str:
        found = findings.get(check)
        return "" if found is None or found.status == "ok" else f"{check}: {found.text}"

    reasons = {
        "converting and checking checkpoints": fault("modelopt"),
        "parity of checkpoints and of torch engines": fault("numpy"),
        "serving by the local server": fault("local server") or fault("numpy"),
        "compiling engines": no_gpu or fault(BUILD_COMMAND),
        "serving in the container": no_gpu or fault("docker") or fault("container toolkit"),
    }
    if host.gpus and host.container_tag is not None:
        reasons["serving in the container"] = "this is a container; run trtspec serve on its host"
    return [each for each, why in reasons.items() if not why], {each: why for each, why in reasons.items() if why}


def _written_bytes(spec: Spec) -> int | None:
    """Bytes that a build writes at most; None where a model is not on this machine.

    An engine is as large as its model; on the way to TensorRT-LLM's there is a checkpoint of the same size.
    """
    total = 0
    for ref in spec.models.values():
        directory = spec.path(ref.model)
        weights = [*directory.glob("*.safetensors"), *directory.glob("*.gguf")] if directory.is_dir() else []
        if not weights:
            return None
        total += sum(path.stat().st_size for path in weights)
    return total * (2 if spec.engine.runtime == "tensorrt_llm" else 1)


def _existing(place: Path) -> Path:
    """The nearest thing above `place` that is there."""
    return next(each for each in (place, *place.parents) if os.path.exists(each))


def _names(text: str) -> list[str]:
    try:
        return list(json.loads(text))
    except (ValueError, TypeError):
        return []


def _size(gpu: Gpu) -> str:
    return f" ({gpu.memory_bytes / _GIB:.0f} GiB)" if gpu.memory_bytes else ""
