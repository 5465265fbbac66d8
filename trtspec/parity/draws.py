"""The simple sampled check: many answers to one prompt, their first two tokens counted against the exact distribution.

Needs no theory beyond Pearson's test, and no draft: what `sampled` finds by transforms shows here in plain counts.
Knows no transforms.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trtspec.parity import statistics
from trtspec.parity.result import Check, Finding, Verdict, worst
from trtspec.parity.sampled import BLIND
from trtspec.parity.subjects import Subject
from trtspec.parity.trial import Case, Trial

DRAWS = "draws"
_MIN_BRANCH = 4 * statistics.MIN_EXPECTED  # answers expected behind a first token whose second tokens are counted


def check_draws(trial: Trial, subject: Subject) -> Check:
    """First and second tokens come as often as the reference's distribution says.

    Second tokens are counted behind each first token apart, against the distribution given that token; which first
    tokens are worth it is decided by their probability, before anything is drawn. One draft token is proposed in each
    answer, so the first token is an accepted or a corrected one, and the second often a bonus token. The prompt is the
    one with the widest distribution of first tokens.

    Under this hypothesis the check raises a false alarm with probability `trial.alpha`. It is inconclusive if it finds
    nothing and could not have seen a total variation of `BLIND` among the first tokens.
    """
    case, first = _widest(trial)
    seconds = _second(trial, case, first)
    first_counts = np.zeros(len(first), dtype=int)
    second_counts = {token: np.zeros(len(first), dtype=int) for token in seconds}
    findings: list[Finding] = []
    for number in range(trial.num_draws):
        sampling = replace(trial.samplings[0], seed=trial.request_seed(case.number, number, 2))
        answer = subject.generate(trial.query(case, sampling, min(1, trial.num_draft_tokens), max_tokens=2))
        indices = [trial.yardstick.index(token) for token in answer.tokens[:2]]
        if not indices or not all(0 <= index < len(first) for index in indices):
            findings.append(trial.fault(DRAWS, subject.name, case, 0, f"answered {answer.tokens}"))
            break
        first_counts[indices[0]] += 1
        if len(indices) == 2 and indices[0] in second_counts:
            second_counts[indices[0]][indices[1]] += 1
        trial.advance((number + 1) / trial.num_draws)
    evidence = (
        statistics.chi_square("first tokens", [(first, first_counts)]),
        statistics.chi_square("second tokens", [(seconds[token], second_counts[token]) for token in seconds]),
    )
    findings += trial.rejections(DRAWS, subject.name, evidence)
    num_bins = len(statistics.pooled(first, first_counts)[0])
    visible = statistics.detectable_draws(trial.num_draws, num_bins, trial.alpha / len(evidence))
    return Check(
        name=DRAWS,
        subject=subject.name,
        hypothesis="the first two tokens of an answer come as often as the reference's distribution says",
        verdict=worst(
            [Verdict.PASS if visible <= BLIND else Verdict.INCONCLUSIVE, *(finding.verdict for finding in findings)]
        ),
        evidence=f"{trial.num_draws} answers to prompt {case.number}, first tokens in {num_bins} bins, smallest "
        f"p-value {min(test.p_value for test in evidence):.2g} of {len(evidence)} tests; total variation found with "
        f"probability 95 %: {visible:.2f}",
        findings=tuple(findings),
        statistics=evidence,
    )


def _widest(trial: Trial) -> tuple[Case, np.ndarray]:
    """The prompt with the least certain first token, and the distribution float64 `[vocab]` of that token."""
    first = {case: _next(trial, case, ()) for case in trial.cases}
    return min(first.items(), key=lambda item: item[1].max())


def _second(trial: Trial, case: Case, first: np.ndarray) -> dict[int, np.ndarray]:
    """For each first token that is frequent enough, the distribution of what follows it."""
    frequent = np.flatnonzero(first * trial.num_draws >= _MIN_BRANCH)
    end = trial.yardstick.end_ids[:1]
    return {int(token): _next(trial, case, (int(token),)) for token in frequent if token not in end}


def _next(trial: Trial, case: Case, tokens: tuple[int, ...]) -> np.ndarray:
    row = trial.yardstick.along(case.ids, tokens)[-1]
    return trial.yardstick.distribution(row, (*case.ids, *tokens), trial.samplings[0])
