"""What a cycle takes, method by method, with times that show which passes were counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from trtspec.decoding.cycle import Generation, Request
from trtspec.decoding.engine_call import EngineRequest, EngineResult
from trtspec.decoding.tree import TreeDrafter, in_one_pass, side_by_side
from trtspec.errors import TrtspecError
from trtspec.plan.cycle_cost import CycleCost, cycle_seconds
from trtspec.plan.drafting import Drafting
from trtspec.plan.step_times import HEADS

Pass = tuple[str, int, int, int]  # role, batch, tokens, context


@dataclass
class Times:
    """Every pass takes seconds of its own, 7 + batch + tokens / 10 for the target and a hundredth for others."""

    asked: Counter[Pass] = field(default_factory=Counter)
    source = "made up"

    def seconds(self, role: str, batch: int, tokens: int, context: int) -> float:
        self.asked[role, batch, tokens, context] += 1
        return (7 + batch + tokens / 10) * (1.0 if role == "target" else 0.01)

    def overhead(self, batch: int) -> float:
        return 0.001 * batch


def cost(drafting: Drafting, passes: Mapping[str, float] | None = None, **more: object) -> CycleCost:
    return cycle_seconds(Times(), drafting, 4, 100, passes, **more)  # type: ignore[arg-type]


def seconds(role: str, tokens: int, batch: int = 4) -> float:
    return Times().seconds(role, batch, tokens, 100)


@pytest.mark.parametrize("drafting", [Drafting("none", 0, roles=()), Drafting("draft_target", 0)])
def test_plain_decoding_is_a_pass_without_overhead(drafting: Drafting) -> None:
    assert cost(drafting) == CycleCost(0.0, seconds("target", 1), 0.0)


@pytest.mark.parametrize("method", ["draft_target", "early_exit"])
def test_a_chain(method: str) -> None:
    made = cost(Drafting(method, 3))
    assert made == CycleCost(pytest.approx(3 * seconds("draft", 1)), seconds("target", 4), 0.004)  # type: ignore[arg-type]
    assert made.total == pytest.approx(made.draft_s + made.verify_s + 0.004)
    assert cost(Drafting(method, 3), {"draft": 2.5}).draft_s == pytest.approx(2.5 * seconds("draft", 1))


def test_an_early_exit_in_one_engine_runs_its_layers_once() -> None:
    """By hand: 8 layers of 1 s a token, 2 of them the exit's; a head of 2 s, run by the draft over its last token."""

    class Layers(Times):
        def seconds(self, role: str, batch: int, tokens: int, context: int) -> float:
            return 8.0 * tokens + 2.0 * tokens if role == "target" else 2.0 * tokens + 2.0

    def verify_s(shared: bool) -> float:
        return cycle_seconds(Layers(), Drafting("early_exit", 3), 1, 100, shared=shared).verify_s

    assert verify_s(shared=False) == 4 * 8 + 4 * 2  # an engine of its own
    assert verify_s(shared=True) == 4 * 6 + 1 * 2 + 4 * 2  # only the last draft token is new to the first layers


def test_ngram_drafts_in_no_time_and_not_always() -> None:
    drafting = Drafting("ngram", 4, roles=())
    assert cost(drafting) == CycleCost(0.0, seconds("target", 5), 0.004)
    quarter = cost(drafting, drafted=1.0)
    assert quarter.verify_s == pytest.approx(seconds("target", 5) / 4 + seconds("target", 1) * 3 / 4)
    assert quarter.overhead_s == pytest.approx(0.001)
    assert cost(drafting, drafted=0.0).total == cost(Drafting("none", 0)).total


def test_a_cascade() -> None:
    """The models in between verify, the last one drafts: here so often that 2.5 of 2.6 passes have all 3 drafts."""
    passes = {"middle": 1.8, "middle_2": 2.6, "draft": 7.5}
    drafting = Drafting("cascade", 4, inner=3, roles=("middle", "middle_2", "draft"))
    expected = 1.8 * seconds("middle", 4) + 7.5 * seconds("draft", 1)
    expected += 2.5 * seconds("middle_2", 4) + 0.1 * seconds("middle_2", 1)
    made = cost(drafting, passes)
    assert (made.draft_s, made.verify_s) == (pytest.approx(expected), seconds("target", 5))


def test_passes_of_a_cascade_without_room_for_drafts_are_plain() -> None:
    """4 tokens to the target, of which the middle model makes the last one without a draft."""
    drafting = Drafting("cascade", 4, inner=3, roles=("middle", "draft"))
    made = cost(drafting, {"middle": 2.0, "draft": 3.0})
    assert made.draft_s == pytest.approx(seconds("middle", 4) + seconds("middle", 1) + 3 * seconds("draft", 1))


@pytest.mark.parametrize("passes", [None, {"draft": 3.0}])
def test_a_cascade_without_acceptance_is_not_guessed(passes: Mapping[str, float] | None) -> None:
    with pytest.raises(TrtspecError, match=r"how often the middle of a cascade runs .* trtspec bench acceptance"):
        cost(Drafting("cascade", 4, inner=3, roles=("middle", "draft")), passes)


def test_medusa_runs_its_heads_once_and_modules_run_once_a_token() -> None:
    choices = ((0,), (1,), (0, 0))
    made = cost(Drafting("medusa", 3, choices=choices, roles=()))
    assert made == CycleCost(seconds(HEADS, 1), seconds("target", 4), 0.004)
    half = cost(Drafting("medusa", 3, choices=choices, roles=()), drafted=1.5)  # some trees are cut
    assert half.total == pytest.approx((made.total + seconds("target", 1)) / 2)
    made = cost(Drafting("mtp", 2, roles=()))
    assert made == CycleCost(2 * seconds(HEADS, 1), seconds("target", 3), 0.004)


