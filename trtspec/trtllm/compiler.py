"""The compile step: which `trtllm-build` command makes an engine, running it, and checking what came out.

Derived values are computed here and never asked of a user. Knows the compiler's options and how its builder changes
them; does not know how a checkpoint is made, nor which engines are built side by side.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtspec.errors import TrtspecError
from trtspec.runtime.engine import CONFIG, EngineConfig, version_numbers
from trtspec.trtllm import engine_stamp
from trtspec.trtllm.compiler_run import TOOL, run_compiler
from trtspec.trtllm.host import Gpu, Host, look
from trtspec.trtllm.trtllm_build import Value, check_build_options, words
from trtspec.trtllm.versions import RELEASES, release_for

TIMING_CACHE = "model.cache"
BUILD_LOG = "build.log"
# What the builder may not have changed; max_input_len it does not use with packed input.
_KEPT = ("max_batch_size", "max_beam_width", "max_draft_len")
_EAGLE_LIMITS = {"max_batch_size": 512, "max_draft_len": 256}  # asserted by the builder
_KEPT_BY_PLUGINS = ("use_paged_context_fmha", "tokens_per_block")


@dataclass(frozen=True)
class CompileJob:
    """One engine to compile.

    Attributes:
        role: target, middle or draft.
        checkpoint_dir: the TensorRT-LLM checkpoint.
        out_dir: where the engine ends up.
        build_config: limits under TensorRT-LLM's names, as the user wants them.
        mode: TensorRT-LLM's name of the speculative decoding mode; None for an engine that verifies nothing.
        version: TensorRT-LLM version.
        logits_dtype: float32 or float16.
        build_options: further options of the user, by name.
        world_size: GPUs that the engine runs on.
        sm: compute capability times ten of these GPUs.
        quantization: of the weights, as the spec names it.
    """

    role: str
    checkpoint_dir: Path
    out_dir: Path
    build_config: dict[str, Any]
    mode: str | None
    version: str
    logits_dtype: str
    build_options: dict[str, Value] = field(default_factory=dict)
    world_size: int = 1
    sm: int = 0
    quantization: str = "none"

    @property
    def log_path(self) -> Path:
        """Where the compiler's output goes while it runs, and stays if it fails."""
        return self.out_dir.parent / ".build" / "logs" / f"{self.role}.log"


def check_options(job: CompileJob, where: Callable[[str], str] = "engine.build_options.{}".format) -> None:
    """Refuse build options that do not exist, that trtspec sets, or that do not go with this engine, and its sizes.

    Raises:
        TrtspecError: every fault, one a line; `where` places an option.
    """
    for size, most in _EAGLE_LIMITS.items() if job.mode == "eagle" else ():
        if job.build_config[size] > most:
            raise TrtspecError(
                f"{job.build_config[size]} is too much for mode eagle",
                where=f"engine.{size}",
                expected=f"at most {most}",
            )
    check_build_options(
        job.build_options,
        max_draft_len=job.build_config["max_draft_len"],
        world_size=job.world_size,
        quantization=job.quantization,
        paged_context_fmha=job.build_config["plugin_config"]["use_paged_context_fmha"],
        where=where,
    )


def options(job: CompileJob) -> dict[str, Value]:
    """All options that the compiler is given, by name.

    Raises:
        TrtspecError: build options that cannot be given.
    """
    check_options(job)
    limits, plugins = job.build_config, job.build_config["plugin_config"]
    chosen: dict[str, Value] = {
        "checkpoint_dir": str(job.checkpoint_dir),
        "output_dir": str(job.out_dir),
        "max_batch_size": limits["max_batch_size"],
        "max_input_len": limits["max_input_len"],
        "max_seq_len": limits["max_seq_len"],
        "max_beam_width": 1,
        "max_num_tokens": max(limits["max_num_tokens"], _tokens_in_one_step(limits)),
        "kv_cache_type": "paged",
        "remove_input_padding": "enable",
        "gpt_attention_plugin": "auto",
        # TensorRT's own fp8 kernels are the better ones; for the other types TensorRT-LLM advises the plugin.
        "gemm_plugin": "disable" if job.quantization == "fp8" else "auto",
        "context_fmha": "enable",
        "use_paged_context_fmha": "enable" if plugins["use_paged_context_fmha"] else "disable",
        "tokens_per_block": plugins["tokens_per_block"],
        "logits_dtype": job.logits_dtype,
        "workers": job.world_size,
        # Not in the working directory, which engines that are built side by side share.
        "output_timing_cache": str(job.out_dir / TIMING_CACHE),
        "log_level": "info",
    }
    if limits.get("gather_generation_logits") and version_numbers(job.version) < (1,):
        chosen["gather_generation_logits"] = True  # later versions are asked for logits by requests alone
    if job.mode:
        chosen |= {"speculative_decoding_mode": job.mode, "max_draft_len": limits["max_draft_len"]}
    return chosen | job.build_options


