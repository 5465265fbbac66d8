"""Which token tree to give Medusa heads or a draft model: the best one for a number of nodes, and what any is worth.

A node is a path of ranks: (0, 2) is the third choice of the second head behind the first choice of the first. Knows
how often each head's choice of each rank is right (`accuracies[head][rank]`, given that all before it were found), or
the ranks along recorded texts. Of a draft model a head is a level of its tree. Does not know models, heads or specs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Node = tuple[int, ...]
Accuracies = Sequence[Sequence[float]]  # [head][rank]


def best_tree(accuracies: Accuracies, num_nodes: int) -> list[Node]:
    """The tree of at most `num_nodes` nodes with the most expected tokens, breadth first.

    Dynamic programming of Sequoia (Chen et al. 2024, arXiv 2402.12374, section 3.1), with an acceptance vector of its
    own for every level: the best subtree of n nodes under a node gives each of its children, rank by rank, some of the
    n nodes. Heads do not see each other, so that all nodes of a level have the same vector.

    Args:
        accuracies: see the module; a rank that is never right gets no node.
        num_nodes: nodes besides the root.
    """
    subtrees: list[tuple[float, tuple[Node, ...]]] = [(0.0, ())] * (num_nodes + 1)  # below the last level
    for vector in reversed(accuracies):
        subtrees = _level(vector, subtrees)
    return sorted(subtrees[num_nodes][1], key=lambda node: (len(node), node))


def _level(
    vector: Sequence[float], below: list[tuple[float, tuple[Node, ...]]]
) -> list[tuple[float, tuple[Node, ...]]]:
    """For 0..n nodes the best forest of children whose chances are `vector`: its expected tokens, and its nodes.

    `below` is the same for the forest under each child.
    """
    best: list[tuple[float, tuple[Node, ...]]] = [(0.0, ())] * len(below)
    for rank, accuracy in enumerate(vector):
        # The child itself and what is under it: size nodes give accuracy * (1 + below[size - 1]).
        values = [accuracy * (1.0 + value) for value, _ in below]
        longer = list(best)
        for total in range(1, len(best)):
            size = max(range(total + 1), key=lambda n: best[total - n][0] + (values[n - 1] if n else 0.0))
            if size and best[total - size][0] + values[size - 1] > best[total][0]:
                child = ((rank,), *((rank, *node) for node in below[size - 1][1]))
                longer[total] = (best[total - size][0] + values[size - 1], best[total - size][1] + child)
        best = longer
    return best


def best_branching(accuracies: Accuracies, num_nodes: int) -> tuple[int, ...]:
    """Of the trees where all nodes of a level have as many children, the one with the most expected tokens.

    All of them are tried; of several that expect the same, the one of fewest nodes.

    Args:
        accuracies: see the module; as many levels and children as there are figures for are tried.
        num_nodes: most nodes besides the root.

    Returns:
        Children of each node, level by level; () if no rank is ever right.
    """
    best: tuple[float, int, tuple[int, ...]] = (1.0, num_nodes, ())  # expected tokens, nodes left, branching

    def grow(branching: tuple[int, ...], width: int, left: int, tokens: float, reached: float) -> None:
        """Try all trees that begin with `branching`: its last level has `width` nodes, one right so often."""
        nonlocal best
        best = max(best, (tokens, left, branching))
        vector = accuracies[len(branching)] if len(branching) < len(accuracies) else ()
        for children in range(1, min(len(vector), left // width) + 1):
            nodes, right = width * children, reached * sum(vector[:children])
            grow((*branching, children), nodes, left - nodes, tokens + right, right)

    grow((), 1, num_nodes, 1.0, 1.0)
    return best[2]


def branching_tree(branching: Sequence[int]) -> list[Node]:
    """The tree with `branching[i]` children of each node of level i, breadth first."""
    depths = range(1, len(branching) + 1)
    return [node for depth in depths for node in product(*(range(children) for children in branching[:depth]))]


def chain(depth: int) -> list[Node]:
    """One token a head: the first choice of each."""
    return [(0,) * length for length in range(1, depth + 1)]


def expected_tokens(tree: Sequence[Node], accuracies: Accuracies) -> float:
    """Tokens a target pass: the target's own one, and each node with the product of the chances on its path."""
    total = 1.0
    for node in tree:
        value = 1.0
        for head, rank in enumerate(node):
            vector = accuracies[head] if head < len(accuracies) else ()
            value *= vector[rank] if rank < len(vector) else 0.0
        total += value
    return total


