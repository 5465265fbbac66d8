"""Verification of one block: the rule, its cases by hand, and what it does not do."""

from __future__ import annotations

import time

import numpy as np
import pytest
from decoding_doubles import Choices, exact_law

from trtspec.decoding.engine_call import EngineRequest
from trtspec.decoding.sampling import GREEDY, SamplingParams
from trtspec.decoding.verify import Proposal, Verification, verify

FULL = SamplingParams(temperature=1.0)


def log(rows):
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, dtype=np.float64)).astype(np.float32)


def request(drafts, draft_rows=None, sampling=FULL, context=(0,), **fields):
    return EngineRequest(
        input_ids=np.array(context, dtype=np.int32),
        max_new_tokens=len(drafts) + 1,
        sampling=sampling,
        draft_tokens=np.array(drafts, dtype=np.int32),
        draft_logits=None if draft_rows is None else log(draft_rows),
        **fields,
    )


class Lazy:
    """Rows that note which of them were asked for."""

    def __init__(self, rows):
        self.rows, self.asked = rows, []

    def __getitem__(self, index):
        self.asked.append(index)
        return self.rows[index]


GREEDY_CASES = [
    # target's argmax after 0, 1, .. drafts; drafts; tokens; accepted
    ([1, 2, 3, 4], [1, 2, 3], (1, 2, 3, 4), 3),
    ([1, 2, 3, 4], [1, 2, 0], (1, 2, 3), 2),
    ([1, 2, 3, 4], [1, 0, 3], (1, 2), 1),
    ([1, 2, 3, 4], [0, 2, 3], (1,), 0),
    ([1, 1], [1], (1, 1), 1),
    ([1], [], (1,), 0),
]


@pytest.mark.parametrize(("wanted", "drafts", "tokens", "accepted"), GREEDY_CASES)
@pytest.mark.parametrize("with_logits", [False, True])
def test_greedy_accepts_what_the_target_wants(wanted, drafts, tokens, accepted, with_logits):
    rows = np.eye(5, dtype=np.float32)[wanted]
    draft_rows = np.full((len(drafts), 5), 0.2) if with_logits else None
    lazy = Lazy(rows)
    assert verify(lazy, request(drafts, draft_rows, GREEDY)) == Verification(tokens, accepted)
    assert lazy.asked == list(range(len(tokens)))


def test_temperature_zero_always_emits_the_argmax():
    """Target [.3, .5, .2], draft [.4, .3, .3] proposes 0."""
    for seed in range(50):
        greedy = SamplingParams(temperature=0.0, seed=seed)
        out = verify(log([[0.3, 0.5, 0.2]] * 2), request([0], [[0.4, 0.3, 0.3]], greedy))
        assert out == Verification((1,), 0)


def first_token_law(p, q, sampling, argmax_draft=False, **fields):
    """Exact law of the first token and the probability that the draft is accepted."""

    def run(choices):
        drafted = log([q])
        if argmax_draft:
            draft = int(np.argmax(q))
        else:
            from trtspec.decoding.sampler import TokenSampler

            plain = EngineRequest(np.array([0], dtype=np.int32), 1, sampling, **fields)
            draft = TokenSampler(plain, choices).next(drafted[0])
        block = request([draft], None if argmax_draft else [q], sampling, **fields)
        out = verify(log([p, p]), block, choices)
        return out.tokens[0], out.num_accepted

    law = exact_law(run)
    tokens = [sum(v for (token, _), v in law.items() if token == i) for i in range(len(p))]
    return tokens, sum(v for (_, accepted), v in law.items() if accepted)


def test_top_k_applies_to_the_draft_as_well():
    """Raw q in the acceptance test would give [.643, .357] at acceptance 1.0."""
    law, acceptance = first_token_law(
        [0.6, 0.4, 0, 0], [0.45, 0.25, 0.2, 0.1], SamplingParams(temperature=1.0, top_k=2)
    )
    np.testing.assert_allclose(law, [0.6, 0.4, 0, 0], atol=1e-6)
    assert acceptance == pytest.approx(0.6 + 0.25 / 0.7, abs=1e-6)
    assert round(acceptance, 3) == 0.957


