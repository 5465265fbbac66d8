"""What OpenAI's clients may ask, and the same as inputs of the BLS model.

Fields are honoured, or refused by name, or have no part in the answer (who asks, how it is billed). Knows OpenAI's
fields and defaults and the model's tensors; neither HTTP nor gRPC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trtspec.errors import TrtspecError
from trtspec.models.tokenizer import render_chat
from trtspec.openai.errors import ApiError, refused
from trtspec.openai.tokens import Tokens
from trtspec.triton.client import ModelInfo

MAX_CHOICES = 128
MAX_STOPS = 4
COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat's answer may fill the context
_INT32_MAX = 2**31 - 1

_WITHOUT_EFFECT = frozenset(
    {"user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata"}  # nothing is stored
)
# Field -> the values that ask for nothing (as null does), and why others are refused.
_ALWAYS: tuple[Any, ...] = ()
_TEXT_ONLY = "the pipeline takes and gives text only"
_NO_TOOLS = "the pipeline calls no tools"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": (_ALWAYS, _TEXT_ONLY),
    "modalities": ((["text"],), _TEXT_ONLY),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),
    "web_search_options": (_ALWAYS, _NO_TOOLS),
    "prediction": (_ALWAYS, "the pipeline drafts by itself"),
    "reasoning_effort": (("none",), "the model has no such setting"),
    "verbosity": (("medium",), "the model has no such setting"),
    "response_format": (({"type": "text"},), "drafts are not constrained by a grammar; expected type text"),
    "service_tier": (("auto", "default"), "all requests are served alike"),
    "store": ((False,), "answers are not stored"),
    "suffix": (("",), "the pipeline only continues a text"),
}

NotNegative = Annotated[int, Field(ge=0, le=_INT32_MAX)]
AtLeastOne = Annotated[int, Field(ge=1, le=_INT32_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


class StreamOptions(_Model):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Common(_Model):
    model: str
    max_tokens: AtLeastOne | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Not OpenAI's: what the pipeline can do beyond.
    top_k: NotNegative | None = None
    min_tokens: NotNegative | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    num_draft_tokens: NotNegative | None = None
    ignore_eos: bool | None = None


class CompletionRequest(_Common):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: AtLeastOne | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None


class Message(_Model):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]]
    name: str | None = None


class ChatRequest(_Common):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


@dataclass(frozen=True)
class Job:
    """A request as the pipeline takes it.

    Attributes:
        inputs: tensors of each choice, in the order of their indices.
        num_prompts: prompts; each has the same number of choices, one prompt's after another's.
        echoes: text before the answer, a choice.
        log_probs: scores of the tokens are wanted.
        likeliest: and of the likeliest token at every position, which is the chosen one.
    """

    inputs: list[dict[str, Any]]
    num_prompts: int
    echoes: list[str]
    log_probs: bool
    likeliest: bool


def completion_job(body: CompletionRequest, info: ModelInfo, tokens: Tokens) -> Job:
    """The job of a completion.

    Raises:
        ApiError: a field cannot be honoured.
    """
    _refuse_extras(body)
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise refused("best_of", f"{body.best_of}; the pipeline gives every answer it draws, expected n ({n})")
    if body.echo and body.logprobs is not None:
        raise refused("echo", "true with logprobs; the prompt's tokens are not scored, expected one of the two")
    prompts = _prompts(body.prompt, tokens)
    return _job(
        body,
        info,
        tokens,
        prompts=prompts,
        echo=bool(body.echo),
        max_tokens=body.max_tokens or COMPLETION_TOKENS,
        log_probs=body.logprobs is not None,
        num_likeliest=body.logprobs or 0,
        likeliest_param="logprobs",
    )


def chat_job(body: ChatRequest, info: ModelInfo, tokens: Tokens) -> Job:
    """The job of a chat completion.

    Raises:
        ApiError: a field cannot be honoured, or the model's chat template refuses the conversation.
    """
    _refuse_extras(body)
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise refused("max_tokens", f"{body.max_tokens}, while max_completion_tokens is {body.max_completion_tokens}")
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", "given without logprobs; expected logprobs true")
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
    try:
        prompt = render_chat(info.chat_template, messages, True, **info.special_tokens)
    except TrtspecError as error:
        raise ApiError(str(error), param="messages") from error
    context = int(info.parameters.get("target_max_seq_len", _INT32_MAX))
    return _job(
        body,
        info,
        tokens,
        prompts=[prompt],
        echo=False,
        max_tokens=body.max_completion_tokens or body.max_tokens or context,
        log_probs=bool(body.logprobs),
        num_likeliest=body.top_logprobs or 0,
        likeliest_param="top_logprobs",
    )


def _job(
    body: _Common,
    info: ModelInfo,
    tokens: Tokens,
    *,
    prompts: list[str],
    echo: bool,
    max_tokens: int,
    log_probs: bool,
    num_likeliest: int,
    likeliest_param: str,
) -> Job:
    n = body.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise refused("n", f"{n} for {len(prompts)} prompts; expected at most {MAX_CHOICES} answers together")
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "given without stream; expected stream true")
    if body.min_tokens and body.min_tokens > max_tokens:
        raise refused("min_tokens", f"{body.min_tokens}; expected at most max_tokens ({max_tokens})")
    sampling = _sampling(body, info)
    if num_likeliest > 1 or (num_likeliest and sampling["temperature"]):
        raise refused(
            likeliest_param,
            f"{num_likeliest}; the pipeline scores the chosen token only, expected 0, or 1 with temperature 0",
        )
    words = [(tokens.word(_token_id(key)), bias) for key, bias in (body.logit_bias or {}).items()]
    common = sampling | {
        "max_tokens": max_tokens,
        "min_tokens": body.min_tokens,
        "stop_words": _stops(body.stop) or None,
        "embedding_bias_words": [word for word, _ in words] or None,
        "embedding_bias_weights": [bias for _, bias in words] or None,
        "end_id": -1 if body.ignore_eos else None,
        "num_draft_tokens": body.num_draft_tokens,
        "return_log_probs": log_probs or None,
        "stream": bool(body.stream),
        "exclude_input_in_output": True,
    }
    seeds = [None if body.seed is None else (body.seed + i) % 2**64 for i in range(n)]
    return Job(
        inputs=[common | {"text_input": prompt, "seed": seed} for prompt in prompts for seed in seeds],
        num_prompts=len(prompts),
        echoes=[prompt if echo else "" for prompt in prompts for _ in seeds],
        log_probs=log_probs,
        likeliest=num_likeliest == 1,
    )


def _sampling(body: _Common, info: ModelInfo) -> dict[str, Any]:
    """The tensors that decide how a token is chosen. OpenAI samples unless told otherwise; the pipeline does not."""
    greedy_only = info.parameters.get("greedy_only") == "true"
    temperature = body.temperature
    if temperature is None:
        temperature = 0.0 if greedy_only and body.top_p in (None, 1) else 1.0
    if body.top_p == 0:  # nothing but the likeliest token; to the pipeline 0 is off
        temperature = 0.0
    return {
        "temperature": temperature,
        "top_p": None if temperature == 0 else body.top_p or 1.0,
        "top_k": body.top_k,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
    }


def _stops(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise refused("stop", f"{len(stops)} texts; expected at most {MAX_STOPS}")
    if "" in stops:
        raise refused("stop", "an empty text; expected at least one character")
    return stops


def _token_id(key: str) -> int:
    if not key.isdecimal():
        raise refused("logit_bias", f"{key!r} is no token id")
    return int(key)


def _prompts(prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], tokens: Tokens) -> list[str]:
    """The prompts as text, one or several of them."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt or [] in prompt:
        raise refused("prompt", "empty; expected some text")
    if isinstance(prompt[0], int):
        return [tokens.prompt(prompt)]  # type: ignore[arg-type]  # pydantic saw to it: all are of one kind
    return [each if isinstance(each, str) else tokens.prompt(each) for each in prompt]  # type: ignore[arg-type]


