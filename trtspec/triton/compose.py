"""One composition of `docker compose`: start it, look at it, read its log, take it down. Every call has a deadline.

Knows the docker command line and where its settings lie; does not know what is served.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtspec.errors import TrtspecError

FILE = Path(__file__).with_name("compose.yaml")
ENV_FILE = "compose.env"
SERVICE = "triton"
DEADLINE_S = 30.0
CHANGE_DEADLINE_S = 180.0  # of calls that create or remove a container


@dataclass(frozen=True)
class ContainerStatus:
    """What docker says of a container.

    Attributes:
        state: created, running, restarting, exited, dead, ...
        exit_code: how it ended; 0 while it runs.
        out_of_memory: the kernel killed it for its memory.
        restarts: how often docker has started it again.
    """

    state: str
    exit_code: int
    out_of_memory: bool
    restarts: int

    @property
    def ended(self) -> bool:
        """Whether it has ended for good."""
        return self.state in ("exited", "dead")


@dataclass(frozen=True)
class Composition:
    """One project of docker compose with the settings that its file asks for.

    Attributes:
        project: its name; all its containers carry it.
        state_dir: where its settings are kept, so that later calls and people see the same values.
    """

    project: str
    state_dir: Path

    @property
    def env_file(self) -> Path:
        """The settings, in the form that `docker compose --env-file` reads."""
        return self.state_dir / ENV_FILE

    def command(self, *arguments: str) -> list[str]:
        """The docker command line that does something with this composition."""
        options = ["--project-name", self.project, "--env-file", str(self.env_file), "--file", str(FILE)]
        return ["docker", "compose", *options, *arguments]

    def settings_text(self, settings: Mapping[str, str]) -> str:
        """The content of the settings file.

        Raises:
            TrtspecError: a value that the file cannot carry.
        """
        for name, value in settings.items():
            if any(character in value for character in "'\n\r\0"):
                raise TrtspecError(
                    f"{name} would be {value!r}",
                    where=str(self.env_file),
                    expected="no quotes and no line breaks",
                    fix="rename that directory or setting",
                )
        return "".join(f"{name}='{value}'\n" for name, value in settings.items())

    def write_settings(self, settings: Mapping[str, str]) -> None:
        """Keep the settings, whole or not at all.

        Raises:
            TrtspecError: a value that the file cannot carry.
        """
        text = self.settings_text(settings)
        temporary = self.env_file.with_name(f".{ENV_FILE}.{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self.env_file)
        finally:
            temporary.unlink(missing_ok=True)

    def up(self) -> None:
        """Create and start the container; never pulls an image.

        Raises:
            TrtspecError: docker refuses.
        """
        docker(
            "compose up",
            self.command("up", "--detach", "--no-build", "--pull", "never", "--no-color"),
            CHANGE_DEADLINE_S,
        )

    def down(self) -> None:
        """End and remove the container and its network; nothing happens if there is none.

        Raises:
            TrtspecError: docker refuses.
        """
        if self.env_file.exists():
            docker("compose down", self.command("down", "--remove-orphans"), CHANGE_DEADLINE_S)
            self.env_file.unlink(missing_ok=True)

    def log(self, lines: int) -> str:
        """The last lines that the container wrote; empty if docker does not say."""
        command = self.command("logs", "--no-color", "--no-log-prefix", "--tail", str(lines), SERVICE)
        try:
            return docker("compose logs", command)
        except TrtspecError:
            return ""

    def status(self) -> ContainerStatus | None:
        """What its container is doing; None if there is none.

        Raises:
            TrtspecError: docker does not answer.
        """
        label = f"label=com.docker.compose.project={self.project}"
        found = docker("ps", ["docker", "ps", "--all", "--quiet", "--filter", label]).split()
        if not found:
            return None
        wanted = '{"state": {{json .State}}, "restarts": {{.RestartCount}}}'
        said = docker("inspect", ["docker", "inspect", "--format", wanted, found[0]])
        try:
            answer = json.loads(said)
            state = answer["state"]
            return ContainerStatus(
                str(state["Status"]), int(state["ExitCode"]), bool(state["OOMKilled"]), int(answer["restarts"])
            )
        except (ValueError, KeyError, TypeError) as error:
            raise TrtspecError(f"docker inspect answered {said!r}", expected="the state of a container") from error


def docker(doing: str, command: Sequence[str], timeout_s: float = DEADLINE_S) -> str:
    """Run a docker command, called `doing` in messages, and return what it prints, on both streams.

    Raises:
        TrtspecError: no docker, no permission, an error message of its own, or no answer in time.
    """
    program = shutil.which(command[0])
    if program is None:
        raise TrtspecError(
            "docker is not installed", expected="Docker Engine with the compose plugin", fix="see trtspec doctor"
        )
    try:
        done = subprocess.run(
            [program, *command[1:]],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise TrtspecError(
            f"docker {doing} does not answer within {timeout_s:g} s", fix="see whether the Docker daemon is well"
        ) from None
    except OSError as error:
        raise TrtspecError(f"docker cannot be started: {error.strerror}", where=program) from error
    if done.returncode:
        raise TrtspecError(f"docker {doing} failed: {_last_words(done.stdout)}")
    return done.stdout


def _environment() -> dict[str, str]:
    """This process's environment without what would overrule the settings in the file: compose prefers it."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("TRTSPEC_", "COMPOSE_"))}


def _last_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "it says nothing"
