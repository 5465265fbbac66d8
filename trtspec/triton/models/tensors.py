"""Reading and checking the tensors of a request, and the two-row format of word lists.

numpy only: knows neither Triton nor decoding. Everything a client sends goes through `Inputs`, which names the tensor
in every complaint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

MAX_WORDS = 1024  # stop, bad or biased words of one request; each costs time on every token
MAX_WORDS_BYTES = 64 << 10  # all of them together


class Refused(ValueError):
    """A request that cannot be honoured; the message names the tensor and what would be right."""


class Inputs:
    """The input tensors of one request by name, as numpy arrays of any shape that holds the right number of values.

    Scalars come as `[1]`, `[1, 1]` or `[]`, lists as `[n]` or `[1, n]`, depending on client and reshape.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def array(self, name: str) -> np.ndarray | None:
        """The tensor as it came, or None."""
        return self._arrays.get(name)

    def row(self, index: int, num_rows: int) -> Inputs:
        """The inputs of one of several rows that came together.

        Raises:
            Refused: a tensor with another number of rows.
        """
        for name, array in self._arrays.items():
            if not array.ndim or len(array) != num_rows:
                raise Refused(f"{name} has shape {list(array.shape)}; expected {num_rows} rows")
        return Inputs({name: array[index : index + 1] for name, array in self._arrays.items()})

    def integer(self, name: str, default: int | None = None, minimum: int | None = None) -> int | None:
        """One whole number."""
        value = self._scalar(name)
        if value is None:
            return default
        number = int(value)
        if minimum is not None and number < minimum:
            raise Refused(f"{name} is {number}; expected {minimum} or more")
        return number

    def number(self, name: str, default: float | None = None) -> float | None:
        """One finite number."""
        value = self._scalar(name)
        if value is None:
            return default
        if not math.isfinite(value):
            raise Refused(f"{name} is {float(value)}; expected a finite number")
        return float(str(value))  # the shortest decimal that is this float32: 0.7, not 0.699999988

    def flag(self, name: str, default: bool = False) -> bool:
        """One truth value."""
        value = self._scalar(name)
        return default if value is None else bool(value)

    def text(self, name: str) -> str | None:
        """One UTF-8 string."""
        value = self._scalar(name)
        return None if value is None else _decoded(name, value)

    def words(self, name: str) -> list[str]:
        """UTF-8 strings; empty ones, which some clients send for 'none', are left out."""
        return [word for word in self._texts(name) if word]

    def weighted_words(self, words_name: str, weights_name: str) -> list[tuple[str, float]]:
        """UTF-8 strings, each with its finite number; empty strings are left out together with theirs."""
        words, weights = self._texts(words_name), self._arrays.get(weights_name)
        if not any(words):
            return []
        numbers = [] if weights is None else weights.reshape(-1).tolist()
        if len(numbers) != len(words):
            raise Refused(f"{weights_name} has {len(numbers)} values for {len(words)} {words_name}")
        if not all(math.isfinite(number) for number in numbers):
            raise Refused(f"{weights_name} holds a value that is not finite")
        return [(word, number) for word, number in zip(words, numbers, strict=True) if word]

    def _texts(self, name: str) -> list[str]:
        array = self._arrays.get(name)
        if array is None:
            return []
        if array.size > MAX_WORDS:
            raise Refused(f"{name} has {array.size} entries; expected at most {MAX_WORDS}")
        values = array.reshape(-1).tolist()
        if (size := sum(len(value) for value in values if isinstance(value, (bytes, str)))) > MAX_WORDS_BYTES:
            raise Refused(f"{name} holds {size} bytes; expected at most {MAX_WORDS_BYTES}")
        return [_decoded(name, value) for value in values]

    def _scalar(self, name: str) -> Any:
        array = self._arrays.get(name)
        if array is None:
            return None
        if array.size != 1:
            raise Refused(f"{name} has shape {list(array.shape)}; expected one value")
        return array.reshape(-1)[0]

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Refuse the request when it carries one of `names` with a value in it.

        A flag that is false, and an empty tensor, ask for nothing and pass.
        """
        for name in names:
            array = self._arrays.get(name)
            if array is not None and array.size and not (array.dtype == np.bool_ and not array.any()):
                raise Refused(f"{name} is not supported: {reason}")


def _decoded(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise Refused(f"{name} is not text; expected BYTES holding UTF-8")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{name} is not UTF-8 (byte {error.start}: 0x{value[error.start]:02x})") from None


def word_list(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """int32 `[2, n]`: row 0 all ids one after another, row 1 the end offset of each sequence, then -1."""
    ids = [token for sequence in sequences for token in sequence]
    ends = np.cumsum([len(sequence) for sequence in sequences], dtype=np.int64)
    rows = np.full((2, len(ids)), -1, dtype=np.int32)
    rows[0] = ids
    rows[1, : len(ends)] = ends
    return rows


def split_word_list(rows: np.ndarray, name: str) -> tuple[tuple[int, ...], ...]:
    """The sequences of a `[2, n]` word list.

    Raises:
        Refused: not two rows, or offsets that do not rise within the ids.
    """
    if rows.ndim != 2 or rows.shape[0] != 2:
        raise Refused(f"{name} has shape {list(rows.shape)}; expected [2, n]")
    ids, ends = rows.tolist()
    sequences, start = [], 0
    for end in (offset for offset in ends if offset >= 0):
        if not start < end <= len(ids):
            raise Refused(f"{name} has end offset {end} after {start}; expected rising offsets up to {len(ids)}")
        sequences.append(tuple(ids[start:end]))
        start = end
    return tuple(sequences)


def embedding_bias(words: Sequence[tuple[Sequence[int], float]], vocab_size: int) -> np.ndarray | None:
    """float32 `[vocab]`: the weight of each word (its ids, its weight) added to all of its ids; None without words."""
    if not words:
        return None
    bias = np.zeros(vocab_size, dtype=np.float32)
    for ids, weight in words:
        np.add.at(bias, np.asarray(ids, dtype=np.int64), np.float32(weight))
    return bias