def command(job: CompileJob) -> list[str]:
    """The words of the command line that compiles the engine.

    Raises:
        TrtspecError: build options that cannot be given.
    """
    return [TOOL, *words(options(job))]


def resulting_config(job: CompileJob, num_eagle_layers: int = 0) -> dict[str, Any]:
    """The limits that the engine will have: the builder makes room for the draft tokens of one step.

    Args:
        job: what is compiled.
        num_eagle_layers: of an EAGLE checkpoint.
    """
    limits = dict(job.build_config)
    growth = limits["max_draft_len"] + num_eagle_layers if job.mode else 0
    most_tokens = min(limits["max_num_tokens"], limits["max_seq_len"] * limits["max_batch_size"])
    return limits | {
        "max_seq_len": limits["max_seq_len"] + growth,
        "max_num_tokens": max(most_tokens, _tokens_in_one_step(limits)),
    }


def preflight(job: CompileJob, host: Host, gpu_ids: Sequence[int]) -> list[Gpu]:
    """The GPUs to compile on; refuses a machine on which the compiler could not make this engine.

    Args:
        job: what is compiled.
        host: this machine.
        gpu_ids: numbers that the build has set aside; a smaller machine compiles on those that it has.

    Raises:
        TrtspecError: no GPU, no compiler, another version, another architecture, or a driver that is too old.
    """
    where = f"engine:{job.role}"
    release = release_for(job.version)
    image = (release or RELEASES[0]).image
    elsewhere = (
        f"run the same command in the container {image} on a host with an sm_{job.sm} GPU, or run "
        "`trtspec build --no-compile` here to prepare everything else"
    )
    visible = _visible(host.gpus)
    if not visible:
        hidden = " that CUDA_VISIBLE_DEVICES shows by its number" if host.gpus else ""
        raise TrtspecError(
            f"no GPU on this machine{hidden}, and the compile step needs one", where=where, fix=elsewhere
        )
    if shutil.which(TOOL) is None:
        raise TrtspecError(f"{TOOL} is not on PATH", where=where, fix=elsewhere)
    if host.tensorrt_llm and host.tensorrt_llm != job.version:
        raise TrtspecError(
            f"TensorRT-LLM {host.tensorrt_llm} is installed here, but the spec asks for engines of {job.version}",
            where=where,
            fix=f'set engine.version: "{host.tensorrt_llm}", or {elsewhere}',
        )
    gpus = [visible[number] for number in sorted({number % len(visible) for number in gpu_ids or (0,)})]
    for gpu in gpus:
        if gpu.sm is not None and gpu.sm != job.sm:
            raise TrtspecError(
                f"GPU {gpu.index} is a {gpu.name} (sm_{gpu.sm}), but the spec's hardware.gpu is sm_{job.sm}; an "
                "engine runs on the architecture that it was compiled on",
                where=where,
                fix=f"set hardware.gpu to the GPU of this machine, or {elsewhere}",
            )
    if release and host.driver and version_numbers(host.driver) < version_numbers(release.driver):
        raise TrtspecError(
            f"the NVIDIA driver is {host.driver}; TensorRT-LLM {job.version} needs {release.driver} or later",
            where=where,
            fix=f"install a newer driver, or set engine.version to a release for this one, or {elsewhere}",
        )
    return gpus


def compile_engine(
    job: CompileJob,
    destination: Path,
    stamp: dict[str, Any],
    advance: Callable[[float], None],
    gpu_ids: Sequence[int],
) -> dict[str, Any]:
    """Compile an engine into `destination`, check it, and put our stamp, the log and build.sh beside it.

    Args:
        job: what is compiled.
        destination: directory that the compiler writes; not there yet, moved to `job.out_dir` afterwards.
        stamp: what the build knows of the model.
        advance: called with the fraction that is done, often; what it raises ends the compiler.
        gpu_ids: GPUs that the compiler may use.

    Returns:
        The engine's config and stamp.

    Raises:
        TrtspecError: a machine that cannot do it, or what the compiler says; its whole output is in `job.log_path`.
    """
    host = look()
    gpus = preflight(job, host, gpu_ids)
    staged = options(job) | {"output_dir": str(destination), "output_timing_cache": str(destination / TIMING_CACHE)}
    run_compiler(words(staged), job.role, job.log_path, advance, job.world_size, [gpu.index for gpu in gpus])
    config = _checked(job, destination)
    shutil.move(job.log_path, destination / BUILD_LOG)
    about = {"compiled": True, "tensorrt_version": host.tensorrt, "gpu": gpus[0].name}
    return _finish(job, destination, config, stamp, about)


