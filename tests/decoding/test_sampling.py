"""Rows of logits to distributions and tokens: parameters, penalties, cuts, draws, seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import log_softmax, softmax

from trtspec.decoding.sampling import (
    GREEDY,
    SamplingParams,
    Uniforms,
    derive_seed,
    log_probability,
    most_likely,
    probabilities,
    processed_logits,
    request_sampling,
    sample,
)

NOTHING = np.empty(0, dtype=np.int32)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 100),
        ("top_p", -0.1),
        ("top_p", float("nan")),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("-inf")),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field}: "):
        request_sampling(**{field: value})


def test_zero_top_p_is_no_valid_parameter_but_a_left_out_request_field():
    with pytest.raises(ValueError, match=r"^top_p: "):
        SamplingParams(temperature=1.0, top_p=0.0)
    assert request_sampling(temperature=0.7, top_p=0.0, top_k=0)[0] == SamplingParams(temperature=0.7)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, GREEDY),
        ({"temperature": 0}, GREEDY),
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 40}, GREEDY),
        ({"temperature": 0.9, "top_k": 1}, GREEDY),
        ({"temperature": 1e-7}, GREEDY),
        ({"top_k": 1}, GREEDY),
        ({"top_k": 0}, GREEDY),
        ({"seed": 5}, SamplingParams(seed=5)),
        ({"temperature": 1.0}, GREEDY),
        (
            {"temperature": 1.0, "top_k": 0, "top_p": 0.0, "repetition_penalty": 1.2},
            SamplingParams(repetition_penalty=1.2),
        ),
        ({"temperature": 1.0, "seed": 5}, SamplingParams(temperature=1.0, seed=5)),
        ({"temperature": 1.0, "top_p": 1.0}, SamplingParams(temperature=1.0)),
        ({"temperature": 1.0, "top_k": 5}, SamplingParams(temperature=1.0, top_k=5)),
        ({"repetition_penalty": 1.2}, SamplingParams(repetition_penalty=1.2)),
        ({"top_p": 0.9}, SamplingParams(temperature=1.0, top_p=0.9)),
        ({"top_p": 1.0}, SamplingParams(temperature=1.0)),
        ({"top_k": 7}, SamplingParams(temperature=1.0, top_k=7)),
        ({"min_p": 0.1}, SamplingParams(temperature=1.0, min_p=0.1)),
        ({"temperature": 0.7}, SamplingParams(temperature=0.7, top_p=1.0)),
        ({"temperature": 2, "top_k": 5, "top_p": 0.5}, SamplingParams(temperature=2, top_k=5, top_p=0.5)),
    ],
)
def test_optional_request_fields(fields, expected):
    params, _ = request_sampling(**fields)
    assert params == expected


def test_temperature_alone_gets_a_note_and_an_explicit_top_p():
    params, notes = request_sampling(temperature=0.7)
    assert not params.greedy
    assert params.top_p == 1.0
    assert len(notes) == 1
    assert "0.7" in notes[0]
    assert "greedily" in notes[0]
    for quiet in ({"temperature": 0.7, "top_p": 1.0}, {"temperature": 0.7, "top_k": 50}, {"temperature": 0}, {}):
        assert request_sampling(**quiet)[1] == ()


def test_temperature_one_alone_says_how_to_sample():
    _, notes = request_sampling(temperature=1.0)
    assert "top_p 1.0 or a seed" in notes[0]
    assert request_sampling(temperature=1.0, seed=3)[1] == request_sampling(temperature=1.0, seed=4)[1] != notes


def test_processing_is_free_when_nothing_applies():
    row = np.array([1.0, 2.0], dtype=np.float32)
    assert processed_logits(row, NOTHING, 0, GREEDY) is row
    assert processed_logits(row, NOTHING, 5, GREEDY, end_ids=(1,), min_new_tokens=5) is row


def test_bias_then_temperature_then_penalties_then_bans():
    """Worked out by hand, id by id: ((logit + bias) / T), * or / repetition, - presence - n * frequency."""
    row = np.array([4.0, -2.0, 1.0, 0.5, 9.0], dtype=np.float32)
    before = row.copy()
    params = SamplingParams(
        temperature=2.0, repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=0.25, seed=1
    )
    bias = np.array([1.0, 0.0, 0.0, -0.5, 0.0], dtype=np.float32)
    history = np.array([0, 1, 0, 0, 3], dtype=np.int32)
    out = processed_logits(row, history, 2, params, end_ids=(4,), min_new_tokens=3, bias=bias)
    # 0: (4+1)/2=2.5 /1.25=2.0 -.5 -3*.25; 1: -1*1.25 -.5 -.25; 2: not seen; 3: 0/1.25 -.5 -.25; 4: end id, too early
    np.testing.assert_allclose(out, [0.75, -2.0, 0.5, -0.75, -np.inf])
    np.testing.assert_array_equal(row, before)


def test_greedy_leaves_temperature_out_but_not_penalties():
    row = np.array([3.0, 2.9], dtype=np.float32)
    greedy = SamplingParams(temperature=0.0, presence_penalty=0.2)
    out = processed_logits(row, np.array([0], dtype=np.int32), 1, greedy)
    np.testing.assert_allclose(out, [2.8, 2.9], rtol=1e-6)
    assert most_likely(out) == 1


def test_end_ids_come_free_at_the_boundary():
    row = np.zeros(3, dtype=np.float32)
    for generated in range(7):
        out = processed_logits(row, NOTHING, generated, GREEDY, end_ids=(2,), min_new_tokens=5)
        assert (out[2] == -np.inf) == (generated < 5)


@pytest.mark.parametrize(
    ("history", "banned"),
    [([], [3]), ([1], [3]), ([1, 2], [3, 0]), ([2, 1], [3]), ([9, 1, 2], [3, 0]), ([1, 2, 1], [3])],
)
def test_bad_words_ban_the_last_id_where_the_ones_before_match(history, banned):
    row = np.zeros(4, dtype=np.float32)
    out = processed_logits(row, np.array(history, dtype=np.int32), 0, GREEDY, bad_words=[(3,), (1, 2, 0)])
    assert np.flatnonzero(out == -np.inf).tolist() == sorted(banned)


def test_ids_beyond_the_row_are_left_alone():
    """A draft's vocabulary may be smaller than the ids, words and bias of the request."""
    row = np.zeros(3, dtype=np.float32)
    params = SamplingParams(temperature=1.0, presence_penalty=1.0)
    out = processed_logits(
        row, np.array([7, 1, -1]), 0, params, end_ids=(9,), min_new_tokens=1, bad_words=[(8,)], bias=np.ones(5)
    )
    np.testing.assert_allclose(out, [1.0, 0.0, 1.0])
    np.testing.assert_allclose(processed_logits(row, NOTHING, 0, params, bias=np.ones(2)), [1.0, 1.0, 0.0])


