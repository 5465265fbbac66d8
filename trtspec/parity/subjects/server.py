"""The text-to-text model of a running Triton server: our BLS, or anybody's with the tensor names of upstream.

Our BLS says which tokens it emitted and why it ended. Others send text alone: their answer is taken for the ids that
the tokenizer makes of prompt and text together, where that leaves no doubt, and what ended it is inferred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError
from trtspec.parity.subjects import Answer, Counts, Lost, Query, Unsupported

if TYPE_CHECKING:
    from trtspec.triton.client import Chunk, Client, ModelInfo

_MODELS = ("tensorrt_llm_bls", "ensemble")  # of upstream's repository, the one that speculates first
_CUT = "\ufffd"  # what a character that is cut off becomes


class Server:
    """A model that takes text and answers with text.

    Args:
        client: a connection to its server.
        timeout_s: longest time for one answer, in seconds.
        model: its name; None: the streaming and the unary BLS model of this project, or what the server has of
            upstream's.
        encode: a prompt to ids; needed where the server does not send ids.
        decode: ids to text; needed there too.

    Attributes:
        streams: whether it can answer block by block; if not, it answers in one piece whatever is asked.
    """

    name = "server"

    def __init__(
        self,
        client: Client,
        timeout_s: float = 600.0,
        *,
        model: str | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        from trtspec.triton.client import STREAMING_MODEL, UNARY_MODEL

        self._client = client
        self._timeout_s = timeout_s
        self._encode, self._decode = encode, decode
        found = model or _first_model(client)
        self._info = client.info(found)
        self._sends_ids = "output_ids" in self._info.outputs
        # Whoever sends no ids may send each time all text so far, or cut characters: ask for one piece.
        self.streams = self._info.decoupled and self._sends_ids
        has_unary = model is None and found == STREAMING_MODEL and _model_info(client, UNARY_MODEL) is not None
        self._unary_model = UNARY_MODEL if has_unary else found
        self._model = found

    def generate(self, query: Query) -> Answer:
        """See `Subject.generate`."""
        from trtspec.triton.client import ServerGone

        stream = query.stream and self.streams
        settings = self._settings(query)
        model = self._model if stream else self._unary_model
        try:
            chunks = list(
                self._client.generate(query.text, stream=stream, model=model, timeout_s=self._timeout_s, **settings)
            )
        except ServerGone as error:
            raise Lost(error.problem, where=error.where, fix=error.fix) from error
        if any(chunk.output_ids is None for chunk in chunks):
            return self._from_text(query, "".join(chunk.text for chunk in chunks), chunks)
        blocks = tuple(tuple(chunk.output_ids or ()) for chunk in chunks)
        pieces = tuple(chunk.text for chunk in chunks)
        num_tokens = sum(map(len, blocks))
        stats = chunks[-1].stats
        return Answer(
            blocks=blocks,
            text="".join(pieces),
            finish_reason=(stats and stats.finish_reason) or _finish_reason(num_tokens, query),
            pieces=pieces,
            counts=_counts(chunks),
            log_probs=_log_probs(chunks, num_tokens) if query.log_probs else None,
        )

    def _settings(self, query: Query) -> dict[str, Any]:
        """Keywords of `Client.generate`; only what differs from the server's own defaults."""
        sampling = query.sampling
        if query.logits:
            raise Unsupported(
                "the pipeline is not asked for generation logits here",
                where=self._client.url,
                fix="--subject engine-model asks the target's own model for them",
            )
        if sampling.min_p:
            raise Unsupported("the tensors of the server have no min_p", where=self._client.url)
        if query.end_ids is not None and len(query.end_ids) > 1:
            raise Unsupported(f"a request takes one end id, not {len(query.end_ids)}", where=self._client.url)
        settings: dict[str, Any] = {"max_tokens": query.max_tokens}
        if not sampling.greedy:
            settings |= {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k or None,
                "top_p": sampling.top_p,
                "seed": sampling.seed,
            }
        for name, off in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)):
            if (value := getattr(sampling, name)) != off:
                settings[name] = value
        if query.min_tokens:
            settings["min_tokens"] = query.min_tokens
        if query.stop:
            settings["stop"] = query.stop
        if query.bad_words:
            settings["bad_words"] = tuple(word.text for word in query.bad_words)
        if query.end_ids is not None:
            settings["end_id"] = query.end_ids[0] if query.end_ids else -1
        if query.log_probs:
            settings["log_probs"] = True
        if query.num_draft_tokens or "num_draft_tokens" in self._info.inputs:
            settings["num_draft_tokens"] = query.num_draft_tokens
        if not self._sends_ids:
            settings["exclude_input"] = self._excludes_input(query)
        tensors = {"stop": "stop_words", "log_probs": "return_log_probs", "exclude_input": "exclude_input_in_output"}
        for name, value in settings.items():
            if value is not None and tensors.get(name, name) not in self._info.inputs:
                raise Unsupported(
                    f"the model {self._model} has no input {tensors.get(name, name)}", where=self._client.url
                )
        return settings

    def _excludes_input(self, query: Query) -> bool | None:
        """What to say of the prompt to others: upstream's BLS loses its context if it excludes it while drafting."""
        if "exclude_input_in_output" not in self._info.inputs:
            return None
        return not query.num_draft_tokens

    def _from_text(self, query: Query, text: str, chunks: Sequence[Chunk]) -> Answer:
        """The answer of a server that sends no ids."""
        if self._encode is None or self._decode is None:
            raise TrtspecError(
                "the server does not send output_ids, and there is no tokenizer to make them of its text",
                where=self._client.url,
                fix="serve a repository written by this version: trtspec build CONFIG, then trtspec serve CONFIG",
            )
        if query.stop:
            raise Unsupported(
                "the server sends no output_ids, and where a stop word cut its text the ids cannot be told",
                where=self._client.url,
            )
        reason, possible = "", []
        for candidate in self._without_prompt(query, text):
            ids, reason = self._ids(query, candidate)
            if not reason:
                possible.append((candidate, ids))
        if not possible:
            raise Unsupported(
                f"the server sends no output_ids, and its text does not tell them: {reason}", where=self._client.url
            )
        if len(possible) > 1 and self._excludes_input(query):
            raise Unsupported(
                "the server sends no output_ids, and its text may begin with the prompt or repeat it",
                where=self._client.url,
            )
        text, ids = possible[0]
        return Answer(
            blocks=(ids,),
            text=text,
            finish_reason=_finish_reason(len(ids), query),
            pieces=(text,),
            log_probs=_log_probs(chunks, len(ids)) if query.log_probs else None,
        )

    def _without_prompt(self, query: Query, text: str) -> list[str]:
        """What the answer may be, the likeliest first: the text, or what follows the prompt in it."""
        assert self._decode is not None
        beginnings = (query.text, self._decode(list(query.ids)))  # without special tokens
        cut = [text.removeprefix(beginning) for beginning in beginnings if beginning and text.startswith(beginning)]
        return list(dict.fromkeys([text, *cut] if self._excludes_input(query) else [*cut, text]))

    def _ids(self, query: Query, text: str) -> tuple[tuple[int, ...], str]:
        """Ids of an answer, or why they cannot be told."""
        assert self._encode is not None and self._decode is not None
        if _CUT in text:
            return (), "it has a part of a character"
        ids, start = tuple(self._encode(query.text + text)), len(query.ids)
        if ids[:start] != query.ids:
            return (), "together with the prompt it has other tokens"
        new = ids[start:]
        if self._decode(list(new)) != text:
            return (), "its tokens have another text"
        if len(new) > query.max_tokens:
            return (), f"it has {len(new)} tokens, where max_tokens is {query.max_tokens}"
        return new, ""


