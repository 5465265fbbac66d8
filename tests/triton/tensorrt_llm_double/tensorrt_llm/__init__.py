"""A test double of the package tensorrt_llm: LLM and SamplingParams as the LLM API model calls them.

It generates no text of a model. The first word of a prompt says what happens:

    count N     N words `w1 w2 ...`, or as many as max_tokens allows
    show WHAT   JSON of the sampling parameters, the LLM's arguments, the environment, how many requests were
                aborted, or how many ran at the same time
    slow N      like count, with 50 ms before each word
    hang        one word, then nothing
    crash       one word, then an error
    vanish      one word, then an end without a last output
    toolong     the LLM refuses the prompt

What LLM(...) is given is checked as strictly as the real one checks it (see fields.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from .fields import check_arguments

__version__ = "1.3.0"
DEFAULT_MAX_TOKENS = 32


@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    """The fields that requests can set; any other is a TypeError, as in the real one."""

    max_tokens: int = DEFAULT_MAX_TOKENS
    stop: list[str] | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    logprobs: int | None = None
    return_perf_metrics: bool = False


class LLM:
    def __init__(self, **arguments: Any) -> None:
        check_arguments(arguments, __version__)
        if arguments["model"].endswith("/nothing"):
            raise ValueError(f"no checkpoint in {arguments['model']}")
        self.arguments = arguments
        self.aborted = self.running = self.most_running = 0

    def generate_async(
        self, inputs: str, sampling_params: SamplingParams | None = None, streaming: bool = False
    ) -> Generation:
        asyncio.get_running_loop()  # the real one needs it too
        if not isinstance(inputs, str) or not streaming:
            raise TypeError("this double is asked for streams of one text")
        if inputs.startswith("toolong"):
            raise ValueError("The prompt is longer than max_input_len")
        return Generation(self, inputs, sampling_params or SamplingParams())

    def shutdown(self) -> None:
        pass


class Generation:
    """What generate_async returns: one output a token, each with the whole text so far."""

    def __init__(self, llm: LLM, prompt: str, params: SamplingParams) -> None:
        self.llm, self.params = llm, params
        self.kind, _, self.rest = prompt.partition(" ")
        self.outputs = self._generate()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> SimpleNamespace:
        return await anext(self.outputs)

    def abort(self) -> None:
        self.llm.aborted += 1

    def _pieces(self) -> list[str]:
        if self.kind == "show":
            shown = {
                "sampling": dataclasses.asdict(self.params),
                "arguments": self.llm.arguments,
                "environment": {k: v for k, v in os.environ.items() if k.startswith(("CUDA_V", "TRTLLM_V", "OMPI_"))},
                "aborted": self.llm.aborted,
                "most_running": self.llm.most_running,
            }
            return [json.dumps(shown[self.rest])]
        if self.kind in ("count", "slow"):
            return [f"w{i} " for i in range(1, int(self.rest) + 1)]
        return ["w1 "]

    async def _generate(self) -> AsyncIterator[SimpleNamespace]:
        self.llm.running += 1
        self.llm.most_running = max(self.llm.running, self.llm.most_running)
        try:
            async for output in self._outputs():
                yield output
        finally:
            self.llm.running -= 1

    async def _outputs(self) -> AsyncIterator[SimpleNamespace]:
        pieces = self._pieces()
        text = ""
        for number, piece in enumerate(pieces, start=1):
            await asyncio.sleep(0.05 if self.kind == "slow" else 0)
            text += piece
            stopped = next((word for word in self.params.stop or () if word in text), None)
            if stopped and self.kind != "show":
                yield self._output(text.partition(stopped)[0], "stop", number, stop_reason=stopped)
                return
            if self.kind in ("hang", "crash", "vanish"):
                yield self._output(text, None, number)
                break
            reason = "stop" if number == len(pieces) else "length" if number == self.params.max_tokens else None
            yield self._output(text, reason, number)
            if reason:
                return
        if self.kind == "hang":
            await asyncio.sleep(3600)
        if self.kind == "crash":
            raise RuntimeError("CUDA error: device-side assert triggered")

    def _output(self, text: str, reason: str | None, number: int, stop_reason: str | None = None) -> SimpleNamespace:
        metrics = SimpleNamespace(
            kv_cache_metrics=SimpleNamespace(
                num_reused_blocks=3,
                num_missed_blocks=1,
                num_new_allocated_blocks=2,
                num_total_allocated_blocks=5,
                kv_cache_hit_rate=0.75,
            ),
            timing_metrics=SimpleNamespace(
                arrival_time=timedelta(seconds=5, microseconds=1),
                first_scheduled_time=timedelta(seconds=5, microseconds=2),
                first_token_time=timedelta(seconds=5, microseconds=30),
                last_token_time=timedelta(seconds=6),
            ),
            speculative_decoding=SimpleNamespace(
                acceptance_rate=0.5, total_accepted_draft_tokens=10, total_draft_tokens=20
            ),
        )
        completion = SimpleNamespace(
            text=text,
            finish_reason=reason,
            stop_reason=stop_reason,
            cumulative_logprob=-0.5 * number if self.params.logprobs else None,
            request_perf_metrics=metrics if self.params.return_perf_metrics and reason else None,
        )
        return SimpleNamespace(outputs=[completion], finished=reason is not None)
