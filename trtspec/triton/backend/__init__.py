"""The directory that a local Triton server takes its backends from: `python`, and the stand-in for `tensorrtllm`.

Knows how the nvidia-pytriton package is laid out. The stand-in itself is `tensorrtllm/model.py` beside this file.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from trtspec.errors import TrtspecError

_LIBRARY, _STUB, _UTILS = "libtriton_python.so", "triton_python_backend_stub", "triton_python_backend_utils.py"
_STAND_IN = Path(__file__).parent / "tensorrtllm" / "model.py"
_PACKAGE = Path(__file__).parents[2]


def assemble_backend_dir(path: Path) -> Path:
    """Fill `path` with what `tritonserver --backend-directory` needs; may be called again over an earlier result.

    Returns:
        `path`.

    Raises:
        TrtspecError: nvidia-pytriton is missing, or has no stub for this Python version.
    """
    server = server_files()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / _STUB
    if not stub.is_file():
        known = sorted(entry.name for entry in stub.parents[1].iterdir())
        raise TrtspecError(
            f"Triton has no model process for Python {version}",
            where=str(stub.parents[1]),
            expected=f"one of {', '.join(known)}",
            fix="make the virtual environment with one of these versions",
        )
    source = server / "backends" / "python"
    python, stand_in = path / "python", path / "tensorrtllm"
    python.mkdir(parents=True, exist_ok=True)
    stand_in.mkdir(exist_ok=True)
    # A copy: Triton refuses a library behind a link ("escapes backend directory") ...
    _copy(source / _LIBRARY, python / _LIBRARY)
    _copy(source / _UTILS, python / _UTILS)
    # ... and a link: the process finds its own libraries by the place of its real file.
    _link(stub, python / _STUB)
    _copy(_STAND_IN, stand_in / "model.py")
    # Model processes see installed packages and this folder: the link serves a checkout that is not installed.
    _link(_PACKAGE, stand_in / _PACKAGE.name)
    return path


def server_files() -> Path:
    """The `tritonserver` directory of the installed nvidia-pytriton package.

    Raises:
        TrtspecError: it is not installed.
    """
    package = importlib.util.find_spec("pytriton")
    places = list(package.submodule_search_locations or ()) if package else []
    if not places:
        raise TrtspecError(
            "the Triton server is not installed",
            expected="the package nvidia-pytriton (Linux, glibc 2.35 or newer)",
            fix="run: pip install 'trtspec[local-server]'",
        )
    return Path(places[0]) / "tritonserver"


def _copy(source: Path, place: Path) -> None:
    if place.exists() and place.read_bytes() == source.read_bytes():
        return
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    shutil.copyfile(source, temporary)
    os.replace(temporary, place)


def _link(source: Path, place: Path) -> None:
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    os.symlink(source, temporary)
    os.replace(temporary, place)
