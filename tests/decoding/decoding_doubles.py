"""Test doubles: small table models behind engine calls, and exact enumeration of random outcomes.

A `TableEngine` is not a runtime: it looks its logits up in a table. What it does with them is the product's own
`TokenSampler` and `verify`, or whatever a test puts in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache

import numpy as np

from trtspec.decoding.engine_call import EngineRequest, EngineResult
from trtspec.decoding.sampler import TokenSampler
from trtspec.decoding.token_tree import ROOT, TokenTree, VerifiedPath, verify_tree
from trtspec.decoding.verify import Verification, verify

Model = Callable[[tuple[int, ...]], np.ndarray]  # context -> logits [V]


def table_model(vocab_size: int, seed: int, order: int = 2, scale: float = 1.5) -> Model:
    """Logits that depend on the last `order` tokens, drawn once a context from a normal distribution."""

    @cache
    def row(recent: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, *(token + 1 for token in recent)])
        return (rng.standard_normal(vocab_size) * scale).astype(np.float32)

    return lambda context: row(context[-order:])


def fixed_model(probs: list[float]) -> Model:
    """The same distribution in every context."""
    with np.errstate(divide="ignore"):
        row = np.log(np.array(probs)).astype(np.float32)
    return lambda context: row


def script_model(output: list[int], vocab_size: int, prompt_length: int, strength: float = 50.0) -> Model:
    """Wants `output` after the prompt, token by token, whatever the context holds; then its last token for ever."""

    def logits(context: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(vocab_size, dtype=np.float32)
        row[output[min(len(context) - prompt_length, len(output) - 1)]] = strength
        return row

    return logits


class TableEngine:
    """An engine call over a table model. Records its requests; can leave things out as real engines do."""

    def __init__(
        self,
        model: Model,
        *,
        uniforms: object | None = None,
        verify_call: Callable[..., Verification] = verify,
        verify_tree_call: Callable[..., VerifiedPath] = verify_tree,
        hides_end_id: bool = False,
        has_generation_logits: bool = True,
        fails: Callable[[int], Exception | None] = lambda call: None,
    ) -> None:
        self.requests: list[EngineRequest] = []
        self._model = model
        self._uniforms = uniforms
        self._verify = verify_call
        self._verify_tree = verify_tree_call
        self._hides_end_id = hides_end_id
        self._has_generation_logits = has_generation_logits
        self._fails = fails

    def __call__(self, request: EngineRequest) -> EngineResult:
        self.requests.append(replace(request, input_ids=request.input_ids.copy()))
        if (error := self._fails(len(self.requests))) is not None:
            raise error
        context = tuple(request.input_ids.tolist())
        if request.draft_tokens is not None:
            return self._verified(request, context)
        sampler, rows, log_probs = TokenSampler(request, self._uniforms), [], []
        while not sampler.finished:
            rows.append(self._model(context + tuple(sampler.tokens)))
            token = sampler.next(rows[-1])
            log_probs.append(sampler.log_probability(rows[-1], token))
            sampler.append(token)
        tokens = sampler.tokens
        if self._hides_end_id and tokens and tokens[-1] == request.end_id:
            tokens, log_probs = tokens[:-1], log_probs[:-1]
        with_logits = request.return_generation_logits and self._has_generation_logits
        return EngineResult(
            np.array(tokens, dtype=np.int32),
            generation_logits=np.array(rows)[: len(tokens)] if with_logits else None,
            log_probs=np.array(log_probs) if request.return_log_probs else None,
        )

    def _verified(self, request: EngineRequest, context: tuple[int, ...]) -> EngineResult:
        if request.draft_parents is not None:
            return self._verified_tree(request, context)
        drafts = tuple(request.draft_tokens.tolist())
        rows = [self._model(context + drafts[:i]) for i in range(len(drafts) + 1)]
        verification = self._verify(rows, request, self._uniforms)
        tokens = list(verification.tokens)
        if self._hides_end_id and tokens and tokens[-1] == request.end_id:
            tokens = tokens[:-1]
        with_logits = request.return_generation_logits and self._has_generation_logits
        return EngineResult(
            np.array(tokens, dtype=np.int32),
            generation_logits=np.array(rows)[: len(tokens)] if with_logits else None,
            log_probs=np.array(verification.log_probs[: len(tokens)]) if request.return_log_probs else None,
            num_draft_tokens=len(drafts),
            num_accepted=verification.num_accepted,
        )

    def _verified_tree(self, request: EngineRequest, context: tuple[int, ...]) -> EngineResult:
        """All rows, path by path: nothing here is shared between the nodes."""
        tree = TokenTree(request.draft_tokens, request.draft_parents, request.draft_logits)
        texts = [context + tuple(tree.tokens[tree.path(node)].tolist()) for node in range(ROOT, len(tree))]
        rows = np.array([self._model(text) for text in texts])
        verified = self._verify_tree(rows, request, tree, self._uniforms)
        tokens = list(verified.tokens)
        if self._hides_end_id and tokens and tokens[-1] == request.end_id:
            tokens = tokens[:-1]
        return EngineResult(
            np.array(tokens, dtype=np.int32),
            generation_logits=rows if request.return_generation_logits and self._has_generation_logits else None,
            log_probs=np.array(verified.log_probs[: len(tokens)]) if request.return_log_probs else None,
            num_draft_tokens=len(tree),
            num_accepted=len(verified.nodes),
        )


class Choices:
    """Takes the place of `Uniforms`: every random choice follows a script, and its probability is noted."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.options: list[list[tuple[object, float]]] = []
        self.probability = 1.0

    def accepts(self, position: int, probability: float, attempt: int = 0) -> bool:
        return self._choose([(True, probability), (False, 1.0 - probability)])

    def draw(self, position: int, probs: np.ndarray) -> int:
        return self._choose([(token, p / probs.sum()) for token, p in enumerate(probs.tolist()) if p > 0])

    def _choose(self, options: list[tuple[object, float]]) -> object:
        depth = len(self.options)
        self.options.append(options)
        if depth == len(self.script):
            self.script.append(0)
        value, probability = options[self.script[depth]]
        self.probability *= probability
        return value


def exact_law(run: Callable[[Choices], Hashable]) -> dict[Hashable, float]:
    """The distribution of `run`'s result over everything that chance may do, branch by branch; no sampling."""
    law: dict[Hashable, float] = {}
    script: list[int] | None = []
    while script is not None:
        choices = Choices(script)
        outcome = run(choices)
        law[outcome] = law.get(outcome, 0.0) + choices.probability
        while script and script[-1] + 1 == len(choices.options[len(script) - 1]):
            script.pop()
        if script:
            script[-1] += 1
        else:
            script = None
    return law


def distance(a: dict[Hashable, float], b: dict[Hashable, float]) -> float:
    """Total variation: half the sum of the differences."""
    return 0.5 * sum(abs(a.get(outcome, 0.0) - b.get(outcome, 0.0)) for outcome in {*a, *b})
