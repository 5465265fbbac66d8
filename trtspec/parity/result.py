"""What a parity run found: verdicts, findings, checks, and the report that holds them.

Plain records; knows neither how they are made nor how they are printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from trtspec.parity.statistics import Evidence


class Verdict(str, Enum):
    """What a check, or one finding of it, amounts to. A tie passes: rounding decided between equals."""

    PASS = "pass"
    TIE = "tie"
    FAULT = "fault"
    INCONCLUSIVE = "inconclusive"
    NOT_APPLICABLE = "not applicable"

    @property
    def passes(self) -> bool:
        """Whether nothing has to be done about it."""
        return self in (Verdict.PASS, Verdict.TIE, Verdict.NOT_APPLICABLE)


# The worst first: the verdict of many is the first of these that occurs.
_SEVERITY = (Verdict.FAULT, Verdict.INCONCLUSIVE, Verdict.TIE, Verdict.PASS, Verdict.NOT_APPLICABLE)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of the whole; not applicable where there is nothing."""
    return next((v for v in _SEVERITY if v in verdicts), Verdict.NOT_APPLICABLE)


@dataclass(frozen=True)
class Choice:
    """A token that was or should have been chosen, with the reference's logit for it."""

    id: int
    text: str
    logit: float


@dataclass(frozen=True)
class Finding:
    """One difference between the subject and the reference.

    Attributes:
        prompt: line number in the prompt file; None where all prompts together make it.
        position: place in the output, from 0.
        verdict: tie or fault.
        problem: what is different, in one clause.
        reproduce: the command that runs it again.
        part: the claim of the check that it contradicts, where there are several.
        chosen: what the subject emitted, where the difference is one of tokens.
        expected: what the reference puts first there.
    """

    prompt: int | None
    position: int | None
    verdict: Verdict
    problem: str
    reproduce: str
    chosen: Choice | None = None
    expected: Choice | None = None
    part: str | None = None


@dataclass(frozen=True)
class Part:
    """One of the claims that a check is made of, with a verdict of its own.

    Attributes:
        name: short, in words with hyphens; `--check CHECK:NAME` runs it alone.
        hypothesis: what is true if it passes.
        verdict: the outcome.
        evidence: how much was compared, in one clause; of what is not applicable, why.
    """

    name: str
    hypothesis: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Check:
    """One check of one subject.

    Attributes:
        name: a key of `trtspec.parity.checks.CHECKS`; of a checkpoint format, logits or layers.
        subject: what was checked.
        hypothesis: what is true if the check passes.
        verdict: the outcome.
        evidence: how much was compared, and how well, in one line.
        findings: the differences, in order of appearance.
        statistics: the tests behind a statistical verdict.
        parts: the claims that it is made of, where they are several.
        data: series for plots, by name; each a list of numbers or of lists of numbers.
        detectable: total variation that it would have found with probability 95 %, of a statistical check.
        tokens: new tokens that the subject generated for it.
        seconds: how long it took.
    """

    name: str
    subject: str
    hypothesis: str
    verdict: Verdict
    evidence: str
    findings: tuple[Finding, ...] = ()
    statistics: tuple[Evidence, ...] = ()
    parts: tuple[Part, ...] = ()
    data: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    detectable: float | None = None
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """A whole run."""

    name: str
    checks: tuple[Check, ...]
    settings: dict[str, Any]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the checks."""
        return worst([check.verdict for check in self.checks])

    @property
    def failed(self) -> bool:
        """Whether a check found a fault."""
        return self.verdict == Verdict.FAULT

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "settings": self.settings,
            "checks": [asdict(check) for check in self.checks],
        }
