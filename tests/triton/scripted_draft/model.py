"""Test double of a draft engine: what it does is the first letter of the prompt (after the BOS).

a: proposes nothing but `a`; w: the same, after 0.2 s; f: answers an error; h: sleeps for 8 s; s: answers a wrong
shape; d: a wrong dtype; n: an id outside the vocabulary; m: no sequence_length; z: no token at all.
"""

from __future__ import annotations

import time

import numpy as np
import triton_python_backend_utils as pb_utils

LETTERS = {ord(letter): letter for letter in "awfhsdnmz"}


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        # ids of the tiny tokenizer: printable ASCII stands in order, "!" is 0
        self.letters = {code - ord("!"): letter for code, letter in LETTERS.items()}

    def execute(self, requests: list) -> list:
        return [self.answer(request) for request in requests]

    def answer(self, request: object) -> object:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        ids = inputs["input_ids"].reshape(-1)
        num_new = int(inputs["request_output_len"].reshape(-1)[0])
        script = self.letters[int(ids[1])]
        if script == "f":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("broken on purpose"))
        if script in "wh":
            time.sleep(0.2 if script == "w" else 8.0)
        new = np.full(0 if script == "z" else num_new, ord("a") - ord("!"), dtype=np.int32)
        if script == "n":
            new[:] = 5000
        row = np.concatenate([ids, new]).astype(np.int64 if script == "d" else np.int32)
        output_ids = row[np.newaxis] if script == "s" else row[np.newaxis, np.newaxis]
        outputs = [pb_utils.Tensor("output_ids", output_ids)]
        if script != "m":
            outputs.append(pb_utils.Tensor("sequence_length", np.array([[len(row)]], dtype=np.int32)))
        return pb_utils.InferenceResponse(outputs)
