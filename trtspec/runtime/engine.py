"""Engine directories: config.json in the shape of a TensorRT-LLM engine config, our stamp, and weights or ranks.

Knows how an engine is laid out on disk, how one for the torch runtime is written without ever being half there, and
which two engines may work together. Does not know how it is run, and imports torch only to write or load weights.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec import __version__
from trtspec.errors import TrtspecError
from trtspec.models.config import ModelConfig
from trtspec.models.source import safetensors_header

if TYPE_CHECKING:
    import torch

    from trtspec.models.source import ModelSource
    from trtspec.runtime.weights import ExecutableWeights

CONFIG, WEIGHTS = "config.json", "rank0.safetensors"
STAMP = "trtspec.json"  # our stamp of an engine whose config.json the compiler wrote
# Values of TensorRT-LLM's SpeculativeDecodingMode, as config.json holds them.
SPECULATIVE_MODES = {
    1: "none",
    2: "draft_tokens_external",
    4: "medusa",
    8: "lookahead_decoding",
    16: "explicit_draft_tokens",
    32: "eagle",
}
NO_SPECULATION, DRAFT_TOKENS_EXTERNAL, LOOKAHEAD_DECODING = 1, 2, 8
_ALIGNMENT = 64  # bytes, a cache line
_VOCAB_PADDING = 1024  # models of one tokenizer pad their vocabularies to different multiples, none larger than this
_HEADER_BYTES = 256  # room for one tensor's entry in a safetensors header
_SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int64": "I64"}


@dataclass(frozen=True)
class EngineConfig:
    """What an engine's config.json says.

    Attributes:
        path: the file.
        version: version of what built the engine: TensorRT-LLM's, or `torch`.
        pretrained: TensorRT-LLM's `pretrained_config`.
        build: TensorRT-LLM's `build_config`.
        stamp: ours, from config.json for the torch runtime and from trtspec.json beside it for TensorRT-LLM; empty for
            an engine that `trtllm-build` wrote without us.
    """

    path: Path
    version: str
    pretrained: dict[str, Any]
    build: dict[str, Any]
    stamp: dict[str, Any]

    @classmethod
    def load(cls, directory: Path) -> EngineConfig:
        """Read and check an engine directory; of the weights only the header is looked at, of ranks only the size.

        Raises:
            TrtspecError: no engine there, a broken file, an engine of a newer trtspec, or missing or truncated weights.
        """
        path = directory / CONFIG
        content = _read_json(path)
        if content is None:
            raise TrtspecError("no such engine", where=str(path), fix="build it with `trtspec build`")
        sections = {"trtspec": {}, **content} if isinstance(content, dict) else {}
        if not sections.get("trtspec"):
            sections["trtspec"] = _read_json(directory / STAMP) or {}
        names = ("pretrained_config", "build_config", "trtspec")
        if not all(isinstance(sections.get(name), dict) for name in names):
            raise TrtspecError(
                "not the config of an engine",
                where=str(path),
                expected="the sections pretrained_config and build_config",
            )
        pretrained, build, stamp = (sections[name] for name in names)
        made_by = str(stamp.get("trtspec_version", __version__))
        if version_numbers(made_by) > version_numbers(__version__):
            raise TrtspecError(
                f"made by trtspec {made_by}, which is newer than this one, {__version__}",
                where=str(path),
                fix="upgrade trtspec or build the engine again",
            )
        config = cls(path, str(content.get("version", "")), pretrained, build, stamp)
        if config.runtime == "torch":
            _check_weights(directory / WEIGHTS)
        elif stamp.get("compiled"):
            config.require_ranks()
        return config

    @property
    def runtime(self) -> str:
        """Which runtime executes it: `torch` or `tensorrt_llm`."""
        return str(self.stamp.get("runtime", "tensorrt_llm"))

    @property
    def compiled(self) -> bool:
        """Whether its runtime can load it; not so what `--no-compile` has prepared, until its build.sh was run."""
        if self.stamp.get("compiled", True):
            return True
        try:
            self.require_ranks()
        except TrtspecError:
            return False
        return True

    @property
    def world_size(self) -> int:
        """GPUs that it runs on, one rank on each."""
        return self._integer("pretrained_config.mapping", {"world_size": 1, **self._mapping}, "world_size")

    @property
    def sm(self) -> int | None:
        """Compute capability times ten of the GPUs that it was compiled on; None: not known, or for no GPU."""
        return self.stamp.get("sm")

    @property
    def speculative_decoding_mode(self) -> int:
        """TensorRT-LLM's number of the mode (`SPECULATIVE_MODES`), also where config.json holds its name."""
        mode = self.build.get("speculative_decoding_mode")
        if isinstance(mode, str):
            name = mode.rpartition(".")[2].lower()
            return next((number for number, known in SPECULATIVE_MODES.items() if known == name), NO_SPECULATION)
        return self._integer(
            "build_config", {"speculative_decoding_mode": NO_SPECULATION, **self.build}, "speculative_decoding_mode"
        )

    def require_ranks(self) -> None:
        """Refuse an engine of TensorRT-LLM of which a rank is missing or empty.

        Raises:
            TrtspecError: the file at fault.
        """
        for rank in range(self.world_size):
            path = self.path.with_name(f"rank{rank}.engine")
            if not path.is_file() or not path.stat().st_size:
                raise TrtspecError(
                    "is empty" if path.is_file() else "is missing",
                    where=str(path),
                    expected=f"the engines of {self.world_size} ranks",
                    fix="build the engine again",
                )

    @property
    def vocab_size(self) -> int:
        """Ids that have a logit."""
        return self._integer("pretrained_config", self.pretrained, "vocab_size")

    @property
    def max_seq_len(self) -> int:
        """Longest sequence, input and output together: without the room that TensorRT-LLM's builder adds for drafts."""
        longest = self._integer("build_config", self.build, "max_seq_len")
        if self.runtime == "torch" or self.speculative_decoding_mode == NO_SPECULATION:
            return longest
        return longest - self.max_draft_len - self.pretrained.get("num_eagle_layers", 0)

    @property
    def max_draft_len(self) -> int:
        """Most draft tokens in one verification; 0: none."""
        return self._integer("build_config", {"max_draft_len": 0, **self.build}, "max_draft_len")

    @property
    def returns_generation_logits(self) -> bool:
        """Whether a request may ask for them. From TensorRT-LLM 1.0 on every engine gives them, whatever the flag."""
        always = self.runtime == "tensorrt_llm" and version_numbers(self.version) >= (1,)
        return always or bool(self.build.get("gather_generation_logits", False))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All ids that end an answer."""
        return tuple(self.stamp.get("eos_token_ids", ()))

    @property
    def model(self) -> ModelConfig:
        """The model's own record.

        Raises:
            TrtspecError: the engine does not carry one that this version understands.
        """
        try:
            fields = dict(self.stamp["model_config"])
            return ModelConfig(**fields | {"eos_token_ids": tuple(fields["eos_token_ids"])})
        except (KeyError, TypeError) as error:
            raise TrtspecError(
                f"trtspec.model_config does not describe a model ({error})",
                where=str(self.path),
                fix="build the engine again",
            ) from error

    def _integer(self, section: str, content: dict[str, Any], key: str) -> int:
        value = content.get(key)
        if not isinstance(value, int):
            raise TrtspecError(
                f"{section}.{key} is {value!r}",
                where=str(self.path),
                expected="an integer",
                fix="build the engine again",
            )
        return value

    @property
    def _mapping(self) -> dict[str, Any]:
        mapping = self.pretrained.get("mapping")
        return mapping if isinstance(mapping, dict) else {}

    def to_json(self) -> dict[str, Any]:
        """What the engine says of itself; for the torch runtime the content of config.json."""
        return {
            "version": self.version,
            "pretrained_config": self.pretrained,
            "build_config": self.build,
            "trtspec": self.stamp,
        }


def write_torch_engine(
    source: ModelSource,
    out_dir: Path,
    *,
    dtype: str,
    role: str,
    build_config: dict[str, Any],
    stamp: dict[str, Any],
    extra: Mapping[str, Callable[[], torch.Tensor]] | None = None,
    progress: Callable[[float], None] | None = None,
) -> EngineConfig:
    """Write an engine directory for the torch runtime, one tensor at a time; a directory in its place is replaced.

    Args:
        source: the model.
        out_dir: the engine directory; it appears complete or not at all.
        dtype: float32, float16 or bfloat16, of the weights and the KV cache.
        role: target, middle or draft.
        build_config: limits under TensorRT-LLM's names; those left out get the model's or TensorRT-LLM's values.
        stamp: added to our section of config.json; its `version` becomes the engine's version (default `torch`).
        extra: tensors behind the model's own, by name, each with what reads it: heads or modules that draft. The
            `speculation` section of the stamp says how they are used.
        progress: called with the fraction that is done.

    Raises:
        TrtspecError: the torch runtime does not run this model, or the directory cannot be written.
    """
    from trtspec.runtime.llama import check_family

    model = source.config
    check_family(model)
    stamp = dict(stamp)
    build = _build_config(model, build_config)
    config = EngineConfig(
        path=out_dir / CONFIG,
        version=str(stamp.pop("version", "torch")),
        pretrained=_pretrained_config(model, dtype),
        build=build,
        stamp={
            "runtime": "torch",
            "trtspec_version": __version__,
            "role": role,
            "eos_token_ids": list(model.eos_token_ids),
            "bos_token_id": model.bos_token_id,
            "pad_token_id": model.pad_token_id,
            "model_config": asdict(model) | {"eos_token_ids": list(model.eos_token_ids)},
            **stamp,
        },
    )
    temporary, replaced = (out_dir.with_name(f".{out_dir.name}.{kind}") for kind in ("tmp", "old"))
    try:
        for leftover in (temporary, replaced):  # of a build that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_weights(source, temporary / WEIGHTS, dtype, extra or {}, progress or (lambda fraction: None))
        (temporary / CONFIG).write_text(json.dumps(config.to_json(), indent=2) + "\n", encoding="utf-8")
        if out_dir.exists():
            os.replace(out_dir, replaced)
        os.replace(temporary, out_dir)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise TrtspecError(
            f"the engine cannot be written: {error.strerror or error}",
            where=str(out_dir),
            fix="make room or choose another output.engines",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return config


def map_weights(config: EngineConfig) -> ExecutableWeights:
    """What the torch runtime executes of an engine, with a head of exactly vocab_size rows or the rows of `d2t`.

    Of a torch engine its tensors, mapped from the file: processes that load the same engine share its pages. Of an
    engine for TensorRT-LLM, compiled or not, the checkpoint that it was made from: dequantised to float32, or in the
    checkpoint's own type if that is not quantised.

    Raises:
        TrtspecError: a tensor that its model needs is missing, or the checkpoint is missing or not sound.
    """
    import torch
    from safetensors.torch import load_file

    from trtspec.runtime.weights import ExecutableWeights

    if config.runtime != "torch":
        return _checkpoint_weights(config)
    path = config.path.with_name(WEIGHTS)
    weights = load_file(path)
    model = config.model
    if model.tie_word_embeddings:
        weights.setdefault("lm_head.weight", weights["transformer.vocab_embedding.weight"])
    needed = dict(_stored(model, lambda name: torch.empty(1), False))
    if missing := sorted(needed.keys() - weights.keys()):
        raise TrtspecError(
            f"tensor {missing[0]} is missing ({len(missing)} in all)", where=str(path), fix="build the engine again"
        )
    if "d2t" not in weights:  # a head padded for tensor parallelism has rows that stand for no token
        weights["lm_head.weight"] = weights["lm_head.weight"][: config.vocab_size]
    return ExecutableWeights(weights)


def _checkpoint_weights(config: EngineConfig) -> ExecutableWeights:
    """What an engine for TensorRT-LLM computes with, from the checkpoint that its stamp names."""
    import torch

    from trtspec.trtllm.checkpoint import require_sound
    from trtspec.trtllm.dequantize import load_weights

    relative = config.stamp.get("checkpoint")
    if not relative:
        raise TrtspecError(
            "a compiled engine that does not say which checkpoint it was made from",
            where=str(config.path),
            fix="serve it on a GPU, or build it again with trtspec, which keeps the checkpoint",
        )
    checkpoint = require_sound(config.path.parent / relative)
    exact = checkpoint.quant_algo is None and checkpoint.kv_cache_quant_algo is None
    loaded = load_weights(checkpoint, getattr(torch, checkpoint.config["dtype"]) if exact else torch.float32)
    loaded.weights["lm_head.weight"] = loaded.weights["lm_head.weight"][: config.vocab_size]
    return loaded


def check_engine_pair(
    target: EngineConfig,
    draft: EngineConfig | None,
    num_draft_tokens: int,
    *,
    pipeline: Path | None = None,
    draft_logits: bool = False,
) -> None:
    """Refuse two engines that cannot speculate together.

    Args:
        target: verifies.
        draft: proposes; None where the drafter is no engine.
        num_draft_tokens: most tokens that the pipeline drafts in one cycle.
        pipeline: file that asks for `num_draft_tokens`, named in messages.
        draft_logits: whether the target accepts by the draft's logits.

    Raises:
        TrtspecError: what does not fit, with both files.
    """
    asking = f"num_draft_tokens {num_draft_tokens}" + (f" in {pipeline}" if pipeline else "")
    if num_draft_tokens > target.max_draft_len:
        raise TrtspecError(
            f"max_draft_len is {target.max_draft_len}, but the pipeline drafts more: {asking}",
            where=str(target.path),
            expected=f"max_draft_len of at least {num_draft_tokens}",
            fix="build the target again or lower num_draft_tokens",
        )
    if draft is None:
        return
    if target.version != draft.version:
        raise TrtspecError(
            f"built by version {target.version}, but {draft.path} by {draft.version}",
            where=str(target.path),
            fix="build both engines with the same version",
        )
    if target.sm and draft.sm and target.sm != draft.sm:
        raise TrtspecError(
            f"compiled for sm_{target.sm}, but {draft.path} for sm_{draft.sm}",
            where=str(target.path),
            fix="build both engines on the GPUs that will run them",
        )
    if draft_logits and not draft.returns_generation_logits:
        raise TrtspecError(
            f"the engine cannot return generation logits, but the target {target.path} is to accept by them",
            where=str(draft.path),
            expected="gather_generation_logits: true",
            fix="build the draft again, or set speculation.acceptance: tokens",
        )
    if abs(draft.vocab_size - target.vocab_size) > _VOCAB_PADDING:
        raise TrtspecError(
            f"vocab_size is {target.vocab_size}, but {draft.vocab_size} in {draft.path}, more than padding explains",
            where=str(target.path),
            fix="choose a draft with the target's tokenizer",
        )


def check_lookahead(
    engine: EngineConfig,
    window_size: int,
    ngram_size: int,
    verification_set_size: int,
    *,
    pipeline: Path | None = None,
) -> None:
    """Refuse lookahead sizes that the engine was not built for.

    Args:
        engine: the target's.
        window_size, ngram_size, verification_set_size: W, N and G that the runtime is given.
        pipeline: file that gives them, named in messages.

    Raises:
        TrtspecError: an engine of another mode or of another draft length; both sides are named.
    """
    from trtspec.spec.schema import Lookahead

    sizes = (window_size, ngram_size, verification_set_size)
    asking = f"lookahead sizes (window, ngram, verification) {sizes}" + (f" in {pipeline}" if pipeline else "")
    needed = Lookahead.model_construct(
        window_size=window_size, ngram_size=ngram_size, verification_set_size=verification_set_size
    ).draft_len
    if engine.speculative_decoding_mode != LOOKAHEAD_DECODING:
        mode = SPECULATIVE_MODES.get(engine.speculative_decoding_mode, "an unknown mode")
        raise TrtspecError(
            f"built for speculative decoding mode {mode}, but the runtime is given {asking}",
            where=str(engine.path),
            expected="an engine of mode lookahead_decoding",
            fix="build the engine again with speculation.method: lookahead",
        )
    if needed != engine.max_draft_len:
        raise TrtspecError(
            f"max_draft_len is {engine.max_draft_len}, but {asking} draft {needed}",
            where=str(engine.path),
            expected="the sizes that the engine was built for",
            fix="build the engine again, or set speculation.lookahead to its sizes",
        )


def _build_config(model: ModelConfig, given: dict[str, Any]) -> dict[str, Any]:
    """`given` completed, and checked against the model's context."""
    max_draft_len = given.get("max_draft_len", 0)
    max_seq_len = given.get("max_seq_len", model.max_position_embeddings)
    if max_seq_len > model.max_position_embeddings:
        raise TrtspecError(
            f"max_seq_len {max_seq_len} is longer than the model's context",
            where="engine.max_seq_len",
            expected=f"at most {model.max_position_embeddings}",
        )
    defaults = {
        "max_batch_size": 1,
        "max_input_len": max_seq_len,
        "max_seq_len": max_seq_len,
        "max_num_tokens": 8192,
        "max_beam_width": 1,
        "max_draft_len": max_draft_len,
        "speculative_decoding_mode": DRAFT_TOKENS_EXTERNAL if max_draft_len else NO_SPECULATION,
        "plugin_config": {"use_paged_context_fmha": True, "tokens_per_block": 32},
        "gather_generation_logits": True,
    }
    return defaults | given


