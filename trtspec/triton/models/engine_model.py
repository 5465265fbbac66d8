"""An engine model of this Triton server as an `EngineCall` of the decoding core.

Knows the tensors of a TensorRT-LLM engine model and Triton's calls between models. Every answer is checked before it is
believed, because Triton passes wrong shapes and types through; every wait has a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Timeout
from functools import partial
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from trtspec_decoding.detokenize import shared_length
from trtspec_decoding.engine_call import NO_KV_BLOCKS, EngineError, EngineRequest, EngineResult, KvBlocks

from .phases import DRAFT, Phases
from .tensors import word_list
from .threads import Watch

Rescue = Callable[[EngineError], None]

_GREEDY = np.ones((1, 1), dtype=np.int32)
_TRUE = np.ones((1, 1), dtype=np.bool_)
_LOGITS_DTYPES = {"FP32": np.float32, "FP16": np.float16}
_NO_DRAFTS = np.zeros(0, dtype=np.int32)
_KV_BLOCKS = ("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks")
_MAX_DOUBLINGS = 3
_LONG = 128  # tokens that an engine has yet to read; such a call would hold up the phase of all others
_MISSING = ("is not ready", "is not found", "unknown model", "not available")


class CallFailed(EngineError):
    """A call came to nothing.

    Attributes:
        reason: failed, timeout, missing (there is no such model) or resting (it failed a moment ago).
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Read:
    """How much of a request's context an engine has read."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens = 0


class EngineModel:
    """One engine model.

    Args:
        name: the model in this server.
        vocab_size: of this model: the width of its logits and of what is sent to it.
        num_ids: ids it may answer, fewer than `vocab_size` where the other model has a smaller vocabulary.
        logits_dtype: FP32 or FP16, what the engine models of this server take and answer.
        timeout_s: longest wait for one answer.
        watch: minds the deadlines.
        max_calls: calls of requests that make several at a time.
        rest_s: after a failed call, further calls fail at once for so many seconds instead of waiting too; then one
            tries again, and if it fails as well, the rest is twice as long.
        phases: takes turns with the other engines, in `phase`; None: whenever a request needs it.
    """

    def __init__(
        self,
        name: str,
        *,
        vocab_size: int,
        num_ids: int,
        logits_dtype: str,
        timeout_s: float,
        watch: Watch,
        max_calls: int,
        rest_s: float = 0.0,
        phases: Phases | None = None,
        phase: str = "",
    ) -> None:
        self.name = name
        self._vocab_size = vocab_size
        self._num_ids = num_ids
        self._logits_dtype = _LOGITS_DTYPES[logits_dtype]
        self._timeout_s = timeout_s
        self._watch = watch
        self._rest_s = rest_s
        self._failures = 0  # in a row, those of calls that were under way together counted once
        self._failed_at = 0.0
        self._lock = threading.Lock()
        self._resting_until = 0.0
        self._trying_until = 0.0
        self._phases, self._phase = phases, phase
        self._threads = ThreadPoolExecutor(max_calls, thread_name_prefix=name)

    @property
    def resting(self) -> bool:
        """Whether calls fail at once, because one failed a moment ago, or is just trying whether they still do."""
        return bool(self._failures and self._rest_s) and time.monotonic() < max(self._resting_until, self._trying_until)

    def for_request(self, request_id: str, rescue: Rescue) -> Callable[[EngineRequest], EngineResult]:
        """The `EngineCall` of one generation; all its calls carry `request_id`.

        A call that takes too long never returns to the thread that made it: `rescue` is given the error in another one.
        """
        return partial(self._call, request_id, rescue, _Read())

    def for_several(self, request_id: str, rescue: Rescue) -> Callable[[Sequence[EngineRequest]], list[EngineResult]]:
        """The `EngineCalls` of one generation: all calls are under way before the first answer is waited for."""
        return partial(self._call_several, request_id, rescue, _Read())

    def close(self) -> None:
        """Take no further calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _call(self, request_id: str, rescue: Rescue, read: _Read, request: EngineRequest) -> EngineResult:
        """Run one request to its end.

        Raises:
            EngineError: the model failed, is resting, or answered something else than was asked.
        """
        began = self._require_rested()
        call = self._request(request_id, request)
        token = object()

        def too_late() -> None:
            self._rest(began)
            self._leave(token)
            rescue(self._too_late())

        self._enter(token, request_id, read, [request])
        try:
            response = self._watch.call(partial(self._answered, call), self._timeout_s, too_late)
            result = self._result(request, response)
            self._failures = 0
            return result
        except Exception:
            self._rest(began)
            raise
        finally:
            self._leave(token)

    def _call_several(
        self, request_id: str, rescue: Rescue, read: _Read, requests: Sequence[EngineRequest]
    ) -> list[EngineResult]:
        if len(requests) == 1:
            return [self._call(request_id, rescue, read, requests[0])]
        began = self._require_rested()
        token = object()
        self._enter(token, request_id, read, requests)
        waiting = []
        try:
            for number, request in enumerate(requests):  # an engine tells requests apart by their ids
                call = self._request(f"{request_id}-{number}" if number else request_id, request)
                waiting.append(self._threads.submit(self._answered, call))
            deadline = time.monotonic() + self._timeout_s
            answers = [answer.result(max(0.0, deadline - time.monotonic())) for answer in waiting]
            results = [self._result(*both) for both in zip(requests, answers, strict=True)]
            self._failures = 0
            return results
        except Exception as error:
            self._rest(began)
            for answer in waiting:
                answer.cancel()
            if isinstance(error, Timeout):
                raise self._too_late() from None
            raise
        finally:
            self._leave(token)

    def _require_rested(self) -> float:
        """The time; a call that begins now tries for all others if the last one failed."""
        with self._lock:
            now = time.monotonic()
            if self.resting:
                raise CallFailed(f"{self.name} is left alone for a while after a failure", "resting")
            if self._failures:
                self._trying_until = now + self._timeout_s
            return now

    def _rest(self, began: float) -> None:
        with self._lock:
            if self._failures and began <= self._failed_at:  # that failure is known
                return
            self._failed_at = time.monotonic()
            self._resting_until = self._failed_at + self._rest_s * 2 ** min(self._failures, _MAX_DOUBLINGS)
            self._trying_until = 0.0
            self._failures += 1

    def _too_late(self) -> CallFailed:
        return CallFailed(f"{self.name} did not answer within {self._timeout_s:g} s", "timeout")

    def _enter(self, token: object, request_id: str, read: _Read, requests: Sequence[EngineRequest]) -> None:
        """Wait for the turn of calls that draft or verify.

        Plain calls of many passes and those that read a long text take no turn, since all others would wait for them.
        """
        length = max(len(request.input_ids) for request in requests)
        unread, read.tokens = length - read.tokens, length
        one_pass = any(request.draft_tokens is not None or request.max_new_tokens == 1 for request in requests)
        if self._phases is not None and unread <= _LONG and (self._phase == DRAFT or one_pass):
            self._phases.enter(self._phase, token, request_id)

    def _leave(self, token: object) -> None:
        if self._phases is not None:
            self._phases.leave(token)

    def _request(self, request_id: str, request: EngineRequest) -> Any:
        outputs = ["output_ids", "sequence_length"]
        if request.return_generation_logits:
            outputs.append("generation_logits")
        if request.return_log_probs:
            outputs.append("output_log_probs")
        if request.return_perf_metrics:
            outputs += _KV_BLOCKS
        inputs = [pb_utils.Tensor(name, array) for name, array in self._inputs(request).items()]
        return pb_utils.InferenceRequest(
            model_name=self.name, request_id=request_id, inputs=inputs, requested_output_names=outputs
        )

    def _answered(self, call: Any) -> Any:
        try:
            response = call.exec()
        except pb_utils.TritonModelException as error:
            raise self._failed(str(error)) from None
        if response.has_error():
            raise self._failed(response.error().message())
        return response

    def _failed(self, message: str) -> CallFailed:
        missing = any(words in message for words in _MISSING)
        return CallFailed(f"{self.name}: {message}", "missing" if missing else "failed")

    def _inputs(self, request: EngineRequest) -> dict[str, np.ndarray]:
        """Tensors of the call, fitted to this model's vocabulary where draft and target pad theirs differently."""
        tensors = request_tensors(request)
        for name, missing in (("embedding_bias", 0.0), ("draft_logits", -np.inf)):
            if name in tensors:
                tensors[name] = _fitted(tensors[name], self._vocab_size, missing)
        if "draft_logits" in tensors:
            tensors["draft_logits"] = tensors["draft_logits"].astype(self._logits_dtype, copy=False)
        return tensors

    def _result(self, request: EngineRequest, response: Any) -> EngineResult:
        answer = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        ids = self._checked(answer, "output_ids", np.int32, 3)[0, 0]  # [>= length]
        length = int(self._checked(answer, "sequence_length", np.int32, 2)[0, 0])
        start = len(request.input_ids)
        if not start <= length <= len(ids) or ids[:start].tobytes() != request.input_ids.tobytes():
            raise EngineError(
                f"{self.name} answered {length} ids that do not begin with the {start} of its input; "
                "expected exclude_input_in_output false"
            )
        new = ids[start:length]
        values = new.tolist()  # few: plain Python is faster than numpy here
        if len(values) > request.max_new_tokens or (values and not 0 <= min(values) <= max(values) < self._num_ids):
            raise EngineError(
                f"{self.name} answered {values}; expected up to {request.max_new_tokens} ids "
                f"from 0 to {self._num_ids - 1}"
            )
        new = with_end_id(new, request)
        logits = log_probs = None
        if request.return_generation_logits:
            logits = self._checked(answer, "generation_logits", self._logits_dtype, 4)[0, 0]  # [n, V]
            if logits.shape[1] != self._vocab_size:
                raise EngineError(f"{self.name} answered logits of {logits.shape[1]} ids, not {self._vocab_size}")
            logits = logits[: len(new)].astype(np.float32, copy=False)
            new = new[: len(logits)]  # an engine may keep no row for the end id
        if request.return_log_probs:
            values = self._checked(answer, "output_log_probs", np.float32, 3)[0, 0]
            log_probs = np.zeros(len(new), dtype=np.float32)
            log_probs[: min(len(values), len(new))] = values[: len(new)]
        kv_blocks = NO_KV_BLOCKS
        if request.return_perf_metrics:
            kv_blocks = KvBlocks(*(int(answer[name].reshape(-1)[0]) for name in _KV_BLOCKS if name in answer))
        drafts = _NO_DRAFTS if request.draft_tokens is None else request.draft_tokens
        return EngineResult(
            output_ids=new,
            generation_logits=logits,
            log_probs=log_probs,
            num_draft_tokens=len(drafts),
            num_accepted=shared_length(new.tolist(), drafts.tolist()),
            kv_blocks=kv_blocks,
        )

    def _checked(self, answer: dict[str, np.ndarray], name: str, dtype: type, rank: int) -> np.ndarray:
        array = answer.get(name)
        if array is None:
            raise EngineError(f"{self.name} answered without {name}")
        if array.dtype != dtype or array.ndim != rank or 0 in array.shape[:-1] or array.shape[0] != 1:
            raise EngineError(
                f"{self.name} answered {name} as {array.dtype} {list(array.shape)}; "
                f"expected {np.dtype(dtype)} with {rank} dimensions, the first of them 1"
            )
        return array


