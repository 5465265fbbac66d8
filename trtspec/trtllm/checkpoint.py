"""TensorRT-LLM checkpoints: what config.json says, which tensors each rank must hold, and what is wrong with one.

Knows names, shapes, types and scales of the format, and the two files beside the weights: TensorRT-LLM's config.json
and our record trtspec.json. Reads headers, and of the weights the scales only. Does not know how a checkpoint is made,
nor how one is executed (`dequantize`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.models.source import safetensors_header

if TYPE_CHECKING:
    import torch

CONFIG, RECORD = "config.json", "trtspec.json"
AWQ_GROUP_SIZE = 128  # weights that share one scale; the only size that TensorRT-LLM's kernels take here
FP8, INT8_SQ, INT4_AWQ, W4A8_AWQ = "FP8", "W8A8_SQ_PER_CHANNEL", "W4A16_AWQ", "W4A8_AWQ"
MAX_INPUT = {FP8: 448.0, INT8_SQ: 127.0, W4A8_AWQ: 448.0}
"""Largest value of the type that inputs are quantised to, by quant_algo; the scale is amax over this."""

_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_WEIGHT_DTYPES = {FP8: "F8_E4M3", INT8_SQ: "I8", INT4_AWQ: "I8", W4A8_AWQ: "I8"}
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Families that TensorRT-LLM's own converter alone writes: of these, fields and rank files are checked, tensors are not.
_OWN_CONVERTER = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
_NOT_QUANTISED = ("*lm_head", "*router")  # what TensorRT-LLM leaves alone when exclude_modules is not given
# Heads that are part of the engine: prefixes of their tensors, of which the names beyond it are not documented.
_HEAD_PREFIXES = {
    "EagleForCausalLM": "eagle_nets.",
    "ReDrafterForLLaMALM": "drafter.",
    "ReDrafterForQWenLM": "drafter.",
}
_REQUIRED = (
    "architecture", "dtype", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_size", "intermediate_size", "norm_epsilon", "hidden_act", "position_embedding_type",
    "max_position_embeddings", "rotary_base", "mapping", "quantization",
)  # fmt: skip
# What config.json and the model that was converted must agree on.
_SAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_size",
    "intermediate_size", "norm_epsilon", "rotary_base", "rotary_scaling", "attn_bias", "mlp_bias", "qk_layernorm",
    "num_experts", "num_experts_per_token",
)  # fmt: skip
_SHOWN = 3  # tensors named of each kind of fault and rank; the rest is counted


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor of a rank file must look like.

    Attributes:
        shape: of this rank's part.
        dtypes: safetensors names that are right.
        required: TensorRT-LLM refuses to load without it.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    required: bool = True


@dataclass(frozen=True)
class Linear:
    """One linear layer, or one stack of experts, as it is before it is split over ranks.

    Attributes:
        name: module name; layers are counted within the pipeline stage.
        blocks: output features of the parts that are split on their own (q, k, v; up, gate), or all of them.
        in_features: input features.
        split: `column` (output features), `row` (input features).
        bias: whether it has one.
        experts: layers that are stacked in front; 0 for a plain one.
        unit: output features that stay together, a head; where a block has fewer units than there are ranks, each
            unit stands on several ranks.
    """

    name: str
    blocks: tuple[int, ...]
    in_features: int
    split: str
    bias: bool = False
    experts: int = 0
    unit: int = 1

    def rank_blocks(self, tp: int) -> tuple[int, ...]:
        """Output features of each block on one rank."""
        return tuple(max(block // tp, self.unit) for block in self.blocks) if self.split == "column" else self.blocks

    def rank_inputs(self, tp: int) -> int:
        """Input features on one rank."""
        return self.in_features // tp if self.split == "row" else self.in_features


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint directory.

    Attributes:
        path: the directory.
        config: content of config.json.
        record: content of trtspec.json; empty for a checkpoint that trtspec did not make.
    """

    path: Path
    config: dict[str, Any]
    record: dict[str, Any]

    @classmethod
    def load(cls, directory: Path) -> Checkpoint:
        """Read the two JSON files.

        Raises:
            TrtspecError: there is no checkpoint, or a file that cannot be read.
        """
        record = directory / RECORD
        return cls(directory, _read_json(directory / CONFIG), _read_json(record) if record.exists() else {})

    @property
    def tp_size(self) -> int:
        """Ranks that each layer is split over."""
        return int(self.config["mapping"].get("tp_size", 1))

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return int(self.config["mapping"].get("pp_size", 1))

    @property
    def world_size(self) -> int:
        """Ranks that config.json speaks of; see `faults` for whether that is right."""
        return int(self.config["mapping"].get("world_size", 1))

    @property
    def quant_algo(self) -> str | None:
        """How linear layers are quantised, in TensorRT-LLM's words; None: not at all."""
        return self.config["quantization"].get("quant_algo")

    @property
    def kv_cache_quant_algo(self) -> str | None:
        """`FP8`, `INT8`, or None for a KV cache in the model's type."""
        return self.config["quantization"].get("kv_cache_quant_algo")

    @property
    def group_size(self) -> int:
        """Weights of one row that share a scale, with AWQ."""
        return int(self.config["quantization"].get("group_size") or AWQ_GROUP_SIZE)

    @property
    def vocab_size(self) -> int:
        """Ids that stand for tokens; the padding behind them can never be chosen."""
        return int(self.config["vocab_size"])

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the head over all ranks: the vocabulary, padded to a multiple of tp_size."""
        return math.ceil(self.vocab_size / self.tp_size) * self.tp_size

    @property
    def num_stage_layers(self) -> int:
        """Layers in each pipeline stage."""
        return int(self.config["num_hidden_layers"]) // self.pp_size

    @property
    def is_known(self) -> bool:
        """Whether the names of its tensors are known here, so that they can be checked and executed."""
        return self.config["architecture"] not in _OWN_CONVERTER

    @property
    def model_type(self) -> str:
        """Hugging Face's name of the family; for an architecture with heads, that of the model under them.

        Raises:
            TrtspecError: another architecture.
        """
        config = self.config
        architecture = (
            config.get("base_architecture") or config.get("base_model_architecture") or config["architecture"]
        )
        if architecture in _MODEL_TYPES:
            return _MODEL_TYPES[architecture]
        if architecture in ("QWenForCausalLM", "MedusaForCausalLM"):
            return str(config.get("qwen_type") or config.get("model_type", "llama"))
        if architecture == "EagleForCausalLM":
            return "llama"
        raise TrtspecError(
            f"architecture {architecture} is not one that trtspec knows",
            where=str(self.path / CONFIG),
            expected=f"one of {', '.join(_MODEL_TYPES)}",
        )

    @property
    def model(self) -> ModelConfig:
        """The model as TensorRT-LLM will compile it: sizes and switches of config.json, special ids of our record."""
        config, recorded = self.config, self.record.get("model_config", {})
        model_type = self.model_type
        moe = config.get("moe") or {}
        architecture = next((name for name, kind in _MODEL_TYPES.items() if kind == model_type), config["architecture"])
        return ModelConfig(
            architecture=architecture,
            model_type=model_type,
            vocab_size=self.vocab_size,
            hidden_size=int(config["hidden_size"]),
            num_hidden_layers=int(config["num_hidden_layers"]),
            num_attention_heads=int(config["num_attention_heads"]),
            num_key_value_heads=int(config["num_key_value_heads"]),
            head_size=int(config["head_size"]),
            intermediate_size=int(config["intermediate_size"]),
            norm_epsilon=float(config["norm_epsilon"]),
            # A key that is missing is a fault; what would be compiled is TensorRT-LLM's default.
            rotary_base=float(config.get("rotary_base", 10000.0)),
            rotary_scaling=config.get("rotary_scaling"),
            max_position_embeddings=int(config["max_position_embeddings"]),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", config.get("share_embedding_table", False))),
            attn_bias=bool(config.get("attn_bias", model_type == "qwen2")),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_layernorm=bool(config.get("qk_layernorm", model_type == "qwen3")),
            hidden_act="silu" if config["hidden_act"] == "swiglu" else str(config["hidden_act"]),
            dtype=str(config["dtype"]),
            bos_token_id=self.record.get("bos_token_id", recorded.get("bos_token_id")),
            eos_token_ids=tuple(self.record.get("eos_token_ids", recorded.get("eos_token_ids", ()))),
            pad_token_id=self.record.get("pad_token_id", recorded.get("pad_token_id")),
            num_experts=int(moe.get("num_experts", 0)),
            num_experts_per_token=int(moe.get("top_k", 0)),
        )

    def stage(self, rank: int) -> int:
        """Pipeline stage of a rank; the ranks of one stage stand side by side."""
        return rank // self.tp_size

    def rank_file(self, rank: int) -> Path:
        """The weights of one rank."""
        return self.path / f"rank{rank}.safetensors"

    def quantised(self, module: str) -> bool:
        """Whether a linear layer (its name within the stage) is stored quantised."""
        excluded = self.config["quantization"].get("exclude_modules")
        patterns = _NOT_QUANTISED if excluded is None else (*excluded, "*router")
        return self.quant_algo is not None and not any(fnmatch(module, pattern) for pattern in patterns)

    @cached_property
    def headers(self) -> dict[int, dict[str, Any]]:
        """Parsed header of each rank file.

        Raises:
            TrtspecError: one is missing or cut short.
        """
        ranks = range(self.tp_size * self.pp_size)
        return {
            rank: {name: entry for name, entry in safetensors_header(self.rank_file(rank)).items() if "shape" in entry}
            for rank in ranks
        }


def linears(checkpoint: Checkpoint, stage: int) -> list[Linear]:
    """The linear layers of a pipeline stage, unsplit; the head with its padding, Medusa heads with it."""
    model = checkpoint.model
    hidden, inner = model.hidden_size, model.intermediate_size
    q, kv = (heads * model.head_size for heads in (model.num_attention_heads, model.num_key_value_heads))
    dense_bias = model.attn_bias and model.model_type in ("llama", "mistral")
    result = []
    for layer in range(checkpoint.num_stage_layers):
        name = f"transformer.layers.{layer}"
        result += [
            Linear(f"{name}.attention.qkv", (q, kv, kv), hidden, "column", bias=model.attn_bias, unit=model.head_size),
            Linear(f"{name}.attention.dense", (hidden,), q, "row", bias=dense_bias),
        ]
        if experts := model.num_experts:
            result += [
                Linear(f"{name}.mlp.fc", (inner, inner), hidden, "column", experts=experts),
                Linear(f"{name}.mlp.proj", (hidden,), inner, "row", experts=experts),
            ]
            continue
        result += [
            Linear(f"{name}.mlp.fc", (inner,), hidden, "column", bias=model.mlp_bias),
            Linear(f"{name}.mlp.gate", (inner,), hidden, "column", bias=model.mlp_bias),
            Linear(f"{name}.mlp.proj", (hidden,), inner, "row", bias=model.mlp_bias),
        ]
    if stage == checkpoint.pp_size - 1:
        vocab = checkpoint.padded_vocab_size
        result.append(Linear("lm_head", (vocab,), hidden, "column"))
        if checkpoint.config["architecture"] == "MedusaForCausalLM":
            for head in range(checkpoint.config.get("num_medusa_heads", 4)):
                result += [
                    Linear(f"medusa_heads.{head}.medusa_layers.{layer}.linear", (hidden,), hidden, "column", bias=True)
                    for layer in range(checkpoint.config.get("num_medusa_layers", 1))
                ]
                result.append(Linear(f"medusa_heads.{head}.lm_head", (vocab,), hidden, "column"))
    return result


def expected_tensors(checkpoint: Checkpoint, rank: int) -> dict[str, TensorSpec]:
    """Names, shapes and types of the tensors that one rank file must or may hold.

    Raises:
        TrtspecError: an architecture that trtspec does not know.
    """
    model, stage, tp = checkpoint.model, checkpoint.stage(rank), checkpoint.tp_size
    plain = (_DTYPES[checkpoint.config["dtype"]],)
    scale, hidden = ("F32",), model.hidden_size
    result = {}
    if stage == 0:
        result["transformer.vocab_embedding.weight"] = TensorSpec(_embedding_shape(checkpoint), plain)
    for layer in range(checkpoint.num_stage_layers):
        name = f"transformer.layers.{layer}"
        for norm in ("input_layernorm", "post_layernorm"):
            result[f"{name}.{norm}.weight"] = TensorSpec((hidden,), plain)
        if model.qk_layernorm:
            for norm in ("q_layernorm", "k_layernorm"):
                result[f"{name}.attention.{norm}.weight"] = TensorSpec((model.head_size,), plain)
        if model.num_experts:
            result[f"{name}.mlp.router.weight"] = TensorSpec((model.num_experts, hidden), scale)
        if checkpoint.kv_cache_quant_algo:
            result[f"{name}.attention.kv_cache_scaling_factor"] = TensorSpec((1,), scale)
            for kind in ("k", "v"):  # TensorRT-LLM reads the common one
                result[f"{name}.attention.{kind}_cache_scaling_factor"] = TensorSpec((1,), scale, required=False)
    if stage == checkpoint.pp_size - 1:
        result["transformer.ln_f.weight"] = TensorSpec((hidden,), plain)
    for linear in linears(checkpoint, stage):
        parts = _linear_tensors(checkpoint, linear, tp, plain)
        if linear.name == "lm_head" and model.tie_word_embeddings and checkpoint.pp_size == 1:
            parts = {kind: replace(spec, required=False) for kind, spec in parts.items()}
        result |= {f"{linear.name}.{kind}": spec for kind, spec in parts.items()}
    return result


def _embedding_shape(checkpoint: Checkpoint) -> tuple[int, int]:
    """This rank's part of the embedding."""
    hidden, tp = int(checkpoint.config["hidden_size"]), checkpoint.tp_size
    if not checkpoint.config.get("use_parallel_embedding", False):
        return checkpoint.vocab_size, hidden
    if checkpoint.config.get("embedding_sharding_dim", 0):
        return checkpoint.vocab_size, hidden // tp
    return checkpoint.padded_vocab_size // tp, hidden


