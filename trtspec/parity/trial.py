"""One run's circumstances, which all its checks share: what is asked, what it is compared with, how it is rerun.

Knows no check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtspec.decoding.sampling import SamplingParams
from trtspec.errors import TrtspecError
from trtspec.parity.result import Finding, Verdict
from trtspec.parity.statistics import Evidence, holm
from trtspec.parity.subjects import Answer, Lost, Query, Subject
from trtspec.parity.yardstick import Yardstick

_CUT = "\ufffd"  # what a character that is cut off at the end of an answer becomes


@dataclass(frozen=True)
class Case:
    """A prompt as a subject gets it.

    Attributes:
        number: its line in the prompt file.
        text: with the chat template applied, if there is one.
        ids: the text as token ids.
    """

    number: int
    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """What the checks of one run have in common.

    Attributes:
        yardstick: the reference.
        cases: the prompts.
        max_tokens: longest answer.
        num_draft_tokens: draft tokens a cycle.
        samplings: settings of the sampled check, their seeds ignored.
        num_samples: tokens that the sampled check draws.
        num_draws: answers that the check of draws takes for each of its prompts.
        seed: of everything random in the run.
        alpha: probability that one statistical check raises a false alarm.
        context: tokens that the subject can hold; None if there is no limit.
        reproduce: the command that runs one check of one subject again, on one prompt (a line number) or all.
        advance: told the fraction done within a check.
        encode: text to ids, without special tokens; for words and prompts that a check makes itself.
        wanted: whether a part of a check (check, part) is to run.
        note: keeps what a check found out about one answer (check, record that JSON can hold) in the trace.
        noted: what a check (its name) has kept of the answer to a query, where that was given in another process.
        seconds: time that the sampled check may take, in place of `num_samples`.
    """

    yardstick: Yardstick
    cases: tuple[Case, ...]
    max_tokens: int
    num_draft_tokens: int
    samplings: tuple[SamplingParams, ...]
    num_samples: int
    num_draws: int
    seed: int
    alpha: float
    context: int | None
    reproduce: Callable[[str, str, int | None], str]
    advance: Callable[[float], None]
    encode: Callable[[str], list[int]] = lambda text: []
    wanted: Callable[[str, str], bool] = lambda check, part: True
    note: Callable[[str, dict[str, Any]], None] = lambda check, record: None
    noted: Callable[[str, Query], dict[str, Any] | None] = lambda check, query: None
    seconds: float | None = None

    def query(
        self,
        case: Case,
        sampling: SamplingParams,
        num_draft_tokens: int,
        max_tokens: int | None = None,
        **more: Any,
    ) -> Query:
        """What is asked of a subject for one prompt; `more` are other fields of `Query`."""
        return Query(case.text, case.ids, max_tokens or self.max_tokens, sampling, num_draft_tokens, **more)

    def request_seed(self, *stream: int) -> int:
        """A uint64 seed for one request, for each `stream` another."""
        return int(np.random.SeedSequence((self.seed, *stream)).generate_state(1, np.uint64)[0])

    def fault(
        self, check: str, subject: str, case: Case, position: int, problem: str, part: str | None = None
    ) -> Finding:
        """A finding that is about no single token."""
        name = check if part is None else f"{check}:{part}"
        again = self.reproduce(name, subject, case.number)
        return Finding(case.number, position, Verdict.FAULT, problem, again, part=part)

    def refused(self, check: str, subject: str, case: Case, error: TrtspecError, part: str | None = None) -> Finding:
        """A fault: the subject did not answer a query that it may not refuse. A subject that is gone ends the run."""
        if isinstance(error, Lost):
            raise error
        return self.fault(check, subject, case, 0, f"refused: {error}", part)

    def rejections(
        self, check: str, subject: str, tests: Sequence[Evidence], more: Mapping[str, str] | None = None
    ) -> list[Finding]:
        """A fault for every test that rejects its hypothesis, at a level of `alpha` for all of them together.

        The clearest comes first; `more` is what is to be said besides, by the name of the test.
        """
        rejected = holm([test.p_value for test in tests], self.alpha)
        return [
            Finding(
                prompt=None,
                position=None,
                verdict=Verdict.FAULT,
                problem=f"{test.name}: {test.words} (statistic {test.statistic:.3g} over {test.num}, "
                f"p-value {test.p_value:.2g}){(more or {}).get(test.name, '')}",
                reproduce=self.reproduce(check, subject, None),
            )
            for test in sorted((test for test, no in zip(tests, rejected, strict=True) if no), key=lambda t: t.p_value)
        ]

    def misshapen(self, query: Query, answer: Answer) -> tuple[int, str] | None:
        """Position and description of what is wrong with an answer whatever the model says; None if nothing is.

        Looks at the end ids, the number of tokens against the finish reason, and the text against the ids.
        """
        ids, end_ids = answer.ids, self.yardstick.end_ids
        num = len(ids)
        for position, token in enumerate(ids):
            if token in end_ids:
                return position, f"end id {token} is part of the output, and {num - position - 1} tokens follow it"
        if num > query.max_tokens:
            return query.max_tokens, f"{num} tokens where max_tokens is {query.max_tokens}"
        full = self.context is not None and len(query.ids) + num >= self.context
        if answer.finish_reason == "length" and num < query.max_tokens and not full:
            return num, f"finish reason length after {num} tokens, where max_tokens is {query.max_tokens}"
        if answer.finish_reason not in ("length", "stop"):
            return num, f"finish reason {answer.finish_reason!r}, expected stop or length"
        text = self.yardstick.decode(list(ids))
        if text.rstrip(_CUT) != answer.text.rstrip(_CUT):
            place = _first_difference(text, answer.text)
            shown = f"{answer.text[place : place + 20]!r}, the token ids say {text[place : place + 20]!r}"
            return 0, f"text differs from its token ids at character {place}: {shown}"
        return None


def afresh(subject: Subject) -> Subject:
    """The subject itself, where `subject` is one that answers a known query from memory."""
    return getattr(subject, "asked_afresh", subject)


def _first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    """Index of the first difference of two unequal sequences."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
