"""Reading GGUF files: container, config, rope layout of q and k, tokenizer, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")

from trtspec.errors import TrtspecError  # noqa: E402
from trtspec.models.source import open_model  # noqa: E402
from trtspec.runtime.llama import Llama, load_weights  # noqa: E402

BYTES = "".join(sorted({chr(i) for i in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]}))
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "Ġt", "he", "Ġthe", "12"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2"]
HIDDEN, HEADS, KV_HEADS, INTER = 32, 4, 2, 64


def write(path: Path, *, quant: Any = None, pre: str = "smollm", architecture: str = "llama") -> dict[str, np.ndarray]:
    """A small random model; returns its weights by GGUF name as they were written."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,), f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (HIDDEN // 2, HIDDEN), f"blk.{layer}.attn_v": (HIDDEN // 2, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN), f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_gate": (INTER, HIDDEN), f"blk.{layer}.ffn_up": (INTER, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, INTER),
        }  # fmt: skip
    weights = {}
    for name, shape in shapes.items():
        value = rng.normal(size=shape, scale=0.3).astype(np.float32)
        if quant is not None and len(shape) == 2:
            packed = gguf.quantize(value, quant)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=quant)
            value = gguf.dequantize(packed, quant)
        else:
            writer.add_tensor(f"{name}.weight", value)
        weights[name] = value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def interleaved_attention_scores(x: np.ndarray, q: np.ndarray, k: np.ndarray, theta: float) -> np.ndarray:
    """q k of one layer by the convention GGUF stores: pair (2i, 2i+1) of a head is rotated by position / theta^(2i/d).

    x `[L, hidden]`; returns `[heads, L, L]` unscaled scores.
    """
    size = HIDDEN // HEADS
    angle = np.arange(len(x))[:, None] / theta ** (np.arange(0, size, 2) / size)

    def turned(w: np.ndarray) -> np.ndarray:
        pairs = (x @ w.T).reshape(len(x), -1, size // 2, 2)
        first, second = pairs[..., 0], pairs[..., 1]
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.stack((first * cos - second * sin, first * sin + second * cos), axis=-1).reshape(len(x), -1, size)

    keys = np.repeat(turned(k), HEADS // KV_HEADS, axis=1)
    return np.einsum("qhd,khd->hqk", turned(q), keys)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write(tmp_path / "m.gguf")
    return tmp_path


def test_config_is_read(model: Path) -> None:
    config = open_model(str(model), gguf_file="m.gguf").config
    assert (config.num_hidden_layers, config.hidden_size, config.num_key_value_heads) == (2, HIDDEN, KV_HEADS)
    assert (config.norm_epsilon, config.rotary_base, config.tie_word_embeddings) == (1e-05, 100000.0, True)
    assert (config.eos_token_ids, config.bos_token_id, config.vocab_size) == ((2,), 1, len(TOKENS))


def test_rows_of_q_and_k_are_put_back(tmp_path: Path) -> None:
    stored = write(tmp_path / "m.gguf")
    source = open_model(str(tmp_path), gguf_file="m.gguf")
    from trtspec.runtime.kernels import rotate
    from trtspec.runtime.llama import rope_table

    x = np.random.default_rng(1).normal(size=(9, HIDDEN)).astype(np.float32)
    expected = interleaved_attention_scores(x, stored["blk.0.attn_q"], stored["blk.0.attn_k"], 100000.0)
    cos, sin = (table[:9] for table in rope_table(source.config))

    def turned(part: str) -> torch.Tensor:
        projected = torch.from_numpy(x) @ source.tensor(f"model.layers.0.self_attn.{part}_proj.weight").T
        return rotate(projected.view(9, -1, HIDDEN // HEADS).transpose(0, 1), cos, sin)

    scores = turned("q") @ turned("k").repeat_interleave(HEADS // KV_HEADS, dim=0).transpose(1, 2)
    np.testing.assert_allclose(scores.numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("quant", [None, "Q8_0", "Q4_1"])
def test_weights_are_expanded(tmp_path: Path, quant: str | None) -> None:
    stored = write(tmp_path / "m.gguf", quant=quant and gguf.GGMLQuantizationType[quant])
    source = open_model(str(tmp_path), gguf_file="m.gguf")
    source.check()
    np.testing.assert_array_equal(source.tensor("model.embed_tokens.weight").numpy(), stored["token_embd"])
    np.testing.assert_array_equal(
        source.tensor("model.layers.1.mlp.down_proj.weight").numpy(), stored["blk.1.ffn_down"]
    )
    model = Llama(source.config, load_weights(source))
    assert model.forward(torch.tensor([[5, 6, 7]]), model.new_cache(1, 3), 0).isfinite().all()


@pytest.mark.parametrize(
    "text", ["the 12 the", "def f(x):\n\treturn x  # é", "🙂 naïve\r\n", "<|im_start|>the<|im_end|>"]
)
@pytest.mark.parametrize("pre", ["smollm", "gpt-2"])
def test_tokenizer_round_trip(tmp_path: Path, text: str, pre: str) -> None:
    write(tmp_path / "m.gguf", pre=pre)
    source = open_model(str(tmp_path), gguf_file="m.gguf")
    ids = source.encode(text)
    assert source.tokenizer().decode(ids, skip_special_tokens=False) == text
    assert ("<|im_start|>" in text) == (ids[0] == 1)


def test_digits_stand_alone_for_smollm_only(tmp_path: Path) -> None:
    for pre, count in (("smollm", 2), ("gpt-2", 1)):
        write(tmp_path / f"{pre}.gguf", pre=pre)
        assert len(open_model(str(tmp_path), gguf_file=f"{pre}.gguf").encode("12")) == count


def test_a_file_cut_anywhere_is_refused(model: Path) -> None:
    whole = (model / "m.gguf").read_bytes()
    for size in (4, 20, 200, 3000, len(whole) // 2, len(whole) - 64):
        (model / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(TrtspecError, match="truncated GGUF file"):
            open_model(str(model), gguf_file="cut.gguf")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04" + b"\0" * 60)
    write(tmp_path / "b.gguf", architecture="gemma")
    write(tmp_path / "c.gguf", pre="llama-bpe")
    with pytest.raises(TrtspecError, match="not a GGUF file"):
        open_model(str(tmp_path), gguf_file="a.gguf")
    with pytest.raises(TrtspecError, match="architecture 'gemma'"):
        open_model(str(tmp_path), gguf_file="b.gguf")
    with pytest.raises(TrtspecError, match="pre-tokenizer 'llama-bpe'"):
        open_model(str(tmp_path), gguf_file="c.gguf").tokenizer()
    with pytest.raises(TrtspecError, match=r"no such GGUF file; expected one of: a.gguf, b.gguf, c.gguf"):
        open_model(str(tmp_path), gguf_file="d.gguf")
