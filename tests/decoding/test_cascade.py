"""What each of a cascade's three engines is asked for, and what happens when one of them fails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decoding_doubles import TableEngine, script_model, table_model

from trtspec.decoding.cascade import Cascade
from trtspec.decoding.cycle import Request, generate
from trtspec.decoding.draft_target import DraftModel, Target
from trtspec.decoding.engine_call import Cancelled, EngineError, EngineResult
from trtspec.decoding.methods import METHODS, DraftEngine, make_drafter
from trtspec.decoding.ngram import NgramDrafter
from trtspec.decoding.sampling import SamplingParams

VOCAB = 12
FULL = SamplingParams(temperature=0.9, top_p=0.95, presence_penalty=0.2, seed=123)
GREEDY = SamplingParams(seed=123)


def engines(**options):
    """Draft, middle and target that agree about half of the time; `options` by role for `TableEngine`."""
    target, other = table_model(VOCAB, 2), table_model(VOCAB, 3)

    def blend(share):
        return lambda context: share * target(context) + (1 - share) * other(context)

    models = {"draft": blend(0.6), "middle": blend(0.75), "target": target}
    return {role: TableEngine(model, **options.get(role, {})) for role, model in models.items()}


def run(request, engines, *, num_draft_tokens=2, acceptance="auto", draft_context=None, cancelled=lambda: False):
    drafter = Cascade(
        DraftModel(engines["draft"], acceptance),
        engines["middle"],
        num_draft_tokens,
        acceptance=acceptance,
        draft_context=draft_context,
    )
    *_, last = generate(request, drafter, Target(engines["target"]), cancelled=cancelled)
    return last.generation


def plain(request):
    *_, last = generate(replace(request, num_draft_tokens=0), None, Target(engines()["target"]))
    return last.generation


@pytest.mark.parametrize("acceptance", ["auto", "logits", "tokens"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5])
def test_greedy_text_is_the_targets(num_draft_tokens, acceptance):
    """Every length at both levels, end ids and a minimum length, penalties and bans."""
    accepted = ended = 0
    for start in range(VOCAB):
        for min_tokens in (0, 4):
            request = Request(
                [start, 4],
                16,
                min_tokens=min_tokens,
                sampling=SamplingParams(repetition_penalty=1.1),
                end_ids=(0, 7),
                bad_words=((5,), (1, 2)),
                num_draft_tokens=4,
            )
            generation, alone = run(request, engines(), num_draft_tokens=num_draft_tokens), plain(request)
            assert generation.token_ids.tolist() == alone.token_ids.tolist()
            assert generation.finish_reason == alone.finish_reason
            assert generation.draft_error is None
            accepted += generation.acceptance.num_accepted
            ended += generation.finish_reason == "stop"
    assert accepted > 50
    assert 4 < ended < 24


def test_every_call_has_a_seed_of_its_own_and_repeats_with_the_request():
    request = Request([3, 4], 20, sampling=FULL, num_draft_tokens=4)
    first, again = engines(), engines()
    generation, repeated = run(request, first), run(request, again)
    calls = [call for engine in first.values() for call in engine.requests]
    assert len({call.sampling.seed for call in calls}) == len(calls) > 20
    assert [call.sampling.seed for engine in again.values() for call in engine.requests] == [
        call.sampling.seed for call in calls
    ]
    assert generation.token_ids.tolist() == repeated.token_ids.tolist()
    other = run(replace(request, sampling=replace(FULL, seed=124)), engines())
    assert other.token_ids.tolist() != generation.token_ids.tolist()


def test_drawn_proposals_carry_the_middle_models_logits_without_end_ids():
    bias = np.linspace(-1, 1, VOCAB).astype(np.float32)
    request = Request(
        [3, 4],
        20,
        min_tokens=12,
        sampling=FULL,
        end_ids=(0, 7),
        bad_words=((5,), (1, 2)),
        embedding_bias=bias,
        num_draft_tokens=4,
    )
    three = engines()
    run(request, three)
    for role in ("draft", "middle"):
        for call in three[role].requests:
            assert call.min_new_tokens == call.max_new_tokens  # no end id, from the first token to the last
            assert (7,) in call.bad_words
            assert {(5,), (1, 2)} <= set(call.bad_words)
            assert call.embedding_bias is bias
            assert call.return_generation_logits
            assert replace(call.sampling, seed=0) == replace(FULL, seed=0)
    middle = engines()["middle"]
    checked = 0
    for call in three["target"].requests:
        if call.draft_tokens is not None:
            context = tuple(call.input_ids.tolist())
            for position, row in enumerate(call.draft_logits):
                expected = middle._model(context + tuple(call.draft_tokens[:position].tolist())).copy()
                expected[[0, 7]] = -np.inf
                np.testing.assert_array_equal(row, expected)
                checked += 1
    assert checked > 15


@pytest.mark.parametrize(
    ("sampling", "acceptance", "greedy_drafts"),
    [(FULL, "tokens", True), (GREEDY, "auto", True), (GREEDY, "logits", True), (FULL, "auto", False)],
)
def test_acceptance_modes(sampling, acceptance, greedy_drafts):
    three = engines()
    generation = run(Request([3, 4], 12, sampling=sampling, num_draft_tokens=3), three, acceptance=acceptance)
    assert generation.fallbacks == {}
    for role in ("draft", "middle"):
        for call in three[role].requests:
            assert call.sampling.greedy == greedy_drafts
            assert call.return_generation_logits == (not greedy_drafts)
    verified = [call for call in three["target"].requests if call.draft_tokens is not None]
    assert verified
    assert all((call.draft_logits is None) == greedy_drafts for call in verified)


def test_a_middle_engine_without_logits_is_an_error_only_when_logits_are_demanded():
    request = Request([3, 4], 9, sampling=FULL, num_draft_tokens=2)
    silent = {"middle": {"has_generation_logits": False}}
    three = engines(**silent)
    assert run(request, three).fallbacks == {}
    assert all(call.draft_logits is None for call in three["target"].requests)
    demanded = run(request, engines(**silent), acceptance="logits")
    assert demanded.num_generated == 9
    assert demanded.fallbacks["draft_error"] == 2
    assert "the middle engine returned 2 tokens and no rows" in str(demanded.draft_error)


def test_the_lengths_of_both_levels():
    """Five to the target, at most two to the middle model, whose own token needs a place too."""
    three, log = engines(), []

    def noting(role):
        def call(request):
            log.append((role, len(request.input_ids), request))
            return three[role](request)

        return call

    run(Request([3, 4], 40, num_draft_tokens=5), {role: noting(role) for role in three})
    begun = 0
    for role, length, call in reversed(log):
        if role == "target":
            begun = length
        if role == "middle":
            room = min(5, 2 + 40 - begun - 1) - (length - begun)
            assert 1 <= call.max_new_tokens <= room
            assert len(call.draft_tokens if call.draft_tokens is not None else ()) == min(2, room - 1)
    proposals = [call.draft_tokens for role, _, call in log if role == "target"]
    assert [len(tokens) for tokens in proposals[:3]] == [5, 5, 5]


def test_contexts_of_three_engines():
    """Beyond the draft's context the middle model proposes alone, in one call; beyond its own the target goes on."""
    three = engines()
    request = Request([3, 4], 20, num_draft_tokens=3, draft_context=16, target_context=20)
    generation = run(request, three, draft_context=9)
    assert (generation.num_generated, generation.finish_reason) == (18, "length")
    assert max(call.input_ids.size + call.max_new_tokens for call in three["draft"].requests) == 9
    alone = [call for call in three["middle"].requests if call.input_ids.size >= 9]
    assert alone
    assert all(call.draft_tokens is None for call in alone)
    assert len({call.input_ids.size for call in alone}) == len(alone)
    assert max(call.input_ids.size + call.max_new_tokens for call in three["middle"].requests) == 16
    assert generation.fallbacks["draft_context"] > 0
    assert generation.token_ids.tolist() == plain(request).token_ids.tolist()


