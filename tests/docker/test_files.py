"""The compose file and the Dockerfiles, by reading them: no docker is needed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from docker_double import Refused, resolve

from trtspec.triton import compose, launch
from trtspec.trtllm.versions import RELEASES

DOCKER = Path(__file__).parents[2] / "docker"
NEEDED = {"TRTSPEC_MODEL_REPO": "/srv/model repo", "TRTSPEC_ENGINES": "/srv/engines: 2"}


def service(**settings: str) -> dict[str, Any]:
    content = resolve(compose.FILE, NEEDED | settings)
    assert list(content["services"]) == [compose.SERVICE]
    found = content["services"][compose.SERVICE]
    assert isinstance(found, dict)
    return found


def test_what_must_be_said_is_asked_for() -> None:
    for name in NEEDED:
        with pytest.raises(Refused, match=f"{name} is missing a value: set it to the .* that trtspec build wrote"):
            resolve(compose.FILE, {key: value for key, value in NEEDED.items() if key != name})


def test_only_this_machine_reaches_it_unless_asked() -> None:
    ports = service()["ports"]
    assert [(port["host_ip"], port["published"], port["target"]) for port in ports] == [
        ("127.0.0.1", "8000", 8000),
        ("127.0.0.1", "8001", 8001),
        ("127.0.0.1", "8002", 8002),
    ]
    assert {port["host_ip"] for port in service(TRTSPEC_HOST="0.0.0.0")["ports"]} == {"0.0.0.0"}


def test_it_can_write_nowhere_and_do_little() -> None:
    found = service()
    assert found["read_only"] is True and all(volume["read_only"] is True for volume in found["volumes"])
    assert all(volume["bind"] == {"create_host_path": False} for volume in found["volumes"]), "a typo is no directory"
    assert found["cap_drop"] == ["ALL"] and found["security_opt"] == ["no-new-privileges:true"]
    assert int(found["user"].split(":")[0]) > 0
    assert not {"privileged", "network_mode", "ipc", "pid"} & found.keys()


def test_host_paths_are_taken_as_they_are() -> None:
    mounts = {volume["target"]: volume["source"] for volume in service()["volumes"]}
    assert mounts["/models"] == "/srv/model repo" and mounts["/engines"] == "/srv/engines: 2"
    moved = service(TRTSPEC_MOUNT_POINT="/data/engines")["volumes"]
    assert moved[-1]["target"] == "/data/engines"


def test_it_starts_the_launcher_that_it_mounts() -> None:
    found = service(TRTSPEC_LAUNCH="--ranks 2 --timeout 60")
    sources = {volume["target"]: volume["source"] for volume in found["volumes"]}
    command = shlex.split(found["command"])
    assert command[0] == "python3"
    assert (compose.FILE.parent / sources[command[1]]).samefile(launch.__file__)
    assert launch.options_parser().parse_args(command[2:]).ranks == 2
    probe = shlex.split(found["healthcheck"]["test"])
    assert probe[:2] == command[:2] and launch.options_parser().parse_args(probe[2:]).probe


def test_times_leave_room_for_each_other() -> None:
    found = service()
    seconds = {name: int(str(found["healthcheck"][name]).rstrip("s")) for name in ("timeout", "start_period")}
    assert seconds["timeout"] > launch.PROBE_TIMEOUT_S
    assert int(found["stop_grace_period"].rstrip("s")) > launch.KILL_AFTER_S, "docker would kill it first"


def test_the_image_is_the_newest_stock_one() -> None:
    assert service()["image"] == RELEASES[0].image
    (device,) = service()["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_the_double_would_notice_a_field_that_does_not_exist(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(compose.FILE.read_text().replace("shm_size:", "shmsize:"))
    with pytest.raises(Refused, match="shmsize"):
        resolve(wrong, NEEDED)


@pytest.mark.parametrize("name", ["compose.yaml", "launch.py"])
def test_docker_has_links_to_what_is_installed(name: str) -> None:
    link = DOCKER / name
    assert link.is_symlink() and link.samefile(compose.FILE.with_name(name))


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instruction and arguments of a Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE))
    return [(word, rest) for line in text.splitlines() if line.strip() for word, _, rest in [line.partition(" ")]]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_images_end_as_trtspec_without_root(name: str) -> None:
    found = instructions(DOCKER / name)
    users = [rest for word, rest in found if word == "USER"]
    assert users and users[-1] not in ("root", "0")
    assert [rest for word, rest in found if word == "ENTRYPOINT"] == ['["trtspec"]']
    assert found.index(("USER", users[-1])) > max(i for i, (word, _) in enumerate(found) if word == "RUN")
    text = " ".join(rest for word, rest in found if word == "RUN")
    assert not re.search(r"(curl|wget)[^|;&]*\|\s*(ba)?sh", text) and "sudo" not in text
    sources = [words[:-1] for word, rest in found if word == "COPY" for words in [rest.split()]]
    assert all((DOCKER.parent / source).exists() for words in sources for source in words if "--" not in source)


def test_the_building_image_stands_on_the_stock_image_and_leaves_it_alone() -> None:
    found = instructions(DOCKER / "Dockerfile")
    base, source = (next(rest for word, rest in found if word == wanted) for wanted in ("ARG", "FROM"))
    name, _, default = base.partition("=")
    assert source == f"${{{name}}}" and default == RELEASES[0].image
    (run,) = [rest for word, rest in found if word == "RUN"]
    steps = [step.strip() for step in run.split("&&")]
    venv = next(step.split()[-1] for step in steps if "-m venv" in step)
    installs = [step for step in steps if "pip install" in step]
    assert installs, "trtspec is not installed at all"
    for step in installs:
        assert step.startswith(f"{venv}/bin/python -m pip install") and " -c " in step, "the image itself would change"
    assert "--system-site-packages" in run, "it would not see the image's TensorRT-LLM"


def test_the_build_context_is_what_is_copied() -> None:
    for name in ("Dockerfile", "Dockerfile.cpu"):
        first, *rest = [
            line for line in (DOCKER / f"{name}.dockerignore").read_text().splitlines() if not line.startswith("#")
        ]
        assert first == "*", "engines of hundreds of gigabytes would be sent to the daemon"
        allowed = {line.removeprefix("!") for line in rest if line.startswith("!")}
        copied = {word for key, args in instructions(DOCKER / name) if key == "COPY" for word in args.split()[:-1]}
        assert copied <= allowed
