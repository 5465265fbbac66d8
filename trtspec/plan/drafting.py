"""How is drafted, detached from a spec: what the figures of a trace and the times of a cycle are asked for.

Knows methods and their sizes. Does not know models, traces or times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from trtspec.decoding.token_tree import TokenTree
from trtspec.decoding.tree import tree_shape
from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.spec.schema import Spec

ENGINE_ONLY = {
    "eagle": "its heads run only inside TensorRT-LLM's engine",
    "lookahead": "its n-grams come from Jacobi iterations inside TensorRT-LLM's engine",
    "redrafter": "its recurrent head runs only inside TensorRT-LLM's engine",
}


@dataclass(frozen=True)
class Drafting:
    """One way to draft.

    Attributes:
        method: none, draft_target, early_exit, ngram, tree, cascade, medusa or mtp.
        num_draft_tokens: most tokens proposed to the target a cycle: length of a chain, nodes of a tree.
        branching: of a tree, the children of each node, level by level.
        choices: of Medusa, the tree as paths of ranks.
        inner: of a cascade, tokens proposed to a middle model a cycle.
        max_ngram, window: of ngram, as in the spec.
        roles: models that propose, the nearest to the target first: `middle`, `draft` for a cascade; none where the
            text itself or the target's pass proposes.
        chunk: of Medusa, tokens that the engine is asked for in a call: the last tree of each is cut to what is left;
            0: all in one call.
        acceptance: how sampled drafts are accepted. `logits`: drafts are drawn and judged by their distribution;
            `tokens`: drafts are the likeliest tokens, accepted where they equal the target's own draw.
    """

    method: str
    num_draft_tokens: int
    branching: tuple[int, ...] = ()
    choices: tuple[tuple[int, ...], ...] = ()
    inner: int = 0
    max_ngram: int = 3
    window: int | None = None
    roles: tuple[str, ...] = ("draft",)
    chunk: int = 0
    acceptance: Literal["logits", "tokens"] = "logits"

    @classmethod
    def of(cls, spec: Spec, num_draft_tokens: int | None = None) -> Drafting:
        """The drafting of a spec as it is served; with another length or number of nodes where one is given.

        Raises:
            TrtspecError: a method whose drafts cannot be followed outside of TensorRT-LLM.
        """
        speculation = spec.speculation
        method = speculation.method
        if method in ENGINE_ONLY:
            raise TrtspecError(
                f"method {method} cannot be followed along recorded answers: {ENGINE_ONLY[method]}",
                where=spec.where(("speculation", "method")),
                fix="measure it on the server: trtspec bench serve",
            )
        length = speculation.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        made = cls(method, length, roles=tuple(role for role in spec.models if role != "target"))
        if method == "ngram" and speculation.ngram:
            made = replace(made, max_ngram=speculation.ngram.max_ngram, window=speculation.ngram.window)
        elif method == "tree":
            from trtspec.spec.schema import Tree

            tree = speculation.tree or Tree()
            made = replace(made, branching=tree.branching, num_draft_tokens=min(length, tree.num_nodes))
        elif method == "cascade" and speculation.cascade:
            made = replace(made, inner=speculation.cascade.num_draft_tokens)
        elif method == "medusa" and speculation.medusa:
            from trtspec.models.medusa import DEFAULT_CHOICES

            choices = speculation.medusa.choices or tuple(tuple(path) for path in DEFAULT_CHOICES)
            made = replace(made, choices=choices)
        # A server verifies trees path by path, which goes by tokens alone.
        by_tokens = speculation.acceptance == "tokens" or not made.roles or method == "tree"
        return replace(made, acceptance="tokens") if by_tokens else made

    @cached_property
    def tree(self) -> TokenTree:
        """The shape that is proposed, tokens being ranks; a chain is a tree too."""
        if self.choices:
            kept = sorted(self.choices, key=lambda path: (len(path), path))[: self.num_draft_tokens]
            return TokenTree.from_choices(kept)
        if self.branching:
            return tree_shape(self.branching, self.num_draft_tokens)
        return TokenTree.from_choices([(0,) * depth for depth in range(1, self.num_draft_tokens + 1)])

    @property
    def depth(self) -> int:
        """Most tokens that follow each other."""
        return int(self.tree.depths().max()) + 1 if self.num_draft_tokens else 0