def _first_model(client: Client) -> str:
    for name in _MODELS:
        if _model_info(client, name) is not None:
            return name
    raise TrtspecError(f"no model {' or '.join(_MODELS)}", where=client.url, fix="name the model to check")


def _model_info(client: Client, name: str) -> ModelInfo | None:
    """What a model's configuration says; None where there is no such model."""
    from trtspec.triton.client import ServerGone

    try:
        return client.info(name)
    except ServerGone as error:
        raise Lost(error.problem, where=error.where, fix=error.fix) from error
    except TrtspecError:
        return None


def _finish_reason(num_tokens: int, query: Query) -> str:
    return "length" if num_tokens >= query.max_tokens else "stop"


def _counts(chunks: Sequence[Chunk]) -> Counts:
    stats = chunks[-1].stats
    if stats is None or stats.finish_reason is None:  # upstream's count its last round only
        return Counts()
    if stats.tokens and not stats.target_passes:  # the engine drafts by itself, unseen
        return Counts(stats.input_tokens, stats.tokens)
    return Counts(stats.input_tokens, stats.tokens, stats.drafted, stats.accepted, stats.target_passes)


def _log_probs(chunks: Sequence[Chunk], num_tokens: int) -> tuple[float, ...]:
    values = tuple(value for chunk in chunks for value in chunk.log_probs or ())
    if len(values) != num_tokens:
        raise Unsupported(f"the server sends {len(values)} log probabilities for {num_tokens} tokens")
    return values
