"""A small world with text for the parity checks: bytes and a few words as tokens, and chains of words for models.

Greedily the words go round in `STORY`, and `FABLE` comes to an end; what follows `。` is the same Japanese
character again and again. The draft is wrong behind a third of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import parity_doubles as doubles

from trtspec.parity.subjects import Answer, Query, Subject
from trtspec.parity.subjects.in_process import InProcess
from trtspec.parity.trial import Case, Trial
from trtspec.parity.yardstick import Yardstick

STORY = (" the", " cat", " sat", " on", " a", " mat", ".", " dogs", " ran", " home", " and", " slept")
FABLE = (" quick", " brown", " foxes", " jump", " over", " it", "!")
END, END_TOO = 256, 257
WORDS = (*STORY, *FABLE)
SPELLING = [bytes([i]) for i in range(256)] + [b"", b""] + [word.encode() for word in WORDS]
VOCAB = len(SPELLING)


def encode(text: str) -> list[int]:
    """Words where there are some, else bytes."""
    ids: list[int] = []
    while text:
        word = next((word for word in WORDS if text.startswith(word)), None)
        ids += [258 + WORDS.index(word)] if word else list(text[0].encode())
        text = text[len(word or text[0]) :]
    return ids


def decode(ids: list[int]) -> str:
    return b"".join(SPELLING[i] for i in ids).decode("utf-8", errors="replace")


class Table(doubles.Table):
    """A table given by its logits."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows.astype(np.float32)


def _tables() -> tuple[Table, Table]:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(VOCAB, VOCAB))
    rows[:, [END, END_TOO]] = -4.0
    story, fable = ([258 + WORDS.index(word) for word in words] for words in (STORY, FABLE))
    japanese = list("日".encode())
    chains = (  # each ends where it goes on
        [*story, story[0]],
        [*fable, END],
        ["。".encode()[-1], *japanese, japanese[0]],
    )
    for token, following in ((a, b) for chain in chains for a, b in pairwise(chain)):
        rows[token, following] = 5.0
    draft = rows.copy()
    draft[1::3] = np.roll(draft[1::3], 1, axis=1)
    return Table(rows), Table(draft)


TARGET, DRAFT = _tables()


def subject(**settings: object) -> InProcess:
    """The right one."""
    given = {"end_ids": (END, END_TOO), "decode": decode, "continuation_ids": (0x80, 0xBF), **settings}
    return doubles.subject(doubles.engine(TARGET), doubles.engine(DRAFT), **given)


def trial(**changes: object) -> Trial:
    """A run over two prompts that go on for ever, and one that ends."""
    yardstick = Yardstick(
        target=TARGET,
        draft=DRAFT,
        vocab_size=VOCAB,
        end_ids=(END, END_TOO),
        decode=decode,
        piece=lambda token: decode([token]),
        tolerance=2e-3,
    )
    texts = ("Once: the cat sat on a mat. dogs", "Then: dogs ran and ran home and home and slept and ran", "Now: quick")
    cases = tuple(Case(number, text, tuple(encode(text))) for number, text in enumerate(texts, 1))
    return doubles.trial(yardstick=yardstick, cases=cases, encode=encode, max_tokens=24, **changes)


class Altered:
    """A subject that answers as `answer(query, right)` says, where `right` is what the right one answers.

    Args:
        answer: takes the query and the right subject's `generate`.
        inner: the right one.
    """

    name = "altered"

    def __init__(
        self, answer: Callable[[Query, Callable[[Query], Answer]], Answer], inner: Subject | None = None
    ) -> None:
        self._answer, self._inner = answer, inner or subject()

    def generate(self, query: Query) -> Answer:
        return self._answer(query, self._inner.generate)


def respelled(answer: Answer, *blocks: tuple[int, ...], finish: str | None = None) -> Answer:
    """The answer with other tokens, and the text that belongs to them."""
    text = decode([token for block in blocks for token in block])
    return replace(answer, blocks=blocks, text=text, pieces=(text,), finish_reason=finish or answer.finish_reason)


def garbled(answer: Answer) -> Answer:
    """The answer with another third token."""
    ids = answer.ids
    return respelled(answer, (*ids[:2], ord("~"), *ids[3:]))
