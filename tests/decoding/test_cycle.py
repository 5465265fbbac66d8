"""The cycle: where a generation ends, what it emits and counts, and that chunking and speculation change nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice

import numpy as np
import pytest
from decoding_doubles import TableEngine, script_model, table_model
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.decoding.acceptance import Acceptance
from trtspec.decoding.cycle import Block, Generation, NoDrafter, Pace, Proposal, Request, Verification, generate
from trtspec.decoding.cycle import run as go_on
from trtspec.decoding.draft_target import DraftModel, Target
from trtspec.decoding.engine_call import Cancelled, EngineError, EngineResult
from trtspec.decoding.sampling import SamplingParams

VOCAB = 40
PIECES = {i: f"<{i}>" for i in range(VOCAB)} | {1: "ABC", 2: "DEF", 3: "G", 4: "HI", 5: "J", 6: "X", 7: "...", 8: "\n"}
FULL = SamplingParams(temperature=1.0)


def decode(ids):
    return "".join(PIECES[i] for i in ids)


def engines(target_output, draft_output=None, prompt_length=1, **options):
    """Target and draft that want these outputs whatever happens; the draft wants the target's by default."""
    models = [script_model(out, VOCAB, prompt_length) for out in (target_output, draft_output or target_output)]
    return TableEngine(models[0], **options), TableEngine(models[1])


def run(request, target, draft=None, **options):
    """All blocks, and the generation they came from."""
    drafter = None if draft is None else DraftModel(draft)
    blocks = list(generate(request, drafter, Target(target), decode=decode, **options))
    check_blocks(blocks)
    return blocks, blocks[-1].generation


def check_blocks(blocks: list[Block]):
    """Exactly one last block, and blocks that add up to the generation."""
    assert [b.finish_reason for b in blocks[:-1]] == [None] * (len(blocks) - 1)
    assert blocks[-1].finish_reason is not None
    generation = blocks[-1].generation
    assert [t for b in blocks for t in b.token_ids] == generation.token_ids.tolist()
    assert "".join(b.text for b in blocks) == generation.text
    assert generation.context.dtype == np.int32


def outcome(blocks):
    generation = blocks[-1].generation
    return generation.token_ids.tolist(), generation.text, generation.finish_reason


# ---- ending inside an accepted block


@pytest.mark.parametrize("offset", range(5))
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4, 6])
@pytest.mark.parametrize("hides_end_id", [False, True])
def test_nothing_after_an_end_id_at_any_offset(offset, num_draft_tokens, hides_end_id):
    end, block = 9, [11, 12, 10, 13, 14]
    block[offset] = end
    target, draft = engines(block, hides_end_id=hides_end_id)
    request = Request([0], 20, end_ids=(end,), num_draft_tokens=num_draft_tokens)
    blocks, _ = run(request, target, draft)
    assert outcome(blocks) == (block[:offset], decode(block[:offset]), "stop")


@pytest.mark.parametrize("num_draft_tokens", [0, 2, 5, 9])
@pytest.mark.parametrize(
    ("output", "expected", "reason"),
    [
        ([10, 11, 9, 20, 21, 22], [10, 11], "stop"),
        ([10, 11, 20, 21, 22, 9], [10, 11, 20, 21, 22], "length"),
        ([10, 11, 20, 21, 9, 22], [10, 11, 20, 21], "stop"),
    ],
)
def test_end_id_and_max_tokens_in_one_block(output, expected, reason, num_draft_tokens):
    target, draft = engines(output)
    blocks, _ = run(Request([0], 5, end_ids=(9,), num_draft_tokens=num_draft_tokens), target, draft)
    assert outcome(blocks) == (expected, decode(expected), reason)


def test_a_verifier_that_accepts_more_than_fits_is_cut():
    """[10, 11, STOP, 20, 21, 22] accepted at once, max_tokens 5."""

    class AtOnce:
        def __init__(self, *tokens):
            self.tokens = tokens

        def verify(self, generation, proposal):
            return Verification(self.tokens, len(self.tokens) - 1)

    request = Request([0], 5, end_ids=(9,))
    assert outcome(list(generate(request, None, AtOnce(10, 11, 9, 20, 21, 22), decode=decode)))[::2] == (
        [10, 11],
        "stop",
    )
    for tokens in ((10, 11, 20, 21, 22, 9), (10, 11, 20, 21, 22, 23)):
        blocks = list(generate(request, None, AtOnce(*tokens), decode=decode))
        assert outcome(blocks)[::2] == ([10, 11, 20, 21, 22], "length")
        assert len(blocks) == 1
    assert outcome(list(generate(request, None, AtOnce(), decode=decode))) == ([], "", "stop")