def plain_reference(logits, params):
    """The cuts one after the other over a full sort; slow and obvious."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k:
        order = order[: params.top_k]
    probs = dict(zip(order, softmax(logits[order].astype(np.float64)), strict=True))
    if params.top_p < 1:
        nucleus, mass = [], 0.0
        for token in order:
            if mass < params.top_p:
                nucleus.append(token)
                mass += probs[token]
        order = nucleus
    order = [token for token in order if probs[token] >= params.min_p * probs[order[0]]]
    total = sum(probs[token] for token in order)
    out = np.zeros(len(logits))
    for token in order:
        out[token] = probs[token] / total
    return out


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 2, 5, 63, 64, 65, 300, 1000]),
    top_k=st.sampled_from([0, 2, 3, 5, 17, 64, 400]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    scale=st.sampled_from([0.0, 0.3, 3.0]),
)
def test_cuts_agree_with_a_full_sort(seed, vocab, top_k, top_p, min_p, scale):
    # of equal weights a nucleus may hold exactly top_p, up to rounding: then either size is right
    share = top_p * min(vocab, top_k or vocab)
    assume(scale > 0 or top_p == 1.0 or abs(share - round(share)) > 1e-6)
    logits = np.random.default_rng(seed).standard_normal(vocab) * scale
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = probabilities(logits, params)
    assert probs.dtype == np.float64
    assert probs.sum() == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(probs, plain_reference(logits, params), atol=1e-12)


def test_a_wide_nucleus_is_found_too():
    """9,000 equal ids of 10,000: beyond the sizes that are tried first."""
    logits = np.zeros(10_001)
    probs = probabilities(logits, SamplingParams(temperature=1.0, top_p=0.9))
    assert np.flatnonzero(probs).tolist() == list(range(9001))  # 0.9 * 10,001 = 9000.9


def test_of_equal_logits_the_lower_ids_stay():
    probs = probabilities(np.array([0.0, 1.0, 1.0, 1.0]), SamplingParams(temperature=1.0, top_k=2))
    np.testing.assert_allclose(probs, [0, 0.5, 0.5, 0])
    assert most_likely(np.array([1.0, 2.0, 2.0])) == 1


def test_tiny_temperatures_and_large_logits_stay_finite():
    row = np.array([1e4, 1e4 - 1, -1e4], dtype=np.float32)
    params = SamplingParams(temperature=2e-5)
    np.testing.assert_allclose(probabilities(processed_logits(row, NOTHING, 0, params), params), [1, 0, 0])
    half = row.astype(np.float16)
    hot = SamplingParams(temperature=5.0)
    assert probabilities(processed_logits(half, NOTHING, 0, hot), hot).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=2)])
@pytest.mark.parametrize("row", [[np.nan, 1.0, 2.0], [1.0, np.inf, 0.0], [-np.inf] * 3])
def test_rows_without_a_distribution_are_refused(params, row):
    with pytest.raises(ValueError, match=r"^logits: "):
        probabilities(np.array(row), params)


def test_log_probability_is_that_of_the_softmax():
    row = np.array([0.3, -1.0, 2.0], dtype=np.float32)
    for token in range(3):
        assert log_probability(row, token) == pytest.approx(log_softmax(row.astype(np.float64))[token])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.0, 1e-300, 1e-9, 0.1, 0.5, 1.0]), min_size=1, max_size=9), st.floats(0, 1))
def test_a_draw_is_never_an_id_of_probability_zero(weights, u):
    weights = np.array(weights)
    assume(weights.sum() > 0)
    for quantile in (0.0, min(u, 1 - 2**-53), 1 - 2**-53):
        assert weights[sample(weights, quantile)] > 0


def test_a_draw_is_the_inverse_of_the_distribution():
    probs = np.array([0.25, 0.0, 0.5, 0.25])
    assert [sample(probs, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999)] == [0, 0, 2, 2, 3, 3]


def test_uniforms_are_uniform_and_lanes_and_neighbours_are_independent():
    """H0: uniform on [0,1)^4 (two lanes, two neighbouring positions). 20,000 points in 4^4 cells, chi-square with 255
    degrees of freedom; false alarm 1e-3. A shift of 1 % of the mass into half of the cells gives power above 0.9."""
    uniforms = Uniforms(derive_seed(3, 0, "target"))
    points = np.array(
        [[uniforms.at(2 * i + j, lane) for lane in ("accept", "token") for j in (0, 1)] for i in range(20_000)]
    )
    assert points.min() >= 0
    assert points.max() < 1
    cells = np.bincount((points * 4).astype(int) @ [64, 16, 4, 1], minlength=256)
    assert stats.chisquare(cells).pvalue > 1e-3


def test_seeds_count_up_along_a_stream_and_streams_lie_apart():
    assert Uniforms(derive_seed(7, 10, "target")).at(3, "token") == Uniforms(derive_seed(7, 13, "target")).at(
        0, "token"
    )
    starts = [derive_seed(seed, 0, stream) for seed in range(200) for stream in ("target", "draft")]
    gaps = np.diff(np.sort(np.array(starts, dtype=np.uint64)))
    assert gaps.min() > 10**9
    assert 0 <= derive_seed(2**64 - 1, 2**31, "target") < 2**64
