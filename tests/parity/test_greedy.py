"""The greedy checks on hand-made logits: what is a tie, what is a fault, and where comparing stops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import parity_doubles as doubles
import pytest
from parity_doubles import END as EOS
from parity_doubles import VOCAB, engine, subject, trial

from trtspec.parity.greedy import check_greedy, check_speculation, greedy_answers
from trtspec.parity.result import Check, Verdict
from trtspec.parity.subjects import Answer
from trtspec.parity.trial import Trial
from trtspec.parity.yardstick import TOLERANCES


class Script:
    """A reference whose logits depend on the position alone: `rows[i]` is what follows i + 1 tokens."""

    def __init__(self, *rows: dict[int, float]) -> None:
        self._rows = np.full((len(rows), VOCAB), -10.0, dtype=np.float32)
        for row, logits in zip(self._rows, rows, strict=True):
            row[list(logits)] = list(logits.values())

    def logits(self, ids: list[int]) -> np.ndarray:
        return self._rows[: len(ids)]


def scripted(*rows: dict[int, float], max_tokens: int | None = None, tolerance: float = 2e-3) -> Trial:
    """One prompt of one token, against a scripted reference."""
    made = trial()
    return replace(
        made,
        cases=made.cases[:1],
        max_tokens=max_tokens or len(rows),
        yardstick=replace(made.yardstick, target=Script(*rows), tolerance=tolerance),
    )


def answer(*ids: int, finish: str = "length", text: str | None = None) -> Answer:
    return Answer((tuple(ids),), doubles.decode(list(ids)) if text is None else text, finish)


def check(made: Trial, given: Answer) -> Check:
    return check_greedy(made, "engines", {made.cases[0]: given})


@pytest.mark.parametrize(
    ("dtype", "logits", "verdict"),
    [
        ("float32", (5.000, 4.999), Verdict.TIE),
        ("float32", (5.0, 3.0), Verdict.FAULT),
        ("float32", (5.0, 4.99), Verdict.FAULT),
        ("float16", (5.0, 4.95), Verdict.TIE),
        ("float16", (5.0, 4.8), Verdict.FAULT),
        ("bfloat16", (5.0, 4.8), Verdict.TIE),
        ("bfloat16", (5.0, 3.0), Verdict.FAULT),
        ("float32", (5.0, 5.0), Verdict.PASS),
    ],
)
def test_regret_decides_between_tie_and_fault(dtype: str, logits: tuple[float, float], verdict: Verdict) -> None:
    """The engine took token 2, for which the reference has the second logit."""
    made = scripted({1: logits[0], 2: logits[1]}, tolerance=TOLERANCES[dtype])
    found = check(made, answer(2))
    assert found.verdict == verdict
    if verdict != Verdict.PASS:
        (finding,) = found.findings
        assert (finding.prompt, finding.position) == (1, 0)
        assert finding.chosen is not None and finding.expected is not None
        assert (finding.chosen.id, finding.chosen.text, finding.expected.id) == (2, "c", 1)
        assert finding.expected.logit - finding.chosen.logit == pytest.approx(logits[0] - logits[1], abs=1e-5)
        assert finding.reproduce == "greedy engines 1"


def test_comparing_stops_at_the_first_difference() -> None:
    """After a tie another token is another text: the wrong token behind it is not counted."""
    made = scripted({1: 5.0, 2: 4.9995}, {3: 5.0}, {3: 5.0})
    found = check(made, answer(2, 7, 7))
    assert found.verdict == Verdict.TIE
    assert [finding.position for finding in found.findings] == [0]
    assert found.evidence.startswith("1 tokens of 1 prompts compared")


@pytest.mark.parametrize(
    ("given", "position", "problem"),
    [
        (answer(1, finish="stop"), 1, "stops early"),
        (answer(1, 2, 3), 2, "goes on after the end"),
        (answer(1, 2, EOS), 2, "end id 0 is part of the output"),
        (answer(1, 2, EOS, 3), 2, "end id 0 is part of the output, and 1 tokens follow it"),
        (answer(1, 2), 2, "finish reason length after 2 tokens"),
        (answer(1, 2, 3, 4), 3, "4 tokens where max_tokens is 3"),
        (answer(1, 2, finish="cancelled"), 2, "finish reason 'cancelled'"),
        (answer(1, 99, 3), 1, "another token: regret inf"),
        (answer(1, 2, finish="stop", text="bX"), 0, "text differs from its token ids at character 1"),
    ],
)
def test_ends_lengths_and_texts(given: Answer, position: int, problem: str) -> None:
    """The reference says 1, 2, end; max_tokens is 3."""
    made = scripted({1: 5.0}, {2: 5.0}, {EOS: 5.0}, {4: 5.0}, {4: 5.0}, max_tokens=3)
    found = check(made, given)
    assert found.verdict == Verdict.FAULT
    assert any(finding.position == position and problem in finding.problem for finding in found.findings), found
    assert check(made, answer(1, 2, finish="stop")).verdict == Verdict.PASS


def test_any_end_id_ends_an_answer() -> None:
    """The reference puts the second end id first; the subject does not say which one it drew."""
    made = scripted({1: 5.0}, {9: 5.0, EOS: 2.0})
    made = replace(made, yardstick=replace(made.yardstick, end_ids=(EOS, 9)))
    assert check(made, answer(1, finish="stop")).verdict == Verdict.PASS


def test_a_full_context_ends_an_answer() -> None:
    made = scripted({1: 5.0}, {2: 5.0}, max_tokens=9)
    assert check(made, answer(1, 2)).verdict == Verdict.FAULT
    assert check(replace(made, context=3), answer(1, 2)).verdict == Verdict.PASS


def speculation(made: Trial, drafted: Answer, plain: Answer) -> Check:
    case = made.cases[0]
    return check_speculation(made, "engines", {case: drafted}, {case: plain})


@pytest.mark.parametrize(
    ("drafted", "plain", "verdict", "problem"),
    [
        (answer(1, 3), answer(1, 3), Verdict.PASS, ""),
        (answer(1, 3), answer(1, 4), Verdict.TIE, "another token"),
        (answer(1, 5), answer(1, 3), Verdict.FAULT, "another token"),
        (answer(1), answer(1, 3), Verdict.FAULT, "1 tokens with drafts, 2 without"),
        (answer(1, 3), answer(1, finish="stop"), Verdict.FAULT, "goes on after the end"),
        (answer(1, 3, text="b"), answer(1, 3), Verdict.FAULT, "another text"),
    ],
)
def test_with_drafts_as_without(drafted: Answer, plain: Answer, verdict: Verdict, problem: str) -> None:
    made = scripted({1: 5.0}, {3: 5.0, 4: 4.999, 5: 3.0})
    found = speculation(made, drafted, plain)
    assert found.verdict == verdict
    assert all(problem in finding.problem for finding in found.findings)


def test_the_right_subject_passes() -> None:
    made, right = trial(), subject()
    drafted = greedy_answers(made, right, made.cases, made.num_draft_tokens)
    plain = greedy_answers(made, right, made.cases, 0)
    assert check_greedy(made, "engines", drafted).verdict == Verdict.PASS
    assert check_speculation(made, "engines", drafted, plain).verdict == Verdict.PASS
    assert {len(given.ids) for given in drafted.values()} == {made.max_tokens}


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda: subject(accepting_everything()), id="accepts every draft"),
        pytest.param(lambda: subject(doubles.without_memory_of_rejection(doubles.TARGET)), id="KV cache off by one"),
    ],
)
def test_a_broken_subject_is_a_fault(broken: object) -> None:
    made = trial()
    drafted = greedy_answers(made, broken(), made.cases, made.num_draft_tokens)  # type: ignore[operator]
    found = check_greedy(made, "engines", drafted)
    assert found.verdict == Verdict.FAULT
    assert all(finding.chosen and finding.expected for finding in found.findings)


def test_an_end_id_that_does_not_end_is_a_fault() -> None:
    """The subject's engines know no end id; the reference ends after the prompt's second token."""
    rows = doubles.TARGET.rows.copy()
    rows[:, EOS] += 100.0
    made = trial()
    made = replace(made, yardstick=replace(made.yardstick, target=FixedTable(rows)))
    target = FixedTable(rows)
    right, deaf = subject(engine(target)), subject(engine(target), end_ids=())
    assert check_greedy(made, "", greedy_answers(made, right, made.cases, 3)).verdict == Verdict.PASS
    assert check_greedy(made, "", greedy_answers(made, deaf, made.cases, 3)).verdict == Verdict.FAULT


class FixedTable(doubles.Table):
    """A table given by its logits."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows


def accepting_everything() -> object:
    """A target that takes every draft for its own."""

    def verifier(rows: np.ndarray, request: object) -> tuple[list[int], int]:
        drafts = [int(token) for token in request.draft_tokens]  # type: ignore[attr-defined]
        return [*drafts, int(rows[-1].argmax())], len(drafts)

    return engine(doubles.TARGET, verifier)
