"""Named shapes: the sizes of well-known models (`shapes.yaml`), for plans and measurements without their weights.

Knows configs only. Does not know where a model lies, what it says, or how fast it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.spec.yaml_file import parse

_FILE = Path(__file__).with_name("shapes.yaml")


@dataclass(frozen=True)
class LatentConfig(ModelConfig):
    """A model with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A layer keeps one latent vector and one rotated key a token, for all heads together. `num_key_value_heads` and
    `head_size` of such a record describe this cache, as one head whose key and value together have its numbers, so that
    whoever multiplies 2 x heads x size counts it right, copies on the ranks of tensor_parallel included.

    Attributes:
        q_lora_rank: numbers of the compressed query; 0: it is not compressed.
        kv_lora_rank: numbers of the latent vector.
        qk_nope_head_dim: numbers of a head's key without position.
        qk_rope_head_dim: numbers of the rotated key.
        v_head_dim: numbers of a head's value.
    """

    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    @classmethod
    def of(cls, config: ModelConfig, hf: Mapping[str, Any]) -> LatentConfig:
        """The record of a `config.json` (`hf`) with `kv_lora_rank`, of which `config` is what `ModelConfig` reads.

        Shared experts and dense first layers are read under the names that DeepSeek has for them.

        Raises:
            TrtspecError: a key that is needed is missing or has an impossible value.
        """
        values: dict[str, Any] = asdict(config) | {"q_lora_rank": _count(hf, "q_lora_rank")}
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            values[name] = _count(hf, name, least=1)
        values |= {
            "num_key_value_heads": 1,
            "head_size": (values["kv_lora_rank"] + values["qk_rope_head_dim"]) // 2,
            "shared_expert_intermediate_size": _count(hf, "n_shared_experts") * config.moe_intermediate_size,
            "num_dense_mlp_layers": _count(hf, "first_k_dense_replace") if config.num_experts else 0,
        }
        return cls(**values)


def shape_names() -> list[str]:
    """The names that `shape_of` knows."""
    return list(_rows())


def shape_of(name: str) -> ModelConfig:
    """The sizes of a named shape; of a model with latent attention a `LatentConfig`.

    Raises:
        TrtspecError: there is no such shape; lists those there are.
    """
    rows = _rows()
    if name not in rows:
        raise TrtspecError(f"no shape {name!r}", expected=f"one of {', '.join(rows)}")
    row = rows[name]
    config = ModelConfig.from_hf(row)
    return LatentConfig.of(config, row) if "kv_lora_rank" in row else config


def card_parameters(name: str) -> float:
    """How many numbers the model card of a named shape gives, in units of 10^9."""
    return float(_rows()[name]["parameters"])


@lru_cache(maxsize=1)
def _rows() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = parse(_FILE.read_text(encoding="utf-8")).value
    return rows


def _count(hf: Mapping[str, Any], key: str, least: int = 0) -> int:
    value = hf.get(key) or 0
    if not isinstance(value, int) or value < least:
        raise TrtspecError(f"{key} is {hf.get(key)!r}", where="config.json", expected=f"a whole number from {least} on")
    return value
