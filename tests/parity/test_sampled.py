"""The sampled checks: the right subject passes as often as stated, broken ones are found.

A small world (see `parity_doubles`): 16 ids, draft and target differ by a total variation of about .45 in the mean.
`calibration.md` has the same at length.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import parity_doubles as doubles
import pytest
from calibrate import one_run
from parity_doubles import CUT, FULL, TARGET, VOCAB, engine, subject, trial
from parity_zoo import ZOO, AcceptsAlways, ArgmaxDrafts, ResidualFromP, Sampler

from trtspec.decoding.sampling import SamplingParams
from trtspec.errors import TrtspecError
from trtspec.parity import statistics
from trtspec.parity.draws import check_draws
from trtspec.parity.result import Verdict
from trtspec.parity.sampled import (
    _HINTS,
    PENALISED,
    Fault,
    Transforms,
    _Looks,
    check_sampled,
    collect,
    judge,
    places,
    plan,
    transforms,
)
from trtspec.parity.subjects import Answer, Query, Subject, Unsupported
from trtspec.parity.subjects.in_process import InProcess
from trtspec.parity.trial import Case


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_is_found(name: str) -> None:
    """Hypothesis: the output is the reference's; false-alarm rate 1e-3. Each is found within its budget."""
    exhibit = ZOO[name]
    found = check_sampled(exhibit.trial(), exhibit.make())
    assert found.verdict == Verdict.FAULT
    telling = [finding.problem for finding in found.findings] + [
        f"{test.name}: {test.words}" for test in found.statistics if test.p_value < 1e-3
    ]
    assert any(exhibit.finds in problem for problem in telling), telling
    assert all(finding.reproduce.startswith("sampled sampler ") for finding in found.findings)


def test_an_impossible_token_is_found_at_once() -> None:
    """With top-k and top-p a draft that is let through soon emits what the reference excludes, within 100 tokens."""
    found = check_sampled(trial(num_samples=100, samplings=(CUT,)), AcceptsAlways())
    assert found.verdict == Verdict.FAULT
    assert "a token that the reference excludes" in found.findings[0].problem
    assert found.findings[0].reproduce == f"sampled sampler {found.findings[0].prompt}"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(subject, id="drafts with logits"),
        pytest.param(lambda: subject(acceptance="tokens"), id="drafts as tokens"),
        pytest.param(Sampler, id="written out"),
        pytest.param(lambda: OneBlock(), id="nothing told of its passes"),
    ],
)
def test_the_right_subject_passes(make: Callable[[], Subject]) -> None:
    """Hypothesis true: a fault would be a false alarm, of probability 1e-3. 900 tokens see a total variation of .11."""
    found = check_sampled(trial(num_samples=900, samplings=(FULL, CUT, PENALISED)), make())
    assert found.verdict == Verdict.PASS, found
    assert found.findings == ()
    assert found.evidence.startswith("900 tokens")
    assert {evidence.num for evidence in found.statistics if evidence.name.startswith("all tokens")} == {900}
    assert found.detectable is not None and found.detectable < 0.12
    assert sum(found.data["by id, all tokens"]) == 900


class OneBlock(Sampler):
    """The right one, which emits its answer in one piece."""

    def generate(self, query: Query) -> Answer:
        answer = super().generate(query)
        return replace(answer, blocks=(answer.ids,))


def test_drafts_of_the_engine_itself() -> None:
    """No draft length is known and no draft model: places come from the blocks, and there is no bonus token to tell."""
    made = trial(num_samples=400, num_draft_tokens=0)
    made = replace(made, yardstick=replace(made.yardstick, draft=None))

    class Within(Sampler):
        def generate(self, query: Query) -> Answer:
            return super().generate(replace(query, num_draft_tokens=3))

    found = check_sampled(made, Within())
    assert found.verdict == Verdict.PASS, found
    assert "later tokens of a pass" in found.evidence and "bonus" not in found.evidence


