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

from trtspec.decoding import cascade as cascade_module
from trtspec.decoding import token_tree as token_tree_module
from trtspec.decoding import tree as tree_module
from trtspec.decoding import verify as verify_module
from trtspec.decoding.cascade import Cascade
from trtspec.decoding.cycle import Request, generate
from trtspec.decoding.draft_target import DraftModel, Target
from trtspec.decoding.engine_call import EngineRequest, one_by_one
from trtspec.decoding.generation import Generation
from trtspec.decoding.methods import DraftEngine, make_drafter
from trtspec.decoding.ngram import NgramDrafter
from trtspec.decoding.sampler import TokenSampler
from trtspec.decoding.sampling import SamplingParams
from trtspec.decoding.tree import MergedTrees, PathsTarget, TreeDrafter, in_one_pass
from trtspec.decoding.verify import NO_PROPOSAL, Proposal, Verification, verify

DRAFT, TARGET = table_model(3, seed=0, scale=1.0), table_model(3, seed=17, scale=0.8)
MIDDLE = table_model(3, seed=5, scale=0.9)
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
    return drafted_output(request, None if draft is None else DraftModel(draft, acceptance), target)


def drafted_output(request, drafter, target):
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


# ---- drafters other than a draft model


def cascade_law(request, models, *, acceptance="auto", num_draft_tokens=1, make=None, target_options=None, **options):
    """Of (draft, middle, target); `options` are those of the draft's and the middle model's `TableEngine`."""

    def run(choices):
        draft, middle = (TableEngine(model, uniforms=choices, **options) for model in models[:2])
        target = TableEngine(models[2], uniforms=choices, **(target_options or {}))
        if make is not None:
            return drafted_output(request, make(draft, middle), target)
        drafter = DraftModel(draft, acceptance)
        return drafted_output(request, Cascade(drafter, middle, num_draft_tokens, acceptance=acceptance), target)

    return exact_law(run)


@pytest.mark.parametrize("acceptance", ["logits", "tokens"])
@pytest.mark.parametrize("rule", RULES)
def test_outputs_of_a_cascade_follow_the_target(rule, acceptance):
    """Three levels of chance: the draft's draws, the middle model's verification, the target's."""
    request = Request([1, 0, 2], 3, sampling=RULES[rule], num_draft_tokens=2)
    law = cascade_law(request, (DRAFT, MIDDLE, TARGET), acceptance=acceptance)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    assert distance(law, target_law(request, TARGET)) < 1e-6


def test_outputs_of_a_cascade_follow_the_target_when_the_middle_model_needs_several_passes():
    """Three tokens to the target, made in one to three passes of the middle model, over two ids."""
    request = Request([1, 0], 4, sampling=RULES["frequency"], num_draft_tokens=3)
    models = [table_model(2, seed, scale=1.2) for seed in (1, 2, 3)]
    law = cascade_law(request, models, num_draft_tokens=2)
    assert distance(law, target_law(request, models[2])) < 1e-6


@pytest.mark.parametrize("acceptance", ["logits", "tokens"])
def test_outputs_of_a_cascade_of_four_models_follow_the_target(acceptance):
    """Two middle models, as the table of methods puts them together: a fourth level of chance, over two ids."""
    request = Request([1, 0], 4, sampling=RULES["frequency"], num_draft_tokens=3)
    *models, target = (table_model(2, seed, scale=1.2) for seed in (1, 4, 2, 3))
    asked = set()

    def run(choices):
        engines = {
            role: DraftEngine(TableEngine(model, uniforms=choices))
            for role, model in zip(("draft", "middle_2", "middle"), models, strict=True)
        }
        drafter = make_drafter("cascade", engines, acceptance, num_draft_tokens=2)
        made = drafted_output(request, drafter, TableEngine(target, uniforms=choices))
        asked.update(role for role, engine in engines.items() if engine.call.requests)
        return made

    law = exact_law(run)
    assert asked == {"draft", "middle_2", "middle"}
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    assert distance(law, target_law(request, target)) < 1e-6


