"""What a manifest records of the machine and its software, and how much memory there is.

Asks the operating system and package metadata; imports no torch.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from trtspec import __version__

_PACKAGES = ("torch", "transformers", "numpy", "tokenizers", "safetensors", "pydantic")


def versions() -> dict[str, str | None]:
    """Versions of trtspec, Python, the platform and the packages that decide what is built; None: not installed."""
    found: dict[str, str | None] = {
        "trtspec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def hardware() -> dict[str, Any]:
    """CPU model, cores, bytes of memory, names of the GPUs."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "gpus": _gpu_names(),
    }


def memory_bytes() -> int:
    """Bytes of memory of the machine, or of the control group that this process is confined to."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _gpu_names() -> list[str]:
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.split("\n")[:-1]