def test_it_stops_when_the_matter_is_clear() -> None:
    """At the first look, an eighth of the plan; a pass is told at the end only."""
    found = check_sampled(trial(num_samples=4000, samplings=(FULL,)), ArgmaxDrafts())
    assert found.verdict == Verdict.FAULT
    assert found.evidence.startswith("500 tokens")
    problem = found.findings[0].problem
    assert "look at " in problem and "most surprising: prompt " in problem


def test_every_test_says_where_to_look() -> None:
    names = [test.name for test in judge([], 3)]
    assert len(set(names)) == len(names)
    for name in names:
        assert any(name.startswith(start) for start in _HINTS), name


@pytest.mark.parametrize("sampling", [FULL, CUT, PENALISED, replace(PENALISED, top_k=5, frequency_penalty=300.0)])
def test_known_faults_are_laws_on_what_the_reference_can_emit(sampling: SamplingParams) -> None:
    """Else their likelihood ratios would grow under the hypothesis too. Each of 16 tokens behind 0, 1, ... accepted."""
    made, prompt, before = trial(), (3, 5, 5), []
    case = Case(1, "", prompt)
    query = Query("", prompt, 40, sampling, num_draft_tokens=3)
    for place in range(4):
        mean = np.zeros(len(Fault))
        for last in range(VOCAB):
            block = (*before, last) if last else tuple(before)
            answer = Answer((block,), doubles.decode(list(block)), "length" if last else "stop")
            stream, _ = transforms(made, "", case, query, answer, np.random.default_rng(0))
            if len(stream) > place:
                mean += stream[place].probability * np.array(stream[place].faults)
        assert (mean < 1 + 1e-9).all() and (mean > 0.3).all(), dict(zip(Fault, mean, strict=True))
        row = TARGET.rows[before[-1] if before else prompt[-1]]
        before.append(int(made.yardstick.distribution(row, (*prompt, *before), sampling)[1:].argmax()) + 1)


def test_looks_share_the_false_alarm_rate() -> None:
    looks = _Looks(trial(num_samples=800))
    assert list(looks.due(90, 90, False)) == []
    assert list(looks.due(410, 320, False)) == [(100, 0.125), (200, 0.125), (400, 0.25)]
    assert not looks.over
    assert list(looks.due(830, 420, False)) == [(800, 0.5)]
    assert looks.over and looks.fraction == 1.0


def test_a_budget_of_time_plans_by_the_first_answers_and_cuts_the_last() -> None:
    """40 tokens in two seconds, ten seconds: 200 are planned. Then it goes half as fast."""
    now = [0.0]
    looks = _Looks(trial(seconds=10.0, num_samples=7), clock=lambda: now[0])

    def answer(at: float, num: int) -> list[tuple[int, float]]:
        now[0] = at
        return list(looks.due(num, 20, False))

    assert answer(1.0, 20) == []
    assert answer(2.0, 40) == [(25, 0.125)]
    assert answer(6.0, 80) == [(50, 0.125)]
    assert answer(9.5, 100) == [(100, 0.25)]
    assert answer(11.5, 120) == [(105, 0.5)]  # a quarter of its last answer was within the time
    assert looks.over


def test_what_it_notes_gives_the_same_tests_again() -> None:
    """From JSON, without model or subject."""
    notes: list[str] = []

    def note(check: str, record: dict[str, Any]) -> None:
        assert check == "sampled"
        notes.append(json.dumps(record))

    stream, _ = collect(trial(num_samples=200, samplings=(FULL, CUT, PENALISED), note=note), Sampler())
    read = [Transforms(**fields) for record in notes for fields in json.loads(record)["tokens"]]
    assert [t.p_value for t in judge(read[:200], 3)] == [t.p_value for t in judge(stream, 3)]


class Refusing(Sampler):
    """Knows no penalties."""

    def generate(self, query: Query) -> Answer:
        if query.sampling.penalised:
            raise Unsupported("no penalties here")
        return super().generate(query)


