"""Serve a built repository in the Triton container with TensorRT-LLM, through docker compose.

Knows what the compose file and the launcher in the container are told for a spec, and what must be in place before it
is worth starting them. Does not know what happens inside the container: see `launch`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.errors import TrtspecError
from trtspec.triton.check import check_repository
from trtspec.triton.client import Client, GenerationStats
from trtspec.triton.compose import SERVICE, Composition, ContainerStatus, docker
from trtspec.triton.launch import LLMAPI_MODEL, SAYS, UNARY_MODEL, LaunchFailed, probe
from trtspec.triton.ports import require_free
from trtspec.triton.server import PROBE_PROMPT, PROBE_TOKENS, ServerFailed, state_dir_of
from trtspec.triton.server_state import ServerState, build_stamp, clean_up, read, require_not_running
from trtspec.trtllm.host import Host, release_of_image
from trtspec.trtllm.inspect import inspect
from trtspec.trtllm.placement import check_placement, device_ids, mpi_world_size
from trtspec.trtllm.versions import RELEASES, release_for

if TYPE_CHECKING:
    from trtspec.spec.schema import Spec

LOG_FILE = "container.log"
IMAGE_USER = "1000:1000"  # triton-server, who owns the server's files in the image
_LOG_LINES = 200
_POLL_S = 1.0
_WATCH_PERIOD_S = 2.0
_RESTARTS = 3
_UNANSWERED = 30  # looks in a row that docker may leave unanswered


class ContainerServer:
    """One container that serves a spec; used like `LocalServer`: `start`, `wait_ready`, `supervise`, `stop`.

    Args:
        spec: what was built.
        settings: variables of the compose file.
    """

    def __init__(self, spec: Spec, settings: dict[str, str]) -> None:
        self.settings = settings
        self.model_repo, self.engines_root = spec.model_repo_dir, spec.engines_dir
        self.serving = spec.serving
        self.llmapi = spec.engine.track == "llmapi"
        self.state_dir = state_dir_of(spec)
        self.composition = composition(spec)
        self._state: ServerState | None = None
        self._deadline = 0.0

    @classmethod
    def from_spec(cls, spec: Spec, host: Host) -> ContainerServer:
        """The container of a built spec.

        Raises:
            TrtspecError: nothing is built yet, or not for this host and this image; what the spec asks for has no
            container; docker or the image is missing.
        """
        settings = compose_settings(spec)
        require_built(spec)
        require_fit(spec, host, settings["TRTSPEC_IMAGE"])
        if host.container_tag is not None and shutil.which("docker") is None:
            raise TrtspecError(
                f"this is the Triton container {host.container_tag} itself", fix="run trtspec serve on its host"
            )
        require_docker(settings["TRTSPEC_IMAGE"])
        return cls(spec, settings)

    @property
    def log(self) -> Path:
        """Where the end of the container's log is kept when it fails."""
        return self.state_dir / LOG_FILE

    @property
    def log_source(self) -> str:
        """Where to read what it writes."""
        return f"docker logs {self.composition.project}-{SERVICE}-1"

    @property
    def state(self) -> ServerState:
        """The started container: its addresses and its project."""
        assert self._state is not None, "start() comes first"
        return self._state

    def start(self) -> None:
        """Create and start the container; returns before the server answers.

        Raises:
            TrtspecError: it is running already, a port is taken, or docker refuses.
        """
        self.state_dir.mkdir(parents=True, exist_ok=True)
        require_not_running(self.state_dir)
        serving = self.serving
        ports = {
            "--http-port": serving.http_port,
            "--grpc-port": serving.grpc_port,
            "--metrics-port": serving.metrics_port,
        }
        require_free(serving.host, ports)
        self._deadline = time.monotonic() + serving.startup_timeout_s
        self._state = ServerState(
            pid=os.getpid(),
            token=self.composition.project,
            host=self.settings["TRTSPEC_HOST"],
            http_port=serving.http_port,
            grpc_port=serving.grpc_port,
            metrics_port=serving.metrics_port,
            model_repo=str(self.model_repo),
            engines_root=str(self.engines_root),
            build=build_stamp(self.model_repo, self.engines_root),
            log=str(self.log),
            project=self.composition.project,
        )
        self.composition.write_settings(self.settings)
        self._state.write(self.state_dir)
        try:
            self.composition.up()
        except TrtspecError as error:
            self.stop()
            if "could not select device driver" in error.problem or "nvidia-container" in error.problem:
                raise TrtspecError(
                    error.problem, fix="install the NVIDIA Container Toolkit and restart docker; see trtspec doctor"
                ) from error
            raise

    def wait_ready(self) -> GenerationStats | None:
        """Wait until a real request has been answered through the published port.

        Returns:
            Figures of that request; None on the LLM API, which gives none.

        Raises:
            ServerFailed: the container ended or was started again, or took longer than `startup_timeout_s`.
        """
        while True:
            self._require_first_life()
            try:
                stats = self._first_answer()
                break
            except (TrtspecError, LaunchFailed) as error:
                if time.monotonic() > self._deadline:
                    raise self._failed(
                        f"the server does not answer after {self.serving.startup_timeout_s:g} s: {error}",
                        fix="allow more with --set serving.startup_timeout_s=SECONDS if it is still loading",
                    ) from error
            time.sleep(_POLL_S)
        self._state = replace(self.state, ready=True)
        self._state.write(self.state_dir)
        return stats

    def supervise(self, say: Callable[[str], None]) -> None:
        """Watch the container until it is stopped by `trtspec stop`.

        Inside, the launcher ends a server that does not answer any more, and docker starts it again.

        Args:
            say: told in one line when that has happened.

        Raises:
            ServerFailed: it ended for good.
        """
        restarts = unanswered = 0
        while True:
            try:
                status = self.composition.status()
                unanswered = 0
            except TrtspecError:  # a daemon that is restarted, say; the container goes on meanwhile
                unanswered += 1
                if unanswered == _UNANSWERED:
                    raise
                time.sleep(_WATCH_PERIOD_S)
                continue
            if status is None or status.ended:
                recorded = read(self.state_dir)
                if recorded is None or recorded.stopping:
                    return
                raise self._failed(f"the container {_how_it_ended(status)} while it was serving")
            if status.restarts > restarts:
                say(f"the server had died; docker has started it again ({status.restarts} of {_RESTARTS})")
                restarts = status.restarts
            time.sleep(_WATCH_PERIOD_S)

    def stop(self) -> None:
        """End and remove the container, and forget it."""
        if self._state is not None:
            clean_up(self._state, self.state_dir)
            self._state = None

    def _first_answer(self) -> GenerationStats | None:
        left = max(self._deadline - time.monotonic(), 1.0)
        state = self.state
        if self.llmapi:
            probe(f"{state.address}:{state.http_port}", llmapi=True, timeout_s=left)
            return None
        with Client(state.grpc_url) as client:
            return client.complete(PROBE_PROMPT, max_tokens=PROBE_TOKENS, timeout_s=left).stats

    def _require_first_life(self) -> None:
        status = self.composition.status()
        if status is None or status.ended or status.restarts:
            raise self._failed(f"the container {_how_it_ended(status)} while it was starting")

    def _failed(self, problem: str, fix: str | None = None) -> ServerFailed:
        """The failure with what the launcher said last, and the end of the log kept beside the settings."""
        text = self.composition.log(_LOG_LINES)
        self.log.write_text(text, encoding="utf-8")
        said = [line.removeprefix(SAYS) for line in text.splitlines() if line.startswith(SAYS)]
        return ServerFailed(f"{problem}: {said[-1]}" if said else problem, log=self.log, fix=fix)


