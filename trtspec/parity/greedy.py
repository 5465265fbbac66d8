"""The greedy checks: against the reference's own choice, and with drafts against without.

A difference of tokens is a tie if rounding can explain it, else a fault. After its first difference a sequence says
nothing more: another token is another text. So each sequence is compared up to there, and only that difference counts.
Knows no sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtspec.decoding.sampling import SamplingParams
from trtspec.parity.result import Check, Choice, Finding, Verdict, worst
from trtspec.parity.subjects import Answer, Subject
from trtspec.parity.trial import Case, Trial

GREEDY = "greedy"
SPECULATION = "speculation"


def greedy_answers(trial: Trial, subject: Subject, cases: Sequence[Case], num_draft_tokens: int) -> dict[Case, Answer]:
    """What the subject answers without any draw."""
    answers = {}
    for done, case in enumerate(cases, 1):
        answers[case] = subject.generate(trial.query(case, SamplingParams(), num_draft_tokens))
        trial.advance(done / len(cases))
    return answers


def check_greedy(trial: Trial, subject: str, answers: Mapping[Case, Answer]) -> Check:
    """Each greedy token is the one that the reference puts first, and the output ends where the reference ends it.

    The reference is forced along the output; the regret of a token is the reference's largest logit minus its logit
    for that token.
    """
    findings, compared = [], 0
    for case, answer in answers.items():
        rows = trial.yardstick.along(case.ids, answer.tokens)
        pairs = [
            (trial.yardstick.choice(row, token), trial.yardstick.choice(row, int(row.argmax())))
            for row, token in zip(rows, answer.tokens, strict=False)
        ]
        place = next((i for i, (chosen, expected) in enumerate(pairs) if chosen.logit < expected.logit), None)
        compared += len(pairs) if place is None else place + 1
        if place is not None:
            findings.append(_difference(trial, GREEDY, subject, case, place, *pairs[place]))
        shape = trial.misshapen(trial.query(case, SamplingParams(), trial.num_draft_tokens), answer)
        if shape:
            findings.append(trial.fault(GREEDY, subject, case, *shape))
    passes = sum(len(answer.blocks) for answer in answers.values())
    per_pass = sum(len(answer.ids) for answer in answers.values()) / max(1, passes)
    return _check(
        GREEDY,
        subject,
        "each greedy token is the one that the reference puts first, and the output ends where the reference ends it",
        compared,
        len(answers),
        findings,
        f"; {per_pass:.2f} tokens emitted at a time" if trial.num_draft_tokens else "",
    )


def check_speculation(
    trial: Trial, subject: str, drafted: Mapping[Case, Answer], plain: Mapping[Case, Answer]
) -> Check:
    """The greedy output is the same with drafts and without; `plain` may hold fewer prompts than `drafted`."""
    findings, compared = [], 0
    for case, theirs in plain.items():
        ours = drafted[case]
        pairs = list(zip(ours.tokens, theirs.tokens, strict=False))
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        compared += len(pairs) if place is None else place + 1
        if place is not None:
            row = trial.yardstick.along(case.ids, ours.tokens[:place])[-1]
            chosen, other = (trial.yardstick.choice(row, answer.tokens[place]) for answer in (ours, theirs))
            findings.append(_difference(trial, SPECULATION, subject, case, place, chosen, other))
        elif len(ours.tokens) != len(theirs.tokens):
            problem = f"{len(ours.ids)} tokens with drafts, {len(theirs.ids)} without"
            findings.append(trial.fault(SPECULATION, subject, case, len(pairs), problem))
        elif ours.text != theirs.text:
            problem = "the same token ids give another text with drafts than without"
            findings.append(trial.fault(SPECULATION, subject, case, 0, problem))
    return _check(
        SPECULATION,
        subject,
        "the greedy output is the same with drafts and without",
        compared,
        len(plain),
        findings,
    )


def _difference(
    trial: Trial, check: str, subject: str, case: Case, position: int, chosen: Choice, expected: Choice
) -> Finding:
    """A tie where the two logits differ by no more than the tolerance, else a fault."""
    end_ids = trial.yardstick.end_ids
    regret = abs(expected.logit - chosen.logit)
    tie = regret <= trial.yardstick.tolerance
    if chosen.id in end_ids and expected.id not in end_ids:
        what = "stops early"
    elif expected.id in end_ids and chosen.id not in end_ids:
        what = "goes on after the end"
    else:
        what = "another token"
    return Finding(
        prompt=case.number,
        position=position,
        verdict=Verdict.TIE if tie else Verdict.FAULT,
        problem=f"{what}: regret {regret:.4g}, tolerance {trial.yardstick.tolerance:g}",
        reproduce=trial.reproduce(check, subject, case.number),
        chosen=chosen,
        expected=expected,
    )


def _check(
    name: str,
    subject: str,
    hypothesis: str,
    compared: int,
    num_prompts: int,
    findings: Sequence[Finding],
    more: str = "",
) -> Check:
    different = len({finding.prompt for finding in findings})
    return Check(
        name=name,
        subject=subject,
        hypothesis=hypothesis,
        verdict=worst([Verdict.PASS, *(finding.verdict for finding in findings)]),
        evidence=f"{compared} tokens of {num_prompts} prompts compared; {num_prompts - different} prompts without a "
        f"difference{more}",
        findings=tuple(findings),
    )
