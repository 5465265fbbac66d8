"""KV caches of engines that share GPUs: what each gets, and fractions that give each what it needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.spec.load import load_spec
from trtspec.spec.schema import Spec
from trtspec.trtllm.memory import (
    DEFAULT_FRACTION,
    Load,
    Loaded,
    default_fractions,
    kv_bytes_per_token,
    load_sequence,
    share_gpus,
)
from trtspec.trtllm.placement import check_placement, device_ids, load_order, mpi_world_size, participants

LLAMA = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "max_position_embeddings": 131072,
    }
)
DRAFT = replace(LLAMA, num_hidden_layers=16, hidden_size=2048, num_attention_heads=32, head_size=64)
SPEC = """
version: 1
target: {model: t, tensor_parallel: 2}
speculation: {method: draft_target, draft: {model: d}}
hardware: {gpu: H100-SXM, num_gpus: 4}
engine: {runtime: tensorrt_llm, max_batch_size: 8, max_input_len: 1024, max_seq_len: 8192}
serving: {orchestrator: true}
"""


def spec_of(directory: Path, *overrides: str, text: str = SPEC) -> Spec:
    (directory / "s.yaml").write_text(text)
    return load_spec(directory / "s.yaml", overrides)


def shares_of(spec: Spec, gigabytes: dict[str, float]) -> Any:
    models = {role: LLAMA if role == "target" else DRAFT for role in spec.models}
    return share_gpus(spec, models, {role: int(size * 1e9) for role, size in gigabytes.items()})


def held(rows: list[Loaded], role: str) -> list[tuple[int, float, float]]:
    return [(row.gpu, round(row.kv_cache, 1), round(row.left, 1)) for row in rows if row.role == role]


def test_each_model_takes_its_part_of_what_is_then_free() -> None:
    rows = load_sequence(80, [Load("draft", 2, 0.4), Load("target", 30, 0.9)])
    assert held(rows, "draft") == [(0, 31.2, 46.8)]
    assert held(rows, "target") == [(0, 15.1, 1.7)]


def test_a_draft_that_takes_too_much_leaves_no_room_for_the_target() -> None:
    with pytest.raises(TrtspecError) as refused:
        load_sequence(80, [Load("draft", 2, 0.9), Load("target", 30, 0.9)])
    assert str(refused.value) == (
        "serving.kv_cache_free_gpu_mem_fraction.draft: the target cannot load: its weights take 30.0 GB of GPU 0, and "
        "7.8 GB are left there after the draft has taken its part; lower it, or remove it to have it derived"
    )


def test_models_on_overlapping_gpus_add_up_where_they_overlap() -> None:
    """The target's two ranks agree on the smaller of what their GPUs have room for."""
    rows = load_sequence(80, [Load("draft", 2, 0.4, (1,)), Load("target", 30, 0.9, (0, 1))])
    assert held(rows, "draft") == [(1, 31.2, 46.8)]
    assert held(rows, "target") == [(0, 15.1, 34.9), (1, 15.1, 1.7)]


def test_weights_alone_that_do_not_fit_are_no_question_of_fractions() -> None:
    with pytest.raises(TrtspecError, match=r"hardware\.gpu: GPU 0 has 80 GB, and weights alone take 20\.0 \(draft\)"):
        load_sequence(80, [Load("draft", 20, 0.1), Load("target", 70, 0.1)])


@pytest.mark.parametrize("fraction", [0.1, 0.12])
def test_a_cache_holds_one_longest_sequence_or_the_engine_is_refused(fraction: float) -> None:
    loads = [Load("target", 30, fraction, longest=5.5)]
    if fraction * 50 >= 5.5:
        assert held(load_sequence(80, loads), "target") == [(0, 6.0, 44.0)]
        return
    with pytest.raises(TrtspecError, match=r"fraction\.target: the target's KV cache gets 5\.00 GB.*needs 5\.50"):
        load_sequence(80, loads)


def test_a_model_of_its_own_gets_the_backends_fraction() -> None:
    loads = [Load("draft", 2, gpus=(0,), kv_cache=4), Load("target", 30, gpus=(1, 2), kv_cache=9)]
    assert [load.fraction for load in default_fractions(80, loads)] == [DEFAULT_FRACTION, DEFAULT_FRACTION]