@pytest.mark.parametrize("min_tokens", range(8))
@pytest.mark.parametrize("end_ids", [(9,), (9, 8), (8, 9)])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 7])
def test_min_tokens_inside_blocks(min_tokens, end_ids, num_draft_tokens):
    """Both models would rather end from the third token on."""
    target, draft = engines([10, 11, 9])
    request = Request([0], 10, min_tokens=min_tokens, end_ids=end_ids, num_draft_tokens=num_draft_tokens)
    _, generation = run(request, target, draft)
    assert generation.num_generated == max(2, min_tokens)
    assert generation.finish_reason == "stop"
    assert not set(generation.token_ids.tolist()) & set(end_ids)


def test_all_end_ids_count_and_for_the_draft_too():
    """Config says 151645, generation_config [151645, 151643]: small ids here. Nobody computes past the end."""
    target, draft = engines([26, 13, 33, 31, 30])
    blocks, _ = run(Request([0], 20, end_ids=(35, 33), num_draft_tokens=4), target, draft)
    assert outcome(blocks) == ([26, 13], decode([26, 13]), "stop")
    assert draft.requests[0].stop_sequences == ((33,),)
    assert target.requests[0].draft_tokens.tolist() == [26, 13, 33]


def test_an_end_id_in_the_prompt_does_not_cut():
    target, draft = engines([9, 2, 2, 2], prompt_length=3)
    blocks, _ = run(Request([3, 2, 7], 8, end_ids=(2,), num_draft_tokens=3), target, draft)
    assert outcome(blocks) == ([9], decode([9]), "stop")


def test_a_draft_that_ends_too_early_does_not_end_the_answer():
    """Draft [5, EOS], target wants [5, 6]."""
    target, draft = engines([5, 6, 7, 9], [5, 9])
    blocks, _ = run(Request([0], 8, end_ids=(9,), num_draft_tokens=4), target, draft)
    assert outcome(blocks) == ([5, 6, 7], decode([5, 6, 7]), "stop")
    assert target.requests[0].draft_tokens.tolist() == [5, 9]


# ---- stop strings


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize(
    ("stop_strings", "output", "tokens", "text"),
    [
        (("DEFGHIJ",), [1, 2, 3, 4, 5, 6, 6], [1, 2, 3, 4, 5], "ABC"),
        (("DEFGHIJ",), [2, 6, 9], [2, 6], "DEFX"),
        (("..",), [1, 7, 6, 9], [1, 7], "ABC"),
        (("EFG", "\n"), [1, 2, 3, 9], [1, 2, 3], "ABCD"),
        (("DEFGHIJ",), [1, 2, 3, 9], [1, 2, 3], "ABCDEFG"),
        (("BCD", "EF"), [1, 2, 6], [1, 2], "A"),
    ],
)
def test_stop_strings_cut_at_the_character(stop_strings, output, tokens, text, num_draft_tokens, chunk):
    target, draft = engines(output)
    request = Request(
        [0],
        20,
        end_ids=(9,),
        stop_strings=stop_strings,
        num_draft_tokens=num_draft_tokens,
        plain_chunk_tokens=chunk,
    )
    blocks, _ = run(request, target, draft)
    assert outcome(blocks) == (tokens, text, "stop")


def test_held_back_text_comes_at_the_end():
    target, _ = engines([1, 2, 3, 4, 6, 6])
    request = Request([0], 3, stop_strings=("DEFGHIJ",), plain_chunk_tokens=1)
    blocks, _ = run(request, target)
    assert [b.text for b in blocks] == ["ABC", "", "DEFG"]
    assert [b.finish_reason for b in blocks] == [None, None, "length"]


def test_a_stop_string_on_the_last_allowed_token_is_a_stop():
    target, draft = engines([1, 2, 3, 6])
    blocks, _ = run(Request([0], 3, stop_strings=("FG",), num_draft_tokens=3), target, draft)
    assert outcome(blocks) == ([1, 2, 3], "ABCDE", "stop")


