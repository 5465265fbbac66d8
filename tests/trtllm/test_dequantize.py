"""Checkpoints of every precision and split, executed: against the model, and against ModelOpt's own simulation."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints
import torch
from safetensors.torch import save_file

from trtspec.decoding.engine_call import EngineRequest
from trtspec.decoding.sampling import SamplingParams
from trtspec.errors import TrtspecError
from trtspec.models.source import ModelSource
from trtspec.parity.checkpoint import BUDGETS, divergence
from trtspec.runtime.llama import Llama, to_trtllm
from trtspec.runtime.reference import ReferenceSampler
from trtspec.runtime.torch_runtime import TorchRuntime
from trtspec.trtllm.checkpoint import Checkpoint, require_sound
from trtspec.trtllm.dequantize import load_weights, unpacked

# family, sizes of the model, section of the spec, budget
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "llama, 2 x 2 ranks": ("Llama", {}, {"tensor_parallel": 2, "pipeline_parallel": 2}, "float16"),
    "llama, bfloat16, tied": ("Llama", {"tie_word_embeddings": True}, {"dtype": "bfloat16"}, "bfloat16"),
    "llama, more ranks than KV heads": ("Llama", {}, {"tensor_parallel": 4}, "float16"),
    "llama, three ranks": (
        "Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144, "head_dim": 16,
         "intermediate_size": 384},
        {"tensor_parallel": 3}, "float16",
    ),
    "llama, fp8 and fp8 KV": (
        "Llama", {}, {"quantization": "fp8", "kv_cache_dtype": "fp8", "tensor_parallel": 2}, "FP8",
    ),
    "llama, int8 KV": ("Llama", {}, {"kv_cache_dtype": "int8"}, "W8A8_SQ_PER_CHANNEL"),
    "qwen2, fp8": ("Qwen2", {}, {"quantization": "fp8", "tensor_parallel": 2}, "FP8"),
    "qwen3, int8 SmoothQuant": ("Qwen3", {}, {"quantization": "int8_sq", "tensor_parallel": 2}, "W8A8_SQ_PER_CHANNEL"),
    "mistral, int4 AWQ": ("Mistral", {}, {"quantization": "int4_awq", "tensor_parallel": 2}, "W4A16_AWQ"),
    "llama, w4a8 AWQ": ("Llama", {}, {"quantization": "w4a8_awq"}, "W4A8_AWQ"),
    "mixtral": ("Mixtral", {}, {"tensor_parallel": 2}, "float16"),
    "mixtral, fp8": ("Mixtral", {}, {"quantization": "fp8", "tensor_parallel": 2}, "FP8"),
}  # fmt: skip


def text(num_tokens: int = 40) -> list[int]:
    return torch.randint(3, 280, (num_tokens,), generator=torch.Generator().manual_seed(7)).tolist()


def logits(model: Llama, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model.forward(torch.tensor([ids]), model.new_cache(1, len(ids)), 0)[0].numpy()


def executed(directory: Path) -> Llama:
    checkpoint = require_sound(directory)
    loaded = load_weights(checkpoint)
    return Llama(checkpoint.model, loaded.weights, activations=loaded.activations)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_json: str) -> Callable[..., ModelSource]:
    made: dict[str, ModelSource] = {}

    def make(family: str, **sizes: Any) -> ModelSource:
        key = f"{family} {sizes}"
        if key not in made:
            directory = tmp_path_factory.mktemp("models") / family
            made[key] = tiny_checkpoints.save_model(directory, tiny_tokenizer_json, family, **sizes)
        return made[key]

    return make


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_an_executed_checkpoint_predicts_what_its_model_does(
    name: str, model: Callable[..., ModelSource], tmp_path: Path
) -> None:
    family, sizes, ref, precision = CHECKPOINTS[name]
    source = model(family, **sizes)
    directory = tiny_checkpoints.convert_model(source, tmp_path / "checkpoint", **ref)
    found = logits(executed(directory), text())
    kl = divergence(ReferenceSampler(source).logits(text()), found).mean()
    assert kl <= BUDGETS[precision].max_kl
    if precision not in ("float16", "bfloat16"):
        # Were the rounding of weights and inputs left out, it would be that of float16 alone.
        assert kl > 2 * BUDGETS["float16"].max_kl
        plain = require_sound(directory)
        without = Llama(plain.model, to_trtllm(source.config, source.tensor))
        assert divergence(logits(without, text()), found).mean() > 2 * BUDGETS["float16"].max_kl


def test_a_padded_id_is_never_chosen(tmp_path: Path, tiny_tokenizer_json: str) -> None:
    """32001 ids on 2 ranks: the head has 32002 rows, and every real logit is negative."""
    source = tiny_checkpoints.save_model(
        tmp_path / "model", tiny_tokenizer_json, hidden_size=32, intermediate_size=32, head_dim=8, vocab_size=32001
    )
    directory = tiny_checkpoints.convert_model(source, tmp_path / "checkpoint", tensor_parallel=2)
    checkpoint = require_sound(directory)
    assert (checkpoint.vocab_size, checkpoint.padded_vocab_size) == (32001, 32002)
    loaded = load_weights(checkpoint)
    head, norm = loaded.weights["lm_head.weight"], loaded.weights["transformer.ln_f.weight"]
    assert head.shape == (32002, 32)
    head[:32001] = -head[:32001].abs()
    head[:32001, 1:] = 0.0
    norm.fill_(1.0)
    model = Llama(checkpoint.model, loaded.weights)
    hidden = torch.ones(1, 32)  # what stands before the head, so that each real logit is that of one weight
    row = model.head(hidden)[0]
    assert bool((row[:32001] < 0).all()) and row[32001] == -torch.inf
    assert torch.softmax(row, dim=0)[32001] == 0.0
    assert logits(model, text(4)).argmax(1).max() < 32001


@pytest.mark.parametrize(
    ("config", "flips"),
    [("FP8_DEFAULT_CFG", 0.15), ("INT8_SMOOTHQUANT_CFG", 0.4), ("INT4_AWQ_CFG", 0.02), ("W4A8_AWQ_BETA_CFG", 0.15)],
)
def test_each_linear_computes_what_modelopt_simulates(config: str, flips: float, tmp_path: Path) -> None:
    """`flips`: how large the difference may be, as a part of the quantisation's own error.

    Scales are stored in the checkpoint's type, which moves inputs that lie between two values across the border.
    """
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_tensorrt_llm_checkpoint

        torch.manual_seed(0)
        sizes = {**tiny_checkpoints.SIZES, "vocab_size": 320, "head_dim": 64}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]))
        model = model.half().float().eval()  # so that nothing but the quantisation rounds
        original = copy.deepcopy(model.state_dict())
        ids = torch.randint(0, 280, (4, 32), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            mtq.quantize(model, copy.deepcopy(getattr(mtq, config)), lambda model: model(ids))
            export_tensorrt_llm_checkpoint(model, "llama", torch.float16, tmp_path, inference_tensor_parallel=1)
    checkpoint = Checkpoint.load(tmp_path)
    loaded = load_weights(checkpoint)
    layer, generator = model.model.layers[1], torch.Generator().manual_seed(2)
    for ours, modules in {
        "attention.qkv": [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
        "attention.dense": [layer.self_attn.o_proj],
        "mlp.fc": [layer.mlp.gate_proj],
        "mlp.gate": [layer.mlp.up_proj],
        "mlp.proj": [layer.mlp.down_proj],
    }.items():
        name = f"transformer.layers.1.{ours}"
        x = torch.randn(64, modules[0].in_features, generator=generator)
        with torch.no_grad():
            right = torch.cat([module(x) for module in modules], dim=-1)
        found = loaded.activations[name](x, None) @ loaded.weights[f"{name}.weight"].t()
        exact = x @ torch.cat([original[f"{_path(model, module)}.weight"] for module in modules]).t()
        error = (right - exact).square().mean().sqrt()
        assert (found - right).square().mean().sqrt() < flips * error, ours
        assert error > 0.005 * exact.std(), ours


def _path(model: torch.nn.Module, module: torch.nn.Module) -> str:
    return next(name for name, candidate in model.named_modules() if candidate is module)


def test_medusa_heads_are_verified_and_not_executed(model: Callable[..., ModelSource], tmp_path: Path) -> None:
    source, heads = model("Llama"), tmp_path / "heads"
    heads.mkdir()
    tensors = {f"{head}.0.linear.{kind}": torch.rand(256, *shape) for head in range(2) for kind, shape in KINDS.items()}
    save_file(
        tensors | {f"{head}.1.weight": torch.rand(280, 256) for head in range(2)}, heads / "medusa_lm_head.safetensors"
    )
    (heads / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    directory = tiny_checkpoints.convert_model(source, tmp_path / "checkpoint", heads, quantization="fp8")
    with_heads = logits(executed(directory), text())
    plain = tiny_checkpoints.convert_model(source, tmp_path / "plain", quantization="fp8")
    np.testing.assert_array_equal(with_heads, logits(executed(plain), text()))
    tiny_checkpoints.edit_tensors(directory, {"medusa_heads.1.lm_head.weight": None})
    with pytest.raises(TrtspecError, match=r"tensor medusa_heads\.1\.lm_head\.weight is missing"):
        require_sound(directory)


def token_by_token(model: Llama, ids: list[int], first: int) -> np.ndarray:
    """Logits `[len(ids) - first + 1, vocab]`: a pass over the first ids, then one for each of the others.

    A pass over all of them adds up in another order, which moves activations from one fp8 value to the next.
    """
    cache, rows = model.new_cache(1, len(ids)), []
    with torch.inference_mode():
        for start, end in ((0, first), *((place, place + 1) for place in range(first, len(ids)))):
            rows.append(model.forward(torch.tensor([ids[start:end]]), cache, start)[0, -1].numpy())
    return np.stack(rows)


KINDS = {"weight": (256,), "bias": ()}


def test_two_rows_share_a_byte() -> None:
    packed = torch.tensor([[0x21, 0xF8 - 256], [0x7F, 0x80 - 256]], dtype=torch.int8)
    assert unpacked(packed).tolist() == [[1, -8], [2, -1], [-1, 0], [7, -8]]


@pytest.mark.parametrize("ref", [{"tensor_parallel": 2, "dtype": "bfloat16"}, {"quantization": "fp8"}])
def test_the_torch_runtime_serves_an_engine_from_its_checkpoint(
    model: Callable[..., ModelSource], tmp_path: Path, ref: dict[str, Any]
) -> None:
    """What `trtspec build --no-compile` leaves: an engine that waits for its compiler, and the checkpoint beside it."""
    source = model("Llama", vocab_size=281)
    checkpoint = tiny_checkpoints.convert_model(source, tmp_path / "checkpoints" / "target", **ref)
    engine = tiny_checkpoints.prepare(checkpoint, tmp_path / "target")
    runtime = TorchRuntime(engine, kv_cache_bytes=1 << 24)
    request = EngineRequest(
        input_ids=np.array(text(8), dtype=np.int32),
        max_new_tokens=6,
        sampling=SamplingParams(temperature=0.0),
        return_generation_logits=True,
    )
    result = runtime.execute(request)
    assert result.generation_logits is not None and result.generation_logits.shape == (6, 281)  # not 282
    sequence = [*text(8), *result.output_ids.tolist()]
    right = token_by_token(executed(checkpoint), sequence[:13], 8)[:, :281]
    tolerance = 0.3 if ref.get("dtype") == "bfloat16" else 1e-3
    np.testing.assert_allclose(result.generation_logits, right, atol=tolerance)

    (checkpoint / "rank0.safetensors").unlink()
    with pytest.raises(TrtspecError, match=r"rank 0 of \d is missing: rank0\.safetensors"):
        TorchRuntime(engine, kv_cache_bytes=1 << 24)


def test_what_is_not_quantised_stays_mapped(tmp_path: Path, model: Callable[..., ModelSource]) -> None:
    directory = tiny_checkpoints.convert_model(model("Llama"), tmp_path / "checkpoint")
    loaded = load_weights(require_sound(directory), torch.float16)
    assert {tensor.dtype for tensor in loaded.weights.values()} == {torch.float16}
    assert not loaded.activations
