"""Medusa inside the engine (Cai et al. 2024): heads draft a tree of tokens, and one target pass verifies all of it.

Head h guesses from the hidden state before a token the token h + 1 places behind it; the tree says which ranks of the
heads are combined. The tree's tokens are chosen, not drawn, so the walk of `TreeWalk` through them is exact for greedy
and for sampled requests: the tokens are those of plain decoding. Knows tensors, trees and one sequence; not files, nor
who runs the pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from trtspec.decoding.engine_call import EngineRequest, EngineResult
from trtspec.decoding.sampler import TokenSampler
from trtspec.decoding.token_tree import ROOT, TokenTree
from trtspec.runtime.engine import EngineConfig
from trtspec.runtime.kernels import linear
from trtspec.runtime.kv_cache import Sequence
from trtspec.runtime.llama import Llama
from trtspec.runtime.passes import Calls

_LINEAR = re.compile(r"medusa_heads\.(?P<head>\d+)\.medusa_layers\.(?P<layer>\d+)\.linear\.weight")


def linear_name(head: int, layer: int, kind: str) -> str:
    """TensorRT-LLM's name of a tensor of a head's layer; kind is weight or bias."""
    return f"medusa_heads.{head}.medusa_layers.{layer}.linear.{kind}"


def output_name(head: int) -> str:
    """TensorRT-LLM's name of a head's own output matrix."""
    return f"medusa_heads.{head}.lm_head.weight"


class MedusaHeads:
    """Heads on a target.

    Args:
        weights: under TensorRT-LLM names (`linear_name`, `output_name`); others are left alone. A head's layer is
            x + silu(linear(x)).
        output: `[vocab, hidden]`, the target's output matrix, for heads without one of their own.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], output: torch.Tensor) -> None:
        self.weights = weights
        self.output = output
        places = [(int(m["head"]), int(m["layer"])) for m in map(_LINEAR.fullmatch, weights) if m]
        self.num_heads = 1 + max((head for head, _ in places), default=-1)
        self.num_layers = 1 + max((layer for _, layer in places), default=-1)

    def states(self, head: int, x: torch.Tensor) -> torch.Tensor:
        """What one head makes of the target's hidden states x `[.., hidden]` (after the last norm), the same shape."""
        for layer in range(self.num_layers):
            weight, bias = (self.weights[linear_name(head, layer, kind)] for kind in ("weight", "bias"))
            x = x + F.silu(F.linear(x, weight, bias))
        return x

    def logits(self, head: int, x: torch.Tensor) -> torch.Tensor:
        """Logits `[.., vocab]` of one head."""
        return F.linear(self.states(head, x), self.weights.get(output_name(head), self.output))

    def all_logits(self, state: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Logits `[num_heads, vocab]` of the first heads for one state `[hidden]`."""
        rows = torch.stack([self.states(head, state) for head in range(num_heads)])
        if output_name(0) in self.weights:
            return torch.stack([F.linear(row, self.weights[output_name(h)]) for h, row in enumerate(rows)])
        return linear(rows, self.output)


@dataclass(frozen=True)
class MedusaSettings:
    """How an engine drafts and accepts; the section `speculation` of its stamp.

    Attributes:
        choices: the tree, see `TokenTree.from_choices`.
        acceptance: `lossless`: the target's own token decides. `typical`: a sampled request also takes a tree's token
            that is likely enough (`TreeWalk`), which changes what is emitted.
        epsilon, delta: of typical acceptance.
    """

    choices: tuple[tuple[int, ...], ...]
    acceptance: Literal["lossless", "typical"] = "lossless"
    epsilon: float = 0.09
    delta: float = 0.3

    @classmethod
    def from_stamp(cls, section: Mapping[str, Any]) -> MedusaSettings:
        """The settings that `to_stamp` wrote."""
        fields = {name: section[name] for name in ("acceptance", "epsilon", "delta") if name in section}
        return cls(tuple(tuple(path) for path in section["choices"]), **fields)

    def to_stamp(self) -> dict[str, Any]:
        """JSON, with a word on whether the output is the target's."""
        stamp: dict[str, Any] = {
            "method": "medusa",
            "choices": [list(path) for path in self.choices],
            "acceptance": self.acceptance,
            "lossless": self.acceptance == "lossless",
        }
        return stamp if stamp["lossless"] else stamp | {"epsilon": self.epsilon, "delta": self.delta}


class MedusaDrafter:
    """Grows a tree from one hidden state of the target.

    Args:
        heads: at least as many as the tree is deep.
        settings: the tree, and how its tokens are accepted.
    """

    def __init__(self, heads: MedusaHeads, settings: MedusaSettings) -> None:
        self.heads = heads
        self.settings = settings
        self.shape = TokenTree.from_choices(settings.choices)  # level by level; the tokens are ranks
        self._depths = self.shape.depths()
        self._widths = [int(self.shape.tokens[self._depths == d].max()) + 1 for d in range(self.num_levels)]

    @cached_property
    def num_levels(self) -> int:
        """Tokens on the longest path."""
        return int(self._depths.max()) + 1

    def size(self, room: int, levels: int) -> int:
        """Nodes of the largest beginning of the tree of at most `room` nodes and so many levels."""
        return max(0, min(room, int((self._depths < levels).sum())))

    def tree(self, state: torch.Tensor, size: int) -> TokenTree:
        """The first `size` nodes, with tokens for what stands behind the state `[hidden]` and the next token."""
        num_levels = int(self._depths[size - 1]) + 1
        logits = self.heads.all_logits(state, num_levels)
        top = logits.topk(max(self._widths[:num_levels]), dim=-1).indices.cpu().numpy()
        ranks, depths = self.shape.tokens[:size], self._depths[:size]
        return TokenTree(top[depths, ranks].astype(np.int32), self.shape.parents[:size])


NO_TREE = TokenTree(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))