def test_an_argmax_draft_is_one_hot():
    p = [0.6, 0.2, 0.1, 0.1]
    law, acceptance = first_token_law(p, [0.7, 0.2, 0.05, 0.05], FULL, argmax_draft=True)
    np.testing.assert_allclose(law, p, atol=1e-6)
    assert acceptance == pytest.approx(0.6, abs=1e-6)


def test_acceptance_is_the_shared_mass():
    p, q = [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]
    law, acceptance = first_token_law(p, q, FULL)
    np.testing.assert_allclose(law, p, atol=1e-6)
    assert acceptance == pytest.approx(0.6, abs=1e-6)


def test_equal_models_accept_everything_without_a_random_number():
    """q <= p everywhere: nothing may depend on the acceptance draw."""

    class NoAcceptDraws(Choices):
        def accepts(self, position, probability):
            raise AssertionError("asked although q <= p")

    rows = log([[0.5, 0.25, 0.25]] * 3)
    out = verify(rows, request([1, 2], np.exp(rows[:2])), NoAcceptDraws([]))
    assert out.num_accepted == 2
    assert len(out.tokens) == 3


def test_rows_are_computed_only_as_far_as_reached():
    lazy = Lazy(log([[1, 0], [0, 1], [1, 0], [1, 0]]))
    out = verify(lazy, request([0, 0, 0], [[0.5, 0.5]] * 3))
    assert out == Verification((0, 1), 1)
    assert lazy.asked == [0, 1]


def test_penalties_inside_a_block_see_the_drafts_before_it():
    """A step accepts [7,7,7] under a frequency penalty: 7 is counted once more at each position."""
    rows = np.zeros((4, 9), dtype=np.float32)
    rows[:, 7] = 1.0
    rows[:, 3] = 0.35  # overtakes 7 once 7 was seen three times: 1 - 3 * .25 = .25
    greedy = SamplingParams(frequency_penalty=0.25)
    assert verify(rows, request([7, 7, 7], None, greedy)) == Verification((7, 7, 7, 3), 3)
    assert verify(rows, request([7, 7, 7], None, greedy, context=(7,))) == Verification((7, 7, 3), 2)
    assert verify(rows, request([7, 7, 7], None, greedy, context=(7, 7, 7))) == Verification((3,), 0)


def test_bad_words_inside_a_block_see_the_drafts_before_them():
    rows = np.eye(4, dtype=np.float32)[[1, 2, 3]] + np.eye(4, dtype=np.float32)[0] * 0.5
    assert verify(rows, request([1, 2], None, GREEDY, bad_words=((1, 2),))) == Verification((1, 0), 1)
    assert verify(rows, request([1, 2], None, GREEDY, bad_words=((2, 2),))) == Verification((1, 2, 3), 2)


def test_an_end_id_is_banned_inside_the_block_until_the_boundary():
    """min_tokens 5, 3 already out, draft [a, EOS, b]: banned at positions 0 and 1, allowed from length 5 on."""
    end, a, b = 0, 1, 2
    rows = np.array([[5, 9, 0], [9, 5, 1], [9, 5, 1], [9, 5, 1]], dtype=np.float32)
    block = request([a, end, b], None, GREEDY, end_id=end, min_new_tokens=2)
    assert verify(rows, block) == Verification((a, a), 1)
    assert verify(rows, request([a, a, end], None, GREEDY, end_id=end, min_new_tokens=2)) == Verification(
        (a, a, end), 3, ended=True
    )


