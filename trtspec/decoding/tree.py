"""Token trees from draft models (Miao et al. 2024, SpecInfer): grown level by level, verified as one or path by path.

`TreeDrafter` grows one, `MergedTrees` makes one of those of several draft models; `Target` verifies them with an engine
that takes trees, `PathsTarget` with one that takes chains only. Knows engines by their calls alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from .cycle import Generation, Proposal
from .draft_target import AcceptanceMode, Target, checked_ids, checked_log_probs, checked_logits, engine_request
from .engine_call import Cancelled, EngineCall, EngineCalls, EngineError, EngineRequest, EngineResult
from .request import Request
from .sampler import TokenSampler
from .sampling import Uniforms, derive_seed
from .token_tree import ROOT, TokenTree, without
from .verify import NO_PROPOSAL, Verification

BRANCHING = (2, 2, 1)  # children of each node, level by level, where nobody says otherwise
_MAX_DRAFT_ERRORS = 2  # in a row; each may have cost a whole time-out

NodeLogits = Callable[[NDArray[np.int32], TokenTree, Sequence[int], int], Sequence[NDArray[np.float32]]]
"""The draft model's logits [V] after each of some nodes (or ROOT) of a tree that follows a context [L].

The last argument says how many levels may be asked for from there on with the likeliest tokens: 1, if these only.
"""


def tree_shape(branching: Sequence[int], num_nodes: int) -> TokenTree:
    """The tree with `branching[i]` children of each node of level i, or what matters most of it in `num_nodes` nodes.

    A path counts for less with every rank by which it misses the likeliest child, so what is left in the end is the
    chain of likeliest tokens. Its `tokens` are ranks, as in `TokenTree.from_choices`.
    """
    levels = range(1, len(branching) + 1)
    paths = [path for depth in levels for path in product(*(range(children) for children in branching[:depth]))]
    return TokenTree.from_choices(sorted(paths, key=lambda path: (sum(path), len(path), path))[:num_nodes])


class TreeDrafter:
    """Drafter: the continuations that a draft model finds likeliest, or draws.

    Args:
        node_logits: the draft model, see `in_one_pass` and `side_by_side`.
        branching: children of each node, level by level. Where there is less room the tree is smaller, see
            `tree_shape`; which nodes are left does not depend on what was drawn.
        acceptance: `tokens`: children are the likeliest tokens, and only ids are proposed. `logits` and `auto`: sampled
            requests draw them, without replacement, and propose the logits along.
        num_ids: ids that the target knows; None for those of the draft.
        role: name of the draft model; each has random numbers of its own.
        uniforms: from a seed to random numbers.
    """

    def __init__(
        self,
        node_logits: NodeLogits,
        branching: Sequence[int] = BRANCHING,
        acceptance: AcceptanceMode = "auto",
        *,
        num_ids: int | None = None,
        role: str = "draft",
        uniforms: Callable[[int], Uniforms] = Uniforms,
    ) -> None:
        self._node_logits = node_logits
        self._branching = tuple(branching)
        self._acceptance = acceptance
        self._num_ids = num_ids
        self._role = role
        self._uniforms = uniforms
        self._num_errors = 0  # in a row
        self._error: Exception | None = None  # the last of them

    def propose(self, generation: Generation, num_draft_tokens: int) -> Proposal:
        """Grow a tree of up to `num_draft_tokens` levels and `generation.node_room` nodes."""
        return _proposal(self.grow(generation, num_draft_tokens, generation.node_room))

    def grow(self, generation: Generation, num_levels: int, num_nodes: int, taken: Collection[int] = ()) -> TokenTree:
        """A tree, level by level, with logits when its tokens were drawn.

        When the draft model fails on the way, what has grown until then stands: how often it is called depends on what
        was drawn, and a proposal that is thrown away because of its tokens is no longer distributed as it says.

        Args:
            generation: what it continues.
            num_levels: most tokens that follow each other; 1 or more.
            num_nodes: most nodes; 1 or more.
            taken: first tokens that another draft model has drawn for the same place.

        Raises:
            EngineError: the draft model failed twice in a row and is not asked any more.
        """
        if self._num_errors >= _MAX_DRAFT_ERRORS:
            raise EngineError(
                f"the {self._role} engine failed {self._num_errors} times in a row and is left alone, the last time "
                f"with: {self._error}"
            )
        sampling, end_ids = generation.request.sampling, generation.request.end_ids
        drawn = not sampling.greedy and self._acceptance != "tokens"
        seed = derive_seed(sampling.seed, 0, f"{self._role} from {len(generation.context)}")  # see DraftModel
        # The rule that the target's call goes by: what is drawn here is judged there as drawn from that.
        rule = engine_request(generation, num_levels + 1, sampling.seeded(seed))
        uniforms = self._uniforms(seed)
        shape = tree_shape(self._branching[:num_levels], num_nodes)
        tree = TokenTree(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))
        logits: list[NDArray[np.float32]] = []  # one row a node
        places = {ROOT: ROOT}  # node of the shape -> node of the tree
        parents = [ROOT]  # nodes of the shape
        levels = int(shape.depths().max()) + 1
        while parents:
            generation.raise_if_cancelled()
            nodes = [places[parent] for parent in parents]
            try:
                rows = self._node_logits(rule.input_ids, tree, nodes, 1 if drawn else levels)
            except Cancelled:
                raise
            except Exception as error:
                self._num_errors, self._error = self._num_errors + 1, error
                if not len(tree):
                    raise
                generation.draft_error = error
                break
            levels -= 1
            tokens, above = tree.tokens.tolist(), tree.parents.tolist()
            grown = []
            for parent, whole_row in zip(parents, rows, strict=True):
                row = whole_row[: self._num_ids]
                sampler = TokenSampler(rule, uniforms)
                for token in tree.tokens[tree.path(places[parent])].tolist():
                    sampler.append(token)
                children = shape.children(parent)
                if drawn:
                    gone = taken if parent == ROOT else ()
                    chosen = _without_replacement(sampler, row, len(children), len(tokens), gone)
                else:
                    chosen = sampler.likeliest(row, len(children))
                for child, token in zip(children, chosen, strict=False):
                    places[child] = len(tokens)
                    tokens.append(token)
                    above.append(places[parent])
                    logits.append(row)
                    if token not in end_ids and shape.children(child):
                        grown.append(child)
            tree, parents = TokenTree(np.array(tokens, np.int32), np.array(above, np.int32)), grown
        else:
            self._num_errors = 0
        return replace(tree, logits=np.array(logits, dtype=np.float32)) if drawn and len(tree) else tree

    def learn(self, verification: Verification) -> None:
        """Nothing: the engine finds the common beginning of the next context by itself."""


class MergedTrees:
    """Drafter: the trees of several draft models as one (SpecInfer, merge-based).

    Chosen children: what two models find likeliest at the same place is one node. Drawn ones: each model draws its
    first tokens from what the models before it left, so that no node is drawn twice, and goes on below them alone.
    A model that fails leaves the others alone; when none is left, that is an error of this drafter.

    Args:
        drafters: one for each draft model; the nodes that there is room for are divided among them evenly.
    """

    def __init__(self, drafters: Sequence[TreeDrafter]) -> None:
        self._drafters = tuple(drafters)

    def propose(self, generation: Generation, num_draft_tokens: int) -> Proposal:
        """Grow a tree with each draft model, of up to `generation.node_room` nodes together, and merge them."""
        nodes_each, rest = divmod(generation.node_room, len(self._drafters))
        trees: list[TokenTree] = []
        taken: set[int] = set()
        failed: Exception | None = None
        for index, drafter in enumerate(self._drafters):
            if (num_nodes := nodes_each + (index < rest)) == 0:
                continue
            try:
                tree = drafter.grow(generation, num_draft_tokens, num_nodes, taken)
            except Cancelled:
                raise
            except Exception as error:
                failed = error
                continue
            trees.append(tree)
            taken.update(tree.tokens[tree.children(ROOT)].tolist())
        if failed is not None:
            if not trees:
                raise failed
            generation.draft_error = failed
        merged = TokenTree.merged(trees)
        drawn = [tree.logits for tree in trees if tree.logits is not None]
        return _proposal(replace(merged, logits=_stacked(drawn)) if drawn else merged)

    def learn(self, verification: Verification) -> None:
        """Nothing, as in `TreeDrafter`."""


def _proposal(tree: TokenTree) -> Proposal:
    return Proposal(tree.tokens, tree.logits, tree.parents) if len(tree) else NO_PROPOSAL


def _stacked(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Rows [n, V] below each other; a smaller vocabulary has no probability beyond its own."""
    size = max(part.shape[1] for part in parts)
    return np.concatenate(
        [np.pad(part, ((0, 0), (0, size - part.shape[1])), constant_values=-np.inf) for part in parts]
    )


