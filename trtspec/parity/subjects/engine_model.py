"""An engine model of a Triton server, asked without the pipeline around it: ids in, ids out.

The same tensors whether the C++ backend serves it or the stand-in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trtspec.decoding.detokenize import Detokenizer
from trtspec.errors import TrtspecError
from trtspec.parity.subjects import Answer, Counts, Lost, Query, Unsupported
from trtspec.triton.models.tensors import word_list

if TYPE_CHECKING:
    from trtspec.triton.client import Client

Tensors = dict[str, NDArray[Any]]

_ASKED = (  # of every model that knows it
    "exclude_input_in_output",
    "return_perf_metrics",
    "return_num_input_tokens",
    "return_num_output_tokens",
)


class EngineModel:
    """A model with the tensors of `tensorrt_llm`. It drafts by itself or not at all: no query may ask for drafts.

    Args:
        client: a connection to its server.
        end_ids: ids that end an answer.
        decode: ids to text.
        continuation_ids: see `trtspec.decoding.detokenize.continuation_ids`.
        model: its name.
        timeout_s: longest time for one answer, in seconds.

    Attributes:
        streams: whether it can answer block by block; if not, it answers in one piece whatever is asked.
    """

    name = "engine-model"

    def __init__(
        self,
        client: Client,
        *,
        end_ids: Sequence[int],
        decode: Callable[[list[int]], str],
        continuation_ids: Sequence[int] = (),
        model: str = "tensorrt_llm",
        timeout_s: float = 600.0,
    ) -> None:
        from trtspec.triton.client import ServerGone

        self._client = client
        self._end_ids = tuple(end_ids)
        self._decode = decode
        self._continuation_ids = tuple(continuation_ids)
        self._model = model
        self._timeout_s = timeout_s
        try:
            self._info = client.info(model)
        except ServerGone as error:
            raise Lost(error.problem, where=error.where, fix=error.fix) from error
        self.streams = self._info.decoupled

    def generate(self, query: Query) -> Answer:
        """See `Subject.generate`."""
        from trtspec.triton.client import ServerGone

        end_ids = self._end_ids if query.end_ids is None else query.end_ids
        # Rows of logits come whole in one answer only.
        stream = query.stream and self.streams and not query.logits
        tensors = self._tensors(query, end_ids, stream)
        wanted = ["output_ids", "sequence_length"]
        wanted += ["generation_logits"] if query.logits else []
        wanted += ["output_log_probs"] if query.log_probs else []
        figures = ("num_input_tokens", "num_output_tokens", "total_draft_tokens", "total_accepted_draft_tokens")
        wanted += [name for name in figures if name in self._info.outputs]
        try:
            responses = list(self._client.infer(self._model, tensors, wanted, self._timeout_s))
        except ServerGone as error:
            raise Lost(error.problem, where=error.where, fix=error.fix) from error
        if not responses:
            raise TrtspecError(f"{self._model} answered nothing", where=self._client.url)
        skip = 0 if "exclude_input_in_output" in tensors else len(query.ids)
        blocks: list[tuple[int, ...]] = []
        for response in responses:
            blocks.append(self._new_ids(response, query.ids[:skip]))
            skip = 0  # later responses hold new ids only
        if blocks[-1][-1:] and blocks[-1][-1] in end_ids:  # some engines show it
            blocks[-1] = blocks[-1][:-1]
        num_tokens = sum(map(len, blocks))
        pieces = self._pieces(blocks)
        return Answer(
            blocks=tuple(blocks),
            text="".join(pieces),
            finish_reason="length" if num_tokens >= query.max_tokens else "stop",
            pieces=pieces,
            counts=_counts(responses[-1]),
            logits=self._rows(responses, num_tokens) if query.logits else None,
            log_probs=self._log_probs(responses, num_tokens) if query.log_probs else None,
        )

    def _tensors(self, query: Query, end_ids: Sequence[int], stream: bool) -> Tensors:
        """The request, batch dimension in front."""
        sampling = query.sampling
        if query.num_draft_tokens:
            raise Unsupported(
                f"num_draft_tokens is {query.num_draft_tokens}; an engine model asked directly is given no drafts"
            )
        if query.stop:
            raise Unsupported("an engine model stops at ids, not at text")
        if sampling.min_p:
            raise Unsupported("the tensors of an engine model have no min_p")
        if query.min_tokens and len(end_ids) > 1:
            raise Unsupported(f"min_tokens holds back one end id, not {len(end_ids)}")
        tensors: Tensors = {
            "input_ids": np.array([query.ids], dtype=np.int32),
            "input_lengths": _one(len(query.ids), np.int32),
            "request_output_len": _one(query.max_tokens, np.int32),
        }
        if end_ids:
            tensors |= {"end_id": _one(end_ids[0], np.int32), "pad_id": _one(end_ids[0], np.int32)}
        if len(end_ids) > 1:
            tensors["stop_words_list"] = word_list([(token,) for token in end_ids[1:]])[np.newaxis]
        if query.bad_words:
            tensors["bad_words_list"] = word_list([word.ids for word in query.bad_words])[np.newaxis]
        if sampling.greedy:
            tensors["runtime_top_k"] = _one(1, np.int32)
        else:
            tensors["temperature"] = _one(sampling.temperature, np.float32)
            if sampling.top_k:
                tensors["runtime_top_k"] = _one(sampling.top_k, np.int32)
            # With neither top_k nor top_p the engine is greedy, whatever the temperature.
            tensors["runtime_top_p"] = _one(sampling.top_p, np.float32)
            tensors["seed"] = _one(sampling.seed, np.uint64)
        for name, off in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)):
            if (value := getattr(sampling, name)) != off:
                tensors[name] = _one(value, np.float32)
        if query.min_tokens:
            tensors["min_tokens"] = _one(query.min_tokens, np.int32)
        flags = {"streaming": stream, "return_generation_logits": query.logits, "return_log_probs": query.log_probs}
        tensors |= {name: _one(True, np.bool_) for name, given in flags.items() if given}
        for name in tensors:
            if name not in self._info.inputs:
                raise Unsupported(f"the model {self._model} has no input {name}")
        return tensors | {name: _one(True, np.bool_) for name in _ASKED if name in self._info.inputs}

    def _new_ids(self, response: Tensors, prompt: Sequence[int]) -> tuple[int, ...]:
        """The new ids of one response, which begins with `prompt`."""
        ids, length = self._tensor(response, "output_ids"), self._tensor(response, "sequence_length")
        if ids.ndim != 3 or ids.shape[:2] != (1, 1) or length.size != 1 or not 0 <= int(length.flat[0]) <= ids.shape[2]:
            raise TrtspecError(
                f"{self._model} answered output_ids {list(ids.shape)} and sequence_length {length.tolist()}",
                where=self._client.url,
                expected="one sequence of ids, as long as the other says",
            )
        answered: tuple[int, ...] = tuple(ids[0, 0, : int(length.flat[0])].tolist())
        if answered[: len(prompt)] != tuple(prompt):
            raise TrtspecError(
                f"the answer of {self._model} does not begin with the ids of its input", where=self._client.url
            )
        return answered[len(prompt) :]

    def _rows(self, responses: Sequence[Tensors], num_tokens: int) -> NDArray[np.float32]:
        """float32 `[n, vocab]`; no more than one row for each new token, as an end id may have one too."""
        rows = [self._tensor(response, "generation_logits") for response in responses]
        if any(array.ndim != 4 or array.shape[:2] != (1, 1) for array in rows):
            shapes = ", ".join(str(list(array.shape)) for array in rows)
            raise TrtspecError(
                f"{self._model} answered generation_logits {shapes}",
                where=self._client.url,
                expected="[1, 1, tokens, vocabulary]",
            )
        logits: NDArray[np.float32] = np.concatenate([array[0, 0] for array in rows]).astype(np.float32)
        if num_tokens and logits.shape[0] == 1 and logits.shape[1] == 1:  # what an engine without them answers
            raise Unsupported(
                f"the engine of {self._model} was built without generation logits",
                fix="build it with engine.gather_generation_logits: true",
            )
        return logits[:num_tokens]

    def _log_probs(self, responses: Sequence[Tensors], num_tokens: int) -> tuple[float, ...]:
        values = [self._tensor(response, "output_log_probs").ravel() for response in responses]
        return tuple(float(value) for value in np.concatenate(values)[:num_tokens])

    def _tensor(self, response: Tensors, name: str) -> NDArray[Any]:
        if name not in response:
            raise TrtspecError(f"{self._model} answered without {name}", where=self._client.url)
        return response[name]

    def _pieces(self, blocks: Sequence[Sequence[int]]) -> tuple[str, ...]:
        text = Detokenizer(self._decode, self._continuation_ids)
        pieces = [text.push(block) for block in blocks]
        pieces[-1] += text.flush()
        return tuple(pieces)


def _counts(last: Tensors) -> Counts:
    """What the last response says; zeros stand for what it does not know."""

    def figure(name: str) -> int | None:
        value = last.get(name)
        return int(value.flat[0]) if value is not None and value.size and value.flat[0] else None

    drafted = figure("total_draft_tokens")
    return Counts(
        input_tokens=figure("num_input_tokens"),
        output_tokens=figure("num_output_tokens"),
        drafted=drafted,
        accepted=None if drafted is None else figure("total_accepted_draft_tokens") or 0,
    )


def _one(value: float, dtype: Any) -> NDArray[Any]:
    return np.array([[value]], dtype=dtype)
