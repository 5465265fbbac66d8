"""Mixtures of experts as targets: what the reference makes of them, and every way of drafting outside the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trtspec.decoding.cycle import Request
from trtspec.decoding.methods import METHODS
from trtspec.models.config import ModelConfig
from trtspec.models.source import open_model
from trtspec.models.surgery import truncated
from trtspec.runtime.engine import write_torch_engine
from trtspec.runtime.local import speculate
from trtspec.runtime.reference import ReferenceSampler
from trtspec.runtime.torch_runtime import TorchRuntime

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2, "initializer_range": 0.25,
}  # fmt: skip
QWEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2-moe": ("Qwen2Moe", {**QWEN, "shared_expert_intermediate_size": 36}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN, "head_dim": 8, "norm_topk_prob": True}),
}


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a small random model as a Hugging Face directory; `noise` of its weights come from another seed."""

    def make(family: str, noise: float = 0.0) -> Path:
        import transformers

        name, extra = FAMILIES[family]
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **extra})
        state: dict[str, torch.Tensor] = {}
        for seed, share in ((0, 1.0 - noise), (1, noise)):
            torch.manual_seed(seed)
            model = getattr(transformers, f"{name}ForCausalLM")(config)
            for parameter, tensor in model.state_dict().items():
                state[parameter] = state.get(parameter, 0.0) + share * tensor
        path = tmp_path_factory.mktemp("experts") / family
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": [f"{name}ForCausalLM"]}))
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path / "model.safetensors")
        return path

    return make


def build(model: Path, out: Path, role: str, num_layers: int | None = None) -> TorchRuntime:
    source = open_model(str(model))
    if num_layers:
        source = truncated(source, num_layers)
    build_config = {"max_draft_len": 8} if role != "draft" else {}
    stamp = {"source_fingerprint": source.fingerprint()}
    write_torch_engine(source, out, dtype="float32", role=role, build_config=build_config, stamp=stamp)
    return TorchRuntime(out, kv_cache_bytes=1 << 22)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_says_what_the_reference_says(
    save: Callable[..., Path], tmp_path: Path, rng: np.random.Generator, family: str
) -> None:
    """The reference is made from our own record of the config, so that what it leaves out shows here."""
    model = save(family)
    source = open_model(str(model))
    assert ModelConfig.from_hf(source.config.to_hf()) == source.config
    reference, runtime = ReferenceSampler(source), build(model, tmp_path / "engine", "target")
    for _ in range(3):
        prompt = rng.integers(3, 97, size=9)
        *_, last = speculate("none", {"target": runtime}, Request(prompt, 20))
        assert last.generation.token_ids.tolist() == reference.continuation(prompt, 20)
        np.testing.assert_allclose(
            reference.logits(prompt)[-1], runtime._model.head(hidden(runtime, prompt))[-1], atol=1e-4, rtol=1e-4
        )


def hidden(runtime: TorchRuntime, ids: np.ndarray) -> torch.Tensor:
    with torch.inference_mode():
        return runtime._model.hidden(torch.from_numpy(ids)[None], None, 0)[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe"])
def test_greedy_text_of_every_method_is_that_of_plain_decoding(
    save: Callable[..., Path], tmp_path: Path, rng: np.random.Generator, family: str, method: str
) -> None:
    """Prompts that repeat themselves, so that a look-up finds something; drafts that resemble the target."""
    model = save(family)
    runtimes = {"target": build(model, tmp_path / "target", "target")}
    if method == "early_exit":
        runtimes["draft"] = build(model, tmp_path / "draft", "draft", num_layers=1)
    else:
        runtimes["draft"] = build(save(family, 0.1), tmp_path / "draft", "draft")
        runtimes["middle"] = build(save(family, 0.05), tmp_path / "middle", "middle")
    accepted = drafted = 0
    for num_draft_tokens in (1, 3, 6):
        prompt = np.tile(rng.integers(3, 97, size=6), 3)
        *_, plain = speculate("none", runtimes, Request(prompt, 30))
        *_, last = speculate(method, runtimes, Request(prompt, 30, num_draft_tokens=num_draft_tokens))
        assert last.generation.token_ids.tolist() == plain.generation.token_ids.tolist()
        assert last.generation.draft_error is None
        accepted += last.generation.acceptance.num_accepted
        drafted += last.generation.acceptance.num_drafted
    assert 0 < accepted < drafted
