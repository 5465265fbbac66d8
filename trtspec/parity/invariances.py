"""Invariances: what must not change an answer, and the seed, which must.

Greedy answers are compared with each other up to their first difference, which is a tie if the reference is indifferent
there. Of sampled answers to one seed, `Repeats` tells rounding from a seed that is not honoured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from scipy.special import gammainc

from trtspec.decoding.detokenize import REPLACEMENT
from trtspec.decoding.sampling import GREEDY, SamplingParams
from trtspec.parity.claims import Claim, Examination, Undecided, check_claims, some
from trtspec.parity.result import Check, Verdict
from trtspec.parity.subjects import Answer, Subject, Unsupported
from trtspec.parity.trial import Case, Trial

INVARIANCES = "invariances"
HYPOTHESIS = "an answer depends on prompt, settings and seed alone"
LENGTHS = (1, 2, 5)  # draft tokens a cycle
_TOKENS = 16  # of a greedy answer
_SAMPLED_TOKENS = 6
_TOP_K = 8
_MOST_REPEATS = 16  # pairs of sampled answers; two or three settle it, unless rounding is coarse
_MOST_ROUNDS = 4  # of company
_CERTAIN = 1e-5  # probabilities so small that they need no share of the run's false-alarm rate
_SHARED = 0.75  # of a prompt, what another one has in common with it


def check_invariances(trial: Trial, subject: Subject) -> Check:
    """An answer depends on prompt, settings and seed alone."""
    return check_claims(trial, subject, INVARIANCES, HYPOTHESIS, CLAIMS)


def cost(trial: Trial) -> int:
    """New tokens, about."""
    return 24 * min(_TOKENS, trial.max_tokens) + 12 * _SAMPLED_TOKENS


def speculation(exam: Examination) -> str:
    """With drafts and without."""
    _needs_drafts(exam)
    cases = list(some(exam.trial.cases, 3))
    for case in cases:
        exam.same(case, _greedy(exam, case), _greedy(exam, case, 0), here="with drafts", there="without")
    return exam.words


def draft_length(exam: Examination) -> str:
    """Few draft tokens a cycle or many; a length that the engine was not built for is left out."""
    _needs_drafts(exam)
    usual = exam.trial.num_draft_tokens
    (case,) = some(exam.trial.cases, 1)
    lengths, left_out = [], []
    for length in LENGTHS:
        if length == usual:
            continue
        try:
            answer = _greedy(exam, case, length, legal=length < usual)
        except (Undecided, Unsupported):
            if length < usual:
                raise
            left_out.append(length)
            continue
        lengths.append(length)
        exam.same(case, answer, _greedy(exam, case), here=f"with {length} draft tokens", there=f"with {usual}")
    words = f"{', '.join(map(str, sorted([*lengths, usual])))} draft tokens; {exam.words}"
    return words + "".join(f"; {length} are too many for this engine" for length in left_out)


def streaming(exam: Examination) -> str:
    """Block by block or in one piece."""
    cases = list(some(exam.trial.cases, 2))
    streamed = [_greedy(exam, case) for case in cases]
    for case, answer in zip(cases, streamed, strict=True):
        exam.same(case, _greedy(exam, case, stream=False), answer, here="in one piece", there="streamed")
    if all(len(answer.blocks) == 1 for answer in streamed) and not exam.faulty:
        raise Undecided("the subject does not stream")
    return exam.words


def company(exam: Examination) -> str:
    """Alone or among others, greedy and sampled ones; where sampled ones differ, several times."""
    greedy = [(case, GREEDY) for case in some(exam.trial.cases, 3)]
    sampled = _draws(exam, 4)
    together, repeats = [*greedy, *sampled], Repeats(exam, "in company")
    alone = [_short(exam, *asked) for asked in together]
    for _ in range(_MOST_ROUNDS):
        with ThreadPoolExecutor(len(together)) as threads:
            among = list(threads.map(lambda asked: _short(exam, *asked, again=True), together))
        for (case, sampling), ours, theirs in zip(together, among, alone, strict=True):
            if sampling.greedy:
                exam.same(case, ours, theirs, here="in company", there="alone")
            else:
                repeats.add(case, sampling, theirs, ours)
        if exam.faulty or not repeats.different:
            break
    return f"{len(together)} answers at once, {len(sampled)} of them sampled; {exam.words}"


def _draws(exam: Examination, count: int) -> list[tuple[Case, SamplingParams]]:
    """What to ask for sampled answers; nothing of a subject that has none."""
    drawn = [_drawn(exam, number) for number in range(count)]
    try:
        _short(exam, *drawn[0])
    except (Undecided, Unsupported):
        return []
    return drawn


def interleaved(exam: Examination) -> str:
    """Another prompt before it."""
    first, *others = some(exam.trial.cases, 2)
    if not others:
        raise Undecided("there is only one prompt")
    before = [_greedy(exam, first, again=True) for _ in range(2)][-1]  # after itself, not after some other prompt
    other = _greedy(exam, others[0], again=True)
    exam.same(first, _greedy(exam, first, again=True), before, here="after another prompt", there="before it")
    exam.same(others[0], other, _greedy(exam, others[0]), here="between two others", there="at another time")
    return f"prompts {first.number}, {others[0].number}, {first.number} in turn; {exam.words}"


def repeated(exam: Examination) -> str:
    """The same again."""
    (case,) = some(exam.trial.cases, 1)
    answers = [_greedy(exam, case), *(_greedy(exam, case, again=True) for _ in range(2))]
    for number, answer in enumerate(answers[1:], 2):
        exam.same(case, answer, answers[0], here=f"the {number}. time", there="the first")
    return f"prompt {case.number} three times; {exam.words}"


def shared_prefix(exam: Examination) -> str:
    """Prompts that begin as an earlier one, so that a cache of keys and values is used again."""
    trial = exam.trial
    first = min(trial.cases, key=lambda case: len(case.ids))
    before = _greedy(exam, first, again=True)
    longest = max(len(case.ids) for case in trial.cases)
    prompts = [exam.prompt(first, text) for text in _relatives(trial, first, before)]
    for prompt in prompts:
        # How long a prompt may be is not known, but as long as the longest it may.
        exam.ask_along(prompt, GREEDY, _length(exam), again=True, legal=len(prompt.ids) <= longest)
    exam.same(first, _greedy(exam, first, again=True), before, here="after its relatives", there="before them")
    return f"prompt {first.number} before and after {len(prompts)} that begin as it does; {exam.words}"


def _relatives(trial: Trial, case: Case, answer: Answer) -> list[str]:
    """The conversation a step further, and others that leave this one near its end."""
    kept = int(_SHARED * len(case.text))
    others = (other for other in some(trial.cases, 2) if other != case)
    texts = [
        case.text + answer.text.rstrip(REPLACEMENT),
        *(case.text[:kept] + other.text[kept:] for other in others if kept),
    ]
    return [text for text in texts if text != case.text]


def same_seed(exam: Examination) -> str:
    """The same seed again gives the same draws."""
    repeats = Repeats(exam, "the second time")
    for number in range(_MOST_REPEATS):
        case, sampling = _drawn(exam, number)
        once = _short(exam, case, sampling)
        repeats.add(case, sampling, once, _short(exam, case, sampling, again=True))
        if exam.faulty or (number and repeats.honoured):
            return repeats.words
    reason = "rounding may explain it" if repeats.different else "the answers leave too little to chance"
    raise Undecided(f"{repeats.words}: {reason}", Verdict.INCONCLUSIVE)


def other_seed(exam: Examination) -> str:
    """Another seed gives other draws, by and by."""
    chance = 1.0
    for number in range(_MOST_REPEATS):
        case, sampling = _drawn(exam, number)
        other = replace(sampling, seed=exam.trial.request_seed(number, 6))
        pair = [_short(exam, case, given) for given in (sampling, other)]
        if pair[0].tokens != pair[1].tokens:
            return f"two seeds gave two answers to prompt {case.number}"
        chance *= math.prod(p or 1.0 for p in _likelihoods(exam.trial, case, sampling, pair[0].tokens))
        if chance < _CERTAIN:
            problem = f"the seed is ignored: {number + 1} pairs of seeds gave the same answers (by chance {chance:.1g})"
            exam.fault(case, 0, problem)
            return problem
    raise Undecided(f"{_MOST_REPEATS} pairs of answers leave too little to chance", Verdict.INCONCLUSIVE)


class Repeats:
    """Pairs of answers to one seed. Behind its first difference a pair says nothing.

    An honoured seed repeats every token, unless rounding moved a border between two tokens over the random number that
    was used: each of the token's borders by e at most, so with probability 2 e / p for a token of probability p. The
    differences are a fault if so many are too improbable (Poisson), and ties if not.

    An ignored seed repeats the token with probability p. That a seed is honoured shows in the odds of the two, over all
    tokens compared; they exceed 1 / `_CERTAIN` for an ignored seed with probability `_CERTAIN` at most (Ville).

    Args:
        exam: takes the findings.
        when: the second answer was given.
    """

    def __init__(self, exam: Examination, when: str) -> None:
        self.different = 0
        self._exam, self._when = exam, when
        self._odds, self._expected, self._pairs = 1.0, 0.0, 0
        # A change of no difference of two logits by more than t moves no sum of probabilities by more than t / 4. Two
        # answers of one subject are nearer to each other than to the reference: half the tolerance is plenty.
        self._border = exam.trial.yardstick.tolerance / 8

    @property
    def honoured(self) -> bool:
        """Whether it is sure that the seed is not ignored."""
        return self._odds > 1 / _CERTAIN

    @property
    def words(self) -> str:
        """What was compared."""
        words = f"{self._pairs} pairs of answers, {self.different} of them different"
        return words + f" ({self._expected:.2g} by rounding at most)" * (self.different > 0)

    def add(self, case: Case, sampling: SamplingParams, first: Answer, second: Answer) -> None:
        """Take one pair into account, and note its first difference."""
        exam = self._exam
        place = _parting(first.tokens, second.tokens)
        compared = first.tokens if place is None else first.tokens[: place + 1]
        for position, p in enumerate(_likelihoods(exam.trial, case, sampling, compared)):
            moved = min(1.0, 2 * self._border / p) if p > 0 else 1.0
            self._expected += moved
            if moved < 1 - p:  # else it says nothing either way
                self._odds *= moved / (1 - p) if position == place else (1 - moved) / p
        exam.compared += len(compared)
        self._pairs += 1
        if place is None:
            return
        self.different += 1
        explained = gammainc(self.different, self._expected) > _CERTAIN
        problem = f"another token {self._when}, with the same seed"
        exam.fault(case, place, problem, Verdict.TIE if explained else Verdict.FAULT)


def _parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two outputs part; None if they are the same."""
    places = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    return next(places, None if len(ours) == len(theirs) else min(len(ours), len(theirs)))


