"""A pair of tiny random engines with their model repository: real ones in every respect but what they say.

The target is a Llama of two layers over single bytes; the draft is the target with noise on its weights, so that some
drafts are accepted and some are not. Both compute in float32, where logits of a random model are never close enough for
rounding to change a greedy text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from trtspec.models.source import open_model
from trtspec.runtime.engine import write_torch_engine
from trtspec.spec.load import load_spec
from trtspec.triton.repository import write_repository
from trtspec.triton.server import LocalServer

NUM_DRAFT_TOKENS = 3
MAX_DRAFT_LEN = 5
_SPECIALS = ("<s>", "</s>")
_HIDDEN, _FFN, _HEADS, _KV_HEADS, _LAYERS = 32, 48, 4, 2, 2
_NOISE = {"target": 0.0, "draft": 0.01}
_LIMITS = {"max_batch_size": 8, "max_input_len": 256, "max_seq_len": 512}
_KV_CACHE_BYTES = 4 << 20
_DRAFT_REST_S = "0.1"  # it doubles with every failure in a row: a draft that dies often would hardly be asked any more


def tiny_server(root: Path, ports: dict[str, int], **serving: float) -> LocalServer:
    """The server of the pair, not started, everything it needs written under `root`.

    Args:
        serving: of the spec's section.
    """
    settings = "\n".join(f"  {key}: {value}" for key, value in {"num_threads": 1, **serving}.items())
    sources = {role: open_model(str(_write_model(root / f"{role}-model", noise))) for role, noise in _NOISE.items()}
    (root / "tiny.yaml").write_text(
        f"""
version: 1
target: {{model: ./target-model, dtype: float32}}
speculation:
  method: draft_target
  num_draft_tokens: {NUM_DRAFT_TOKENS}
  draft: {{model: ./draft-model, dtype: float32}}
engine: {json.dumps({**_LIMITS, "max_draft_len": MAX_DRAFT_LEN})}
serving:
{settings}
"""
    )
    for role, source in sources.items():
        build: dict[str, Any] = {**_LIMITS, **({"max_draft_len": MAX_DRAFT_LEN} if role == "target" else {})}
        write_torch_engine(source, root / "engines" / role, dtype="float32", role=role, build_config=build, stamp={})
    with patch("trtspec.triton.repository._DRAFT_REST_S", _DRAFT_REST_S):
        write_repository(
            out_dir=root / "models",
            spec=load_spec(root / "tiny.yaml"),
            engines={role: root / "engines" / role for role in sources},
            tokenizer_json=sources["target"].tokenizer_json(),
            add_bos=True,
            kv_cache_bytes=dict.fromkeys(sources, _KV_CACHE_BYTES),
        )
    return LocalServer(root / "models", engines_root=root / "engines", num_threads=1, state_dir=root / "state", **ports)


def _write_model(directory: Path, noise: float) -> Path:
    """A Hugging Face checkpoint."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    directory.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    vocab = tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": _HIDDEN,
        "intermediate_size": _FFN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": _LIMITS["max_seq_len"],
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": tokenizer.token_to_id(_SPECIALS[0]),
        "eos_token_id": tokenizer.token_to_id(_SPECIALS[1]),
    }
    (directory / "config.json").write_text(json.dumps(config))
    kv_width = _HIDDEN * _KV_HEADS // _HEADS
    shapes = {"model.embed_tokens": (vocab, _HIDDEN), "lm_head": (vocab, _HIDDEN)}
    norms = ["model.norm"]
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj": (_HIDDEN, _HIDDEN) for name in "qo"}
        shapes |= {f"{prefix}.self_attn.{name}_proj": (kv_width, _HIDDEN) for name in "kv"}
        shapes |= {f"{prefix}.mlp.{name}_proj": (_FFN, _HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj": (_HIDDEN, _FFN)}
        norms += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
    random = torch.Generator().manual_seed(7)
    tensors = {f"{name}.weight": 0.3 * torch.randn(shape, generator=random) for name, shape in shapes.items()}
    for name in tensors:
        tensors[name] = tensors[name] + noise * torch.randn(tensors[name].shape, generator=random)
    tensors |= {f"{name}.weight": torch.ones(_HIDDEN) for name in norms}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