@pytest.mark.parametrize("draft_need", [0.5, 4.0, 9.0])
def test_a_draft_gets_twice_what_it_needs_and_the_target_the_rest(draft_need: float) -> None:
    loads = default_fractions(80, [Load("draft", 2, kv_cache=draft_need), Load("target", 30, kv_cache=10)])
    draft, target = load_sequence(80, loads)
    assert 2 * draft_need <= draft.kv_cache < 2 * draft_need + 0.1
    assert target.kv_cache > 20
    assert target.left == pytest.approx((48 - draft.kv_cache) * 0.1)


@pytest.mark.parametrize(("draft_need", "target_need"), [(9, 20), (40, 200), (100, 100), (300, 10)])
def test_where_not_all_fits_everybody_holds_the_same_part(draft_need: float, target_need: float) -> None:
    loads = [Load("draft", 2, kv_cache=draft_need), Load("target", 30, kv_cache=target_need)]
    draft, target = load_sequence(80, default_fractions(80, loads))
    assert draft.kv_cache / draft_need == pytest.approx(target.kv_cache / target_need, rel=0.03)
    assert draft.kv_cache + target.kv_cache <= 48
    assert target.left > 0


def test_three_models_on_one_gpu_and_the_target_on_four() -> None:
    loads = [
        Load("draft", 2.5, kv_cache=2),
        Load("middle", 8, kv_cache=4),
        Load("target", 18, gpus=(0, 1, 2, 3), kv_cache=3),
    ]
    rows = load_sequence(80, default_fractions(80, loads))
    caches = {row.role: row.kv_cache for row in rows}
    assert caches["draft"] >= 4
    assert caches["middle"] >= 8
    assert caches["target"] == pytest.approx(0.9 * (80 - 28.5 - caches["draft"] - caches["middle"]))


def test_a_given_fraction_stays_and_the_other_is_derived(tmp_path: Path) -> None:
    shares = shares_of(
        spec_of(tmp_path, "serving.kv_cache_free_gpu_mem_fraction.draft=0.24"), {"target": 60, "draft": 2}
    )
    assert shares.fractions == {"draft": 0.24, "target": 0.9}
    assert held(shares.rows, "draft") == [(0, 18.7, 59.3)]
    # GPU 0 holds the draft too, so the target's ranks have room for what is free there: 0.9 x (59.3 - 30)
    assert [row[:2] for row in held(shares.rows, "target")] == [(0, 26.4), (1, 26.4)]


def test_a_fraction_that_cannot_work_names_its_line(tmp_path: Path) -> None:
    text = SPEC.replace("orchestrator: true", "orchestrator: true, kv_cache_free_gpu_mem_fraction: {draft: 0.9}")
    with pytest.raises(TrtspecError) as refused:
        shares_of(spec_of(tmp_path, text=text), {"target": 60, "draft": 2})
    assert str(refused.value).startswith(
        f"{tmp_path / 's.yaml'}:7: serving.kv_cache_free_gpu_mem_fraction.draft: the target cannot load"
    )


def test_derived_fractions_hold_a_full_batch(tmp_path: Path) -> None:
    shares = shares_of(spec_of(tmp_path), {"target": 60, "draft": 2})
    tokens = 8 * 8192
    (draft,) = [row for row in shares.rows if row.role == "draft"]
    assert draft.kv_cache * 1e9 >= 2 * tokens * 2 * 16 * 8 * 64 * 2
    assert all(row.kv_cache * 1e9 >= tokens * 2 * 80 * 4 * 128 * 2 for row in shares.rows if row.role == "target")
    assert shares.notes == []
    assert shares.table()[0].startswith("GPU 0: draft weights 2.0 GB, KV cache 4.")
    assert len(shares.table()) == 3


