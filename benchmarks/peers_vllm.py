"""vLLM's CPU build as a worker of `benchmarks/peers.py`, in an environment of its own.

    python peers_vllm.py OPTIONS

OPTIONS is the JSON of `peers.Options`. Says that it is ready, then answers greedily, line by line; the clock starts
with the first tokens.

    {"prompt": [1, 2], "max_tokens": 96}  ->  {"ids": [3, 4], "num_tokens": 1, "seconds": 0.03}
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

OPTIONS = json.loads(sys.argv[1])
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # whatever else is printed
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default a part of the memory, and the workers are several
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # processes of one engine would wait for each other on the cores that decode
    "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "cache"),
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": str(OPTIONS["threads"]),
}

from vllm import LLM, SamplingParams  # noqa: E402  # reads the environment


def speculative_config() -> dict[str, Any] | None:
    """vLLM's settings for the way of decoding."""
    drafts = {"num_speculative_tokens": OPTIONS["num_draft_tokens"]}
    if OPTIONS["way"] == "prompt lookup":
        return drafts | {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": OPTIONS["max_ngram"]}
    if OPTIONS["way"] == "draft model":
        return drafts | {"method": "draft_model", "model": OPTIONS["draft"]}
    return None


def main() -> None:
    """Serve the prompts of standard input."""
    llm = LLM(
        OPTIONS["model"],
        dtype=OPTIONS["dtype"],
        max_model_len=OPTIONS["max_seq_len"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=speculative_config(),
    )
    ANSWERS.write(json.dumps({"ready": True}) + "\n")
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], stop_token_ids=OPTIONS["end_ids"])
        ANSWERS.write(json.dumps(answer(llm.llm_engine, str(number), request["prompt"], params)) + "\n")


def answer(engine: Any, name: str, prompt: list[int], params: SamplingParams) -> dict[str, Any]:
    """The tokens, how many of them the clock covers, and its seconds."""
    engine.add_request(name, {"prompt_token_ids": prompt}, params)
    ids, first, begin = [], 0, 0.0
    while engine.has_unfinished_requests():
        for output in engine.step():
            ids = list(output.outputs[0].token_ids)
            if not first:
                first, begin = len(ids), time.perf_counter()
    return {"ids": ids, "num_tokens": len(ids) - first, "seconds": time.perf_counter() - begin}


if __name__ == "__main__":
    main()