def _without_replacement(
    sampler: TokenSampler, row: NDArray[np.float32], count: int, first: int, taken: Collection[int]
) -> list[int]:
    """Up to `count` different tokens for nodes `first`, `first` + 1, ..., as many as there are of some probability
    beside those that are `taken`."""
    q: NDArray[np.float64] = without(sampler.probabilities(row), *taken)
    chosen: list[int] = []
    for node in range(first, first + count):
        if not q.any():
            break
        token = sampler.uniforms.draw(node, q)  # each node has a random number of its own
        chosen.append(token)
        q = without(q, token)
    return chosen


def in_one_pass(call: EngineCall) -> NodeLogits:
    """A draft engine that takes trees: the nodes that are there already are fed again with each level."""

    def node_logits(
        context: NDArray[np.int32], tree: TokenTree, nodes: Sequence[int], levels: int
    ) -> list[NDArray[np.float32]]:
        request = EngineRequest(context, len(tree) + 1, return_generation_logits=True)
        if len(tree):
            request = replace(request, draft_tokens=tree.tokens, draft_parents=tree.parents)
        rows = _rows(call(request), len(tree) + 1)
        return [rows[node + 1] for node in nodes]

    return node_logits


def side_by_side(calls: EngineCalls) -> NodeLogits:
    """A draft engine that takes chains only: calls for the nodes of a level, over the prefix that they share.

    Each call goes on to the last level with the likeliest tokens, since these are nodes too: in the end there was one
    for each node of the last level but one, not one for each node that has children. Serves one generation.
    """
    known: dict[tuple[int, ...], NDArray[np.float32]] = {}  # tokens between the context and what the logits are for

    def node_logits(
        context: NDArray[np.int32], tree: TokenTree, nodes: Sequence[int], levels: int
    ) -> list[NDArray[np.float32]]:
        if not len(tree):
            known.clear()
        paths = [tuple(tree.tokens[tree.path(node)].tolist()) for node in nodes]
        if unknown := [path for path in paths if path not in known]:
            texts = [np.concatenate([context, np.array(path, dtype=np.int32)]) for path in unknown]
            results = calls([EngineRequest(text, levels, return_generation_logits=True) for text in texts])
            for path, result in zip(unknown, results, strict=True):
                tokens = checked_ids(result, levels, "draft").tolist()
                known.update(((*path, *tokens[:i]), row) for i, row in enumerate(_rows(result, levels)))
        return [known[path] for path in paths]

    return node_logits