def test_a_setting_that_the_subject_does_not_have_is_left_out() -> None:
    found = check_sampled(trial(num_samples=400, samplings=(FULL, PENALISED)), Refusing())
    assert found.verdict == Verdict.PASS
    assert "setting 2 left out: no penalties here" in found.evidence
    alone = check_sampled(trial(num_samples=400, samplings=(PENALISED,)), Refusing())
    assert alone.verdict == Verdict.NOT_APPLICABLE


def test_a_refusal_of_a_plain_query_is_a_fault() -> None:
    class Broken(Sampler):
        def generate(self, query: Query) -> Answer:
            raise TrtspecError("out of memory")

    for check in (check_sampled, check_draws):
        found = check(trial(), Broken())
        assert found.verdict == Verdict.FAULT
        assert "refused: out of memory" in found.findings[0].problem


def test_the_plan_is_shown_before_the_run() -> None:
    words = str(plan(trial(num_samples=1800), tokens_per_second=18.9))
    assert words.startswith("to see a total variation of 0.08 in all tokens: 1 800 tokens, about 95 s at 19 tokens/s")
    assert "in bonus tokens" in words


def test_plain_decoding_passes_too() -> None:
    """Without drafts every token comes from the target's own draw; there is no draft to order by."""
    made = trial(num_samples=400, num_draft_tokens=0)
    made = replace(made, yardstick=replace(made.yardstick, draft=None))
    alone = InProcess(engine(TARGET), None, end_ids=(doubles.END,), decode=doubles.decode)
    assert check_sampled(made, alone).verdict == Verdict.PASS


def test_false_alarms_come_no_more_often_than_stated() -> None:
    """Hypothesis: the family-wise false-alarm rate of both checks with all looks is what is asked for.

    150 seeded runs of the right subject, 80 tokens each, which is where approximations are worst. More than 16 of 150
    below .05 have probability 1e-3 at a true rate of .05; more than 2 below .001 have 5e-4. `calibration.md` has
    1000 runs.
    """
    made = trial(num_samples=80, num_draws=30, samplings=(FULL, CUT, PENALISED))
    rates = [one_run(replace(made, seed=seed))[0] for seed in range(150)]
    assert sum(rate < 0.05 for rate in rates) <= 16
    assert sum(rate < 0.001 for rate in rates) <= 2


def test_a_small_sample_is_inconclusive() -> None:
    found = check_sampled(trial(num_samples=20), subject())
    assert found.verdict == Verdict.INCONCLUSIVE


class Fixed:
    """A subject that always gives the same answer."""

    name = "fixed"

    def __init__(self, *blocks: tuple[int, ...], finish: str = "length") -> None:
        self.answer = Answer(blocks, doubles.decode([token for block in blocks for token in block]), finish)

    def generate(self, query: Query) -> Answer:
        return self.answer


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (Fixed((1, 99), finish="stop"), "a token that the reference excludes"),
        (Fixed((3,), (doubles.END, 4)), "end id 0 is part of the output"),
        (Fixed(()), "finish reason length after 0 tokens"),
    ],
)
def test_what_no_statistics_are_needed_for_is_a_fault_at_once(given: Subject, problem: str) -> None:
    found = check_sampled(trial(max_tokens=2, num_samples=10**6), given)
    assert found.verdict == Verdict.FAULT
    assert problem in found.findings[0].problem
    assert found.findings[0].prompt == 1


@pytest.mark.parametrize(
    ("gap", "verdict"), [(0.0005, Verdict.TIE), (0.5, Verdict.FAULT)], ids=["rounding", "no rounding"]
)
def test_a_token_beyond_the_border_of_top_k(gap: float, verdict: Verdict) -> None:
    """top_k 2 of three logits: the engine took the third, which rounding explains or does not."""
    made = trial(max_tokens=1, num_samples=1, samplings=(SamplingParams(temperature=1.0, top_k=2),))
    rows = np.full_like(TARGET.rows, -5.0)
    rows[:, 1:4] = [5.0, 4.0, 4.0 - gap]
    table = doubles.Table(np.exp(rows))
    made = replace(made, yardstick=replace(made.yardstick, target=table, draft=None))
    found = check_sampled(made, Fixed((3,)))
    assert {finding.verdict for finding in found.findings} == {verdict}
    assert found.findings[0].chosen is not None and found.findings[0].chosen.id == 3


