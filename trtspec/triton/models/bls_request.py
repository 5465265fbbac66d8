"""What a client asks of the BLS model: its tensors as a decoding request, or the reason why not.

Knows the names of the pipeline's inputs and what this pipeline cannot honour. Knows nothing of Triton's API.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from trtspec_decoding.draft_length import DraftLength
from trtspec_decoding.methods import IN_ENGINE, METHODS, Method, Setting
from trtspec_decoding.request import Request
from trtspec_decoding.sampling import request_sampling

from .tensors import Inputs, Refused, embedding_bias
from .tokenization import Tokenization

_NOT_SUPPORTED = {
    "decoder-only models take no separate decoder input": ("decoder_text_input",),
    "this pipeline takes text only": (
        "image_input",
        "image_bytes_input",
        "image_url_input",
        "image_sizes_input",
        "video_bytes_input",
    ),
    "prompt tuning cannot be combined with this pipeline": (
        "prompt_embedding_table",
        "prompt_vocab_size",
        "prompt_table_extra_id",
    ),
    "the engines have no LoRA weights": ("lora_task_id", "lora_weights", "lora_config"),
    "drafts are not constrained by a grammar": ("guided_decoding_guide_type", "guided_decoding_guide"),
    "the prompt's logits are not kept while drafts are verified; ask the engine model": ("return_context_logits",),
}

_MAX_LOGITS_BYTES = 256 << 20  # of one text: they are kept until its end, and go through shared memory


@dataclass(frozen=True)
class EngineSettings:
    """One engine model of this server."""

    name: str
    vocab_size: int
    context: int  # tokens that it can hold
    returns_logits: bool


@dataclass(frozen=True)
class Settings:
    """Defaults and limits of the pipeline, from the parameters in config.pbtxt."""

    method: str  # `none`, a key of METHODS, or one of IN_ENGINE
    drafting: dict[str, Setting]  # the method's own settings
    engines: dict[str, EngineSettings]  # by role: target, and what the method needs
    logits_dtype: str  # FP32 or FP16
    greedy_only: bool  # the engine ignores temperature, top_k and top_p
    acceptance: str
    num_draft_tokens: int
    max_draft_len: int
    draft_length: DraftLength
    max_input_len: int
    end_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool
    skip_special_tokens: bool
    exclude_input: bool
    max_concurrency: int
    max_queued: int
    alternate_phases: bool
    pad_id: int
    plain_chunk_tokens: int
    call_timeout_s: float
    draft_timeout_s: float
    draft_rest_s: float

    @property
    def vocab_size(self) -> int:
        """Ids of the target are below it."""
        return self.engines["target"].vocab_size

    @property
    def proposer(self) -> EngineSettings | None:
        """The engine that proposes to the target; None where no engine does."""
        roles = METHODS[self.method].engines if self.method in METHODS else ()
        return self.engines[roles[0]] if roles else None

    @classmethod
    def parse(cls, parameters: Mapping[str, str]) -> Settings:
        """Read the parameters.

        Raises:
            ValueError: one is missing, malformed or not supported; the message names it.
        """
        for name in ("accumulate_tokens", "multimodal_encoders_name"):
            if parameters.get(name, "false").lower() not in ("", "false"):
                raise ValueError(f"parameter {name} is {parameters[name]!r}; expected it unset")
        try:
            method = parameters["method"]
            if method not in METHODS and method not in ("none", *IN_ENGINE):
                known = ", ".join(("none", *METHODS, *IN_ENGINE))
                raise ValueError(f"parameter method is {method!r}; expected one of {known}")
            if parameters["logits_dtype"] not in ("FP32", "FP16"):
                raise ValueError(f"parameter logits_dtype is {parameters['logits_dtype']!r}; expected FP32 or FP16")
            row = METHODS.get(method)
            return cls(
                method=method,
                drafting=_drafting(method, row, parameters) if row else {},
                engines={role: _engine(role, parameters) for role in ("target", *_roles(row, parameters))},
                logits_dtype=parameters["logits_dtype"],
                greedy_only=parameters["greedy_only"] == "true",
                acceptance=parameters["acceptance"],
                num_draft_tokens=int(parameters["num_draft_tokens"]),
                max_draft_len=int(parameters["max_draft_len"]),
                draft_length=DraftLength.parse(
                    parameters, int(parameters["max_draft_len"]), whole=bool(row and row.trees)
                ),
                max_input_len=int(parameters["max_input_len"]),
                end_ids=tuple(int(token) for token in parameters["end_ids"].split(",") if token),
                bos_token_id=_optional_int(parameters.get("bos_token_id")),
                add_bos=parameters["add_bos"] == "true",
                skip_special_tokens=parameters["skip_special_tokens"] == "true",
                exclude_input=parameters["exclude_input_in_output"] == "true",
                max_concurrency=int(parameters["max_concurrency"]),
                max_queued=int(parameters["max_queued"]),
                alternate_phases=parameters["alternate_phases"] == "true",
                pad_id=int(parameters["pad_id"]),
                plain_chunk_tokens=int(parameters["plain_chunk_tokens"]),
                call_timeout_s=float(parameters["call_timeout_s"]),
                draft_timeout_s=float(parameters["draft_timeout_s"]),
                draft_rest_s=float(parameters["draft_rest_s"]),
            )
        except KeyError as error:
            raise ValueError(f"parameter {error.args[0]} is missing from config.pbtxt") from None


def _drafting(name: str, method: Method, parameters: Mapping[str, str]) -> dict[str, Setting]:
    """The method's own settings; one that is missing is left to the drafter."""
    prefix = f"{name}_"
    try:
        return method.read(
            {key.removeprefix(prefix): text for key, text in parameters.items() if key.startswith(prefix)}
        )
    except ValueError as error:
        raise ValueError(f"parameter {prefix}{error}") from None


