"""Speculation in process: greedy text is the target's own, and sampled verification has the target's distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from trtspec.decoding.cycle import Generation, Request
from trtspec.decoding.engine_call import EngineRequest
from trtspec.decoding.methods import METHODS
from trtspec.decoding.sampling import SamplingParams, Uniforms
from trtspec.errors import TrtspecError
from trtspec.models.source import open_model
from trtspec.runtime.local import speculate
from trtspec.runtime.reference import ReferenceSampler, distribution
from trtspec.runtime.torch_runtime import TorchRuntime

GREEDY = SamplingParams()


def finish(target: TorchRuntime, draft: TorchRuntime | None, request: Request, **keywords: Any) -> Generation:
    runtimes = {"target": target} if draft is None else {"target": target, "draft": draft}
    *_, last = speculate("none" if draft is None else "draft_target", runtimes, request, **keywords)
    return last.generation


def test_greedy_text_with_a_draft_is_the_text_without(
    target: TorchRuntime, draft: TorchRuntime, rng: np.random.Generator
) -> None:
    """Random prompts, every draft length; the draft is right often enough, and wrong often enough, to matter."""
    accepted = drafted = 0
    for num_draft_tokens in range(1, 9):
        for _ in range(3):
            prompt = rng.integers(3, 280, size=int(rng.integers(1, 30)))
            plain = finish(target, None, Request(prompt, 20))
            request = Request(prompt, 20, num_draft_tokens=num_draft_tokens)
            speculated = finish(target, draft, request)
            assert speculated.token_ids.tolist() == plain.token_ids.tolist()
            accepted += speculated.acceptance.num_accepted
            drafted += speculated.acceptance.num_drafted
    assert 0.15 < accepted / drafted < 0.85


def test_end_ids_and_penalties_with_a_draft(
    target: TorchRuntime, draft: TorchRuntime, tiny_model_dir: Path, rng: np.random.Generator
) -> None:
    """Against the reference sampler, with both end ids, a minimum length, banned words and penalties."""
    reference = ReferenceSampler(open_model(str(tiny_model_dir)))
    sampling = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3)
    ended = 0
    for _ in range(6):
        prompt = rng.integers(3, 280, size=6)
        free = reference.generate(prompt, sampling, 12)
        rules: dict[str, Any] = {"end_ids": (free[1], free[6]), "bad_words": ((free[3],), (free[4], free[5]))}
        expected = reference.generate(prompt, sampling, 12, min_new_tokens=4, **rules)
        if expected[-1] in rules["end_ids"]:
            expected.pop()
            ended += 1
        request = Request(prompt, 12, min_tokens=4, sampling=sampling, num_draft_tokens=3, **rules)
        assert finish(target, draft, request).token_ids.tolist() == expected
    assert ended


def test_a_draft_with_the_targets_weights_is_always_right(target_engine: Path, draft_engine: Path) -> None:
    target, twin = (TorchRuntime(target_engine, kv_cache_bytes=1 << 22) for _ in range(2))
    for sampling in (GREEDY, SamplingParams(temperature=1.0, seed=5)):
        generation = finish(target, twin, Request([5, 6, 7], 21, sampling=sampling, num_draft_tokens=6))
        assert generation.acceptance.histogram[-1] == generation.acceptance.num_steps == 3


def test_cancelling_ends_a_generation_within_a_call(target: TorchRuntime, draft: TorchRuntime) -> None:
    stop = False
    runtimes, request = {"target": target, "draft": draft}, Request([5, 6, 7], 100, num_draft_tokens=3)
    blocks = speculate("draft_target", runtimes, request, cancelled=lambda: stop)
    next(blocks)
    stop = True
    assert [block.finish_reason for block in blocks] == ["cancelled"]


def test_contexts_are_those_of_the_engines(target: TorchRuntime, draft: TorchRuntime) -> None:
    """Up to the last position: 512 tokens hold 500 of prompt and 12 more."""
    generation = finish(target, draft, Request(np.full(500, 9), 100, num_draft_tokens=8))
    assert (generation.num_generated, generation.finish_reason) == (12, "length")


def test_engines_that_do_not_fit_are_refused_before_any_call(
    target: TorchRuntime, middle: TorchRuntime, draft: TorchRuntime
) -> None:
    three, request = {"target": target, "middle": middle, "draft": draft}, Request([5], 100, num_draft_tokens=9)
    for method in METHODS:
        with pytest.raises(TrtspecError, match="max_draft_len is 8, but the pipeline drafts more: num_draft_tokens 9"):
            speculate(method, three, request)
    with pytest.raises(TrtspecError, match=r"max_draft_len is 3, but the pipeline drafts more: num_draft_tokens 4"):
        speculate("cascade", three, replace(request, num_draft_tokens=5), settings={"num_draft_tokens": 4})


# ---- other drafters than a draft model


@pytest.fixture
def middle(build_engine: Callable[..., Path], save_model: Callable[..., Path], tmp_path: Path) -> TorchRuntime:
    """A model between the tiny draft and the tiny target, for up to 3 draft tokens, 40 positions shorter."""
    model = save_model(tmp_path / "middle", blend=(1, 0.015))
    engine = build_engine(model, role="middle", max_draft_len=3, max_seq_len=472)
    return TorchRuntime(engine, kv_cache_bytes=1 << 22)


@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_of_every_method_is_the_text_without(
    target: TorchRuntime, middle: TorchRuntime, draft: TorchRuntime, rng: np.random.Generator, method: str
) -> None:
    """Random prompts that repeat themselves, so that a look-up finds something."""
    three = {"target": target, "middle": middle, "draft": draft}
    accepted = drafted = 0
    for num_draft_tokens in (1, 4, 8):
        for _ in range(3):
            prompt = np.tile(rng.integers(3, 280, size=int(rng.integers(2, 9))), 2)
            plain = finish(target, None, Request(prompt, 24))
            *_, last = speculate(method, three, Request(prompt, 24, num_draft_tokens=num_draft_tokens))
            assert last.generation.token_ids.tolist() == plain.token_ids.tolist()
            assert last.generation.draft_error is None
            accepted += last.generation.acceptance.num_accepted
            drafted += last.generation.acceptance.num_drafted
            inner = last.generation.draft_acceptance
            assert (inner.num_drafted > 0) == (method == "cascade" and num_draft_tokens > 1)
    assert 0 < accepted < drafted


def test_contexts_of_a_cascade_are_those_of_its_engines(
    target: TorchRuntime, middle: TorchRuntime, draft: TorchRuntime
) -> None:
    """The target holds 512, the draft too, the middle model 472: the last 40 tokens come from the target alone."""
    three = {"target": target, "middle": middle, "draft": draft}
    *_, last = speculate("cascade", three, Request(np.full(460, 9), 100, num_draft_tokens=4))
    generation = last.generation
    assert (generation.num_generated, generation.finish_reason) == (52, "length")
    assert generation.draft_error is None
    assert generation.fallbacks["draft_context"] >= 4
    assert generation.token_ids.tolist() == finish(target, None, Request(np.full(460, 9), 100)).token_ids.tolist()


def test_the_cache_after_a_cascade_is_that_of_a_fresh_engine(
    target: TorchRuntime, middle: TorchRuntime, draft: TorchRuntime, build_engine: Callable[..., Path], rng: Any
) -> None:
    """Verifications that stop early leave rejected drafts behind; what the engines answer afterwards must not show."""
    three = {"target": target, "middle": middle, "draft": draft}
    prompt = rng.integers(3, 280, size=12)
    sampling = SamplingParams(temperature=1.0, seed=3)
    *_, last = speculate("cascade", three, Request(prompt, 40, sampling=sampling, num_draft_tokens=6))
    assert 0 < last.generation.acceptance.num_accepted < last.generation.acceptance.num_drafted
    for runtime in three.values():
        fresh = TorchRuntime(runtime.config.path.parent, kv_cache_bytes=1 << 22)
        request = EngineRequest(last.generation.context, 3, return_generation_logits=True)
        used, new = runtime.execute(request), fresh.execute(request)
        assert used.reused_tokens > new.reused_tokens == 0
        assert used.output_ids.tolist() == new.output_ids.tolist()
        np.testing.assert_allclose(used.generation_logits, new.generation_logits, atol=1e-4)


SIZES = {
    "vocab_size": 5,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
}
PROMPT = np.array([3, 4, 1], dtype=np.int32)
NUM_DRAWS = 600
FALSE_ALARM = 1e-3
Outcome = tuple[int, ...]
Rule = Callable[[int, NDArray[np.float64], NDArray[np.float64], int, Uniforms], int]

SAMPLED = SamplingParams(temperature=2.0)
CUT = SamplingParams(temperature=2.5, top_k=4, top_p=0.95, frequency_penalty=0.4)


class Lottery:
    """A target and a draft of five ids, the draft as a middle model too, and the reference distributions of both."""

    def __init__(self, target: Path, draft: Path, build_engine: Callable[..., Path]) -> None:
        self.target = TorchRuntime(build_engine(target, max_draft_len=2), kv_cache_bytes=1 << 18)
        self.draft = TorchRuntime(build_engine(draft, role="draft"), kv_cache_bytes=1 << 18)
        self.middle = TorchRuntime(build_engine(draft, role="middle", max_draft_len=1), kv_cache_bytes=1 << 18)
        self._references = [ReferenceSampler(open_model(str(path))) for path in (target, draft)]
        self._logits: dict[Outcome, list[NDArray[np.float32]]] = {}

    def logits(self, context: Outcome) -> list[NDArray[np.float32]]:
        """Of target and draft, [5] each, after the prompt and `context`."""
        if context not in self._logits:
            self._logits[context] = [r.logits([*PROMPT, *context])[-1] for r in self._references]
        return self._logits[context]

    def p_and_q(self, context: Outcome, sampling: SamplingParams) -> list[NDArray[np.float64]]:
        history = [*PROMPT, *context]
        return [distribution(row, history, sampling, num_generated=len(context)) for row in self.logits(context)]

    def texts(self, sampling: SamplingParams, length: int) -> dict[Outcome, float]:
        """Probability of every text of so many tokens under the target alone."""
        result: dict[Outcome, float] = {(): 1.0}
        for _ in range(length):
            result = {
                (*context, x): weight * p
                for context, weight in result.items()
                for x, p in enumerate(self.p_and_q(context, sampling)[0])
            }
        return result

    def answers(self, sampling: SamplingParams, with_logits: bool) -> dict[Outcome, float]:
        """Probability of every answer to a verification of two drafts that were drawn from q.

        With logits, x is accepted with probability min(p, q), and is the token after a rejection with max(0, p - q).
        Without, it is accepted when the target's own draw equals the draft: p q, and p (1 - q).
        """
        result: dict[Outcome, float] = {}

        def branch(context: Outcome, weight: float) -> None:
            p, q = self.p_and_q(context, sampling)
            if len(context) == 2:
                keep, own = np.zeros(5), p
            elif with_logits:
                keep, own = np.minimum(p, q), np.maximum(0.0, p - q)
            else:
                keep, own = p * q, p * (1.0 - q)
            for x in range(5):
                result[(*context, x)] = weight * own[x]
                if keep[x] > 0.0:
                    branch((*context, x), weight * keep[x])

        branch((), 1.0)
        assert sum(result.values()) == pytest.approx(1.0)
        return result

    def verify(
        self, sampling: SamplingParams, rng: np.random.Generator, draft_logits: Callable[[Outcome], Any] | None
    ) -> Counter[Outcome]:
        """The runtime's answers to drafts that numpy draws here from the draft's reference distribution."""
        found: Counter[Outcome] = Counter()
        for seed in range(NUM_DRAWS):
            first = int(rng.choice(5, p=self.p_and_q((), sampling)[1]))
            second = int(rng.choice(5, p=self.p_and_q((first,), sampling)[1]))
            request = EngineRequest(
                PROMPT,
                3,
                replace(sampling, seed=seed),
                draft_tokens=np.array([first, second], dtype=np.int32),
                draft_logits=None if draft_logits is None else np.stack([draft_logits(()), draft_logits((first,))]),
            )
            found[tuple(self.target.execute(request).output_ids.tolist())] += 1
        return found

    def drawn_from(self, context: Outcome) -> NDArray[np.float32]:
        return self.logits(context)[1]


@pytest.fixture(scope="module")
def lottery(
    save_model: Callable[..., Path], build_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Lottery:
    path = tmp_path_factory.mktemp("lottery")
    target, draft = (save_model(path / str(seed), seed=seed, **SIZES) for seed in (1, 2))
    return Lottery(target, draft, build_engine)


def goodness_of_fit(found: Counter[Outcome], expected: dict[Outcome, float]) -> float:
    """p-value of the chi-square test; outcomes expected less than five times share a cell, impossible ones give 0."""
    total = sum(found.values())
    if any(expected.get(outcome, 0.0) == 0.0 for outcome in found):
        return 0.0
    cells = [(found[outcome], total * p) for outcome, p in expected.items() if total * p >= 5]
    observed, wanted = (np.array(column, dtype=float) for column in zip(*cells, strict=True))
    if (rest := total - wanted.sum()) > 1e-6:
        observed, wanted = np.append(observed, total - observed.sum()), np.append(wanted, rest)
    return float(stats.chisquare(observed, wanted).pvalue)


@pytest.mark.parametrize("with_logits", [True, False])
@pytest.mark.parametrize("sampling", [SAMPLED, CUT])
def test_sampled_verification_has_the_enumerated_distribution(
    lottery: Lottery, rng: np.random.Generator, sampling: SamplingParams, with_logits: bool
) -> None:
    """Hypothesis: answers to drafts from q are distributed as the rejection rule says, lengths included.

    600 draws into 13 to 22 cells; q overlaps p by 0.75 to 0.8. False alarms: 1 in 1000 (and the seeds are fixed).
    Power, from the noncentral chi-square distribution at that level: above 0.999 against acceptance of every draft,
    against a redraw from p instead of the residual, and against raw logits where q was cut and tempered.
    """
    found = lottery.verify(sampling, rng, lottery.drawn_from if with_logits else None)
    assert goodness_of_fit(found, lottery.answers(sampling, with_logits)) > FALSE_ALARM


def accept_always(draft: int, p: NDArray[np.float64], q: NDArray[np.float64], at: int, uniforms: Uniforms) -> int:
    return draft


def redraw_from_p(draft: int, p: NDArray[np.float64], q: NDArray[np.float64], at: int, uniforms: Uniforms) -> int:
    accepted = q[draft] <= p[draft] or uniforms.accepts(at, p[draft] / q[draft])
    return draft if accepted else uniforms.draw(at, p)


@pytest.mark.parametrize("rule", [accept_always, redraw_from_p])
def test_a_wrong_rule_is_noticed(
    lottery: Lottery, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    """The test above with a rule broken on purpose; see there for its power."""
    monkeypatch.setattr("trtspec.decoding.verify.accept_or_resample", rule)
    found = lottery.verify(SAMPLED, rng, lottery.drawn_from)
    assert goodness_of_fit(found, lottery.answers(SAMPLED, True)) < FALSE_ALARM / 1000


def test_logits_that_the_drafts_were_not_drawn_from_are_noticed(lottery: Lottery, rng: np.random.Generator) -> None:
    """The same with a q that claims all ids to be equally likely."""
    found = lottery.verify(SAMPLED, rng, lambda context: np.zeros(5, dtype=np.float32))
    assert goodness_of_fit(found, lottery.answers(SAMPLED, True)) < FALSE_ALARM / 1000


@pytest.mark.parametrize("acceptance", ["logits", "tokens"])
def test_sampled_text_has_the_targets_distribution(lottery: Lottery, acceptance: Literal["logits", "tokens"]) -> None:
    """Hypothesis: three tokens of the whole cycle, seeds 0 to 599, are distributed as the target's own three tokens.

    600 texts into 23 cells, false alarms 1 in 1000. Power above 0.99 against a shift of 0.15 of the probability
    of the likeliest first token to the others.
    """
    found: Counter[Outcome] = Counter()
    for seed in range(NUM_DRAWS):
        request = Request(PROMPT, 3, sampling=replace(CUT, seed=seed), num_draft_tokens=2)
        generation = finish(lottery.target, lottery.draft, request, acceptance=acceptance)
        found[tuple(generation.token_ids.tolist())] += 1
    assert goodness_of_fit(found, lottery.texts(CUT, 3)) > FALSE_ALARM


@pytest.mark.parametrize("method", ["ngram", "cascade"])
def test_sampled_text_of_other_drafters_has_the_targets_distribution(lottery: Lottery, method: str) -> None:
    """As above: three tokens, seeds 0 to 599, through the engines' own verification. A cascade's middle model is the
    draft of the other tests, and its draft the target's own weights, so that both levels accept and reject."""
    found: Counter[Outcome] = Counter()
    accepted = drafted = 0
    for seed in range(NUM_DRAWS):
        request = Request(PROMPT, 3, sampling=replace(CUT, seed=seed), num_draft_tokens=2)
        runtimes = {"target": lottery.target, "middle": lottery.middle, "draft": lottery.target}
        *_, last = speculate(method, runtimes, request, settings={"num_draft_tokens": 1} if method == "cascade" else {})
        assert last.generation.draft_error is None
        found[tuple(last.generation.token_ids.tolist())] += 1
        accepted += last.generation.acceptance.num_accepted
        drafted += last.generation.acceptance.num_drafted
    assert 0 < accepted < drafted
    assert goodness_of_fit(found, lottery.texts(CUT, 3)) > FALSE_ALARM