def test_places_are_known_before_the_token_is_drawn() -> None:
    assert places(Answer(((4, 5), (6,), (7, 8, 9)), "", "length"))[:6] == [0, 1, 0, 0, 1, 2]
    assert places(Answer(((4, 5), ()), "", "stop")) == [0, 1, 0]  # the end id was the first of its pass
    assert places(Answer(((4, 5),), "", "stop")) == [0, 1, 2]


def test_one_prompt_alone_is_asked_the_same_as_among_others() -> None:
    """So that a finding on one prompt can be reproduced by that prompt alone."""

    class Recorder(Fixed):
        def __init__(self) -> None:
            super().__init__((1,) * 40)
            self.queries: list[Query] = []

        def generate(self, query: Query) -> Answer:
            self.queries.append(query)
            return self.answer

    warm = SamplingParams(temperature=0.8)
    made, together, alone = trial(num_samples=640, samplings=(FULL, warm)), Recorder(), Recorder()
    collect(made, together)
    collect(replace(made, cases=made.cases[2:3], num_samples=160), alone)
    assert [query for query in together.queries if query.ids == made.cases[2].ids] == alone.queries
    assert len({query.sampling.seed for query in together.queries}) == len(together.queries) == 16
    assert {(replace(query.sampling, seed=0), query.num_draft_tokens) for query in alone.queries} == {
        (FULL, 3),
        (FULL, 1),
        (warm, 3),
        (warm, 1),
    }


def test_draws_of_the_right_subject_pass() -> None:
    """Hypothesis true; false-alarm rate 1e-3; 400 answers to two prompts."""
    found = check_draws(trial(num_draws=400), Sampler())
    assert found.verdict == Verdict.PASS, found
    assert [evidence.name for evidence in found.statistics] == ["first tokens", "second tokens"]
    assert min(evidence.num for evidence in found.statistics) > 200
    assert found.detectable is not None and found.detectable < 0.3
    assert len(found.data) == 2 and sum(observed for observed, _ in next(iter(found.data.values()))) == 200
    assert "total variation of the first tokens (95 % confidence together): 0." in found.evidence


def test_no_draws_are_not_applicable() -> None:
    assert check_draws(trial(num_draws=0), Sampler()).verdict == Verdict.NOT_APPLICABLE
    assert check_draws(trial(samplings=(PENALISED,)), Refusing()).verdict == Verdict.NOT_APPLICABLE


@pytest.mark.parametrize("make", [AcceptsAlways, ArgmaxDrafts])
def test_draws_of_a_broken_subject_are_found(make: Callable[[], Subject]) -> None:
    """400 answers, false-alarm rate 1e-3."""
    found = check_draws(trial(num_draws=400), make())
    assert found.verdict == Verdict.FAULT
    assert "other frequencies" in found.findings[0].problem
    assert any("times, expected" in finding.problem for finding in found.findings)


def test_few_draws_are_inconclusive() -> None:
    assert check_draws(trial(num_draws=20), Sampler()).verdict == Verdict.INCONCLUSIVE


def test_the_draft_orders_better_than_probability() -> None:
    """Why the draft's odds are worth their trouble: a residual drawn from p shows there, and hardly elsewhere.

    2000 tokens; the p-value of the overlap test is below 1e-12, that by probability some orders of magnitude larger.
    """
    stream, _ = collect(trial(num_samples=2000, samplings=(FULL,)), ResidualFromP())
    tests = {evidence.name: evidence for evidence in judge(stream, 1)}
    assert tests["all tokens, draft overlap"].p_value < 1e-12
    assert tests["all tokens, draft overlap"].words == "the output leans towards the draft"
    assert tests["all tokens, by probability"].p_value > 1e-6
    assert statistics.holm([evidence.p_value for evidence in tests.values()], 1e-3).count(True) >= 1