def test_a_tree_in_one_pass_a_level() -> None:
    """2 x 2 x 1: the draft reads the last token, then 2 nodes more, then 4 more; the target all 10."""
    made = cost(Drafting("tree", 10, branching=(2, 2, 1)))
    assert made.draft_s == pytest.approx(sum(seconds("draft", tokens) for tokens in (1, 3, 7)))
    assert made.verify_s == seconds("target", 11)


def test_a_tree_call_by_call_and_path_by_path() -> None:
    """2 x 2 x 1, greedy: a call of three steps; one of two for the second child; two of one, side by side."""
    made = cost(Drafting("tree", 10, branching=(2, 2, 1)), engine_track=True)
    steps = [3 * seconds("draft", 1), 2 * seconds("draft", 1), seconds("draft", 1, batch=8)]
    assert made.draft_s == pytest.approx(sum(steps))
    assert made.verify_s == seconds("target", 4, batch=4 * 4)


def test_trees_of_two_drafts_share_the_nodes() -> None:
    both = cost(Drafting("tree", 12, branching=(2, 2), roles=("draft", "draft_2")))
    steps = [seconds(role, tokens) for role in ("draft", "draft_2") for tokens in (1, 3)]
    assert (both.draft_s, both.verify_s) == (pytest.approx(sum(steps)), seconds("target", 13))
    paths = cost(Drafting("tree", 12, branching=(2, 2), roles=("draft", "draft_2")), engine_track=True)
    assert paths.verify_s == seconds("target", 3, batch=4 * 8)
    # Of 11 nodes the first draft has 6 with 4 paths, the second 5 with 3.
    odd = cost(Drafting("tree", 11, branching=(2, 2), roles=("draft", "draft_2")), engine_track=True)
    assert odd.verify_s == seconds("target", 3, batch=4 * 7)


def test_a_tree_that_is_a_chain_costs_what_a_chain_costs() -> None:
    tree = cost(Drafting("tree", 3, branching=(1, 1, 1)), engine_track=True)
    assert tree == pytest.approx(cost(Drafting("draft_target", 3)))


def test_a_method_that_is_not_modelled_says_so() -> None:
    with pytest.raises(TrtspecError, match="the cost of method eagle is not modelled; measure it"):
        cost(Drafting("eagle", 4))


class Engine:
    """Greedy over 11 tokens by an arbitrary rule; counts its calls as passes of a cycle."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []  # new tokens of a call, draft tokens that it was given

    def __call__(self, request: EngineRequest) -> EngineResult:
        drafts = request.draft_tokens.tolist() if request.draft_tokens is not None else []
        self.asked.append((request.max_new_tokens, len(drafts)))
        text, rows = request.input_ids.tolist(), []
        if request.draft_parents is not None:
            paths = {-1: text}
            for node, (token, parent) in enumerate(zip(drafts, request.draft_parents.tolist(), strict=True)):
                paths[node] = [*paths[parent], token]
            rows = [self.row(path) for path in paths.values()]
        else:
            for _ in range(request.max_new_tokens):
                rows.append(self.row(text))
                text = [*text, int(rows[-1].argmax())]
        ids = np.array([row.argmax() for row in rows], dtype=np.int32)
        return EngineResult(ids, np.stack(rows))

    @staticmethod
    def row(text: list[int]) -> np.ndarray:
        return np.random.default_rng([len(text), text[-1]]).normal(size=11).astype(np.float32)


@pytest.mark.parametrize(
    ("branching", "nodes"),
    [((2, 2, 1), 10), ((3, 2), 9), ((1, 3, 2), 10), ((2, 1, 1, 2), 10), ((2, 2), 4), ((3, 2, 2), 9), ((2, 2, 2), 6)],
)
def test_the_calls_are_those_that_the_drafter_makes(branching: tuple[int, ...], nodes: int) -> None:
    """A real drafter grows a tree, whole or cut to fewer nodes, with an engine that counts; steps of calls side by side
    are one pass."""
    drafting = Drafting("tree", nodes, branching=branching)

    def grown(engine_track: bool) -> tuple[Engine, list[list[tuple[int, int]]]]:
        engine, rounds = Engine(), []

        def together(requests: list[EngineRequest]) -> list[EngineResult]:
            before = len(engine.asked)
            results = [engine(request) for request in requests]
            rounds.append(engine.asked[before:])
            return results

        node_logits = side_by_side(together) if engine_track else in_one_pass(engine)
        request = Request(prompt_ids=np.array([1, 2, 3], dtype=np.int32), max_tokens=nodes + 2, num_draft_tokens=nodes)
        TreeDrafter(node_logits, branching).grow(Generation(request), len(branching), nodes)
        return engine, rounds

    times = Times()
    cycle_seconds(times, drafting, 1, 100, engine_track=False)
    passes = [(role, tokens) for role, _, tokens, _ in times.asked.elements() if role == "draft"]
    engine, _ = grown(engine_track=False)
    assert passes == [("draft", drafts + 1) for _, drafts in engine.asked]

    _, rounds = grown(engine_track=True)
    steps = sum(calls[0][0] * Times().seconds("draft", len(calls), 1, 100) for calls in rounds)
    assert cycle_seconds(Times(), drafting, 1, 100, engine_track=True).draft_s == pytest.approx(steps)
