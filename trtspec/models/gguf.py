"""Reading a GGUF file as if it were a Hugging Face checkpoint: config, tokenizer and weights.

Knows the container format, the Llama architecture's names in it and its tokenizer fields. The blocks of quantised
weights are expanded by the `gguf` package. Does not know TensorRT-LLM or Triton.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GGUFFile:
    """Header of one file: `fields` (key -> value) and `tensors` (GGUF name -> shape, type, offset).

    Raises:
        TrtspecError: not a GGUF file, cut short, or an architecture or quantisation that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            if file.read(4) != MAGIC:
                raise TrtspecError("not a GGUF file", where=str(path), expected="the magic bytes 'GGUF'")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 4
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise self._truncated() from error
        for name, (_, _, offset, size) in self.tensors.items():
            if offset + size > len(self._data):
                raise self._truncated(f" (tensor {name} ends at byte {offset + size})")

    def _read_header(self) -> None:
        version, num_tensors, num_fields = self._unpack("<IQQ")
        if version not in (2, 3):
            raise TrtspecError(f"GGUF version {version}", where=str(self.path), expected="2 or 3")
        self.fields: dict[str, Any] = {self._string(): self._value(self._unpack("<I")[0]) for _ in range(num_fields)}
        architecture = self.fields.get("general.architecture")
        if architecture != "llama":
            raise TrtspecError(
                f"GGUF architecture {architecture!r} is not supported",
                where=str(self.path),
                expected="llama",
                fix="use the model's Hugging Face directory instead of its GGUF file",
            )
        entries = []
        for _ in range(num_tensors):
            name = self._string()
            (rank,) = self._unpack("<I")
            # GGUF lists the fastest dimension first; shapes here are in row-major order, as in numpy.
            shape = tuple(reversed(self._unpack(f"<{rank}Q")))
            entries.append((name, shape, *self._unpack("<IQ")))
        alignment = self.fields.get("general.alignment", 32)
        base = -(-self._at // alignment) * alignment
        # tensors: name -> (shape, quantisation type, absolute offset, bytes)
        self.tensors: dict[str, tuple[tuple[int, ...], int, int, int]] = {
            name: (shape, kind, base + offset, self._num_bytes(name, shape, kind))
            for name, shape, kind, offset in entries
        }

    def array(self, name: str) -> np.ndarray:
        """float32 values of the tensor with GGUF name `name`."""
        import numpy as np
        from gguf import GGMLQuantizationType, dequantize

        shape, kind, offset, size = self.tensors[name]
        raw = np.frombuffer(self._data, dtype=np.uint8, count=size, offset=offset)
        quant = GGMLQuantizationType(kind)
        if quant.name in ("F32", "F16"):
            return raw.view(np.float32 if quant.name == "F32" else np.float16).astype(np.float32).reshape(shape)
        try:
            return dequantize(raw.reshape(*shape[:-1], -1), quant).reshape(shape)
        except NotImplementedError as error:
            raise TrtspecError(
                f"quantisation {quant.name} of tensor {name} is not supported",
                where=str(self.path),
                fix="use a file with F16, Q8_0, Q4_0, Q4_1 or K-quant weights",
            ) from error

    def _num_bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise TrtspecError(f"unknown quantisation type {kind} of tensor {name}", where=str(self.path)) from None
        count = 1
        for dim in shape:
            count *= dim
        return count // block * size

    def _truncated(self, detail: str = "") -> TrtspecError:
        return TrtspecError(
            f"truncated GGUF file of {len(self._data)} bytes{detail}", where=str(self.path), fix="download it again"
        )

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        if self._at + length > len(self._data):
            raise IndexError(length)
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, length = self._unpack("<IQ")
            if item in _SCALARS:
                return list(self._unpack(f"<{length}{_SCALARS[item]}"))
            return [self._value(item) for _ in range(length)]
        if kind not in _SCALARS:
            raise TrtspecError(f"unknown field type {kind}", where=str(self.path), expected="GGUF version 2 or 3")
        (value,) = self._unpack(f"<{_SCALARS[kind]}")
        return value


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The model's config from the file's `llama.*` and `tokenizer.*` fields."""
    fields = file.fields

    def need(key: str) -> Any:
        if key not in fields:
            raise TrtspecError(f"field {key} is missing", where=str(file.path), fix="convert the model again")
        return fields[key]

    heads = need("llama.attention.head_count")
    hidden = need("llama.embedding_length")
    eos = fields.get("tokenizer.ggml.eos_token_id")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        model_type="llama",
        vocab_size=file.tensors["token_embd.weight"][0][0],
        hidden_size=hidden,
        num_hidden_layers=need("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=fields.get("llama.attention.head_count_kv", heads),
        head_size=fields.get("llama.attention.key_length", hidden // heads),
        intermediate_size=need("llama.feed_forward_length"),
        norm_epsilon=_shortest(need("llama.attention.layer_norm_rms_epsilon")),
        rotary_base=_shortest(fields.get("llama.rope.freq_base", 10000.0)),
        rotary_scaling=None,
        max_position_embeddings=need("llama.context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        attn_bias=False,
        mlp_bias=False,
        qk_layernorm=False,
        hidden_act="silu",
        dtype="float32",
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=() if eos is None else (eos,),
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
    )


def gguf_names(file: GGUFFile) -> dict[str, str]:
    """Hugging Face tensor name -> GGUF tensor name, for the tensors that the file holds."""
    names = dict(_GLOBAL_NAMES)
    for layer in range(file.fields["llama.block_count"]):
        for theirs, ours in _LAYER_NAMES.items():
            names[f"model.layers.{layer}.{theirs}.weight"] = f"blk.{layer}.{ours}.weight"
    return {hf: name for hf, name in names.items() if name in file.tensors}


def gguf_array(file: GGUFFile, config: ModelConfig, hf_name: str, gguf_name: str) -> np.ndarray:
    """float32 weight in Hugging Face's layout.

    GGUF stores the rows of q and k so that a rotated pair lies side by side; Hugging Face splits a head in halves.
    """
    array = file.array(gguf_name)
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if part in hf_name:
            return array.reshape(heads, config.head_size // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)
    return array


def _shortest(value: float) -> float:
    """1e-05 for the float32 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))
