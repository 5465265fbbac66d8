"""The greedy check on hand-made logits: what is a tie, what is a fault, and what many small regrets together say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import parity_doubles as doubles
import pytest
from parity_doubles import END as EOS
from parity_doubles import VOCAB, engine, subject, trial

from trtspec.errors import TrtspecError
from trtspec.parity.greedy import Judged, apparent_error, check_greedy, excess
from trtspec.parity.result import Check, Choice, Verdict
from trtspec.parity.subjects import Answer, Lost, Query, Unsupported
from trtspec.parity.trial import Trial
from trtspec.parity.yardstick import TOLERANCES, tolerance_of


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


class Saying:
    """A subject that gives one answer, or raises one error, whatever it is asked."""

    name = "engines"

    def __init__(self, given: Answer | Exception) -> None:
        self.given = given

    def generate(self, query: Query) -> Answer:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


def check(made: Trial, given: Answer | Exception) -> Check:
    return check_greedy(made, Saying(given))


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


def test_two_roundings_are_tolerated_where_both_round() -> None:
    assert {dtype: tolerance_of(dtype) for dtype in TOLERANCES} == TOLERANCES
    assert tolerance_of("bfloat16", "bfloat16") == pytest.approx(0.5 * 2**0.5, abs=1e-3)
    assert tolerance_of("float32", "bfloat16") == pytest.approx(0.5, abs=1e-3)


def test_one_difference_hides_nothing_behind_it() -> None:
    """A tie, then a wrong token, a right one, and a wrong one again."""
    made = scripted({1: 5.0, 2: 4.9995}, {3: 5.0}, {3: 5.0}, {3: 5.0})
    found = check(made, answer(2, 7, 3, 8))
    assert found.verdict == Verdict.FAULT
    assert [finding.position for finding in found.findings] == [0, 1, 3]
    assert [finding.verdict for finding in found.findings] == [Verdict.TIE, Verdict.FAULT, Verdict.FAULT]
    assert found.evidence.startswith("4 tokens of 1 prompts compared")
    assert found.data["regrets"][0] == pytest.approx([0.0005, 15.0, 0.0, 15.0], abs=1e-5)


def test_faults_are_counted_and_the_first_of_them_shown() -> None:
    made = scripted(*[{3: 5.0}] * 9)
    found = check(made, answer(*[7] * 9))
    assert [finding.position for finding in found.findings] == [0, 1, 2]
    assert "9 other tokens" in found.evidence


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


@pytest.mark.parametrize(
    ("error", "verdict", "words"),
    [
        (Unsupported("it only samples"), Verdict.NOT_APPLICABLE, "it only samples"),
        (TrtspecError("too long"), Verdict.FAULT, "0 tokens"),
    ],
)
def test_a_refusal(error: Exception, verdict: Verdict, words: str) -> None:
    found = check(trial(), error)
    assert found.verdict == verdict
    assert words in found.evidence
    assert all(finding.problem == "refused: too long" for finding in found.findings)


def test_a_lost_subject_ends_the_run() -> None:
    with pytest.raises(Lost):
        check(trial(), Lost("no connection"))


def test_the_right_subject_passes() -> None:
    notes: list[tuple[str, dict[str, object]]] = []
    found = check_greedy(trial(note=lambda name, record: notes.append((name, record))), subject())
    assert found.verdict == Verdict.PASS
    assert found.data["prompts"] == [1, 2, 3, 4]
    assert [len(regrets) for regrets in found.data["regrets"]] == [40] * 4
    assert found.data["places"][0][:2] in ([0, 0], [0, 1])
    first, second, *_ = found.data["accepted_per_place"]
    assert 160 > first > second > 0
    assert [name for name, _ in notes] == ["greedy"] * 4
    assert notes[0][1]["regrets"] == found.data["regrets"][0]


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda: subject(accepting_everything()), id="accepts every draft"),
        pytest.param(lambda: subject(doubles.without_memory_of_rejection(doubles.TARGET)), id="KV cache off by one"),
    ],
)
def test_a_broken_subject_is_a_fault(broken: object) -> None:
    found = check_greedy(trial(), broken())  # type: ignore[operator]
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
    assert check_greedy(made, right).verdict == Verdict.PASS
    assert check_greedy(made, deaf).verdict == Verdict.FAULT


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


def noisy_choices(error: float, num: int, seed: int) -> list[Judged]:
    """What an engine chooses whose logits are off by a normal error; the difference of two by sqrt(2) times as much."""
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.normal(0.0, 3.0, (num, 64)))[:, ::-1]
    chosen = (rows + rng.normal(0.0, error / np.sqrt(2), rows.shape)).argmax(1)
    return [
        Judged(i, Choice(int(c), "", float(row[c])), Choice(0, "", float(row[0])), row[0] - row[1:33])
        for i, (row, c) in enumerate(zip(rows, chosen, strict=True))
    ]


def test_regrets_that_rounding_explains_are_no_excess() -> None:
    """Hypothesis true, at the largest error that counts as rounding; the bound is below 0.05 in no more than 5 %."""
    bounds = [excess(noisy_choices(0.2, 300, seed), 0.2) for seed in range(60)]
    assert sum(bound < 0.05 for bound in bounds) <= 3


def test_regrets_of_four_times_the_rounding_are_an_excess() -> None:
    """300 tokens; every single regret may still be below the tolerance."""
    tokens = [token for token in noisy_choices(0.8, 300, seed=0) if token.regret <= 0.5]
    assert excess(tokens, 0.2) < 1e-6
    assert 0.3 < apparent_error(tokens) < 1.0


@pytest.mark.parametrize(("gap", "verdict"), [(1e-5, Verdict.TIE), (0.0015, Verdict.FAULT)])
def test_too_many_ties_are_a_fault(gap: float, verdict: Verdict) -> None:
    """In float32, every second token is the reference's second choice: at a gap that rounding closes now and then, or
    nearly always."""
    made = scripted(*[{1: 5.0, 2: 5.0 - gap}] * 40)
    found = check(made, answer(*[1, 2] * 20))
    assert found.verdict == verdict
    assert {finding.verdict for finding in found.findings} == {Verdict.TIE, verdict}
    if verdict == Verdict.FAULT:
        (finding,) = (finding for finding in found.findings if finding.verdict == Verdict.FAULT)
        assert finding.prompt is None
        assert "20 ties in 40 tokens" in finding.problem
