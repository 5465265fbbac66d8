"""OpenVINO GenAI as a worker of `benchmarks/peers.py`, in an environment of its own.

    python peers_openvino.py OPTIONS

OPTIONS is the JSON of `peers.Options`. Says that it is ready, then answers greedily, line by line; the clock starts
with the first tokens.

    {"prompt": [1, 2], "max_tokens": 96}  ->  {"ids": [3, 4], "num_tokens": 1, "seconds": 0.03}
"""

import json
import os
import sys
from typing import Any

OPTIONS = json.loads(sys.argv[1])
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # whatever else is printed

import numpy as np  # noqa: E402  # may print
import openvino  # noqa: E402
import openvino_genai  # noqa: E402

# Left alone, it chooses the precision by the machine and keeps keys and values in eight bits.
PRECISION = {"float32": "f32", "bfloat16": "bf16"}[OPTIONS["dtype"]]
PROPERTIES = {
    "INFERENCE_PRECISION_HINT": PRECISION,
    "KV_CACHE_PRECISION": PRECISION,
    "PERFORMANCE_HINT": "LATENCY",
    "INFERENCE_NUM_THREADS": OPTIONS["threads"],
}


def main() -> None:
    """Serve the prompts of standard input."""
    extra: dict[str, Any] = {}
    config = openvino_genai.GenerationConfig()
    config.do_sample = False
    config.stop_token_ids = set(OPTIONS["end_ids"])
    if OPTIONS["way"] == "prompt lookup":
        extra["prompt_lookup"] = True
        config.max_ngram_size = OPTIONS["max_ngram"]
    if OPTIONS["way"] == "draft model":
        extra["draft_model"] = openvino_genai.draft_model(OPTIONS["draft"], "CPU", **PROPERTIES)
    if extra:
        config.num_assistant_tokens = OPTIONS["num_draft_tokens"]
    pipeline = openvino_genai.LLMPipeline(OPTIONS["model"], "CPU", **PROPERTIES, **extra)
    ANSWERS.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        config.max_new_tokens = request["max_tokens"]
        result = pipeline.generate(openvino.Tensor(np.array([request["prompt"]], dtype=np.int64)), config)
        ids, metrics = list(result.tokens[0]), result.perf_metrics
        seconds = (metrics.get_generate_duration().mean - metrics.get_ttft().mean) / 1000  # from milliseconds
        ANSWERS.write(json.dumps({"ids": ids, "num_tokens": len(ids) - 1, "seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