def test_characters_over_blocks():
    target, _ = engines([0xE8 % VOCAB, 1, 2])

    def two_token_character(ids):
        return {(32,): "\ufffd", (32, 1): "\u806a", (32, 1, 2): "\u806aDEF"}.get(tuple(ids), "")

    request = Request([0], 3, plain_chunk_tokens=1)
    blocks = list(generate(request, None, Target(target), decode=two_token_character))
    assert [b.text for b in blocks] == ["", "\u806a", "DEF"]
    cut_off = list(generate(replace(request, max_tokens=1), None, Target(target), decode=two_token_character))
    assert [b.text for b in cut_off] == ["\ufffd"]


def test_stop_strings_need_a_decoder():
    with pytest.raises(ValueError, match=r"^stop_strings: "):
        list(generate(Request([0], 3, stop_strings=("a",)), None, Target(engines([1])[0])))


def test_without_a_decoder_ids_are_all():
    blocks = list(generate(Request([0], 3), None, Target(engines([1, 2, 3])[0])))
    assert outcome(blocks) == ([1, 2, 3], "", "length")


# ---- lengths


@pytest.mark.parametrize(
    ("length", "draft_context", "num_drafted"), [(2044, 2048, 4), (2048, 2048, 0), (2060, 2048, 0), (4092, 4096, 3)]
)
def test_contexts_clamp_the_draft(length, draft_context, num_drafted):
    target, draft = engines([1], prompt_length=length)
    request = Request(
        [0] * length, 50, num_draft_tokens=5, target_context=4096, draft_context=draft_context, plain_chunk_tokens=1
    )
    first = next(generate(request, DraftModel(draft), Target(target), decode=decode))
    sent = target.requests[0].draft_tokens
    assert (0 if sent is None else len(sent)) == num_drafted
    assert len(draft.requests) == (num_drafted > 0)
    assert len(first.token_ids) == num_drafted + 1


def test_the_targets_context_ends_the_answer():
    target, draft = engines([1], prompt_length=12)
    _, generation = run(Request([0] * 12, 50, num_draft_tokens=3, target_context=17), target, draft)
    assert (generation.num_generated, generation.finish_reason) == (5, "length")
    assert max(len(r.input_ids) + r.max_new_tokens for r in target.requests) == 17


def test_the_draft_drops_out_when_its_context_is_full():
    target, draft = engines([1], prompt_length=4)
    request = Request([0] * 4, 12, num_draft_tokens=3, draft_context=9, plain_chunk_tokens=2)
    _, generation = run(request, target, draft)
    assert generation.num_generated == 12
    assert [(len(r.input_ids), r.max_new_tokens) for r in draft.requests] == [(4, 3), (8, 1)]
    assert generation.fallbacks == {"draft_context": 3}  # 6 more tokens in chunks of 2


@settings(max_examples=60, deadline=None)
@given(
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 12),
    num_draft_tokens=st.integers(0, 6),
    chunk=st.integers(1, 6),
    room=st.integers(1, 14),
    draft_room=st.integers(0, 14),
    end_ids=st.sampled_from([(), (0,), (0, 1), (1, 2, 0)]),
    seed=st.integers(0, 99),
    sampling=st.sampled_from(
        [SamplingParams(), FULL, SamplingParams(temperature=0.8, top_p=0.8, presence_penalty=0.5)]
    ),
)
def test_bounds_hold_whatever_happens(
    max_tokens, min_tokens, num_draft_tokens, chunk, room, draft_room, end_ids, seed, sampling
):
    request = Request(
        [3, 2, 1],
        max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        sampling=replace(sampling, seed=seed),
        end_ids=end_ids,
        num_draft_tokens=num_draft_tokens,
        plain_chunk_tokens=chunk,
        target_context=3 + room,
        draft_context=3 + draft_room,
    )
    target, draft = TableEngine(table_model(5, seed)), TableEngine(table_model(5, seed + 1))
    blocks, generation = run(request, target, draft)
    limit = min(max_tokens, room)
    assert generation.num_generated <= limit
    assert not set(generation.token_ids.tolist()) & set(end_ids)
    if generation.finish_reason == "length":
        assert generation.num_generated == limit
    else:
        assert generation.finish_reason == "stop"
        assert min(request.min_tokens, limit) <= generation.num_generated
    for call in target.requests:
        assert len(call.input_ids) + call.max_new_tokens <= 3 + limit
    for call in draft.requests:
        assert 1 <= call.max_new_tokens <= num_draft_tokens
        assert len(call.input_ids) + call.max_new_tokens <= 3 + draft_room
    assert all(block.token_ids or block.finish_reason for block in blocks)


