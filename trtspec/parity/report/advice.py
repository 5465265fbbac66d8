"""What a person does next about a fault, or where a check could not decide; the advice itself is in advice.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trtspec.parity.result import Check, Finding, Part, Verdict


def advice(check: Check, finding: Finding) -> str:
    """What to do about one finding; empty where nothing has to be done."""
    if finding.verdict.passes:
        return ""
    return _first(Verdict.FAULT, check.name, finding.part, finding.problem)


def advice_undecided(check: Check, part: Part | None = None) -> str:
    """What lets a check, or one part of it, decide; empty where it is not inconclusive."""
    whole = part or check
    if whole.verdict != Verdict.INCONCLUSIVE:
        return ""
    return _first(Verdict.INCONCLUSIVE, check.name, part.name if part else None, whole.evidence)


def _first(verdict: Verdict, check: str, part: str | None, words: str) -> str:
    return next(
        (
            row["advice"]
            for row in _rows()
            if row.get("verdict", Verdict.FAULT.value) == verdict.value
            and row["check"] in (check, "any")
            and row.get("part", part) == part
            and any(said in words for said in row.get("when", [""]))
        ),
        "",
    )


@cache
def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return rows
