"""Verification of checkpoints: a sound one of each kind passes, and each damage is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
from tiny_checkpoints import edit_config, edit_record, edit_tensors

from trtspec.errors import TrtspecError
from trtspec.models.source import ModelSource
from trtspec.trtllm.checkpoint import Checkpoint, TensorSpec, expected_tensors, faults, require_sound

QKV = "transformer.layers.1.attention.qkv"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_json: str) -> ModelSource:
    return tiny_checkpoints.save_model(tmp_path_factory.mktemp("models") / "llama", tiny_tokenizer_json)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory, source: ModelSource) -> Path:
    """Two ranks, fp8 weights, inputs and KV cache."""
    directory = tmp_path_factory.mktemp("checkpoints") / "fp8"
    return tiny_checkpoints.convert_model(
        source, directory, quantization="fp8", kv_cache_dtype="fp8", tensor_parallel=2
    )


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory, source: ModelSource) -> Path:
    """Two ranks, int4 AWQ."""
    directory = tmp_path_factory.mktemp("checkpoints") / "awq"
    return tiny_checkpoints.convert_model(source, directory, quantization="int4_awq", tensor_parallel=2)


def test_what_each_rank_must_hold(fp8: Path, awq: Path) -> None:
    expected = expected_tensors(Checkpoint.load(fp8), 1)
    assert expected[f"{QKV}.weight"] == TensorSpec(((4 + 2 + 2) * 64 // 2, 256), ("F8_E4M3",))
    assert expected["transformer.layers.0.attention.dense.weight"].shape == (256, 128)
    assert expected["lm_head.weight"] == TensorSpec((140, 256), ("F16",))
    packed = expected_tensors(Checkpoint.load(awq), 0)
    assert packed["transformer.layers.0.mlp.proj.weight"] == TensorSpec((128, 256), ("I8",))
    assert packed["transformer.layers.0.mlp.proj.weights_scaling_factor"].shape == (256, 2)
    assert faults(Checkpoint.load(fp8)) == faults(Checkpoint.load(awq)) == []


def empty(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:0]


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "a rank is missing": (
        lambda path: (path / "rank1.safetensors").unlink(),
        "rank 1 of 2 is missing: rank1.safetensors",
    ),
    "a rank too many": (
        lambda path: (path / "rank2.safetensors").write_bytes((path / "rank1.safetensors").read_bytes()),
        "rank2.safetensors is one rank file too many: mapping.world_size is 2",
    ),
    "a rank cut short": (
        lambda path: (path / "rank1.safetensors").write_bytes((path / "rank1.safetensors").read_bytes()[:-100]),
        "rank1.safetensors: truncated safetensors file",
    ),
    "world_size": (
        lambda path: edit_config(path, mapping__tp_size=4, mapping__pp_size=4, mapping__world_size=4),
        "config.json: mapping.world_size is 4, but tp_size 4 x pp_size 4 need 16 ranks",
    ),
    "heads that do not divide": (
        lambda path: edit_config(path, mapping__tp_size=3, mapping__world_size=3),
        "num_attention_heads 4 cannot be divided among tp_size 3 ranks",
    ),
    "a name missing": (
        lambda path: edit_tensors(path, {f"{QKV}.weight": None}, ranks=(1,)),
        f"rank1.safetensors: tensor {QKV}.weight is missing",
    ),
    "a name of another model": (
        lambda path: edit_config(path, num_hidden_layers=1),
        "rank0.safetensors: tensor transformer.layers.1.attention.dense.activation_scaling_factor is not one of this",
    ),
    "a shape": (
        lambda path: edit_tensors(path, {f"{QKV}.weight": lambda tensor: tensor[:128]}, ranks=(0,)),
        f"rank0.safetensors: {QKV}.weight has shape [128, 256]; expected [256, 256]",
    ),
    "a type": (
        lambda path: edit_tensors(path, {f"{QKV}.weight": lambda tensor: tensor.half()}, ranks=(0,)),
        f"rank0.safetensors: {QKV}.weight is F16; expected F8_E4M3",
    ),
    "a scale missing": (
        lambda path: edit_tensors(path, {f"{QKV}.activation_scaling_factor": None}),
        f"rank0.safetensors: tensor {QKV}.activation_scaling_factor is missing",
    ),
    "a KV scale missing": (
        lambda path: edit_tensors(path, {"transformer.layers.0.attention.kv_cache_scaling_factor": None}),
        "tensor transformer.layers.0.attention.kv_cache_scaling_factor is missing",
    ),
    "a scale that is no number": (
        lambda path: edit_tensors(path, {f"{QKV}.weights_scaling_factor": lambda scale: scale * torch.nan}),
        f"rank0.safetensors: {QKV}.weights_scaling_factor is not finite (nan)",
    ),
    "a scale of nothing": (
        lambda path: edit_tensors(path, {f"{QKV}.weights_scaling_factor": torch.zeros_like}),
        f"rank0.safetensors: {QKV}.weights_scaling_factor is not positive (0)",
    ),
    "ranks that disagree": (
        lambda path: edit_tensors(path, {f"{QKV}.activation_scaling_factor": lambda scale: scale * 2}, ranks=(1,)),
        f"{QKV}.activation_scaling_factor differs between the ranks of one layer",
    ),
    "an input scale that was not calibrated": (
        lambda path: edit_tensors(path, {f"{QKV}.activation_scaling_factor": lambda scale: scale * 2}),
        f"activation_scaling_factor of {QKV} is 2 times what was calibrated",
    ),
    "no rotary_base": (
        lambda path: edit_config(path, rotary_base=None),
        "config.json: rotary_base is missing",
    ),
    "another rotary_base": (
        lambda path: edit_config(path, rotary_base=500000.0),
        "config.json: rotary_base is 500000.0, that of the model is 10000.0",
    ),
    "a vocabulary with its padding": (
        lambda path: edit_record(path, model_config__vocab_size=279),
        "config.json: vocab_size is 280, that of the model is 279: ids from 279 on stand for no token",
    ),
    "an architecture that nobody knows": (
        lambda path: edit_config(path, architecture="GemmaForCausalLM"),
        "architecture GemmaForCausalLM is not one that trtspec knows",
    ),
    "Qwen without its fields": (
        lambda path: edit_config(path, architecture="Qwen2ForCausalLM"),
        "config.json: qwen_type is missing",
    ),
    "experts without their fields": (
        lambda path: edit_config(path, architecture="MixtralForCausalLM"),
        "config.json: moe.top_k is missing",
    ),
    "Medusa without heads": (
        lambda path: edit_config(
            path, architecture="MedusaForCausalLM", num_medusa_heads=2, num_medusa_layers=1, max_draft_len=63
        ),
        "tensor medusa_heads.0.medusa_layers.0.linear.bias is missing",
    ),
    "EAGLE without nets": (
        lambda path: edit_config(path, architecture="EagleForCausalLM"),
        "no tensor under eagle_nets.",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(name: str, fp8: Path, tmp_path: Path) -> None:
    damage, message = DAMAGES[name]
    directory = tiny_checkpoints.copy(fp8, tmp_path / "checkpoint")
    damage(directory)
    assert any(message in fault for fault in faults(Checkpoint.load(directory))), faults(Checkpoint.load(directory))
    with pytest.raises(TrtspecError) as caught:
        require_sound(directory)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_weights_without_activation_scales_were_not_calibrated(fp8: Path, tmp_path: Path) -> None:
    directory = tiny_checkpoints.copy(fp8, tmp_path / "checkpoint")
    names = [name for name in expected_tensors(Checkpoint.load(fp8), 0) if name.endswith("activation_scaling_factor")]
    edit_tensors(directory, dict.fromkeys(names))
    assert faults(Checkpoint.load(directory)) == [
        "20 linears have a weights_scaling_factor and none has an activation_scaling_factor: nothing was calibrated"
    ]


def test_the_groups_of_awq(awq: Path, tmp_path: Path) -> None:
    directory = tiny_checkpoints.copy(awq, tmp_path / "groups")
    edit_config(directory, quantization__group_size=64)
    assert faults(Checkpoint.load(directory)) == ["config.json: quantization.group_size is 64; expected 128"]
    directory = tiny_checkpoints.copy(awq, tmp_path / "split")
    edit_config(directory, mapping__tp_size=4, mapping__world_size=4)
    assert (
        "attention.dense has 64 inputs per rank, which AWQ's groups of 128 do not divide"
        in (faults(Checkpoint.load(directory))[0])
    )
    directory = tiny_checkpoints.copy(awq, tmp_path / "scales")
    name = "transformer.layers.0.mlp.proj.weights_scaling_factor"
    edit_tensors(directory, {name: lambda scale: scale[:, :1]}, ranks=(0,))
    assert faults(Checkpoint.load(directory)) == [f"rank0.safetensors: {name} has shape [256, 1]; expected [256, 2]"]


def test_an_input_scale_is_held_against_the_calibration_of_int8(source: ModelSource, tmp_path: Path) -> None:
    directory = tiny_checkpoints.convert_model(source, tmp_path / "int8", quantization="int8_sq")
    assert faults(Checkpoint.load(directory)) == []
    edit_tensors(directory, {f"{QKV}.activation_scaling_factor": lambda scale: scale / 3})
    (fault,) = faults(Checkpoint.load(directory))
    assert fault.startswith(f"activation_scaling_factor of {QKV} is 0.333 times what was calibrated")


def test_medusa_heads_belong_to_the_last_stage(source: ModelSource, tmp_path: Path) -> None:
    directory = tiny_checkpoints.convert_model(source, tmp_path / "medusa", pipeline_parallel=2)
    medusa = {"architecture": "MedusaForCausalLM", "num_medusa_heads": 1, "num_medusa_layers": 1, "max_draft_len": 63}
    edit_config(directory, **medusa)
    checkpoint = Checkpoint.load(directory)
    head = "medusa_heads.0.medusa_layers.0.linear"
    assert f"{head}.weight" not in expected_tensors(checkpoint, 0)
    assert expected_tensors(checkpoint, 1)[f"{head}.weight"].shape == (256, 256)
    assert all("rank1.safetensors" in fault for fault in faults(checkpoint))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such checkpoint"), ("{", "not valid JSON"), ("[]", "not a JSON object")],
)
def test_no_checkpoint_at_all(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(TrtspecError, match=message):
        Checkpoint.load(tmp_path)


def test_of_other_converters_fields_and_ranks_are_checked(fp8: Path, tmp_path: Path) -> None:
    """TensorRT-LLM's own script writes these; every config of its own lists `moe`, for dense models too."""
    directory = tiny_checkpoints.copy(fp8, tmp_path / "checkpoint")
    edit_config(directory, moe={"num_experts": 0, "top_k": 0, "normalization_mode": 1})
    assert faults(Checkpoint.load(directory)) == []
    edit_config(directory, architecture="Qwen3MoeForCausalLM")
    assert "config.json: qwen_type is missing, which TensorRT-LLM's Qwen config wants" in faults(
        Checkpoint.load(directory)
    )
    moe = {"num_experts": 8, "top_k": 2, "normalization_mode": 1}
    edit_config(directory, qwen_type="qwen3_moe", moe=moe)
    assert faults(Checkpoint.load(directory)) == []
    (directory / "rank1.safetensors").unlink()
    assert faults(Checkpoint.load(directory)) == ["rank 1 of 2 is missing: rank1.safetensors"]