def _rows(result: EngineResult, count: int) -> NDArray[np.float32]:
    rows = result.generation_logits
    if rows is None or len(rows) != count:
        found = "no" if rows is None else len(rows)
        raise EngineError(
            f"the draft engine returned {found} rows of generation logits, a token tree needs {count};"
            " build it with generation logits"
        )
    return rows


class PathsTarget(Target):
    """Verifier: a target that takes chains only. The paths of a tree go to it side by side, accepted by equality.

    Args:
        call: the target engine.
        calls: the same for several calls at a time.
    """

    def __init__(self, call: EngineCall, calls: EngineCalls) -> None:
        super().__init__(call)
        self._calls = calls

    def verify(self, generation: Generation, proposal: Proposal) -> Verification:
        """One call for each path from the context to a leaf; for a chain, or without a proposal, as `Target`.

        Raises:
            ValueError: a tree with logits; accepting one path by them says nothing about the others.
        """
        if proposal.parents is None:
            return super().verify(generation, proposal)
        if proposal.logits is not None:
            raise ValueError("a token tree with logits cannot be verified path by path; accept by tokens")
        tree, asked = TokenTree(proposal.tokens, proposal.parents), generation.request
        # One seed: where a runtime draws the same from the same, a path that another one leads to was accepted as far.
        seed = derive_seed(asked.sampling.seed, len(generation.context), "target")
        paths = tree.paths()
        requests = [
            engine_request(
                generation,
                len(path) + 1,
                asked.sampling.seeded(seed),
                draft_tokens=tree.tokens[path],
                return_log_probs=asked.return_log_probs,
                return_generation_logits=asked.return_generation_logits,
            )
            for path in paths
        ]
        generation.raise_if_cancelled()
        return _joined(tree, paths, self._calls(requests), asked)


def _joined(tree: TokenTree, paths: list[list[int]], results: Sequence[EngineResult], asked: Request) -> Verification:
    """The tokens of the first path; where its own token leads to another path, that one's tokens behind it, and so on.

    A path is only followed when its call drew all that came before in the same way. Whether it did says nothing about
    what it drew afterwards, so each token appended is the target's own draw after those before it, and the output
    follows the target, whether the calls draw independently or with the same random numbers. (Taking the longest answer
    would not: how long it is depends on what was drawn.)
    """
    answers = [
        checked_ids(result, len(path) + 1, "target").tolist() for path, result in zip(paths, results, strict=True)
    ]
    tokens: list[int] = []
    log_probs: list[float] = []
    logits: list[NDArray[np.float32]] = []
    unread = list(range(len(paths)))
    node: int | None = ROOT
    ended = False
    while node is not None and not ended:
        depth, reached = len(tokens), tree.path(node)
        for index in unread:
            if paths[index][:depth] == reached and answers[index][:depth] == tokens:
                break
        else:
            break
        unread.remove(index)
        tokens = answers[index]
        if asked.return_log_probs:
            log_probs += checked_log_probs(results[index], len(tokens))[depth:]
        if asked.return_generation_logits:
            logits.append(checked_logits(results[index], len(tokens))[depth:])
        followed = tree.follow(tokens)
        num_drafts = sum(accepted in paths[index] for accepted in followed)  # without an own token in another path
        ended = len(tokens) < num_drafts + 1
        node = followed[-1] if followed and len(followed) == len(tokens) else None
    return Verification(
        tokens=tuple(tokens),
        num_accepted=len(tokens) - (0 if ended else 1),
        log_probs=tuple(log_probs) if asked.return_log_probs else None,
        logits=np.concatenate(logits) if asked.return_generation_logits else None,
        ended=ended,
    )