def _roles(row: Method | None, parameters: Mapping[str, str]) -> tuple[str, ...]:
    """The engines beside the target: those that the method needs, and further ones that the parameters name."""
    named = {role for role in row.further if f"tensorrt_llm_{role}_model_name" in parameters} if row else ()
    return row.roles(named) if row else ()


def _engine(role: str, parameters: Mapping[str, str]) -> EngineSettings:
    """The engine model of a role; for the target the parameters have the names of upstream."""
    target = role == "target"
    return EngineSettings(
        name=parameters["tensorrt_llm_model_name" if target else f"tensorrt_llm_{role}_model_name"],
        vocab_size=int(parameters["vocab_size" if target else f"{role}_vocab_size"]),
        context=int(parameters[f"{role}_max_seq_len"]),
        returns_logits=not target and parameters[f"{role}_returns_logits"] == "true",
    )


@dataclass(frozen=True)
class ClientRequest:
    """One text of a request, understood: what to decode, and how to answer."""

    decoding: Request
    prompt: str
    stream: bool
    exclude_input: bool
    acceptance: str
    length_is_given: bool  # the client said how much to draft: no policy may change it
    vocab_size: int
    logits_dtype: type
    num_texts: int
    notes: tuple[str, ...]
    request_id: str = ""  # the client's


def read_requests(inputs: Inputs, settings: Settings, tokenization: Tokenization) -> list[ClientRequest]:
    """Translate the tensors of one request: a text for each row.

    Raises:
        ValueError: something is missing, out of range or not supported; the message names the tensor, and the row if
            there are several.
    """
    texts = inputs.array("text_input")
    num_texts = 1 if texts is None or texts.ndim < 2 else len(texts)
    if texts is not None and texts.size != num_texts:
        raise Refused(f"text_input has shape {list(texts.shape)}; expected one text a row")
    if num_texts == 1:
        return [read_request(inputs, settings, tokenization)]
    clients = []
    for row in range(num_texts):
        try:
            clients.append(
                replace(read_request(inputs.row(row, num_texts), settings, tokenization), num_texts=num_texts)
            )
        except ValueError as error:
            raise Refused(f"text {row}: {error}") from None
    if len({client.stream for client in clients}) > 1:
        raise Refused("stream is true for some of the texts; expected the same for all of them")
    return clients