@pytest.mark.parametrize("hides_end_id", [False, True], ids=["shows end id", "hides end id"])
@pytest.mark.parametrize("acceptance", ["auto", "tokens"])
@pytest.mark.parametrize("end_ids", [(2,), (2, 0)], ids=["one end id", "two end ids"])
@pytest.mark.parametrize("min_tokens", [0, 1, 2])
def test_outputs_of_a_cascade_follow_the_target_with_end_ids(end_ids, min_tokens, acceptance, hides_end_id):
    """An end id is banned at both inner levels, whichever level hides it."""
    request = Request(
        [1, 2, 0], 3, min_tokens=min_tokens, sampling=FULL, num_draft_tokens=2, end_ids=end_ids, bad_words=((1, 1),)
    )
    models = [table_model(4 if len(end_ids) > 1 else 3, seed=seed) for seed in (7, 8, 9)]
    options = {"hides_end_id": hides_end_id}
    law = cascade_law(request, models, acceptance=acceptance, target_options=options, **options)
    assert distance(law, target_law(request, models[2])) < 1e-6


def test_outputs_of_a_cascade_follow_the_target_with_bias_and_bans():
    request = Request(
        [1],
        3,
        sampling=SamplingParams(temperature=0.7, presence_penalty=0.4),
        num_draft_tokens=2,
        embedding_bias=np.array([0.5, -1.0, 2.0], dtype=np.float32),
        bad_words=((0,), (2, 2)),
    )
    models = [table_model(3, seed=seed) for seed in (1, 2, 3)]
    assert distance(cascade_law(request, models), target_law(request, models[2])) < 1e-6


@pytest.mark.parametrize("broken", ["draft", "middle"])
@pytest.mark.parametrize("call", [1, 2])
def test_outputs_of_a_cascade_follow_the_target_when_a_level_fails(broken, call):
    """One call raises. What the middle model drew before in the same cycle is still proposed: whether there is a second
    call depends on it, and without it the proposals that reach the target would not be distributed as declared."""
    request = Request([1, 0, 2], 3, sampling=FULL, num_draft_tokens=2)

    def run(choices):
        fails = {broken: lambda number: RuntimeError("down") if number == call else None}
        models = {"draft": DRAFT, "middle": MIDDLE, "target": TARGET}
        engines = {
            role: TableEngine(model, uniforms=choices, fails=fails.get(role, lambda number: None))
            for role, model in models.items()
        }
        return drafted_output(request, Cascade(DraftModel(engines["draft"]), engines["middle"], 1), engines["target"])

    assert distance(exact_law(run), target_law(request, TARGET)) < 1e-6


def test_outputs_of_a_cascade_over_a_look_up_follow_the_target():
    """The drafter of the middle model may be any drafter; here its q is one-hot."""
    request = Request([1, 0, 1, 0], 3, sampling=RULES["everything"], num_draft_tokens=2)
    law = cascade_law(request, (DRAFT, MIDDLE, TARGET), make=lambda draft, middle: Cascade(NgramDrafter(2), middle, 1))
    assert distance(law, target_law(request, TARGET)) < 1e-6


def ngram_law(request, target_model, drafter=None, **options):
    drafter = drafter or NgramDrafter(3)
    return exact_law(
        lambda choices: drafted_output(request, drafter, TableEngine(target_model, uniforms=choices, **options))
    )


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_outputs_of_a_look_up_follow_the_target(rule, num_draft_tokens):
    """Looked-up tokens come without logits: q is one-hot, whatever the sampling rule is."""
    request = Request([1, 0, 2, 1, 0], 4, sampling=RULES[rule], num_draft_tokens=num_draft_tokens)
    assert distance(ngram_law(request, TARGET), target_law(request, TARGET)) < 1e-6