def tokens_per_pass(tree: Sequence[Node], texts: Sequence[NDArray[np.int16]]) -> float:
    """Tokens a target pass along recorded texts, exactly: every cycle is walked.

    A text's first token comes with its prompt's pass, and counts as neither token nor pass.

    Args:
        tree: the token tree.
        texts: `[A, heads]` each, see `trtspec.train.heads.text_ranks` and `trtspec.plan.draft.draft_ranks`.
    """
    nodes = set(tree)
    tokens = passes = 0
    for text in texts:
        rows = [tuple(row) for row in text.tolist()]
        at = 0  # the token that the tree stands behind; the state before it is known
        while at < len(rows) - 1:
            depth = 0
            while depth < len(rows[at]) and rows[at][: depth + 1] in nodes:
                depth += 1
            at += depth + 1
            passes += 1
        tokens += max(len(rows) - 1, 0)
    return tokens / passes if passes else 0.0


def accuracies_of(texts: Sequence[NDArray[np.int16]], width: int = 10) -> list[list[float]]:
    """`accuracies[head][rank]` along texts: how often, given that the tokens before were among their heads' first ones.

    Args:
        texts: see `tokens_per_pass`.
        width: how many count as the first ones, and ranks in the result.
    """
    import numpy as np

    num_heads = texts[0].shape[1] if texts else 0
    counts, totals = np.zeros((num_heads, width)), np.zeros(num_heads)
    for text in texts:
        found = np.ones(len(text), dtype=bool)  # all heads so far
        for head in range(num_heads):
            there = found[: max(len(text) - 1 - head, 0)]  # the token that head h speaks of exists
            ranks = text[: len(there), head][there]
            totals[head] += len(ranks)
            ranks = ranks[(ranks >= 0) & (ranks < width)]
            counts[head] += np.bincount(ranks, minlength=width)
            found = found & (text[:, head] >= 0) & (text[:, head] < width)
    return [[float(c) / t if t else 0.0 for c in row] for row, t in zip(counts, totals, strict=True)]


def draw(tree: Sequence[Node], accuracies: Accuracies, path: Path, title: str) -> None:
    """A picture of a tree: nodes by level, each with the chance that it is reached and right.

    Args:
        path: .png or .svg.

    Raises:
        TrtspecError: matplotlib is not there, or another kind of file.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise TrtspecError(
            "pictures need matplotlib, which is not installed", where="--plot", fix="pip install 'trtspec[plots]'"
        ) from error
    if path.suffix not in (".png", ".svg"):
        raise TrtspecError(f"{path.name} is no picture", where="--plot", expected="a name that ends in .png or .svg")
    children: dict[Node, list[Node]] = {}
    for node in sorted(tree):
        children.setdefault(node[:-1], []).append(node)
    places: dict[Node, float] = {}

    def place(node: Node, left: int) -> int:
        """Put the leaves side by side from `left` on, and each parent over the middle of its children."""
        right = left
        for child in children.get(node, []):
            right = place(child, right)
        below = [places[child] for child in children.get(node, [])]
        places[node] = (below[0] + below[-1]) / 2 if below else float(left)
        return right if below else left + 1

    leaves = place((), 0)
    depth = max((len(node) for node in tree), default=0)
    figure = Figure(figsize=(min(24.0, 1.5 + 0.55 * leaves), 1.5 + 1.1 * (depth + 1)))
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_title(title)
    for node, x in places.items():
        if node:
            axes.plot([places[node[:-1]], x], [1 - len(node), -len(node)], color="0.7", linewidth=1, zorder=1)
        chance = expected_tokens([node], accuracies) - 1.0 if node else 1.0
        label = f"{node[-1]}\n{100 * chance:.0f} %" if node else "root"
        axes.text(
            x, -len(node), label, ha="center", va="center", fontsize=7, zorder=2,
            bbox={"boxstyle": "round", "facecolor": (1.0 - 0.6 * chance, 1.0 - 0.3 * chance, 1.0), "edgecolor": "0.5"},
        )  # fmt: skip
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    figure.savefig(part, bbox_inches="tight", dpi=120)
    part.replace(path)
