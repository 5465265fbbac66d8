"""Does it fit: weights, buffers and caches of every model, GPU by GPU, and what to change where it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trtspec.models.config import ModelConfig
from trtspec.plan import memory as planned
from trtspec.plan.memory import CONTEXT_GB, alternatives, memory_plan
from trtspec.plan.result import MemoryRow
from trtspec.plan.shapes import shape_of
from trtspec.spec.gpus import GPUS
from trtspec.spec.load import load_spec
from trtspec.spec.schema import Spec

SPEC = """
version: 1
target: {model: t}
speculation: {method: draft_target, num_draft_tokens: 4, draft: {model: d}}
hardware: {gpu: H100-SXM}
engine: {runtime: tensorrt_llm, max_batch_size: 8, max_input_len: 1024, max_seq_len: 8192}
"""
BIG = {"target": shape_of("Llama-3.1-70B"), "draft": shape_of("Llama-3.2-1B")}
SMALL = {"target": shape_of("Llama-3.1-8B"), "draft": shape_of("Llama-3.2-1B")}


def spec_of(directory: Path, *overrides: str, text: str = SPEC) -> Spec:
    (directory / "s.yaml").write_text(text)
    return load_spec(directory / "s.yaml", overrides)


def by_role(rows: tuple[MemoryRow, ...]) -> dict[str, MemoryRow]:
    return {row.role: row for row in rows}


def sized(**sizes: int) -> ModelConfig:
    return ModelConfig.from_hf({"vocab_size": 50_000, "num_hidden_layers": 100, "head_dim": 100, **sizes})


# 2 and 30 GB in bfloat16.
TWO = sized(hidden_size=1000, num_attention_heads=8, num_key_value_heads=1, intermediate_size=2400)
THIRTY = sized(hidden_size=5000, num_attention_heads=50, num_key_value_heads=5, intermediate_size=6000)


@pytest.mark.parametrize(
    ("fraction", "caches", "problem"),
    [
        (0.4, {"draft": 31.2, "target": 15.1}, None),
        (0.9, {"draft": 0.0, "target": 0.0}, "the target cannot load: its weights and buffers take 30.0 GB of GPU 0"),
    ],
)
def test_a_draft_that_loads_first_decides_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fraction: float, caches: dict[str, float], problem: str | None
) -> None:
    """80 GB card; draft of 2 GB, then target of 30 GB at .9: 31.2 and 15.1 GB of cache, 46.8 GB left in between."""
    monkeypatch.setattr(planned, "CONTEXT_GB", 0.0)
    fractions = [
        f"serving.kv_cache_free_gpu_mem_fraction.{role}={value}"
        for role, value in (("draft", fraction), ("target", 0.9))
    ]
    spec = spec_of(tmp_path, *fractions, "engine.max_num_tokens=1", "engine.max_seq_len=2048")
    models = {"target": THIRTY, "draft": TWO}
    memory = memory_plan(spec, models, 80, 1, 16)
    rows = by_role(memory.rows)
    assert {role: round(row.weights_gb, 6) for role, row in rows.items()} == {"draft": 2.0, "target": 30.0}
    assert {role: row.kv_cache_gb for role, row in rows.items()} == pytest.approx(caches, abs=0.05)
    assert memory.fits == (problem is None)
    if problem is None:
        assert rows["draft"].left_gb == pytest.approx(46.8, abs=0.05)
        assert rows["draft"].fraction == fraction
    else:
        assert memory.problem is not None and memory.problem.startswith(problem)
        assert memory.max_batch == 0
        assert alternatives(spec, models, memory, GPUS, GPUS["H100-SXM"])[0].startswith(
            "without serving.kv_cache_free_gpu_mem_fraction"
        )


def test_buffers_by_hand(tmp_path: Path) -> None:
    """Llama-3.1-8B verifies 4 drafts for 16 sequences, 8192 tokens at most in a pass; Llama-3.2-1B drafts."""
    rows = by_role(memory_plan(spec_of(tmp_path), SMALL, 80, 16, 1000).rows)
    target, draft = rows["target"], rows["draft"]
    assert target.activations_gb == pytest.approx(8192 * 2 * (2 * 4096 + (32 + 2 * 8) * 128 + 2 * 14336) / 1e9)
    assert target.logits_gb == pytest.approx(16 * (4 + 1) * 128256 * 4 / 1e9)
    assert draft.logits_gb == pytest.approx(16 * 4 * 128256 * 4 / 1e9)
    assert target.kv_needed_gb == pytest.approx(16 * (1000 + 4) * 2 * 32 * 8 * 128 * 2 / 1e9)
    # One process holds both engines.
    assert (draft.context_gb, target.context_gb) == (CONTEXT_GB, 0.0)
    assert draft.left_gb == pytest.approx(
        80 - draft.weights_gb - draft.activations_gb - draft.logits_gb - CONTEXT_GB - draft.kv_cache_gb
    )
    assert target.left_gb == pytest.approx(
        draft.left_gb - target.weights_gb - target.activations_gb - target.logits_gb - target.kv_cache_gb
    )


@pytest.mark.parametrize(
    ("overrides", "role", "attribute", "factor"),
    [
        (["engine.gather_generation_logits=false", "speculation.acceptance=tokens"], "draft", "logits_gb", 1 / 4),
        (["target.quantization=fp8"], "target", "weights_gb", (8.03 - 1.05 + 2 * 1.05) / (2 * 8.03)),
        (["engine.max_num_tokens=4096"], "target", "activations_gb", 1 / 2),
    ],
)
def test_what_changes_a_size(tmp_path: Path, overrides: list[str], role: str, attribute: str, factor: float) -> None:
    """Embedding and head, 1.05 x 10^9 of the 8.03 x 10^9 numbers, are never quantised."""
    plain, other = (
        getattr(by_role(memory_plan(spec_of(tmp_path, *changes), SMALL, 80, 8).rows)[role], attribute)
        for changes in ([], overrides)
    )
    assert other / plain == pytest.approx(factor, rel=2e-3)


def test_ranks_share_a_model_and_have_processes_of_their_own(tmp_path: Path) -> None:
    split = ("target.tensor_parallel=4", "hardware.num_gpus=4", "serving.orchestrator=true")
    memory = memory_plan(spec_of(tmp_path, *split), BIG, 80, 8)
    targets = [row for row in memory.rows if row.role == "target"]
    assert [row.gpu for row in targets] == [0, 1, 2, 3]
    assert all(row.weights_gb == pytest.approx(70.55 * 2 / 4, rel=1e-3) for row in targets)
    assert all(row.context_gb == CONTEXT_GB for row in memory.rows)
    assert len({row.kv_cache_gb for row in targets}) == 1  # ranks agree on the smallest
    assert targets[0].left_gb < targets[1].left_gb  # the draft is there too
    assert memory.fits


def test_the_largest_batch_fits_and_the_next_does_not(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    most = memory_plan(spec, SMALL, 80, 1, 4096).max_batch
    fits = [memory_plan(spec, SMALL, 80, batch, 4096).fits for batch in range(1, most + 20)]
    assert fits == [True] * most + [False] * 19
    too_many = memory_plan(spec, SMALL, 80, most + 1, 4096)
    assert too_many.problem is not None and f"for {most + 1} sequences of 4096 tokens" in too_many.problem
    assert alternatives(spec, SMALL, too_many, GPUS, GPUS["H100-SXM"])[0] == f"a batch of {most} (--batch {most})"


def test_a_shorter_context_is_found_where_no_batch_is(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "engine.max_seq_len=131072")
    memory = memory_plan(spec, SMALL, 30, 1, 131072)
    assert not memory.fits and memory.max_batch == 0
    words = alternatives(spec, SMALL, memory, GPUS, replace_memory(30))[0]
    length = int(words.split()[3])
    assert memory_plan(spec, SMALL, 30, 1, length).fits
    assert not memory_plan(spec, SMALL, 30, 1, length + 2).fits


def replace_memory(gigabytes: int) -> object:
    return GPUS["H100-SXM"].model_copy(update={"memory_gb": gigabytes})


def test_every_alternative_fits_alone_and_nearer_ones_come_first(tmp_path: Path) -> None:
    """70B in bfloat16 on one H100 of 80 GB: neither fp8 nor an H200 is enough, more GPUs are."""
    spec = spec_of(tmp_path)
    memory = memory_plan(spec, BIG, 80, 8)
    assert not memory.fits
    found = alternatives(spec, BIG, memory, GPUS, GPUS["H100-SXM"])
    assert found[0].startswith("target.tensor_parallel=4 hardware.num_gpus=4 serving.orchestrator=true")
    assert any("fp8" in words and "hardware.gpu=" in words for words in found)
    for words in found:
        other = spec_of(tmp_path, *words.split())
        assert memory_plan(other, BIG, GPUS[other.hardware.gpu].memory_gb, 8).fits, words
        for left_out in words.split():  # nothing of it is idle
            if left_out.startswith(("target.tensor_parallel", "target.quantization", "hardware.gpu")):
                rest = [word for word in words.split() if word != left_out]
                if "kv_cache_dtype" in " ".join(rest) and "quantization" in left_out:
                    rest = [word for word in rest if "kv_cache_dtype" not in word]
                less = spec_of(tmp_path, *rest)
                assert not memory_plan(less, BIG, GPUS[less.hardware.gpu].memory_gb, 8).fits, rest


def test_where_nothing_helps_nothing_is_promised(tmp_path: Path) -> None:
    giant = replace(BIG["target"], num_hidden_layers=8000)
    spec = spec_of(tmp_path)
    models = {**BIG, "target": giant}
    assert alternatives(spec, models, memory_plan(spec, models, 80, 8), GPUS, GPUS["H100-SXM"]) == []


def test_caches_of_the_torch_runtime_are_the_specs(tmp_path: Path) -> None:
    text = SPEC.replace("runtime: tensorrt_llm", "runtime: torch").replace("H100-SXM", "cpu")
    spec = spec_of(tmp_path, "serving.kv_cache_bytes.target=2GB", text=text)
    memory = memory_plan(spec, SMALL, 64, 4, 2000)
    rows = by_role(memory.rows)
    assert rows["target"].kv_cache_gb == 2.0
    # Unset: eight longest sequences, as many as the server works on.
    assert rows["draft"].kv_cache_gb == pytest.approx(8 * 8192 * 2 * 16 * 8 * 64 * 2 / 1e9)
    assert all(row.fraction is None for row in memory.rows)
    assert memory.max_batch == int(2e9 / (2004 * 2 * 32 * 8 * 128 * 2))
    scarce = memory_plan(spec, SMALL, 16, 4, 2000)
    assert scarce.problem is not None and scarce.problem.startswith("the machine has 16.0 GB")


def test_an_early_exit_shares_its_weights_on_torch_only(tmp_path: Path) -> None:
    text = SPEC.replace("draft_target,", "early_exit, early_exit: {layer: 8},").replace(", draft: {model: d}", "")
    models = {"target": SMALL["target"], "draft": replace(SMALL["target"], num_hidden_layers=8)}
    compiled = by_role(memory_plan(spec_of(tmp_path, text=text), models, 80, 1).rows)
    shared = by_role(memory_plan(spec_of(tmp_path, "engine.runtime=torch", text=text), models, 80, 1).rows)
    assert compiled["draft"].weights_gb > 4
    assert shared["draft"].weights_gb == 0


def test_the_llm_api_has_one_cache_for_all_models(tmp_path: Path) -> None:
    api = ("engine.track=llmapi", "engine.version=1.3.0", "serving.kv_cache_free_gpu_mem_fraction.target=0.8")
    memory = memory_plan(spec_of(tmp_path, *api), SMALL, 80, 8)
    rows = by_role(memory.rows)
    fixed = sum(row.weights_gb + row.activations_gb + row.logits_gb + row.context_gb for row in memory.rows)
    assert sum(row.kv_cache_gb for row in memory.rows) == pytest.approx(0.8 * (80 - fixed))
    needs = [row.kv_cache_gb / row.kv_needed_gb for row in memory.rows]
    assert needs[0] == pytest.approx(needs[1])
    assert rows["target"].left_gb == pytest.approx(0.2 * (80 - fixed))


def test_heads_and_modules_are_weights_of_the_target(tmp_path: Path) -> None:
    none = by_role(memory_plan(spec_of(tmp_path, "speculation.method=none"), SMALL, 80, 1).rows)["target"]
    text = SPEC.replace("draft_target, num_draft_tokens: 4", "medusa, medusa: {heads: h, num_heads: 3, choices: [[0]]}")
    heads = by_role(memory_plan(spec_of(tmp_path, text=text), SMALL, 80, 1).rows)["target"]
    assert (heads.weights_gb - none.weights_gb) * 1e9 == pytest.approx(2 * 3 * (4096**2 + 4096 * 128256))


@pytest.mark.parametrize(("shape", "billions"), [("DeepSeek-V3", 671), ("Mixtral-8x7B", 46.7), ("Llama-2-7B", 6.74)])
def test_weights_are_those_of_the_model_card(tmp_path: Path, shape: str, billions: float) -> None:
    """Embedding, head, latent attention, experts and dense layers, in bfloat16."""
    spec = spec_of(tmp_path, "speculation.method=none")
    (row,) = memory_plan(spec, {"target": shape_of(shape)}, 2000, 1).rows
    assert row.weights_gb / 2 == pytest.approx(billions, rel=0.01)