def _message(message: Message, where: str) -> dict[str, str]:
    """One turn as chat templates know it: text, and `system` for OpenAI's newer name of it."""
    for name, value in (message.model_extra or {}).items():
        if value not in (None, [], ""):
            raise refused(f"{where}.{name}", _TEXT_ONLY)
    content = message.content
    if not isinstance(content, str):
        content = "".join(_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    turn = {"role": "system" if message.role == "developer" else message.role, "content": content}
    return turn if message.name is None else turn | {"name": message.name}


def _text(part: dict[str, Any], where: str) -> str:
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise refused(where, f"type {part.get('type')!r}; {_TEXT_ONLY}")
    text: str = part["text"]
    return text


def _refuse_extras(body: _Common) -> None:
    """Refuse what is not honoured, and what nobody knows."""
    for name, value in (body.model_extra or {}).items():
        if name in _REFUSED:
            neutral, reason = _REFUSED[name]
            if value is not None and value not in neutral:
                raise refused(name, reason)
        elif name not in _WITHOUT_EFFECT:
            raise ApiError(f"Unrecognized request argument supplied: {name}", param=name)
    options = body.stream_options
    if options is not None:
        for name in options.model_extra or {}:
            raise ApiError(f"Unrecognized request argument supplied: {name}", param=f"stream_options.{name}")
        if options.include_obfuscation:
            raise refused("stream_options.include_obfuscation", "true; streams are sent as they come, expected false")
