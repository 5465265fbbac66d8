"""`trtspec doctor`: what it finds on machines that are described here, and what it says on this one."""

from __future__ import annotations

import json
import os
import socket
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.spec.load import load_spec
from trtspec.spec.schema import Spec
from trtspec.trtllm import doctor, host
from trtspec.trtllm.doctor import Diagnosis, Finding, diagnose
from trtspec.trtllm.host import Gpu, Host

GIB = 2**30
H100 = Gpu(0, "NVIDIA H100 80GB HBM3", 90, 80 * GIB, 0)
LAPTOP = Host((), None, None, None, None, 8 * GIB)
SERVER = Host((H100,), "590.44.01", None, None, None, 64 * GIB)
CONTAINER = Host((H100,), "590.44.01", "1.2.1", "10.14.1.48", "26.07", 8 * GIB)
ENGINES = """\
version: 1
target: {model: ./target, dtype: bfloat16}
speculation: {method: none}
hardware: {gpu: H100-SXM}
engine: {runtime: tensorrt_llm}
output: {engines: engines, model_repo: repo}
"""
TORCH = ENGINES.replace("hardware: {gpu: H100-SXM}\nengine: {runtime: tensorrt_llm}\n", "")


@pytest.fixture
def spec(tmp_path: Path, free_ports: Callable[[], dict[str, int]]) -> Callable[..., Spec]:
    """Make a spec with free ports; `changes` are overrides."""

    def make(text: str = ENGINES, *changes: str) -> Spec:
        path = tmp_path / "demo.yaml"
        ports = ", ".join(f"{name}: {port}" for name, port in free_ports().items())
        path.write_text(f"{text}serving: {{{ports}}}\n", encoding="utf-8")
        return load_spec(path, changes)

    return make


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make programs that print what they are told, the only ones on PATH besides the system's."""

    def make(**answers: str) -> None:
        directory = tmp_path / "programs"
        directory.mkdir(exist_ok=True)
        for name, script in answers.items():
            program = directory / name.replace("_", "-")
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")

    make()
    return make


DOCKER = """\
case "$1 $2" in
"version --format") echo 28.0.0;;
"compose version") echo 2.40.0;;
"info --format") echo '{"nvidia": {}, "runc": {}}';;
"image inspect") echo sha256:0;;
*) exit 1;;
esac"""


def found(diagnosis: Diagnosis, check: str) -> Finding:
    return next(finding for finding in diagnosis.findings if finding.check == check)


def problems(diagnosis: Diagnosis) -> list[str]:
    return [finding.check for finding in diagnosis.findings if finding.status == "problem"]


def test_a_laptop_is_no_fault(spec: Callable[..., Spec], programs: Callable[..., None]) -> None:
    diagnosis = diagnose(LAPTOP, spec())
    assert diagnosis.healthy
    assert found(diagnosis, "gpu") == Finding(
        "gpu", "warning", "none that nvidia-smi shows", "compile and serve this spec on a GPU host"
    )
    assert found(diagnosis, "trtllm-build").status == "warning"
    assert "serving by the local server" in diagnosis.works
    assert diagnosis.lacks["compiling engines"] == diagnosis.lacks["serving in the container"] == "no GPU"


def test_a_gpu_host_that_has_all(spec: Callable[..., Spec], programs: Callable[..., None]) -> None:
    programs(docker=DOCKER)
    diagnosis = diagnose(SERVER, spec())
    assert problems(diagnosis) == []
    assert "serving in the container" in diagnosis.works
    assert found(diagnosis, "docker") == Finding("docker", "ok", "28.0.0, compose 2.40.0")
    assert found(diagnosis, "container toolkit").status == found(diagnosis, "image").status == "ok"
    assert found(diagnosis, "trtllm-build").status == "warning", "engines are compiled in the container"


def test_the_container_that_has_all(spec: Callable[..., Spec], programs: Callable[..., None]) -> None:
    programs(trtllm_build="exit 0")
    diagnosis = diagnose(CONTAINER, spec())
    assert problems(diagnosis) == []
    assert found(diagnosis, "container") == Finding("container", "ok", "26.07, TensorRT-LLM 1.2.1")
    assert "compiling engines" in diagnosis.works
    assert diagnosis.lacks["serving in the container"] == "this is a container; run trtspec serve on its host"