def read_request(inputs: Inputs, settings: Settings, tokenization: Tokenization) -> ClientRequest:
    """Translate the tensors of one request.

    Raises:
        ValueError: something is missing, out of range or not supported; the message names the tensor.
    """
    _refuse_unsupported(inputs)
    prompt = inputs.text("text_input")
    if not prompt:
        raise Refused("text_input is empty; expected some text")
    if len(prompt) > settings.max_input_len * tokenization.longest_token:
        raise Refused(f"text_input has {len(prompt)} characters; expected at most {settings.max_input_len} tokens")
    prompt_ids = tokenization.encode(prompt)
    if not 1 <= len(prompt_ids) <= settings.max_input_len:
        raise Refused(f"text_input has {len(prompt_ids)} tokens; expected 1 to {settings.max_input_len}")
    max_tokens = inputs.integer("max_tokens", minimum=1)
    if max_tokens is None:
        raise Refused("max_tokens is missing; expected 1 or more")
    return_logits = inputs.flag("return_generation_logits")
    size = max_tokens * settings.vocab_size * 4
    if return_logits and size > _MAX_LOGITS_BYTES:
        raise Refused(
            f"return_generation_logits for {max_tokens} tokens takes {size >> 20} MiB; expected at most "
            f"{_MAX_LOGITS_BYTES >> 20} MiB: {_MAX_LOGITS_BYTES // 4 // settings.vocab_size} tokens"
        )
    seed = inputs.integer("seed")
    sampling, notes = request_sampling(
        temperature=inputs.number("temperature"),
        top_k=inputs.integer("top_k"),
        top_p=inputs.number("top_p"),
        repetition_penalty=inputs.number("repetition_penalty"),
        presence_penalty=inputs.number("presence_penalty"),
        frequency_penalty=inputs.number("frequency_penalty"),
        seed=seed,
    )
    if seed is None:
        sampling = sampling.seeded(secrets.randbits(64))  # every answer is a new draw
    if settings.greedy_only and not sampling.greedy:
        raise Refused(
            f"the request samples (temperature {sampling.temperature:g}); the engine's own drafting "
            f"({settings.method}) decodes greedily, expected temperature 0 or top_k 1"
        )
    biased = inputs.weighted_words("embedding_bias_words", "embedding_bias_weights")
    decoding = Request(
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        max_tokens=max_tokens,
        min_tokens=inputs.integer("min_tokens", 0, minimum=0),
        sampling=sampling,
        end_ids=_end_ids(inputs, settings),
        stop_strings=tuple(inputs.words("stop_words")),
        bad_words=tuple(tuple(tokenization.encode_word(word)) for word in inputs.words("bad_words")),
        embedding_bias=embedding_bias(
            [(tokenization.encode_word(word), weight) for word, weight in biased], settings.vocab_size
        ),
        num_draft_tokens=_num_draft_tokens(inputs, settings),
        target_context=settings.engines["target"].context,
        draft_context=settings.proposer.context if settings.proposer else None,
        plain_chunk_tokens=settings.plain_chunk_tokens,
        return_log_probs=inputs.flag("return_log_probs"),
        return_generation_logits=return_logits,
        return_perf_metrics=inputs.flag("return_perf_metrics"),
    )
    return ClientRequest(
        decoding=decoding,
        prompt=prompt,
        stream=inputs.flag("stream"),
        exclude_input=inputs.flag("exclude_input_in_output", settings.exclude_input),
        acceptance=_acceptance(inputs, settings),
        length_is_given="num_draft_tokens" in inputs,
        vocab_size=settings.vocab_size,
        logits_dtype=np.float16 if settings.logits_dtype == "FP16" else np.float32,
        num_texts=1,
        notes=notes,
    )


def _refuse_unsupported(inputs: Inputs) -> None:
    for reason, names in _NOT_SUPPORTED.items():
        inputs.refuse(names, reason)
    for name in ("beam_width", "num_return_sequences"):
        count = inputs.integer(name, 1)
        if count != 1:
            raise Refused(f"{name} is {count}; speculation gives one sequence, expected 1")
    pad_id = inputs.integer("pad_id", 0)
    if pad_id is not None and pad_id < 0:
        raise Refused(f"pad_id is {pad_id}; expected 0 or more")


def _end_ids(inputs: Inputs, settings: Settings) -> tuple[int, ...]:
    """The client's own end id in place of the model's; -1 means that nothing ends the text but its length."""
    end_id = inputs.integer("end_id", minimum=-1)
    if end_id is None:
        return settings.end_ids
    if end_id >= settings.vocab_size:
        raise Refused(f"end_id is {end_id}; expected an id below {settings.vocab_size}")
    return () if end_id == -1 else (end_id,)


def _num_draft_tokens(inputs: Inputs, settings: Settings) -> int:
    wanted = inputs.integer("num_draft_tokens", settings.num_draft_tokens, minimum=0) or 0
    if wanted and settings.method in IN_ENGINE:
        raise Refused(f"num_draft_tokens is {wanted}; the engine drafts by itself ({settings.method}), expected 0")
    if wanted and settings.method == "none":
        raise Refused(f"num_draft_tokens is {wanted}; nothing drafts here, expected 0")
    if wanted > settings.max_draft_len:
        raise Refused(f"num_draft_tokens is {wanted}; the target engine verifies at most {settings.max_draft_len}")
    return wanted


def _acceptance(inputs: Inputs, settings: Settings) -> str:
    if "use_draft_logits" not in inputs:
        wanted = settings.acceptance
    else:
        wanted = "logits" if inputs.flag("use_draft_logits") else "tokens"
    proposer = settings.proposer
    if wanted == "logits" and settings.method in METHODS and METHODS[settings.method].trees:
        raise Refused("use_draft_logits is true; the paths of a tree are accepted by equality, expected false")
    if wanted != "logits" or (proposer and proposer.returns_logits):
        return wanted
    reason = f"{proposer.name} cannot return generation logits" if proposer else f"method {settings.method} has none"
    raise Refused(f"use_draft_logits is true; {reason}, expected false")


def _optional_int(text: str | None) -> int | None:
    return None if text is None else int(text)
