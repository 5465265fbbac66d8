"""The least that a cycle can cost: a call to the draft and a call to the target, with the pipeline's tensors.

A request asks for a number of cycles, of draft tokens, and of ids of context; the answer is the time of all of them.
Nothing is looked at or checked. With `stream` there is a response a cycle, of the size of a block's.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_BLOCK = np.zeros((1, 8), dtype=np.float32)


class TritonPythonModel:
    """The model; each request has a thread, as in the pipeline."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the threads."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._token = int(parameters["token"]["string_value"])
        self._threads = ThreadPoolExecutor(16)

    def execute(self, requests: list[Any]) -> None:
        """Hand each request to a thread."""
        for request in requests:
            self._threads.submit(self._serve, request, request.get_response_sender())

    def finalize(self) -> None:
        """Finish what is under way."""
        self._threads.shutdown()

    def _serve(self, request: Any, sender: Any) -> None:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        cycles, num_drafts, context = (int(inputs[name].item()) for name in ("cycles", "num_draft_tokens", "context"))
        with_logits, stream = (bool(inputs[name].item()) for name in ("with_logits", "stream"))
        begin = time.perf_counter()
        for _ in range(cycles):
            self._cycle(num_drafts, context, with_logits)
            if stream:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("seconds", _BLOCK)]))
        seconds = np.array([[time.perf_counter() - begin]], dtype=np.float32)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("seconds", seconds)]), flags=_FINAL)

    def _cycle(self, num_drafts: int, context: int, with_logits: bool) -> None:
        ids = np.full((1, context), self._token, dtype=np.int32)
        drafts = np.full((1, num_drafts), self._token, dtype=np.int32)
        outputs = ["output_ids", "sequence_length"]
        more = []
        if with_logits:
            answer = _call("tensorrt_llm_draft", ids, num_drafts, [*outputs, "generation_logits"])
            logits = next(tensor for tensor in answer.output_tensors() if tensor.name() == "generation_logits")
            more = [pb_utils.Tensor("draft_logits", logits.as_numpy()[0])]
        else:
            _call("tensorrt_llm_draft", ids, num_drafts, outputs)
        _call("tensorrt_llm", ids, num_drafts + 1, outputs, pb_utils.Tensor("draft_input_ids", drafts), *more)


def _call(model: str, ids: np.ndarray, num_new: int, outputs: list[str], *more: Any) -> Any:
    inputs = [
        pb_utils.Tensor("input_ids", ids),
        pb_utils.Tensor("input_lengths", np.array([[ids.shape[1]]], dtype=np.int32)),
        pb_utils.Tensor("request_output_len", np.array([[num_new]], dtype=np.int32)),
        pb_utils.Tensor("runtime_top_k", np.ones((1, 1), dtype=np.int32)),
        *more,
    ]
    request = pb_utils.InferenceRequest(
        model_name=model, inputs=inputs, requested_output_names=outputs, request_id="bare"
    )
    response = request.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return response
