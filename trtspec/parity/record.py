"""The last good verdict on a spec and what it was reached on, so that nothing unchanged has to be checked again.

Knows files and hashes; not what a check does.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.build.fingerprint import digest, digest_code, digest_file
from trtspec.build.output import write_atomic

if TYPE_CHECKING:
    from trtspec.parity.suite import Selection
    from trtspec.spec.schema import Spec

_CODE = ("parity", "decoding", "runtime", "models", "triton", "trtllm")


def subject_of(spec: Spec, selection: Selection, server: str | None) -> str:
    """Hash of all that a verdict depends on: spec, prompts, engines, repository, the code, and what was selected.

    Args:
        spec: the spec.
        selection: what of its parity section is run.
        server: address of the server that is checked too.
    """
    built = [*(spec.engines_dir / role for role in spec.models), spec.checkpoints_dir, spec.model_repo_dir]
    files = sorted(path for directory in built for path in directory.rglob("*") if path.is_file())
    return digest(
        {
            "spec": spec.hash(),
            "selection": repr(selection),
            "server": server,
            "prompts": digest_file(spec.prompts_path),
            "files": [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files],
            "code": digest_code(*_CODE),
        }
    )


def save(spec: Spec, subject: str, lines: list[str]) -> None:
    """Keep a good verdict, as the lines that report it."""
    date = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    write_atomic(_path(spec), json.dumps({"subject": subject, "date": date, "lines": lines}, indent=2) + "\n")


def recall(spec: Spec, subject: str) -> list[str] | None:
    """The lines of the kept verdict, if it was reached on this subject."""
    try:
        record = json.loads(_path(spec).read_text(encoding="utf-8"))
        if record["subject"] == subject:
            return [*record["lines"], f"checked on {record['date']}; nothing has changed since"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no record, or none that can be read: check
    return None


def _path(spec: Spec) -> Path:
    return spec.engines_dir / ".parity.json"
