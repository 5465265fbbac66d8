"""The check of degenerate answers: what is broken is found, and what the reference would do too is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from parity_doubles import END, TARGET, VOCAB, Table, engine, subject, trial

from trtspec.decoding.engine_call import EngineRequest
from trtspec.parity.degenerate import PARTS, check_degenerate, cost, longest_loop
from trtspec.parity.result import Check, Part, Verdict
from trtspec.parity.subjects import Answer, Counts, Query, Subject, Unsupported
from trtspec.parity.trial import Trial


class Saying:
    """Answers what a function of the query says."""

    name = "saying"

    def __init__(self, say: Callable[[Query], Sequence[int]], **more: object) -> None:
        self._say, self._more = say, more
        self.asked: list[Query] = []

    def generate(self, query: Query) -> Answer:
        self.asked.append(query)
        ids = tuple(self._say(query))
        text = "".join(chr(ord("a") + token % 64) for token in ids)
        given: dict[str, object] = {"blocks": tuple((token,) for token in ids), "text": text, "finish_reason": "length"}
        return Answer(**(given | self._more))  # type: ignore[arg-type]


def part(name: str, subject: Subject, made: Trial | None = None) -> tuple[Part, Check]:
    found = check_degenerate(made or trial(), subject)
    return next(part for part in found.parts if part.name == name), found


def likely(to: int, of: Sequence[int] = range(VOCAB)) -> Table:
    """A model that goes from the ids `of` to one id nearly always."""
    p = np.exp(TARGET.rows.astype(np.float64))
    for token in of:
        p[token] = 1e-4
        p[token, to] = 1.0
    return Table(p / p.sum(1, keepdims=True))


def against(table: Table, **changes: object) -> Trial:
    """A run whose reference is another table."""
    made = trial(**changes)
    return replace(made, yardstick=replace(made.yardstick, target=table))


def test_the_right_subject_passes() -> None:
    found = check_degenerate(trial(), subject())
    assert found.verdict == Verdict.PASS, found
    assert tuple(part.name for part in found.parts) == PARTS
    acceptance = found.parts[-1].evidence
    assert "drafts accepted" in acceptance


def test_every_query_is_asked_once() -> None:
    asked = Saying(lambda query: [5] * query.max_tokens)
    check_degenerate(trial(), asked)
    assert len(asked.asked) == len(set(asked.asked)) == 6
    assert sum(query.max_tokens for query in asked.asked if not query.sampling.greedy) == cost(trial())


def test_an_id_that_the_model_does_not_have() -> None:
    found, check = part("ids", Saying(lambda query: [5, VOCAB, 5]))
    assert found.verdict == Verdict.FAULT
    assert check.findings[0].position == 1
    assert "id 16, where the model has 16 ids" in check.findings[0].problem


def test_an_id_that_the_tokenizer_does_not_have() -> None:
    """A fault where the reference does not want it either, as ids that pad a vocabulary are."""
    made = trial()
    made = replace(made, yardstick=replace(made.yardstick, piece=lambda token: "" if token == 7 else "x"))
    silent = Saying(lambda query: [7])
    assert part("ids", silent, made)[0].verdict == Verdict.FAULT
    wanted = replace(made, yardstick=replace(made.yardstick, target=likely(7)))
    assert part("ids", silent, wanted)[0].verdict == Verdict.PASS


def test_nothing_but_empty_answers() -> None:
    empty = Saying(lambda query: [], finish_reason="stop")
    found, check = part("empty", empty)
    assert found.verdict == Verdict.FAULT
    assert "6 of 6 answers are empty: the reference has a regret" in check.findings[0].problem
    found, _ = part("empty", empty, against(likely(END)))
    assert found.verdict == Verdict.PASS
    assert "and so are the reference's" in found.evidence


def test_one_empty_answer_is_not_degenerate() -> None:
    assert part("empty", Saying(lambda query: [] if query.ids == (1,) else [5] * 40))[0].verdict == Verdict.PASS


def test_the_same_answer_to_all_prompts() -> None:
    same = Saying(lambda query: [5, 6, 7, 8])
    found, check = part("same", same)
    assert found.verdict == Verdict.FAULT
    assert any("the same answer to the prompts 1, 2, 3, 4" in finding.problem for finding in check.findings)
    right, _ = part("same", subject(engine(likely(5))), against(likely(5)))
    assert right.verdict == Verdict.PASS
    assert "the reference would give it too" in right.evidence


@pytest.mark.parametrize(
    ("say", "words"),
    [
        (lambda query: [5] * 40, "one id repeated over 40 of 40 tokens"),
        (lambda query: [3, *[5, 6, 7] * 13], "a cycle of 3 ids repeated over 39 of 40 tokens"),
        (lambda query: [1, 2, 3, 4, 9, 8, 7, 6, 2, 4, *[5] * 30], "one id repeated over 30 of 40 tokens"),
    ],
)
@pytest.mark.parametrize("greedy", [True, False])
def test_loops(say: Callable[[Query], Sequence[int]], words: str, greedy: bool) -> None:
    """A loop of a greedy answer, or of a sampled one; the others are a right subject's."""
    right = subject()

    class Looping(Saying):
        def generate(self, query: Query) -> Answer:
            return super().generate(query) if query.sampling.greedy == greedy else right.generate(query)

    found, check = part("repetition", Looping(say))
    assert found.verdict == Verdict.FAULT
    assert any(words in finding.problem for finding in check.findings if finding.part == "repetition")