def prepare_engine(job: CompileJob, destination: Path, stamp: dict[str, Any]) -> dict[str, Any]:
    """Everything of an engine but its ranks: config.json as the compiler would write it, our stamp, build.sh.

    Args:
        job: what is to be compiled elsewhere.
        destination: directory to write; not there yet.
        stamp: what the build knows of the model.

    Returns:
        The engine's config and stamp.

    Raises:
        TrtspecError: build options that cannot be given, or a checkpoint that cannot be read.
    """
    pretrained = engine_stamp.read_json(job.checkpoint_dir / CONFIG)
    destination.mkdir(parents=True)
    plugins = {
        name: given == "enable"
        for name, given in options(job).items()
        if given in ("enable", "disable") and not name.endswith("_plugin")
    }
    limits = resulting_config(job, pretrained.get("num_eagle_layers", 0))
    limits["plugin_config"] = limits["plugin_config"] | plugins
    config = {
        "version": job.version,
        "pretrained_config": pretrained | {"logits_dtype": job.logits_dtype},
        "build_config": limits
        | {"kv_cache_type": "PAGED", "gather_generation_logits": options(job).get("gather_generation_logits", False)},
    }
    engine_stamp.write_json(destination / CONFIG, config)
    return _finish(job, destination, config, stamp, {"compiled": False, "tensorrt_version": None, "gpu": None})


def _finish(
    job: CompileJob, destination: Path, config: dict[str, Any], stamp: dict[str, Any], about: dict[str, Any]
) -> dict[str, Any]:
    """Write our stamp and build.sh beside an engine."""
    # Relative, so that they hold wherever the engines are moved or mounted.
    checkpoint = os.path.relpath(job.checkpoint_dir, job.out_dir)
    portable = options(job) | {"checkpoint_dir": checkpoint, "output_dir": ".", "output_timing_cache": TIMING_CACHE}
    complete = engine_stamp.write_stamp(
        destination,
        {
            "role": job.role,
            **about,
            "tensorrt_llm_version": config["version"],
            "sm": job.sm,
            "checkpoint": checkpoint,
            "command": command(job),
            **stamp,
        },
    )
    engine_stamp.write_script(destination, [TOOL, *words(portable)], complete)
    return {**config, "trtspec": complete}


def _checked(job: CompileJob, directory: Path) -> dict[str, Any]:
    """The config of an engine that was just compiled, if it is what was asked for."""
    if not (directory / CONFIG).is_file():
        raise TrtspecError(f"{TOOL} reported success, but wrote no {CONFIG}", where=str(job.log_path))
    engine = EngineConfig.load(directory)
    try:
        engine.require_ranks()
    except TrtspecError as error:
        name = Path(error.where or "").name
        raise TrtspecError(
            f"{TOOL} reported success, but {name} {error.problem}",
            where=str(job.log_path),
            expected=error.expected,
        ) from error
    if engine.version != job.version:
        raise TrtspecError(
            f"{TOOL} made an engine of TensorRT-LLM {engine.version}, but the spec asks for {job.version}",
            where=str(job.log_path),
            fix=f'set engine.version: "{engine.version}" or build in the container of {job.version}',
        )
    asked = job.build_config
    wrong = [(name, asked[name], engine.build.get(name)) for name in _KEPT if engine.build.get(name) != asked[name]]
    if engine.speculative_decoding_mode != asked["speculative_decoding_mode"]:
        wrong.append(("speculative_decoding_mode", job.mode, engine.build["speculative_decoding_mode"]))
    # The builder adds room for drafts to one, and lowers the other to what a full batch can use.
    for name, least in (("max_seq_len", asked["max_seq_len"]), ("max_num_tokens", _tokens_in_one_step(asked))):
        if engine.build.get(name, 0) < least:
            wrong.append((name, least, engine.build.get(name)))
    plugins, made = asked["plugin_config"], engine.build.get("plugin_config", {})
    wrong += [(name, plugins[name], made.get(name)) for name in _KEPT_BY_PLUGINS if made.get(name) != plugins[name]]
    if wrong:
        name, right, found = wrong[0]
        raise TrtspecError(
            f"{TOOL} made an engine with {name} {found}, {right} was asked for",
            where=str(job.log_path),
            fix="the log says why it was changed",
        )
    return engine.to_json()


def _visible(gpus: Sequence[Gpu]) -> Sequence[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process; it must name them by number."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    by_index = {str(gpu.index): gpu for gpu in gpus}
    return [by_index[word] for word in map(str.strip, chosen.split(",")) if word in by_index]


def _tokens_in_one_step(limits: dict[str, Any]) -> int:
    """Tokens of one decoding step of a full batch: each request's drafts and its last token."""
    return int(limits["max_batch_size"] * (limits["max_draft_len"] + 1))
