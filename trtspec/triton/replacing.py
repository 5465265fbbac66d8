"""Writing a model repository in the place of an older one: the new one is there whole, or the old one still is.

Knows how a repository of trtspec is told from anything else that may lie there; not what is in it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from trtspec.errors import TrtspecError

MARKER = Path("tensorrt_llm", "config.pbtxt")  # every repository of either track has this model


class replacing:
    """Context of a staging directory that takes the place of `out_dir` when the block ends without an error.

    Raises:
        TrtspecError: something that is no model repository is in that place.
    """

    def __init__(self, out_dir: Path) -> None:
        self._out_dir = out_dir

    def __enter__(self) -> Path:
        out = self._out_dir
        if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / MARKER).is_file())):
            raise TrtspecError(
                "something else than a model repository is here",
                where=str(out),
                fix="move it away or choose another output.model_repo",
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        self._staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        staged = self._staging / "new"
        staged.mkdir()
        return staged

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                if self._out_dir.exists():
                    os.rename(self._out_dir, self._staging / "old")
                os.rename(self._staging / "new", self._out_dir)
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)