def down(*calls):
    return {"fails": lambda number: RuntimeError("down") if not calls or number in calls else None}


@pytest.mark.parametrize("sampling", [GREEDY, FULL], ids=["greedy", "sampled"])
def test_without_its_draft_the_middle_model_proposes_alone(sampling):
    """The draft is asked twice in the whole request; from then on the middle model makes a proposal in one call."""
    three = engines(draft=down())
    request = Request([3, 4], 60, sampling=sampling, num_draft_tokens=10)
    generation = run(request, three)
    assert len(three["draft"].requests) == 2
    assert str(generation.draft_error) == "down"
    assert generation.fallbacks == {}
    assert generation.acceptance.num_accepted > 0
    assert generation.draft_acceptance.num_drafted == 0
    last_calls = three["middle"].requests[-2:]
    assert all(call.draft_tokens is None for call in last_calls)
    cycles = [call for call in three["target"].requests if call.draft_tokens is not None]
    assert len(three["middle"].requests) <= len(cycles) + 2
    if sampling.greedy:
        assert generation.token_ids.tolist() == plain(request).token_ids.tolist()


def test_a_draft_that_recovers_is_used_again():
    """It fails every other time; one call a cycle."""
    three = engines(draft=down(1, 3, 5, 7))
    generation = run(Request([3, 4], 40, num_draft_tokens=2), three)
    assert len(three["draft"].requests) > 8
    assert generation.draft_acceptance.num_drafted > 3