def _pretrained_config(model: ModelConfig, dtype: str) -> dict[str, Any]:
    return {
        "architecture": model.architecture,
        "dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_size": model.head_size,
        "intermediate_size": model.intermediate_size,
        "norm_epsilon": model.norm_epsilon,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": model.rotary_base,
        "rotary_scaling": model.rotary_scaling,
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_act": model.hidden_act,
        "attn_bias": model.attn_bias,
        "mlp_bias": model.mlp_bias,
        "tie_word_embeddings": model.tie_word_embeddings,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }


def _read_json(path: Path) -> Any:
    """The content of a JSON file, None where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TrtspecError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise TrtspecError(f"not valid JSON ({error})", where=str(path), fix="build the engine again") from error


def _check_weights(path: Path) -> None:
    """Refuse weights that are missing or cut short, by their header."""
    try:
        safetensors_header(path)
    except TrtspecError as error:
        raise TrtspecError(
            error.problem, where=error.where, expected=error.expected, fix="build the engine again"
        ) from error


def _write_weights(
    source: ModelSource,
    path: Path,
    dtype: str,
    extra: Mapping[str, Callable[[], torch.Tensor]],
    progress: Callable[[float], None],
) -> None:
    """A safetensors file, written tensor by tensor.

    Its header stands before the data but is known after them, so room is left for it; the format lets it end in spaces.
    """
    import torch

    model, reduced = source.config, "d2t" in source.tensor_names()
    total = sum(1 for _ in _stored(model, lambda name: torch.empty(1), reduced)) + len(extra)
    room = -(-total * _HEADER_BYTES // _ALIGNMENT) * _ALIGNMENT
    header: dict[str, Any] = {}
    offset = 0
    with open(path, "wb") as file:
        file.seek(room)
        behind = ((name, read()) for name, read in extra.items())
        for name, tensor in chain(_stored(model, source.tensor, reduced), behind):
            if tensor.is_floating_point():
                tensor = tensor.to(getattr(torch, dtype))
            size = file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            header[name] = {
                "dtype": _SAFETENSORS_NAMES[str(tensor.dtype).removeprefix("torch.")],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
            progress(len(header) / total)
        text = json.dumps(header, separators=(",", ":")).encode()
        file.seek(0)
        file.write(struct.pack("<Q", room - 8) + text.ljust(room - 8))


def _stored(
    model: ModelConfig, tensor: Callable[[str], torch.Tensor], reduced: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an engine: a tied head is stored once, a reduced head comes with the ids of its rows."""
    from trtspec.runtime.llama import stream_trtllm

    for name, weight in stream_trtllm(model, tensor):
        if name != "lm_head.weight" or not model.tie_word_embeddings:
            yield name, weight
    if reduced:
        yield "d2t", tensor("d2t")


def version_numbers(version: str) -> tuple[int, ...]:
    """(1, 2, 1) of "1.2.1", as far as there are numbers."""
    numbers = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