def _likelihoods(trial: Trial, case: Case, sampling: SamplingParams, tokens: Sequence[int]) -> list[float]:
    """The reference's probability of each token given those before it; 0 for what it cannot emit."""
    yardstick = trial.yardstick
    result = []
    for position, (row, token) in enumerate(zip(yardstick.along(case.ids, tokens), tokens, strict=False)):
        p = yardstick.distribution(row, (*case.ids, *tokens[:position]), sampling)
        index = yardstick.index(token)
        result.append(float(p[index]) if 0 <= index < len(p) else 0.0)
    return result


def _needs_drafts(exam: Examination) -> None:
    if not exam.trial.num_draft_tokens:
        raise Undecided("no request decides here how much is drafted")


def _drawn(exam: Examination, number: int) -> tuple[Case, SamplingParams]:
    """Prompt and settings of the sampled answer of this number, without rare tokens: rounding moves those most."""
    trial = exam.trial
    seed = trial.request_seed(number, 5)
    return trial.cases[number % len(trial.cases)], replace(trial.samplings[0], top_k=_TOP_K, seed=seed)


def _greedy(exam: Examination, case: Case, num_draft_tokens: int | None = None, **more: bool) -> Answer:
    return _short(exam, case, GREEDY, num_draft_tokens, **more)