# ---- the same text, however it is made


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5])
def test_greedy_text_does_not_depend_on_speculation(seed, num_draft_tokens):
    request = Request(
        [3, 2], 30, sampling=SamplingParams(repetition_penalty=1.1, frequency_penalty=0.05), end_ids=(0,), min_tokens=9
    )
    target, draft = TableEngine(table_model(VOCAB, seed)), TableEngine(table_model(VOCAB, seed, scale=1.0))
    plain, _ = run(request, target)
    speculative, generation = run(replace(request, num_draft_tokens=num_draft_tokens), target, draft)
    assert outcome(speculative) == outcome(plain)
    assert generation.acceptance.num_drafted > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_token_acceptance_gives_the_plain_text_seed_by_seed(seed, num_draft_tokens):
    """The target's own draw at a position uses the same random number with and without drafts."""
    request = Request([3, 2], 25, sampling=replace(FULL, seed=seed, top_k=6), end_ids=(0,))
    target, draft = TableEngine(table_model(VOCAB, 1)), TableEngine(table_model(VOCAB, 1, scale=1.0))
    plain, _ = run(request, target)
    drafter = DraftModel(draft, "tokens")
    speculative = list(
        generate(replace(request, num_draft_tokens=num_draft_tokens), drafter, Target(target), decode=decode)
    )
    assert outcome(speculative) == outcome(plain)
    assert speculative[-1].generation.acceptance.num_accepted > 0


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_plain_sampled_text_does_not_depend_on_chunking(chunk):
    target = TableEngine(table_model(VOCAB, 2))
    request = Request([3, 2], 30, sampling=replace(FULL, seed=11))
    expected, _ = run(request, target)
    blocks, _ = run(replace(request, plain_chunk_tokens=chunk), target)
    assert outcome(blocks) == outcome(expected)
    assert {len(b.token_ids) for b in blocks[:-1]} <= {chunk}


@pytest.mark.parametrize("sampling", [SamplingParams(), replace(FULL, seed=5)])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_state_does_not_leak_between_generations(sampling, num_draft_tokens):
    """The same prompt three times, then A, B, A, in turn and interleaved block by block."""
    target, draft = Target(TableEngine(table_model(VOCAB, 4))), DraftModel(TableEngine(table_model(VOCAB, 5)))
    a = Request([3, 2], 20, sampling=sampling, num_draft_tokens=num_draft_tokens)
    b = replace(a, prompt_ids=[7, 9, 1])

    def answer(request):
        return outcome(list(generate(request, draft, target, decode=decode)))

    first, other = answer(a), answer(b)
    assert [answer(a), answer(a), answer(b), answer(a)] == [first, first, other, first]
    streams = [generate(request, draft, target, decode=decode) for request in (a, b, a)]
    blocks: list[list[Block]] = [[], [], []]
    while any(not got or got[-1].finish_reason is None for got in blocks):
        for stream, got in zip(streams, blocks, strict=True):
            got.extend([block] if (block := next(stream, None)) else [])
    assert [outcome(got) for got in blocks] == [first, other, first]


def test_different_seeds_give_different_texts_and_the_same_seed_the_same():
    target, draft = TableEngine(table_model(VOCAB, 4)), TableEngine(table_model(VOCAB, 5))
    texts = [
        outcome(run(Request([1], 12, sampling=replace(FULL, seed=s), num_draft_tokens=3), target, draft)[0])[1]
        for s in (0, 1, 2, 3, 0, 1, 2, 3)
    ]
    assert texts[:4] == texts[4:]
    assert len(set(texts)) == 4


