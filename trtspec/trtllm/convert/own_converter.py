"""TensorRT-LLM's own converters: scripts in its container, for heads and families that ModelOpt does not write.

Knows which script a job needs, its options, and how to run it. Does not know what the scripts do inside.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError
from trtspec.trtllm.convert.checkpoint_config import FAMILIES
from trtspec.trtllm.versions import RELEASES, release_for

if TYPE_CHECKING:
    from trtspec.trtllm.convert import ConversionJob

EXAMPLES_VARIABLE = "TRTSPEC_TRTLLM_EXAMPLES"
DEFAULT_EXAMPLES = Path("/app/examples")
SCRIPT = "convert_checkpoint.py"
LOG = "convert.log"
# Family -> directories of its converter below the examples, the newest layout first.
FAMILY_SCRIPTS = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), ("models/core/llama", "llama")),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), ("models/core/qwen", "qwen")),
}
_STOP_SECONDS = 10.0
_FAULT = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*|.*\[(?:E|ERROR)\].*|.*\berror: .*")


def is_needed(job: ConversionJob, model_type: str | None) -> bool:
    """Whether ModelOpt does not do: heads of EAGLE or ReDrafter, float32, or another family."""
    return job.heads in ("eagle", "redrafter") or job.model.dtype == "float32" or model_type not in (None, *FAMILIES)


def examples_dir() -> Path:
    """TensorRT-LLM's examples: where the environment says, else where the container has them."""
    return Path(os.environ.get(EXAMPLES_VARIABLE) or DEFAULT_EXAMPLES)


def command(job: ConversionJob, model_dir: str, output_dir: str, model_type: str | None) -> list[str]:
    """The words of the command line.

    Args:
        job: what to convert.
        model_dir: the model's Hugging Face directory; for ReDrafter the base model's checkpoint.
        output_dir: the checkpoint.
        model_type: the family, where it is known.
    """
    heads = str(job.heads_dir) if job.heads_dir else None
    split = {"tp_size": job.model.tensor_parallel, "workers": 1}
    options: dict[str, Any]
    flags: list[str] = []
    if job.heads == "eagle":
        eagle = job.speculation.eagle
        assert eagle is not None
        options = {
            "model_dir": model_dir,
            "eagle_model_dir": heads or eagle.heads,
            "max_draft_len": job.max_draft_len,
            "num_eagle_layers": eagle.num_layers,
            "max_non_leaves_per_layer": eagle.max_non_leaves_per_layer,
        }
        directories: tuple[str, ...] = ("eagle",)
    elif job.heads == "redrafter":
        redrafter = job.speculation.redrafter
        assert redrafter is not None
        options = {
            "base_model_checkpoint_dir": model_dir,
            "drafter_model_dir": heads or redrafter.drafter,
            "redrafter_num_beams": redrafter.num_beams,
            "redrafter_draft_len_per_beam": redrafter.draft_len_per_beam,
        }
        flags = [] if redrafter.greedy else ["--redrafter_no_greedy_search"]
        directories = ("redrafter",)
    else:
        options = {"model_dir": model_dir}
        split["pp_size"] = job.model.pipeline_parallel
        directories = FAMILY_SCRIPTS.get(model_type or "llama", ())
    options |= {"dtype": job.model.dtype, **split, "output_dir": output_dir}
    return [
        "python3",
        str(_script(directories)),
        *(word for name, value in options.items() for word in (f"--{name}", str(value))),
        *flags,
    ]


def require_available(job: ConversionJob, model_type: str | None) -> None:
    """Refuse on a machine without TensorRT-LLM.

    Raises:
        TrtspecError: the script is not here; the container that has it is named.
    """
    script = Path(command(job, "", "", model_type)[1])
    if script.is_file():
        return
    what = {"eagle": "EAGLE heads", "redrafter": "a ReDrafter head"}.get(job.heads or "")
    why = what or (f"{job.model.dtype} weights" if job.model.dtype == "float32" else f"models of family {model_type}")
    release = release_for(job.version) or RELEASES[0]
    raise TrtspecError(
        f"{why} are converted by TensorRT-LLM's own script, which is not on this machine",
        where=str(script),
        fix=f"build in the container {release.image}, or set {EXAMPLES_VARIABLE} to TensorRT-LLM's examples directory",
    )


def check_drafter(directory: Path) -> None:
    """Refuse a directory that holds no ReDrafter head, by the names of its files.

    Raises:
        TrtspecError: what is missing.
    """
    for names in (("config.json",), ("model.safetensors", "model.pt")):
        if not any((directory / name).is_file() for name in names):
            raise TrtspecError(
                f"no ReDrafter head: {' or '.join(names)} is missing",
                where=str(directory),
                expected="config.json, and model.safetensors or model.pt",
            )


def run(words: list[str], log: Path) -> None:
    """Run the script, with all it prints in `log`; stopped if this process is interrupted.

    Raises:
        TrtspecError: it failed; with its own last word on it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    if code:
        ended = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        raise TrtspecError(
            f"TensorRT-LLM's converter {ended}: {_fault(log.read_text(encoding='utf-8', errors='replace'))}",
            where=str(log),
            fix=f"read the whole log; the command was: {shlex.join(words)}",
        )


def _fault(text: str) -> str:
    """The line of a log that says what is wrong: its last error, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    faults = [line for line in lines if _FAULT.fullmatch(line)]
    return (faults or lines or ["it printed nothing"])[-1]


def _script(directories: tuple[str, ...]) -> Path:
    """The first of these that exists, else the first."""
    scripts = [examples_dir() / directory / SCRIPT for directory in directories]
    return next((script for script in scripts if script.is_file()), scripts[0])