@pytest.mark.parametrize(
    ("docker", "check", "text"),
    [
        ("exit 1", "docker", "the daemon does not answer this user"),
        (DOCKER.replace("echo 2.40.0", "exit 1"), "docker", "28.0.0 without compose"),
        (DOCKER.replace('"nvidia": {}, ', ""), "container toolkit", "docker has no runtime for NVIDIA GPUs"),
    ],
)
def test_what_serving_lacks(
    spec: Callable[..., Spec], programs: Callable[..., None], docker: str, check: str, text: str
) -> None:
    programs(docker=docker)
    diagnosis = diagnose(SERVER, spec())
    assert problems(diagnosis) == [check] and found(diagnosis, check).text == text and found(diagnosis, check).fix
    assert diagnosis.lacks["serving in the container"] == f"{check}: {text}"
    # The same lack where nothing asks for it:
    assert diagnose(SERVER).healthy and found(diagnose(SERVER), check).status == "warning"
    assert diagnose(SERVER, spec(TORCH)).healthy


def test_no_docker_at_all(spec: Callable[..., Spec], programs: Callable[..., None]) -> None:
    diagnosis = diagnose(SERVER, spec())
    if not os.path.exists("/usr/bin/docker"):
        assert found(diagnosis, "docker").text == "not installed: no serving in the container"


def test_a_missing_image_is_pulled_by_hand(spec: Callable[..., Spec], programs: Callable[..., None]) -> None:
    programs(docker=DOCKER.replace("echo sha256:0", "exit 1"))
    diagnosis = diagnose(SERVER, spec(ENGINES, "serving.image=my/own:1"))
    assert found(diagnosis, "image") == Finding(
        "image", "warning", "my/own:1 is not on this host", "docker pull my/own:1"
    )


def test_a_driver_too_old(spec: Callable[..., Spec], programs: Callable[..., None]) -> None:
    programs(docker=DOCKER)
    old = Host((H100,), "580.95.05", None, None, None, 64 * GIB)
    diagnosis = diagnose(old, spec())
    assert problems(diagnosis) == ["driver"]
    driver = found(diagnosis, "driver")
    assert driver.text == "580.95.05; container 26.07 (CUDA 13.1.0.036) needs 590.44.01 or later"
    assert 'use container 26.02 with engine.version: "1.1.0"' in driver.fix and "forward compatibility" in driver.fix
    assert diagnose(old, spec(ENGINES, "engine.version=1.1.0")).healthy


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        ((Gpu(0, "NVIDIA A100-SXM4-80GB", 80, 80 * GIB, 0),), "is sm_80, the spec is for H100-SXM, sm_90"),
        ((H100,), "1 here, the spec is for 2"),
    ],
)
def test_other_gpus_than_the_spec_is_for(
    spec: Callable[..., Spec], programs: Callable[..., None], gpus: tuple[Gpu, ...], text: str
) -> None:
    programs(docker=DOCKER)
    diagnosis = diagnose(Host(gpus, "590.44.01", None, None, None, 64 * GIB), spec(ENGINES, "hardware.num_gpus=2"))
    assert problems(diagnosis) == ["gpu"] and text in found(diagnosis, "gpu").text


def test_a_gpu_in_use(programs: Callable[..., None]) -> None:
    busy = Host((Gpu(3, "NVIDIA H100", 90, 80 * GIB, 40 * GIB),), "590.44.01", None, None, None, 64 * GIB)
    assert found(diagnose(busy), "gpu memory").text == "40.0 of 80.0 GiB of GPU 3 are in use"


@pytest.mark.parametrize(
    ("inside", "check", "text"),
    [
        (("1.1.0", "26.02"), "container", "26.02 has TensorRT-LLM 1.1.0, the spec asks for 1.2.1"),
        ((None, "26.02"), "container", "26.02 has TensorRT-LLM 1.1.0, the spec asks for 1.2.1"),
        (("1.2.1", "26.07"), "trtllm-build", "not on PATH: nothing is compiled here"),
    ],
)
def test_the_wrong_container(
    spec: Callable[..., Spec],
    programs: Callable[..., None],
    inside: tuple[str | None, str],
    check: str,
    text: str,
) -> None:
    version, tag = inside
    diagnosis = diagnose(Host((H100,), "590.44.01", version, None, tag, 8 * GIB), spec())
    assert check in problems(diagnosis) and found(diagnosis, check).text == text


def test_an_unknown_version_has_no_container(spec: Callable[..., Spec], programs: Callable[..., None]) -> None:
    programs(docker=DOCKER)
    diagnosis = diagnose(SERVER, spec(ENGINES, "engine.version=1.2.7"))
    assert problems(diagnosis) == ["container"]
    assert found(diagnosis, "container").text == "none with TensorRT-LLM 1.2.7 is known"


