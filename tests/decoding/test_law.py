"""Is the output distributed as the target's? Whole outputs, exactly, over everything that chance may do.

`exact_law` runs the real cycle, drafter and verifier over table models and follows every branch with its
probability, so the laws below carry no sampling error. The last part breaks the rule on purpose and shows that the
same test sees it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decoding_doubles import TableEngine, distance, exact_law, fixed_model, table_model
from scipy import stats

from trtspec.decoding import verify as verify_module
from trtspec.decoding.cycle import Request, generate
from trtspec.decoding.draft_target import DraftModel, Target
from trtspec.decoding.engine_call import EngineRequest
from trtspec.decoding.sampler import TokenSampler
from trtspec.decoding.sampling import SamplingParams
from trtspec.decoding.verify import Proposal, verify

DRAFT, TARGET = table_model(3, seed=0, scale=1.0), table_model(3, seed=17, scale=0.8)
FULL = SamplingParams(temperature=1.0)
RULES = {
    "full": FULL,
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.3, top_k=2),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7),
    "min_p": SamplingParams(temperature=1.0, min_p=0.4),
    "repetition": SamplingParams(temperature=0.8, repetition_penalty=1.7),
    "presence": SamplingParams(temperature=1.0, presence_penalty=0.9),
    "frequency": SamplingParams(temperature=1.2, frequency_penalty=0.6, top_p=0.9),
    "everything": SamplingParams(
        temperature=0.9,
        top_k=3,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
    ),
}


def output(request, draft, target, *, acceptance="auto"):
    drafter = None if draft is None else DraftModel(draft, acceptance)
    *_, last = generate(request, drafter, Target(target))
    return tuple(last.generation.token_ids.tolist()), last.finish_reason


def speculative_law(request, draft_model, target_model, *, acceptance="auto", verify_call=verify, **draft_options):
    def run(choices):
        draft = TableEngine(draft_model, uniforms=choices, **draft_options)
        target = TableEngine(target_model, uniforms=choices, verify_call=verify_call)
        return output(request, draft, target, acceptance=acceptance)

    return exact_law(run)


def target_law(request, target_model):
    """The law of the target alone, from the chain rule; shares nothing with the cycle, the drafter or the verifier."""
    law = {}

    def extend(tokens, probability):
        if len(tokens) == request.max_tokens:
            law[(tokens, "length")] = law.get((tokens, "length"), 0.0) + probability
            return
        context = tuple(request.prompt_ids.tolist()) + tokens
        for token, p in enumerate(reference_distribution(request, target_model(context), context, len(tokens))):
            if p > 0 and token in request.end_ids:
                law[(tokens, "stop")] = law.get((tokens, "stop"), 0.0) + probability * p
            elif p > 0:
                extend((*tokens, token), probability * p)

    extend((), 1.0)
    return law


def reference_distribution(request, row, context, num_generated):
    """Sampling rule, written down once more in plain Python."""
    s = request.sampling
    logits = {i: float(x) for i, x in enumerate(row)}
    for token in logits:
        if request.embedding_bias is not None:
            logits[token] += float(request.embedding_bias[token])
        logits[token] /= s.temperature
        if count := context.count(token):
            logits[token] *= s.repetition_penalty if logits[token] < 0 else 1 / s.repetition_penalty
            logits[token] -= s.presence_penalty + s.frequency_penalty * count
    banned = {w[-1] for w in request.bad_words if context[len(context) - len(w) + 1 :] == tuple(w[:-1])}
    if num_generated < request.min_tokens:
        banned |= set(request.end_ids)
    order = sorted((t for t in logits if t not in banned), key=lambda t: (-logits[t], t))
    order = order[: s.top_k or None]
    weights = {t: np.exp(logits[t] - logits[order[0]]) for t in order}
    nucleus, mass = [], 0.0
    for token in order:
        if mass < s.top_p * sum(weights.values()):
            nucleus.append(token)
            mass += weights[token]
    kept = [t for t in nucleus if weights[t] >= s.min_p]
    return [weights[t] / sum(weights[k] for k in kept) if t in kept else 0.0 for t in range(len(row))]


@pytest.mark.parametrize("acceptance", ["logits", "tokens"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_outputs_follow_the_target(rule, num_draft_tokens, acceptance):
    request = Request([1, 0, 2], 3, sampling=RULES[rule], num_draft_tokens=num_draft_tokens)
    draft, target = DRAFT, TARGET
    law = speculative_law(request, draft, target, acceptance=acceptance)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    assert distance(law, target_law(request, target)) < 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_outputs_follow_the_target_for_random_models_and_vocabularies(seed):
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(2, 6))
    request = Request(
        rng.integers(0, vocab, 3),
        2,
        sampling=SamplingParams(temperature=float(rng.uniform(0.4, 2)), top_p=float(rng.uniform(0.5, 1))),
        num_draft_tokens=2,
        end_ids=(0,),
    )
    draft, target = table_model(vocab, seed=10 + seed, scale=2.5), table_model(vocab, seed=20 + seed, scale=2.5)
    assert distance(speculative_law(request, draft, target), target_law(request, target)) < 1e-6


@pytest.mark.parametrize("hides_end_id", [False, True], ids=["shows end id", "hides end id"])
@pytest.mark.parametrize("acceptance", ["auto", "tokens"])
@pytest.mark.parametrize("end_ids", [(2,), (2, 0)], ids=["one end id", "two end ids"])
@pytest.mark.parametrize("min_tokens", [0, 1, 2])
def test_outputs_follow_the_target_with_end_ids(end_ids, min_tokens, acceptance, hides_end_id):
    """Also where engines leave an end id out of their answers: a short proposal must not leak what was drawn next."""
    request = Request(
        [1, 2, 0], 3, min_tokens=min_tokens, sampling=FULL, num_draft_tokens=2, end_ids=end_ids, bad_words=((1, 1),)
    )
    draft, target = table_model(4, seed=7), table_model(4, seed=8)
    law = speculative_law(request, draft, target, acceptance=acceptance, hides_end_id=hides_end_id)
    assert distance(law, target_law(request, target)) < 1e-6


def test_outputs_follow_the_target_with_bias_and_bans():
    request = Request(
        [1],
        3,
        sampling=SamplingParams(temperature=0.7, presence_penalty=0.4),
        num_draft_tokens=3,
        embedding_bias=np.array([0.5, -1.0, 2.0], dtype=np.float32),
        bad_words=((0,), (2, 2)),
    )
    draft, target = table_model(3, seed=1), table_model(3, seed=2)
    law = speculative_law(request, draft, target)
    assert distance(law, target_law(request, target)) < 1e-6
    assert all(0 not in tokens for tokens, _ in law)
    assert all(tokens[i : i + 2] != (2, 2) for tokens, _ in law for i in range(3))


def test_plain_decoding_in_chunks_follows_the_target():
    request = Request([1, 2], 3, sampling=RULES["everything"], end_ids=(0,), min_tokens=1, plain_chunk_tokens=2)
    target = table_model(4, seed=3)
    law = exact_law(lambda choices: output(request, None, TableEngine(target, uniforms=choices)))
    assert distance(law, target_law(request, target)) < 1e-6


# ---- planted breakages: the test above must see each of them


def broken(accept_or_resample):
    """`verify` with another acceptance rule in its place."""

    def call(rows, request, uniforms):
        original = verify_module.accept_or_resample
        verify_module.accept_or_resample = accept_or_resample
        try:
            return verify(rows, request, uniforms)
        finally:
            verify_module.accept_or_resample = original

    return call


def accept_always(draft, p, q, position, uniforms):
    return draft


def no_residual(draft, p, q, position, uniforms):
    return draft if uniforms.accepts(position, min(1.0, p[draft] / q[draft])) else uniforms.draw(position, p)


def inverted_ratio(draft, p, q, position, uniforms):
    accepted = p[draft] > 0 and uniforms.accepts(position, min(1.0, q[draft] / p[draft]))
    residual = np.maximum(p - q, 0)
    return draft if accepted else uniforms.draw(position, residual if residual.any() else p)


def raw_draft_logits(rows, request, uniforms):
    """q without top-k and penalties: not the distribution that was drawn from."""

    class RawDraft(TokenSampler):
        def probabilities(self, logits):
            if any(logits is row for row in request.draft_logits):
                return np.exp(logits - logits.max(), dtype=np.float64) / np.exp(logits - logits.max()).sum()
            return super().probabilities(logits)

    listed = replace(request, draft_logits=list(request.draft_logits))
    request = listed
    original = verify_module.TokenSampler
    verify_module.TokenSampler = RawDraft
    try:
        return verify(rows, listed, uniforms)
    finally:
        verify_module.TokenSampler = original


def bonus_from_the_draft(rows, request, uniforms):
    return verify([*rows[:-1], request.draft_logits[-1]], request, uniforms)


def context_without_the_block(rows, request, uniforms):
    """Penalties that forget the drafts accepted earlier in the same block."""

    class Forgetful(TokenSampler):
        def _processed(self, logits):
            tokens, self.tokens = self.tokens, []
            try:
                return super()._processed(logits)
            finally:
                self.tokens = tokens

    original = verify_module.TokenSampler
    verify_module.TokenSampler = Forgetful
    try:
        return verify(rows, request, uniforms)
    finally:
        verify_module.TokenSampler = original


BREAKAGES = {
    "accept always": (broken(accept_always), FULL),
    "no residual": (broken(no_residual), FULL),
    "ratio upside down": (broken(inverted_ratio), FULL),
    "q is not what was drawn from": (raw_draft_logits, RULES["top_k"]),
    "bonus token from the draft": (bonus_from_the_draft, FULL),
    "penalties forget the block": (context_without_the_block, SamplingParams(temperature=1.0, frequency_penalty=2.0)),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_rule_is_seen(name):
    verify_call, sampling = BREAKAGES[name]
    request = Request([1, 0, 2], 2, sampling=sampling, num_draft_tokens=1)
    draft, target = DRAFT, TARGET
    right = target_law(request, target)
    assert distance(speculative_law(request, draft, target), right) < 1e-6
    assert distance(speculative_law(request, draft, target, verify_call=verify_call), right) > 0.1


def test_an_argmax_draft_declared_as_drawn_is_seen():
    """The draft takes its argmax but hands its logits over as if it had drawn from them."""

    class ArgmaxWithLogits(TableEngine):
        def __call__(self, request):
            return super().__call__(replace(request, sampling=replace(request.sampling, top_k=1)))

    request = Request([0], 2, sampling=FULL, num_draft_tokens=1)
    draft, target = fixed_model([0.7, 0.2, 0.05, 0.05]), fixed_model([0.6, 0.2, 0.1, 0.1])

    def run(choices):
        return output(request, ArgmaxWithLogits(draft, uniforms=choices), TableEngine(target, uniforms=choices))

    assert distance(exact_law(run), target_law(request, target)) > 0.05
    assert distance(speculative_law(request, draft, target, acceptance="tokens"), target_law(request, target)) < 1e-6


def test_a_proposal_that_leaks_a_hidden_end_id_is_seen():
    """The draft engine may draw an end id, leaves it out, and the shorter proposal is verified with its logits."""

    class Leaky(DraftModel):
        def propose(self, generation, num_draft_tokens):
            result = self._call(
                EngineRequest(generation.context, num_draft_tokens, FULL, end_id=0, return_generation_logits=True)
            )
            return Proposal(result.output_ids, result.generation_logits)

    request = Request([1], 2, sampling=FULL, num_draft_tokens=1, end_ids=(0,))
    draft, target = DRAFT, TARGET

    def run(choices):
        engines = [TableEngine(model, uniforms=choices, hides_end_id=True) for model in (draft, target)]
        *_, last = generate(request, Leaky(engines[0]), Target(engines[1]))
        return tuple(last.generation.token_ids.tolist()), last.finish_reason

    assert distance(exact_law(run), target_law(request, target)) > 0.01
    assert distance(speculative_law(request, draft, target, hides_end_id=True), target_law(request, target)) < 1e-6


# ---- with real random numbers

NUM_SAMPLES = 800


def chi_square(request, target_model, run):
    """p-value of `NUM_SAMPLES` outputs, one for each request seed, against the exact law."""
    law = target_law(request, target_model)
    counts = dict.fromkeys(law, 0)
    for seed in range(NUM_SAMPLES):
        outcome = run(replace(request, sampling=replace(request.sampling, seed=seed)))
        assert outcome in law
        counts[outcome] += 1
    expected = np.array([law[outcome] for outcome in law]) * NUM_SAMPLES
    return stats.chisquare(np.array([counts[outcome] for outcome in law]), expected).pvalue


STATISTICAL = Request([1, 0, 2], 2, sampling=SamplingParams(temperature=1.2), num_draft_tokens=1)


@pytest.mark.parametrize("acceptance", ["logits", "tokens"])
def test_sampled_outputs_follow_the_target(acceptance):
    """H0: two-token outputs over 3 ids follow the target's law (9 cells, 8 degrees of freedom).

    800 outputs, one request seed each, real seeds and uniforms; fixed seeds, false-alarm rate 1e-4. Power against
    "accept always" and "no residual", from the noncentral chi-square distribution with the exact broken laws: above
    0.99; computed in the next test.
    """
    draft, target = DRAFT, TARGET
    p_value = chi_square(
        STATISTICAL, target, lambda r: output(r, TableEngine(draft), TableEngine(target), acceptance=acceptance)
    )
    assert p_value > 1e-4


@pytest.mark.parametrize("name", ["accept always", "no residual"])
def test_the_statistical_test_has_power(name):
    draft, target = DRAFT, TARGET
    right = target_law(STATISTICAL, target)
    wrong = speculative_law(STATISTICAL, draft, target, verify_call=BREAKAGES[name][0])
    shift = NUM_SAMPLES * sum((wrong.get(o, 0.0) - p) ** 2 / p for o, p in right.items())
    critical = stats.chi2.isf(1e-4, len(right) - 1)
    assert stats.ncx2.sf(critical, len(right) - 1, shift) > 0.99


def test_one_seed_for_every_cycle_is_seen():
    """The engine call gets the request's own seed each time, as the upstream pipeline does: tokens are tied together.

    Same statistics as above; the law of two tokens that share one random number is far off.
    """
    target = TARGET

    def restarted(request):
        engine = TableEngine(target)
        same_seed = lambda call: engine(replace(call, sampling=request.sampling))  # noqa: E731
        return output(request, None, same_seed)

    plain = replace(STATISTICAL, num_draft_tokens=0, plain_chunk_tokens=1)
    assert chi_square(plain, target, restarted) < 1e-12
    assert chi_square(plain, target, lambda r: output(r, None, TableEngine(target))) > 1e-4