def test_two_sequences_in_flight_grow_by_their_own_counts():
    """Accept counts 0 and 3 in one round: 1 and 4 tokens, no padding id."""
    request = Request([0], 20, num_draft_tokens=3)
    good_target, good_draft = engines([11, 12, 13, 14, 15])
    bad_target, bad_draft = engines([21, 22, 23, 24, 25], [31, 32, 33, 34, 35])
    pair = [
        next(generate(request, DraftModel(d), Target(t)))
        for t, d in ((bad_target, bad_draft), (good_target, good_draft))
    ]
    assert [block.token_ids for block in pair] == [(21,), (11, 12, 13, 14)]


# ---- counters


def test_counters_of_a_whole_generation():
    """Draft right for 3, wrong at the 4th token, then right: 3 + 1, then 3 + 1, then room for 1 draft only."""
    target, draft = engines([11, 12, 13, 14, 15, 16, 17, 18, 19, 10], [11, 12, 13, 5, 15, 16, 17, 5, 19, 10])
    _, generation = run(Request([0], 10, num_draft_tokens=4), target, draft)
    assert generation.acceptance == Acceptance([0, 1, 0, 2], num_drafted=9, num_emitted=10, num_target_passes=3)
    assert generation.acceptance.rate == pytest.approx(7 / 9)
    assert generation.acceptance.length == pytest.approx(10 / 3)


def test_counters_of_plain_decoding():
    target, _ = engines([1, 2, 3, 9])
    _, generation = run(Request([0], 10, end_ids=(9,)), target)
    assert generation.acceptance == Acceptance([], num_drafted=0, num_emitted=4, num_target_passes=4)


# ---- a drafter that fails


class Scripted:
    """Drafter that proposes, or raises, one thing after the other; its last one for ever."""

    def __init__(self, *script):
        self.script, self.asked, self.learnt = script, [], []

    def propose(self, generation, num_draft_tokens):
        self.asked.append(num_draft_tokens)
        step = self.script[min(len(self.asked), len(self.script)) - 1]
        if isinstance(step, BaseException):
            raise step
        return Proposal(np.array(step, dtype=np.int32))

    def learn(self, verification):
        self.learnt.append(verification)


def run_scripted(*script, **fields):
    target, _ = engines([1, 2, 3, 4, 5, 6, 9])
    drafter = Scripted(*script)
    request = Request([0], 20, **{"end_ids": (9,), "num_draft_tokens": 2, **fields})
    blocks = list(generate(request, drafter, Target(target), decode=decode))
    check_blocks(blocks)
    assert outcome(blocks) == ([1, 2, 3, 4, 5, 6], "ABCDEFGHIJX", "stop")
    return blocks, drafter, target


def test_a_drafter_that_proposes_nothing_still_lets_the_target_make_one():
    blocks, drafter, _ = run_scripted([])
    assert [b.token_ids for b in blocks] == [(1,), (2,), (3,), (4,), (5,), (6,), ()]
    assert blocks[-1].generation.fallbacks == {"draft_empty": 7}
    assert len(drafter.learnt) == 7


def test_one_failure_costs_one_plain_step():
    blocks, _, _ = run_scripted(TimeoutError("no answer"), [2, 3], TimeoutError("no answer"), [6, 9])
    generation = blocks[-1].generation
    assert [b.token_ids for b in blocks] == [(1,), (2, 3, 4), (5,), (6,)]
    assert generation.fallbacks == {"draft_error": 2}
    assert str(generation.draft_error) == "no answer"


def test_after_two_failures_in_a_row_the_drafter_is_left_alone():
    blocks, drafter, _ = run_scripted(TimeoutError("no answer"), plain_chunk_tokens=4)
    assert len(drafter.asked) == 2
    assert [b.token_ids for b in blocks] == [(1,), (2, 3, 4, 5), (6,)]
    assert blocks[-1].generation.fallbacks == {"draft_error": 2, "draft_given_up": 2}


@pytest.mark.parametrize("bad", [[1, 2, 3, 4, 5], [-1]])
def test_a_drafter_that_breaks_its_promise_counts_as_failing(bad):
    blocks, _, target = run_scripted(bad)
    assert blocks[-1].generation.fallbacks["draft_error"] == 2
    assert all(call.draft_tokens is None for call in target.requests)


