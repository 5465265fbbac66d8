"""The greedy check: every token of every answer against the reference's own choice.

The reference is forced along the subject's whole output, so that each token is judged given those before it, right or
wrong, and one difference hides nothing behind it. The regret of a token is the reference's largest logit minus its
logit for that token: a tie where rounding can explain it, else a fault. Knows no sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trtspec.decoding.sampling import SamplingParams
from trtspec.errors import TrtspecError
from trtspec.parity.result import Check, Choice, Finding, Verdict, worst
from trtspec.parity.subjects import Answer, Query, Subject, Unsupported
from trtspec.parity.trial import Case, Trial

GREEDY = "greedy"
HYPOTHESIS = (
    "each greedy token is the one that the reference puts first, and the output ends where the reference ends it"
)
DOUBTFUL, IMPOSSIBLE = 1e-3, 1e-6  # p-values of `excess`: inconclusive, and a fault
_FAULTS_SHOWN = 3  # of one prompt; more of the same teach nothing
_TIES_SHOWN = 20  # of all prompts
_FAR = 1e3  # logits; a masked one is not further away
_RIVALS = 32  # logits next to the largest that could have been chosen instead


@dataclass(frozen=True)
class Judged:
    """One token of an answer.

    Attributes:
        position: its place in the output.
        chosen: what the subject emitted.
        expected: what the reference puts first.
        gaps: float64 `[_RIVALS]`, by how much other logits of the reference are below its largest, in rising order.
    """

    position: int
    chosen: Choice
    expected: Choice
    gaps: np.ndarray

    @property
    def regret(self) -> float:
        """In logits; infinite for what is no id of the model."""
        return self.expected.logit - self.chosen.logit


def check_greedy(trial: Trial, subject: Subject) -> Check:
    """`HYPOTHESIS`, and the regrets together are no larger than rounding makes them (`excess`)."""
    answers: dict[Case, Answer] = {}
    judged: dict[Case, list[Judged]] = {}
    findings: list[Finding] = []
    for done, (case, query) in enumerate(zip(trial.cases, queries(trial), strict=True), 1):
        try:
            answer = subject.generate(query)
        except Unsupported as error:
            return Check(GREEDY, subject.name, HYPOTHESIS, Verdict.NOT_APPLICABLE, error.problem)
        except TrtspecError as error:
            findings.append(trial.refused(GREEDY, subject.name, case, error))
            continue
        answers[case] = answer
        judged[case] = judge(trial, case, answer.tokens)
        findings += _differences(trial, subject.name, case, judged[case])
        if shape := trial.misshapen(query, answer):
            findings.append(trial.fault(GREEDY, subject.name, case, *shape))
        regrets = [token.regret for token in judged[case]]
        record = {"prompt": case.number, "tokens": list(answer.tokens), "regrets": regrets}
        trial.note(GREEDY, {**record, "tolerance": trial.yardstick.tolerance})
        trial.advance(done / len(trial.cases))
    tokens = [token for of_case in judged.values() for token in of_case]
    findings += _systematic(trial, subject.name, tokens)
    return _check(trial, subject.name, answers, judged, findings)


def queries(trial: Trial) -> Iterator[Query]:
    """What the check asks, whatever the answers are."""
    return (trial.query(case, SamplingParams(), trial.num_draft_tokens) for case in trial.cases)


def judge(trial: Trial, case: Case, tokens: Sequence[int]) -> list[Judged]:
    """Each token given those before it, up to what no model can be asked to go on from: an end id, or no id at all."""
    yardstick = trial.yardstick
    result = []
    for position, (row, token) in enumerate(zip(yardstick.along(case.ids, tokens), tokens, strict=False)):
        chosen, expected = yardstick.choice(row, token), yardstick.choice(row, int(row.argmax()))
        largest = np.partition(row, -_RIVALS)[-_RIVALS:] if len(row) > _RIVALS else row
        gaps = np.sort(np.minimum(expected.logit - largest.astype(np.float64), _FAR))[1:]
        result.append(Judged(position, chosen, expected, gaps))
        if token in yardstick.end_ids:
            break
    return result


def difference(
    trial: Trial,
    check: str,
    subject: str,
    case: Case,
    position: int,
    chosen: Choice,
    expected: Choice,
    part: str | None = None,
) -> Finding:
    """A tie where the reference's logits of the two differ by no more than the tolerance, else a fault."""
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
        reproduce=trial.reproduce(check if part is None else f"{check}:{part}", subject, case.number),
        chosen=chosen,
        expected=expected,
        part=part,
    )


