"""A stand-in for `docker`, for machines without one: it knows the few commands that trtspec uses, and nothing more.

`compose up` reads the compose file as docker compose would (settings file, interpolation, field names), writes down
what came out, and runs the container's command on this machine: the launcher with the local Triton server. Everything
that it keeps lies in $DOCKER_DOUBLE. What it does not know it refuses, so that a wrong option fails a test.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

# Field -> fields below it; "*" is any name, None any value. From the Compose specification, as far as it is used here.
FIELDS: dict[str, Any] = {
    "name": None,
    "services": {
        "*": {
            **dict.fromkeys(("image", "command", "entrypoint", "working_dir", "container_name", "restart", "init")),
            **dict.fromkeys(("user", "cap_drop", "security_opt", "read_only", "tmpfs", "shm_size")),
            "stop_grace_period": None,
            "environment": {"*": None},
            "volumes": [
                {**dict.fromkeys(("type", "source", "target", "read_only")), "bind": {"create_host_path": None}}
            ],
            "ports": [dict.fromkeys(("name", "target", "published", "host_ip", "protocol", "app_protocol", "mode"))],
            "deploy": {"resources": {"reservations": {"devices": [
                dict.fromkeys(("capabilities", "driver", "count", "device_ids", "options"))
            ]}}},
            "ulimits": {"*": None},
            "healthcheck": dict.fromkeys(
                ("test", "interval", "timeout", "retries", "start_period", "start_interval", "disable")
            ),
            "logging": {"driver": None, "options": {"*": None}},
        }
    },
}  # fmt: skip
LLM_DOUBLE = Path(__file__).parents[1] / "triton" / "tensorrt_llm_double" / "tensorrt_llm"  # the image's package
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?:(?P<kind>:-|:\?)(?P<rest>[^{}]*))?\}|\$(?P<stray>.)")


class Refused(Exception):
    """What docker would say, in one line."""


def unknown_fields(content: Any, fields: Any, where: str = "") -> list[str]:
    """Dotted names of fields that the specification does not have."""
    if fields is None:
        return []
    if isinstance(fields, list):
        if not isinstance(content, list):
            return [f"{where}: not a list"]
        return [name for item in content for name in unknown_fields(item, fields[0], where)]
    if not isinstance(content, dict):
        return [f"{where}: not a mapping"]
    known = {name: fields.get(name, fields.get("*")) for name in content}
    wrong = [f"{where}.{name}" for name in content if name not in fields and "*" not in fields]
    return wrong + [n for name, below in known.items() for n in unknown_fields(content[name], below, f"{where}.{name}")]


def interpolated(content: Any, settings: Mapping[str, str]) -> Any:
    """A parsed compose file with its variables replaced, in values only, as docker compose does it."""
    if isinstance(content, dict):
        return {name: interpolated(value, settings) for name, value in content.items()}
    if isinstance(content, list):
        return [interpolated(value, settings) for value in content]
    if not isinstance(content, str):
        return content

    def value(found: re.Match[str]) -> str:
        if found["stray"]:
            if found["stray"] == "$":
                return "$"
            raise Refused(f"invalid interpolation format in {content!r}")
        given = settings.get(found["name"], "")
        if given or found["kind"] is None:
            return given
        if found["kind"] == ":-":
            return found["rest"]
        raise Refused(f"required variable {found['name']} is missing a value: {found['rest']}")

    return _VARIABLE.sub(value, content)


def settings_of(env_file: Path) -> dict[str, str]:
    """A settings file of lines NAME='value'; single quotes keep everything as it is."""
    settings = {}
    for line in env_file.read_text(encoding="utf-8").splitlines():
        found = re.fullmatch(r"(\w+)='([^']*)'", line)
        if not found:
            raise Refused(f"{env_file}: cannot read {line!r}")
        settings[found[1]] = found[2]
    return settings


def resolve(file: Path, settings: Mapping[str, str]) -> dict[str, Any]:
    """The compose file with its settings.

    Raises:
        Refused: a required setting is missing, or a field that does not exist.
    """
    content = interpolated(yaml.safe_load(file.read_text(encoding="utf-8")), settings)
    if wrong := unknown_fields(content, FIELDS):
        raise Refused(f"{file}: additional properties {', '.join(wrong)} not allowed")
    assert isinstance(content, dict)
    return content


class Project:
    """One composition, as it lies in $DOCKER_DOUBLE."""

    def __init__(self, root: Path, name: str) -> None:
        self.directory = root / name
        self.log, self.pid, self.code = (self.directory / part for part in ("log", "pid", "code"))

    def up(self, content: dict[str, Any], file: Path) -> None:
        (service,) = content["services"].values()
        self.directory.mkdir()
        (self.directory / "resolved.json").write_text(json.dumps(content))
        mounts = {}
        for volume in service["volumes"]:
            source = Path(os.path.join(file.parent, volume["source"]))
            if not source.exists():
                raise Refused(f'invalid mount config for type "bind": bind source path does not exist: {source}')
            mounts[volume["target"]] = source
        ports = {port["target"]: (port["host_ip"], str(port["published"])) for port in service["ports"]}
        command = self._as_run_here(shlex.split(service["command"]), mounts, ports)
        environment = os.environ | service["environment"] | local_environment()
        shell = f"{shlex.join(command)}; echo $? >{shlex.quote(str(self.code))}"
        with self.log.open("wb") as log:
            container = subprocess.Popen(
                ["sh", "-c", shell], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.pid.write_text(str(container.pid))

    def _as_run_here(
        self, command: list[str], mounts: Mapping[str, Path], ports: Mapping[int, tuple[str, str]]
    ) -> list[str]:
        """The container's command with the paths and ports of this machine."""
        from trtspec.triton.backend import assemble_backend_dir

        if command[0] != "python3" or command[1] not in mounts:
            raise Refused(f"exec: {command[:2]}: not in the container")
        http, grpc, metrics = (ports[port] for port in (8000, 8001, 8002))
        own = ["--repository", str(mounts["/models"]), "--http-port", http[1], "--watch-period", "0.3"]
        backends = assemble_backend_dir(self.directory / "backends")
        if "--llmapi" in command:
            shutil.copytree(LLM_DOUBLE, backends / "python" / LLM_DOUBLE.name)
        extra = [f"--backend-directory={backends}", "--allow-gpu-metrics=false", "--exit-timeout-secs=2"]
        extra += [f"--grpc-port={grpc[1]}", f"--metrics-port={metrics[1]}"]
        extra += [f"--{name}-address={http[0]}" for name in ("http", "grpc", "metrics")]
        return [sys.executable, "-I", str(mounts[command[1]].resolve()), *command[2:], *own, "--", *extra]

    def down(self) -> None:
        if not self.directory.exists():
            return
        group = int(self.pid.read_text())
        deadline = time.monotonic() + 30
        while _alive(group) and time.monotonic() < deadline:
            for child in _children(group):
                os.kill(child, signal.SIGTERM)
            time.sleep(0.1)
        shutil.rmtree(self.directory)

    def state(self) -> dict[str, Any]:
        ended = self.code.exists()
        code = int(self.code.read_text() or 0) if ended else 0
        return {"Status": "exited" if ended else "running", "ExitCode": code, "OOMKilled": code == 137}