@pytest.mark.parametrize("hides_end_id", [False, True], ids=["shows end id", "hides end id"])
@pytest.mark.parametrize("end_ids", [(2,), (2, 0)], ids=["one end id", "two end ids"])
@pytest.mark.parametrize("min_tokens", [0, 2])
def test_outputs_of_a_look_up_follow_the_target_with_end_ids(end_ids, min_tokens, hides_end_id):
    """The prompt holds end ids, so the look-up proposes them too."""
    request = Request(
        [1, 2, 0, 1], 4, min_tokens=min_tokens, sampling=FULL, num_draft_tokens=3, end_ids=end_ids, bad_words=((1, 1),)
    )
    target = table_model(4, seed=8)
    assert distance(ngram_law(request, target, hides_end_id=hides_end_id), target_law(request, target)) < 1e-6


# ---- token trees: one tree, then plain decoding, so that short outputs see all of it


def tree_law(request, branching, models=(DRAFT, TARGET), *, acceptance="auto", by_paths=False, make=None, **options):
    """Of (draft, target), or several drafts and a target; `options` are those of the target's `TableEngine`. By paths:
    every call draws for itself."""

    def run(choices):
        target = TableEngine(models[-1], uniforms=choices, **options)
        drafter = tree_drafter([TableEngine(model) for model in models[:-1]], branching, acceptance, choices, make)
        verifier = PathsTarget(target, one_by_one(target)) if by_paths else Target(target)
        num_nodes = (len(models) - 1) * int(sum(np.cumprod(branching)))
        generation = Generation(replace(request, num_draft_tokens=num_nodes))
        proposal = drafter.propose(generation, len(branching))
        while generation.finish_reason is None:
            generation.commit(proposal, verifier.verify(generation, proposal))
            proposal = NO_PROPOSAL
        return tuple(generation.token_ids.tolist()), generation.finish_reason

    return exact_law(run)


def tree_drafter(drafts, branching, acceptance, choices, make=None):
    make, uniforms = make or TreeDrafter, lambda seed: choices
    drafters = [make(in_one_pass(draft), branching, acceptance, uniforms=uniforms) for draft in drafts]
    return MergedTrees(drafters) if len(drafters) > 1 else drafters[0]