def test_the_target_failing_is_the_callers_matter():
    target = TableEngine(table_model(5, 0), fails=lambda call: TimeoutError("target") if call == 2 else None)
    stream = generate(Request([1], 9, plain_chunk_tokens=2), None, Target(target))
    assert len(next(stream).token_ids) == 2
    with pytest.raises(TimeoutError, match="target"):
        next(stream)


# ---- cancelling


def test_cancelling_between_blocks_makes_no_further_call():
    target, draft = engines([1] * 40)
    stopped = []
    request = Request([0], 40, num_draft_tokens=3)
    stream = generate(request, DraftModel(draft), Target(target), decode=decode, cancelled=lambda: bool(stopped))
    blocks = [next(stream), next(stream)]
    calls = len(target.requests) + len(draft.requests)
    stopped.append(True)
    blocks += list(stream)
    check_blocks(blocks)
    assert [b.finish_reason for b in blocks] == [None, None, "cancelled"]
    assert blocks[-1].token_ids == ()
    assert len(target.requests) + len(draft.requests) == calls


@pytest.mark.parametrize("during", ["draft", "target"])
def test_cancelling_during_a_call_makes_no_further_call(during):
    stopped, calls = [], []

    def noting(engine, role):
        def call(request):
            calls.append(role)
            if len(calls) >= 3 and role == during:
                stopped.append(True)
            return engine(request)

        return call

    target, draft = engines([1] * 40)
    stream = generate(
        Request([0], 40, num_draft_tokens=3),
        DraftModel(noting(draft, "draft")),
        Target(noting(target, "target")),
        decode=decode,
        cancelled=lambda: bool(stopped),
    )
    blocks = list(stream)
    check_blocks(blocks)
    assert blocks[-1].finish_reason == "cancelled"
    assert calls == ["draft", "target", "draft"] + ["target"] * (during == "target")


def test_an_engine_may_say_that_it_was_cancelled():
    target = TableEngine(table_model(5, 0), fails=lambda call: Cancelled() if call == 2 else None)
    blocks = list(generate(Request([1], 9, plain_chunk_tokens=2), None, Target(target)))
    assert [b.finish_reason for b in blocks] == [None, "cancelled"]


def test_cancelled_before_it_began():
    target, draft = engines([1])
    request = Request([0], 4, num_draft_tokens=2)
    blocks = list(generate(request, DraftModel(draft), Target(target), decode=decode, cancelled=lambda: True))
    assert outcome(blocks) == ([], "", "cancelled")
    assert target.requests == draft.requests == []


def test_text_held_back_is_given_out_on_cancelling():
    stopped = []
    target, _ = engines([1, 2, 3])
    request = Request([0], 9, stop_strings=("DEFGHIJ",), plain_chunk_tokens=2)
    stream = generate(request, None, Target(target), decode=decode, cancelled=lambda: bool(stopped))
    first = next(stream)
    stopped.append(True)
    (last,) = stream
    assert (first.text, last.text, last.generation.text) == ("ABC", "DEF", "ABCDEF")


# ---- log probabilities and malformed requests


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_log_probabilities_belong_to_the_emitted_tokens(num_draft_tokens):
    target, draft = TableEngine(table_model(6, 1)), TableEngine(table_model(6, 2))
    request = Request([1], 12, end_ids=(0,), num_draft_tokens=num_draft_tokens, return_log_probs=True)
    blocks, generation = run(request, target, draft)
    context = [1]
    for block in blocks:
        assert len(block.log_probs) == len(block.token_ids)
        for token, log_prob in zip(block.token_ids, block.log_probs, strict=True):
            row = table_model(6, 1)(tuple(context)).astype(np.float64)
            assert log_prob == pytest.approx(row[token] - np.log(np.exp(row).sum()), abs=1e-6)
            context.append(token)
    assert context == generation.context.tolist()
    blocks, _ = run(replace(request, return_log_probs=False), target, draft)
    assert {block.log_probs for block in blocks} == {None}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt_ids", {"prompt_ids": []}),
        ("prompt_ids", {"prompt_ids": [[1, 2]]}),
        ("prompt_ids", {"prompt_ids": [1.5]}),
        ("prompt_ids", {"prompt_ids": [1, -1]}),
        ("prompt_ids", {"prompt_ids": [1, 2, 3], "target_context": 3}),
        ("max_tokens", {"max_tokens": 0}),
        ("min_tokens", {"min_tokens": 5}),
        ("min_tokens", {"min_tokens": -1}),
        ("num_draft_tokens", {"num_draft_tokens": -1}),
        ("plain_chunk_tokens", {"plain_chunk_tokens": 0}),
        ("stop_strings", {"stop_strings": ("a", "")}),
        ("bad_words", {"bad_words": ((1,), ())}),
        ("embedding_bias", {"embedding_bias": np.array([0.0, np.nan])}),
        ("embedding_bias", {"embedding_bias": np.array([0.0, np.inf])}),
    ],
)
def test_malformed_requests_are_refused_by_name(field, fields):
    with pytest.raises(ValueError, match=f"^{field}: "):
        Request(**{"prompt_ids": [1, 2], "max_tokens": 4, **fields})


