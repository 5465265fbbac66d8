"""TensorRT-LLM checkpoints from models: the one step between a model and the compiler.

Two ways behind the same functions: NVIDIA ModelOpt, which runs on any machine, and TensorRT-LLM's own converter, which
runs in its container and covers what ModelOpt does not write. Knows which way a job goes; does not know how an engine
is compiled or served.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec import __version__
from trtspec.errors import TrtspecError
from trtspec.models.eagle import check_eagle
from trtspec.models.export import export
from trtspec.models.medusa import open_medusa
from trtspec.models.source import HFSource, ModelSource
from trtspec.trtllm.convert import calibration, feasibility, medusa, modelopt, own_converter
from trtspec.trtllm.convert.checkpoint_config import checkpoint_config

if TYPE_CHECKING:
    import torch

    from trtspec.models.config import ModelConfig
    from trtspec.spec.schema import Calibration, ModelRef, Speculation

RECORD = "trtspec.json"
Advance = Callable[[float], None]
Note = Callable[[str], None]
Facts = dict[str, Any]
_BASE = "base"
# Parts of the way, as fractions: the model is loaded, and it is calibrated.
_LOADED, _CALIBRATED = 0.05, 0.85


@dataclass(frozen=True)
class ConversionJob:
    """One checkpoint to write.

    Attributes:
        role: target, draft or middle.
        model: the section of the spec that names the model, its precision and its split.
        speculation: how it speculates; heads belong to the target's checkpoint.
        calibration: which prompts quantisation is calibrated with, and how many.
        calibration_path: the user's prompts; None: those that come with trtspec.
        max_draft_len: draft tokens that the engine verifies in one pass.
        heads_dir: directory of the Medusa, EAGLE or ReDrafter heads; None without heads.
        logits_dtype: type of the logits that the engine answers with, float32 or float16.
        version: TensorRT-LLM version that the checkpoint is for.
        log_path: what TensorRT-LLM's own converter prints, also when it fails; None: convert.log in the checkpoint.
    """

    role: str
    model: ModelRef
    speculation: Speculation
    calibration: Calibration
    calibration_path: Path | None
    max_draft_len: int
    heads_dir: Path | None
    logits_dtype: str = "float32"
    version: str = "1.2.1"
    log_path: Path | None = None

    @property
    def heads(self) -> str | None:
        """`medusa`, `eagle` or `redrafter` where heads are part of this checkpoint."""
        method = self.speculation.method
        return method if self.role == "target" and method in ("medusa", "eagle", "redrafter") else None


def convert(
    job: ConversionJob,
    source: ModelSource,
    destination: Path,
    record: dict[str, Any],
    advance: Callable[[float], None],
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Write the checkpoint: config.json, rankN.safetensors and our record, trtspec.json.

    Args:
        job: what to write.
        source: the model.
        destination: an empty or missing directory; the caller stages and swaps it.
        record: added to trtspec.json: source, source_fingerprint, spec_hash.
        advance: called with the fraction that is done.
        note: called with sentences that the user should read.

    Returns:
        Facts for the manifest: producer, world_size, bytes, and how it was calibrated.

    Raises:
        TrtspecError: this model cannot be converted so, heads that do not fit, or a converter that is not installed or
            fails.
        OSError: the directory cannot be written.
    """
    check_conversion(job, source.config)
    by_script = own_converter.is_needed(job, source.config.model_type)
    if by_script:
        own_converter.require_available(job, source.config.model_type)
    if not by_script or job.heads == "redrafter":
        modelopt.producer()
    destination.mkdir(parents=True, exist_ok=True)
    made = _by_own_converter if by_script else _by_modelopt
    facts = made(job, source, destination, advance, note)
    model = source.config
    content = {
        "trtspec_version": __version__,
        "producer": facts["producer"],
        "role": job.role,
        **record,
        "model_config": asdict(model) | {"eos_token_ids": list(model.eos_token_ids)},
        "eos_token_ids": list(model.eos_token_ids),
        "bos_token_id": model.bos_token_id,
        "pad_token_id": model.pad_token_id,
        "quantization": job.model.quantization,
        "kv_cache_dtype": job.model.kv_cache_dtype,
        "calibration": facts["calibration"],
    }
    _write_json(destination / RECORD, content)
    files = sorted(destination.glob("rank*.safetensors"))
    calibration = {k: v for k, v in (facts["calibration"] or {}).items() if k != "input_amax"} or None
    return {
        "producer": facts["producer"],
        "world_size": job.model.world_size,
        "bytes": sum(file.stat().st_size for file in files),
        "calibration": calibration,
    }


def actions(job: ConversionJob, checkpoint_dir: Path, model_type: str | None = None) -> list[str]:
    """Sentences for what is done here, or the exact command lines of TensorRT-LLM's converter.

    `model_type` is the family, where it is known by now.
    """
    model, speculation = job.model, job.speculation
    precision = f"{model.dtype}, quantization {model.quantization}, KV cache {model.kv_cache_dtype}"
    split = f"tensor parallel {model.tensor_parallel}, pipeline parallel {model.pipeline_parallel}"
    heads = f" with the Medusa heads {speculation.medusa.heads}" if job.heads == "medusa" and speculation.medusa else ""
    by_script = own_converter.is_needed(job, model_type)
    base = checkpoint_dir / _BASE if job.heads == "redrafter" else checkpoint_dir
    lines = []
    if not by_script or job.heads == "redrafter":
        if modelopt.needs_calibration(model):
            prompts = f"of {job.calibration_path}" if job.calibration_path else "that come with trtspec"
            lines.append(f"calibrate {model.model} with {job.calibration.num_prompts} prompts {prompts}")
        lines.append(
            f"convert {model.model}{heads} to a TensorRT-LLM checkpoint in {base} with NVIDIA ModelOpt "
            f"({precision}, {split})"
        )
    if by_script:
        start = str(base) if job.heads == "redrafter" else model.model
        lines.append(shlex.join(own_converter.command(job, start, str(checkpoint_dir), model_type)))
    return lines


