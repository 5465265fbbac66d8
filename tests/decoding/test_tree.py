"""The method `tree`: what is proposed, and trees over a target that takes chains only.

How sampled outputs are distributed is in test_law.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decoding_doubles import Choices, TableEngine, exact_law, script_model, table_model

from trtspec.decoding.cycle import Request, generate
from trtspec.decoding.draft_target import Target
from trtspec.decoding.engine_call import EngineRequest, one_by_one
from trtspec.decoding.generation import Generation
from trtspec.decoding.methods import (
    METHODS,
    DraftEngine,
    calls_at_a_time,
    make_chain_verifier,
    make_drafter,
    written,
)
from trtspec.decoding.sampling import SamplingParams
from trtspec.decoding.token_tree import ROOT, TokenTree
from trtspec.decoding.tree import MergedTrees, PathsTarget, TreeDrafter, in_one_pass, side_by_side, tree_shape
from trtspec.decoding.verify import NO_PROPOSAL, Proposal

SAMPLED = SamplingParams(temperature=1.1, top_p=0.9, seed=3)
BRANCHINGS = [(1, 1, 1), (3,), (2, 2, 1), (1, 3), (3, 1, 2)]


def num_nodes(branching: tuple[int, ...]) -> int:
    return int(np.cumprod(branching).sum())


def proposal_of(node_logits, request: Request, branching=(2, 2), acceptance="auto", **options) -> Proposal:
    generation = Generation(replace(request, num_draft_tokens=num_nodes(branching)))
    return TreeDrafter(node_logits, branching, acceptance, **options).propose(generation, len(branching))


def finish(request: Request, drafter, verifier) -> Generation:
    *_, last = generate(request, drafter, verifier)
    return last.generation


# ---- growing


def test_the_shape_of_a_tree() -> None:
    whole = tree_shape((2, 2, 1), 10)
    assert (whole.tokens.tolist(), whole.parents.tolist()) == (
        [0, 1, 0, 1, 0, 1, 0, 0, 0, 0],
        [-1, -1, 0, 0, 1, 1, 2, 3, 4, 5],
    )


def test_a_smaller_tree_keeps_the_likeliest_paths() -> None:
    """First the chain of likeliest tokens, then what is one rank away from it; always with all nodes above."""
    assert tree_shape((2, 2, 1), 3).paths() == [[0, 1, 2]]
    assert tree_shape((2, 2, 1), 4).paths() == [[1], [0, 2, 3]]
    for size in range(1, 11):
        smaller = tree_shape((2, 2, 1), size)
        assert len(smaller) == size
        assert all(smaller.tokens[smaller.children(node)].tolist()[0] == 0 for node in smaller.parents.tolist())


@pytest.mark.parametrize("branching", BRANCHINGS, ids=str)
def test_chosen_children_are_the_likeliest_tokens(branching) -> None:
    model = table_model(8, seed=2)
    proposal = proposal_of(in_one_pass(TableEngine(model)), Request([1, 2], 30), branching)
    tree = TokenTree(proposal.tokens, proposal.parents)
    assert proposal.logits is None and len(tree) == num_nodes(branching)
    for node in (ROOT, *range(len(tree))):
        text = (1, 2, *tree.tokens[tree.path(node)].tolist())
        depth = len(text) - 2
        expected = np.argsort(-model(text))[: branching[depth] if depth < len(branching) else 0]
        assert tree.tokens[tree.children(node)].tolist() == expected.tolist()


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("branching", BRANCHINGS, ids=str)
def test_a_draft_of_chains_grows_the_same_tree(branching, sampling) -> None:
    request = Request([1, 2], 30, sampling=sampling)
    model = table_model(8, seed=2)
    whole, single = TableEngine(model), TableEngine(model)
    a = proposal_of(in_one_pass(whole), request, branching)
    b = proposal_of(side_by_side(one_by_one(single)), request, branching)
    assert a.tokens.tolist() == b.tokens.tolist() and a.parents.tolist() == b.parents.tolist()
    assert (a.logits is None) == (b.logits is None) == sampling.greedy
    if a.logits is not None:
        np.testing.assert_array_equal(a.logits, b.logits)
    assert len(whole.requests) == len(branching)
    assert all(call.draft_tokens is None for call in single.requests)
    if sampling.greedy:  # those of likeliest tokens come along
        assert len(single.requests) == np.prod(branching[:-1])


def test_a_level_of_a_draft_of_chains_is_asked_for_together() -> None:
    engine, rounds = TableEngine(table_model(8, seed=2)), []

    def calls(requests):
        rounds.append([(request.input_ids.tolist()[2:], request.max_new_tokens) for request in requests])
        return one_by_one(engine)(requests)

    node_logits = side_by_side(calls)
    proposal = proposal_of(node_logits, Request([1, 2], 30), (2, 2, 1))
    tree = TokenTree(proposal.tokens, proposal.parents)
    likeliest = tree.tokens[tree.path(6)].tolist()  # the first leaf
    second, third, fourth = (tree.tokens[tree.path(node)].tolist() for node in (1, 3, 5))
    assert likeliest[:1] == third[:1] and second == fourth[:1]
    assert rounds == [[([], 3)], [(second, 2)], [(third, 1), (fourth, 1)]]
    rounds.clear()
    proposal_of(node_logits, Request([5, 2], 30), (1,))
    assert rounds == [[([], 1)]]  # another context: nothing is known
    rounds.clear()
    drawn = proposal_of(node_logits, Request([1, 2], 30, sampling=SAMPLED), (2, 1))
    assert rounds == [[([], 1)], [([token], 1) for token in drawn.tokens[:2].tolist()]]


def test_drawn_siblings_differ_and_come_with_the_logits_of_their_parent() -> None:
    model = table_model(6, seed=4)
    seen = set()
    for seed in range(30):
        request = Request([1, 2], 30, sampling=replace(SAMPLED, seed=seed))
        proposal = proposal_of(in_one_pass(TableEngine(model)), request, (3, 2))
        tree = TokenTree(proposal.tokens, proposal.parents, proposal.logits)  # distinct, or it would raise
        for node in range(len(tree)):
            above = tree.tokens[tree.path(node)[:-1]].tolist()
            np.testing.assert_array_equal(tree.logits[node], model((1, 2, *above)))
        seen.add(tuple(proposal.tokens.tolist()))
    assert len(seen) > 20


def test_nothing_grows_behind_an_end_id() -> None:
    drafter = in_one_pass(TableEngine(script_model([4, 5, 6], 8, 1)))
    proposal = proposal_of(drafter, Request([1], 30, end_ids=(4,)), (1, 1, 1))
    assert proposal.tokens.tolist() == [4]
    banned = proposal_of(drafter, Request([1], 30, end_ids=(4,), min_tokens=3), (2, 1))
    assert 4 not in banned.tokens.tolist()


def test_children_that_cannot_be_drawn_are_left_out() -> None:
    """top_k leaves two tokens where three children were wanted."""
    request = Request([1], 30, sampling=SamplingParams(temperature=1.0, top_k=2))
    proposal = proposal_of(in_one_pass(TableEngine(table_model(8, 1))), request, (3, 3))
    assert len(TokenTree(proposal.tokens, proposal.parents).children(ROOT)) == 2
    assert len(proposal.tokens) == 2 + 4


def test_ids_that_the_target_does_not_know_are_not_proposed() -> None:
    node_logits = in_one_pass(TableEngine(script_model([7, 7], 8, 1)))
    assert proposal_of(node_logits, Request([1], 30), (1,)).tokens.tolist() == [7]
    assert proposal_of(node_logits, Request([1], 30), (3, 1), num_ids=7).tokens.max() < 7


@pytest.mark.parametrize("grow", [in_one_pass, lambda call: side_by_side(one_by_one(call))])
def test_a_draft_without_logits_leaves_the_target_alone(grow) -> None:
    draft = TableEngine(table_model(6, 1), has_generation_logits=False)
    target = TableEngine(table_model(6, 2))
    request = Request([1, 2], 12, num_draft_tokens=6)
    generation = finish(request, TreeDrafter(grow(draft), (2, 2)), Target(target))
    assert "returned no rows of generation logits, a token tree needs" in str(generation.draft_error)
    assert generation.token_ids.tolist() == finish(request, None, Target(target)).token_ids.tolist()


def test_a_tree_is_as_deep_as_the_answer_may_be_long_and_as_large_as_the_contexts() -> None:
    engine = TableEngine(model := table_model(8, 3))
    drafter = TreeDrafter(in_one_pass(engine), (2, 2, 2))
    asked = []

    class Recorded(Target):
        def verify(self, generation, proposal):
            asked.append((generation.num_generated, len(proposal.tokens), proposal.depth))
            return super().verify(generation, proposal)

    request = Request([1, 2], 6, num_draft_tokens=14)
    finish(request, drafter, Recorded(TableEngine(model)))  # every token of the draft is right
    assert asked == [(0, 14, 3), (4, 2, 1)]
    asked.clear()
    finish(replace(request, max_tokens=9, target_context=12, draft_context=9), drafter, Recorded(TableEngine(model)))
    assert asked == [(0, 7, 3), (4, 3, 3), (8, 0, 0)]


# ---- several draft models


def merged(models, branching=(1, 1), **options) -> MergedTrees:
    return MergedTrees([TreeDrafter(in_one_pass(TableEngine(model)), branching, **options) for model in models])


def test_what_two_drafts_find_likeliest_at_the_same_place_is_one_node() -> None:
    models = [script_model([4, 5, 6], 8, 1), script_model([4, 7, 6], 8, 1)]
    generation = Generation(Request([1], 30, num_draft_tokens=6))
    proposal = merged(models, (1, 1, 1)).propose(generation, 3)
    assert proposal.tokens.tolist() == [4, 5, 6, 7, 6] and proposal.parents.tolist() == [-1, 0, 1, 0, 3]
    same = merged([models[0]] * 2, (2, 1)).propose(Generation(Request([1], 30, num_draft_tokens=8)), 2)
    alone = proposal_of(in_one_pass(TableEngine(models[0])), Request([1], 30), (2, 1))
    assert same.tokens.tolist() == alone.tokens.tolist() and same.parents.tolist() == alone.parents.tolist()


def test_no_token_is_drawn_twice_at_the_same_place_and_each_comes_with_its_drafts_logits() -> None:
    models = [table_model(6, 4), table_model(6, 5)]
    for seed in range(30):
        generation = Generation(Request([1, 2], 30, sampling=replace(SAMPLED, seed=seed), num_draft_tokens=8))
        proposal = merged(models, (2, 1)).propose(generation, 2)
        tree = TokenTree(proposal.tokens, proposal.parents, proposal.logits)  # distinct, or it would raise
        assert len(tree) == 8 and len(tree.children(ROOT)) == 4
        for node in range(8):
            above = tree.tokens[tree.path(node)[:-1]].tolist()
            np.testing.assert_array_equal(tree.logits[node], models[node // 4]((1, 2, *above)))


def test_drafts_draw_with_random_numbers_of_their_own() -> None:
    """The same model twice, as roles: beyond the first token they do not go the same way."""
    engines = {role: DraftEngine(TableEngine(table_model(50, 4, scale=0.1))) for role in ("draft", "draft_2")}
    same = 0
    for seed in range(20):
        request = Request([1, 2], 30, sampling=SamplingParams(temperature=1.0, seed=seed), num_draft_tokens=6)
        drafter = make_drafter("tree", engines, branching=(1, 1, 1))
        tokens = drafter.propose(Generation(request), 3).tokens
        same += tokens[1] == tokens[4]
    assert same < 5


def test_the_room_is_divided_among_the_drafts() -> None:
    models = [script_model([4, 5, 6], 8, 1), script_model([7, 5, 6], 8, 1)]
    for room, tokens in ((1, [4]), (2, [4, 7]), (3, [4, 5, 7]), (5, [4, 5, 6, 7, 5])):
        proposal = merged(models, (1, 1, 1)).propose(Generation(Request([1], 30, num_draft_tokens=room)), 3)
        assert proposal.tokens.tolist() == tokens


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_that_fails_leaves_the_others_alone_and_is_given_up(sampling) -> None:
    models, target = [table_model(6, seed) for seed in (2, 3)], table_model(6, 3)
    request = Request([1, 2], 20, sampling=sampling, num_draft_tokens=4)
    for broken in (0, 1):
        calls = [
            TableEngine(model, fails=lambda number, bad=index == broken: RuntimeError("down") if bad else None)
            for index, model in enumerate(models)
        ]
        drafter = MergedTrees([TreeDrafter(in_one_pass(call), (1, 1)) for call in calls])
        generation = finish(request, drafter, Target(TableEngine(target)))
        assert str(generation.draft_error).endswith("2 times in a row and is left alone, the last time with: down")
        assert not generation.fallbacks and generation.acceptance.num_drafted > 8
        assert (len(calls[broken].requests), len(calls[1 - broken].requests) > 8) == (2, True)


def test_when_all_drafts_fail_the_target_goes_on_alone() -> None:
    request = Request([1, 2], 20, num_draft_tokens=4)
    calls = [TableEngine(table_model(6, 2), fails=lambda number: RuntimeError("down")) for _ in range(2)]
    drafter = MergedTrees([TreeDrafter(in_one_pass(call), (1, 1)) for call in calls])
    generation = finish(request, drafter, Target(TableEngine(table_model(6, 3))))
    assert (
        generation.token_ids.tolist()
        == finish(request, None, Target(TableEngine(table_model(6, 3)))).token_ids.tolist()
    )
    assert generation.fallbacks["draft_error"] == 2 and generation.fallbacks["draft_given_up"] > 0


def test_a_draft_that_fails_on_the_way_keeps_what_has_grown() -> None:
    engine = TableEngine(table_model(6, 2), fails=lambda number: RuntimeError("down") if number == 2 else None)
    generation = Generation(Request([1, 2], 20, num_draft_tokens=6))
    assert TreeDrafter(in_one_pass(engine), (2, 1)).propose(generation, 2).parents.tolist() == [ROOT, ROOT]
    assert str(generation.draft_error) == "down"


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("by_paths", [False, True], ids=["one pass", "path by path"])
def test_merged_trees_over_a_whole_answer(by_paths, sampling) -> None:
    """Greedy, and chosen children: the text of plain decoding; more is accepted than of one draft alone."""
    accepted = {1: 0, 2: 0}
    for seed in range(12):
        models, target = [table_model(6, seed + n) for n in (0, 100)], table_model(6, seed + 200)
        models.append(lambda context, a=models[0], b=target: a(context) + b(context))
        call = TableEngine(target)
        request = Request([1, 2], 16, sampling=replace(sampling, seed=seed), num_draft_tokens=6, end_ids=(0,))
        plain = finish(request, None, Target(call)).token_ids.tolist()
        for count in accepted:
            verifier = PathsTarget(call, one_by_one(call)) if by_paths else Target(call)
            drafter = merged([models[0], models[2]][:count], (1, 1, 1), acceptance="tokens")
            generation = finish(request, drafter, verifier)
            assert generation.token_ids.tolist() == plain and generation.draft_error is None
            accepted[count] += generation.acceptance.num_accepted
    assert 0 < accepted[1] < accepted[2]


# ---- over chains


def verifiers(model, **options):
    """A target that takes trees, and one that takes chains."""
    call = TableEngine(model, **options)
    return {"tree": Target(TableEngine(model, **options)), "chains": PathsTarget(call, one_by_one(call))}


@pytest.mark.parametrize("hides_end_id", [False, True], ids=["shows end id", "hides end id"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("branching", BRANCHINGS, ids=str)
def test_chains_say_what_the_tree_says_and_plain_decoding_too(branching, sampling, hides_end_id) -> None:
    """Children that were chosen: the same tokens from the same random numbers, block by block."""
    accepted = 0
    for seed in range(12):
        draft, model = table_model(6, seed, scale=1.0), table_model(6, seed + 50, scale=1.0)
        request = Request(
            [1, 2],
            14,
            min_tokens=2,
            sampling=replace(sampling, seed=seed),
            end_ids=(0, 5),
            bad_words=((3, 3),),
            num_draft_tokens=num_nodes(branching),
            return_log_probs=True,
        )
        plain = list(generate(request, None, verifiers(model, hides_end_id=hides_end_id)["tree"]))
        drafted = {}
        for name, verifier in verifiers(model, hides_end_id=hides_end_id).items():
            drafter = TreeDrafter(in_one_pass(TableEngine(draft)), branching, "tokens")
            drafted[name] = list(generate(request, drafter, verifier))
        tree, chains = drafted["tree"], drafted["chains"]
        assert [block.token_ids for block in tree] == [block.token_ids for block in chains]
        assert tree[-1].generation.acceptance == chains[-1].generation.acceptance
        assert tree[-1].generation.token_ids.tolist() == plain[-1].generation.token_ids.tolist()
        assert tree[-1].finish_reason == chains[-1].finish_reason == plain[-1].finish_reason
        values = [[value for block in blocks for value in block.log_probs] for blocks in (plain, tree, chains)]
        assert values[0] == values[1] == values[2]
        accepted += tree[-1].generation.acceptance.num_accepted
    assert accepted > 5


@pytest.mark.parametrize("hides_end_id", [False, True], ids=["shows end id", "hides end id"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("by", ["tree", "chains"])
@pytest.mark.parametrize("branching", BRANCHINGS, ids=str)
def test_the_logits_of_a_tree_are_those_of_its_accepted_path(branching, by, sampling, hides_end_id) -> None:
    accepted = []
    for seed in range(12):
        draft, model = table_model(6, seed, scale=1.0), table_model(6, seed + 50, scale=1.0)
        request = Request(
            [1, 2],
            14,
            min_tokens=6,
            sampling=replace(sampling, seed=seed),
            end_ids=(0, 5),
            num_draft_tokens=num_nodes(branching),
            return_generation_logits=True,
        )
        drafter = TreeDrafter(in_one_pass(TableEngine(draft)), branching, "tokens")
        blocks = list(generate(request, drafter, verifiers(model, hides_end_id=hides_end_id)[by]))
        ids = blocks[-1].generation.token_ids.tolist()
        assert all(block.logits.shape == (len(block.token_ids), 6) for block in blocks)
        rows = np.concatenate([block.logits for block in blocks])
        assert rows.tolist() == [model((1, 2, *ids[:i])).tolist() for i in range(len(ids))]
        accepted.append(blocks[-1].generation.acceptance.num_accepted)
    assert sum(accepted) > 5


def scripted(answers: dict[tuple[int, ...], list[int]]):
    """Calls of a target that answers each path as the test says, and what was asked."""
    asked: list[EngineRequest] = []

    def calls(requests):
        asked.extend(requests)
        engine = [TableEngine(script_model(answers[tuple(r.draft_tokens.tolist())], 9, 1)) for r in requests]
        return [call(request) for call, request in zip(engine, requests, strict=True)]

    return calls, asked


def verified(answers, paths, **fields):
    tree = TokenTree.from_choices({tuple(path[:depth]) for path in paths for depth in range(1, len(path) + 1)})
    calls, asked = scripted(answers)
    generation = Generation(Request([8], 20, **fields))
    verification = PathsTarget(TableEngine(table_model(9, 0)), calls).verify(
        generation, Proposal(tree.tokens, parents=tree.parents)
    )
    return verification, asked


def test_every_path_is_one_call_over_the_same_text() -> None:
    _, asked = verified({(1, 2): [0], (1, 3): [0], (4,): [0]}, [(1, 2), (1, 3), (4,)])
    assert sorted(request.draft_tokens.tolist() for request in asked) == [[1, 2], [1, 3], [4]]
    assert {request.max_new_tokens - len(request.draft_tokens) for request in asked} == {1}
    assert len({request.sampling.seed for request in asked}) == 1
    assert all(request.draft_parents is None and request.draft_logits is None for request in asked)


def test_an_own_token_leads_to_another_path_only_if_that_one_got_there() -> None:
    paths = [(1, 2, 3), (1, 5, 6), (1, 5, 7)]
    # the first call goes to 1 and then wants 5; the second drew the same, then wants 7; the third did too
    answers = {(1, 2, 3): [1, 5], (1, 5, 6): [1, 5, 7], (1, 5, 7): [1, 5, 7, 8]}
    verification, _ = verified(answers, paths)
    assert (verification.tokens, verification.num_accepted) == ((1, 5, 7, 8), 3)
    # the third drew something else before: what it would say behind 7 is not to be had
    verification, _ = verified(answers | {(1, 5, 7): [1, 4]}, paths)
    assert (verification.tokens, verification.num_accepted, verification.ended) == ((1, 5, 7), 2, False)
    # neither did the second
    verification, _ = verified(answers | {(1, 5, 6): [2], (1, 5, 7): [2]}, paths)
    assert (verification.tokens, verification.num_accepted, verification.ended) == ((1, 5), 1, False)


def test_a_longer_answer_of_another_path_is_not_taken() -> None:
    verification, _ = verified({(1, 2): [1, 4], (3, 5): [3, 5, 6]}, [(1, 2), (3, 5)])
    assert verification.tokens == (1, 4)


def test_trees_with_logits_are_refused_over_chains() -> None:
    target = TableEngine(table_model(4, 1))
    proposal = Proposal(np.array([1], np.int32), np.zeros((1, 4), np.float32), np.array([ROOT], np.int32))
    with pytest.raises(ValueError, match="accept by tokens"):
        PathsTarget(target, one_by_one(target)).verify(Generation(Request([1], 4)), proposal)


def test_a_target_of_chains_also_takes_chains_and_nothing() -> None:
    target = TableEngine(model := table_model(6, 1))
    verifier = PathsTarget(target, lambda requests: pytest.fail("a tree"))
    generation = Generation(Request([1], 8, num_draft_tokens=2))
    assert verifier.verify(generation, NO_PROPOSAL).tokens == (int(model((1,)).argmax()),)
    assert verifier.verify(generation, Proposal(np.array([2, 3], np.int32))).num_accepted <= 2
    assert len(target.requests) == 2


@pytest.mark.parametrize("seed", range(3))
def test_how_often_a_level_is_accepted(seed: int) -> None:
    """One drawn child: sum of min(p, q), as in a chain; more of them: more often. Chosen ones: their share of p."""
    draft, target = table_model(5, seed, scale=1.0), table_model(5, seed + 30, scale=1.0)
    p, q = (np.exp(model((1, 0))) / np.exp(model((1, 0))).sum() for model in (target, draft))

    def accepted(num_children: int, acceptance: str) -> float:
        def run(choices: Choices) -> int:
            request = Request([1, 0], 2, sampling=SamplingParams(temperature=1.0), num_draft_tokens=num_children)
            node_logits = in_one_pass(TableEngine(draft))
            drafter = TreeDrafter(node_logits, (num_children,), acceptance, uniforms=lambda seed: choices)
            generation = Generation(request)
            proposal = drafter.propose(generation, 1)
            return Target(TableEngine(target, uniforms=choices)).verify(generation, proposal).num_accepted

        return exact_law(run)[1]

    drawn = [accepted(count, "auto") for count in (1, 2, 3)]
    assert drawn[0] == pytest.approx(np.minimum(p, q).sum(), abs=1e-6)
    assert drawn[0] < drawn[1] < drawn[2] <= 1
    likeliest = np.argsort(-q)
    for count in (1, 2, 3):
        assert accepted(count, "tokens") == pytest.approx(p[likeliest[:count]].sum(), abs=1e-6)


# ---- the row of the method


def test_settings_as_text() -> None:
    row = METHODS["tree"]
    settings = row.chosen(type("Section", (), {"branching": (3, 2)}))
    assert settings == {"branching": (3, 2)}
    assert row.read({name: written(value) for name, value in settings.items()}) == settings
    assert row.read({"branching": "4"}) == {"branching": (4,)} and row.read({}) == {}
    assert METHODS["ngram"].read({"max_ngram": written(5), "else": "x"}) == {"max_ngram": 5}
    for text in ("", "2,", "0", "2,-1", "two"):
        with pytest.raises(ValueError, match=r"branching is .*; expected whole numbers"):
            row.read({"branching": text})


def test_calls_at_a_time() -> None:
    assert calls_at_a_time("tree", {"branching": (3, 2)}) == 6
    assert calls_at_a_time("tree", {}) == 4
    assert calls_at_a_time("tree", {"branching": (2, 1)}, num_drafts=3) == 6
    assert calls_at_a_time("none", {}) == calls_at_a_time("cascade", {"num_draft_tokens": 3}) == 1


def test_who_proposes_to_whom() -> None:
    engines = {role: DraftEngine(TableEngine(table_model(4, 1)), context) for role, context in ROLES.items()}
    assert METHODS["tree"].roles(engines) == METHODS["tree"].proposers(engines) == ("draft", "draft_2")
    assert METHODS["tree"].draft_context(engines) == 20
    assert METHODS["cascade"].roles(engines) == ("middle", "draft")
    assert METHODS["cascade"].proposers(engines) == ("middle",) and METHODS["cascade"].draft_context(engines) is None
    engines["middle_2"] = engines["middle"]
    assert METHODS["cascade"].pairs(engines) == (("target", "middle"), ("middle", "middle_2"), ("middle_2", "draft"))
    assert METHODS["cascade"].proposers(engines) == ("middle",)
    assert METHODS["tree"].pairs(engines) == (("target", "draft"), ("target", "draft_2"))
    assert METHODS["draft_target"].roles(engines) == ("draft",) and METHODS["ngram"].draft_context(engines) is None


ROLES = {"draft_2": 20, "draft": 30, "middle": None}


def test_only_the_method_tree_verifies_paths() -> None:
    call = TableEngine(table_model(4, 1))
    for method in ("none", *METHODS):
        verifier = make_chain_verifier(method, call, one_by_one(call))
        assert isinstance(verifier, PathsTarget) == (method == "tree")