def _linear_tensors(checkpoint: Checkpoint, linear: Linear, tp: int, plain: tuple[str, ...]) -> dict[str, TensorSpec]:
    """The tensors of one linear layer on one rank, by kind."""
    out, inputs = sum(linear.rank_blocks(tp)), linear.rank_inputs(tp)
    stack = (linear.experts,) if linear.experts else ()
    result = {"bias": TensorSpec((out,), plain)} if linear.bias else {}
    algo = checkpoint.quant_algo if checkpoint.quantised(linear.name) else None
    if algo is None:
        return result | {"weight": TensorSpec((*stack, out, inputs), plain)}
    awq = algo in (INT4_AWQ, W4A8_AWQ)
    scales = {FP8: (*stack, 1), INT8_SQ: (*stack, out)}.get(algo, (*stack, out, inputs // checkpoint.group_size))
    floats = tuple(_DTYPES.values())
    result["weight"] = TensorSpec((*stack, out // 2 if awq else out, inputs), (_WEIGHT_DTYPES[algo],))
    result["weights_scaling_factor"] = TensorSpec(scales, floats if awq else ("F32",))
    if algo in MAX_INPUT:
        result["activation_scaling_factor"] = TensorSpec((1,), ("F32",))
    if algo != FP8:
        result["prequant_scaling_factor"] = TensorSpec((*stack, inputs), floats)
    if algo == W4A8_AWQ:
        result["weights_scaling_factor_2"] = TensorSpec((*stack, 1), ("F32",))
    return result


def require_sound(directory: Path) -> Checkpoint:
    """The checkpoint in a directory.

    Raises:
        TrtspecError: it is not one, or it has faults; all of them are named.
    """
    checkpoint = Checkpoint.load(directory)
    if found := faults(checkpoint):
        raise TrtspecError("; ".join(found), where=str(directory), fix="convert the model again: trtspec build --force")
    return checkpoint


def faults(checkpoint: Checkpoint) -> list[str]:
    """What is wrong with a checkpoint, one line each; nothing if TensorRT-LLM can compile it as it was meant.

    Looks at config.json, at the header of every rank file, at the scales, and at what our record says about the model
    and the calibration.
    """
    found = structural_faults(checkpoint)
    return found if found or not checkpoint.is_known else [*_model_faults(checkpoint), *_scale_faults(checkpoint)]


def structural_faults(checkpoint: Checkpoint) -> list[str]:
    """The faults with which it cannot even be executed: fields, ranks or tensors that are missing or misshapen."""
    for look in (_config_faults, _split_faults, _file_faults):
        if found := list(look(checkpoint)):
            return found
    found = list(_tensor_faults(checkpoint)) if checkpoint.is_known else []
    # A size that is not the model's says more than the shapes that follow from it.
    return [*_model_faults(checkpoint), *found] if found else []


def _config_faults(checkpoint: Checkpoint) -> Iterator[str]:
    """Fields that are missing, or have a value that nothing can be concluded from."""
    config = checkpoint.config
    for key in (key for key in _REQUIRED if config.get(key) is None):
        yield f"{CONFIG}: {key} is missing"
    if any(not isinstance(config.get(key), dict) for key in ("mapping", "quantization")) or not config.get(
        "architecture"
    ):
        return
    try:
        model_type = checkpoint.model_type if checkpoint.is_known else "qwen_moe"
    except TrtspecError as error:
        yield f"{CONFIG}: {error.problem}"
        return
    if model_type.startswith("qwen"):
        wanted = ("qwen_type", *(("attn_bias", "qk_layernorm") if model_type == "qwen3" else ()))
        for key in (key for key in wanted if config.get(key) is None):
            yield f"{CONFIG}: {key} is missing, which TensorRT-LLM's Qwen config wants"
    if model_type == "mixtral" or (config.get("moe") or {}).get("num_experts"):
        for key in ("num_experts", "top_k", "normalization_mode"):
            if not (config.get("moe") or {}).get(key):
                yield f"{CONFIG}: moe.{key} is missing"
    if config["architecture"] == "MedusaForCausalLM":
        for key in ("num_medusa_heads", "num_medusa_layers", "max_draft_len"):
            if config.get(key) is None:
                yield f"{CONFIG}: {key} is missing"
    if config.get("dtype") not in _DTYPES:
        yield f"{CONFIG}: dtype is {config.get('dtype')}; expected one of {', '.join(_DTYPES)}"
    if checkpoint.quant_algo not in (None, *_WEIGHT_DTYPES):
        yield f"{CONFIG}: quant_algo {checkpoint.quant_algo} is not one of {', '.join(_WEIGHT_DTYPES)}"
    if checkpoint.kv_cache_quant_algo not in (None, "FP8", "INT8"):
        yield f"{CONFIG}: kv_cache_quant_algo {checkpoint.kv_cache_quant_algo} is not FP8 or INT8"


def _split_faults(checkpoint: Checkpoint) -> Iterator[str]:
    """A mapping that does not add up, or that does not divide the model."""
    config, tp, pp = checkpoint.config, checkpoint.tp_size, checkpoint.pp_size
    if checkpoint.world_size != tp * pp:
        yield (
            f"{CONFIG}: mapping.world_size is {checkpoint.world_size}, but tp_size {tp} x pp_size {pp} "
            f"need {tp * pp} ranks"
        )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        repeated = key == "num_key_value_heads" and tp % config[key] == 0  # each KV head stands on several ranks
        if config[key] % tp and not repeated:
            yield f"{CONFIG}: {key} {config[key]} cannot be divided among tp_size {tp} ranks"
    if config["num_hidden_layers"] % pp:
        yield f"{CONFIG}: num_hidden_layers {config['num_hidden_layers']} cannot be divided among pp_size {pp} stages"
    if checkpoint.quant_algo not in (INT4_AWQ, W4A8_AWQ):
        return
    if checkpoint.group_size != AWQ_GROUP_SIZE:
        yield f"{CONFIG}: quantization.group_size is {checkpoint.group_size}; expected {AWQ_GROUP_SIZE}"
    sizes = {
        (linear.name.split(".", 3)[-1], linear.rank_inputs(tp))
        for linear in linears(checkpoint, 0)
        if checkpoint.quantised(linear.name)
    }
    for name, size in sorted(sizes):
        if size % AWQ_GROUP_SIZE:
            yield (
                f"{name} has {size} inputs per rank, which AWQ's groups of {AWQ_GROUP_SIZE} do not divide; "
                "lower tensor_parallel or use fp8"
            )


def _model_faults(checkpoint: Checkpoint) -> Iterator[str]:
    """Where config.json differs from the model that our record says was converted."""
    recorded, model = checkpoint.record.get("model_config", {}), checkpoint.model
    for key in (key for key in _SAME if key in recorded):
        found, right = getattr(model, key), recorded[key]
        if found == right or (not found and not right):
            continue
        more = ""
        if key == "vocab_size" and found > right:
            more = f": ids from {right} on stand for no token and could be chosen"
        yield f"{CONFIG}: {key} is {found}, that of the model is {right}{more}"


def _file_faults(checkpoint: Checkpoint) -> Iterator[str]:
    """Rank files that are missing, too many, or broken."""
    world_size = checkpoint.world_size
    for rank in range(world_size):
        path = checkpoint.rank_file(rank)
        if not path.is_file():
            yield f"rank {rank} of {world_size} is missing: {path.name}"
            continue
        try:
            safetensors_header(path)
        except TrtspecError as error:
            yield f"{path.name}: {error.problem}"
    ours = {checkpoint.rank_file(rank).name for rank in range(world_size)}
    for path in sorted(checkpoint.path.glob("rank*.safetensors")):
        if path.name not in ours:
            yield f"{path.name} is one rank file too many: mapping.world_size is {world_size}"


def _tensor_faults(checkpoint: Checkpoint) -> Iterator[str]:
    """Names, shapes and types that are not those of the format."""
    if (uncalibrated := _uncalibrated(checkpoint)) is not None:
        yield uncalibrated
    prefix = _HEAD_PREFIXES.get(checkpoint.config["architecture"])
    if prefix and not any(name.startswith(prefix) for header in checkpoint.headers.values() for name in header):
        yield f"no tensor under {prefix}, though architecture is {checkpoint.config['architecture']}"
    for rank, header in checkpoint.headers.items():
        file, expected = checkpoint.rank_file(rank).name, expected_tensors(checkpoint, rank)
        missing = [name for name, spec in expected.items() if spec.required and name not in header]
        if uncalibrated is not None:
            missing = [name for name in missing if not name.endswith(".activation_scaling_factor")]
        yield from _few([f"{file}: tensor {name} is missing" for name in missing])
        unknown = [name for name in header if name not in expected and not (prefix and name.startswith(prefix))]
        yield from _few([f"{file}: tensor {name} is not one of this model" for name in unknown])
        wrong = []
        for name, spec in ((name, spec) for name, spec in expected.items() if name in header):
            shape, dtype = tuple(header[name]["shape"]), header[name]["dtype"]
            if shape != spec.shape:
                wrong.append(f"{file}: {name} has shape {list(shape)}; expected {list(spec.shape)}")
            elif dtype not in spec.dtypes:
                wrong.append(f"{file}: {name} is {dtype}; expected {' or '.join(spec.dtypes)}")
        yield from _few(wrong)


def _uncalibrated(checkpoint: Checkpoint) -> str | None:
    """The fault of a checkpoint whose weights are quantised, while no input was ever looked at."""
    if checkpoint.quant_algo not in MAX_INPUT:
        return None
    names = [name for header in checkpoint.headers.values() for name in header]
    num = sum(name.endswith(".weights_scaling_factor") for name in names)
    if not num or any(name.endswith(".activation_scaling_factor") for name in names):
        return None
    return (
        f"{num} linears have a weights_scaling_factor and none has an activation_scaling_factor: nothing was calibrated"
    )


def _scale_faults(checkpoint: Checkpoint) -> Iterator[str]:
    """Scales that are no numbers, not positive, different between ranks, or not those of the calibration."""
    found: list[str] = []
    tensors = scales(checkpoint)
    for rank, by_name in tensors.items():
        for name, value in by_name.items():
            problem = "not finite" if not bool(value.isfinite().all()) else "not positive"
            if problem == "not finite" or bool((value <= 0).any()):
                found.append(f"{checkpoint.rank_file(rank).name}: {name} is {problem} ({_range(value)})")
    if found:
        yield from _few(found)
        return
    for stage in range(checkpoint.pp_size):
        for linear in linears(checkpoint, stage):
            whole = ["activation_scaling_factor"] + ["prequant_scaling_factor"] * (linear.split == "column")
            for name in (f"{linear.name}.{kind}" for kind in whole):
                ranks = [stage * checkpoint.tp_size + i for i in range(checkpoint.tp_size)]
                values = [tensors[rank][name].float() for rank in ranks if name in tensors[rank]]
                if any(not bool((value == values[0]).all()) for value in values[1:]):
                    found.append(f"{global_name(checkpoint, stage, name)} differs between the ranks of one layer")
    yield from _few(found)
    yield from _calibration_faults(checkpoint, tensors)


def _calibration_faults(checkpoint: Checkpoint, tensors: Mapping[int, Mapping[str, torch.Tensor]]) -> Iterator[str]:
    """Activation scales that the recorded calibration does not explain."""
    recorded = (checkpoint.record.get("calibration") or {}).get("input_amax") or {}
    if not recorded or checkpoint.quant_algo is None:
        return
    for rank in range(0, checkpoint.world_size, checkpoint.tp_size):
        stage = checkpoint.stage(rank)
        for linear in linears(checkpoint, stage):
            name = global_name(checkpoint, stage, linear.name)
            value = tensors[rank].get(f"{linear.name}.activation_scaling_factor")
            if value is None or name not in recorded:
                continue
            right = recorded[name] / MAX_INPUT[checkpoint.quant_algo]
            if not math.isclose(value.item(), right, rel_tol=1e-3):
                yield (
                    f"activation_scaling_factor of {name} is {value.item() / right:.3g} times what was calibrated "
                    f"({value.item():.4g}; amax {recorded[name]:.4g} / {MAX_INPUT[checkpoint.quant_algo]:g} "
                    f"= {right:.4g})"
                )


def scales(checkpoint: Checkpoint) -> dict[int, dict[str, torch.Tensor]]:
    """All scales of each rank, by name; the only values that a verification reads."""
    from safetensors import safe_open

    result = {}
    for rank, header in checkpoint.headers.items():
        names = [name for name in header if "scaling_factor" in name]
        with safe_open(checkpoint.rank_file(rank), framework="pt") as file:
            result[rank] = {name: file.get_tensor(name) for name in names}
    return result


def global_name(checkpoint: Checkpoint, stage: int, name: str) -> str:
    """A name whose layer is counted from the start of the model, of one whose layer is counted within its stage."""
    parts = name.split(".")
    if parts[:2] == ["transformer", "layers"]:
        parts[2] = str(int(parts[2]) + stage * checkpoint.num_stage_layers)
    return ".".join(parts)


def _few(lines: list[str]) -> list[str]:
    """The first lines of a long list, and how many more there are."""
    rest = len(lines) - _SHOWN
    return lines if rest <= 0 else [*lines[: _SHOWN - 1], f"{lines[_SHOWN - 1]} (and {rest} more of this kind)"]


def _range(value: torch.Tensor) -> str:
    ends = dict.fromkeys(f"{end.item():.4g}" for end in (value.min(), value.max()))
    return " to ".join(ends)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrtspecError("no such checkpoint", where=str(path), fix="make it with `trtspec build`") from None
    except OSError as error:
        raise TrtspecError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise TrtspecError(f"not valid JSON ({error})", where=str(path), fix="convert the model again") from error
    if not isinstance(content, dict):
        raise TrtspecError("not a JSON object", where=str(path), fix="convert the model again")
    return content
