"""Text to token ids and back for the models of the repository, from one tokenizer.json.

Needs the `tokenizers` package only; knows no Triton. A copy lies beside every model that handles text, so that
preprocessing, postprocessing and the BLS model agree on every id.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer


class Tokenization:
    """One tokenizer.

    Args:
        path: a tokenizer.json.
        bos_token_id: the id that may stand once, and once only, at the start of a prompt; None if the model has none.
        add_bos: put it there also when tokenizer.json does not say so.
        skip_special_tokens: leave special tokens out of decoded text.
    """

    def __init__(
        self,
        path: Path,
        *,
        bos_token_id: int | None = None,
        add_bos: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._bos = bos_token_id
        self._add_bos = add_bos
        self._skip_special_tokens = skip_special_tokens
        self.longest_token = max(len(token) for token in self._tokenizer.get_vocab())  # in characters

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with one BOS where the model wants one, also when the text already starts with it."""
        ids: list[int] = self._tokenizer.encode(text).ids
        if self._bos is None:
            return ids
        num_bos = next((i for i, token in enumerate(ids) if token != self._bos), len(ids))
        return [self._bos, *ids[num_bos:]] if num_bos or self._add_bos else ids

    def encode_word(self, word: str) -> list[int]:
        """Ids of a stop, bad or biased word: never a BOS in it."""
        ids: list[int] = self._tokenizer.encode(word, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; bytes that are no UTF-8 yet come out as U+FFFD."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        """Id of a token by its spelling in the vocabulary."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id
