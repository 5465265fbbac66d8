"""The strong sampled check: every emitted token against the reference's conditional distribution.

Draws conversations, transforms each token as `statistics` explains, and tests the transforms. Knows how transforms are
grouped and judged; their mathematics are in `statistics`.

The transforms of all conversations, one after the other, are one stream, and a look judges exactly so many of it as
were planned. A stream that ended where a conversation happens to end would not be a fair sample: how long a
conversation is depends on its tokens. A check that runs out of time cuts its last answer where the time was over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from trtspec.decoding.sampling import SamplingParams, probabilities, processed_logits
from trtspec.errors import TrtspecError
from trtspec.parity import power, statistics
from trtspec.parity.result import Check, Finding, Verdict, worst
from trtspec.parity.statistics import NO_MOMENTS, Evidence, Moments
from trtspec.parity.subjects import END, Answer, Query, Subject, Unsupported
from trtspec.parity.trace import unplain
from trtspec.parity.trial import Case, Trial, afresh
from trtspec.parity.yardstick import Yardstick
from trtspec.shard import WHOLE, Shard

SAMPLED = "sampled"
HYPOTHESIS = "each sampled token is a draw from the reference's distribution given the tokens before it"
PENALISED = SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3)
BLIND = 0.4  # a sample that cannot see a total variation of this size says nothing useful
_AHEAD = 4  # answers that are made at the same time
_MAX_FAULTS = 5  # faults after which more of the same teach nothing
_NUM_TOLD = 3  # tokens shown with a deviation
_MAX_PENALTY = 3.0  # logits beyond which a larger penalty counts no more
_BINS = 20
_BITS = 8
_READILY = 1.1
_PROBABLE = 0.1
_DOUBT = 0.1  # share of the reference in each known fault, so that one token does not rule it out

FIRST, LATER, BONUS = "first tokens of a pass", "later tokens of a pass", "bonus tokens"
_HINTS = {
    FIRST: "the rule of acceptance, and what a rejected token is replaced from",
    LATER: "the logits that later draft tokens are judged by, and the KV cache behind accepted ones",
    BONUS: "what the token after a full acceptance is drawn from",
    "setting ": "temperature, top-k, top-p, min-p and the penalties of this setting",
    "all tokens, by id": "the random numbers, and the draw from a distribution",
    "all tokens, by probability": "temperature, top-k, top-p, and the logits themselves",
    "all tokens, draft's first choice": "draft tokens that are its first choice, but judged as if drawn",
    "all tokens, known faults": "the fault named here",
    "all tokens": "the rule of acceptance, the residual, and whether q is what the draft was drawn from",
    "seen tokens, of the same pass": "whether penalties count the tokens of the same pass, accepted drafts too",
    "draft overlap, by id": "random numbers that draw a draft token and decide on it as well",
    "end id": "how the end id is judged: min_tokens, bans, its logit",
    "seen tokens": "what the penalties count: the prompt, the output, and no rejected draft token",
    "least probable token": "the token named here; top-k and top-p",
    "neighbours": "random numbers that are used for two purposes, or two positions",
    "same place, next pass": "random numbers that start again in each pass",
    "same position, next answer": "whether the seed of the request is used",
}


class Fault(Enum):
    """Broken samplers whose distribution is known, given the tokens before."""

    TOP_K = "a top-k of one id less"
    TOP_P = "a top-p without its last id"
    MIN_P = "a min-p of 0.02"
    LARGE_MIN_P = "a min-p of 0.1"
    COARSE = "random numbers of 8 bits"
    SHARED = "one random number that decides on all draft tokens of a pass"
    READILY = "draft tokens accepted 1.1 times too readily"
    TYPICAL = "draft tokens of probability 0.1 always accepted"
    PROMPT = "penalties that ignore the prompt"
    COUNTS = "presence and frequency penalties that ignore the prompt"
    TWICE = "penalties applied twice"
    FREQUENCY = "a frequency penalty that counts twice"


_MIN_P = {Fault.MIN_P: 0.02, Fault.LARGE_MIN_P: 0.1}
_FAULTS = [fault.value for fault in Fault]


@dataclass(frozen=True)
class Transforms:
    """One emitted token.

    Attributes:
        conversation: running number of the answer it belongs to.
        setting: which of the trial's samplings it was drawn with.
        prompt: number of its prompt.
        position: its place in the output, from 0.
        place: tokens emitted since the target's last pass began to emit, before this one.
        last_place: the place of the token that follows a full acceptance (the number of draft tokens); 0: not known.
        token: its id, or `END`.
        probability: of the token, by the reference.
        spread: probability that two draws from the reference differ here.
        v: the uniform numbers behind the three transforms.
        by_id, by_probability: its transform in these orders.
        by_odds: its transform in the order of the draft's odds; without a draft, by_probability.
        surprise: the terms of the score test of the temperature, whose score is -log p.
        overlap, favourite: the terms of the functions of these names in `statistics`; zeros without a draft.
        reuse: the terms of `statistics.reuse`; zeros without a draft.
        seen, seen_in_pass: the terms of the score test of all penalties, and of those for tokens of the same pass;
            zeros without any.
        end: the terms of the end id.
        ratio: q/p of the token; 1 without a draft.
        faults: r/p of the token, for r by each `Fault`; 1 where it makes no difference.
    """

    conversation: int
    setting: int
    prompt: int
    position: int
    place: int
    last_place: int
    token: int
    probability: float
    spread: float
    v: tuple[float, float, float]
    by_id: float
    by_probability: float
    by_odds: float
    surprise: Moments = NO_MOMENTS
    overlap: Moments = NO_MOMENTS
    favourite: Moments = NO_MOMENTS
    reuse: Moments = NO_MOMENTS
    seen: Moments = NO_MOMENTS
    seen_in_pass: Moments = NO_MOMENTS
    end: Moments = NO_MOMENTS
    ratio: float = 1.0
    faults: tuple[float, ...] = (1.0,) * len(Fault)


_Numbered = tuple[int, tuple[Case, int, Query]]  # a conversation: prompt, setting and query, behind its number


def transforms_of(record: Mapping[str, Any]) -> Transforms:
    """The transforms in a note; KeyError, TypeError or ValueError for anything else."""
    return Transforms(**{name: unplain(value) for name, value in record.items()})


class _Test(NamedTuple):
    """A test of the battery, and which tokens push it the way it deviates, bool `[n]`."""

    evidence: Evidence
    pushing: np.ndarray


def check_sampled(trial: Trial, subject: Subject) -> Check:
    """Each token is a draw from the reference's distribution given the tokens before it.

    Under this hypothesis the check raises a false alarm with probability `trial.alpha` at most, over all its looks and
    tests. It stops at the first look that finds a fault, and passes at the last one only. It is inconclusive if it
    finds nothing and could not have seen a total variation of `BLIND`.
    """
    stream: list[Transforms] = []
    findings: list[Finding] = []
    judged: tuple[Evidence, ...] = judge(stream, len(trial.samplings))
    refused: dict[int, str] = {}
    looks = _Looks(trial)
    for tokens, problems in _answers(trial, subject, refused):
        stream += tokens
        findings += problems
        hopeless = _num_faults(findings) >= _MAX_FAULTS
        for size, share in looks.due(len(stream), len(tokens), hopeless):
            judged, law = _look(replace(trial, alpha=trial.alpha * share), subject.name, stream[:size])
            findings += law
            if law:
                break
        trial.advance(looks.fraction)
        if looks.over or hopeless or any(finding.prompt is None for finding in findings):
            break
    if len(refused) == len(trial.samplings):
        reason = "; ".join(sorted(set(refused.values())))
        return Check(SAMPLED, subject.name, HYPOTHESIS, Verdict.NOT_APPLICABLE, reason)
    return _check(trial, subject.name, stream[: looks.size], judged, findings, refused, looks.speed)


def plan(trial: Trial, tokens_per_second: float | None = None) -> power.Plan:
    """What the check of this trial will see; of a budget in time, once the speed is known."""
    tokens = trial.num_samples
    if trial.seconds and tokens_per_second:
        tokens = power.Budget(seconds=trial.seconds).tokens_at(tokens_per_second)
    tests = num_tests(len(trial.samplings))
    return power.plan(tokens, trial.alpha, tests, _lengths(trial), tokens_per_second=tokens_per_second)


def num_tests(num_settings: int) -> int:
    """How many tests share the false-alarm rate of the check."""
    return len(judge([], num_settings))


def collect(trial: Trial, subject: Subject) -> tuple[list[Transforms], list[Finding]]:
    """The first `num_samples` transforms of the stream of conversations, and what is wrong beyond any statistics."""
    stream: list[Transforms] = []
    findings: list[Finding] = []
    for tokens, problems in _answers(trial, subject, {}):
        stream += tokens
        findings += problems
        if len(stream) >= trial.num_samples or _num_faults(findings) >= _MAX_FAULTS:
            break
    return stream[: trial.num_samples], findings


def share(trial: Trial, subject: Subject, shard: Shard) -> None:
    """One shard's part of the conversations, answered and transformed, which the check then takes (`Trial.noted`).

    So many that all shards together have `num_samples` tokens. Which of the conversations the check will need depends
    on how long they all are: it asks for the few that no shard has.
    """
    wanted, num = -(-trial.num_samples // shard.of), 0
    findings: list[Finding] = []
    for tokens, problems in _answers(trial, subject, {}, shard):
        num += len(tokens)
        findings += problems
        trial.advance(min(1.0, num / wanted))
        if num >= wanted or _num_faults(findings) >= _MAX_FAULTS:
            return


def conversations(trial: Trial) -> Iterator[tuple[Case, int, Query]]:
    """Prompt after prompt, over and over, each time with another seed.

    Settings and draft lengths take turns, so that every prompt meets all of them. A single draft token is one of two
    lengths, because the bonus token is rare behind long drafts. What a prompt gets depends on its number alone, so that
    it is the same in a run on this prompt only.
    """
    lengths = _lengths(trial)
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
    reach = 1.0  # a random number that accepted all draft tokens of the pass so far is below this
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
        terms: dict[str, Any] = {}
        q = None
        if draft_rows is not None:
            q = draft_distribution(draft_rows[position], context, sampling, yardstick.end_ids)
            odds = statistics.odds(p, q)
            by_odds = statistics.transform(p, index, v_odds, score=odds)
            terms = {
                "overlap": statistics.overlap(p, q, index),
                "favourite": statistics.indicator(p, int(q.argmax()), index),
                "reuse": statistics.reuse(p, q, index),
                "ratio": float(odds[index]),
            }
        drafts = q if place < query.num_draft_tokens else None
        reach = reach if place else 1.0
        laws = _faulty_cycle(p, drafts, reach) | _faulty_settings(yardstick, row, context, sampling, p)
        if drafts is not None and drafts[index]:
            reach = min(reach, float(p[index] / drafts[index]))
        if sampling.penalised:
            without = yardstick.distribution(row, (), sampling)
            terms["seen"] = statistics.against(p, _penalties(p, without), index)
            laws |= _faulty_penalties(yardstick, row, answer.tokens[:position], query, p, without)
            if place:
                before = yardstick.distribution(row, context[:-place], sampling)
                terms["seen_in_pass"] = statistics.against(p, _penalties(p, before), index)
        if yardstick.end_ids:
            terms["end"] = statistics.indicator(p, yardstick.end_ids[0], index)
        result.append(
            Transforms(
                conversation=0,
                setting=0,
                prompt=case.number,
                position=position,
                place=place,
                last_place=query.num_draft_tokens,
                token=token,
                probability=float(p[index]),
                spread=max(0.0, 1.0 - float((p * p).sum())),
                v=(v_id, v_probability, v_odds),
                by_id=statistics.transform(p, index, v_id),
                by_probability=by_probability,
                by_odds=by_odds,
                surprise=statistics.surprise(p, index),
                faults=tuple(
                    _DOUBT + (1.0 - _DOUBT) * float(laws[fault][index] / p[index]) if fault in laws else 1.0
                    for fault in Fault
                ),
                **terms,
            )
        )
    return result, findings


def _faulty_settings(
    yardstick: Yardstick, row: np.ndarray, context: Sequence[int], sampling: SamplingParams, p: np.ndarray
) -> dict[Fault, np.ndarray]:
    """What faults of top-k, top-p and min-p make of p, `[vocab]` each."""
    laws = {fault: np.where(p >= share * p.max(), p, 0.0) for fault, share in _MIN_P.items()}
    kept = np.flatnonzero(p)
    if sampling.top_k > 1:
        laws[Fault.TOP_K] = yardstick.distribution(row, context, replace(sampling, top_k=sampling.top_k - 1))
    if sampling.top_p < 1.0 and kept.size not in (1, sampling.top_k):
        laws[Fault.TOP_P] = np.where(np.arange(len(p)) == kept[p[kept].argmin()], 0.0, p)
    return {fault: law / law.sum() for fault, law in laws.items()}


def _faulty_penalties(
    yardstick: Yardstick, row: np.ndarray, output: Sequence[int], query: Query, p: np.ndarray, without: np.ndarray
) -> dict[Fault, np.ndarray]:
    """What faults of the penalties make of p, `[vocab]` each; `without` is p without any."""
    sampling = query.sampling
    in_prompt, in_output = (np.bincount(ids, minlength=len(p)) for ids in (query.ids, np.array(output, dtype=int)))
    presence = sampling.presence_penalty * ((in_prompt > 0) & (in_output == 0))
    return {
        Fault.PROMPT: yardstick.distribution(row, output, sampling),
        Fault.COUNTS: _tilted(p, presence + sampling.frequency_penalty * in_prompt),
        Fault.TWICE: _tilted(p, -_penalties(p, without)),
        Fault.FREQUENCY: _tilted(p, -sampling.frequency_penalty * (in_prompt + in_output)),
    }


def _tilted(p: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """p with these numbers `[vocab]` added to its logits."""
    logs = np.where(p > 0, logs, -np.inf)
    weights = p * np.exp(logs - logs.max())
    return weights / weights.sum()


def _faulty_cycle(p: np.ndarray, q: np.ndarray | None, reach: float) -> dict[Fault, np.ndarray]:
    """What faults of the cycle emit, `[vocab]` each: in place of a draft token from q, or, without q, drawn from p.

    Args:
        reach: the random number that decided on the draft tokens of this pass, if there is one, is below this.
    """
    levels = 2**_BITS
    if q is None:
        return {Fault.COARSE: statistics.coarse(p, levels)}
    ratio = np.divide(p, q, out=np.ones_like(p), where=q > 0)
    accepted = np.minimum(1.0, ratio)
    rest = np.maximum(p - q, 0.0)
    rest = rest / total if (total := rest.sum()) > 1e-12 else p
    coarse_rest = statistics.coarse(rest, levels)
    rule = {
        Fault.SHARED: np.minimum(1.0, ratio / reach),
        Fault.READILY: np.minimum(1.0, _READILY * ratio),
        Fault.TYPICAL: np.where(p >= _PROBABLE, 1.0, accepted),
    }
    laws = {fault: statistics.speculated(q, accepts, rest) for fault, accepts in rule.items()}
    coarse_rule = np.ceil(levels * accepted) / levels
    return laws | {Fault.COARSE: statistics.speculated(statistics.coarse(q, levels), coarse_rule, coarse_rest)}


def draft_distribution(
    row: np.ndarray, context: Sequence[int], sampling: SamplingParams, end_ids: Sequence[int]
) -> np.ndarray:
    """What the draft draws from, float64 `[vocab]`; by the decoding core's own quick rule, since it decides nothing.

    Args:
        row: the draft's logits `[vocab]`.
        context: prompt and output so far.
        sampling: how to draw.
        end_ids: counted at the first of them, as `Yardstick.distribution` does.
    """
    q = probabilities(processed_logits(row, np.array(context, dtype=np.int64), 0, sampling), sampling)
    if len(end_ids) > 1:
        total = q[list(end_ids)].sum()
        q[list(end_ids)] = 0.0
        q[end_ids[0]] = total
    return q


def places(answer: Answer) -> list[int]:
    """For each token of the answer, how many the same pass of the target emitted before it.

    Known before the token is drawn: so many drafts have been accepted in this pass, and it goes on.
    """
    result = [place for block in answer.blocks for place in range(len(block))]
    return [*result, len(answer.blocks[-1]) if answer.blocks else 0]


def judge(stream: Sequence[Transforms], num_settings: int) -> tuple[Evidence, ...]:
    """All tests of a stream; always the same ones, so that their number does not depend on the data."""
    return tuple(test.evidence for test in _battery(stream, num_settings))


def _battery(stream: Sequence[Transforms], num_settings: int) -> list[_Test]:
    """Each test looks at a kind of fault, over all tokens or where it would live."""
    columns = _columns(stream)
    everywhere = np.full(len(stream), True)
    groups = _groups(columns["place"], columns["last_place"])
    likely = ("too many probable tokens", "too many improbable tokens")
    draft = ("the output leans towards the draft", "the output leans away from the draft")
    tests: list[_Test] = []

    def uniformity(name: str, order: str, where: np.ndarray, words: tuple[str, str]) -> None:
        evidence = statistics.uniformity(name, columns[order][where], words)
        side = columns[order] < 0.5 if evidence.words == words[0] else columns[order] >= 0.5
        tests.append(_Test(evidence, where & side))

    def leaning(name: str, score: str, where: np.ndarray, words: tuple[str, str]) -> None:
        evidence = statistics.leaning(name, columns[score][where], words)
        tests.append(_Test(evidence, where & (columns[score][:, 0] * evidence.statistic > 0)))

    def independence(name: str, kinds: Sequence[tuple[int, ...]], order: str = "by_id") -> None:
        first, second = _pairs(kinds)
        u, weights = columns[order], columns["spread"][first] * columns["spread"][second]
        evidence = statistics.independence(name, u[first], u[second], weights)
        tests.append(_Test(evidence, np.isin(np.arange(len(stream)), second)))

    uniformity("all tokens, by id", "by_id", everywhere, ("too many low ids", "too many high ids"))
    uniformity("all tokens, by probability", "by_probability", everywhere, likely)
    for number in range(num_settings):
        where = columns["setting"] == number
        uniformity(f"setting {number + 1}, by probability", "by_probability", where, likely)
        leaning(f"setting {number + 1}, surprise", "surprise", where, likely[::-1])
    for name, where in groups.items():
        leaning(f"{name}, surprise", "surprise", where, likely[::-1])
    for name, where in {"all tokens": everywhere, **groups}.items():
        uniformity(f"{name}, by draft odds", "by_odds", where, draft)
        leaning(f"{name}, draft overlap", "overlap", where, draft)
    leaning("all tokens, draft's first choice", "favourite", everywhere, draft)
    mixed = statistics.mixture("all tokens, mixed with the draft", columns["ratio"], "some tokens come from the draft")
    tests.append(_Test(mixed, columns["ratio"] > 1.0))
    known = statistics.likelihood("all tokens, known faults", columns["faults"], _FAULTS)
    tests.append(_Test(known, columns["faults"][:, _FAULTS.index(known.words)] > 1.0))
    leaning(
        "seen tokens", "seen", everywhere, ("ids that were seen come too often", "ids that were seen come too rarely")
    )
    leaning(
        "seen tokens, of the same pass",
        "seen_in_pass",
        everywhere,
        ("ids of the same pass come too often", "ids of the same pass come too rarely"),
    )
    leaning("draft overlap, by id", "reuse", everywhere, ("rejections favour high ids", "rejections favour low ids"))
    leaning("end id", "end", everywhere, ("answers end too soon", "answers end too late"))
    tests.append(_Test(statistics.rarest("least probable token", columns["by_probability"]), everywhere))
    independence("neighbours", [(token.conversation,) for token in stream])
    independence("neighbours, by draft odds", [(token.conversation,) for token in stream], "by_odds")
    independence("same place, next pass", [(token.conversation, token.place) for token in stream])
    independence("same position, next answer", [(token.position,) for token in stream])
    return tests


def _columns(stream: Sequence[Transforms]) -> dict[str, np.ndarray]:
    """The stream, one array for each field of `Transforms`."""
    columns = {field.name: np.array([getattr(token, field.name) for token in stream]) for field in fields(Transforms)}
    for field in fields(Transforms):
        if field.default == NO_MOMENTS:
            columns[field.name] = columns[field.name].reshape(-1, len(NO_MOMENTS))
    columns["faults"] = columns["faults"].reshape(-1, len(Fault))
    return columns


def _groups(place: np.ndarray, last_place: np.ndarray) -> dict[str, np.ndarray]:
    """Where in its cycle a token stands, bool `[n]` each.

    A subject that drafts by itself, or tells nothing of its passes, has tokens beyond the last place; such belong
    nowhere, or, where no last place is known, to the later ones.
    """
    return {
        FIRST: place == 0,
        LATER: (place > 0) & ((place < last_place) | (last_place == 0)),
        BONUS: (place > 0) & (place == last_place),
    }


def _pairs(kinds: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the last token of the same kind before each token, and of these tokens."""
    last: dict[tuple[int, ...], int] = {}
    pairs = []
    for index, kind in enumerate(kinds):
        if kind in last:
            pairs.append((last[kind], index))
        last[kind] = index
    first, second = np.array(pairs, dtype=int).reshape(-1, 2).T
    return first, second


