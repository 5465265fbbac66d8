"""What the draft and the target engine are asked for in each cycle, and what happens to answers that are wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decoding_doubles import TableEngine, script_model, table_model

from trtspec.decoding.cycle import Request, generate
from trtspec.decoding.draft_target import DraftModel, Target
from trtspec.decoding.engine_call import EngineError, EngineResult
from trtspec.decoding.sampling import SamplingParams

FULL = SamplingParams(temperature=0.9, top_p=0.95, presence_penalty=0.2, seed=123)
GREEDY = SamplingParams(seed=123)


def run(request, draft, target, acceptance="auto"):
    *_, last = generate(request, DraftModel(draft, acceptance), Target(target))
    return last.generation


def engines(draft_options=None):
    return TableEngine(table_model(12, 1), **(draft_options or {})), TableEngine(table_model(12, 2))


def test_every_call_has_the_whole_context_and_a_seed_of_its_own():
    draft, target = engines()
    generation = run(Request([3, 4], 20, sampling=FULL, num_draft_tokens=3), draft, target)
    calls = draft.requests + target.requests
    assert len({call.sampling.seed for call in calls}) == len(calls) > 8
    assert 123 not in {call.sampling.seed for call in calls}
    for call in calls:
        assert call.input_ids.tolist() == generation.context[: len(call.input_ids)].tolist()
        assert replace(call.sampling, seed=0) == replace(FULL, seed=0)
    repeated, again = engines()
    run(Request([3, 4], 20, sampling=FULL, num_draft_tokens=3), repeated, again)
    assert [c.sampling.seed for c in repeated.requests + again.requests] == [c.sampling.seed for c in calls]


@pytest.mark.parametrize(
    ("sampling", "acceptance", "draft_is_greedy", "sends_logits"),
    [
        (FULL, "auto", False, True),
        (FULL, "logits", False, True),
        (FULL, "tokens", True, False),
        (GREEDY, "auto", True, False),
        (GREEDY, "logits", True, False),
        (GREEDY, "tokens", True, False),
    ],
)
def test_acceptance_modes(sampling, acceptance, draft_is_greedy, sends_logits):
    draft, target = engines()
    generation = run(Request([3, 4], 9, sampling=sampling, num_draft_tokens=2), draft, target, acceptance)
    assert generation.acceptance.num_drafted > 0
    assert generation.fallbacks == {}
    for call in draft.requests:
        assert call.sampling.greedy == draft_is_greedy
        assert call.return_generation_logits == sends_logits
    for call in target.requests[:-1]:
        assert (call.draft_logits is not None) == sends_logits
        assert call.sampling.greedy == sampling.greedy
        assert call.max_new_tokens == len(call.draft_tokens) + 1


def test_a_draft_engine_without_logits_is_an_error_only_when_logits_are_demanded():
    draft, target = engines({"has_generation_logits": False})
    request = Request([3, 4], 9, sampling=FULL, num_draft_tokens=2)
    generation = run(request, draft, target, "auto")
    assert generation.fallbacks == {}
    assert all(call.draft_logits is None for call in target.requests)
    demanded = run(request, *engines({"has_generation_logits": False}), "logits")
    assert demanded.num_generated == 9
    assert demanded.fallbacks["draft_error"] == 2
    assert "generation logits" in str(demanded.draft_error)


def test_both_engines_get_the_same_rule():
    bias = np.zeros(12, dtype=np.float32)
    request = Request(
        [3, 4],
        12,
        min_tokens=6,
        sampling=FULL,
        end_ids=(0,),
        bad_words=((5,), (1, 2)),
        embedding_bias=bias,
        num_draft_tokens=3,
    )
    draft, target = engines()
    run(request, draft, target)
    for call in draft.requests + target.requests:
        assert call.end_id == 0
        assert call.bad_words == ((5,), (1, 2))
        assert call.embedding_bias is bias
    for call in target.requests:
        before_min = max(0, 6 - (len(call.input_ids) - 2))
        assert call.min_new_tokens == min(before_min, call.max_new_tokens)


def test_several_end_ids_go_through_an_engine_that_knows_one():
    """Others are one-token stop sequences; until min_tokens they are bad words, and no call reaches over min_tokens."""
    draft, target = engines()
    run(Request([3, 4], 12, min_tokens=5, end_ids=(0, 7, 8), num_draft_tokens=3, plain_chunk_tokens=4), draft, target)
    for call in draft.requests + target.requests:
        generated = len(call.input_ids) - 2
        assert (call.end_id, call.stop_sequences) == (0, ((7,), (8,)))
        assert call.bad_words == (((7,), (8,)) if generated < 5 else ())
        assert generated >= 5 or generated + call.max_new_tokens <= 5


def test_drawn_drafts_never_end_early_and_carry_logits_without_end_ids():
    draft, target = engines()
    run(Request([3, 4], 12, sampling=FULL, end_ids=(0, 7), num_draft_tokens=3), draft, target)
    for call in draft.requests:
        assert call.min_new_tokens == call.max_new_tokens
        assert (7,) in call.bad_words
    checked = [call for call in target.requests if call.draft_tokens is not None]
    assert checked
    for call in checked:
        assert np.all(call.draft_logits[:, [0, 7]] == -np.inf)
        assert np.all(np.isfinite(np.delete(call.draft_logits, [0, 7], axis=1)))


def test_a_draft_with_a_smaller_vocabulary_than_the_end_id():
    draft, target = TableEngine(table_model(6, 1)), TableEngine(table_model(12, 2))
    generation = run(Request([3, 4], 12, sampling=FULL, end_ids=(9,), num_draft_tokens=3), draft, target)
    assert generation.fallbacks == {}
    assert generation.acceptance.num_accepted > 0


class Answers:
    """An engine that always answers the same."""

    def __init__(self, result):
        self.result = result

    def __call__(self, request):
        return self.result


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1] * 9, "at most 3 new tokens, without the input"),
        ([[1, 2]], "ids of shape"),
        ([-1], "not token ids"),
        ([0.5], "not token ids"),
    ],
)
def test_a_wrong_answer_of_the_target_is_named(ids, message):
    stream = generate(Request([1], 3), None, Target(Answers(EngineResult(np.array(ids)))))
    with pytest.raises(EngineError, match=f"target engine.*{message}"):
        next(stream)


def test_missing_log_probabilities_are_named():
    stream = generate(Request([1], 2, return_log_probs=True), None, Target(Answers(EngineResult(np.array([1, 2])))))
    with pytest.raises(EngineError, match="log probability"):
        next(stream)


@pytest.mark.parametrize(
    "result",
    [
        EngineResult(np.array([1, 2, 3, 4, 5], dtype=np.int32)),
        EngineResult(np.array([[1]], dtype=np.int32)),
        EngineResult(np.array([1, 2], dtype=np.int32), np.zeros((1, 12), dtype=np.float32)),
        EngineResult(np.array([1], dtype=np.int32), np.zeros((1, 12), dtype=np.float32)),
    ],
    ids=["too many", "wrong shape", "too few rows", "too short"],
)
def test_a_wrong_answer_of_the_draft_never_reaches_the_target(result):
    _, target = engines()
    generation = run(Request([3, 4], 9, sampling=FULL, num_draft_tokens=2), Answers(result), target)
    assert generation.fallbacks["draft_error"] == 2
    assert isinstance(generation.draft_error, EngineError)
    assert all(call.draft_tokens is None for call in target.requests)
    assert generation.num_generated == 9


def test_an_end_id_that_the_engine_does_not_show_ends_the_generation():
    """Also right after accepted drafts, and as the very first token."""
    outputs = ([9], [1, 9], [1, 2, 3, 9], [1, 2, 3, 4, 9])
    for output in outputs:
        for num_draft_tokens in (0, 3):
            target = TableEngine(script_model(output, 12, 1), hides_end_id=True)
            draft = TableEngine(script_model([1, 2, 3, 4, 5], 12, 1), hides_end_id=True)
            request = Request([0], 10, end_ids=(9,), num_draft_tokens=num_draft_tokens)
            generation = run(request, draft, target)
            assert generation.token_ids.tolist() == output[:-1]
            assert generation.finish_reason == "stop"