def test_a_cache_for_fewer_than_a_full_batch_is_told(tmp_path: Path) -> None:
    shares = shares_of(spec_of(tmp_path, "engine.max_batch_size=64"), {"target": 120, "draft": 2})
    assert [note.split(" of ")[0] for note in shares.notes] == ["the draft's KV cache", "the target's KV cache"]
    assert "of the 64 longest sequences of a full batch" in shares.notes[0]


@pytest.mark.parametrize(
    ("overrides", "per_token"),
    [
        ([], 2 * 80 * 8 * 128 * 2),
        (["target.kv_cache_dtype=fp8", "target.quantization=fp8"], 2 * 80 * 8 * 128),
        (["target.tensor_parallel=16", "hardware.num_gpus=16"], 2 * 80 * 16 * 128 * 2),  # 8 KV heads on 16 ranks
        (["target.dtype=float32"], 2 * 80 * 8 * 128 * 4),
    ],
)
def test_bytes_of_one_token(tmp_path: Path, overrides: list[str], per_token: int) -> None:
    assert kv_bytes_per_token(spec_of(tmp_path, *overrides).target, LLAMA) == per_token


def test_every_model_gets_gpus_and_ranks(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "serving.spawn_processes=false")
    assert load_order(spec) == ["draft", "target"]
    assert device_ids(spec) == {"target": (0, 1), "draft": (0,)}
    assert participants(spec) == {"draft": (1,), "target": (2, 3)}
    assert mpi_world_size(spec) == 4
    chosen = spec_of(tmp_path, "serving.gpu_device_ids.target=[2, 3]", "serving.gpu_device_ids.draft=[1]")
    assert device_ids(chosen) == {"target": (2, 3), "draft": (1,)}
    assert mpi_world_size(chosen) == 1


def test_every_middle_model_of_a_cascade_has_its_part(tmp_path: Path) -> None:
    cascade = "cascade: {middle: {model: m}, middles: [{model: n}, {model: o}]}"
    text = SPEC.replace("draft_target, ", f"cascade, {cascade}, ")
    chosen = ("serving.gpu_device_ids.middle=[3]", "serving.kv_cache_free_gpu_mem_fraction.middle=0.2")
    spec = spec_of(tmp_path, "serving.spawn_processes=false", *chosen, text=text)
    assert load_order(spec) == ["draft", "middle_3", "middle_2", "middle", "target"]
    assert device_ids(spec) == {role: (3,) for role in spec.models if "middle" in role} | {
        "target": (0, 1),
        "draft": (0,),
    }
    assert participants(spec)["middle"] == (4,) and mpi_world_size(spec) == 7
    shares = shares_of(spec, {"target": 120.0, "draft": 2.0, "middle": 20.0, "middle_2": 10.0, "middle_3": 5.0})
    left = [(held(shares.rows, role)[0][1:]) for role in ("middle_3", "middle_2", "middle")]
    assert left == [(15.0, 60.0), (10.0, 40.0), (4.0, 16.0)]  # of 80 GB: a fifth each of what is free by then


def test_models_that_load_at_the_same_time_should_not_share(tmp_path: Path) -> None:
    sizes = {"target": 60.0, "draft": 2.0}
    (note,) = shares_of(spec_of(tmp_path, "serving.spawn_processes=false"), sizes).notes
    assert "give each its own GPUs" in note
    apart = ("serving.spawn_processes=false", "serving.gpu_device_ids.draft=[2]")
    assert shares_of(spec_of(tmp_path, *apart), sizes).notes == []


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["serving.orchestrator=false"], "2 engine models, of which the target is split over 2 GPUs, cannot be loaded"),
        (["hardware.num_nodes=2"], "an orchestrator spawns processes on its own node only"),
        (["serving.orchestrator=false", "target.tensor_parallel=1"], None),
        (["serving.orchestrator=false", "speculation.method=none"], None),
        (["hardware.num_nodes=2", "serving.spawn_processes=false"], None),
    ],
)
def test_processes_that_would_never_all_load_are_refused(
    tmp_path: Path, overrides: list[str], problem: str | None
) -> None:
    spec = spec_of(tmp_path, *overrides)
    if problem is None:
        check_placement(spec)
        return
    with pytest.raises(TrtspecError, match=problem):
        check_placement(spec)