def _penalties(p: np.ndarray, without: np.ndarray) -> np.ndarray:
    """What the penalties take from the logit of each id, `[vocab]`, up to a constant; 0 where either excludes it."""
    both = (p > 0) & (without > 0)
    logs = np.log(without, out=np.zeros_like(p), where=both) - np.log(p, out=np.zeros_like(p), where=both)
    return np.clip(logs, -_MAX_PENALTY, _MAX_PENALTY)


class _Looks:
    """When the stream is judged, and with which share of the false-alarm rate.

    Args:
        trial: plans `num_samples` tokens, or as many as its `seconds` allow at the speed of the first answers.
    """

    def __init__(self, trial: Trial, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._seconds = clock, trial.seconds
        self._planned = None if trial.seconds else trial.num_samples
        self._begin = self._before = clock()
        self._num_answers = 0
        self._spent = 0.0
        self._num = 0
        self.size = 0  # tokens that the last look judged
        self.over = False

    @property
    def fraction(self) -> float:
        """How much of the plan is done."""
        return min(1.0, self._num / self._planned) if self._planned else 0.0

    @property
    def speed(self) -> float:
        """Tokens a second so far, subject and reference together."""
        return self._num / max(1e-9, self._clock() - self._begin)

    def due(self, num: int, new: int, last: bool) -> Iterator[tuple[int, float]]:
        """Number of tokens and share of each look that an answer makes possible.

        Args:
            num: tokens so far.
            new: those of the last answer.
            last: no more will come.
        """
        now, before = self._clock(), self._before
        self._num, self._before = num, now
        self._num_answers += 1
        if self._planned is None and self._num_answers > 1 and num:
            self._planned = max(num, int(self.speed * (self._seconds or 0.0)))
        planned, end = self._planned or num, num
        if self._seconds and now - self._begin >= self._seconds:
            # The answer is cut where the time was over: to end with an answer would favour some lengths.
            within = (self._begin + self._seconds - before) / max(1e-9, now - before)
            end, last = max(1, num - new + int(new * min(1.0, max(0.0, within)))), True
        for fraction in power.LOOKS:
            size = max(1, int(planned * fraction))
            if self._spent < fraction and size <= end and self._planned:
                self.size, self.over = size, fraction == 1.0
                share, self._spent = fraction - self._spent, fraction
                yield size, share
        if last and not self.over and end:
            self.size, self.over = end, True
            yield end, 1.0 - self._spent


def _answers(
    trial: Trial, subject: Subject, refused: dict[int, str], shard: Shard = WHOLE
) -> Iterator[tuple[list[Transforms], list[Finding]]]:
    """Transforms and faults of one conversation after the other; those of a shard, where one is given.

    Settings that the subject cannot honour are left out, with the reason in `refused`; ends when all are. What comes of
    a conversation depends on its number and its answer alone, so it does not matter which process transforms it.
    """
    asked = shard.mine(enumerate(conversations(trial)))
    for (number, (case, setting, query)), generate in _ahead(subject, asked, lambda setting: setting in refused):
        if len(refused) == len(trial.samplings):
            return
        if setting in refused:
            continue
        try:
            answer = generate()
        except Unsupported as reason:
            refused[setting] = str(reason)
            continue
        except TrtspecError as error:
            yield [], [trial.refused(SAMPLED, subject.name, case, error)]
            continue
        known = trial.noted(SAMPLED, query)
        if known is not None and known.get("faults") == 0:
            tokens = [transforms_of(token) for token in known["tokens"]]
            problems: list[Finding] = []
        else:
            rng = np.random.default_rng((trial.seed, 1, number))
            tokens, problems = transforms(trial, subject.name, case, query, answer, rng)
            tokens = [replace(token, conversation=number, setting=setting) for token in tokens]
        trial.note(
            SAMPLED,
            {
                "prompt": case.number,
                "seed": query.sampling.seed,
                "tokens": [vars(token).copy() for token in tokens],
                "faults": len(problems),
                "settings": len(trial.samplings),
                "num_samples": trial.num_samples,
                "alpha": trial.alpha,
            },
        )
        yield tokens, problems


def _ahead(
    subject: Subject, conversations: Iterable[_Numbered], needless: Callable[[int], bool]
) -> Iterator[tuple[_Numbered, Callable[[], Answer]]]:
    """Each conversation with what gives its answer, while the next ones are made: engines answer several at once.

    Only of a subject with a memory, which has the answer when it is asked in the thread that takes notes of it.
    """
    if afresh(subject) is subject:
        yield from ((each, partial(subject.generate, each[1][2])) for each in conversations)
        return
    waiting: deque[tuple[_Numbered, Future[Answer] | None]] = deque()
    threads = ThreadPoolExecutor(_AHEAD, thread_name_prefix="sampled")

    def remembered(answer: Future[Answer] | None, query: Query) -> Answer:
        if answer is not None:
            answer.result()
        return subject.generate(query)

    try:
        for each in conversations:
            _, (_, setting, query) = each
            waiting.append((each, None if needless(setting) else threads.submit(subject.generate, query)))
            if len(waiting) >= _AHEAD:
                first, answer = waiting.popleft()
                yield first, partial(remembered, answer, first[1][2])
    finally:
        threads.shutdown(cancel_futures=True)


def _look(trial: Trial, subject: str, stream: Sequence[Transforms]) -> tuple[tuple[Evidence, ...], list[Finding]]:
    """The tests of the stream, and those that reject, the clearest first."""
    battery = _battery(stream, len(trial.samplings))
    evidence = tuple(test.evidence for test in battery)
    near = (test for test in battery if test.evidence.p_value <= trial.alpha)
    more = {test.evidence.name: _advice(trial, stream, test) for test in near}
    return evidence, trial.rejections(SAMPLED, subject, evidence, more)


def _advice(trial: Trial, stream: Sequence[Transforms], test: _Test) -> str:
    """Where to look for the cause, and the least probable tokens that push the test."""
    name = test.evidence.name
    hint = next(words for start, words in _HINTS.items() if name.startswith(start))
    told = sorted((stream[index] for index in np.flatnonzero(test.pushing)), key=lambda token: token.probability)
    shown = ", ".join(
        f"prompt {token.prompt} answer {token.conversation + 1} token {token.position} "
        f"{'the end' if token.token == END else repr(trial.yardstick.piece(token.token))} "
        f"(probability {token.probability:.2g})"
        for token in told[:_NUM_TOLD]
    )
    return f"; look at {hint}" + (f"; most surprising: {shown}" if shown else "")


def _check(
    trial: Trial,
    subject: str,
    stream: Sequence[Transforms],
    evidence: tuple[Evidence, ...],
    findings: Sequence[Finding],
    refused: Mapping[int, str],
    speed: float,
) -> Check:
    """The outcome, with what was reached."""
    columns = _columns(stream)
    level = power.level(trial.alpha, len(evidence))
    overall = statistics.detectable(len(stream), level)
    reached = [f"{overall:.2f} over all tokens"]
    groups = _groups(columns["place"], columns["last_place"])
    for name, where in groups.items():
        if num := int(where.sum()):
            reached.append(f"{statistics.detectable(num, level):.2f} in {num} {name}")
    blind = Verdict.PASS if overall <= BLIND else Verdict.INCONCLUSIVE
    left_out = "".join(f"; setting {number + 1} left out: {reason}" for number, reason in sorted(refused.items()))
    return Check(
        name=SAMPLED,
        subject=subject,
        hypothesis=HYPOTHESIS,
        verdict=worst([blind, *(finding.verdict for finding in findings)]),
        evidence=f"{len(stream)} tokens, smallest p-value {min(test.p_value for test in evidence):.2g} of "
        f"{len(evidence)} tests; total variation found with probability 95 %: {', '.join(reached)}; "
        f"{speed:.0f} tokens/s{left_out}",
        findings=tuple(findings),
        statistics=evidence,
        data=_series(columns, {"all tokens": np.full(len(stream), True), **groups}),
        detectable=overall,
    )


def _series(columns: Mapping[str, np.ndarray], groups: Mapping[str, np.ndarray]) -> dict[str, Sequence[Any]]:
    """For plots: counts of the transforms in equal bins, and how often a pass goes on behind each of its places."""
    data: dict[str, Sequence[Any]] = {}
    for name, where in groups.items():
        for order in ("by_id", "by_probability", "by_odds"):
            counts = np.histogram(columns[order][where], bins=_BINS, range=(0.0, 1.0))[0]
            data[f"{order.replace('_', ' ')}, {name}"] = counts.tolist()
    place, last_place = columns["place"], columns["last_place"]
    same = columns["conversation"][1:] == columns["conversation"][:-1]
    goes_on = same & (place[1:] == place[:-1] + 1)
    drafted = same & ((place[:-1] < last_place[:-1]) | (last_place[:-1] == 0))
    rows = []
    for number in np.unique(place[:-1][drafted]).tolist():
        here = drafted & (place[:-1] == number)
        rows.append([number, int(here.sum()), float(goes_on[here].mean())])
    data["acceptance by place"] = rows
    return data


def _lengths(trial: Trial) -> tuple[int, ...]:
    """Numbers of draft tokens that take turns."""
    return (trial.num_draft_tokens, 1) if trial.num_draft_tokens > 1 else (trial.num_draft_tokens,)


def _num_faults(findings: Sequence[Finding]) -> int:
    return sum(finding.verdict == Verdict.FAULT for finding in findings)


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
