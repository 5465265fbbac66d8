"""What a person does next about a fault; the advice itself is in advice.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

from trtspec.parity.result import Check, Finding


def advice(check: Check, finding: Finding) -> str:
    """What to do about one finding; empty where nothing has to be done."""
    if finding.verdict.passes:
        return ""
    said = f"{finding.part or ''} {finding.problem}"
    return next((row["advice"] for row in _rows() if row["check"] == check.name and row.get("when", "") in said), "")


@cache
def _rows() -> list[dict[str, str]]:
    rows: list[dict[str, str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return rows