def inputs(job: ConversionJob) -> dict[str, Any]:
    """What decides the checkpoint besides the model: a change converts it again."""
    content: dict[str, Any] = {
        "model": job.model.model_dump(mode="json", exclude={"model", "gguf_file", "max_seq_len", "trust_remote_code"}),
        "logits_dtype": job.logits_dtype,
    }
    if job.heads:
        section = getattr(job.speculation, job.heads)
        content |= {"heads": section.model_dump(mode="json", exclude={"choices"}), "max_draft_len": job.max_draft_len}
    if own_converter.is_needed(job, None):
        content["version"] = job.version
    if modelopt.needs_calibration(job.model):
        path = job.calibration_path or calibration.DEFAULT_PROMPTS
        content["calibration"] = job.calibration.model_dump(mode="json", exclude={"prompts"}) | {
            "prompts": hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else str(path)
        }
    return content


def check_conversion(job: ConversionJob, config: ModelConfig) -> None:
    """Refuse, before anything heavy is started, what cannot be converted.

    Raises:
        TrtspecError: the first reason, with the nearest setting that works.
    """
    for refusal in feasibility.refusals(job, config):
        raise refusal
    if modelopt.needs_calibration(job.model):
        calibration.check_prompts(job.calibration_path)
    if job.heads and job.heads_dir is not None:
        if job.heads == "medusa" and job.speculation.medusa:
            open_medusa(job.heads_dir).check(config, job.speculation.medusa)
        elif job.heads == "eagle" and job.speculation.eagle:
            check_eagle(job.heads_dir, config, job.speculation.eagle.version)
        elif job.heads == "redrafter":
            own_converter.check_drafter(job.heads_dir)


def _by_modelopt(job: ConversionJob, source: ModelSource, destination: Path, advance: Advance, note: Note) -> Facts:
    advance(0.0)
    heads = medusa.open_heads(job, source, note) if job.heads == "medusa" else None
    model = modelopt.ModelOptModel(source, job.model)
    advance(_LOADED)
    calibrated = None
    if modelopt.needs_calibration(job.model):
        prompts = calibration.calibration_set(source, job.calibration, job.calibration_path)
        model.calibrate(prompts, lambda fraction: advance(_LOADED + fraction * (_CALIBRATED - _LOADED)))
        calibrated = {
            "prompts": "default" if job.calibration_path is None else str(job.calibration_path),
            "sha256": prompts.sha256,
            "num_prompts": prompts.num_prompts,
            "num_tokens": prompts.num_tokens,
            "input_amax": model.input_amax,
        }

    def write(rank: int, weights: dict[str, torch.Tensor]) -> None:
        if heads:
            weights |= heads.shard(rank)
        _save(weights, destination / f"rank{rank}.safetensors")
        advance(_CALIBRATED + (rank + 1) / job.model.world_size * (1.0 - _CALIBRATED))

    model.export(source, write)
    name, version = modelopt.producer().split(" ")
    config = checkpoint_config(job, source.config) | {"producer": {"name": name, "version": version}}
    _write_json(destination / "config.json", config)  # last: without it there is no checkpoint
    return {"producer": modelopt.producer(), "calibration": calibrated}


def _by_own_converter(
    job: ConversionJob, source: ModelSource, destination: Path, advance: Advance, note: Note
) -> Facts:
    """Inside the container. Its script wants a Hugging Face directory, or for ReDrafter the base model's checkpoint."""
    base = destination / _BASE
    calibrated = None
    if job.heads == "redrafter":
        plain = replace(job, speculation=job.speculation.model_copy(update={"method": "none"}))
        base.mkdir()
        calibrated = _by_modelopt(plain, source, base, lambda fraction: advance(fraction / 2), note)["calibration"]
        start = base
    elif isinstance(source, HFSource):
        start = source.path
    else:
        export(source, base, job.model.dtype, lambda fraction: advance(fraction / 2))
        start = base
    model_type = source.config.model_type
    words = own_converter.command(job, str(start), str(destination), model_type)
    own_converter.run(words, job.log_path or destination / own_converter.LOG)
    shutil.rmtree(base, ignore_errors=True)
    path = destination / "config.json"
    missing = [
        name
        for name in ("config.json", *(f"rank{rank}.safetensors" for rank in range(job.model.world_size)))
        if not (destination / name).is_file()
    ]
    if missing:
        raise TrtspecError(
            f"TensorRT-LLM's converter ended without an error and without {missing[0]}",
            where=str(job.log_path or destination / own_converter.LOG),
            fix="read the whole log",
        )
    config = json.loads(path.read_text(encoding="utf-8"))
    _write_json(path, config | {"logits_dtype": job.logits_dtype})
    advance(1.0)
    return {"producer": "tensorrt_llm convert_checkpoint", "calibration": calibrated}


def _save(weights: dict[str, torch.Tensor], path: Path) -> None:
    """One rank.

    Raises:
        OSError: no room, or no permission.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, metadata={"format": "pt"})
        path.chmod(0o644)  # save_file keeps its files to the owner
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