def composition(spec: Spec) -> Composition:
    """The composition of a spec: one for each directory of engines."""
    place = hashlib.sha256(str(spec.engines_dir).encode()).hexdigest()[:12]
    return Composition(f"trtspec-{place}", state_dir_of(spec))


def compose_settings(spec: Spec) -> dict[str, str]:
    """Variables of the compose file for a spec.

    Raises:
        TrtspecError: the spec asks for what one container does not do.
    """
    serving = spec.serving
    if spec.engine.runtime != "tensorrt_llm":
        raise TrtspecError(
            f"engines of the runtime {spec.engine.runtime} are served by the local server, not in the container",
            where=spec.where(("engine", "runtime")),
            expected="tensorrt_llm",
        )
    if spec.hardware.num_nodes > 1:
        raise TrtspecError(
            "one container serves one node",
            where=spec.where(("hardware", "num_nodes")),
            expected="1",
            fix="start the ranks with Slurm or a Kubernetes LeaderWorkerSet",
        )
    launch, num_gpus = launch_options(spec)
    return {
        "TRTSPEC_IMAGE": image_of(spec),
        "TRTSPEC_LAUNCH": " ".join(launch),
        "TRTSPEC_MODEL_REPO": str(spec.model_repo_dir),
        "TRTSPEC_ENGINES": str(spec.engines_dir),
        "TRTSPEC_MOUNT_POINT": serving.mount_point,
        "TRTSPEC_HOST": _ip_address(spec),
        "TRTSPEC_HTTP_PORT": str(serving.http_port),
        "TRTSPEC_GRPC_PORT": str(serving.grpc_port),
        "TRTSPEC_METRICS_PORT": str(serving.metrics_port),
        "TRTSPEC_NUM_GPUS": str(num_gpus),
        "TRTSPEC_SHM_SIZE": str(serving.shm_size),
        "TRTSPEC_USER": f"{os.getuid()}:{os.getgid()}" if os.getuid() else IMAGE_USER,
        "TRTSPEC_STARTUP_TIMEOUT": f"{serving.startup_timeout_s:g}s",
        "TRTSPEC_RESTART": f"on-failure:{_RESTARTS}",
    }


