"""Content hashes: of JSON values, of files, and of the package's own source.

Knows nothing of steps or models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent.parent


def digest(value: Any) -> str:
    """sha256 (hex) of a JSON value; the order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def digest_file(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def digest_code(*parts: str) -> str:
    """sha256 (hex) of source files of the package, so that a changed step runs again.

    Args:
        parts: files or directories relative to the package, for example `runtime/engine.py` or `decoding`.

    Raises:
        FileNotFoundError: a part that does not exist.
    """
    files = sorted(path for part in parts for path in _source_files(_PACKAGE / part))
    return digest([[path.relative_to(_PACKAGE).as_posix(), digest_file(path)] for path in files])


def _source_files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for child in path.iterdir():
        if child.name != "__pycache__" and child.suffix != ".pyc":
            yield from _source_files(child)