@pytest.mark.parametrize("num", range(5))
def test_a_loop_of_the_reference_is_no_fault(num: int) -> None:
    table = likely(5)
    found, _ = part("repetition", subject(engine(table)), against(table, seed=num))
    assert found.verdict == Verdict.PASS
    assert "and so does the reference" in found.evidence


def test_where_a_loop_is() -> None:
    assert longest_loop([]) == (0, 0, 1)
    assert longest_loop([1, 2, 3]) == (0, 0, 1)
    assert longest_loop([4, 1, 1, 1, 1]) == (1, 5, 1)
    assert longest_loop([4, 1, 2, 1, 2, 1, 2, 1, 5]) == (1, 8, 2)
    assert longest_loop([9, 9, 9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1]) == (3, 13, 3)


def test_broken_characters() -> None:
    cut = "\ufffd" * 40
    found, check = part("text", Saying(lambda query: [5] * 40, text=cut))
    assert found.verdict == Verdict.FAULT
    assert any("its ids are whole characters" in finding.problem for finding in check.findings)
    made = against(likely(5))
    bytes_only = replace(made, yardstick=replace(made.yardstick, decode=lambda ids: "\ufffd" * len(ids)))
    assert part("text", Saying(lambda query: [5] * 40, text=cut), bytes_only)[0].verdict == Verdict.PASS


class Claiming:
    """The right subject, and what it says of its drafts."""

    name = "claiming"

    def __init__(self, drafted: int, accepted: int) -> None:
        self.counts = Counts(drafted=drafted, accepted=accepted, target_passes=10)

    def generate(self, query: Query) -> Answer:
        return replace(subject().generate(query), counts=self.counts)


def test_drafts_that_are_never_accepted_although_they_are_right() -> None:
    made = trial()
    made = replace(made, yardstick=replace(made.yardstick, draft=TARGET))
    found, check = part("acceptance", Claiming(drafted=30, accepted=0), made)
    assert found.verdict == Verdict.FAULT
    (finding,) = check.findings
    assert (
        "0 of 120 drafts accepted, although draft and reference clearly have the same first choice" in finding.problem
    )
    assert finding.reproduce.startswith("degenerate:acceptance claiming")


def test_drafts_that_are_always_accepted_although_they_are_wrong() -> None:
    found, check = part("acceptance", Claiming(drafted=30, accepted=30))
    assert found.verdict == Verdict.FAULT
    assert "other first choices" in check.findings[0].problem


def test_a_target_that_takes_every_draft() -> None:
    def verifier(rows: np.ndarray, request: EngineRequest) -> tuple[list[int], int]:
        drafts = [int(token) for token in request.draft_tokens]  # type: ignore[union-attr]
        return [*drafts, int(rows[-1].argmax())], len(drafts)

    assert part("acceptance", subject(engine(TARGET, verifier)))[0].verdict == Verdict.FAULT


def test_a_draft_that_is_the_target_is_accepted_always() -> None:
    made = trial()
    made = replace(made, yardstick=replace(made.yardstick, draft=TARGET))
    found, _ = part("acceptance", subject(draft=engine(TARGET)), made)
    assert found.verdict == Verdict.PASS
    assert "differ at 0" in found.evidence


def test_a_draft_that_never_agrees_is_never_accepted() -> None:
    against_it = Table(np.exp(-TARGET.rows) / np.exp(-TARGET.rows).sum(1, keepdims=True))
    made = trial()
    made = replace(made, yardstick=replace(made.yardstick, draft=against_it))
    found, _ = part("acceptance", subject(draft=engine(against_it)), made)
    assert found.verdict == Verdict.PASS
    assert found.evidence.startswith("0 of")


def test_without_a_draft_model_an_exact_acceptance_is_inconclusive() -> None:
    """An engine that drafts by itself, and says that none of its drafts was any good."""
    made = trial(num_draft_tokens=0)
    made = replace(made, yardstick=replace(made.yardstick, draft=None))
    own = Saying(lambda query: [5] * 40, counts=Counts(drafted=90, accepted=0))
    assert part("acceptance", own, made)[0].verdict == Verdict.INCONCLUSIVE
    few = Saying(lambda query: [5] * 40, counts=Counts(drafted=9, accepted=0))
    assert part("acceptance", few, made)[0].verdict == Verdict.PASS
    silent = Saying(lambda query: [5] * 40)
    assert part("acceptance", silent, made)[0].verdict == Verdict.NOT_APPLICABLE


def test_what_cannot_be_asked_is_not_applicable() -> None:
    class Mute(Saying):
        def generate(self, query: Query) -> Answer:
            raise Unsupported("it is mute")

    assert check_degenerate(trial(), Mute(lambda query: [])).verdict == Verdict.NOT_APPLICABLE