def excess(tokens: Sequence[Judged], rounding: float) -> float:
    """A bound on the probability that rounding alone makes the regrets of all tokens together as large as they are.

    Rounding moves the difference of two logits by a normal error of standard deviation `rounding`, so it puts a logit
    that is g below the largest in its place with probability p = Phi(-g / rounding) at most, at a regret of g. Then
    E exp(t regret) <= 1 + sum over the rivals of p (exp(t g) - 1), and Chernoff's bound on the sum S of the regrets is
    the least over t of exp(-t S) times the product of these.

    It sees what no single regret shows. Of SmolLM2-135M-Instruct in bfloat16 (`rounding` 0.2, 384 and 356 tokens) the
    bound is 1 for two right engines. Weights rounded to 8 bits with one scale a tensor (logits off by 0.7) come to
    1e-4 and 9e-9 from the ties alone, with 16 tokens beyond the tolerance besides; a rope base five times too large
    (0.6) to 5e-4 and 6e-3, with 15 and 11. What moves logits by less than `rounding` is hidden in bfloat16: 8 bits with
    a scale a channel (0.16), a rope base off by 10 % (0.04). In float32 both show at once, with regrets far beyond the
    tolerance; what moves logits by 0.001 (a norm's epsilon left out) changes no token, and is for the check of logits.
    """
    from scipy.special import log_ndtr

    if not tokens:
        return 1.0
    total = sum(token.regret for token in tokens)
    gaps = np.array([token.gaps for token in tokens])
    log_p = log_ndtr(-gaps / rounding)

    def exponent(t: float) -> float:
        return float(np.log1p((np.exp(log_p + t * gaps) - np.exp(log_p)).sum(1)).sum()) - t * total

    return math.exp(min(0.0, *(exponent(t / rounding) for t in np.geomspace(0.01, 8.0, 40))))


def apparent_error(tokens: Sequence[Judged]) -> float:
    """Standard deviation of the error, in logits, that would make the regrets as large as they are together."""
    from scipy.special import ndtr

    total = sum(token.regret for token in tokens)
    gaps = np.array([token.gaps for token in tokens])
    sizes = np.geomspace(1e-6, 10.0, 71)
    return float(next((size for size in sizes if (ndtr(-gaps / size) * gaps).sum() >= total), sizes[-1]))


def _differences(trial: Trial, subject: str, case: Case, judged: Sequence[Judged]) -> list[Finding]:
    """A finding for each token that is not the reference's, in order; of many faults, the first."""
    findings = [
        difference(trial, GREEDY, subject, case, token.position, token.chosen, token.expected)
        for token in judged
        if token.regret > 0
    ]
    faults = [finding for finding in findings if finding.verdict == Verdict.FAULT]
    return [finding for finding in findings if finding.verdict != Verdict.FAULT or finding in faults[:_FAULTS_SHOWN]]


def _systematic(trial: Trial, subject: str, tokens: Sequence[Judged]) -> list[Finding]:
    """A finding where the ties and small regrets of all prompts together are more than rounding explains."""
    rounding = trial.yardstick.rounding
    ties = [token for token in tokens if token.regret <= trial.yardstick.tolerance]
    if (bound := excess(ties, rounding)) > DOUBTFUL:
        return []
    num = sum(token.regret > 0 for token in ties)
    verdict = Verdict.FAULT if bound <= IMPOSSIBLE else Verdict.INCONCLUSIVE
    problem = (
        f"{num} ties in {len(ties)} tokens, regret {sum(token.regret for token in ties):.3g} in all: as if logits were "
        f"off by {apparent_error(ties):.2g}, where rounding moves them by {rounding:.2g} at most (p-value below "
        f"{bound:.1g})"
    )
    return [Finding(None, None, verdict, problem, trial.reproduce(GREEDY, subject, None))]


def _check(
    trial: Trial,
    subject: str,
    answers: dict[Case, Answer],
    judged: dict[Case, list[Judged]],
    findings: Sequence[Finding],
) -> Check:
    tokens = [token for of_case in judged.values() for token in of_case]
    regrets = [token.regret for token in tokens]
    num_ties = sum(0 < regret <= trial.yardstick.tolerance for regret in regrets)
    num_faults = sum(regret > trial.yardstick.tolerance for regret in regrets)
    different = len({finding.prompt for finding in findings} - {None})
    evidence = f"{len(tokens)} tokens of {len(answers)} prompts compared"
    evidence += f"; {len(trial.cases) - different} prompts without a difference"
    if num_ties or num_faults:
        evidence += f"; {num_ties} ties, {num_faults} other tokens, largest regret {max(regrets):.2g}"
    blocks = [block for answer in answers.values() for block in answer.blocks]
    drafting = trial.num_draft_tokens > 0 or any(len(block) > 1 for block in blocks)
    if drafting:
        evidence += f"; {sum(map(len, blocks)) / max(1, len(blocks)):.2f} tokens emitted at a time"
    ties = [finding for finding in findings if finding.verdict == Verdict.TIE]
    return Check(
        name=GREEDY,
        subject=subject,
        hypothesis=HYPOTHESIS,
        verdict=worst([Verdict.PASS if tokens else Verdict.INCONCLUSIVE, *(finding.verdict for finding in findings)]),
        evidence=evidence,
        findings=tuple(finding for finding in findings if finding not in ties[_TIES_SHOWN:]),
        data={
            "prompts": [case.number for case in answers],
            "regrets": [[token.regret for token in judged[case] if math.isfinite(token.regret)] for case in answers],
            "places": [[i for block in answer.blocks for i in range(len(block))] for answer in answers.values()],
            "accepted_per_place": _accepted_per_place(blocks) if drafting else [],
        },
    )


def _accepted_per_place(blocks: Sequence[Sequence[int]]) -> list[int]:
    """How many blocks have more than i tokens, for each i: the first counts the blocks, the next accepted drafts."""
    return [sum(len(block) > i for block in blocks) for i in range(max(map(len, blocks), default=0))]
