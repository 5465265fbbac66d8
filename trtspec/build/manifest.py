"""manifest.json: what was built from what, on which machine, by which steps.

Knows the records of the steps and the spec, not what the steps do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from trtspec.build import machine
from trtspec.build.graph import CACHED, OK, Results
from trtspec.spec.schema import Spec

NOT_ON_GPU = "not run on a GPU"


def manifest(
    spec: Spec, models: Mapping[str, Any], results: Results, outputs: Mapping[str, Path | None], ran: Collection[str]
) -> dict[str, Any]:
    """The manifest as JSON.

    Args:
        spec: what was built.
        models: role -> what is recorded of its source (location, fingerprint).
        results: the records of all steps.
        outputs: step -> where its output is.
        ran: steps that ran in this build; the others were cached.
    """
    return {
        "version": 1,
        "name": spec.name,
        "spec": {"file": str(spec.source), "sha256": spec.hash(), "resolved": spec.model_dump(mode="json")},
        "versions": machine.versions(),
        "hardware": machine.hardware(),
        "models": dict(models),
        "steps": {
            name: {
                "status": OK if name in ran else CACHED,
                "seconds": record.seconds,
                "finished_at": record.finished_at,
                "input_hash": record.input_hash,
                "commands": record.actions,
                "gpu": record.facts.get("trtspec", {}).get("gpu") or NOT_ON_GPU,
                "facts": record.facts,
                "output": str(outputs[name]) if outputs[name] else None,
                "files": {path: {"sha256": file.sha256, "bytes": file.size} for path, file in record.files.items()},
            }
            for name, record in results.items()
        },
    }