def image_of(spec: Spec) -> str:
    """The container image of a spec.

    Raises:
        TrtspecError: no image is known for its version of TensorRT-LLM.
    """
    if spec.serving.image is not None:
        return spec.serving.image
    release = release_for(spec.engine.version)
    if release is None:
        raise TrtspecError(
            f"no Triton container with TensorRT-LLM {spec.engine.version} is known",
            where=spec.where(("engine", "version")),
            expected=f"such as {RELEASES[0].tensorrt_llm} (container {RELEASES[0].tag})",
            fix="take a known version, or name an image that has it with serving.image",
        )
    return release.image


def require_built(spec: Spec) -> None:
    """Refuse a spec whose repository has not been built, or is faulty.

    Raises:
        TrtspecError: what is missing or wrong.
    """
    llmapi = spec.engine.track == "llmapi"
    if not (spec.model_repo_dir / (LLMAPI_MODEL if llmapi else UNARY_MODEL) / "config.pbtxt").is_file():
        raise TrtspecError(
            "there is no built model repository here",
            where=str(spec.model_repo_dir),
            fix=f"run: trtspec build {spec.source}",
        )
    check_repository(spec.model_repo_dir)


def require_fit(spec: Spec, host: Host, image: str) -> None:
    """Refuse engines that this host's GPUs or the image's TensorRT-LLM cannot load, before minutes go into trying.

    Raises:
        TrtspecError: what does not fit, one a line, with both sides of it.
    """
    _, needed = launch_options(spec)
    if len(host.gpus) < needed:
        raise TrtspecError(
            f"{needed} GPUs are needed, {len(host.gpus)} are here",
            where=spec.where(("hardware", "num_gpus")),
            fix="serve on another host, or build with a smaller tensor_parallel",
        )
    if spec.engine.track == "llmapi":
        return
    release = release_of_image(image)
    # What loads the engines is the image's TensorRT-LLM, not what may be installed on the host.
    inside = replace(host, tensorrt_llm=None, tensorrt=None, container_tag=release.tag if release else None)
    misfits = [misfit for role in spec.models for misfit in inspect(spec.engines_dir / role, inside).misfits]
    if misfits:
        fix = f"; build the engines here with trtspec build {spec.source}, or choose their image with serving.image"
        raise TrtspecError("\n".join(misfits) + fix)


def require_docker(image: str) -> None:
    """Refuse a host without a docker that answers, without compose, or without the image.

    Raises:
        TrtspecError: what is missing.
    """
    docker("version", ["docker", "version", "--format", "{{.Server.Version}}"])
    try:
        docker("compose", ["docker", "compose", "version", "--short"])
    except TrtspecError as error:
        raise TrtspecError("docker has no compose", fix="install the compose plugin of docker (v2)") from error
    try:
        docker("image inspect", ["docker", "image", "inspect", "--format", "{{.Id}}", image])
    except TrtspecError as error:
        # Some 14 GB: not without being asked.
        raise TrtspecError(
            "the container image is not on this host", where=image, fix=f"run: docker pull {image}"
        ) from error


def launch_options(spec: Spec) -> tuple[list[str], int]:
    """Options of the launcher, and how many GPUs the container needs.

    Raises:
        TrtspecError: engines that one server cannot load together.
    """
    timeout = ["--timeout", f"{spec.serving.startup_timeout_s:g}"]
    if spec.engine.track == "llmapi":
        gpus, ranks = device_ids(spec)["target"], spec.target.world_size
        split = ["--ranks", str(ranks)] if ranks > 1 else []
        return ["--llmapi", "--gpus", ",".join(map(str, gpus)), *split, *timeout], 1 + max(gpus)
    check_placement(spec)
    num_gpus = 1 + max(device for devices in device_ids(spec).values() for device in devices)
    options = timeout
    if (ranks := mpi_world_size(spec)) > 1:
        options = ["--ranks", str(ranks), *options]
    if spec.serving.orchestrator:
        how = "spawn" if spec.serving.spawn_processes else "ranks"
        options = ["--orchestrator", how, "--num-gpus", str(num_gpus), *options]
    return options, num_gpus


def _ip_address(spec: Spec) -> str:
    """The address to publish ports on, as docker wants it."""
    host = spec.serving.host
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        raise TrtspecError(
            f"{host!r} is no address that docker can publish ports on",
            where=spec.where(("serving", "host")),
            expected="an IP address, such as 127.0.0.1 or 0.0.0.0",
        ) from None


def _how_it_ended(status: ContainerStatus | None) -> str:
    if status is None:
        return "is gone"
    if status.out_of_memory:
        return "was killed for want of memory"
    if status.restarts and not status.ended:
        return "ended and was started again"
    return f"ended with code {status.exit_code}"