def test_a_generation_shows_its_state_to_a_drafter():
    seen = []

    class Watching(Scripted):
        def propose(self, generation: Generation, num_draft_tokens):
            seen.append((generation.context.tolist(), generation.token_ids.tolist(), num_draft_tokens))
            return super().propose(generation, num_draft_tokens)

    target, _ = engines([1, 2, 3, 4], prompt_length=2)
    list(generate(Request([7, 8], 4, num_draft_tokens=2), Watching([1], [4]), Target(target)))
    assert seen == [([7, 8], [], 2), ([7, 8, 1, 2], [1, 2], 1)]


def test_answers_of_other_array_types_are_fine():
    class Lists:
        def __call__(self, request):
            return EngineResult(np.array([1, 2, 3][: request.max_new_tokens], dtype=np.int64))

    assert outcome(list(generate(Request([0], 3), None, Target(Lists()), decode=decode)))[0] == [1, 2, 3]


# ---- pace, and going on


class Limits(Pace):
    """Limits of cycle after cycle, again and again; notes what came of them."""

    def __init__(self, *limits: int | None, plain_limit: int | None = None) -> None:
        self.limits, self.plain_limit = cycle(limits), plain_limit
        self.cycles: list[tuple[int | None, int, int]] = []  # limit, drafted, emitted

    def begin(self, generation):
        generation.plain_limit = self.plain_limit
        self.limit = next(self.limits)
        return self.limit

    def proposed(self, generation, proposal):
        self.drafted = len(proposal.tokens)

    def verified(self, generation, proposal, verification):
        assert len(proposal.tokens) == self.drafted
        self.cycles.append((self.limit, self.drafted, len(verification.tokens)))


def paced(request: Request, pace: Pace | None, seed: int = 1) -> tuple[list[Block], TableEngine]:
    """The draft is the target itself: all that is drafted is accepted."""
    target, draft = (TableEngine(table_model(VOCAB, seed)) for _ in range(2))
    generation = Generation(request, decode)
    blocks = list(go_on(generation, DraftModel(draft, "tokens"), Target(target), pace))
    check_blocks(blocks)
    return blocks, target


def test_a_limit_of_0_is_plain_decoding_in_chunks():
    request = Request([1], 20, num_draft_tokens=3, plain_chunk_tokens=8)
    pace = Limits(0)
    blocks, target = paced(request, pace)
    assert pace.cycles == [(0, 0, 8), (0, 0, 8), (0, 0, 4)]
    assert [asked.max_new_tokens for asked in target.requests] == [8, 8, 4]
    assert all(asked.draft_tokens is None for asked in target.requests)
    assert blocks[-1].generation.fallbacks == {}
    pace = Limits(0, plain_limit=2)
    assert outcome(paced(request, pace)[0]) == outcome(blocks)
    assert pace.cycles == [(0, 0, 2)] * 10


def test_a_pace_limits_each_cycle_by_itself():
    pace = Limits(2, 0, None, 1, 9)
    blocks, _ = paced(Request([1], 24, num_draft_tokens=3, plain_chunk_tokens=5), pace)
    assert pace.cycles == [(2, 2, 3), (0, 0, 5), (None, 3, 4), (1, 1, 2), (9, 3, 4), (2, 2, 3), (0, 0, 3)]
    assert [len(block.token_ids) for block in blocks] == [emitted for _, _, emitted in pace.cycles]