def _short(
    exam: Examination,
    case: Case,
    sampling: SamplingParams,
    num_draft_tokens: int | None = None,
    *,
    legal: bool = True,
    **more: bool,
) -> Answer:
    """A short answer. A subject that only decodes greedily may refuse a sampled one."""
    length = _length(exam, sampling)
    return exam.ask(case, sampling, num_draft_tokens, length, legal=legal and sampling.greedy, **more)


def _length(exam: Examination, sampling: SamplingParams = GREEDY) -> int:
    return min(_TOKENS if sampling.greedy else _SAMPLED_TOKENS, exam.trial.max_tokens)


CLAIMS = (
    Claim("speculation", "the greedy output is the same with drafts and without", speculation),
    Claim("draft-length", "the greedy output is the same for any number of draft tokens", draft_length),
    Claim("streaming", "the output is the same streamed and in one piece", streaming),
    Claim("interleaved", "the output is the same before and after another prompt", interleaved),
    Claim("repeated", "the same prompt gives the same greedy output each time", repeated),
    Claim("shared-prefix", "what is kept of an earlier prompt changes no output", shared_prefix),
    Claim("same-seed", "the same seed gives the same sampled output", same_seed),
    Claim("other-seed", "another seed gives another sampled output", other_seed),
    Claim("company", "the output is the same alone and among others", company),
)
PARTS = tuple(claim.name for claim in CLAIMS)
