"""The checks of a TensorRT-LLM checkpoint, before any of it is compiled: its format, its logits, and its layers.

The checkpoint is executed as the engine would compute it (ranks merged, inputs rounded) and compared with the model
that it was made from, forced along the prompts and the reference's own answers. Knows budgets and verdicts; not where
checkpoint, model and prompts come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from trtspec.models.source import ModelSource, SharedDraft
from trtspec.parity.layers import Comparison, LayerComparison
from trtspec.parity.result import Check, Choice, Finding, Verdict
from trtspec.parity.trial import Case
from trtspec.runtime.llama import Llama
from trtspec.runtime.reference import ReferenceSampler
from trtspec.runtime.weights import ExecutableWeights
from trtspec.trtllm.checkpoint import FP8, INT4_AWQ, INT8_SQ, W4A8_AWQ, Checkpoint, faults, structural_faults
from trtspec.trtllm.convert.vocabulary import full_head
from trtspec.trtllm.dequantize import load_weights

if TYPE_CHECKING:
    from trtspec.spec.schema import CheckpointBudget

FORMAT, LOGITS, LAYERS = "format", "logits", "layers"
CHECKPOINT_CHECKS = (FORMAT, LOGITS, LAYERS)
_SHOWN = 5  # findings about logits
_TRACED = 512  # tokens from which on no more texts are traced through the layers


@dataclass(frozen=True)
class Budget:
    """How far a healthy checkpoint of one precision may be from its model.

    Attributes:
        max_kl: mean divergence of the next-token distributions, in nats.
        min_top1: part of the tokens on which both prefer the same id.
        tie: ids whose reference logits differ by no more count as equally good.
        linear: relative error of the weights of one linear layer, of its worst head or rank.
        layer: relative error of what one layer adds, mean over tokens.
    """

    max_kl: float
    min_top1: float
    tie: float
    linear: float
    layer: float


BUDGETS = {
    "float32": Budget(1e-6, 0.999, 2e-3, 1e-4, 1e-3),
    "float16": Budget(5e-5, 0.99, 0.1, 3e-3, 0.02),
    "bfloat16": Budget(1e-3, 0.98, 0.5, 0.02, 0.05),
    FP8: Budget(0.15, 0.9, 0.5, 0.08, 0.4),
    INT8_SQ: Budget(0.2, 0.85, 0.5, 0.13, 0.5),
    INT4_AWQ: Budget(0.25, 0.8, 1.0, 0.2, 0.8),
    W4A8_AWQ: Budget(0.25, 0.8, 1.0, 0.2, 0.8),
}
"""By quant_algo, or by dtype where nothing is quantised.

About twice what was measured: mean KL, top-1 with ties (without), linear, layer.

| precision | SmolLM2-135M-Instruct, 553 tokens | random models of two layers, 140 tokens, the worst family |
|---|---|---|
| float16 | 2.6e-6, 100 % (99.8 %), 0.0003, 0.0006 | 7.2e-7, 100 % (99.3 %), 0.0003, 0.0009 (Mixtral) |
| bfloat16 | 8.9e-5, 100 % (99.3 %), 0.0019, 0.0028 | 4.1e-5, 100 % (97.1 %), 0.0024, 0.0063 (Mixtral) |
| FP8 | 0.066, 95.3 % (90.1 %), 0.037, 0.099 | 0.022, 95.7 % (77.1 %), 0.027, 0.13 (Mixtral) |
| FP8, FP8 KV cache | 0.058, 98.4 % (93.3 %), 0.037, 0.11 | 0.020, 96.4 % (72.9 %), 0.027, 0.14 (Mixtral) |
| W8A8_SQ_PER_CHANNEL | 0.049, 98.4 % (90.7 %), 0.063, 0.24 | 0.026, 96.4 % (65.0 %), 0.016, 0.17 (Qwen2) |
| W4A16_AWQ | its 576 features are no multiple of 128 | 0.070, 97.9 % (37.1 %), 0.13, 0.32 (Llama, Qwen2) |
| W4A8_AWQ | its 576 features are no multiple of 128 | 0.076, 95.7 % (40.0 %), 0.13, 0.34 (Llama, Qwen2) |