@pytest.mark.parametrize("sampling", [SamplingParams(), FULL], ids=["greedy", "sampled"])
def test_no_pace_changes_what_is_accepted_by_tokens(sampling):
    for seed in range(8):
        request = Request([1, 2], 30, sampling=replace(sampling, seed=seed), end_ids=(0,), num_draft_tokens=4)
        plain = outcome(paced(replace(request, num_draft_tokens=0), None, seed)[0])
        for limits in ((None,), (0,), (1,), (4, 0), (0, 0, 3), (None, 1, 2)):
            assert outcome(paced(request, Limits(*limits), seed)[0]) == plain


class LeftBehind(BaseException):
    """As a thread ends whose call came back too late."""


class Leaving:
    """A drafter that ends its thread instead of proposing for the `count`th time."""

    def __init__(self, drafter, count: int) -> None:
        self.drafter, self.count = drafter, count

    def propose(self, generation, num_draft_tokens):
        self.count -= 1
        if self.count < 0:
            raise LeftBehind
        return self.drafter.propose(generation, num_draft_tokens)

    def learn(self, verification):
        self.drafter.learn(verification)


@pytest.mark.parametrize("sampling", [SamplingParams(), FULL], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafts", ["another drafter", "no drafter"])
def test_a_generation_goes_on_where_it_was_left(sampling, drafts):
    """Between cycles, or in the middle of a proposal; with a drafter that knows nothing of what was before."""
    for seed in range(4):
        target, draft = (TableEngine(table_model(VOCAB, seed + other)) for other in (0, 100 * (seed % 2)))
        request = Request(
            [1, 2],
            25,
            sampling=replace(sampling, seed=seed),
            stop_strings=("<40>",),  # never comes, but text that may begin it is held back
            num_draft_tokens=3,
            plain_chunk_tokens=3,
            return_log_probs=True,
        )
        whole = list(generate(request, None, Target(target), decode=decode))
        for count in range(6):
            for in_the_middle in (False, True):
                generation = Generation(request, decode)
                drafter = Leaving(DraftModel(draft, "tokens"), count)
                blocks: list[Block] = []
                if in_the_middle:
                    with pytest.raises(LeftBehind):
                        for block in go_on(generation, drafter, Target(target)):
                            blocks.append(block)
                    generation.draft_failed(TimeoutError("too late"))
                else:
                    blocks += islice(go_on(generation, drafter, Target(target)), count)
                assert len(blocks) == count
                successor = DraftModel(draft, "tokens") if drafts == "another drafter" else NoDrafter()
                blocks += go_on(generation, successor, Target(target))
                check_blocks(blocks)
                assert outcome(blocks) == outcome(whole)
                log_probs = [[value for block in some for value in block.log_probs] for some in (blocks, whole)]
                assert log_probs[0] == log_probs[1]


# ---- logits


@pytest.mark.parametrize("hides_end_id", [False, True], ids=["shows end id", "hides end id"])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
@pytest.mark.parametrize("sampling", [SamplingParams(), FULL], ids=["greedy", "sampled"])
def test_every_emitted_token_has_the_targets_logits(sampling, num_draft_tokens, hides_end_id):
    accepted = 0
    for seed in range(8):
        model = table_model(12, seed)
        target = TableEngine(model, hides_end_id=hides_end_id)
        drafter = DraftModel(TableEngine(table_model(12, seed + seed % 2)))
        request = Request(
            [1, 2],
            20,
            sampling=replace(sampling, seed=seed),
            end_ids=(0, 5),
            num_draft_tokens=num_draft_tokens,
            return_generation_logits=True,
        )
        blocks = list(generate(request, drafter if num_draft_tokens else None, Target(target)))
        ids = blocks[-1].generation.token_ids.tolist()
        assert all(block.logits.shape == (len(block.token_ids), 12) for block in blocks)
        rows = np.concatenate([block.logits for block in blocks])
        assert rows.tolist() == [model((1, 2, *ids[:i])).tolist() for i in range(len(ids))]
        accepted += blocks[-1].generation.acceptance.num_accepted
    assert bool(accepted) == bool(num_draft_tokens)


def test_missing_logits_are_named():
    target = TableEngine(table_model(12, 1), has_generation_logits=False)
    with pytest.raises(EngineError, match="the target engine returned no rows of generation logits for 8 tokens"):
        list(generate(Request([1], 20, return_generation_logits=True), None, Target(target)))
