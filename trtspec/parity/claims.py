"""Checks that are made of several claims, each examined by itself and with a verdict of its own.

Knows how a claim asks, compares and is recorded; not which claims there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trtspec.decoding.sampling import GREEDY, SamplingParams
from trtspec.errors import TrtspecError
from trtspec.parity.greedy import difference
from trtspec.parity.result import Check, Choice, Finding, Part, Verdict, worst
from trtspec.parity.subjects import END, Answer, Lost, Query, Subject, Unsupported
from trtspec.parity.trial import Case, Trial, afresh
from trtspec.runtime.reference import distribution

_SHOWN = 3  # findings of a part; more of the same teach nothing


class Undecided(Exception):
    """What a claim says cannot be settled on this subject with these prompts.

    Args:
        reason: why, in one clause.
        verdict: inconclusive, where it could have been settled by more of the same.
    """

    def __init__(self, reason: str, verdict: Verdict = Verdict.NOT_APPLICABLE) -> None:
        super().__init__(reason)
        self.verdict = verdict


@dataclass(frozen=True)
class Claim:
    """Something that is true of a right subject.

    Attributes:
        name: see `Part`.
        hypothesis: see `Part`.
        examine: asks the subject, notes what contradicts the claim, returns how much was compared, in one clause; may
            raise `Undecided`.
    """

    name: str
    hypothesis: str
    examine: Callable[[Examination], str]


def check_claims(trial: Trial, subject: Subject, name: str, hypothesis: str, claims: Sequence[Claim]) -> Check:
    """All wanted claims, one after the other."""
    wanted = [claim for claim in claims if trial.wanted(name, claim.name)]
    asked: list[tuple[Case, Query, Answer]] = []
    parts: list[Part] = []
    findings: list[Finding] = []
    for done, claim in enumerate(wanted, 1):
        examination = Examination(trial, subject, name, claim.name, asked)
        parts.append(examination.part(claim))
        findings += examination.findings
        trial.advance(done / len(wanted))
    counts = {verdict: [part.name for part in parts if part.verdict == verdict] for verdict in Verdict}
    summary = [f"{len(counts[Verdict.PASS]) + len(counts[Verdict.TIE])} of {len(parts)} parts hold"]
    summary += [
        f"{verdict.value}: {', '.join(counts[verdict])}"
        for verdict in (Verdict.FAULT, Verdict.INCONCLUSIVE, Verdict.NOT_APPLICABLE)
        if counts[verdict]
    ]
    return Check(
        name=name,
        subject=subject.name,
        hypothesis=hypothesis,
        verdict=worst([part.verdict for part in parts]),
        evidence="; ".join(summary),
        findings=tuple(findings),
        parts=tuple(parts),
    )


class _Refused(Exception):
    def __init__(self, case: Case, error: TrtspecError) -> None:
        super().__init__(f"refused: {error}")
        self.case = case


class Examination:
    """One claim under examination.

    Args:
        trial: the run.
        subject: what is checked.
        check, part: names of the check and of the claim.
        asked: takes up every question and its answer, for the claims that are about all of them.
    """

    def __init__(
        self, trial: Trial, subject: Subject, check: str, part: str, asked: list[tuple[Case, Query, Answer]]
    ) -> None:
        self.trial = trial
        self.asked = asked
        self.findings: list[Finding] = []
        self.compared = 0  # tokens
        self._subject = subject
        self._check, self._part = check, part

    def part(self, claim: Claim) -> Part:
        """Examine the claim, and say what became of it."""
        verdict = Verdict.PASS
        try:
            evidence = claim.examine(self)
        except Undecided as undecided:
            verdict, evidence = undecided.verdict, str(undecided)
        except Unsupported as unsupported:
            verdict, evidence = Verdict.NOT_APPLICABLE, str(unsupported)
        except _Refused as refused:
            evidence = str(refused)
            self.fault(refused.case, 0, evidence)
        verdicts = [verdict, *(finding.verdict for finding in self.findings)]
        kinds = ([finding for finding in self.findings if finding.verdict == kind] for kind in Verdict)
        self.findings = [finding for kind in kinds for finding in kind[:_SHOWN]]
        return Part(claim.name, claim.hypothesis, worst(verdicts), evidence)

    def ask(
        self,
        case: Case,
        sampling: SamplingParams = GREEDY,
        num_draft_tokens: int | None = None,
        max_tokens: int | None = None,
        *,
        again: bool = False,
        legal: bool = True,
        **more: object,
    ) -> Answer:
        """The subject's answer.

        Args:
            case: the prompt.
            sampling: how to draw.
            num_draft_tokens: None takes the run's.
            max_tokens: None takes the run's.
            again: not from memory.
            legal: whether a refusal is a fault.
            more: other fields of the query.
        """
        query = self._query(case, sampling, num_draft_tokens, max_tokens, more)
        return self._put(case, query, again, legal)

    def ask_along(
        self,
        case: Case,
        sampling: SamplingParams = GREEDY,
        max_tokens: int | None = None,
        *,
        again: bool = False,
        legal: bool = True,
        **more: object,
    ) -> tuple[Answer, int]:
        """A greedy answer, compared with the reference's choices under the same penalties and bans.

        The reference is forced along the answer. Notes the first tie and the first fault.

        Returns:
            The answer, and how many of its tokens the penalties and bans decided.
        """
        query = self._query(case, sampling, None, max_tokens, more)
        answer = self._put(case, query, again, legal)
        return answer, self._follows(case, query, answer)

    def _query(
        self,
        case: Case,
        sampling: SamplingParams,
        num_draft_tokens: int | None,
        max_tokens: int | None,
        more: Mapping[str, object],
    ) -> Query:
        if num_draft_tokens is None:
            num_draft_tokens = self.trial.num_draft_tokens
        return self.trial.query(case, sampling, num_draft_tokens, max_tokens, **more)

    def _put(self, case: Case, query: Query, again: bool, legal: bool) -> Answer:
        try:
            answer = (afresh(self._subject) if again else self._subject).generate(query)
        except (Unsupported, Lost):
            raise
        except TrtspecError as error:
            if legal:
                raise _Refused(case, error) from error
            raise Undecided(f"refused: {error}") from error
        self.asked.append((case, query, answer))
        return answer

    def prompt(self, like: Case, text: str) -> Case:
        """A prompt of one's own, which begins as `like` does where the tokenizer begins every prompt alike.

        Raises:
            Undecided: how a text becomes ids is not known.
        """
        body = tuple(self.trial.encode(like.text))
        if not body or like.ids[-len(body) :] != body:
            raise Undecided("it is not known how this subject makes ids of a text")
        return Case(like.number, text, (*like.ids[: -len(body)], *self.trial.encode(text)))

    def fault(self, case: Case, position: int, problem: str, verdict: Verdict = Verdict.FAULT) -> None:
        """Note a contradiction that is about no single token."""
        finding = self.trial.fault(self._check, self._subject.name, case, position, problem, self._part)
        self.findings.append(replace(finding, verdict=verdict))

    @property
    def faulty(self) -> bool:
        """Whether a fault was noted."""
        return any(finding.verdict == Verdict.FAULT for finding in self.findings)

    @property
    def words(self) -> str:
        """How much was compared."""
        return f"{self.compared} tokens compared"

    def same(self, case: Case, ours: Answer, theirs: Answer, *, here: str, there: str) -> bool:
        """Whether two greedy answers to one prompt are the same; notes the first difference.

        Args:
            case: the prompt.
            ours, theirs: the answers, to queries of the same length.
            here, there: how they were made.
        """
        if not self.same_tokens(case, ours.tokens, theirs.tokens, f"{{}} {here}, {{}} {there}"):
            return False
        if ours.finish_reason != theirs.finish_reason:
            reasons = f"finish reason {ours.finish_reason} {here}, {theirs.finish_reason} {there}"
            self.fault(case, len(ours.ids), reasons)
        elif len(ours.tokens) != len(theirs.tokens):
            self.fault(
                case,
                min(len(ours.tokens), len(theirs.tokens)),
                f"{len(ours.ids)} tokens {here}, {len(theirs.ids)} {there}",
            )
        elif ours.text != theirs.text:
            self.fault(case, 0, f"the same token ids give another text {here} than {there}")
        else:
            return True
        return False

    def same_tokens(self, case: Case, ours: Sequence[int], theirs: Sequence[int], words: str) -> bool:
        """Whether one of two greedy outputs begins as the whole other; notes the first difference.

        The difference is a tie if the reference likes both tokens, to within the tolerance, as much as its first
        choice. After it, another text is compared with another text: nothing further is said.

        Args:
            case: the prompt.
            ours, theirs: the outputs.
            words: what is compared, with a place for the text of each token.
        """
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if place is None:
            self.compared += min(len(ours), len(theirs))
            return True
        self.compared += place + 1
        yardstick = self.trial.yardstick
        row = yardstick.along(case.ids, ours[:place])[-1]
        pair = [yardstick.choice(row, tokens[place]) for tokens in (ours, theirs)]
        worse, best = min(pair, key=lambda choice: choice.logit), yardstick.choice(row, int(row.argmax()))
        self._difference(case, place, worse, best, words.format(*(repr(choice.text) for choice in pair)))
        return False

    def _follows(self, case: Case, query: Query, answer: Answer) -> int:
        yardstick, decided, tied = self.trial.yardstick, 0, False
        end_ids = yardstick.end_ids if query.end_ids is None else query.end_ids
        tokens = answer.tokens
        for place, (row, token) in enumerate(zip(yardstick.along(case.ids, tokens), tokens, strict=False)):
            log_p = _log_probabilities(row, query, tokens[:place], end_ids)
            best = int(log_p.argmax())
            if token == END and end_ids:
                token = max(end_ids, key=lambda end_id: float(log_p[end_id]))
            self.compared += 1
            decided += best != int(row.argmax())
            if token == best:
                continue
            known = 0 <= token < yardstick.vocab_size
            chosen = Choice(token, yardstick.piece(token), float(log_p[token])) if known else _unknown(token)
            expected = Choice(best, yardstick.piece(best), float(log_p[best]))
            if tied and expected.logit - chosen.logit <= yardstick.tolerance:
                continue
            tied = True
            self._difference(case, place, chosen, expected, "banned here" if math.isinf(chosen.logit) else "")
            if self.faulty:
                break
        return decided

    def _difference(self, case: Case, place: int, chosen: Choice, expected: Choice, words: str) -> None:
        name = self._subject.name
        finding = difference(self.trial, self._check, name, case, place, chosen, expected, self._part)
        self.findings.append(replace(finding, problem=": ".join(filter(None, (words, finding.problem)))))


def _log_probabilities(row: np.ndarray, query: Query, output: Sequence[int], end_ids: Sequence[int]) -> np.ndarray:
    """The reference's logits after penalties and bans, normalised; what is banned has -inf.

    A temperature of 1 leaves the logits as they are, and so as a greedy choice sees them.
    """
    p = distribution(
        row,
        [*query.ids, *output],
        replace(query.sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
        num_generated=len(output),
        min_new_tokens=query.min_tokens,
        end_ids=end_ids,
        bad_words=[word.ids for word in query.bad_words],
    )
    with np.errstate(divide="ignore"):
        return np.log(p)


def _unknown(token: int) -> Choice:
    return Choice(token, "", -math.inf)


def some(cases: Sequence[Case], count: int) -> Iterator[Case]:
    """`count` of the prompts, evenly over all of them; each once."""
    count = min(count, len(cases))
    return (cases[i * len(cases) // count] for i in range(count))
