"""Figures from a trace alone: cases by hand, the real rejection loop as a witness, and how sure the intervals are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtspec.errors import TrtspecError
from trtspec.plan.acceptance import (
    categories,
    expected,
    expected_acceptance,
    interval,
    prompts_needed,
    temperatures,
)
from trtspec.plan.drafting import Drafting
from trtspec.plan.trace import Answer, Model, Proposer, Trace, line, read_trace


@pytest.mark.parametrize(
    ("text", "num_draft_tokens", "passes", "accepted"),
    [
        ([1, 1, 1, 1, 1, 1], 2, 2, (2, 2)),  # two cycles: two drafts and the bonus token
        ([0, 0, 0], 4, 3, (0, 0, 0, 0)),  # every draft is wrong: one token a pass
        ([1, 0, 1, 0], 3, 2, (2, 0, 0)),  # accepted, then corrected
        ([1, 1, 1, 1], 6, 1, (1, 1, 1, 1, 0, 0)),  # the text ends inside the draft
        ([1, 1, 0, 1, 1], 1, 3, (2,)),  # the bonus tokens take the places of the second and the fourth
        ([], 4, 0, (0, 0, 0, 0)),
    ],
)
def test_certain_texts(text: list[float], num_draft_tokens: int, passes: int, accepted: tuple[int, ...]) -> None:
    result = expected_acceptance([text], num_draft_tokens)
    assert (result.passes, result.accepted, result.emitted) == (passes, accepted, len(text))
    assert result.drafted == passes * num_draft_tokens


def test_a_coin() -> None:
    """Two tokens, each accepted with probability 1/2, one draft: 1 + 1/2 passes."""
    result = expected_acceptance([[0.5, 0.5]], 1)
    assert result.passes == 1.5
    assert result.length == pytest.approx(2 / 1.5)
    assert result.by_position == (0.5,)


def draw(rng: np.random.Generator, distribution: np.ndarray) -> int:
    return min(int(distribution.cumsum().searchsorted(rng.random())), len(distribution) - 1)


def speculate(rng: np.random.Generator, p: np.ndarray, q: np.ndarray, length: int, num_draft_tokens: int) -> int:
    """Target passes of the textbook loop (Leviathan et al. 2023, algorithm 1) over a first-order Markov chain."""
    token, emitted, passes = 0, 0, 0
    while emitted < length:
        passes += 1
        for _ in range(num_draft_tokens):
            proposal = draw(rng, q[token])
            if rng.random() >= p[token, proposal] / q[token, proposal]:
                residual = np.maximum(p[token] - q[token], 0)
                token = draw(rng, residual / residual.sum())
                emitted += 1
                break
            token = proposal
            emitted += 1
        else:
            token = draw(rng, p[token])
            emitted += 1
    return passes


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_expectation_along_sampled_texts_is_that_of_the_loop(num_draft_tokens: int) -> None:
    """Hypothesis: mean passes of the loop = mean of expected_acceptance over texts sampled from the target.

    1500 runs of either kind over 24 tokens, 4-sigma band on the difference of the means: false alarms 1 in 16,000.
    Scoring a text with q(x), the chance that the draft proposes it, instead of min(1, q/p) is off by 64 sigma here.
    """
    rng = np.random.default_rng(7)
    p, q = rng.dirichlet([0.4] * 5, size=5), rng.dirichlet([0.8] * 5, size=5)
    length, runs = 24, 1500
    loop = [speculate(rng, p, q, length, num_draft_tokens) for _ in range(runs)]
    expected = []
    for _ in range(runs):
        token, text = 0, []
        for _ in range(length):
            emitted = draw(rng, p[token])
            text.append(min(1.0, q[token, emitted] / p[token, emitted]))
            token = emitted
        expected.append(expected_acceptance([text], num_draft_tokens).passes)
    sigma = np.sqrt(np.var(loop) / runs + np.var(expected) / runs)
    assert abs(np.mean(loop) - np.mean(expected)) < 4 * sigma


# ---- methods by hand


def answer(tokens: list[int], number: int = 1, temperature: float = 0.0, **proposers: Proposer) -> Answer:
    p = np.full(len(tokens), 0.5)
    return Answer(number, None, temperature, (1, 2, 3), tuple(tokens), p, proposers)


def trace_of(*answers: Answer) -> Trace:
    models = {"target": Model("t", 9, "a"), "draft": Model("d", 9, "b")}
    return Trace("tiny", "draft_target", models, 4, 64, 0, answers)


def ranked(*ranks: int) -> Proposer:
    """A draft with the token of each place at this rank."""
    return Proposer(rank=np.array(ranks), top=np.array([5 if rank == 0 else 6 for rank in ranks]))


def test_trees_of_heads_are_cut_at_the_end_of_each_call() -> None:
    """Heads that are always right, 13 tokens in calls of 4: the first comes with the prompt; then 3, 3 1, 3 1, 1."""
    heads = trace_of(answer([5] * 13, heads=Proposer(ranks=np.zeros((13, 2), dtype=np.int64))))
    whole = Drafting("medusa", 3, choices=((0,), (1,), (0, 0)), roles=())
    found = expected(heads, whole, 0.0)
    assert (found.emitted, found.passes, found.drafted) == (12.0, 4.0, 12.0)
    cut = expected(heads, replace(whole, chunk=4), 0.0)
    # Three nodes where 3 or 4 tokens are still to come, none for the last one of a call.
    assert (cut.emitted, cut.passes, cut.drafted) == (12.0, 6.0, 4 * 3.0)
    two = expected(heads, replace(whole, choices=((0,),), num_draft_tokens=1, chunk=4), 0.0)
    assert (two.passes, two.drafted) == (7.0, 6.0)  # 2 1, 2 2, 2 2, 1; none for the second 1


def test_trees_by_hand() -> None:
    """Ranks 0 1 0 | 2 | 0 0 along six tokens, and a tree of (2, 1): the second child may come first, but not below."""
    one = trace_of(answer([5] * 6, draft=ranked(0, 1, 0, 2, 0, 0)))
    tree = Drafting("tree", 4, branching=(2, 1))
    # 0 accepted, 1 is no child of it: own token; 0 accepted, 2 no child: own token; 0 0 accepted, and the text ends.
    found = expected(one, tree, 0.0)
    assert (found.passes, found.accepted, found.drafted) == (3.0, (3.0, 1.0), 12.0)
    assert found.proposer_passes == {"draft": 2.0}
    wide = expected(one, Drafting("tree", 6, branching=(2, 2)), 0.0)
    assert (wide.passes, wide.accepted) == (3.0, (2.0, 2.0))  # 0 1 and an own token; none; 0 0
    chain = expected(one, Drafting("draft_target", 2), 0.0)
    assert (chain.passes, chain.accepted) == (3.0, (3.0, 1.0))
    # Three nodes of (2, 2): both first tokens, and the likeliest of both behind the likeliest.
    cut = Drafting("tree", 3, branching=(2, 2))
    assert {tuple(cut.tree.tokens[cut.tree.path(node)].tolist()) for node in range(3)} == {(0,), (1,), (0, 0)}


def test_drawn_trees_by_hand() -> None:
    """One child is taken with 1/2, one of two with 3/4, whatever stands above."""
    draft = Proposer(
        q=np.full(2, 0.1), rank=np.zeros(2, int), top=np.zeros(2, int), siblings=np.array([[0.5, 0.75]] * 2)
    )
    one = trace_of(answer([5, 6], temperature=1.0, draft=draft))
    found = expected(one, Drafting("tree", 4, branching=(2, 1)), 1.0)
    # With 1/4 the first token is the target's own, and a second cycle begins.
    assert found.accepted == pytest.approx((0.75 + 0.25 * 0.75, 0.75 * 0.5))
    assert found.passes == pytest.approx(1.25)
    by_tokens = expected(one, Drafting("tree", 4, branching=(2, 1), acceptance="tokens"), 1.0)
    assert by_tokens.passes == 1.0


def test_lookups_by_hand() -> None:
    """Prompt 1 2 3, answer 1 2 3 4: nothing follows 3; then 1, 1 2 and 1 2 3 have been seen."""
    found = expected(trace_of(answer([1, 2, 3, 4])), Drafting("ngram", 2, roles=()), 0.0)
    # own 1 without a proposal; 2 3 accepted, own 4
    assert (found.passes, found.drafted, found.accepted, found.reached) == (2.0, 2.0, (1.0, 1.0), (1.0, 1.0))


def test_a_cascade_by_hand() -> None:
    """All agree: of 5 tokens the middle model makes 3 in its first pass (2 drafts), 2 in its second (1 draft)."""
    right = Proposer(rank=np.zeros(6, int), top=np.full(6, 5))
    one = trace_of(answer([5] * 6, middle=right, draft=right))
    cascade = Drafting("cascade", 5, inner=2, roles=("middle", "draft"))
    found = expected(one, cascade, 0.0)
    assert (found.passes, found.length) == (1.0, 6.0)
    assert found.proposer_passes == {"middle": 2.0, "draft": 3.0}
    wrong = Proposer(rank=np.ones(6, int), top=np.full(6, 4))
    alone = expected(trace_of(answer([5] * 6, middle=right, draft=wrong)), cascade, 0.0)
    assert alone.proposer_passes == {"middle": 5.0, "draft": 2.0 + 2.0 + 2.0 + 1.0}
    four = Drafting("cascade", 5, inner=2, roles=("middle", "middle_2", "draft"))
    deep = expected(trace_of(answer([5] * 6, middle=right, middle_2=right, draft=right)), four, 0.0)
    # Asked for 2 and for 1 tokens, middle_2 makes each in one pass, with one draft and with none.
    assert deep.proposer_passes == pytest.approx({"middle": 2.0, "middle_2": 2.0, "draft": 1.0})


def test_plain_decoding_is_a_token_a_pass() -> None:
    found = expected(trace_of(answer([5] * 4)), Drafting("none", 0, roles=()), 0.0)
    assert (found.length, found.rate, found.survival) == (1.0, 0.0, ())


# ---- intervals


def drawn(rng: np.random.Generator, prompts: int) -> Trace:
    """Answers of 30 tokens; how easy a prompt is differs from prompt to prompt."""
    easy = rng.beta(2.0, 2.0, size=prompts)
    ranks = (rng.random((prompts, 30)) > easy[:, None]).astype(int)
    return trace_of(*(answer([5] * 30, n, draft=ranked(*row)) for n, row in enumerate(ranks.tolist())))


@pytest.mark.parametrize("prompts", [5, 40])
def test_intervals_hold_what_they_promise(prompts: int) -> None:
    """Hypothesis: 95 percent of the intervals of the length hold the true one, with few prompts too.

    150 traces; the binomial bound at 1 in 1,000 for coverage of 0.95 is 0.88.
    """
    rng, drafting = np.random.default_rng(11), Drafting("draft_target", 3)
    truth = expected(drawn(rng, 4000), drafting, 0.0).length
    held = [low <= truth <= high for low, high in (interval(drawn(rng, prompts), drafting, 0.0) for _ in range(150))]
    assert np.mean(held) >= 0.88


def test_so_many_more_prompts_narrow_it_so_far() -> None:
    rng, drafting = np.random.default_rng(12), Drafting("draft_target", 3)
    few = drawn(rng, 60)
    more = prompts_needed(few, drafting, 0.0, half_width=0.05)
    assert more is not None and more > 60
    trace = drawn(rng, 60 + more)
    low, high = interval(trace, drafting, 0.0)
    assert (high - low) / 2 == pytest.approx(0.05 * expected(trace, drafting, 0.0).length, rel=0.25)
    assert prompts_needed(few, drafting, 0.0, half_width=0.9) == 0


def test_one_prompt_says_nothing_of_others() -> None:
    one = trace_of(answer([5] * 4, draft=ranked(0, 0, 1, 0)))
    drafting = Drafting("draft_target", 3)
    assert interval(one, drafting, 0.0) == (1.0, 4.0)
    assert interval(one, drafting, 0.0, statistic="rate") == (0.0, 1.0)
    assert prompts_needed(one, drafting, 0.0) is None


def test_rates_have_intervals_too() -> None:
    trace = drawn(np.random.default_rng(13), 30)
    low, high = interval(trace, Drafting("draft_target", 3), 0.0, statistic="rate")
    assert 0.0 < low < expected(trace, Drafting("draft_target", 3), 0.0).rate < high < 1.0


# ---- the file


def sampled() -> Answer:
    columns = {name: np.array([0.25, 1 / 3]) for name in ("q", "overlap", "diverged")}
    draft = Proposer(rank=np.array([0, -1]), top=np.array([5, 6]), siblings=np.array([[0.5, 0.75]] * 2), **columns)
    heads = Proposer(ranks=np.array([[1, 2], [-1, -1]]))
    return replace(
        answer([5, 7], 3, 0.8, draft=draft, heads=heads, modules=Proposer(drafts=np.array([[5], [6]]))),
        category="caf\u00e9", surprise=(3.0, 9.0), agreement=0.5,
    )  # fmt: skip


def written(path: Path, *answers: Answer, **changes: Any) -> Path:
    trace = trace_of()
    path.write_text(line(trace.header() | changes) + "".join(line(each.to_json()) for each in answers), "utf-8")
    return path


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    whole = sampled()
    trace = read_trace(written(tmp_path / "t.jsonl", whole, answer([5])))
    assert json.dumps(trace.answers[0].to_json()) == json.dumps(whole.to_json())
    assert (trace.header(), len(trace.answers)) == (trace_of().header(), 2)
    assert (temperatures(trace), categories(trace)) == ([0.0, 0.8], ["caf\u00e9"])
    assert trace.warnings == ()
    trace = read_trace(written(tmp_path / "t.jsonl", replace(whole, surprise=(9.0, 9.1)), notes=["beware"]))
    assert trace.warnings[0] == "beware" and "1 of 1 prompts look like random tokens (lines 3)" in trace.warnings[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "", "the trace holds no answer"),
        (lambda text: text.split("\n")[0], "the trace holds no answer"),
        (lambda text: text.replace('"trace":1', '"trace":2'), r"t.jsonl:1: a trace of version 2; expected version 1"),
        (lambda text: '{"prompt": "a"}\n' + text, r"t.jsonl:1: not a trace"),
        (lambda text: "[1]", r"t.jsonl:1: not a line of a trace"),
        (lambda text: text[:-20], r"t.jsonl:2: not a line of a trace"),
        (lambda text: text.replace('"tokens":[5,7]', '"tokens":[5]'), r"t.jsonl:2: not a line of a trace"),
        (lambda text: text.replace('"q":', '"x":'), r"t.jsonl:2: not a line of a trace"),
        (lambda text: text.replace('"number":3', '"number":"a"'), r"t.jsonl:2: not a line of a trace"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(tmp_path: Path, change: Any, message: str) -> None:
    path = written(tmp_path / "t.jsonl", sampled())
    path.write_text(change(path.read_text("utf-8")), "utf-8")
    with pytest.raises(TrtspecError, match=message):
        read_trace(path)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrtspecError, match="record one: trtspec bench acceptance"):
        read_trace(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("drafting", "temperature", "message"),
    [
        (Drafting("draft_target", 2), 0.5, "no answers of temperature 0.5; expected temperature 0.8"),
        (Drafting("draft_target", 2, roles=("middle",)), 0.8, "no proposer 'middle'; expected one of those recorded"),
        (Drafting("tree", 3, branching=(3,)), 0.8, "knows 2 children a node, the tree has 3"),
        (Drafting("tree", 4, branching=(2,), roles=("draft", "draft")), 0.8, "drawn trees of several draft models"),
        (Drafting("medusa", 3, choices=((0,), (0, 0), (0, 0, 0)), roles=()), 0.8, "knows 2 heads, the tree has 3"),
        (Drafting("mtp", 3, roles=()), 0.8, "knows 1 drafts of the modules, not 3"),
    ],
)
def test_what_was_not_recorded_is_refused(drafting: Drafting, temperature: float, message: str) -> None:
    with pytest.raises(TrtspecError, match=message):
        expected(trace_of(sampled()), drafting, temperature)
