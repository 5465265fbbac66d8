"""What trtspec leaves beside an engine of TensorRT-LLM: its stamp (trtspec.json) and a script that builds it by hand.

Knows the files, not what an engine needs.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtspec import __version__
from trtspec.errors import TrtspecError
from trtspec.runtime.engine import STAMP
from trtspec.trtllm.versions import release_for

SCRIPT = "build.sh"


def write_stamp(directory: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Write trtspec.json, and return it."""
    stamp = {"runtime": "tensorrt_llm", "trtspec_version": __version__, **content}
    write_json(directory / STAMP, stamp)
    return stamp


def write_script(directory: Path, command: Sequence[str], stamp: dict[str, Any]) -> None:
    """Write build.sh, which runs `command` in its own directory, on a machine with TensorRT-LLM."""
    version, sm = stamp["tensorrt_llm_version"], stamp["sm"]
    release = release_for(version)
    place = f"for example in the container {release.image}" if release else "where it is installed"
    about = [
        # JSON, so that no character of a name can end the comment
        f"Builds the engine of the {stamp['role']} {json.dumps(stamp.get('source'))} again, by hand.",
        f"Needs trtllm-build of TensorRT-LLM {version}, {place},",
        f"a GPU of architecture sm_{sm}, and the checkpoint below; replaces the engine beside this script.",
        "Paths are relative to this script. CUDA_VISIBLE_DEVICES chooses the GPUs.",
    ]
    lines = [command[0]]
    for word in command[1:]:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    text = (
        "#!/bin/sh\n"
        + "".join(f"# {line}\n" for line in about)
        + 'set -eu\ncd "$(dirname "$0")"\nexec '
        + " \\\n  ".join(lines)
        + "\n"
    )
    path = directory / SCRIPT
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
        TrtspecError: missing, unreadable, or something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrtspecError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise TrtspecError(f"not valid JSON ({error})", where=str(path)) from error
    if not isinstance(content, dict):
        raise TrtspecError("not a JSON object", where=str(path))
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object for people to read."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
