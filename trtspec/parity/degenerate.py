"""The check of what no sound subject does, whatever its model: loops, foreign ids, silence, one answer for all.

Small models do repeat themselves, so a pattern alone is no fault. The reference is forced along it, and it is a fault
where the reference would not have gone there: by a large regret, or, of a sampled answer, by a surprise far above the
entropy. Knows answers; asks the greedy queries again, which cost nothing, and two sampled ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trtspec.decoding.sampling import SamplingParams
from trtspec.parity.claims import Claim, Examination, Undecided, check_claims
from trtspec.parity.greedy import judge
from trtspec.parity.result import Check, Verdict
from trtspec.parity.subjects import Answer, Query, Subject
from trtspec.parity.trial import Case, Trial

DEGENERATE = "degenerate"
_NUM_SAMPLED = 2
_LONGEST_CYCLE = 8  # ids
_SHORTEST_LOOP = 12  # tokens; less is a list or a rhyme
_SURPRISE = 5.0  # standard deviations by which a stretch may be less probable than the reference's own draws
_NEVER = 1e-12  # probability of the impossible
_FEW = 50  # drafts from which on an acceptance of exactly 0 or 1 says something
_CLEAR = 5  # places at which the draft contradicts such an acceptance
_CUT = "\ufffd"


@dataclass(frozen=True)
class Given:
    """One answer to one query."""

    trial: Trial
    case: Case
    query: Query
    answer: Answer

    @cached_property
    def regrets(self) -> list[float]:
        """For each token that can be judged, how far the reference puts it behind its first choice."""
        return [token.regret for token in judge(self.trial, self.case, self.answer.tokens)]

    @cached_property
    def surprises(self) -> list[tuple[float, float]]:
        """For each token that can be judged, -log p above the entropy, and the variance of -log p, in nats."""
        yardstick, tokens = self.trial.yardstick, self.answer.tokens
        result = []
        for position, (row, token) in enumerate(zip(yardstick.along(self.case.ids, tokens), tokens, strict=False)):
            p = yardstick.distribution(row, (*self.case.ids, *tokens[:position]), self.query.sampling)
            index = yardstick.index(token)
            chosen = float(p[index]) if 0 <= index < len(p) else 0.0
            surprise = -np.log(p[p > 0])
            entropy = float(p[p > 0] @ surprise)
            result.append((-math.log(max(chosen, _NEVER)) - entropy, float(p[p > 0] @ (surprise - entropy) ** 2)))
        return result

    def doubt(self, begin: int, end: int) -> str | None:
        """Why the reference would not have emitted the tokens `begin` to `end`; None if it would."""
        greedy, tolerance = self.query.sampling.greedy, self.trial.yardstick.tolerance
        if not (self.regrets if greedy else self.surprises)[begin:end]:
            return "no token of it can be judged"
        if greedy:
            regret = max(self.regrets[begin:end])
            return f"the reference has a regret of {regret:.3g} there" if regret > tolerance else None
        excess, variance = np.sum(self.surprises[begin:end], axis=0)
        score = excess / math.sqrt(variance + 1.0)
        return f"the reference is surprised by {score:.0f} standard deviations" if score > _SURPRISE else None


def check_degenerate(trial: Trial, subject: Subject) -> Check:
    """No answer is degenerate in a way that the reference would not be: all of `CLAIMS`."""
    return check_claims(trial, subject, DEGENERATE, "no answer is degenerate where the reference is not", CLAIMS)


def cost(trial: Trial) -> int:
    """New tokens of the sampled answers; the greedy ones are known where the greedy check has run."""
    return min(_NUM_SAMPLED, len(trial.cases)) * trial.max_tokens


def _answers(examination: Examination, *, sampled: bool = True) -> list[Given]:
    """Greedy answers to all prompts, and a few sampled ones; those that an earlier claim has asked for are known."""
    trial = examination.trial
    queries = [(case, SamplingParams()) for case in trial.cases]
    if sampled:
        queries += [
            (case, replace(trial.samplings[0], seed=trial.request_seed(case.number, 4)))
            for case in trial.cases[:_NUM_SAMPLED]
        ]
    known = {query: answer for _, query, answer in examination.asked}
    result = []
    for case, sampling in queries:
        query = trial.query(case, sampling, trial.num_draft_tokens)
        answer = known[query] if query in known else examination.ask(case, sampling)
        result.append(Given(trial, case, query, answer))
    return result


def _ids(examination: Examination) -> str:
    yardstick, given = examination.trial.yardstick, _answers(examination)
    for each in given:
        for position, token in enumerate(each.answer.ids):
            if not 0 <= token < yardstick.vocab_size:
                examination.fault(each.case, position, f"id {token}, where the model has {yardstick.vocab_size} ids")
                break
            if not yardstick.piece(token) and (doubt := each.doubt(position, position + 1)):
                examination.fault(each.case, position, f"id {token}, which the tokenizer does not know: {doubt}")
                break
    return f"{len({token for each in given for token in each.answer.ids})} different ids"


def _empty(examination: Examination) -> str:
    given = _answers(examination)
    empty = [each for each in given if not each.answer.ids]
    evidence = f"{len(empty)} of {len(given)} answers are empty"
    if len(empty) < len(given):
        return evidence
    for each in empty:
        if doubt := each.doubt(0, 1):
            examination.fault(each.case, 0, f"{evidence}: {doubt}")
    return evidence if examination.faulty else f"{evidence}, and so are the reference's"


def _same(examination: Examination) -> str:
    groups: dict[tuple[int, ...], list[Given]] = {}
    for each in _answers(examination, sampled=False):
        if each.answer.ids:
            groups.setdefault(each.answer.tokens, []).append(each)
    shared = [group for group in groups.values() if len({each.case.ids for each in group}) > 1]
    for group in shared:
        numbers = ", ".join(str(each.case.number) for each in group)
        for each in group:
            if doubt := each.doubt(0, len(each.answer.tokens)):
                examination.fault(each.case, 0, f"the same answer to the prompts {numbers}: {doubt}")
                break
    if not shared:
        return "no two prompts have the same answer"
    return "some prompts have the same answer" + ("" if examination.faulty else ", and the reference would give it too")


def _repetition(examination: Examination) -> str:
    loops = 0
    for each in _answers(examination):
        begin, end, period = longest_loop(each.answer.ids)
        if end - begin < max(_SHORTEST_LOOP, len(each.answer.ids) / 2):
            continue
        loops += 1
        if doubt := each.doubt(begin + period, end):
            what = "one id" if period == 1 else f"a cycle of {period} ids"
            length = f"{end - begin} of {len(each.answer.ids)} tokens"
            examination.fault(each.case, begin, f"{what} repeated over {length}: {doubt}")
    if not loops:
        return "no answer is mostly a loop"
    return f"answers that repeat themselves: {loops}" + ("" if examination.faulty else ", and so does the reference")


def longest_loop(ids: Sequence[int]) -> tuple[int, int, int]:
    """Begin, end and period of the longest stretch that repeats a cycle of up to `_LONGEST_CYCLE` ids."""
    best = (0, 0, 1)
    for period in range(1, _LONGEST_CYCLE + 1):
        begin = 0
        for i in range(period, len(ids) + 1):
            if i == len(ids) or ids[i] != ids[i - period]:
                if i - begin > max(best[1] - best[0], 2 * period):
                    best = (begin, i, period)
                begin = i - period + 1
    return best


def _text(examination: Examination) -> str:
    given, broken = _answers(examination), 0
    for each in given:
        text = each.answer.text
        if text.count(_CUT) <= max(2, len(text) / 5):
            continue
        broken += 1
        doubt = each.doubt(0, len(each.answer.tokens))
        if examination.trial.yardstick.decode(list(each.answer.ids)).count(_CUT) <= 2:
            doubt = "its ids are whole characters"
        if doubt:
            examination.fault(each.case, 0, f"{text.count(_CUT)} of {len(text)} characters are U+FFFD: {doubt}")
    return f"texts that are U+FFFD to a fifth and more: {broken} of {len(given)}"


def _acceptance(examination: Examination) -> str:
    """Of greedy answers, on which draft and target leave no room for chance."""
    given = _answers(examination, sampled=False)
    drafted, accepted, passes = _work(given)
    if not drafted:
        raise Undecided("it does not draft, or does not say")
    evidence = f"{accepted} of {drafted} drafts accepted"
    if 0 < accepted < drafted:
        return evidence
    if drafted < _FEW:
        return f"{evidence}, which are too few to tell"
    if examination.trial.yardstick.draft is None:
        raise Undecided(f"{evidence}, and there is no draft model to compare with", Verdict.INCONCLUSIVE)
    agree, differ = (sum(counts) for counts in zip(*map(_agreement, given), strict=True))
    clearly = "although draft and reference clearly have"
    if accepted == 0 and agree >= _CLEAR:
        examination.fault(given[0].case, 0, f"{evidence}, {clearly} the same first choice at {agree} places")
    elif accepted == drafted and differ > max(_CLEAR, passes):
        problem = f"{evidence}, {clearly} other first choices at {differ} places, and {passes} passes corrected them"
        examination.fault(given[0].case, 0, problem)
    return f"{evidence}; draft and reference agree at {agree} places and differ at {differ}"


def _work(given: Sequence[Given]) -> tuple[int, int, int]:
    """Drafts proposed and accepted, and passes of the target: what the subject says, else what the blocks say."""
    drafted = accepted = passes = 0
    for each in given:
        counts, blocks = each.answer.counts, each.answer.blocks
        passes += len(blocks) if counts.target_passes is None else counts.target_passes
        if counts.drafted is not None and counts.accepted is not None:
            drafted, accepted = drafted + counts.drafted, accepted + counts.accepted
        elif each.query.num_draft_tokens:
            drafted += each.query.num_draft_tokens * len(blocks)
            accepted += sum(len(block) - 1 for block in blocks if block)
    return drafted, accepted, passes


def _agreement(each: Given) -> tuple[int, int]:
    """At how many places of an answer draft and reference clearly have the same first choice, and different ones."""
    trial = each.trial
    rows = trial.yardstick.along(each.case.ids, each.answer.ids)
    draft_rows = trial.yardstick.draft_along(each.case.ids, each.answer.ids)
    if draft_rows is None:
        return 0, 0
    n = len(each.answer.ids)
    first, ours = draft_rows[:n].argmax(1), rows[:n].argmax(1)
    clear = _is_clear(draft_rows[:n], trial.yardstick.tolerance) & _is_clear(rows[:n], trial.yardstick.tolerance)
    return int((clear & (first == ours)).sum()), int((clear & (first != ours)).sum())


def _is_clear(rows: np.ndarray, tolerance: float) -> np.ndarray:
    """Whether the largest logit of each row is that much above the next."""
    second, largest = np.partition(rows, -2, axis=1)[:, -2:].T
    return np.asarray(largest - second > tolerance)


CLAIMS = (
    Claim("ids", "every id is one of the model's and of the tokenizer's", _ids),
    Claim("empty", "not all answers are empty", _empty),
    Claim("same", "different prompts have different answers", _same),
    Claim("repetition", "no answer is a loop of a few ids that the reference would leave", _repetition),
    Claim("text", "the texts are made of whole characters", _text),
    Claim("acceptance", "not all drafts of another model are accepted, and not none of them", _acceptance),
)
PARTS = tuple(claim.name for claim in CLAIMS)
