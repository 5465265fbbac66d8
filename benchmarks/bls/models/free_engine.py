"""An engine model that costs nothing, in place of draft and target: what is left of a cycle's time is the pipeline's.

Answers every call at once, with one id over and over, so that every draft is accepted; generation logits, if they are
asked for, are the same array each time. Its parameters: `vocab_size` and `token`.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

MAX_ROWS = 16


class TritonPythonModel:
    """The model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Prepare the answers."""
        parameters = json.loads(args["model_config"])["parameters"]
        vocab_size, self._token = (int(parameters[key]["string_value"]) for key in ("vocab_size", "token"))
        self._logits = np.zeros((1, 1, MAX_ROWS, vocab_size), dtype=np.float32)
        self._logits[..., self._token] = 20.0

    def execute(self, requests: list[Any]) -> list[Any]:
        """An answer to each request; the requests that came together count as one batch."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        ids, num_new = inputs["input_ids"][0], int(inputs["request_output_len"].item())
        output_ids = np.concatenate([ids, np.full(num_new, self._token, dtype=np.int32)])
        outputs = [
            pb_utils.Tensor("output_ids", output_ids[np.newaxis, np.newaxis]),
            pb_utils.Tensor("sequence_length", np.array([[len(output_ids)]], dtype=np.int32)),
        ]
        if "generation_logits" in request.requested_output_names():
            outputs.append(pb_utils.Tensor("generation_logits", self._logits[:, :, :num_new]))
        return pb_utils.InferenceResponse(outputs)