KINDS = {  # how trees are drafted and verified
    "drawn": {"acceptance": "auto"},
    "chosen": {"acceptance": "tokens"},
    "path by path": {"acceptance": "tokens", "by_paths": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rule", "branching"),
    [*((rule, (2, 1)) for rule in RULES), ("full", (2,)), ("temperature", (3,)), ("frequency", (1, 2))],
    ids=str,
)
def test_outputs_of_a_tree_follow_the_target(rule, branching, kind):
    request = Request([1, 0, 2], len(branching) + 1, sampling=RULES[rule], plain_chunk_tokens=1)
    law = tree_law(request, branching, **KINDS[kind])
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    assert distance(law, target_law(request, TARGET)) < 1e-6


@pytest.mark.parametrize(
    ("rule", "kind"),
    [("top_k", "drawn"), ("top_p", "drawn"), ("full", "chosen"), ("everything", "chosen"), ("top_k", "path by path")],
)
def test_outputs_of_a_tree_that_branches_twice_follow_the_target(rule, kind):
    request = Request([1, 0, 2], 3, sampling=RULES[rule], plain_chunk_tokens=1)
    assert distance(tree_law(request, (2, 2), **KINDS[kind]), target_law(request, TARGET)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_sizes", [(3, 4), (4, 3), (2, 5)], ids=str)
def test_outputs_of_a_tree_follow_the_target_with_vocabularies_of_other_sizes(vocab_sizes, kind):
    models = [table_model(size, seed) for seed, size in enumerate(vocab_sizes)]
    request = Request([1, 0], 2, sampling=FULL, plain_chunk_tokens=1)
    assert distance(tree_law(request, (3,), models, **KINDS[kind]), target_law(request, models[1])) < 1e-6


@pytest.mark.parametrize("hides_end_id", [False, True], ids=["shows end id", "hides end id"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("min_tokens", [0, 1, 2])
def test_outputs_of_a_tree_follow_the_target_with_an_end_id(min_tokens, kind, hides_end_id):
    """It is a node like others, with nothing below it."""
    request = Request(
        [1, 2, 0], 3, min_tokens=min_tokens, sampling=FULL, end_ids=(2,), bad_words=((1, 1),), plain_chunk_tokens=1
    )
    models = [table_model(3, seed=seed) for seed in (7, 8)]
    law = tree_law(request, (2, 1), models, hides_end_id=hides_end_id, **KINDS[kind])
    assert distance(law, target_law(request, models[1])) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_a_tree_follow_the_target_with_bias_and_bans(kind):
    request = Request(
        [1],
        3,
        sampling=SamplingParams(temperature=0.7, presence_penalty=0.4),
        embedding_bias=np.array([0.5, -1.0, 2.0], dtype=np.float32),
        bad_words=((0,), (2, 2)),
        plain_chunk_tokens=1,
    )
    law = tree_law(request, (2, 2), **KINDS[kind])
    assert distance(law, target_law(request, TARGET)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rule", "branching"),
    [*((rule, (1, 1)) for rule in RULES), ("full", (2,)), ("top_p", (2,)), ("everything", (2,)), ("temperature", (1,))],
    ids=str,
)
def test_outputs_of_the_trees_of_two_drafts_follow_the_target(rule, branching, kind):
    """Drawn siblings come from two distributions, and each is judged by its own."""
    request = Request([1, 0, 2], len(branching) + 1, sampling=RULES[rule], plain_chunk_tokens=1)
    law = tree_law(request, branching, (DRAFT, MIDDLE, TARGET), **KINDS[kind])
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    assert distance(law, target_law(request, TARGET)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["full", "top_k", "top_p", "frequency"])
def test_outputs_of_the_trees_of_three_drafts_and_of_one_twice_follow_the_target(rule, kind):
    models = [table_model(4, seed, scale=1.0) for seed in (2, 3, 4)]
    request = Request([1, 0], 2, sampling=RULES[rule], plain_chunk_tokens=1)
    law = target_law(request, models[2])
    assert distance(tree_law(request, (1,), (*models[:2], models[0], models[2]), **KINDS[kind]), law) < 1e-6
    assert distance(tree_law(request, (2,), (models[0], models[0], models[2]), **KINDS[kind]), law) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_sizes", [(3, 5, 4), (5, 3, 4), (2, 4, 3)], ids=str)
def test_outputs_of_the_trees_of_drafts_with_vocabularies_of_other_sizes_follow_the_target(vocab_sizes, kind):
    models = [table_model(size, seed) for seed, size in enumerate(vocab_sizes)]
    request = Request([1, 0], 2, sampling=FULL, plain_chunk_tokens=1)
    assert distance(tree_law(request, (2,), models, **KINDS[kind]), target_law(request, models[2])) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("call", [1, 2])
def test_outputs_of_trees_follow_the_target_when_a_draft_fails(call, broken, kind):
    """What was drawn before the call that fails is still proposed: there is no second call behind an end id."""
    request = Request([1, 0, 2], 3, sampling=FULL, num_draft_tokens=4, end_ids=(2,))
    acceptance, by_paths = KINDS[kind]["acceptance"], kind == "path by path"

    def run(choices):
        target = TableEngine(TARGET, uniforms=choices)
        fails = lambda number: RuntimeError("down") if number >= call else None  # noqa: E731
        drafts = [
            TableEngine(model, **({"fails": fails} if index in broken else {}))
            for index, model in enumerate((DRAFT, MIDDLE))
        ]
        drafter = tree_drafter(drafts, (1, 1), acceptance, choices)
        verifier = PathsTarget(target, one_by_one(target)) if by_paths else Target(target)
        *_, last = generate(request, drafter, verifier)
        return tuple(last.generation.token_ids.tolist()), last.finish_reason

    assert distance(exact_law(run), target_law(request, TARGET)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("end_ids", "min_tokens", "vocab_size", "branching"),
    [((1,), 0, 2, (2, 1, 1)), ((1, 0), 0, 3, (2, 1)), ((1, 0), 1, 3, (2, 1)), ((1, 0), 2, 3, (2, 1))],
    ids=str,
)
def test_outputs_of_one_tree_after_another_follow_the_target(kind, end_ids, min_tokens, vocab_size, branching):
    """The whole cycle: trees as deep as there is room for."""
    request = Request(
        [1, 0],
        len(branching) + 1,
        min_tokens=min_tokens,
        sampling=RULES["frequency"],
        num_draft_tokens=5,
        end_ids=end_ids,
    )
    models = [table_model(vocab_size, seed, scale=1.2) for seed in (1, 2)]
    acceptance, by_paths = KINDS[kind]["acceptance"], kind == "path by path"

    def run(choices):
        draft, target = TableEngine(models[0]), TableEngine(models[1], uniforms=choices)
        drafter = TreeDrafter(in_one_pass(draft), branching, acceptance, uniforms=lambda seed: choices)
        verifier = PathsTarget(target, one_by_one(target)) if by_paths else Target(target)
        *_, last = generate(request, drafter, verifier)
        assert last.generation.draft_error is None
        return tuple(last.generation.token_ids.tolist()), last.finish_reason

    assert distance(exact_law(run), target_law(request, models[1])) < 1e-6


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


def cascade_of_the_drafts_logits(draft, middle):
    """The middle model's tokens are declared as drawn from the draft's distribution."""

    def lying(request):
        result = middle(request)
        context, rows = request.input_ids.tolist(), []
        for token in result.output_ids.tolist():
            rows.append(DRAFT(tuple(context)))
            context.append(token)
        return replace(result, generation_logits=np.array(rows))

    return Cascade(DraftModel(draft), lying, 1)


def cascade_that_may_end(draft, middle):
    """The middle model may draw the end id, and a shorter proposal says that it did."""

    class Leaky(Cascade):
        def propose(self, generation, num_draft_tokens):
            request = EngineRequest(generation.context, num_draft_tokens, FULL, end_id=0, return_generation_logits=True)
            result = middle(request)
            return Proposal(result.output_ids, result.generation_logits)

    return Leaky(DraftModel(draft), middle, 1)


def test_a_cascade_that_breaks_the_rule_is_seen():
    request = Request([1, 0, 2], 3, sampling=FULL, num_draft_tokens=2, end_ids=(0,))
    models, right = (DRAFT, MIDDLE, TARGET), target_law(request, TARGET)
    assert distance(cascade_law(request, models, hides_end_id=True), right) < 1e-6
    lying = cascade_law(request, models, make=cascade_of_the_drafts_logits)
    assert distance(lying, right) > 0.01
    leaky = cascade_law(request, models, make=cascade_that_may_end, hides_end_id=True)
    assert distance(leaky, right) > 0.01
    # the inner verification accepts everything: the tokens are the draft's, declared as the middle model's
    careless = cascade_law(request, models, verify_call=broken(accept_always))
    assert distance(careless, right) > 0.01


def test_a_look_up_declared_as_drawn_is_seen():
    class WithLogits(NgramDrafter):
        def propose(self, generation, num_draft_tokens):
            tokens = super().propose(generation, num_draft_tokens).tokens
            return Proposal(tokens, np.zeros((len(tokens), 4), dtype=np.float32))

    request = Request([0, 0], 2, sampling=FULL, num_draft_tokens=1)
    target = fixed_model([0.6, 0.2, 0.1, 0.1])
    assert distance(ngram_law(request, target), target_law(request, target)) < 1e-6
    assert distance(ngram_law(request, target, WithLogits()), target_law(request, target)) > 0.05


def eldest_by_id(node_logits, branching, acceptance, uniforms):
    """Siblings in the order of their ids, not in that of their draws."""

    class Sorted(TreeDrafter):
        def propose(self, generation, num_draft_tokens):
            proposal = super().propose(generation, num_draft_tokens)
            return replace(proposal, tokens=np.sort(proposal.tokens))

    return Sorted(node_logits, branching, acceptance, uniforms=uniforms)


def likeliest_as_drawn(node_logits, branching, acceptance, uniforms):
    """The likeliest tokens, handed over with logits as if they had been drawn."""

    class Lying(TreeDrafter):
        def propose(self, generation, num_draft_tokens):
            chosen = TreeDrafter(node_logits, branching, "tokens").propose(generation, num_draft_tokens)
            return replace(chosen, logits=super().propose(generation, num_draft_tokens).logits)

    return Lying(node_logits, branching, acceptance, uniforms=uniforms)


TREE_BREAKAGES = {
    "accepts always": ("keeps_draft", lambda *args: True),
    "no residual": ("residual", lambda p, q: p),
    "q keeps the elder siblings": ("without", lambda q, *tokens: q),
}


@pytest.mark.parametrize("name", TREE_BREAKAGES)
def test_a_broken_rule_for_trees_is_seen(monkeypatch, name):
    request = Request([1, 0, 2], 2, sampling=FULL, plain_chunk_tokens=1)
    models = [fixed_model([0.7, 0.2, 0.05, 0.05]), fixed_model([0.1, 0.5, 0.2, 0.2])]
    right = target_law(request, models[1])
    assert distance(tree_law(request, (2,), models), right) < 1e-6
    where, wrong = TREE_BREAKAGES[name]
    monkeypatch.setattr(token_tree_module, where, wrong)
    assert distance(tree_law(request, (2,), models), right) > 0.05


def test_a_sibling_judged_by_the_other_drafts_distribution_is_seen(monkeypatch):
    request = Request([1, 0, 2], 2, sampling=FULL, plain_chunk_tokens=1)
    models = [fixed_model(q) for q in ([0.7, 0.2, 0.05, 0.05], [0.05, 0.05, 0.1, 0.8], [0.1, 0.3, 0.3, 0.3])]
    right = target_law(request, models[2])
    assert distance(tree_law(request, (1,), models), right) < 1e-6
    monkeypatch.setattr(token_tree_module.np, "array_equal", lambda a, b: True)
    assert distance(tree_law(request, (1,), models), right) > 0.02


def test_drafts_that_are_dropped_because_of_what_was_drawn_are_seen():
    """The draft fails behind a token that is no end id, and what it had drawn is thrown away."""

    class Dropping(TreeDrafter):
        def grow(self, generation, *rest):
            tree = super().grow(generation, *rest)
            if generation.draft_error:
                raise generation.draft_error
            return tree

    request = Request([1, 0, 2], 3, sampling=FULL, num_draft_tokens=2, end_ids=(2,))

    def law(make):
        def run(choices):
            draft = TableEngine(DRAFT, fails=lambda number: RuntimeError("down") if number == 2 else None)
            drafter = make(in_one_pass(draft), (1, 1), uniforms=lambda seed: choices)
            *_, last = generate(request, drafter, Target(TableEngine(TARGET, uniforms=choices)))
            return tuple(last.generation.token_ids.tolist()), last.finish_reason

        return exact_law(run)

    assert distance(law(TreeDrafter), target_law(request, TARGET)) < 1e-6
    assert distance(law(Dropping), target_law(request, TARGET)) > 0.01


@pytest.mark.parametrize("make", [eldest_by_id, likeliest_as_drawn])
def test_a_tree_that_was_not_drawn_as_declared_is_seen(make):
    request = Request([1, 0, 2], 2, sampling=FULL, plain_chunk_tokens=1)
    assert distance(tree_law(request, (2,), make=make), target_law(request, TARGET)) > 0.01


def test_taking_the_longest_path_is_seen(monkeypatch):
    """Of calls that draw for themselves, the one that got farthest: what the draft says would come too often."""

    def longest(tree, paths, results, with_log_probs):
        tokens = max((tuple(result.output_ids.tolist()) for result in results), key=len)
        return Verification(tokens, len(tokens) - 1)

    request = Request([1, 0, 2], 3, sampling=FULL, plain_chunk_tokens=1)
    right = target_law(request, TARGET)
    assert distance(tree_law(request, (2, 1), **KINDS["path by path"]), right) < 1e-6
    monkeypatch.setattr(tree_module, "_joined", longest)
    assert distance(tree_law(request, (2, 1), **KINDS["path by path"]), right) > 0.01


def test_a_path_that_drew_something_else_before_is_seen(monkeypatch):
    """The own token of the first path leads to another one, whose tokens are taken though its call did not get there:
    its own token is then drawn after another text."""

    def unchecked(tree, paths, results, with_log_probs):
        first = results[0].output_ids.tolist()
        nodes = tree.follow(first)
        if len(nodes) == len(first):
            other = next(index for index, path in enumerate(paths) if nodes[-1] in path)
            first += results[other].output_ids.tolist()[-1:]
        return Verification(tuple(first), len(first) - 1)

    request = Request([1, 0, 2], 3, sampling=FULL, plain_chunk_tokens=1)
    monkeypatch.setattr(tree_module, "_joined", unchecked)
    assert distance(tree_law(request, (2,), **KINDS["path by path"]), target_law(request, TARGET)) > 0.01


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


def test_sampled_outputs_of_a_cascade_follow_the_target(monkeypatch):
    """H0: two-token outputs over 4 ids follow the target's law (16 cells); real seeds and uniforms, one seed a request.

    800 outputs, fixed seeds, false-alarm rate 1e-4. Power: when the middle model draws with the numbers that the
    target uses at the same position, more than a tenth of the probability is in the wrong place, and the same
    statistics say so.
    """
    draft, middle, target = (
        fixed_model([0.7, 0.1, 0.1, 0.1]),
        fixed_model([0.5, 0.1, 0.2, 0.2]),
        fixed_model([0.02, 0.02, 0.48, 0.48]),
    )
    request = Request([0], 2, sampling=FULL, num_draft_tokens=2)

    def run(request):
        drafter = Cascade(DraftModel(TableEngine(draft)), TableEngine(middle), 1)
        return drafted_output(request, drafter, TableEngine(target))

    assert chi_square(request, target, run) > 1e-4
    monkeypatch.setattr(cascade_module, "derive_seed", lambda seed, position, stream: seed)
    assert chi_square(request, target, run) < 1e-12


def test_sampled_outputs_of_a_cascade_of_four_models_follow_the_target(monkeypatch):
    """H0: four-token outputs over 2 ids follow the target's law (16 cells); real seeds, one a request.

    800 outputs, fixed seeds, false-alarm rate 1e-4. Power: as above, when all levels draw with the numbers of the
    target.
    """
    draft, lower, middle, target = (fixed_model([p, 1 - p]) for p in (0.9, 0.95, 0.5, 0.05))
    request = Request([0], 4, sampling=FULL, num_draft_tokens=3)

    def run(request):
        models = {"draft": draft, "middle_2": lower, "middle": middle}
        engines = {role: DraftEngine(TableEngine(model)) for role, model in models.items()}
        drafter = make_drafter("cascade", engines, num_draft_tokens=2)
        made = drafted_output(request, drafter, TableEngine(target))
        assert all(engine.call.requests for engine in engines.values())
        return made

    assert chi_square(request, target, run) > 1e-4
    monkeypatch.setattr(cascade_module, "derive_seed", lambda seed, position, stream: seed)
    assert chi_square(request, target, run) < 1e-12
