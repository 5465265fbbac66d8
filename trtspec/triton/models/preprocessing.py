"""The `preprocessing` model: a prompt and its word lists as token ids, for clients of the ensemble and of the engine.

Knows Triton's Python backend and the tokenizer. Images, video and encoder text are refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .tensors import Inputs, Refused, embedding_bias, word_list
from .tokenization import Tokenization

_REFUSED = ("DECODER_QUERY", "IMAGE_BYTES", "IMAGE_URL", "IMAGE_SIZES", "VIDEO_BYTES", "PROMPT_TABLE_EXTRA_ID")


class TritonPythonModel:
    """One process of the model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer that lies beside this file."""
        parameters = {k: v["string_value"] for k, v in json.loads(args["model_config"])["parameters"].items()}
        self._tokenization = Tokenization(
            Path(__file__).with_name("tokenizer.json"),
            bos_token_id=int(parameters["bos_token_id"]) if "bos_token_id" in parameters else None,
            add_bos=parameters["add_bos"] == "true",
        )
        self._end_id = int(parameters["end_id"])
        self._pad_id = int(parameters["pad_id"])
        self._vocab_size = int(parameters["vocab_size"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request, or the complaint about it."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            outputs = self._outputs(Inputs({tensor.name(): tensor.as_numpy() for tensor in request.inputs()}))
        except Refused as error:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"preprocessing: {error}", pb_utils.TritonError.INVALID_ARG)
            )
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array[np.newaxis]) for name, array in outputs.items() if name in wanted]
        )

    def _outputs(self, inputs: Inputs) -> dict[str, np.ndarray]:
        """The tensors of one request, without the batch dimension."""
        inputs.refuse(_REFUSED, "this pipeline takes text for a decoder-only model")
        text = inputs.text("QUERY")
        encode_word = self._tokenization.encode_word
        biased = inputs.weighted_words("EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS")
        bias = embedding_bias([(encode_word(word), weight) for word, weight in biased], self._vocab_size)
        ids = self._tokenization.encode(text or "")
        if not ids:
            raise Refused("QUERY is empty; expected some text")
        return {
            "INPUT_ID": np.array(ids, dtype=np.int32),
            "REQUEST_INPUT_LEN": np.array([len(ids)], dtype=np.int32),
            "DECODER_INPUT_ID": np.array([self._pad_id], dtype=np.int32),
            "REQUEST_DECODER_INPUT_LEN": np.array([1], dtype=np.int32),
            "BAD_WORDS_IDS": word_list([encode_word(word) for word in inputs.words("BAD_WORDS_DICT")]),
            "STOP_WORDS_IDS": word_list([encode_word(word) for word in inputs.words("STOP_WORDS_DICT")]),
            "EMBEDDING_BIAS": np.zeros(0, dtype=np.float32) if bias is None else bias,
            "REQUEST_OUTPUT_LEN": np.array([inputs.integer("REQUEST_OUTPUT_LEN", minimum=1)], dtype=np.int32),
            "OUT_END_ID": np.array([inputs.integer("END_ID", self._end_id)], dtype=np.int32),
            "OUT_PAD_ID": np.array([inputs.integer("PAD_ID", self._pad_id)], dtype=np.int32),
            "OUT_PROMPT_TABLE_EXTRA_IDS": np.zeros(0, dtype=np.uint64),
        }