def test_packages(spec: Callable[..., Spec], programs: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"numpy": "2.1.0"}
    monkeypatch.setattr(doctor, "package_version", installed.get)
    diagnosis = diagnose(LAPTOP, spec())
    assert problems(diagnosis) == ["numpy", "modelopt", "local server"]
    assert set(diagnosis.lacks) >= {"converting and checking checkpoints", "serving by the local server"}
    assert problems(diagnose(LAPTOP, spec(TORCH))) == ["numpy", "local server"]
    assert problems(diagnose(LAPTOP)) == ["numpy"]
    installed |= {"numpy": "1.26.4", "nvidia-modelopt": "0.39.0"}
    assert found(diagnose(LAPTOP), "modelopt").status == "warning"


def test_python(monkeypatch: pytest.MonkeyPatch, programs: Callable[..., None]) -> None:
    for version, status in (("3.9.20", "problem"), ("3.12.3", "ok"), ("3.13.0", "problem")):
        monkeypatch.setattr(doctor.platform, "python_version", lambda version=version: version)
        assert found(diagnose(LAPTOP), "python").status == status


def test_disk(
    spec: Callable[..., Spec], programs: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Usage = namedtuple("Usage", "total used free")
    asked = []
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: asked.append(place) or Usage(9 * GIB, 0, GIB))
    assert found(diagnose(LAPTOP, spec()), "disk").status == "warning", "the models are not here"
    assert asked == [tmp_path], "the nearest directory that exists"
    weights = tmp_path / "target" / "model.safetensors"
    weights.parent.mkdir()
    with weights.open("wb") as sink:
        sink.truncate(GIB * 3 // 4)
    disk = found(diagnose(LAPTOP, spec()), "disk")
    assert (disk.status, disk.text.partition(", ")[2]) == ("problem", "a build writes about 1.5 GiB")
    assert found(diagnose(LAPTOP, spec(TORCH)), "disk").status == "ok", "no checkpoint on the way"


def test_shared_memory(spec: Callable[..., Spec], programs: Callable[..., None]) -> None:
    programs(trtllm_build="exit 0")
    small = Host((H100,), "590.44.01", "1.2.1", None, "26.07", 64 * 2**20)
    assert found(diagnose(small, spec()), "shared memory").text == "/dev/shm has 0.062 GiB, 8 are wanted"
    assert problems(diagnose(Host((), None, None, None, None, None))) == ["shared memory"]


def test_ports(spec: Callable[..., Spec], programs: Callable[..., None]) -> None:
    asked = spec()
    assert found(diagnose(LAPTOP, asked), "ports").status == "ok"
    with socket.create_server(("127.0.0.1", asked.serving.grpc_port)):
        ports = found(diagnose(LAPTOP, asked), "ports")
    assert ports.status == "problem" and f"{asked.serving.grpc_port}: the port is in use by process" in ports.text
    assert "--grpc-port" in ports.fix


def test_outputs(spec: Callable[..., Spec], programs: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "engines").write_text("a file")
    diagnosis = diagnose(LAPTOP, spec())
    assert problems(diagnosis) == ["output"] and f"{tmp_path / 'engines'} is no directory" in str(diagnosis.findings)


def trtspec(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


def test_the_command(
    spec: Callable[..., Spec], programs: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(host.CONTAINER_TAG, raising=False)
    asked = spec()
    well = trtspec(asked.source)
    assert well.exit_code == 0, well.stdout
    assert "warning: gpu: none that nvidia-smi shows; compile and serve this spec on a GPU host\n" in well.stdout
    assert "does not work here: compiling engines (no GPU)\n" in well.stdout
    content = json.loads(trtspec(asked.source, "--json").stdout)
    assert content["healthy"] is True and content["lacks"]["compiling engines"] == "no GPU"
    assert {"check", "status", "text", "fix"} == set(content["findings"][0])

    (tmp_path / "repo").write_text("a file")
    ill = trtspec(asked.source)
    assert ill.exit_code == 1 and "problem: output: " in ill.stdout
    assert json.loads(trtspec(asked.source, "--json").stdout)["healthy"] is False

    assert trtspec().exit_code == 0
    assert trtspec("--set", "engine.version=1.1.0").exit_code == 2
    missing = trtspec(tmp_path / "missing.yaml")
    assert missing.exit_code == 1 and missing.stderr.startswith("error: ")


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from trtspec.cli.doctor import _show_table

    monkeypatch.setenv("COLUMNS", "100")
    _show_table(Diagnosis([Finding("gpu", "problem", "[none] here", "buy one")], [], {}))
    shown = capsys.readouterr().out
    assert "[none] here" in shown and "buy one" in shown and "what to do" in shown
