"""The server as a subject, over a stand-in for its client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from trtspec.decoding.sampling import SamplingParams
from trtspec.errors import TrtspecError
from trtspec.parity.subjects import END, Query, Server
from trtspec.triton.client import Chunk, GenerationStats


class FakeClient:
    """Answers with given chunks and records what was asked."""

    url = "somewhere:1"

    def __init__(self, *pieces: tuple[str, list[int] | None], finish: str | None = "stop") -> None:
        self._pieces, self._finish = pieces, finish
        self.asked: dict[str, Any] = {}

    def generate(self, prompt: str, **settings: Any) -> Iterator[Chunk]:
        self.asked = {"prompt": prompt, **settings}
        tokens = sum(len(ids or ()) for _, ids in self._pieces)
        stats = GenerationStats(1, tokens, 0, 0, 1, 1.0, None, self._finish)
        for number, (text, ids) in enumerate(self._pieces, 1):
            yield Chunk(text, ids, stats if number == len(self._pieces) else None)


def query(**sampling: Any) -> Query:
    return Query("hello", (1, 2), 8, SamplingParams(**sampling), 3)


def test_blocks_are_kept_as_they_were_streamed() -> None:
    answer = Server(FakeClient(("a", [4]), ("", [5, 6]), ("b", []))).generate(query())  # type: ignore[arg-type]
    assert answer.blocks == ((4,), (5, 6), ())
    assert (answer.ids, answer.tokens) == ((4, 5, 6), (4, 5, 6, END))
    assert (answer.text, answer.finish_reason) == ("ab", "stop")


@pytest.mark.parametrize(
    ("sampling", "sent"),
    [
        ({}, {}),
        ({"temperature": 1.0, "seed": 9}, {"temperature": 1.0, "top_k": None, "top_p": 1.0, "seed": 9}),
        (
            {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 2**64 - 1},
            {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 2**64 - 1},
        ),
    ],
)
def test_what_the_server_is_asked(sampling: dict[str, Any], sent: dict[str, Any]) -> None:
    client = FakeClient(("a", [4]))
    Server(client, timeout_s=5.0).generate(query(**sampling))  # type: ignore[arg-type]
    common = {"prompt": "hello", "max_tokens": 8, "num_draft_tokens": 3, "timeout_s": 5.0}
    assert client.asked == common | sent


@pytest.mark.parametrize("client", [FakeClient(("a", None)), FakeClient(("a", [4]), finish=None)])
def test_a_server_that_does_not_say_what_it_emitted_is_refused(client: FakeClient) -> None:
    with pytest.raises(TrtspecError, match="output_ids and finish_reason"):
        Server(client).generate(query())  # type: ignore[arg-type]