class TreeWalk:
    """Which nodes of a tree the target goes along with, over the passes of one request.

    Lossless: the target's own token is chosen first, by argmax or by a draw from its distribution p, and the walk goes
    on while a child of the tree equals it; so the tokens are those of plain decoding, random numbers included.

    Typical (Medusa, section 2.3.1), for sampled requests: a child x is likely enough when p(x) > min(epsilon, delta *
    exp(-H(p))), H the entropy. Of all paths of such children the longest is taken, of equally long ones that of the
    likelier elder nodes; the token behind it is drawn from p. This favours likely tokens: the output is no longer
    distributed as the target's.
    """

    def __init__(self, sampler: TokenSampler, settings: MedusaSettings) -> None:
        self._sampler = sampler
        self._settings = settings

    def through(
        self,
        tree: TokenTree,
        row_of: Callable[[int], NDArray[np.float32]],
        chosen: Callable[[NDArray[np.float32], int], None],
    ) -> list[int]:
        """Append the accepted tokens and one of the target's own to the sampler; returns the accepted nodes.

        Args:
            tree: behind the token that was appended last.
            row_of: the target's logits [V] behind a node, or behind the context for ROOT.
            chosen: called with the row and the token of each position, before the token is appended.
        """
        row_of = cache(row_of)
        typical = self._settings.acceptance == "typical" and not self._sampler.greedy
        path = [int(tree.tokens[node]) for node in self._longest(tree, row_of, ROOT)] if typical else []
        nodes: list[int] = []
        node: int | None = ROOT
        while node is not None and not self._sampler.finished:
            row = row_of(node)
            children = {int(tree.tokens[child]): child for child in tree.children(node)}
            token = path.pop(0) if path else self._sampler.next(row)
            chosen(row, token)
            self._sampler.append(token)
            node = children.get(token)
            if node is not None:
                nodes.append(node)
        return nodes

    def _longest(self, tree: TokenTree, row_of: Callable[[int], NDArray[np.float32]], node: int) -> list[int]:
        """The nodes of the longest path below `node` of which all are likely enough."""
        if self._sampler.finished or not (children := tree.children(node)):
            return []
        p = self._sampler.probabilities(row_of(node))
        inside = p[p > 0]
        threshold = min(self._settings.epsilon, self._settings.delta * math.exp(float((inside * np.log(inside)).sum())))
        likely = {child: p[tree.tokens[child]] for child in children if tree.tokens[child] < len(p)}
        longest: list[int] = []
        for child in sorted(likely, key=lambda child: -likely[child]):
            if likely[child] <= threshold:
                break
            self._sampler.append(int(tree.tokens[child]))
            path = [child, *self._longest(tree, row_of, child)]
            self._sampler.take_back()
            longest = max(longest, path, key=len)  # the first of equals
        return longest


