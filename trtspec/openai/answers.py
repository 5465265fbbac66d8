"""Chunks of the pipeline as the objects that OpenAI's clients read, whole or in pieces.

Knows the shapes of the two kinds of answers; neither HTTP nor gRPC.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from trtspec.errors import TrtspecError
from trtspec.openai.requests import Job
from trtspec.openai.tokens import Offsets, Tokens
from trtspec.triton.client import Chunk, GenerationStats


class Answer:
    """One answer under way: what its choices have been sent so far, and their figures in the end.

    Args:
        model: name that the client used.
        job: what was asked.
        tokens: the pipeline's tokenizer.
    """

    object = ""
    object_of_piece = ""
    id_prefix = ""

    def __init__(self, model: str, job: Job, tokens: Tokens) -> None:
        self._job = job
        self._tokens = tokens
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._stats: list[GenerationStats | None] = [None] * len(job.inputs)

    def whole(self, chunks: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        """The answer in one object, from all chunks of every choice."""
        choices = []
        for index, of_choice in enumerate(chunks):
            merged = Chunk(
                "".join(chunk.text for chunk in of_choice),
                [token for chunk in of_choice for token in chunk.output_ids or ()],
                of_choice[-1].stats,
                [value for chunk in of_choice for value in chunk.log_probs or ()],
            )
            choices.append(self._choice(index, merged))
        return self._head | {"object": self.object, "choices": choices, "usage": self.usage}

    def pieces(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Choices of the objects that a stream sends for the next chunk of one choice; none where it has no news."""
        if not chunk.text and chunk.stats is None and not (self._job.log_probs and chunk.output_ids):
            return []
        return [self._choice(index, chunk)]

    def piece(self, choices: list[dict[str, Any]], **usage: Any) -> dict[str, Any]:
        """An object of a stream; with the key `usage` where that is wanted, null in all but the last."""
        return self._head | {"object": self.object_of_piece, "choices": choices, **usage}

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of all finished choices; a prompt counts once, however many choices it has."""
        stats = [each for each in self._stats if each is not None]
        first_of_prompts = self._stats[:: len(self._stats) // self._job.num_prompts]
        prompt = sum(each.input_tokens or 0 for each in first_of_prompts if each is not None)
        generated = sum(each.tokens for each in stats)
        accepted = sum(each.accepted for each in stats)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(each.drafted for each in stats) - accepted,
            },
        }

    def _choice(self, index: int, chunk: Chunk) -> dict[str, Any]:
        if chunk.stats is not None:
            self._stats[index] = chunk.stats
            if chunk.stats.finish_reason == "cancelled":
                raise TrtspecError("the server cancelled the answer")
        if self._job.log_probs and len(chunk.log_probs or ()) != len(chunk.output_ids or ()):
            raise TrtspecError("the server did not score the tokens")
        scores = self._scores(index, chunk) if self._job.log_probs else None
        reason = None if chunk.stats is None else chunk.stats.finish_reason or "stop"
        return {"index": index, **self._text(index, chunk), "logprobs": scores, "finish_reason": reason}

    def _text(self, index: int, chunk: Chunk) -> dict[str, Any]:
        raise NotImplementedError

    def _scores(self, index: int, chunk: Chunk) -> dict[str, Any]:
        raise NotImplementedError


class CompletionAnswer(Answer):
    """Of /v1/completions."""

    object = object_of_piece = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, model: str, job: Job, tokens: Tokens) -> None:
        super().__init__(model, job, tokens)
        self._echoes = list(job.echoes)
        self._offsets = [Offsets(tokens, 0) for _ in job.inputs]

    def _text(self, index: int, chunk: Chunk) -> dict[str, Any]:
        echo, self._echoes[index] = self._echoes[index], ""
        return {"text": echo + chunk.text}

    def _scores(self, index: int, chunk: Chunk) -> dict[str, Any]:
        ids, log_probs = chunk.output_ids or [], chunk.log_probs or []
        texts = [_text_or_bytes(self._tokens.bytes_of(token_id)) for token_id in ids]
        likeliest = [{text: value} for text, value in zip(texts, log_probs, strict=True)]
        return {
            "tokens": texts,
            "token_logprobs": log_probs,
            "top_logprobs": likeliest if self._job.likeliest else None,
            "text_offset": [self._offsets[index].of(token_id) for token_id in ids],
        }


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    object = "chat.completion"
    object_of_piece = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, model: str, job: Job, tokens: Tokens) -> None:
        super().__init__(model, job, tokens)
        self._begun: set[int] = set()

    def pieces(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        opening = []
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", "content": ""}
            opening.append({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        pieces = super().pieces(index, chunk)
        for piece in pieces:
            del piece["message"]
            piece["delta"] = {"content": chunk.text} if chunk.text else {}
        return opening + pieces

    def _text(self, index: int, chunk: Chunk) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": chunk.text, "refusal": None}}

    def _scores(self, index: int, chunk: Chunk) -> dict[str, Any]:
        return {
            "content": [
                score | {"top_logprobs": [score] if self._job.likeliest else []}
                for score in map(self._score, chunk.output_ids or (), chunk.log_probs or ())
            ],
            "refusal": None,
        }

    def _score(self, token_id: int, log_prob: float) -> dict[str, Any]:
        as_bytes = self._tokens.bytes_of(token_id)
        return {"token": as_bytes.decode("utf-8", "replace"), "logprob": log_prob, "bytes": list(as_bytes)}


def _text_or_bytes(token: bytes) -> str:
    """A token's text; of one that is no UTF-8 by itself the bytes, spelled as OpenAI does."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
