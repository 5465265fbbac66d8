"""The simple sampled check: many answers to a few prompts, their first two tokens counted against the exact law.

Needs no theory beyond Pearson's test, and no draft: what `sampled` finds by transforms shows here in plain counts.
Knows no transforms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trtspec.errors import TrtspecError
from trtspec.parity import statistics
from trtspec.parity.result import Check, Finding, Verdict, worst
from trtspec.parity.sampled import BLIND
from trtspec.parity.statistics import Evidence
from trtspec.parity.subjects import Query, Subject, Unsupported
from trtspec.parity.trial import Case, Trial

DRAWS = "draws"
HYPOTHESIS = "the first two tokens of an answer come as often as the reference's distribution says"
_MIN_BRANCH = 4 * statistics.MIN_EXPECTED  # answers expected behind a first token whose second tokens are counted
_DRAWS_A_PROMPT = 200  # with fewer, one more prompt would say less than more draws of those there are
_MAX_PROMPTS = 4
_DOUBT = 0.05  # of the confidence interval


@dataclass(frozen=True)
class _Tally:
    """What is counted behind one prompt.

    Attributes:
        case: the prompt.
        num: answers to draw.
        first: distribution float64 `[vocab]` of the first token.
        seconds: of the second, behind each first token that is frequent enough.
        first_counts, second_counts: the tokens that came.
    """

    case: Case
    num: int
    first: np.ndarray
    seconds: dict[int, np.ndarray]
    first_counts: np.ndarray
    second_counts: dict[int, np.ndarray] = field(default_factory=dict)

    def add(self, first: int, second: int | None) -> None:
        """Count an answer."""
        self.first_counts[first] += 1
        if second is not None and first in self.seconds:
            empty = np.zeros(len(self.first), dtype=int)
            self.second_counts.setdefault(first, empty)[second] += 1


def check_draws(trial: Trial, subject: Subject) -> Check:
    """First and second tokens come as often as the reference's distribution says.

    Second tokens are counted behind each first token apart, against the distribution given that token; which first
    tokens are worth it is decided by their probability, before anything is drawn. One draft token is proposed in each
    answer, so the first token is an accepted or a corrected one, and the second often a bonus token. The prompts are
    those with the widest distributions of first tokens.

    Under this hypothesis the check raises a false alarm with probability `trial.alpha`. It is inconclusive if it finds
    nothing and could not have seen a total variation of `BLIND` among the first tokens.
    """
    if not trial.num_draws:
        return Check(DRAWS, subject.name, HYPOTHESIS, Verdict.NOT_APPLICABLE, "no draws were asked for")
    tallies = _tallies(trial)
    findings: list[Finding] = []
    try:
        findings += _count(trial, subject, tallies)
    except Unsupported as reason:
        return Check(DRAWS, subject.name, HYPOTHESIS, Verdict.NOT_APPLICABLE, str(reason))
    evidence = (
        statistics.chi_square("first tokens", [(tally.first, tally.first_counts) for tally in tallies]),
        statistics.chi_square("second tokens", list(_seconds(tallies))),
    )
    findings += trial.rejections(DRAWS, subject.name, evidence, _advice(trial, tallies))
    bins = [statistics.pooled(tally.first, tally.first_counts) for tally in tallies]
    num_bins = 1 + sum(len(expected) - 1 for _, expected in bins)
    num_draws = sum(tally.num for tally in tallies)
    visible = statistics.detectable_draws(num_draws, num_bins, trial.alpha / len(evidence))
    return Check(
        name=DRAWS,
        subject=subject.name,
        hypothesis=HYPOTHESIS,
        verdict=worst(
            [Verdict.PASS if visible <= BLIND else Verdict.INCONCLUSIVE, *(finding.verdict for finding in findings)]
        ),
        evidence=_evidence(tallies, bins, evidence, visible),
        findings=tuple(findings),
        statistics=evidence,
        data=_series(bins, tallies),
        detectable=visible,
    )


def queries(trial: Trial) -> Iterator[Query]:
    """What the check asks, whatever the answers are."""
    return (query for _, query in _queries(trial, _tallies(trial))) if trial.num_draws else iter(())


def _tallies(trial: Trial) -> list[_Tally]:
    """Empty ones for the prompts with the least certain first tokens, as many as the draws suffice for."""
    laws = sorted(((case, _next(trial, case, ())) for case in trial.cases), key=lambda pair: float(pair[1].max()))
    chosen = laws[: max(1, min(_MAX_PROMPTS, trial.num_draws // _DRAWS_A_PROMPT))]
    end = trial.yardstick.end_ids[:1]
    tallies = []
    for number, (case, first) in enumerate(chosen):
        num = (trial.num_draws + number) // len(chosen)
        frequent = [int(token) for token in np.flatnonzero(first * num >= _MIN_BRANCH) if token not in end]
        seconds = {token: _next(trial, case, (token,)) for token in frequent}
        tallies.append(_Tally(case, num, first, seconds, np.zeros(len(first), dtype=int)))
    return tallies


def _count(trial: Trial, subject: Subject, tallies: Sequence[_Tally]) -> Iterator[Finding]:
    """Draw all answers; stops at one that cannot be counted."""
    total = sum(tally.num for tally in tallies)
    for done, (tally, query) in enumerate(_queries(trial, tallies), 1):
        try:
            answer = subject.generate(query)
        except Unsupported:
            raise
        except TrtspecError as error:
            yield trial.refused(DRAWS, subject.name, tally.case, error)
            return
        indices = [trial.yardstick.index(token) for token in answer.tokens[:2]]
        if not indices or not all(0 <= index < len(tally.first) for index in indices):
            yield trial.fault(DRAWS, subject.name, tally.case, 0, f"answered {answer.tokens}")
            return
        tally.add(indices[0], indices[1] if len(indices) == 2 else None)
        trial.advance(done / total)


def _queries(trial: Trial, tallies: Sequence[_Tally]) -> Iterator[tuple[_Tally, Query]]:
    for tally in tallies:
        for number in range(tally.num):
            sampling = replace(trial.samplings[0], seed=trial.request_seed(tally.case.number, number, 2))
            yield tally, trial.query(tally.case, sampling, min(1, trial.num_draft_tokens), max_tokens=2)


def _seconds(tallies: Sequence[_Tally]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for tally in tallies:
        for token, counts in tally.second_counts.items():
            yield tally.seconds[token], counts


def _advice(trial: Trial, tallies: Sequence[_Tally]) -> dict[str, str]:
    """By the name of the test, the tokens whose numbers are furthest from what is expected."""
    told: list[tuple[float, str]] = []
    for tally in tallies:
        total = int(tally.first_counts.sum())
        expected = tally.first * total
        far = np.divide(np.abs(tally.first_counts - expected), np.sqrt(expected + 1e-3))
        for token in np.argsort(-far)[:3].tolist():
            piece = trial.yardstick.piece(token)
            words = f"{piece!r} {tally.first_counts[token]} times, expected {expected[token]:.1f} of {total}"
            told.append((float(far[token]), f"prompt {tally.case.number} {words}"))
    shown = "; ".join(words for _, words in sorted(told, reverse=True)[:3])
    return {"first tokens": f"; furthest off: {shown}"}


def _evidence(
    tallies: Sequence[_Tally],
    bins: Sequence[tuple[np.ndarray, np.ndarray]],
    evidence: Sequence[Evidence],
    visible: float,
) -> str:
    intervals = []
    for tally, (observed, expected) in zip(tallies, bins, strict=True):
        low, middle, high = statistics.total_variation(observed, expected, _DOUBT / len(tallies))
        intervals.append(f"{middle:.2f} ({low:.2f} to {high:.2f}) at prompt {tally.case.number}, {len(expected)} bins")
    return (
        f"{sum(int(tally.first_counts.sum()) for tally in tallies)} answers, smallest p-value "
        f"{min(test.p_value for test in evidence):.2g} of {len(evidence)} tests; total variation of the first tokens "
        f"(95 % confidence together): {', '.join(intervals)}; found with probability 95 %: {visible:.2f}"
    )


def _series(bins: Sequence[tuple[np.ndarray, np.ndarray]], tallies: Sequence[_Tally]) -> dict[str, Sequence[Any]]:
    """Observed and expected numbers of first tokens in each bin, the most probable first, the rest together last."""
    return {
        f"first tokens, prompt {tally.case.number}": [[*map(float, pair)] for pair in zip(*pooled, strict=True)]
        for tally, pooled in zip(tallies, bins, strict=True)
    }


def _next(trial: Trial, case: Case, tokens: tuple[int, ...]) -> np.ndarray:
    row = trial.yardstick.along(case.ids, tokens)[-1]
    return trial.yardstick.distribution(row, (*case.ids, *tokens), trial.samplings[0])
