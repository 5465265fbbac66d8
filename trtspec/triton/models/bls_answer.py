"""What a client of the BLS model is answered: new text with its ids, and at the end counters of the whole generation.

`Answer` makes the tensors of one text, `Reply` the responses to one request, which may carry several texts. Knows
Triton's responses; not how the text comes about.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from trtspec_decoding.cycle import Block

from .bls_request import ClientRequest
from .threads import Outbox

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_RAGGED = {"output_ids": -1, "output_log_probs": -1, "generation_logits": -2}  # the axis that grows with the text
_TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
_DTYPES: Mapping[str, type] = {  # of the totals; the others are int32
    "acceptance_rate": np.float32,
    "finish_reason": np.object_,
    **dict.fromkeys(_TIMES, np.int64),
}

Tensors = dict[str, np.ndarray]


class Answer:
    """The tensors of one text.

    Args:
        client: what was asked.
        index: which text of the request it is.
        arrival_ns: when the request came.
        wanted: names of the outputs that were asked for; no others are made.
        counts_passes: False where the engine drafts by itself: it makes several tokens a pass, unseen here.
    """

    def __init__(
        self, client: ClientRequest, index: int, arrival_ns: int, wanted: Collection[str], counts_passes: bool
    ) -> None:
        self.index = index
        self._client = client
        self._arrival_ns = arrival_ns
        self._wanted = frozenset(wanted)
        self._counts_passes = counts_passes
        self._scheduled_ns = time.time_ns()
        self._first_ns = 0
        # A stream never has the prompt, as with TensorRT-LLM, whose clients count on it.
        self._prefix = "" if client.exclude_input or client.stream else client.prompt
        self._cum_log_prob = 0.0

    def tensors(self, blocks: Sequence[Block]) -> Tensors:
        """Those of `blocks`, the new ones since the last time; with the last of all, the totals."""
        self._first_ns = self._first_ns or time.time_ns()
        asked, last = self._client.decoding, blocks[-1]
        text = self._prefix + "".join(block.text for block in blocks)
        self._prefix = ""
        tensors = {
            "text_output": np.array([text.encode("utf-8")], dtype=np.object_),  # [1], as clients of upstream read it
            "output_ids": np.array([[token for block in blocks for token in block.token_ids]], dtype=np.int32),
        }
        if self._client.num_texts > 1:
            tensors["batch_index"] = np.array([[self.index]], dtype=np.int32)
        if asked.return_log_probs:
            log_probs = [value for block in blocks for value in block.log_probs or ()]
            self._cum_log_prob += sum(log_probs)
            tensors["output_log_probs"] = np.array([[log_probs]], dtype=np.float32)
            tensors["cum_log_probs"] = np.array([[self._cum_log_prob]], dtype=np.float32)
        if asked.return_generation_logits:
            rows = [block.logits for block in blocks if block.logits is not None]
            logits = np.concatenate(rows) if rows else np.zeros((0, self._client.vocab_size), dtype=np.float32)
            tensors["generation_logits"] = logits[np.newaxis, np.newaxis].astype(self._client.logits_dtype, copy=False)
        # Every tensor costs some 30 us a response, so what only matters in the end is sent in the end. But clients of
        # the upstream repository read the metrics that they ask for from every response.
        if last.finish_reason is None and not asked.return_perf_metrics:
            return tensors
        totals = self._totals(last)
        return tensors | {
            name: np.array([[value]], dtype=_DTYPES.get(name, np.int32))
            for name, value in totals.items()
            if name in self._wanted
        }

    def _totals(self, last: Block) -> dict[str, Any]:
        generation, acceptance = last.generation, last.generation.acceptance
        totals = {
            "batch_index": self.index,
            "sequence_index": 0,
            "num_input_tokens": len(self._client.decoding.prompt_ids),
            "num_output_tokens": generation.num_generated,
            "acceptance_rate": acceptance.rate,
            "total_accepted_draft_tokens": acceptance.num_accepted,
            "total_draft_tokens": acceptance.num_drafted,
            "total_target_passes": acceptance.num_target_passes if self._counts_passes else 0,
        }
        if last.finish_reason is not None:
            totals["finish_reason"] = last.finish_reason.encode("utf-8")
        if self._client.decoding.return_perf_metrics:
            blocks = generation.kv_blocks
            totals |= {
                "kv_cache_alloc_new_blocks": blocks.allocated,
                "kv_cache_reused_blocks": blocks.reused,
                "kv_cache_alloc_total_blocks": blocks.total,
                "arrival_time_ns": self._arrival_ns,
                "first_scheduled_time_ns": self._scheduled_ns,
                "first_token_time_ns": self._first_ns,
                "last_token_time_ns": time.time_ns(),
            }
        return totals


class Reply:
    """The responses to one request; whatever happens, exactly one of them is the final one.

    A stream gets those of each text as they come, as a model that is not decoupled does not: it gets one response with
    all texts, one a row; rows are filled up with `pad_id` and zeros, and `num_output_tokens` says how long they are.
    May be used by several threads.

    Args:
        sender: Triton's.
        outbox: where its responses go through.
        wanted: names of the outputs that were asked for.
        num_texts: of the request.
        streams: whether there is more than one response.
        pad_id: fills up rows of ids.
        ending: called before the final response, with the reason why the last text ended, or `error`.
    """

    def __init__(
        self,
        sender: Any,
        outbox: Outbox,
        wanted: Sequence[str],
        num_texts: int,
        streams: bool,
        pad_id: int,
        ending: Callable[[str], None],
    ) -> None:
        self._sender = sender
        self._outbox = outbox
        self._wanted = frozenset(wanted)
        self._streams = streams
        self._pad_id = pad_id
        self._ending = ending
        self._lock = threading.Lock()
        self._rows: list[Tensors | None] = [None] * num_texts
        self._num_open = num_texts
        self.ended = False
        self._closed = False

    def add(self, index: int, tensors: Tensors, finish_reason: str | None) -> None:
        """More of one text, with its finish reason if it is the last; without a stream there is only the last."""
        with self._lock:
            if self.ended:
                return
            if not self._streams:
                self._rows[index] = tensors
            if finish_reason is not None:
                self._num_open -= 1
                self.ended = not self._num_open
            reason = finish_reason if self.ended else None
            if self._streams:
                self._outbox.put(partial(self._send, tensors, reason))
            elif self.ended:
                rows = [row for row in self._rows if row is not None]
                whole = rows[0] if len(rows) == 1 else _stacked(rows, self._pad_id)
                self._outbox.put(partial(self._send, whole, reason))

    def fail(self, message: str, code: Any) -> None:
        """End with an error, unless it has ended."""
        with self._lock:
            if self.ended:
                return
            self.ended = True
            self._outbox.put(partial(self._send, {}, "error", pb_utils.TritonError(message, code)))

    def _send(self, tensors: Mapping[str, np.ndarray], finish_reason: str | None, error: Any = None) -> None:
        """One response; the final one has a finish reason. After one that cannot be sent there is an error at most."""
        if self._closed:
            return
        try:
            made = [pb_utils.Tensor(name, array) for name, array in tensors.items() if name in self._wanted]
            response = pb_utils.InferenceResponse(error=error) if error else pb_utils.InferenceResponse(made)
            self._respond(response, finish_reason)
        except Exception as problem:
            pb_utils.Logger.log_error(f"a response could not be sent: {problem!r}")
            self.ended = True
            error = pb_utils.TritonError("internal error: a response could not be sent", pb_utils.TritonError.INTERNAL)
            with suppress(Exception):
                self._respond(pb_utils.InferenceResponse(error=error), "error")

    def _respond(self, response: Any, finish_reason: str | None) -> None:
        if finish_reason is not None and not self._closed:
            self._closed = True
            self._ending(finish_reason)
        self._sender.send(response, flags=_FINAL if finish_reason is not None else 0)


def _stacked(rows: Sequence[Tensors], pad_id: int) -> Tensors:
    """One row for each text."""
    stacked = {}
    for name in rows[0]:
        arrays = [row[name] for row in rows]
        if (axis := _RAGGED.get(name)) is not None:
            length = max(array.shape[axis] for array in arrays)
            arrays = [_filled_up(array, axis, length, pad_id if name == "output_ids" else 0) for array in arrays]
        stacked[name] = np.concatenate(arrays)
    return stacked


def _filled_up(array: np.ndarray, axis: int, length: int, value: int) -> np.ndarray:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, length - array.shape[axis])
    return np.pad(array, widths, constant_values=value)
