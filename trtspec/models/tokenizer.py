"""Tokenizers of the `tokenizers` library from a GGUF file's fields, and chat templates.

Does not know models or weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that are matched as a whole
_DIGITS_THEN_BYTES = ("smollm", "default-digits")
_BYTES = ("gpt-2", "default")


def gguf_tokenizer(fields: Mapping[str, Any], where: str) -> Tokenizer:
    """Rebuild the byte-level BPE tokenizer that a GGUF file describes.

    Raises:
        TrtspecError: a tokenizer model or pre-tokenizer other than byte-level BPE, or missing fields.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _DIGITS_THEN_BYTES + _BYTES:
        raise TrtspecError(
            f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported",
            where=where,
            expected=f"gpt2 with one of {', '.join(_DIGITS_THEN_BYTES + _BYTES)}",
            fix="use the model's Hugging Face directory instead",
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _DIGITS_THEN_BYTES:
        byte_level = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _CONTROL
    ]
    tokenizer.add_special_tokens(special)
    extra = [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    tokenizer.add_tokens(extra)
    return tokenizer


def render_chat(
    template: str | None, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True, **variables: Any
) -> str:
    """The prompt text of a conversation, by the model's own chat template (jinja2, sandboxed).

    Args:
        template: the template's text.
        messages: `{"role": ..., "content": ...}` in order.
        add_generation_prompt: end with the header of the assistant's answer.
        variables: further names the template uses, such as `bos_token`.

    Raises:
        TrtspecError: no template, or the template refuses the conversation.
    """
    import jinja2

    if template is None:
        raise TrtspecError("the model has no chat template", fix="send plain text instead of messages")
    try:
        return _compiled(template).render(
            messages=list(messages), add_generation_prompt=add_generation_prompt, **variables
        )
    except jinja2.TemplateError as error:
        raise TrtspecError(f"the chat template refuses the conversation: {error}") from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    # trim_blocks and lstrip_blocks: published templates are written for these two settings
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template)
