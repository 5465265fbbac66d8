"""What this machine offers to TensorRT-LLM: GPUs, driver, installed versions, the container, shared memory.

Asks nvidia-smi, package metadata and the environment, each with a deadline; what cannot be found out is None. Knows
nothing of specs: whether the machine is good enough for one is `trtspec.trtllm.doctor`'s question.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from trtspec.trtllm.versions import RELEASES, Release

SHARED_MEMORY = Path("/dev/shm")
# Set by every Triton container, to the release such as 26.07.
CONTAINER_TAG = "NVIDIA_TRITON_SERVER_VERSION"
DEADLINE_S = 10.0
_QUERY = ("index", "name", "compute_cap", "memory.total", "memory.used", "driver_version")


@dataclass(frozen=True)
class Gpu:
    """One GPU. `sm` is the compute capability times ten (90 = Hopper), None where the driver is too old to say;
    memory in bytes, None where the GPU does not say (MIG, integrated memory)."""

    index: int
    name: str
    sm: int | None
    memory_bytes: int | None
    used_bytes: int | None


@dataclass(frozen=True)
class Host:
    """A machine, or the container that this process runs in.

    Attributes:
        gpus: those that the driver shows; empty without a GPU or a driver.
        driver: version of the NVIDIA driver; None: none that answers.
        tensorrt_llm, tensorrt: versions of the installed Python packages; None: not installed.
        container_tag: release of the Triton container that this runs in, such as `26.07`; None: in none.
        shm_bytes: size of /dev/shm; None: there is none.
    """

    gpus: tuple[Gpu, ...]
    driver: str | None
    tensorrt_llm: str | None
    tensorrt: str | None
    container_tag: str | None
    shm_bytes: int | None


def look() -> Host:
    """What this machine is. Never raises, and takes `DEADLINE_S` seconds at most."""
    gpus, driver = _gpus()
    return Host(
        gpus=gpus,
        driver=driver,
        tensorrt_llm=package_version("tensorrt_llm"),
        tensorrt=package_version("tensorrt"),
        container_tag=os.environ.get(CONTAINER_TAG) or None,
        shm_bytes=_shm_bytes(),
    )


def package_version(name: str) -> str | None:
    """Version of an installed Python package, without importing it; None: not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def release_of_image(image: str) -> Release | None:
    """The release that a container image is, wherever the image was copied to; None for any other image."""
    return next((each for each in RELEASES if image.rpartition("/")[2] == each.image.rpartition("/")[2]), None)


def release_of_tag(tag: str) -> Release | None:
    """The release with this tag, such as `26.07`; None where none is known."""
    return next((each for each in RELEASES if each.tag == tag), None)


def answer(command: Sequence[str], timeout_s: float = DEADLINE_S) -> str | None:
    """What a program prints; None if it is not there, fails, or takes longer than `timeout_s` seconds."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """GPUs and driver, as nvidia-smi says."""
    said = answer(["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"])
    rows = [[word.strip() for word in row] for row in csv.reader((said or "").splitlines())]
    rows = [row for row in rows if len(row) == len(_QUERY) and row[0].isdigit()]
    gpus = tuple(
        Gpu(int(index), name, _sm(capability), _mebibytes(total), _mebibytes(used))
        for index, name, capability, total, used, _ in rows
    )
    return gpus, next((row[-1] for row in rows if row[-1][:1].isdigit()), None)


def _sm(capability: str) -> int | None:
    """90 of `9.0`; nvidia-smi writes `[N/A]` for what it does not know."""
    major, _, minor = capability.partition(".")
    return int(major) * 10 + int(minor) if major.isdigit() and minor.isdigit() else None


def _mebibytes(amount: str) -> int | None:
    return int(amount) * 2**20 if amount.isdigit() else None


def _shm_bytes() -> int | None:
    try:
        return shutil.disk_usage(SHARED_MEMORY).total
    except OSError:
        return None
