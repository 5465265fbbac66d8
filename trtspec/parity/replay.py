"""Verdicts again, from a trace alone: no model, no subject.

Three kinds of evidence in a trace can be judged without the models that they were computed with.

- `greedy`: notes `{"regrets": [...], "tolerance": T}`; a regret above the tolerance is a fault, above 0 a tie. `inf` is
  a token that the model does not have.
- `sampled`: notes `{"tokens": [...], "settings": N, "num_samples": N, "alpha": A}`, where `tokens` has the fields of
  `sampled.Transforms`; the tests of the check are made again, in one look at all tokens.
- `cycles`: the draws that the subject itself told, by the rule of speculative sampling (Leviathan et al. 2023). Where a
  draft token x stood with probabilities p and q, it is kept if q <= p or `accept` < p / q, else replaced by the token
  whose interval [`low`, `high`) of the residual max(0, p - q) holds `choose`; where none stood, or drafts are accepted
  by equality, by the token whose interval of p does. So a wrong rejection can be gone through by hand. Of a cycle
  without draws only the arithmetic is checked.

The intervals are computed from the subject's own logits: `cycles` finds a wrong rule, `greedy` and `sampled` wrong
logits too.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from trtspec.errors import TrtspecError
from trtspec.parity.greedy import GREEDY
from trtspec.parity.result import Check, Finding, Verdict, worst
from trtspec.parity.sampled import SAMPLED, judge, transforms_of
from trtspec.parity.statistics import holm
from trtspec.parity.subjects import Cycle, Draw
from trtspec.parity.trace import Note, Record, Trace

CYCLES = "cycles"
_ROUNDING = 1e-9  # of a probability
_MAX_FAULTS = 5  # shown of one answer; what follows a wrong token follows another text


def replay(trace: Trace) -> tuple[Check, ...]:
    """What the trace says by itself of each subject in it; checks without anything to judge are left out.

    Raises:
        TrtspecError: a note does not have what it should.
    """
    checks: list[Check] = []
    for subject in trace.subjects:
        records = {record.number: record for record in trace.records if record.subject == subject}
        for name, (field, judged) in _JUDGED.items():
            notes = [note for note in trace.notes if (note.check, note.answer in records) == (name, True)]
            if notes := [note for note in notes if field in note.record]:
                try:
                    checks.append(judged(subject, notes))
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    problem = f"a note of the check {name} is broken: {error!r}"
                    raise TrtspecError(problem, where=str(trace.path), fix="record the trace again") from error
        if cycles := [record for record in records.values() if record.answer is not None and record.answer.cycles]:
            checks.append(_cycles(subject, cycles))
    again = shlex.join(["trtspec", "parity", "replay", str(trace.path)])
    return tuple(
        replace(check, findings=tuple(replace(finding, reproduce=again) for finding in check.findings))
        for check in checks
    )


def _greedy(subject: str, notes: Sequence[Note]) -> Check:
    """Regrets against the tolerance."""
    findings, num_tokens = [], 0
    for note in notes:
        tolerance = float(note.record["tolerance"])
        regrets = [float(regret) for regret in note.record["regrets"]]
        num_tokens += len(regrets)
        for position, regret in enumerate(regrets):
            if regret > 0.0:
                verdict = Verdict.TIE if regret <= tolerance else Verdict.FAULT
                problem = f"regret {regret:.3g}, where {tolerance:.3g} is tolerated"
                findings.append(_finding(note.answer, position, verdict, problem, note.record.get("prompt")))
    return Check(
        name=GREEDY,
        subject=subject,
        hypothesis="each greedy token is the one that the reference puts first",
        verdict=worst([Verdict.PASS, *(finding.verdict for finding in findings)]),
        evidence=f"{num_tokens} tokens of {len(notes)} answers, by the regrets in the trace",
        findings=tuple(findings),
    )


def _sampled(subject: str, notes: Sequence[Note]) -> Check:
    """Transforms, tested again."""
    last = notes[-1].record
    tokens = [token for note in notes for token in note.record["tokens"]][: int(last["num_samples"])]
    stream = [transforms_of(token) for token in tokens]
    evidence = judge(stream, int(last["settings"]))
    rejected = holm([test.p_value for test in evidence], float(last["alpha"]))
    findings = tuple(
        _finding(None, None, Verdict.FAULT, f"{test.name}: {test.words} (p-value {test.p_value:.2g})")
        for test, no in zip(evidence, rejected, strict=True)
        if no
    )
    return Check(
        name=SAMPLED,
        subject=subject,
        hypothesis="each sampled token is a draw from the reference's distribution given the tokens before it",
        verdict=Verdict.FAULT if findings else Verdict.PASS,
        evidence=f"{len(stream)} tokens of {len(notes)} answers, smallest p-value "
        f"{min(test.p_value for test in evidence):.2g} of {len(evidence)} tests, by the transforms in the trace",
        findings=findings,
        statistics=evidence,
    )


# The check's name -> the field that its notes have for this, and what judges them.
_JUDGED: dict[str, tuple[str, Callable[[str, Sequence[Note]], Check]]] = {
    GREEDY: ("regrets", _greedy),
    SAMPLED: ("settings", _sampled),
}


def _cycles(subject: str, records: Sequence[Record]) -> Check:
    findings: list[Finding] = []
    num_draws = 0
    for record in records:
        assert record.answer is not None
        faults: list[Finding] = []
        for number, cycle in enumerate(record.answer.cycles, 1):
            num_draws += len(cycle.draws)
            for position, problem in cycle_faults(cycle):
                place = cycle.position + position - len(record.query.ids)
                faults.append(_finding(record.number, place, Verdict.FAULT, f"pass {number}: {problem}"))
        findings += faults[:_MAX_FAULTS]
    return Check(
        name=CYCLES,
        subject=subject,
        hypothesis="each token follows from the uniform numbers and probabilities that the subject told",
        verdict=worst([Verdict.PASS, *(finding.verdict for finding in findings)]),
        evidence=f"{num_draws} draws in the passes of {len(records)} answers",
        findings=tuple(findings),
    )


def cycle_faults(cycle: Cycle) -> Iterator[tuple[int, str]]:
    """Place in the cycle, and what is wrong there by its own numbers."""
    equal = next(
        (place for place, (token, draft) in enumerate(zip(cycle.tokens, cycle.drafts, strict=False)) if token != draft),
        min(len(cycle.tokens), len(cycle.drafts)),
    )
    if not cycle.draws:
        # The drafts of a token tree do not stand one behind the other, but none is accepted that was not proposed.
        if cycle.accepted > min(len(cycle.tokens), len(cycle.drafts)):
            yield 0, f"{cycle.accepted} of {len(cycle.drafts)} drafts accepted, {len(cycle.tokens)} tokens"
        return
    if cycle.accepted != equal:
        yield equal, f"{cycle.accepted} drafts accepted, of which {equal} are in the output"
    for place, draw in enumerate(cycle.draws):
        if problem := _wrong(draw):
            yield place, problem


def _wrong(draw: Draw) -> str | None:
    """Why the token does not follow from its numbers."""
    if draw.draft is not None and draw.q is not None:
        p, q = draw.p or 0.0, draw.q
        ratio = min(1.0, p / q) if q > 0.0 else 1.0 if p > 0.0 else 0.0
        numbers = f"uniform {draw.accept:.4g}, p/q {p:.3g}/{q:.3g} = {ratio:.4g}"
        if abs(draw.accept - ratio) < _ROUNDING:
            return None
        keep = draw.accept < ratio
        if keep and draw.token != draw.draft:
            return f"draft {draw.draft} was rejected, {numbers}"
        if not keep and draw.token == draw.draft:
            return f"draft {draw.draft} was kept, {numbers}"
        if keep:
            return None
        origin = "the residual"
    else:
        origin = "the target's distribution"
    if draw.low - _ROUNDING <= draw.choose < draw.high + _ROUNDING:
        return None
    return f"token {draw.token} has [{draw.low:.4g}, {draw.high:.4g}) of {origin}, the uniform is {draw.choose:.4g}"


def _finding(
    answer: int | None, position: int | None, verdict: Verdict, problem: str, prompt: int | None = None
) -> Finding:
    where = "" if answer is None else f"answer {answer} of the trace, token {position}: "
    return Finding(prompt, position, verdict, f"{where}{problem}", reproduce="")
