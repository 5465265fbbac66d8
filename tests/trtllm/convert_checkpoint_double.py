"""A double of TensorRT-LLM's convert_checkpoint.py scripts. Nothing may mistake what it writes for a checkpoint.

Takes the options that the script of its directory documents, and checks types, choices and that its inputs are there.
In the environment, FAIL_WITH makes it fail with that text, the way a Python script does, WRITE_NOTHING leaves out the
weights, and SLEEP_AND_WRITE_PID names a file for its process id, after which it sleeps.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

DTYPES = ("auto", "float16", "bfloat16", "float32")
SPLIT = {"--tp_size": int, "--workers": int, "--output_dir": Path}
OPTIONS = {
    "eagle": {
        **{"--model_dir": Path, "--eagle_model_dir": Path, "--max_draft_len": int, "--num_eagle_layers": int},
        **{"--max_non_leaves_per_layer": int, "--pp_size": int, **SPLIT},
    },
    "redrafter": {
        **{"--base_model_checkpoint_dir": Path, "--drafter_model_dir": Path, "--redrafter_num_beams": int},
        **{"--redrafter_draft_len_per_beam": int, **SPLIT},
    },
    "llama": {"--model_dir": Path, "--pp_size": int, **SPLIT},
    "qwen": {"--model_dir": Path, "--pp_size": int, **SPLIT},
}


def main() -> None:
    script = Path(sys.argv[0]).resolve().parent.name
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    for name, kind in OPTIONS[script].items():
        parser.add_argument(name, type=kind, required=name != "--pp_size", default=1)
    if script == "redrafter":
        parser.add_argument("--redrafter_no_greedy_search", action="store_true")
    options = parser.parse_args()
    print(f"[TensorRT-LLM] double of {script}")
    if "FAIL_WITH" in os.environ:
        print("[TRT-LLM] [I] half way", flush=True)
        raise ValueError(os.environ["FAIL_WITH"])
    if "SLEEP_AND_WRITE_PID" in os.environ:
        path = Path(os.environ["SLEEP_AND_WRITE_PID"])
        path.with_suffix(".tmp").write_text(str(os.getpid()))
        path.with_suffix(".tmp").rename(path)
        time.sleep(60)
    for name, value in vars(options).items():
        if name.endswith("_dir") and name != "output_dir":
            assert (value / "config.json").is_file(), f"{name}: no config.json in {value}"
    if script == "redrafter":
        assert json.loads((options.base_model_checkpoint_dir / "config.json").read_text())["mapping"]["world_size"]
        assert (options.base_model_checkpoint_dir / "rank0.safetensors").is_file()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    content = {"double": script, "logits_dtype": "float16", "argv": sys.argv[1:]}
    (options.output_dir / "config.json").write_text(json.dumps(content))
    if "WRITE_NOTHING" not in os.environ:
        for rank in range(options.tp_size * options.pp_size if script != "redrafter" else options.tp_size):
            (options.output_dir / f"rank{rank}.safetensors").write_text("written by a double")


if __name__ == "__main__":
    main()
