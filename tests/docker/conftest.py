"""A GPU host with docker, made of stand-ins: programs named nvidia-smi and docker at the front of PATH."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

H100 = "NVIDIA H100 80GB HBM3, 9.0, 81559, 12, 590.44.01"


@pytest.fixture
def gpu_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make this machine look like a GPU host; returns the directory in which the docker double keeps everything.

    `gpus` are rows of nvidia-smi without the index; `docker=False` leaves the machine without docker.
    """

    def make(*gpus: str, docker: bool = True) -> Path:
        programs, kept = tmp_path / "bin", tmp_path / "docker"
        programs.mkdir()
        kept.mkdir()
        rows = "\n".join(f"{index}, {gpu}" for index, gpu in enumerate(gpus or (H100,)))
        query = "--query-gpu=index,name,compute_cap,memory.total,memory.used,driver_version"
        wanted = f"{query} --format=csv,noheader,nounits"
        smi = f"#!/bin/sh\n[ \"$*\" = '{wanted}' ] || exit 9\ncat <<'ROWS'\n{rows}\nROWS\n"
        (programs / "nvidia-smi").write_text(smi)
        if docker:
            (programs / "docker").write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "docker_double.py"} "$@"\n')
        for program in programs.iterdir():
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin")
        monkeypatch.setenv("DOCKER_DOUBLE", str(kept))
        return kept

    return make
