"""What a manifest records of the machine and its software, and how much memory there is.

Asks the operating system and package metadata; imports no torch.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from trtspec import __version__
from trtspec.trtllm.host import look, package_version

_PACKAGES = ("torch", "transformers", "numpy", "tokenizers", "safetensors", "pydantic")


def versions() -> dict[str, str | None]:
    """Versions of trtspec, Python, the platform and the packages that decide what is built; None: not installed."""
    found: dict[str, str | None] = {
        "trtspec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    return found | {name: package_version(name) for name in _PACKAGES}


def hardware() -> dict[str, Any]:
    """CPU model, cores, bytes of memory, names of the GPUs."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "gpus": [gpu.name for gpu in look().gpus],
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