@pytest.mark.parametrize("offset", range(6))
@pytest.mark.parametrize("as_stop_sequence", [False, True])
def test_nothing_after_an_end_id(offset, as_stop_sequence):
    end = 9
    wanted = [11, 12, 13, 14, 15, 16]
    wanted[offset] = end
    rows = np.eye(20, dtype=np.float32)[wanted]
    ends = {"stop_sequences": ((end,),)} if as_stop_sequence else {"end_id": end}
    out = verify(rows, request(wanted[:5], None, GREEDY, **ends))
    assert out.tokens == tuple(wanted[: offset + 1])
    assert out.num_accepted == min(offset + 1, 5)
    assert out.ended == (offset < 5)


def test_a_stop_sequence_of_several_ids_ends_the_call_where_it_is_complete():
    rows = np.eye(8, dtype=np.float32)[[1, 2, 3, 4]]
    out = verify(rows, request([1, 2, 3], None, GREEDY, stop_sequences=((2, 3), (7,))))
    assert out == Verification((1, 2, 3), 3, ended=True)


def test_draft_5_end_target_wants_5_6():
    rows = np.eye(9, dtype=np.float32)[[5, 6, 7]]
    assert verify(rows, request([5, 2], None, GREEDY, end_id=2)) == Verification((5, 6), 1)


@pytest.mark.parametrize("draft_vocab", [3, 6])
def test_vocabularies_of_different_length(draft_vocab):
    """The draft's row is shorter (padded, never proposed beyond) or longer (beyond the target: probability 0)."""
    p = np.array([0.1, 0.3, 0.2, 0.4])
    q = np.random.default_rng(draft_vocab).dirichlet(np.ones(draft_vocab))

    def run(choices):
        draft = choices.draw(0, q)
        return verify(log([p, p]), request([draft], [q]), choices).tokens[0]

    law = exact_law(run)
    np.testing.assert_allclose([law[i] for i in range(4)], p, atol=1e-6)
    assert set(law) == {0, 1, 2, 3}


def test_a_draft_of_probability_zero_under_the_target_is_never_kept():
    law = exact_law(lambda choices: verify(log([[0.5, 0.5, 0]] * 2), request([2], [[0, 0, 1.0]]), choices).tokens[0])
    assert set(law) == {0, 1}


def test_log_probabilities_are_the_targets_at_each_position():
    p = np.array([[0.1, 0.9], [0.3, 0.7], [0.6, 0.4]])
    out = verify(log(p), request([1, 1], None, GREEDY, return_log_probs=True))
    assert out.tokens == (1, 1, 0)
    np.testing.assert_allclose(out.log_probs, np.log([0.9, 0.7, 0.6]), rtol=1e-6)
    assert verify(log(p), request([1, 1], None, GREEDY)).log_probs is None


def test_malformed_blocks_are_refused_by_name():
    plain = EngineRequest(np.array([1]), 3)
    with pytest.raises(ValueError, match=r"^draft_tokens: "):
        verify(np.zeros((1, 2)), plain)
    with pytest.raises(ValueError, match=r"^draft_logits: 1 rows for 2"):
        verify(np.zeros((3, 2)), request([0, 1], [[0.5, 0.5]]))
    with pytest.raises(ValueError, match=r"^proposal: -1 "):
        Proposal(np.array([3, -1], dtype=np.int32))
    with pytest.raises(ValueError, match=r"^proposal: 1 rows"):
        Proposal(np.array([3, 1], dtype=np.int32), np.zeros((1, 4), dtype=np.float32))


def test_a_greedy_block_costs_an_argmax_a_row():
    """5 rows of 49,152 ids take about 60 us; a softmax of each would take 2 ms."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((5, 49_152)).astype(np.float32)
    block = request(rows.argmax(axis=1)[:4].tolist(), None, GREEDY, context=range(1000))
    seconds = []
    for _ in range(30):
        start = time.perf_counter()
        out = verify(rows, block)
        seconds.append(time.perf_counter() - start)
    assert out.num_accepted == 4
    assert min(seconds) < 1e-3
