"""What the host says of itself, with a stand-in for nvidia-smi."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trtspec.build import machine
from trtspec.trtllm import host
from trtspec.trtllm.host import Gpu, look, release_of_image, release_of_tag
from trtspec.trtllm.versions import RELEASES

Smi = Callable[[str], None]


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Put a shell script named nvidia-smi on PATH."""

    def write(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return write


def test_gpus_and_driver(nvidia_smi: Smi) -> None:
    query = "index,name,compute_cap,memory.total,memory.used,driver_version"
    nvidia_smi(
        f"""[ "$1 $2" = "--query-gpu={query} --format=csv,noheader,nounits" ] || exit 9
echo '0, NVIDIA H100 80GB HBM3, 9.0, 81559, 12, 590.44.01'
echo '1, NVIDIA RTX PRO 6000 Blackwell Server Edition, 12.0, 97887, 0, 590.44.01'"""
    )
    found = look()
    assert found.driver == "590.44.01"
    assert found.gpus == (
        Gpu(0, "NVIDIA H100 80GB HBM3", 90, 81559 * 2**20, 12 * 2**20),
        Gpu(1, "NVIDIA RTX PRO 6000 Blackwell Server Edition", 120, 97887 * 2**20, 0),
    )
    assert machine.hardware()["gpus"] == [gpu.name for gpu in found.gpus]


def test_what_a_gpu_does_not_say_is_none(nvidia_smi: Smi) -> None:
    nvidia_smi("echo '0, NVIDIA GB10, 12.1, [N/A], [Not Supported], 580.95.05'")
    assert look().gpus == (Gpu(0, "NVIDIA GB10", 121, None, None),)


@pytest.mark.parametrize(
    "script",
    [
        "exit 0",
        "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9",
        "echo 'Failed to initialize NVML: Driver/library version mismatch'",
        "echo '0, NVIDIA H100, 9.0'",
        "kill -9 $$",
        "printf '\\377\\376'",
    ],
)
def test_no_answer_is_no_gpu(nvidia_smi: Smi, script: str) -> None:
    nvidia_smi(script)
    found = look()
    assert (found.gpus, found.driver) == ((), None)


def test_a_driver_that_hangs_is_left_alone(nvidia_smi: Smi) -> None:
    nvidia_smi("exec sleep 60")
    begin = time.monotonic()
    assert host.answer(["nvidia-smi"], timeout_s=0.2) is None
    assert time.monotonic() - begin < 10


def test_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look().gpus == ()


def test_the_container_says_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(host.CONTAINER_TAG, raising=False)
    assert look().container_tag is None
    monkeypatch.setenv(host.CONTAINER_TAG, "26.07")
    assert look().container_tag == "26.07"


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "SHARED_MEMORY", tmp_path)
    size = look().shm_bytes
    assert size is not None and size > 0
    monkeypatch.setattr(host, "SHARED_MEMORY", tmp_path / "missing")
    assert look().shm_bytes is None


def test_versions_are_those_of_the_packages() -> None:
    import numpy

    assert host.package_version("numpy") == numpy.__version__
    assert host.package_version("no-such-package-here") is None


def test_releases_by_image_and_tag() -> None:
    newest = RELEASES[0]
    assert release_of_image(newest.image) is newest
    assert release_of_image(f"registry.example:5000/mirror/{newest.image.rpartition('/')[2]}") is newest
    assert release_of_image("my/own:latest") is None and release_of_image("") is None
    assert release_of_tag("25.10") is next(each for each in RELEASES if each.tag == "25.10")
    assert release_of_tag("20.01") is None
