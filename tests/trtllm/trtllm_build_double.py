"""STAND-IN for `trtllm-build`: checks its command line against the contract and writes a fake engine.

It is a test double. It compiles nothing; every file that it writes says so, and no runtime can load them. It takes the
options in trtllm_build_contract.json and no others, with their types and choices, refuses what the real tool refuses,
and changes sizes as the real builder does. Standard library only, so that it starts at once.

Environment:
    STANDIN_VERSION   version of TensorRT-LLM that it claims (1.2.1)
    STANDIN_MODE      what goes wrong: fail, killed, half, disk, cuda_oom, arch, driver, usage, silent, lie_seq_len,
                      no_rank, empty_rank, no_config; for one engine only as mode@text (output_dir contains the text)
    STANDIN_SLEEP     seconds that each rank takes
    STANDIN_TRACE     file to which start and end of every run are appended, as JSON lines with pid and GPUs

`install` and `pretend` put it, a stand-in nvidia-smi and a package of that version where programs find them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MARK = "STAND-IN of the tests, not an engine"
CONTRACT = Path(__file__).with_name("trtllm_build_contract.json")
_MODES = {
    None: 1,
    "draft_tokens_external": 2,
    "medusa": 4,
    "lookahead_decoding": 8,
    "explicit_draft_tokens": 16,
    "eagle": 32,
}
_CHECKPOINT_KEYS = ("architecture", "dtype", "hidden_size", "num_hidden_layers", "num_attention_heads")


def parser() -> argparse.ArgumentParser:
    """The command line of trtllm-build, from the contract."""
    made = argparse.ArgumentParser("trtllm-build", allow_abbrev=False)
    for name, facts in json.loads(CONTRACT.read_text(encoding="utf-8")).items():
        flags = [f"--{word}" for word in (name, *facts.get("aliases", ()))]
        default = facts.get("default")
        if facts["kind"] == "flag":
            made.add_argument(*flags, dest=name, action="store_true")
        else:
            many: dict[str, Any] = {"nargs": "+"} if facts["kind"] == "list" else {}
            kind = int if facts["kind"] == "int" else str
            made.add_argument(*flags, dest=name, type=kind, default=default, choices=facts.get("choices"), **many)
    return made


def check(words: Sequence[str]) -> argparse.Namespace:
    """The options of a command line (without the tool's name), if the real tool would take them.

    Raises:
        SystemExit: a word that the contract does not know, or a value of the wrong type or choice.
        RuntimeError: options that exclude each other.
    """
    options = parser().parse_args(list(words))
    if (options.gather_context_logits or options.gather_all_token_logits) and options.max_draft_len > 0:
        raise RuntimeError("Gather context logits is not support with draft len > 0.")
    if options.multiple_profiles == "enable" and options.opt_num_tokens is not None:
        raise RuntimeError("multiple_profiles is enabled, while opt_num_tokens is set.")
    if options.streamingllm == "enable":
        raise RuntimeError("StreamingLLM is no longer supported.")
    if options.max_draft_len and options.speculative_decoding_mode is None:
        raise RuntimeError("max_draft_len without speculative_decoding_mode")
    if (
        options.speculative_decoding_mode in ("draft_tokens_external", "lookahead_decoding")
        and not options.max_draft_len
    ):
        raise RuntimeError(f"{options.speculative_decoding_mode} needs max_draft_len")
    if options.speculative_decoding_mode and options.max_beam_width != 1:
        raise RuntimeError("speculative decoding needs max_beam_width 1")
    return options


def checkpoint_config(directory: str) -> dict[str, Any]:
    """config.json of a checkpoint whose rank files are there.

    Raises:
        RuntimeError: this is no checkpoint.
    """
    try:
        config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RuntimeError(f"not a checkpoint: {error}") from None
    if missing := [key for key in _CHECKPOINT_KEYS if key not in config]:
        raise RuntimeError(f"config.json of the checkpoint has no {missing[0]}")
    for rank in range(config.get("mapping", {}).get("world_size", 1)):
        if not (Path(directory) / f"rank{rank}.safetensors").is_file():
            raise FileNotFoundError(f"rank{rank}.safetensors is missing")
    return dict(config)


def engine_config(options: argparse.Namespace, checkpoint: dict[str, Any], version: str) -> dict[str, Any]:
    """config.json as the real tool writes it, marked as ours."""
    draft_len = options.max_draft_len or checkpoint.get("max_draft_len", 0)
    if "redrafter_num_beams" in checkpoint:
        draft_len = checkpoint["redrafter_num_beams"] * checkpoint["redrafter_draft_len_per_beam"]
    mode = options.speculative_decoding_mode
    seq_len = options.max_seq_len or checkpoint.get("max_position_embeddings") or 2048
    num_tokens = min(options.max_num_tokens, seq_len * options.max_batch_size)
    if mode:
        seq_len += draft_len + (checkpoint["num_eagle_layers"] if mode == "eagle" else 0)
        num_tokens = max(num_tokens, options.max_batch_size * (draft_len + 1))
    quantization = checkpoint.get("quantization", {})
    algo, cache = quantization.get("quant_algo"), quantization.get("kv_cache_quant_algo")
    paged = options.use_paged_context_fmha == "enable" and options.context_fmha == "enable"
    if cache == "INT8" or (cache == "FP8" and algo not in ("FP8", "W4A8_AWQ", "NVFP4")):
        paged = False
    switches = ("context_fmha", "remove_input_padding", "multiple_profiles", "reduce_fusion", "use_fused_mlp")
    plugins = ("gpt_attention_plugin", "gemm_plugin", "nccl_plugin", "lora_plugin", "moe_plugin")
    return {
        "version": version,
        "pretrained_config": checkpoint | {"logits_dtype": options.logits_dtype or "float32"},
        "build_config": {
            "max_input_len": options.max_input_len,
            "max_seq_len": seq_len,
            "opt_batch_size": 8,
            "max_batch_size": options.max_batch_size,
            "max_beam_width": options.max_beam_width,
            "max_num_tokens": num_tokens,
            "opt_num_tokens": options.opt_num_tokens or options.max_batch_size * options.max_beam_width,
            "max_prompt_embedding_table_size": options.max_prompt_embedding_table_size,
            "kv_cache_type": (options.kv_cache_type or "paged").upper(),
            "gather_context_logits": options.gather_context_logits,
            "gather_generation_logits": options.gather_generation_logits,
            "max_draft_len": draft_len,
            "speculative_decoding_mode": _MODES[mode],
            "output_timing_cache": options.output_timing_cache,
            "plugin_config": {
                "dtype": checkpoint["dtype"],
                **{name: None if (value := getattr(options, name)) == "disable" else value for name in plugins},
                **{name: getattr(options, name) == "enable" for name in switches},
                "tokens_per_block": options.tokens_per_block,
                "use_paged_context_fmha": paged,
            },
        },
        "made_by": MARK,
    }


def install(
    directory: Path,
    *,
    gpus: Sequence[tuple[str, str]] = (("NVIDIA H100 80GB HBM3", "9.0"),) * 2,
    driver: str = "590.44.01",
    compiler: bool = True,
    tensorrt_llm: str | None = "1.2.1",
) -> dict[str, str]:
    """A machine with a GPU: stand-ins for nvidia-smi, trtllm-build and the installed package, under `directory`.

    Args:
        directory: is created.
        gpus: name and compute capability of each GPU that nvidia-smi shows; empty: it fails, as without a driver.
        driver: version of the driver that it shows.
        compiler: whether there is a trtllm-build.
        tensorrt_llm: version of the Python package; None: not installed.

    Returns:
        Values of PATH, PYTHONPATH and STANDIN_VERSION for a process that is to see this machine; in this process
        PYTHONPATH must go to the front of sys.path instead (`pretend` does both).
    """
    programs, packages = directory / "bin", directory / "packages"
    programs.mkdir(parents=True)
    packages.mkdir()
    rows = [f"{i}, {name}, {capability}, 81559, 0, {driver}" for i, (name, capability) in enumerate(gpus)]
    write_program(
        programs / "nvidia-smi",
        f"""# STAND-IN for nvidia-smi
import sys
columns = ["index", "name", "compute_cap", "memory.total", "memory.used", "driver_version"]
rows = [row.split(", ") for row in {rows!r}]
query = next((word.partition("=")[2].split(",") for word in sys.argv if word.startswith("--query-gpu=")), columns)
if not rows:
    sys.exit("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
for row in rows:
    print(", ".join(dict(zip(columns, row)).get(name, "[N/A]") for name in query))
""",
    )
    if compiler:
        run = f"import runpy\nrunpy.run_path({str(Path(__file__).resolve())!r}, run_name='__main__')\n"
        write_program(programs / "trtllm-build", f"# STAND-IN for trtllm-build\n{run}")
    if tensorrt_llm:
        facts = packages / f"tensorrt_llm-{tensorrt_llm}.dist-info"
        facts.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {tensorrt_llm}\nSummary: {MARK}\n"
        (facts / "METADATA").write_text(metadata, encoding="utf-8")
    return {
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "PYTHONPATH": str(packages),
        "STANDIN_VERSION": tensorrt_llm or "1.2.1",
    }


def pretend(monkeypatch: Any, directory: Path, **machine: Any) -> None:
    """Let this process and those that it starts see the machine of `install`, with pytest's monkeypatch."""
    variables = install(directory, **machine)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(variables["PYTHONPATH"])


def write_program(path: Path, text: str) -> None:
    """An executable Python script that needs the standard library only."""
    path.write_text(f"#!{sys.executable} -IS\n{text}", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def main() -> None:
    options = check(sys.argv[1:])
    version = os.environ.get("STANDIN_VERSION", "1.2.1")
    mode, _, only = os.environ.get("STANDIN_MODE", "").partition("@")
    if only and only not in options.output_dir:
        mode = ""
    trace("start")
    print(f"[TensorRT-LLM] TensorRT-LLM version: {version}")
    say("I", f"this is the {MARK}")
    checkpoint = checkpoint_config(options.checkpoint_dir or "")
    world_size = checkpoint.get("mapping", {}).get("world_size", 1)
    config = engine_config(options, checkpoint, version)
    out = Path(options.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    go_wrong(mode)
    if mode == "lie_seq_len":
        config["build_config"]["max_seq_len"] = options.max_seq_len - 1
    for rank in range(world_size):
        say("I", "Build TensorRT engine Unnamed Network 0")
        time.sleep(float(os.environ.get("STANDIN_SLEEP", "0")))
        say("I", "Engine generation completed in 0.1 seconds.")
        if mode == "half" and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if not (mode == "no_rank" and rank == world_size - 1):
            content = "" if mode == "empty_rank" else f"{MARK}: rank {rank}\n"
            (out / f"rank{rank}.engine").write_text(content, encoding="utf-8")
        say("I", "Engine serialized. Total time: 00:00:00")
    Path(options.output_timing_cache).write_text(f"{MARK}: timing cache\n", encoding="utf-8")
    if mode != "no_config":
        (out / "config.json").write_text(json.dumps(config, indent=4), encoding="utf-8")
    say("I", "Total time of building all engines: 00:00:00")
    trace("end")


def go_wrong(mode: str) -> None:
    """The ways in which the real tool ends, with its words."""
    if mode == "fail":
        say("E", "Failed to parse layer 3")
        raise ValueError("Engine building failed because of STANDIN_MODE")
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "disk":
        raise OSError(28, "No space left on device")
    if mode == "cuda_oom":
        print("[TRT] [E] [virtualMemoryBuffer.cpp::resizePhysical::153] Error Code 2: OutOfMemory (Requested 2 B)")
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB")
    if mode == "arch":
        raise RuntimeError("SmoothQuant is not supported on SM>=100.")
    if mode == "driver":
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")
    if mode == "usage":
        parser().error("argument --max_batch_size: invalid int value: 'many'")
    if mode == "silent":
        sys.exit(3)


def say(level: str, text: str) -> None:
    print(f"[11/30/2026-12:00:00] [TRT-LLM] [{level}] {text}", flush=True)


def trace(event: str) -> None:
    """Append what happens to STANDIN_TRACE, for tests of what runs at the same time."""
    if path := os.environ.get("STANDIN_TRACE"):
        entry = {"event": event, "at": time.time(), "pid": os.getpid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main()
