"""Each invariance: the right subject passes, and one that breaks it is found by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import parity_doubles as doubles
import parity_words as words
import pytest
from parity_words import Altered, garbled

from trtspec.decoding.engine_call import EngineRequest
from trtspec.errors import TrtspecError
from trtspec.parity.invariances import PARTS, check_invariances
from trtspec.parity.result import Check, Verdict
from trtspec.parity.subjects import Answer, Lost, Query, Subject, Unsupported
from trtspec.parity.trial import Trial

Ask = Callable[[Query], Answer]


def faults(check: Check) -> list[str]:
    return [part.name for part in check.parts if part.verdict == Verdict.FAULT]


def only(part: str) -> Trial:
    return words.trial(wanted=lambda check, name: name == part)


def test_the_right_subject_passes() -> None:
    found = check_invariances(words.trial(), words.subject())
    assert found.verdict == Verdict.PASS, found
    assert tuple(part.name for part in found.parts) == PARTS
    assert {part.verdict for part in found.parts} == {Verdict.PASS}
    assert found.evidence == "9 of 9 parts hold"


def accepting_everything() -> Subject:
    def verifier(rows: object, request: EngineRequest) -> tuple[list[int], int]:
        drafts = [int(token) for token in request.draft_tokens]  # type: ignore[union-attr]
        return [*drafts, int(rows[-1].argmax())], len(drafts)  # type: ignore[index]

    return doubles.subject(
        doubles.engine(words.TARGET, verifier),
        doubles.engine(words.DRAFT),
        end_ids=(words.END, words.END_TOO),
        decode=words.decode,
    )


def single_drafts_wrong() -> Subject:
    return Altered(lambda query, right: (garbled if query.num_draft_tokens == 1 else _as_is)(right(query)))


def another_in_one_piece() -> Subject:
    return Altered(lambda query, right: (_as_is if query.stream else garbled)(right(query)))


def another_text_in_one_piece() -> Subject:
    def answer(query: Query, right: Ask) -> Answer:
        given = right(query)
        return given if query.stream else replace(given, text=given.text.lstrip())

    return Altered(answer)


def remembers_the_last_prompt() -> Subject:
    last: list[str] = []

    def answer(query: Query, right: Ask) -> Answer:
        last.append(query.text)
        return garbled(right(query)) if last[-2:-1] not in ([], [query.text]) else right(query)

    return Altered(answer)


def wears_out() -> Subject:
    asked: list[Query] = []

    def answer(query: Query, right: Ask) -> Answer:
        asked.append(query)
        return garbled(right(query)) if asked.count(query) > 2 else right(query)

    return Altered(answer)


def cache_off_by_one() -> Subject:
    """A longer prompt finds what was kept of a shorter one, without the last token of it."""
    kept: list[tuple[int, ...]] = []

    def answer(query: Query, right: Ask) -> Answer:
        found = next((ids for ids in kept if len(ids) < len(query.ids) and query.ids[: len(ids)] == ids), None)
        kept.append(query.ids)
        return right(query if found is None else replace(query, ids=query.ids[: len(found)]))

    return Altered(answer)


def ignores_the_seed() -> Subject:
    calls: list[int] = []

    def answer(query: Query, right: Ask) -> Answer:
        calls.append(0)
        return right(replace(query, sampling=replace(query.sampling, seed=len(calls))))

    return Altered(answer)


def one_seed_for_all() -> Subject:
    return Altered(lambda query, right: right(replace(query, sampling=replace(query.sampling, seed=7))))


class Crowded:
    """Answers wrongly while others are being answered: all, or sampled queries only."""

    name = "crowded"

    def __init__(self, sampled_only: bool) -> None:
        self._sampled_only = sampled_only
        self._inside = 0
        self._lock = threading.Lock()

    def generate(self, query: Query) -> Answer:
        with self._lock:
            self._inside += 1
        time.sleep(0.01)
        crowded = self._inside > 1
        with self._lock:
            self._inside -= 1
        if crowded and not query.sampling.greedy:
            query = replace(query, sampling=replace(query.sampling, seed=query.sampling.seed // 2))
        answer = words.subject().generate(query)
        return garbled(answer) if crowded and not self._sampled_only else answer


def _as_is(answer: Answer) -> Answer:
    return answer


@pytest.mark.parametrize(
    ("part", "broken"),
    [
        ("speculation", accepting_everything),
        ("draft-length", single_drafts_wrong),
        ("streaming", another_in_one_piece),
        ("streaming", another_text_in_one_piece),
        ("interleaved", remembers_the_last_prompt),
        ("repeated", wears_out),
        ("shared-prefix", cache_off_by_one),
        ("same-seed", ignores_the_seed),
        ("other-seed", one_seed_for_all),
        ("company", lambda: Crowded(sampled_only=False)),
        ("company", lambda: Crowded(sampled_only=True)),
    ],
)
def test_what_breaks_an_invariance_is_found_by_name(part: str, broken: Callable[[], Subject]) -> None:
    check = check_invariances(only(part), broken())
    assert faults(check) == [part], check
    assert check.verdict == Verdict.FAULT
    assert all(f.part == part and f.reproduce.startswith(f"invariances:{part} ") for f in check.findings)
    assert faults(check_invariances(words.trial(), broken()))


def test_a_difference_between_equals_is_a_tie() -> None:
    """In one piece the third token is one that the reference likes as much, to within the tolerance."""
    made = only("streaming")
    rows = words.TARGET.rows.copy()
    rows[:, ord("~")] = rows.max(axis=1) - 1e-3
    tied = replace(made, yardstick=replace(made.yardstick, target=words.Table(rows)))
    check = check_invariances(tied, another_in_one_piece())
    assert check.verdict == Verdict.TIE
    assert {finding.position for finding in check.findings} == {2}
    assert "in one piece" in check.findings[0].problem


def test_both_of_two_tokens_must_be_likely_for_a_tie() -> None:
    """The reference likes neither: that they are equal excuses nothing."""
    made = only("streaming")
    rows = words.TARGET.rows.copy()
    rows[:, ord("^")] = rows[:, ord("~")]

    def answer(query: Query, right: Ask) -> Answer:
        ids = right(query).ids
        wrong = ord("~") if query.stream else ord("^")
        return words.respelled(right(query), (*ids[:2], wrong, *ids[3:]))

    tied = replace(made, yardstick=replace(made.yardstick, target=words.Table(rows)))
    assert check_invariances(tied, Altered(answer)).verdict == Verdict.FAULT


def test_rounding_may_change_a_draw() -> None:
    """The same seed gives another token where one is nearly as likely; with coarse rounding that proves nothing."""

    def answer(query: Query, right: Ask) -> Answer:
        calls.append(query)
        return garbled(right(query)) if len(calls) == 2 else right(query)

    calls: list[Query] = []
    made = only("same-seed")
    coarse = replace(made, yardstick=replace(made.yardstick, tolerance=0.5))
    check = check_invariances(coarse, Altered(answer))
    assert check.verdict in (Verdict.TIE, Verdict.INCONCLUSIVE)
    assert [finding.verdict for finding in check.findings] == [Verdict.TIE]


def test_a_model_without_chance_says_nothing_about_seeds() -> None:
    made = words.trial()
    rows = words.TARGET.rows * 100.0
    sure = replace(made, yardstick=replace(made.yardstick, target=words.Table(rows)))
    subject = doubles.subject(doubles.engine(words.Table(rows)), doubles.engine(words.DRAFT), decode=words.decode)
    parts = {part.name: part.verdict for part in check_invariances(sure, subject).parts}
    assert parts["same-seed"] == parts["other-seed"] == Verdict.INCONCLUSIVE


def test_what_a_subject_cannot_do_is_not_applicable() -> None:
    def answer(query: Query, right: Ask) -> Answer:
        if not query.sampling.greedy:
            raise Unsupported("decodes greedily")
        if query.num_draft_tokens > 3:
            raise TrtspecError("at most 3 draft tokens")
        return right(query)

    check = check_invariances(words.trial(), Altered(answer))
    parts = {part.name: part for part in check.parts}
    assert check.verdict == Verdict.PASS
    assert parts["same-seed"].verdict == parts["other-seed"].verdict == Verdict.NOT_APPLICABLE
    assert parts["same-seed"].evidence == "decodes greedily"
    assert parts["draft-length"].evidence.endswith("5 are too many for this engine")
    assert parts["company"].evidence.startswith("3 answers at once, 0 of them sampled")


def test_an_engine_that_drafts_by_itself_is_not_asked_about_drafts() -> None:
    check = check_invariances(words.trial(num_draft_tokens=0), words.subject())
    parts = {part.name: part.verdict for part in check.parts}
    assert check.verdict == Verdict.PASS
    assert parts["speculation"] == parts["draft-length"] == Verdict.NOT_APPLICABLE


def test_a_refusal_is_a_fault_and_a_lost_subject_ends_the_run() -> None:
    def refuse(error: type[TrtspecError]) -> Subject:
        def answer(query: Query, right: Ask) -> Answer:
            raise error("no")

        return Altered(answer)

    check = check_invariances(words.trial(), refuse(TrtspecError))
    assert check.verdict == Verdict.FAULT
    assert check.findings[0].problem == "refused: no"
    with pytest.raises(Lost):
        check_invariances(words.trial(), refuse(Lost))
