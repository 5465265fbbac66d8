"""Fixtures that several rooms share."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

DOUBLE = Path(__file__).parent / "triton" / "scripted_bls"

# A shell that starts the tests in the background has them ignore Ctrl-C, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes to make says something about the machine, not about the code.
hypothesis.settings.register_profile("busy machine", suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy machine")


@pytest.fixture(scope="session")
def scripted_repository() -> Callable[[Path], Path]:
    """Write a model repository in which test doubles stand for the BLS models: they do what the prompt says."""

    def write(root: Path) -> Path:
        for name in ("tensorrt_llm_bls", "tensorrt_llm_bls_unary"):
            version = root / name / "1"
            version.mkdir(parents=True)
            shutil.copy(DOUBLE / "model.py", version)
            config = (DOUBLE / "config.pbtxt").read_text(encoding="utf-8")
            config = config.replace("DECOUPLED", str(name == "tensorrt_llm_bls").lower())
            (root / name / "config.pbtxt").write_text(config.replace("NAME", name), encoding="utf-8")
        return root

    return write


@pytest.fixture(scope="session")
def free_ports() -> Callable[[], dict[str, int]]:
    """Three ports that nobody listens on, as the keyword arguments of a server.

    No other worker is given them, and none twice; the kernel gives clients ports above 32767.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    mine = range(10_000 + worker, 32_768, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    begin = secrets.randbelow(len(mine))  # another run of the tests begins elsewhere
    candidates = cycle((*mine[begin:], *mine[:begin]))

    def is_free(port: int) -> bool:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            return False
        return True

    def choose() -> dict[str, int]:
        names = ("http_port", "grpc_port", "metrics_port")
        return dict(zip(names, filter(is_free, candidates), strict=False))

    return choose


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def tiny_tokenizer_json() -> str:
    """Byte-level BPE of 280 tokens: ids 0 to 2 are special (both 0 and 2 end an answer), every text can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the target verifies what the draft proposes, one token after the other"] * 4, trainer
    )
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def save_model(tiny_tokenizer_json: str) -> Callable[..., Path]:
    """Write a small random Llama as a Hugging Face directory.

    `seed` decides the weights; with `blend=(other_seed, share)` that share of them comes from another seed, so that
    two models agree often but not always. `config` overrides keys of config.json.
    """
    import torch
    from safetensors.torch import save_file

    def weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * scale / shape[-1] ** 0.5

        hidden, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        size = hidden // config["num_attention_heads"]
        tensors = {
            "model.embed_tokens.weight": random(vocab, hidden, scale=2.0),
            "model.norm.weight": 1.0 + random(1, hidden)[0],
            "lm_head.weight": random(vocab, hidden, scale=3.0),
        }
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            for part, heads in (
                ("q", "num_attention_heads"),
                ("k", "num_key_value_heads"),
                ("v", "num_key_value_heads"),
            ):
                tensors[f"{name}.self_attn.{part}_proj.weight"] = random(config[heads] * size, hidden, scale=2.0)
            tensors |= {
                f"{name}.self_attn.o_proj.weight": random(hidden, hidden),
                f"{name}.mlp.gate_proj.weight": random(inter, hidden),
                f"{name}.mlp.up_proj.weight": random(inter, hidden),
                f"{name}.mlp.down_proj.weight": random(hidden, inter),
                f"{name}.input_layernorm.weight": 1.0 + random(1, hidden)[0],
                f"{name}.post_attention_layernorm.weight": 1.0 + random(1, hidden)[0],
            }
        if config["tie_word_embeddings"]:
            del tensors["lm_head.weight"]
        return tensors

    def save(path: Path, *, seed: int = 0, blend: tuple[int, float] | None = None, **overrides: Any) -> Path:
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 280,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "torch_dtype": "float32",
            "bos_token_id": 0,
            "eos_token_id": 2,
            "pad_token_id": 2,
        } | overrides
        tensors = weights(config, seed)
        if blend is not None:
            other, share = weights(config, blend[0]), blend[1]
            tensors = {name: (1.0 - share) * tensor + share * other[name] for name, tensor in tensors.items()}
        path.mkdir(parents=True)
        dtype = getattr(torch, config["torch_dtype"])
        save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path / "model.safetensors")
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHAT_TEMPLATE,
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[2],
            "add_bos_token": False,
        }
        for name, content in (
            ("config.json", config),
            ("generation_config.json", {"bos_token_id": 0, "eos_token_id": [2, 0]}),
            ("tokenizer_config.json", tokenizer_config),
        ):
            (path / name).write_text(json.dumps(content), encoding="utf-8")
        (path / "tokenizer.json").write_text(tiny_tokenizer_json, encoding="utf-8")
        return path

    return save


@pytest.fixture(scope="session")
def tiny_model_dir(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of two layers and 280 ids."""
    return save_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="session")
def tiny_draft_dir(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft for it, with the same tokenizer: right on about half of the tokens."""
    return save_model(tmp_path_factory.mktemp("models") / "draft", blend=(1, 0.03))


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(20240229)
