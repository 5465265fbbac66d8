"""The sampled checks: the right subject passes as often as stated, broken ones are found.

A small world (see `parity_doubles`): 16 ids, draft and target differ by a total variation of about .25 in the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import parity_doubles as doubles
import pytest
from parity_doubles import CUT, DRAFT, FULL, TARGET, broken_verifier, engine, subject, trial

from trtspec.decoding.sampling import SamplingParams
from trtspec.parity import statistics
from trtspec.parity.draws import check_draws
from trtspec.parity.result import Verdict
from trtspec.parity.sampled import check_sampled, collect, judge, places
from trtspec.parity.subjects import Answer, InProcess, Query, Subject

BROKEN: dict[str, Callable[[], InProcess]] = {
    "accept always": lambda: subject(engine(TARGET, broken_verifier(accept=lambda p, q: 1.0))),
    "accept with q": lambda: subject(engine(TARGET, broken_verifier(accept=lambda p, q: q))),
    "residual drawn from p": lambda: subject(engine(TARGET, broken_verifier(residual=lambda p, q: p))),
    "residual drawn from q": lambda: subject(engine(TARGET, broken_verifier(residual=lambda p, q: q))),
    "bonus from the draft": lambda: subject(engine(TARGET, broken_verifier(bonus=lambda p, q: q))),
    "q is not what was drawn from": lambda: subject(draft=doubles.greedy_drafts_with_logits(DRAFT)),
    "KV cache off by one": lambda: subject(doubles.without_memory_of_rejection(TARGET)),
    "end id not honoured": lambda: subject(end_ids=()),
    "the same seed for every call": lambda: subject(
        doubles.same_seed_every_call(engine(TARGET)), doubles.same_seed_every_call(engine(DRAFT), 8)
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_subject_is_found(name: str) -> None:
    """Hypothesis: the output is the reference's. 900 tokens of the full distribution, false-alarm rate 1e-3.

    No token is impossible there, so the tests of the transforms have to find it. In 20 seeded runs each of these was
    found 20 times, so the power is .86 or more (95 % confidence).
    """
    found = check_sampled(trial(num_samples=900, samplings=(FULL,)), BROKEN[name]())
    assert found.verdict == Verdict.FAULT
    by_law = [finding for finding in found.findings if finding.prompt is None]
    assert by_law or "end id 0 is part of the output" in found.findings[0].problem
    assert all(finding.reproduce.startswith("sampled engines ") for finding in found.findings)


def test_an_impossible_token_is_found_at_once() -> None:
    """With top-k and top-p a draft that is let through soon emits what the reference excludes, within 100 tokens."""
    found = check_sampled(trial(num_samples=100, samplings=(CUT,)), BROKEN["accept always"]())
    assert found.verdict == Verdict.FAULT
    assert "a token that the reference excludes" in found.findings[0].problem
    assert found.findings[0].reproduce == f"sampled engines {found.findings[0].prompt}"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(subject, id="drafts with logits"),
        pytest.param(lambda: subject(acceptance="tokens"), id="drafts as tokens"),
        pytest.param(lambda: subject(engine(TARGET, broken_verifier())), id="rejection sampling written out"),
    ],
)
def test_the_right_subject_passes(make: Callable[[], InProcess]) -> None:
    """Hypothesis true: a fault would be a false alarm, of probability 1e-3. 900 tokens see a total variation of .11."""
    found = check_sampled(trial(num_samples=900), make())
    assert found.verdict == Verdict.PASS, found
    assert found.findings == ()
    assert found.evidence.startswith("900 tokens")
    assert {evidence.num for evidence in found.statistics if evidence.name.startswith("all tokens")} == {900}


def test_plain_decoding_passes_too() -> None:
    """Without drafts every token comes from the target's own draw; there is no draft to order by."""
    made = trial(num_samples=400, num_draft_tokens=0)
    made = replace(made, yardstick=replace(made.yardstick, draft=None))
    alone = InProcess(engine(TARGET), None, end_ids=(doubles.END,), decode=doubles.decode)
    assert check_sampled(made, alone).verdict == Verdict.PASS


def test_false_alarms_come_no_more_often_than_stated() -> None:
    """Hypothesis: the family-wise false-alarm rate is what is asked for.

    150 seeded runs of the right subject, 60 tokens each, which is where approximations are worst. The smallest of m
    p-values times m is what Holm compares with the rate. More than 16 of 150 below .05 have probability 1e-3 at a true
    rate of .05, more than 2 below .001 have 5e-4.
    """
    right, smallest = subject(), []
    for seed in range(150):
        stream, findings = collect(trial(num_samples=60, seed=seed), right)
        assert not findings
        tests = judge(stream, 2)
        smallest.append(min(evidence.p_value for evidence in tests) * len(tests))
    assert sum(p_value < 0.05 for p_value in smallest) <= 16
    assert sum(p_value < 0.001 for p_value in smallest) <= 2


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
    """Hypothesis true; false-alarm rate 1e-3; 400 answers see a total variation of .16 among first tokens."""
    found = check_draws(trial(num_draws=400), subject())
    assert found.verdict == Verdict.PASS, found
    assert [evidence.name for evidence in found.statistics] == ["first tokens", "second tokens"]
    assert min(evidence.num for evidence in found.statistics) > 200


@pytest.mark.parametrize("name", ["accept always", "residual drawn from q", "q is not what was drawn from"])
def test_draws_of_a_broken_subject_are_found(name: str) -> None:
    """400 answers, false-alarm rate 1e-3."""
    found = check_draws(trial(num_draws=400), BROKEN[name]())
    assert found.verdict == Verdict.FAULT
    assert "other frequencies" in found.findings[0].problem


def test_few_draws_are_inconclusive() -> None:
    assert check_draws(trial(num_draws=20), subject()).verdict == Verdict.INCONCLUSIVE


def test_the_draft_orders_better_than_probability() -> None:
    """Why the draft's odds are worth their trouble: a residual drawn from p shows there, and hardly elsewhere.

    3000 tokens; the p-value of the overlap test is below 1e-6, that by probability is not below 1e-4.
    """
    broken = BROKEN["residual drawn from p"]()
    stream, _ = collect(trial(num_samples=3000, samplings=(FULL,)), broken)
    tests = {evidence.name: evidence for evidence in judge(stream, 1)}
    assert tests["all tokens, draft overlap"].p_value < 1e-6
    assert tests["all tokens, draft overlap"].words == "the output leans towards the draft"
    assert tests["all tokens, by probability"].p_value > 1e-4
    assert statistics.holm([evidence.p_value for evidence in tests.values()], 1e-3).count(True) >= 1