SmolLM2 was calibrated with 32 prompts of up to 256 tokens; SmoothQuant, which suffers most from inputs beyond the range
that was seen, with 128 of 512, and compared on 431 tokens. The others' 553 count the beginning that all prompts share
for each of them; without repetition float16, bfloat16 and FP8 come to 2.0e-6, 5.9e-5 and 0.037. The logits of random
models are flat, so that rounding often decides which of them is the largest; KL and layer errors say more there.
"""


def budget_of(checkpoint: Checkpoint, given: CheckpointBudget) -> Budget:
    """The budget of a checkpoint's precision, with what the spec says instead.

    A quantised KV cache has the budget of quantised weights, except for the weights.
    """
    budget = BUDGETS[checkpoint.quant_algo or checkpoint.config["dtype"]]
    if checkpoint.quant_algo is None and checkpoint.kv_cache_quant_algo:
        budget = replace(BUDGETS[FP8], linear=budget.linear)
    told = {name: getattr(given, name) for name in ("max_kl", "min_top1") if getattr(given, name) is not None}
    return replace(budget, **told)


@dataclass(frozen=True)
class CheckpointTrial:
    """One checkpoint, its model, and what they are compared on.

    Attributes:
        role: target, middle or draft.
        checkpoint: the checkpoint.
        source: the model that it was made from.
        cases: the prompts.
        max_tokens: tokens compared for each prompt, its own and those of the answer.
        answer_tokens: longest answer.
        given: what the spec says of how far they may be apart.
        reproduce: the command that runs one check of one subject again, on one prompt (a line number) or all.
        advance: told the fraction done within a check.
    """

    role: str
    checkpoint: Checkpoint
    source: ModelSource
    cases: tuple[Case, ...]
    max_tokens: int
    answer_tokens: int
    given: CheckpointBudget
    reproduce: Callable[[str, str, int | None], str]
    advance: Callable[[float], None]

    @property
    def subject(self) -> str:
        """Its name in reports."""
        return f"checkpoint {self.role}"


class CheckpointChecks:
    """The checks of one checkpoint; model, weights and texts are loaded when the first of them needs them."""

    def __init__(self, trial: CheckpointTrial) -> None:
        self._trial = trial

    def run(self, name: str) -> Check:
        """One of `CHECKPOINT_CHECKS`; what cannot be executed is a fault of the format, and nothing else is said."""
        if name == FORMAT:
            return self._format()
        checkpoint = self._trial.checkpoint
        if structural_faults(checkpoint) or not checkpoint.is_known:
            why = "its format is wrong" if checkpoint.is_known else "the torch runtime does not know this architecture"
            return self._check(name, "the checkpoint can be executed", Verdict.NOT_APPLICABLE, f"not executed: {why}")
        return self._logits() if name == LOGITS else self._layers()

    def _format(self) -> Check:
        """Names, shapes, types, scales, and what our record says of them."""
        checkpoint = self._trial.checkpoint
        found = faults(checkpoint)
        ranks = f"{checkpoint.world_size} rank{'s' * (checkpoint.world_size > 1)}"
        num = sum(len(header) for header in checkpoint.headers.values()) if not found else 0
        good = f"{num} tensors of {ranks}, {self._precision}"
        evidence = f"{len(found)} fault{'s' * (len(found) > 1)}" if found else good
        return self._check(
            FORMAT,
            "TensorRT-LLM finds every tensor and scale that config.json promises",
            Verdict.FAULT if found else Verdict.PASS,
            evidence,
            [self._finding(FORMAT, problem) for problem in found],
        )

    def _logits(self) -> Check:
        """The distributions of the next token; a beginning that several prompts share counts once."""
        trial, budget = self._trial, self._budget
        tokens: list[_Token] = []
        known: set[tuple[int, ...]] = set()
        for number, text in enumerate(self._texts):
            found, right = self._executed(text.ids), text.logits
            kl, choices = divergence(right, found), found.argmax(1)
            for position in range(len(text.ids)):
                context = tuple(text.ids[: position + 1])
                if context not in known:
                    tokens.append(_Token(text, position, float(kl[position]), int(choices[position])))
                    known.add(context)
            trial.advance((number + 1) / len(self._texts))
        kls = np.array([token.kl for token in tokens])
        top1, strict = (float(np.mean([token.regret <= tie for token in tokens])) for tie in (budget.tie, 0.0))
        mean = float(kls.mean())
        passed = mean <= budget.max_kl and top1 >= budget.min_top1
        compared = f"KL {mean:.2g} (budget {budget.max_kl:g}), top-1 {top1:.1%} (budget {budget.min_top1:.1%})"
        findings = []
        if not passed:
            findings.append(self._finding(LOGITS, f"{compared}: more than {self._precision} explains"))
            worst = sorted(tokens, key=lambda token: -np.nan_to_num(token.kl, nan=np.inf))
            findings += [self._difference(token) for token in worst[: _SHOWN - 1]]
        return self._check(
            LOGITS,
            "the executed checkpoint predicts the next token as the model does",
            Verdict.PASS if passed else Verdict.FAULT,
            f"{compared}, {strict:.1%} without ties; KL of 99 % of {len(kls)} tokens below "
            f"{np.quantile(kls, 0.99):.2g}, largest {kls.max():.2g}; {len(self._texts)} prompts",
            findings,
        )

    def _difference(self, token: _Token) -> Finding:
        """A token on which both differ much."""
        number, row = token.text.case.number, token.text.logits[token.position]
        found, right = (Choice(i, self._piece(i), token.logit(i)) for i in (token.choice, int(row.argmax())))
        return Finding(
            number,
            token.position,
            Verdict.FAULT,
            f"KL {token.kl:.2g} in what follows",
            self._trial.reproduce(LOGITS, self._trial.subject, number),
            chosen=found,
            expected=right,
        )

    def _layers(self) -> Check:
        """Each layer on the reference's own hidden states, and each weight against the model's."""
        trial, budget = self._trial, self._budget
        comparison = LayerComparison(
            trial.checkpoint, self._loaded, self._model, self._source, budget.linear, budget.layer
        )
        num_layers = trial.source.config.num_hidden_layers
        states = [text.states for text in self._texts if text.states]
        parts: list[Comparison] = list(comparison.ends())
        layers: list[Comparison] = []
        for layer in range(num_layers):
            *inside, whole = comparison.layer(layer, [of_text[layer] for of_text in states])
            parts += inside
            layers.append(whole)
            trial.advance((layer + 1) / num_layers)
        wrong = [part.problem for part in (*parts, *layers) if part.problem]
        worst_part, worst_layer = (max(found, key=lambda part: part.error) for found in (parts, layers))
        evidence = (
            f"{num_layers} layers, worst {worst_layer.name}: {worst_layer.error:.2g} (bound {budget.layer:g}); "
            f"{len(parts)} weights, worst {worst_part.name}: {worst_part.error:.2g} (bound {budget.linear:g})"
        )
        return self._check(
            LAYERS,
            "each layer does to the model's own activations what the model's layer does",
            Verdict.FAULT if wrong else Verdict.PASS,
            evidence,
            [self._finding(LAYERS, problem) for problem in wrong],
        )

    @cached_property
    def _budget(self) -> Budget:
        return budget_of(self._trial.checkpoint, self._trial.given)

    @property
    def _precision(self) -> str:
        checkpoint = self._trial.checkpoint
        kv_cache = f", KV cache {checkpoint.kv_cache_quant_algo}" if checkpoint.kv_cache_quant_algo else ""
        return f"{checkpoint.quant_algo or checkpoint.config['dtype']}{kv_cache}"

    @cached_property
    def _source(self) -> ModelSource:
        return _with_whole_head(self._trial.source)

    @cached_property
    def _loaded(self) -> ExecutableWeights:
        return load_weights(self._trial.checkpoint)

    @cached_property
    def _model(self) -> Llama:
        longest = max(len(text.ids) for text in self._texts)
        config = replace(self._trial.checkpoint.model, max_position_embeddings=longest)
        return Llama(config, self._loaded.weights, activations=self._loaded.activations)

    @cached_property
    def _texts(self) -> list[_Text]:
        """Prompt and greedy answer of each case, with what the reference says of them."""
        trial, reference = self._trial, ReferenceSampler(self._source)
        texts: list[_Text] = []
        for case in trial.cases:
            prompt = list(case.ids[: trial.max_tokens])
            room = min(trial.answer_tokens, trial.max_tokens - len(prompt))
            ids = prompt + reference.continuation(prompt, room, trial.source.config.eos_token_ids)
            logits, states = reference.trace(ids)
            enough = sum(len(text.ids) for text in texts) >= _TRACED
            texts.append(_Text(case, ids, logits, [] if enough else states))
        return texts

    def _executed(self, ids: Sequence[int]) -> np.ndarray:
        """float32 `[len(ids), padded vocab]`: logits of the checkpoint."""
        with torch.inference_mode():
            rows = self._model.forward(torch.tensor([list(ids)]), self._model.new_cache(1, len(ids)), 0)
        result: np.ndarray = rows[0].numpy()
        return result

    def _piece(self, token: int) -> str:
        text: str = self._trial.source.tokenizer().decode([token], skip_special_tokens=False)
        return text

    def _finding(self, check: str, problem: str) -> Finding:
        return Finding(None, None, Verdict.FAULT, problem, self._trial.reproduce(check, self._trial.subject, None))

    def _check(
        self, name: str, hypothesis: str, verdict: Verdict, evidence: str, findings: Sequence[Finding] = ()
    ) -> Check:
        return Check(name, self._trial.subject, hypothesis, verdict, evidence, tuple(findings))


@dataclass(frozen=True)
class _Text:
    """One prompt with the reference's answer.

    Attributes:
        case: the prompt.
        ids: prompt and answer.
        logits: float32 `[len(ids), vocab]` of the reference.
        states: what goes into each layer, `[1, len(ids), hidden]`; empty where the layers are not compared.
    """

    case: Case
    ids: list[int]
    logits: np.ndarray
    states: list[torch.Tensor]


@dataclass(frozen=True)
class _Token:
    """What both say about the token after one position of a text.

    Attributes:
        text, position: where.
        kl: divergence of the distributions.
        choice: the checkpoint's likeliest id.
    """

    text: _Text
    position: int
    kl: float
    choice: int

    def logit(self, token: int) -> float:
        """The reference's logit; of an id that it does not have, -inf."""
        row = self.text.logits[self.position]
        return float(row[token]) if token < len(row) else -math.inf

    @property
    def regret(self) -> float:
        """By how much the reference's logit of the choice is below its best."""
        return float(self.text.logits[self.position].max()) - self.logit(self.choice)


