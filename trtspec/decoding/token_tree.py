"""Token trees: several continuations of one context at once, and which of them the target keeps.

The first tokens of all continuations are children of the context's last token; a node and its ancestors are one
continuation. A chain is the tree with one child a node. Knows tokens, logits and the request; not who grew the tree,
nor how either model was run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .engine_call import EngineRequest
from .sampler import TokenSampler
from .sampling import Uniforms
from .verify import Rows, keeps_draft, residual

ROOT = -1  # the parent of the first level


@dataclass(frozen=True)
class TokenTree:
    """Draft tokens that continue one context in several ways.

    Raises:
        ValueError: arrays that do not belong together, a child before its parent, the same token twice under one node.
    """

    tokens: NDArray[np.int32]  # [n]
    parents: NDArray[np.int32]  # [n], the node that each one follows, ROOT for the context; parents before children
    # [n, V], as a draft model gave them, nothing applied: row i is what node i was drawn from, with its elder siblings
    # taken out (children are drawn one after another, without replacement). Siblings may come from different draft
    # models. None: chosen, not drawn.
    logits: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        tokens, parents = np.asarray(self.tokens), np.asarray(self.parents)
        if tokens.ndim != 1 or tokens.shape != parents.shape:
            raise ValueError(f"token tree: {list(parents.shape)} parents for {list(tokens.shape)} tokens")
        if len(tokens) and tokens.min() < 0:
            raise ValueError(f"token tree: {tokens.min()} is not a token id")
        if ((parents < ROOT) | (parents >= np.arange(len(parents)))).any():
            raise ValueError(f"token tree: parents {parents.tolist()} do not all come before their children")
        if len(set(zip(parents.tolist(), tokens.tolist(), strict=True))) < len(tokens):
            raise ValueError("token tree: two children of one node are the same token")
        if self.logits is not None and len(self.logits) != len(tokens):
            raise ValueError(f"token tree: {len(self.logits)} rows of logits for {len(tokens)} tokens")

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]]) -> TokenTree:
        """The shape that a list of paths of child ranks stands for, as `medusa_choices` do; ranks count from 0.

        Returns:
            One node a path, level by level, siblings by rank; the `tokens` are the ranks, to be replaced by tokens.

        Raises:
            ValueError: an empty path, one that is listed twice, or one whose beginning is not listed.
        """
        paths = sorted((tuple(choice) for choice in choices), key=lambda path: (len(path), path))
        places = {path: place for place, path in enumerate(paths)} | {(): ROOT}
        for path in paths:
            if not path:
                raise ValueError("choices: an empty path stands for no node")
            if path[:-1] not in places:
                raise ValueError(f"choices: {list(path)} is listed, its beginning {list(path[:-1])} is not")
        if len(places) <= len(paths):
            raise ValueError("choices: a path is listed twice")
        return cls(
            np.array([path[-1] for path in paths], dtype=np.int32),
            np.array([places[path[:-1]] for path in paths], dtype=np.int32),
        )

    @classmethod
    def merged(cls, trees: Iterable[TokenTree]) -> TokenTree:
        """All paths of several trees as one tree: a token that is in two of them at the same place is one node.

        Nodes keep their order, those of the first tree first. The result has no logits; nodes of trees that have no
        path in common follow each other, and so may their logits.
        """
        nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for tree in trees:
            places = {ROOT: ROOT}  # node of this tree -> node of all
            for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
                places[node] = nodes.setdefault((places[parent], token), len(nodes))
        return cls(
            np.array([token for _, token in nodes], dtype=np.int32),
            np.array([parent for parent, _ in nodes], dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, node: int) -> list[int]:
        """Nodes that follow `node` (or ROOT), the eldest first."""
        return np.flatnonzero(self.parents == node).tolist()

    def depths(self) -> NDArray[np.int64]:
        """[n], tokens between the context and each node: 0 for the first level. Its position, less the context's."""
        return self.mask().sum(axis=1) - 1

    def mask(self) -> NDArray[np.bool_]:
        """[n, n], which nodes each node sees: its ancestors and itself."""
        sees = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents.tolist()):
            if parent != ROOT:
                sees[node] |= sees[parent]
        return sees

    def path(self, node: int) -> list[int]:
        """The nodes from the first level to `node`; none for ROOT."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]

    def paths(self) -> list[list[int]]:
        """The path to every leaf; leaves in the order of their nodes."""
        inner = set(self.parents.tolist())
        return [self.path(node) for node in range(len(self)) if node not in inner]

    def follow(self, tokens: Iterable[int]) -> list[int]:
        """The nodes that `tokens` go through from the context on, as far as the tree has them."""
        nodes, node = [], ROOT
        for token in tokens:
            found = np.flatnonzero((self.parents == node) & (self.tokens == token))
            if not len(found):
                break
            node = int(found[0])
            nodes.append(node)
        return nodes


@dataclass(frozen=True)
class VerifiedPath:
    """What the target made of a tree."""

    tokens: tuple[int, ...]  # those of the accepted nodes, then the target's own; an end id is the last
    nodes: tuple[int, ...]  # accepted, from the first level on
    log_probs: tuple[float, ...] | None = None  # one a token


def verify_tree(rows: Rows, request: EngineRequest, tree: TokenTree, uniforms: Uniforms | None = None) -> VerifiedPath:
    """Walk down the tree as far as the target goes along, and add one token of the target's own.

    Greedy: to the child that is the target's argmax. Sampled, without logits: a token is drawn from the target's
    distribution p, and the child that equals it, if any, is where the walk goes on. Sampled, with logits: multi-round
    speculative sampling (Miao et al. 2024, SpecInfer, Alg. 2) over children drawn without replacement: child x is
    accepted with min(1, p(x) / q(x)); when it is not, p becomes norm(max(0, p - q)) and the next child is tried, with
    the q that it was drawn from: that of its own draft model without the children before it. p of the last round gives
    the own token. Each round is the rule of a chain for what p is then, so the token follows p exactly, however many
    children and draft models there are.

    Args:
        rows: row 0 [V] is the target's after the context, row i + 1 after node i. Asked for along the walk only.
        request: both models' logits go through its sampling rule, in the same context. Its own draft tokens are not
            looked at.
        tree: n nodes; no node at all is plain decoding of one token.
        uniforms: the random numbers; those of the request's seed by default.

    Raises:
        ValueError: logits without a distribution.
    """
    sampler = TokenSampler(request, uniforms)
    drawn = tree.logits is not None and not request.sampling.greedy
    log_probs: list[float] = []
    nodes: list[int] = []
    node: int | None = ROOT
    while node is not None and not sampler.finished:
        row, children = rows[node + 1], tree.children(node)
        token = _multi_round(row, tree, children, sampler) if drawn and children else sampler.next(row)
        if request.return_log_probs:
            log_probs.append(sampler.log_probability(row, token))
        sampler.append(token)
        node = next((child for child in children if tree.tokens[child] == token), None)
        if node is not None:
            nodes.append(node)
    return VerifiedPath(tuple(sampler.tokens), tuple(nodes), tuple(log_probs) if request.return_log_probs else None)


def _multi_round(row: NDArray[np.floating], tree: TokenTree, children: list[int], sampler: TokenSampler) -> int:
    """The token of the current position; distributed as the target's p, whatever the children are."""
    assert tree.logits is not None
    position, uniforms, tokens = len(sampler.tokens), sampler.uniforms, tree.tokens[children].tolist()
    p, q, drawn_from = sampler.probabilities(row), np.empty(0), None
    for attempt, (child, token) in enumerate(zip(children, tokens, strict=True)):
        if drawn_from is not None and np.array_equal(tree.logits[child], drawn_from):  # the same draft model
            q = without(q, tokens[attempt - 1])
        else:
            drawn_from = tree.logits[child]
            q = without(sampler.probabilities(drawn_from), *tokens[:attempt])
        if not q.any():
            break
        if keeps_draft(token, p, q, position, uniforms, attempt):
            return token
        p = residual(p, q)
    return uniforms.draw(position, p)


def without(q: NDArray[np.float64], *tokens: int) -> NDArray[np.float64]:
    """[V], what the next child is drawn from after `tokens`; zeros when nothing is left."""
    rest = q.copy()
    rest[[token for token in tokens if token < len(rest)]] = 0.0
    total = rest.sum()
    return rest / total if total > 0.0 else rest
