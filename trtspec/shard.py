"""A run that is dealt out over several processes: shard I of N does every N-th piece of what has an order.

Knows numbers and the name of a shard's file; not what is dealt out, or how it is put together again.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any, TypeVar

from trtspec.errors import TrtspecError

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """One of `of` shards, by its `number` from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The shard that `I/N` says.

        Raises:
            TrtspecError: it says none.
        """
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise TrtspecError("no such shard", where=f"--shard {text}", expected="I/N with I from 1 to N, such as 2/8")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def file_name(self) -> str:
        """Of what it leaves, a trace."""
        return f"{self.number}-of-{self.of}.jsonl"

    def mine(self, items: Iterable[T]) -> Iterator[T]:
        """Every `of`-th of the items, the first of them the one with its own number."""
        return islice(items, self.number - 1, None, self.of)


WHOLE = Shard(1, 1)


def keep_for_this_process(file: IO[Any], what: str) -> None:
    """Lock an open file until it is closed.

    Raises:
        TrtspecError: another process has it; `what` says what it does with it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise TrtspecError(f"another process {what}", where=str(file.name)) from error