class Forward(Protocol):
    """One target pass: append ids [n] to the sequence, a tree behind them; `head` of the last hidden states."""

    def __call__(
        self,
        ids: NDArray[np.int32],
        num_rows: int,
        head: Callable[[torch.Tensor], torch.Tensor],
        *,
        tree: TokenTree | None,
    ) -> torch.Tensor: ...


class Medusa:
    """The loop of one engine with heads.

    Args:
        drafter: grows the trees.
        model: the target.
    """

    def __init__(self, drafter: MedusaDrafter, model: Llama) -> None:
        self.drafter = drafter
        self._model = model

    @classmethod
    def of_engine(cls, config: EngineConfig, model: Llama) -> Medusa | None:
        """The loop of an engine whose stamp says that it drafts with heads; None for others."""
        section = config.stamp.get("speculation") or {}
        if section.get("method") != "medusa":
            return None
        heads = MedusaHeads(model.weights, model.weights["lm_head.weight"])
        return cls(MedusaDrafter(heads, MedusaSettings.from_stamp(section)), model)

    @property
    def room(self) -> int:
        """Positions that a pass needs behind the text, for tokens that may be rejected."""
        return len(self.drafter.shape)

    def generate(
        self,
        request: EngineRequest,
        sequence: Sequence,
        forward: Forward,
        alone: Calls,
    ) -> EngineResult:
        """Answer a request without draft tokens; each pass but the first verifies a tree.

        The hidden state behind which the next tree stands is kept with the sequence, so that a text that is asked for
        in many calls is drafted all along.

        Args:
            alone: what it is given computes while no other request does.
        """
        reused = sequence.length
        sampler = TokenSampler(request)
        walk = TreeWalk(sampler, self.drafter.settings)
        rows: list[NDArray[np.float32]] = []
        log_probs: list[float] = []

        def chosen(row: NDArray[np.float32], token: int) -> None:
            if request.return_generation_logits:
                rows.append(row)
            if request.return_log_probs:
                log_probs.append(sampler.log_probability(row, token))

        fresh = request.input_ids[reused:]
        num_draft_tokens = num_accepted = 0
        while not sampler.finished:
            tree = alone(partial(self._tree, sequence, fresh, request.max_new_tokens - len(sampler.tokens)))
            states = forward(fresh, len(tree) + 1, lambda states: states, tree=tree if len(tree) else None)
            nodes = alone(partial(walk.through, tree, partial(self._row, states), chosen))
            sequence.keep(nodes, tree.tokens[nodes])
            sequence.last_state = sequence.length, states[nodes[-1] + 1 if nodes else 0]
            num_draft_tokens += len(tree)
            num_accepted += len(nodes)
            fresh = np.array(sampler.tokens[-1:], dtype=np.int32)
        return EngineResult(
            output_ids=np.array(sampler.tokens, dtype=np.int32),
            generation_logits=np.stack(rows) if rows else None,
            log_probs=np.array(log_probs, dtype=np.float32) if log_probs else None,
            num_draft_tokens=num_draft_tokens,
            num_accepted=num_accepted,
            reused_tokens=reused,
        )

    def _tree(self, sequence: Sequence, fresh: NDArray[np.int32], remaining: int) -> TokenTree:
        """What to verify behind the one token `fresh`; nothing where the state before it is not known."""
        known = sequence.last_state
        if known is None or known[0] != sequence.length or len(fresh) != 1:
            return NO_TREE
        # One token of a pass is the target's own, so a tree has one level less than there are tokens to come.
        size = self.drafter.size(sequence.cache.capacity - sequence.length - 1, remaining - 1)
        return self.drafter.tree(known[1], size) if size else NO_TREE

    def _row(self, states: torch.Tensor, node: int) -> NDArray[np.float32]:
        """The target's logits behind a node: computed as far as the walk goes, most of a tree never is."""
        return self._model.head(states[node + 1]).cpu().numpy()
