"""The `postprocessing` model: token ids back to text, for clients of the ensemble and of the engine.

Knows Triton's Python backend and the tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .tensors import Refused
from .tokenization import Tokenization


class TritonPythonModel:
    """One process of the model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer that lies beside this file."""
        parameters = {k: v["string_value"] for k, v in json.loads(args["model_config"])["parameters"].items()}
        skip = parameters["skip_special_tokens"] == "true"
        self._tokenization = Tokenization(Path(__file__).with_name("tokenizer.json"), skip_special_tokens=skip)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request, or the complaint about it."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            texts = self._texts(tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"])
        except Refused as error:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"postprocessing: {error}", pb_utils.TritonError.INVALID_ARG)
            )
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array(texts, dtype=np.object_))])

    def _texts(self, tokens: np.ndarray, lengths: np.ndarray) -> list[bytes]:
        """Texts `[rows * beams]` of tokens int32 `[rows, beams, len]` with lengths int32 `[rows, beams]`."""
        if tokens.ndim != 3 or lengths.shape != tokens.shape[:2]:
            raise Refused(
                f"TOKENS_BATCH has shape {list(tokens.shape)}, SEQUENCE_LENGTH {list(lengths.shape)}; "
                "expected [rows, beams, len] and [rows, beams]"
            )
        if ((lengths < 0) | (lengths > tokens.shape[2])).any():
            raise Refused(f"SEQUENCE_LENGTH holds {lengths.tolist()} for {tokens.shape[2]} tokens")
        rows = zip(tokens.reshape(-1, tokens.shape[2]).tolist(), lengths.reshape(-1).tolist(), strict=True)
        texts = []
        for ids, length in rows:
            if any(token < 0 for token in ids[:length]):
                raise Refused("TOKENS_BATCH holds a negative id within SEQUENCE_LENGTH")
            texts.append(self._tokenization.decode(ids[:length]).encode("utf-8"))
        return texts