def local_environment() -> dict[str, str]:
    """What tritonserver of the local package needs around it."""
    from trtspec.triton.server import LocalServer, find_tritonserver

    environment = LocalServer(Path(), engines_root=Path(), state_dir=Path())._environment()
    path = os.pathsep.join([str(find_tritonserver().parent), environment["PATH"]])
    return {"PATH": path, "LD_LIBRARY_PATH": environment.get("LD_LIBRARY_PATH", ""), "OMP_NUM_THREADS": "1"}


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def compose(root: Path, arguments: list[str]) -> str:
    options = {}
    while arguments and arguments[0].startswith("--"):
        options[arguments[0]] = arguments[1]
        arguments = arguments[2:]
    project = Project(root, options["--project-name"])
    file = Path(options["--file"])
    match arguments:
        case ["up", "--detach", "--no-build", "--pull", "never", "--no-color"]:
            project.up(resolve(file, settings_of(Path(options["--env-file"]))), file)
            return ""
        case ["down", "--remove-orphans"]:
            resolve(file, settings_of(Path(options["--env-file"])))
            project.down()
            return ""
        case ["logs", "--no-color", "--no-log-prefix", "--tail", lines, "triton"]:
            return "".join(line + "\n" for line in project.log.read_text().splitlines()[-int(lines) :])
    refuse(["compose", *arguments])


def answer(root: Path, arguments: list[str]) -> str:
    (root / "calls").open("a").write(shlex.join(arguments) + "\n")
    broken = root / "broken"  # a line "words of the command: what docker says"
    for line in broken.read_text().splitlines() if broken.exists() else ():
        words, _, says = line.partition(": ")
        if shlex.join(arguments).startswith(words) or f" {words} " in shlex.join(arguments):
            raise Refused(says)
    match arguments:
        case ["version", "--format", "{{.Server.Version}}"]:
            return "28.0.0\n"
        case ["info", "--format", "{{json .Runtimes}}"]:
            return '{"io.containerd.runc.v2": {}, "nvidia": {"path": "nvidia-container-runtime"}, "runc": {}}\n'
        case ["compose", "version", "--short"]:
            return "2.40.0\n"
        case ["image", "inspect", "--format", "{{.Id}}", _]:
            return "sha256:0\n"
        case ["compose", *rest]:
            return compose(root, rest)
        case ["ps", "--all", "--quiet", "--filter", label]:
            name = label.removeprefix("label=com.docker.compose.project=")
            return f"{name}\n" if name != label and (root / name).exists() else ""
        case ["inspect", "--format", template, name]:
            if template != '{"state": {{json .State}}, "restarts": {{.RestartCount}}}':
                refuse(arguments)
            restarts = root / "restarts"
            count = int(restarts.read_text()) if restarts.exists() else 0
            return json.dumps({"state": Project(root, name).state(), "restarts": count}) + "\n"
    refuse(arguments)


def refuse(arguments: list[str]) -> NoReturn:
    raise Refused(f"the stand-in knows no such command: docker {shlex.join(arguments)}")


if __name__ == "__main__":
    if "TRTSPEC_IMAGE" in os.environ or "COMPOSE_FILE" in os.environ:
        sys.exit("the caller's environment overrules the settings file")
    try:
        print(answer(Path(os.environ["DOCKER_DOUBLE"]), sys.argv[1:]), end="")
    except Refused as refusal:
        sys.exit(f"Error: {refusal}")