def test_without_the_middle_model_the_target_goes_on_alone():
    three = engines(middle=down())
    request = Request([3, 4], 24, num_draft_tokens=3)
    generation = run(request, three)
    assert len(three["middle"].requests) == 2
    assert generation.fallbacks["draft_error"] == 2
    assert all(call.draft_tokens is None for call in three["target"].requests)
    assert generation.token_ids.tolist() == plain(request).token_ids.tolist()


@pytest.mark.parametrize("sampling", [GREEDY, FULL], ids=["greedy", "sampled"])
def test_what_the_middle_model_made_before_it_failed_is_proposed(sampling):
    three = engines(middle=down(2))
    three["draft"] = TableEngine(lambda context: -20 * three["middle"]._model(context))  # wrong: a pass gives one token
    generation = run(Request([3, 4], 4, sampling=sampling, num_draft_tokens=3), three)
    first = three["target"].requests[0]
    assert len(first.draft_tokens) == 1
    assert (first.draft_logits is None) == sampling.greedy
    assert str(generation.draft_error) == "down"
    assert generation.num_generated == 4


def test_an_answer_of_the_middle_model_that_is_wrong_is_not_proposed_and_those_before_it_are():
    three = engines()

    def wrong_later(request):
        result = three["middle"](request)
        if len(three["middle"].requests) == 1:
            return result
        return replace(result, output_ids=np.arange(9, dtype=np.int32))

    drafter = Cascade(DraftModel(lambda request: 1 / 0), wrong_later, 2)
    *_, last = generate(Request([3, 4], 4, sampling=FULL, num_draft_tokens=3), drafter, Target(three["target"]))
    assert len(three["target"].requests[0].draft_tokens) == len(three["target"].requests[0].draft_logits) == 1
    assert "the middle engine returned ids of shape [9]" in str(last.generation.draft_error)


def test_counters_of_both_levels():
    """The client sees the target's; those of the middle model stand beside them."""
    three = engines()
    generation = run(Request([3, 4], 60, num_draft_tokens=4), three)
    target_calls = [call for call in three["target"].requests if call.draft_tokens is not None]
    assert generation.acceptance.num_steps == len(target_calls)
    assert generation.acceptance.num_drafted == sum(len(call.draft_tokens) for call in target_calls)
    middle_calls = three["middle"].requests
    assert generation.draft_acceptance.num_target_passes >= len(middle_calls)
    assert generation.draft_acceptance.num_drafted == sum(
        len(call.draft_tokens) for call in middle_calls if call.draft_tokens is not None
    )
    assert generation.draft_acceptance.num_emitted == generation.acceptance.num_drafted
    assert 0 < generation.draft_acceptance.num_accepted < generation.draft_acceptance.num_drafted


