"""Whether the models of a running server still answer, found out with small real requests where no traffic shows it.

Triton does not tell: it calls a model ready whose process is gone, and counts a request of a Python model as a success
once the model has taken it. The pipeline's own counters do tell: they count what engines have answered. Knows the
pipeline's counters and tensors; not how the processes of models are found, ended or started.
"""

from __future__ import annotations

import http.client
import re
import time
import urllib.request
from collections.abc import Callable, Collection

import numpy as np

from trtspec.errors import TrtspecError
from trtspec.triton.client import STREAMING_MODEL, UNARY_MODEL, Client, ServerError
from trtspec.triton.launch import ENGINE_MODELS

PROBE_PROMPT = "Hello"
PROBE_TOKENS = 4  # enough for one speculative cycle and one token of the target's own
PROBE_TIMEOUT_S = 10.0
_PIPELINES = (STREAMING_MODEL, UNARY_MODEL)
_COUNTER = re.compile(r'^trtspec_(emitted|draft)_tokens_total\{model="([^"]+)"\} (\S+)$', re.MULTILINE)
_METRICS_TIMEOUT_S = 5.0
_TRIES = 2
_COMPUTING = 0.03  # of one CPU; a whole server that waits takes less than a hundredth
_LONGEST_COMPUTATION_S = 600.0
_ONE = np.ones((1, 1), dtype=np.int32)
_ONE_TOKEN = {"input_ids": _ONE, "input_lengths": _ONE, "request_output_len": _ONE}  # of an engine, after one token


class LifeSigns:
    """Looks after the models of one server.

    Args:
        client: of the server.
        metrics_url: where its metrics are.
        drafts: a healthy pipeline drafts when it is not told to.
        cpu_s: CPU seconds used so far by the processes of a model; of all models for None.
        timeout_s: longest wait for the answer to one probe.
    """

    def __init__(
        self,
        client: Client,
        metrics_url: str,
        *,
        drafts: bool,
        cpu_s: Callable[[str | None], float],
        timeout_s: float = PROBE_TIMEOUT_S,
    ) -> None:
        self._client = client
        self._metrics_url = metrics_url
        self._counters = ("emitted", "draft") if drafts else ("emitted",)
        self._cpu_s = cpu_s
        self._timeout_s = timeout_s
        self._seen = self._read_counters()
        self._unanswered_since: dict[str, float] = {}

    def silent_models(self, models: Collection[str]) -> list[str]:
        """Those of `models` that do not answer.

        A pipeline that has given tokens, and drafted, since the last look shows that it and its engines live. Another
        one is sent a request; only if that fails, or nothing was drafted for it, the engines are asked one by one, and
        only if all of these answer it may be the pipeline's own fault.
        """
        quiet = [model for model in _PIPELINES if model in models and not self._has_served(model)]
        failing = [model for model in quiet if not self._serves(model)]
        silent: list[str] = []
        if failing:
            engines = [model for model in ENGINE_MODELS if model in models]
            silent = [model for model in engines if self.is_silent(model)] or [*filter(self.is_silent, failing)]
        self._seen = self._read_counters()
        return silent

    def is_silent(self, model: str) -> bool:
        """Whether a model leaves two requests in a row unanswered; an error of its own is an answer too.

        One that computes meanwhile is busy, with a long queue perhaps, and is given ten minutes.
        """
        is_engine = model in ENGINE_MODELS
        for _ in range(_TRIES):
            began, cpu_s = time.monotonic(), self._used_cpu_s(model, is_engine)
            if self._answers(model, is_engine):
                self._unanswered_since.pop(model, None)
                return False
            since = self._unanswered_since.setdefault(model, began)
            computes = self._used_cpu_s(model, is_engine) - cpu_s > _COMPUTING * (time.monotonic() - began)
            if computes and time.monotonic() - since < _LONGEST_COMPUTATION_S:
                return False
        del self._unanswered_since[model]
        return True

    def _used_cpu_s(self, model: str, is_engine: bool) -> float:
        return self._cpu_s(model if is_engine else None)  # a pipeline waits for engines

    def _has_served(self, pipeline: str) -> bool:
        now = self._read_counters()
        keys = [(counter, pipeline) for counter in self._counters]
        return all(now.get(key, 0.0) > self._seen.get(key, 0.0) for key in keys)

    def _serves(self, pipeline: str) -> bool:
        """Whether the pipeline answers a request, with drafts where it should."""
        try:
            stats = self._client.complete(
                PROBE_PROMPT, max_tokens=PROBE_TOKENS, stream=pipeline == STREAMING_MODEL, timeout_s=self._timeout_s
            ).stats
        except TrtspecError:
            return False
        return stats.drafted > 0 or "draft" not in self._counters

    def _answers(self, model: str, is_engine: bool) -> bool:
        try:
            if is_engine:
                for _ in self._client.infer(model, _ONE_TOKEN, ("output_ids", "sequence_length"), self._timeout_s):
                    pass
            else:
                self._client.complete(
                    PROBE_PROMPT, max_tokens=1, stream=model == STREAMING_MODEL, timeout_s=self._timeout_s
                )
        except ServerError as error:
            dead = f"'{model}_" in error.message and "is not healthy" in error.message
            return error.status != "DEADLINE_EXCEEDED" and not dead
        except TrtspecError:  # the server itself is gone
            return True
        return True

    def _read_counters(self) -> dict[tuple[str, str], float]:
        """Tokens that each pipeline has emitted and drafted so far; empty if the server does not say."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(self._metrics_url, timeout=_METRICS_TIMEOUT_S) as answer:
                text = answer.read().decode("utf-8", errors="replace")
        except (OSError, http.client.HTTPException):
            return {}
        return {(counter, model): float(value) for counter, model, value in _COUNTER.findall(text)}