def request_tensors(request: EngineRequest) -> dict[str, np.ndarray]:
    """The input tensors of an engine model for one request, with the batch dimension 1."""
    tensors = {
        "input_ids": request.input_ids[np.newaxis],
        "input_lengths": _scalar(len(request.input_ids), np.int32),
        "request_output_len": _scalar(request.max_new_tokens, np.int32),
    }
    if request.end_id is not None:
        tensors["end_id"] = _scalar(request.end_id, np.int32)
    if request.min_new_tokens:
        tensors["min_tokens"] = _scalar(request.min_new_tokens, np.int32)
    if request.stop_sequences:
        tensors["stop_words_list"] = word_list(request.stop_sequences)[np.newaxis]
    if request.bad_words:
        tensors["bad_words_list"] = word_list(request.bad_words)[np.newaxis]
    if request.embedding_bias is not None:
        tensors["embedding_bias"] = request.embedding_bias[np.newaxis]
    if request.draft_tokens is not None:
        tensors["draft_input_ids"] = request.draft_tokens[np.newaxis]
    if request.draft_logits is not None:
        tensors["draft_logits"] = request.draft_logits[np.newaxis]
    if request.return_generation_logits:
        tensors["return_generation_logits"] = _TRUE
    if request.return_log_probs:
        tensors["return_log_probs"] = _TRUE
    if request.return_perf_metrics:
        tensors["return_perf_metrics"] = _TRUE
    sampling = request.sampling
    if sampling.greedy:
        tensors["runtime_top_k"] = _GREEDY
    else:
        tensors["temperature"] = _scalar(sampling.temperature, np.float32)
        if sampling.top_k:
            tensors["runtime_top_k"] = _scalar(sampling.top_k, np.int32)
        # sent also when it is 1: with neither top_k nor top_p the engine is greedy, whatever the temperature
        tensors["runtime_top_p"] = _scalar(sampling.top_p, np.float32)
        tensors["seed"] = _scalar(sampling.seed, np.uint64)
    for name, off in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)):
        if (value := getattr(sampling, name)) != off:
            tensors[name] = _scalar(value, np.float32)
    return tensors


def with_end_id(new: np.ndarray, request: EngineRequest) -> np.ndarray:
    """`new` with the end id that ended it: engines leave it out of their answer, the decoding core wants to see it.

    Fewer tokens than asked for can mean three things: an end id, a stop sequence (which engines do answer), or, when
    drafts were verified, a rejection. After a rejection the last token is the target's own and never the draft's.
    """
    if request.end_id is None or len(new) == request.max_new_tokens or (len(new) and new[-1] == request.end_id):
        return new
    if any(tuple(new[-len(stop) :].tolist()) == stop for stop in request.stop_sequences):
        return new
    if request.draft_tokens is not None and shared_length(new.tolist(), request.draft_tokens.tolist()) < len(new):
        return new
    return np.append(new, np.int32(request.end_id))


def _fitted(array: np.ndarray, size: int, missing: float) -> np.ndarray:
    """`array` with `size` values in the last dimension: cut, or filled up with `missing`."""
    array = array[..., :size]
    gap = size - array.shape[-1]
    if gap:
        array = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, gap)], constant_values=missing)
    return np.ascontiguousarray(array)


def _scalar(value: float, dtype: type) -> np.ndarray:
    return np.array([[value]], dtype=dtype)