@pytest.mark.parametrize("role", ["draft", "middle"])
def test_cancelling_inside_a_proposal_ends_the_generation(role):
    """No engine is called after it, and it is no failure of the drafter."""
    three = engines()
    calls = []

    def cancelled():
        return len(three[role].requests) >= 3

    def counting(name):
        def call(request):
            calls.append((name, cancelled()))
            return three[name](request)

        return call

    drafter = Cascade(DraftModel(counting("draft")), counting("middle"), 2)
    request = Request([3, 4], 60, num_draft_tokens=4)
    *_, last = generate(request, drafter, Target(counting("target")), cancelled=cancelled)
    assert last.finish_reason == "cancelled"
    assert not any(late for _, late in calls)
    assert last.generation.draft_error is None


def test_an_engine_that_reports_the_cancellation_itself():
    def gone(request):
        raise Cancelled

    three = engines()
    *_, last = generate(
        Request([3, 4], 60, num_draft_tokens=4), Cascade(NgramDrafter(), gone, 2), Target(three["target"])
    )
    assert last.finish_reason == "cancelled"
    assert three["target"].requests == []


def test_a_middle_engine_that_ends_although_ends_are_banned_is_an_error():
    three = engines()

    def short(request):
        result = three["middle"](replace(request, draft_tokens=None, draft_logits=None))
        return replace(result, output_ids=result.output_ids[:0], generation_logits=result.generation_logits[:0])

    drafter = Cascade(DraftModel(three["draft"]), short, 2)
    request = Request([3, 4], 9, sampling=FULL, num_draft_tokens=3)
    *_, last = generate(request, drafter, Target(three["target"]))
    assert isinstance(last.generation.draft_error, EngineError)
    assert last.generation.fallbacks["draft_error"] == 2


def test_a_perfect_cascade_has_everything_accepted():
    models = [TableEngine(script_model([5, 6, 7, 8] * 9, VOCAB, 1)) for _ in range(3)]
    three = dict(zip(("draft", "middle", "target"), models, strict=True))
    generation = run(Request([1], 15, num_draft_tokens=4), three)
    assert generation.acceptance.histogram == [0, 0, 0, 0, 3]
    assert generation.draft_acceptance.rate == 1.0
    # three tokens of a pass of the middle model, then one
    assert [call.max_new_tokens for call in three["middle"].requests] == [3, 1] * 3


def test_a_cascade_of_four_models():
    three, fourth = engines(), TableEngine(table_model(VOCAB, 2))
    inner = Cascade(DraftModel(three["draft"]), three["middle"], 1)
    drafter = Cascade(inner, fourth, 2)
    request = Request([3, 4], 20, num_draft_tokens=4)
    *_, last = generate(request, drafter, Target(three["target"]))
    assert last.generation.token_ids.tolist() == plain(request).token_ids.tolist()
    assert all(engine.requests for engine in (*three.values(), fourth))


# ---- the table of methods


def drafting(three, **returns_logits):
    return {role: DraftEngine(three[role], returns_logits=returns_logits.get(role, True)) for role in three}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_targets_text(method):
    three = engines()
    request = Request([3, 4], 20, num_draft_tokens=3)
    *_, last = generate(request, make_drafter(method, drafting(three)), Target(three["target"]))
    assert last.generation.token_ids.tolist() == plain(request).token_ids.tolist()
    used = {role for role in ("middle", "draft") if three[role].requests}
    assert used == set(METHODS[method].engines)
    assert last.generation.acceptance.num_drafted > 0


@pytest.mark.parametrize(
    ("method", "silent", "acceptance", "logits_at"),
    [
        ("draft_target", "draft", "auto", set()),
        ("draft_target", None, "auto", {"target"}),
        ("cascade", None, "auto", {"middle", "target"}),
        ("cascade", "draft", "auto", {"target"}),
        ("cascade", "draft", "logits", {"target"}),
        ("cascade", "middle", "auto", set()),
        ("cascade", None, "tokens", set()),
        ("ngram", None, "auto", set()),
    ],
)
def test_logits_are_sent_where_what_proposes_has_some(method, silent, acceptance, logits_at):
    three = engines()
    usable = drafting(three, **({silent: False} if silent else {}))
    request = Request([3, 4, 3, 4], 12, sampling=FULL, num_draft_tokens=3)
    *_, last = generate(request, make_drafter(method, usable, acceptance), Target(three["target"]))
    assert last.generation.draft_error is None
    for role in ("middle", "target"):
        verified = [call for call in three[role].requests if call.draft_tokens is not None]
        assert all((call.draft_logits is not None) == (role in logits_at) for call in verified)
        assert verified or (role, method) in {("middle", "draft_target"), ("middle", "ngram")}


