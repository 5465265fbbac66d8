"""The strong sampled check: every emitted token against the reference's conditional distribution.

Draws conversations, transforms each token as `statistics` explains, and tests the transforms. Knows how transforms are
grouped and judged; their mathematics are in `statistics`.

The transforms of all conversations, one after the other, are one stream, and the test looks at exactly the first
`num_samples` of it. A stream that ended where a conversation happens to end would not be a fair sample: how long a
conversation is depends on its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trtspec.decoding.sampling import SamplingParams, probabilities, processed_logits
from trtspec.parity import statistics
from trtspec.parity.result import Check, Finding, Verdict, worst
from trtspec.parity.statistics import Evidence
from trtspec.parity.subjects import Answer, Query, Subject
from trtspec.parity.trial import Case, Trial

SAMPLED = "sampled"
BLIND = 0.4  # a sample that cannot see a total variation of this size says nothing useful
_MAX_FAULTS = 5  # faults after which more of the same teach nothing


@dataclass(frozen=True)
class Transforms:
    """One emitted token.

    Attributes:
        conversation: running number of the answer it belongs to.
        setting: which of the trial's samplings it was drawn with.
        place: tokens emitted since the target's last pass began to emit, before this one.
        last_place: the place of the token that follows a full acceptance (the number of draft tokens).
        by_id, by_probability: its transform in these orders.
        by_odds: its transform in the order of the draft's odds; without a draft, by_probability.
        overlap, favourite: the terms of the functions of these names in `statistics`; zeros without a draft.
    """

    conversation: int
    setting: int
    place: int
    last_place: int
    by_id: float
    by_probability: float
    by_odds: float
    overlap: tuple[float, float]
    favourite: tuple[float, float]


def check_sampled(trial: Trial, subject: Subject) -> Check:
    """Each token is a draw from the reference's distribution given the tokens before it.

    Under this hypothesis the check raises a false alarm with probability `trial.alpha` at most, over all its tests
    (Holm). It is inconclusive if it finds nothing and could not have seen a total variation of `BLIND`.
    """
    stream, findings = collect(trial, subject)
    evidence = judge(stream, len(trial.samplings))
    findings += trial.rejections(SAMPLED, subject.name, evidence)
    overall = statistics.detectable(len(stream), trial.alpha / len(evidence))
    power = f"{overall:.2f} over all tokens"
    if trial.num_draft_tokens:
        num_bonus = sum(token.place == token.last_place for token in stream)
        power += f", {statistics.detectable(num_bonus, trial.alpha / len(evidence)):.2f} in {num_bonus} bonus tokens"
    verdicts = [finding.verdict for finding in findings]
    verdicts.append(Verdict.PASS if overall <= BLIND else Verdict.INCONCLUSIVE)
    return Check(
        name=SAMPLED,
        subject=subject.name,
        hypothesis="each sampled token is a draw from the reference's distribution given the tokens before it",
        verdict=worst(verdicts),
        evidence=f"{len(stream)} tokens, smallest p-value {min(test.p_value for test in evidence):.2g} of "
        f"{len(evidence)} tests; total variation found with probability 95 %: {power}",
        findings=tuple(findings),
        statistics=evidence,
    )


def collect(trial: Trial, subject: Subject) -> tuple[list[Transforms], list[Finding]]:
    """The first `num_samples` transforms of the stream of conversations, and what is wrong beyond any statistics."""
    rng = np.random.default_rng((trial.seed, 1))
    stream: list[Transforms] = []
    findings: list[Finding] = []
    for number, (case, setting, query) in enumerate(conversations(trial)):
        answer = subject.generate(query)
        tokens, problems = transforms(trial, subject.name, case, query, answer, rng)
        stream += [replace(token, conversation=number, setting=setting) for token in tokens]
        findings += problems
        trial.advance(min(1.0, len(stream) / trial.num_samples))
        if len(stream) >= trial.num_samples or sum(f.verdict == Verdict.FAULT for f in findings) >= _MAX_FAULTS:
            break
    return stream[: trial.num_samples], findings


def conversations(trial: Trial) -> Iterator[tuple[Case, int, Query]]:
    """Prompt after prompt, over and over, each time with another seed.

    Settings and draft lengths take turns, so that every prompt meets all of them. A single draft token is one of two
    lengths, because the bonus token is rare behind long drafts. What a prompt gets depends on its number alone, so that
    it is the same in a run on this prompt only.
    """
    lengths = (trial.num_draft_tokens, 1) if trial.num_draft_tokens > 1 else (trial.num_draft_tokens,)
    turn = 0
    while True:
        for case in trial.cases:
            which = case.number + turn
            setting = which % len(trial.samplings)
            length = lengths[which // len(trial.samplings) % len(lengths)]
            seed = trial.request_seed(case.number, turn)
            yield case, setting, trial.query(case, replace(trial.samplings[setting], seed=seed), length)
        turn += 1


def transforms(
    trial: Trial, subject: str, case: Case, query: Query, answer: Answer, rng: np.random.Generator
) -> tuple[list[Transforms], list[Finding]]:
    """The transforms of one answer, up to a token that the reference cannot emit, and its faults."""
    yardstick, sampling = trial.yardstick, query.sampling
    shape = trial.misshapen(query, answer)
    findings = [trial.fault(SAMPLED, subject, case, *shape)] if shape else []
    rows = yardstick.along(case.ids, answer.tokens)
    draft_rows = yardstick.draft_along(case.ids, answer.tokens)
    result: list[Transforms] = []
    for position, (row, token, place) in enumerate(zip(rows, answer.tokens, places(answer), strict=False)):
        index = yardstick.index(token)
        context = (*query.ids, *answer.tokens[:position])
        p = yardstick.distribution(row, context, sampling)
        if not (0 <= index < len(p) and p[index] > 0.0):
            # Rounding may move a token over the border of top-k or top-p, but not far.
            p = yardstick.distribution(row, context, sampling, slack=yardstick.tolerance)
            possible = 0 <= index < len(p) and p[index] > 0.0
            findings.append(_unsupported(trial, subject, case, position, row, token, possible))
            if not possible:
                break
        v_id, v_probability, v_odds = rng.random(3)
        by_probability = by_odds = statistics.transform(p, index, v_probability, score=p)
        overlap = favourite = (0.0, 0.0)
        if draft_rows is not None:
            q = draft_distribution(draft_rows[position], sampling)
            by_odds = statistics.transform(p, index, v_odds, score=statistics.odds(p, q))
            overlap = statistics.overlap(p, q, index)
            favourite = statistics.favourite(p, q, index)
        result.append(
            Transforms(
                conversation=0,
                setting=0,
                place=place,
                last_place=query.num_draft_tokens,
                by_id=statistics.transform(p, index, v_id),
                by_probability=by_probability,
                by_odds=by_odds,
                overlap=overlap,
                favourite=favourite,
            )
        )
    return result, findings


def draft_distribution(row: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """What the draft draws from, float64 `[vocab]`; by the decoding core's own quick rule, since it decides nothing.

    Args:
        row: the draft's logits `[vocab]`.
        sampling: how to draw; penalties are left out.
    """
    return probabilities(processed_logits(row, np.empty(0, dtype=np.int32), 0, sampling), sampling)


def places(answer: Answer) -> list[int]:
    """For each token of the answer, how many the same pass of the target emitted before it.

    Known before the token is drawn: so many drafts have been accepted in this pass, and it goes on.
    """
    result = [place for block in answer.blocks for place in range(len(block))]
    return [*result, len(answer.blocks[-1]) if answer.blocks else 0]


def judge(stream: Sequence[Transforms], num_settings: int) -> tuple[Evidence, ...]:
    """All tests of a stream; always the same ones, so that their number does not depend on the data."""
    by_id, by_probability, by_odds = (
        np.array([getattr(token, name) for token in stream]) for name in ("by_id", "by_probability", "by_odds")
    )
    overlap, favourite = (np.array([getattr(token, name) for token in stream]) for name in ("overlap", "favourite"))
    place = np.array([token.place for token in stream], dtype=int)
    last_place = np.array([token.last_place for token in stream], dtype=int)
    setting = np.array([token.setting for token in stream], dtype=int)
    groups = {
        "all tokens": np.full(len(stream), True),
        "first tokens of a pass": place == 0,
        "later tokens of a pass": (place > 0) & (place < last_place),
        "bonus tokens": (place > 0) & (place >= last_place),
    }
    likely = ("too many probable tokens", "too many improbable tokens")
    draft = ("the output leans towards the draft", "the output leans away from the draft")
    return (
        statistics.uniformity("all tokens, by id", by_id, ("too many low ids", "too many high ids")),
        statistics.uniformity("all tokens, by probability", by_probability, likely),
        *(
            statistics.uniformity(f"setting {n + 1}, by probability", by_probability[setting == n], likely)
            for n in range(num_settings)
        ),
        *(statistics.uniformity(f"{name}, by draft odds", by_odds[chosen], draft) for name, chosen in groups.items()),
        *(statistics.leaning(f"{name}, draft overlap", overlap[chosen], draft) for name, chosen in groups.items()),
        statistics.leaning("all tokens, draft's first choice", favourite, draft),
        statistics.rarest("least probable token", by_probability),
        statistics.independence("neighbours", *_pairs(stream, [0] * len(stream))),
        statistics.independence("same place, next pass", *_pairs(stream, place.tolist())),
    )


def _pairs(stream: Sequence[Transforms], kinds: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Transforms by id of each token and of the last one before it of the same kind and conversation."""
    last: dict[tuple[int, int], float] = {}
    pairs = []
    for token, kind in zip(stream, kinds, strict=True):
        key = (token.conversation, kind)
        if key in last:
            pairs.append((last[key], token.by_id))
        last[key] = token.by_id
    first, second = np.array(pairs).reshape(-1, 2).T
    return first, second


def _unsupported(
    trial: Trial, subject: str, case: Case, position: int, row: np.ndarray, token: int, possible: bool
) -> Finding:
    """A token that the reference's top-k and top-p exclude: a tie at the border, else a fault."""
    return Finding(
        prompt=case.number,
        position=position,
        verdict=Verdict.TIE if possible else Verdict.FAULT,
        problem="a token that the reference excludes" + (", at the border of top-k or top-p" if possible else ""),
        reproduce=trial.reproduce(SAMPLED, subject, case.number),
        chosen=trial.yardstick.choice(row, token),
        expected=trial.yardstick.choice(row, int(row.argmax())),
    )
