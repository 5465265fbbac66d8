"""Token ids that cross the API: prompts given as ids, biased ids, and the text of single tokens beside their scores.

The pipeline takes and gives text. What is sent as ids is turned into text here only where the pipeline will make the
same ids of it again.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trtspec.openai.errors import refused
from trtspec.triton.models.tokenization import Tokenization

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"  # how vocabularies without a byte alphabet spell a space


class Tokens:
    """The tokenizer of the pipeline.

    Args:
        path: its tokenizer.json.
        parameters: of the BLS model: what it does about a BOS.
    """

    def __init__(self, path: Path, parameters: Mapping[str, str]) -> None:
        bos = parameters.get("bos_token_id")
        self._pipeline = Tokenization(
            path,
            bos_token_id=None if bos is None else int(bos),
            add_bos=parameters.get("add_bos") == "true",
            skip_special_tokens=False,
        )
        tokenizer = Tokenizer.from_file(str(path))
        self._spelling = tokenizer.id_to_token
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._alphabet = _byte_alphabet() if _is_byte_level(json.loads(tokenizer.to_str())["decoder"]) else None
        self.num_ids = tokenizer.get_vocab_size()

    def prompt(self, ids: Sequence[int]) -> str:
        """The text that the pipeline makes these ids of.

        Raises:
            ApiError: there is none.
        """
        self._require_known("prompt", ids)
        text = self._pipeline.decode(ids)
        if self._pipeline.encode(text) != list(ids):
            raise refused("prompt", "the tokenizer would make other ids of the text of these; send the prompt as text")
        return text

    def word(self, token_id: int) -> str:
        """The text that the pipeline makes this one id of, for a bias.

        Raises:
            ApiError: there is none.
        """
        self._require_known("logit_bias", [token_id])
        word = self._added.get(token_id) or self._pipeline.decode([token_id])
        if self._pipeline.encode_word(word) != [token_id]:
            raise refused("logit_bias", f"token {token_id} has no text of its own, by which the pipeline biases")
        return word

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for; of a special token its spelling."""
        spelling: str = self._added.get(token_id) or self._spelling(token_id) or ""
        if token_id in self._added:
            return spelling.encode()
        if self._alphabet is not None:
            return bytes(self._alphabet[letter] for letter in spelling)
        byte = _BYTE_TOKEN.fullmatch(spelling)
        return bytes([int(byte[1], 16)]) if byte else spelling.replace(_SPACE, " ").encode()

    def is_special(self, token_id: int) -> bool:
        """Whether it is left out of the text."""
        return token_id in self._special

    def _require_known(self, param: str, ids: Sequence[int]) -> None:
        unknown = next((token_id for token_id in ids if not 0 <= token_id < self.num_ids), None)
        if unknown is not None:
            raise refused(param, f"there is no token {unknown}; expected 0 to {self.num_ids - 1}")


class Offsets:
    """Where the tokens of one answer begin in its text, in characters."""

    def __init__(self, tokens: Tokens, begin: int) -> None:
        self._tokens = tokens
        self._next = begin
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def of(self, token_id: int) -> int:
        """The offset of the next token; of one that goes on with a character, that character's."""
        if self._tokens.is_special(token_id):
            return self._next
        token = self._tokens.bytes_of(token_id)
        if not 0x80 <= token[0] < 0xC0:  # does not go on with a character: one that is open stays broken
            self._next += len(self._decoder.decode(b"", final=True))
        begin = self._next
        self._next += len(self._decoder.decode(token))
        return begin


def _is_byte_level(decoder: Any) -> bool:
    """Whether a tokenizer's decoder spells bytes with the alphabet of GPT-2."""
    if not decoder:
        return False
    return decoder["type"] == "ByteLevel" or any(_is_byte_level(part) for part in decoder.get("decoders", ()))


def _byte_alphabet() -> dict[str, int]:
    """Letter -> byte: printable bytes stand for themselves, the others for the code points from 256 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