def test_each_level_of_four_models_is_judged_by_what_its_own_engines_return():
    """What the caller wants of the target is no reason to fail below; an error names the engine that it comes from."""
    request = Request([3, 4, 3, 4], 20, sampling=FULL, num_draft_tokens=4)

    def run(**options):
        three = engines()
        four = three | {"middle_2": TableEngine(table_model(VOCAB, 2))}
        drafter = make_drafter("cascade", drafting(four, **options), "logits", num_draft_tokens=3)
        *_, last = generate(request, drafter, Target(three["target"]))
        verified = {
            role: {call.draft_logits is not None for call in engine.requests if call.draft_tokens is not None}
            for role, engine in four.items()
        }
        return last.generation.draft_error, verified

    assert run() == (None, {"target": {True}, "middle": {True}, "middle_2": {True}, "draft": set()})
    assert run(middle_2=False) == (None, {"target": {True}, "middle": {False}, "middle_2": {False}, "draft": set()})

    four = drafting(engines() | {"middle_2": lambda call: EngineResult(np.arange(9, dtype=np.int32))})
    *_, last = generate(request, make_drafter("cascade", four), Target(engines()["target"]))
    assert "the middle_2 engine returned ids of shape [9]" in str(last.generation.draft_error)


def test_the_context_of_each_engine_limits_its_own_level():
    three = engines()
    usable = {"draft": DraftEngine(three["draft"], context=9), "middle": DraftEngine(three["middle"], context=16)}
    assert METHODS["cascade"].draft_context(usable) == 16
    assert METHODS["draft_target"].draft_context(usable) == 9
    assert METHODS["ngram"].draft_context(usable) is None
    request = Request([3, 4], 20, num_draft_tokens=3, draft_context=16)
    *_, last = generate(request, make_drafter("cascade", usable), Target(three["target"]))
    assert last.generation.draft_error is None
    assert max(call.input_ids.size + call.max_new_tokens for call in three["draft"].requests) == 9
    assert max(call.input_ids.size + call.max_new_tokens for call in three["middle"].requests) == 16


def test_settings_of_a_method():
    three = engines()
    make_drafter("ngram", {}, max_ngram=2, window=5)
    with pytest.raises(ValueError, match="max_ngram"):
        make_drafter("ngram", {}, max_ngram=0)
    drafter = make_drafter("cascade", drafting(three), num_draft_tokens=1)
    *_, _last = generate(Request([3, 4], 20, num_draft_tokens=4), drafter, Target(three["target"]))
    assert {len(call.draft_tokens) for call in three["middle"].requests if call.draft_tokens is not None} == {1}


def test_settings_have_the_names_and_defaults_of_the_spec():
    from trtspec.spec.schema import Cascade as CascadeSection
    from trtspec.spec.schema import ModelRef, Ngram

    assert METHODS["ngram"].chosen(Ngram()) == {"max_ngram": 3}
    assert METHODS["ngram"].chosen(Ngram(max_ngram=2, window=64)) == {"max_ngram": 2, "window": 64}
    section = CascadeSection(middle=ModelRef(model="m"))
    assert METHODS["cascade"].chosen(section) == {"num_draft_tokens": 3}
    assert METHODS["draft_target"].chosen(None) == {}
    text = [1, 2, 3, 4, 0, 9, 9, 3, 4, 8, 1, 2, 3, 4]
    generation = next(generate(Request(text, 1), None, Target(engines()["target"]))).generation
    by_spec = make_drafter("ngram", {}, **METHODS["ngram"].chosen(Ngram()))
    assert (
        by_spec.propose(generation, 2).tokens.tolist()
        == make_drafter("ngram", {}).propose(generation, 2).tokens.tolist()
    )
