"""Every method can fall back to plain decoding, for a cycle or for good, without a wrong token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decoding_doubles import TableEngine, table_model

from trtspec.decoding.cycle import Request, generate
from trtspec.decoding.draft_target import Target
from trtspec.decoding.engine_call import one_by_one
from trtspec.decoding.methods import DRAFTS, METHODS, MIDDLES, DraftEngine, make_chain_verifier, make_drafter
from trtspec.decoding.sampling import SamplingParams

TARGET = table_model(6, 40)
SETTINGS = {"tree": {"branching": (2, 1)}, "cascade": {"num_draft_tokens": 2}}
SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.9, top_k=4, top_p=0.9, seed=7)]
ROLES = (*MIDDLES[:2], *DRAFTS[:2])
METHODS_AND_ROLES = [(method, role) for method, row in METHODS.items() if row.engines for role in row.roles(ROLES)]


def engines(fails=lambda role, number: None, contexts=None) -> dict[str, DraftEngine]:
    """A draft engine for every role; each agrees with the target now and then."""
    made = {}
    for place, role in enumerate(ROLES):
        own = table_model(6, place, scale=1.0)
        model = lambda context, own=own: own(context) + TARGET(context)  # noqa: E731
        call = TableEngine(model, fails=lambda number, role=role: fails(role, number))
        made[role] = DraftEngine(call, (contexts or {}).get(role))
    return made


def drafted(method: str, request: Request, made: dict[str, DraftEngine], *, over_chains: bool):
    """The generation by ids: then the random numbers are those of plain decoding, and so must the text be."""
    call = TableEngine(TARGET)
    verifier = make_chain_verifier(method, call, one_by_one(call)) if over_chains else Target(call)
    request = replace(request, draft_context=METHODS[method].draft_context(made))
    drafter = make_drafter(method, made, "tokens", **SETTINGS.get(method, {}))
    *_, last = generate(request, drafter, verifier)
    assert last.finish_reason == "length"
    return last.generation


def plain_ids(request: Request) -> list[int]:
    *_, last = generate(replace(request, num_draft_tokens=0), None, Target(TableEngine(TARGET)))
    return last.generation.token_ids.tolist()


def request_of(sampling: SamplingParams, **fields) -> Request:
    return Request([1, 2, 3], 30, sampling=sampling, num_draft_tokens=4, **fields)


@pytest.mark.parametrize("over_chains", [False, True], ids=["engine of trees", "engine of chains"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_text_of_every_method_is_the_text_without(method, sampling, over_chains) -> None:
    request = request_of(sampling)
    generation = drafted(method, request, engines(), over_chains=over_chains)
    assert generation.token_ids.tolist() == plain_ids(request)
    assert generation.acceptance.num_accepted > 0 and generation.draft_error is None


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("first", [1, 2, 5])
@pytest.mark.parametrize("for_good", [True, False], ids=["for good", "once"])
@pytest.mark.parametrize(("method", "role"), METHODS_AND_ROLES)
def test_an_engine_that_is_down_changes_no_token(method, role, for_good, first, sampling) -> None:
    def fails(broken: str, number: int) -> Exception | None:
        down = broken == role and (number >= first if for_good else number == first)
        return RuntimeError("down") if down else None

    request = request_of(sampling)
    generation = drafted(method, request, engines(fails), over_chains=True)
    assert generation.token_ids.tolist() == plain_ids(request)
    assert "down" in str(generation.draft_error) or "is left alone" in str(generation.draft_error)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("context", range(3, 12, 2))
@pytest.mark.parametrize(("method", "role"), METHODS_AND_ROLES)
def test_the_end_of_an_engines_context_changes_no_token(method, role, context, sampling) -> None:
    request, made = request_of(sampling), engines(contexts={role: context})
    generation = drafted(method, request, made, over_chains=True)
    assert generation.token_ids.tolist() == plain_ids(request)
    assert generation.draft_error is None
    longest = max((len(call.input_ids) + call.max_new_tokens for call in made[role].call.requests), default=0)
    assert longest <= context + 1  # the last token of a call is not read


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("room", range(4, 14, 3))
@pytest.mark.parametrize("method", METHODS)
def test_the_end_of_the_targets_context_ends_every_method_alike(method, room, sampling) -> None:
    request = request_of(sampling, target_context=room)
    generation = drafted(method, request, engines(), over_chains=True)
    assert generation.token_ids.tolist() == plain_ids(request) and generation.num_generated == room - 3


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_a_look_up_that_finds_nothing_changes_no_token(sampling) -> None:
    request = replace(request_of(sampling), max_tokens=2)  # three different ids, so nothing comes back
    generation = drafted("ngram", request, {}, over_chains=True)
    assert generation.token_ids.tolist() == plain_ids(request)
    assert generation.fallbacks["draft_empty"] > 0
