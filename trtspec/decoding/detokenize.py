"""Token ids to text, piece by piece, without ever splitting or losing a character.

Takes the tokenizer as a function `decode(ids) -> str`; knows no tokenizer library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"
_CONTEXT = 8  # tokens decoded again with every piece, so that spaces between pieces come out right


def continuation_ids(token_to_id: Callable[[str], int | None]) -> tuple[int, ...]:
    """Ids of the tokens for the bytes 0x80 and 0xBF, if the vocabulary spells bytes as tokens.

    Args:
        token_to_id: looks a token's spelling up; None when there is none.
    """
    for spellings in (("<0x80>", "<0xBF>"), ("\u0122", "\u00bf")):  # SentencePiece byte fallback; byte-level BPE
        ids = tuple(token_to_id(spelling) for spelling in spellings)
        if None not in ids:
            return ids  # type: ignore[return-value]
    return ()


class Detokenizer:
    """Decodes a stream of tokens; the deltas joined are what `decode` makes of all tokens at once.

    A character whose bytes are spread over tokens is held back until it is whole; bytes that can no longer become a
    character come out as U+FFFD at once when `continuation_ids` are known, and with the next other text when not.

    Args:
        decode: all ids to text, undecodable bytes as U+FFFD.
        continuation_ids: tokens of the bytes 0x80 and 0xBF, see `continuation_ids`.
    """

    def __init__(self, decode: Callable[[list[int]], str], continuation_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._continuation_ids = tuple(continuation_ids)
        self._window: list[int] = []  # recent tokens, the first of them only for context
        self._sent = 0  # characters of the window's text that were passed on

    def push(self, ids: Iterable[int]) -> str:
        """Take the next tokens; returns the text that is certain now."""
        self._window.extend(ids)
        text = self._decode(self._window)
        certain = self._certain(text)
        delta = text[self._sent : certain]
        self._sent = max(self._sent, certain)
        self._shorten(text)
        return delta

    def flush(self) -> str:
        """The rest, at the end of the stream: U+FFFD for a character that was never completed."""
        rest = self._decode(self._window)[self._sent :]
        self._window, self._sent = [], 0
        return REPLACEMENT if rest and self._continuation_ids else rest

    def _certain(self, text: str) -> int:
        """Length of the beginning of `text` that no further token can change."""
        if not text.endswith(REPLACEMENT):
            return len(text)
        if not self._continuation_ids:
            return len(text.rstrip(REPLACEMENT))
        # A begun character is completed by at most three continuation bytes, and one of 0x80 and 0xBF fits any first
        # byte. What stays the same after all of these is certain.
        futures = [
            self._decode(self._window + [token] * count) for token in self._continuation_ids for count in (1, 2, 3)
        ]
        return min(shared_length(text, future) for future in futures)

    def _shorten(self, text: str) -> None:
        if len(self._window) <= 2 * _CONTEXT or self._sent < len(text):
            return
        context = self._window[-_CONTEXT:]
        context_text = self._decode(context)
        if context_text and text.endswith(context_text):  # else the cut is inside a character: try after the next token
            self._window, self._sent = context, len(context_text)


def shared_length(a: Sequence[object], b: Sequence[object]) -> int:
    """How far two texts, or two rows of ids, are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