def divergence(right: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence, in nats, of what `found` says from what is `right`, row by row.

    Args:
        right: logits `[n, vocab]` of the reference.
        found: logits `[n, vocab or more]`; ids beyond the reference's vocabulary count as what they are, lost.

    Returns:
        float64 `[n]`.
    """
    p, q = (torch.log_softmax(torch.from_numpy(rows).double(), dim=1) for rows in (right, found))
    q = q[:, : p.shape[1]]
    result: np.ndarray = torch.where(p.exp() > 0, p.exp() * (p - q), 0.0).sum(1).numpy()
    return result


def _with_whole_head(source: ModelSource) -> ModelSource:
    """The model as it was converted: a draft with its target's head, reduced, has the whole of it in an engine."""
    return _WholeHead(source) if isinstance(source, SharedDraft) and "d2t" in source.tensor_names() else source


class _WholeHead(ModelSource):
    def __init__(self, source: SharedDraft) -> None:
        self.name, self.path, self.config = source.name, source.path, source.config
        self.chat_template, self.add_bos = source.chat_template, source.add_bos
        self._source = source

    def tensor_names(self) -> list[str]:
        return [name for name in self._source.tensor_names() if name != "d2t"]

    def tensor(self, name: str) -> torch.Tensor:
        return full_head(self._source) if name == "lm_head.weight" else self._source.tensor(name)

    def tokenizer_json(self) -> str:
        return self._source.tokenizer_json()

    def fingerprint(self) -> str:
        return self._source.fingerprint()

    def check(self) -> None:
        self._source.check()
