"""What a Hugging Face checkpoint says about its model, in one immutable record.

Knows the names that Hugging Face configs use and their defaults; does not read files, and knows neither
TensorRT-LLM nor Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtspec.errors import TrtspecError

# Families whose config leaves a switch out because the model class hard-codes it.
_ATTN_BIAS_FAMILIES = {"qwen2", "qwen2_moe"}
_QK_NORM_FAMILIES = {"qwen3", "qwen3_moe"}
# Families whose experts' shares are left as they are unless the config says otherwise.
_UNNORMALISED_EXPERTS = {"qwen2_moe", "qwen3_moe"}
_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes, rope, biases and special ids of one model, named as TensorRT-LLM names them where it has a name."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    norm_epsilon: float
    rotary_base: float
    rotary_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attn_bias: bool
    mlp_bias: bool
    qk_layernorm: bool
    hidden_act: str
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0  # of one expert; 0: intermediate_size
    shared_expert_intermediate_size: int = 0  # of the expert that every token goes through; 0: there is none
    norm_topk_prob: bool = True  # whether the shares of a token's experts add up to 1
    num_dense_mlp_layers: int = 0  # layers without experts in a mixture of experts
    num_nextn_predict_layers: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read `config.json` (and `generation_config.json`) as parsed dictionaries.

        The EOS ids are the union of both files: either alone has been seen to miss one.

        Raises:
            TrtspecError: a key that every decoder needs is missing or has an impossible value.
        """
        # Multimodal wrappers keep the language model's sizes one level down.
        if "hidden_size" not in config and isinstance(config.get("text_config"), Mapping):
            config = {**config["text_config"], "architectures": config.get("architectures")}
        hidden_size = _positive(config, "hidden_size")
        heads = _positive(config, "num_attention_heads")
        head_size = config.get("head_dim") or hidden_size // heads
        model_type = str(config.get("model_type", "llama"))
        rope = config.get("rope_scaling") or config.get("rope_parameters") or None
        rotary_base = config.get("rope_theta") or (rope or {}).get("rope_theta") or 10000.0
        kind = (rope or {}).get("rope_type", (rope or {}).get("type", "default"))
        dtype = str(config.get("torch_dtype") or config.get("dtype") or "float32").removeprefix("torch.")
        generation = generation_config or {}
        num_experts = int(
            config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts") or 0
        )
        bias = bool(config.get("attention_bias", config.get("qkv_bias", model_type in _ATTN_BIAS_FAMILIES)))
        return cls(
            architecture=str((config.get("architectures") or [_class_name(model_type)])[0]),
            model_type=model_type,
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=hidden_size,
            num_hidden_layers=_positive(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(head_size),
            intermediate_size=_positive(config, "intermediate_size"),
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            rotary_base=float(rotary_base),
            rotary_scaling=None if kind == "default" else dict(rope or {}),
            max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attn_bias=bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_layernorm=model_type in _QK_NORM_FAMILIES,
            hidden_act=str(config.get("hidden_act", "silu")),
            dtype=dtype if dtype in _DTYPES else "float32",
            bos_token_id=_first(config.get("bos_token_id", generation.get("bos_token_id"))),
            eos_token_ids=_ids(config.get("eos_token_id"), generation.get("eos_token_id")),
            pad_token_id=_first(config.get("pad_token_id", generation.get("pad_token_id"))),
            num_experts=num_experts,
            num_experts_per_token=_count(config, "num_experts_per_tok"),
            moe_intermediate_size=_count(config, "moe_intermediate_size"),
            shared_expert_intermediate_size=_count(config, "shared_expert_intermediate_size"),
            norm_topk_prob=bool(config.get("norm_topk_prob", model_type not in _UNNORMALISED_EXPERTS)),
            num_dense_mlp_layers=_num_dense_mlp_layers(config) if num_experts else 0,
            num_nextn_predict_layers=_count(config, "num_nextn_predict_layers"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that `from_hf` reads back to an equal record."""
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.intermediate_size,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rotary_base,
            "rope_scaling": self.rotary_scaling,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attn_bias,
            "mlp_bias": self.mlp_bias,
            "hidden_act": self.hidden_act,
            "torch_dtype": self.dtype,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids),
            "pad_token_id": self.pad_token_id,
        }
        if self.num_experts:
            count = "num_experts" if self.model_type in _UNNORMALISED_EXPERTS else "num_local_experts"
            config |= {count: self.num_experts, "num_experts_per_tok": self.num_experts_per_token}
        if self.moe_intermediate_size:
            config |= {"moe_intermediate_size": self.moe_intermediate_size, "norm_topk_prob": self.norm_topk_prob}
        if self.shared_expert_intermediate_size:
            config |= {"shared_expert_intermediate_size": self.shared_expert_intermediate_size}
        if self.num_nextn_predict_layers:
            config["num_nextn_predict_layers"] = self.num_nextn_predict_layers
        return config


def _num_dense_mlp_layers(config: Mapping[str, Any]) -> int:
    """Layers that a mixture of experts leaves dense: named ones, and all but every n-th."""
    named, step = config.get("mlp_only_layers") or (), int(config.get("decoder_sparse_step") or 1)
    return sum(layer in named or (layer + 1) % step != 0 for layer in range(_positive(config, "num_hidden_layers")))


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = "is missing" if value is None else f"is {value!r}"
        raise TrtspecError(f"{key} {found}", where="config.json", expected="a positive integer")
    return value


def _count(config: Mapping[str, Any], key: str) -> int:
    """0 where it is missing."""
    value = config.get(key) or 0
    if not isinstance(value, int) or value < 0:
        raise TrtspecError(f"{key} is {value!r}", where="config.json", expected="a whole number, 0 or more")
    return value


def _first(value: Any) -> int | None:
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return None if value is None else int(value)


def _ids(*values: Any) -> tuple[int, ...]:
    """Union in order of appearance of ids given as int, list or None."""
    flat: list[int] = []
    for value in values:
        flat += [] if value is None else [int(v) for v in value] if isinstance(value, (list, tuple)) else [int(value)]
    return tuple(dict.fromkeys(flat))


def _class_name(model_type: str) -> str:
    return "".join(part.capitalize() for part in model_type.split("_")) + "ForCausalLM"
