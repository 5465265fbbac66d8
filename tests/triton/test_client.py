"""The client against a real Triton server whose BLS models are a scripted test double."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtspec.errors import TrtspecError
from trtspec.models.tokenizer import render_chat
from trtspec.triton.client import Client, GenerationStats
from trtspec.triton.server import LocalServer


def start(tmp: Path, scripted_repository: Callable[[Path], Path], ports: dict[str, int]) -> LocalServer:
    return LocalServer(
        scripted_repository(tmp / "repo"),
        engines_root=tmp / "engines",
        startup_timeout_s=60,
        num_threads=1,
        state_dir=tmp / "state",
        **ports,
    )


@pytest.fixture(scope="module")
def scripted(
    tmp_path_factory: pytest.TempPathFactory,
    scripted_repository: Callable[[Path], Path],
    free_ports: Callable[[], dict[str, int]],
) -> Iterator[LocalServer]:
    with start(tmp_path_factory.mktemp("server"), scripted_repository, free_ports()) as running:
        yield running


@pytest.fixture
def client(scripted: LocalServer) -> Iterator[Client]:
    with Client(scripted.state.grpc_url) as connected:
        yield connected


def test_streams_every_block_as_it_comes(client: Client) -> None:
    arrivals, texts = [], []
    for chunk in client.generate("one SLOW three", max_tokens=8):
        arrivals.append(time.monotonic())
        texts.append(chunk.text)
    assert texts == ["one ", "SLOW ", "three ", ""]
    assert arrivals[1] - arrivals[0] > 0.8, "the second block was held back or the first one came with it"


def test_stats_are_those_of_the_whole_generation(client: Client) -> None:
    completion = client.complete("a b c", max_tokens=8, num_draft_tokens=4)
    stats = completion.stats
    assert completion.text == "a b c "
    assert completion.output_ids == [0, 1, 2, 3, 4, 5]
    assert (stats.input_tokens, stats.tokens, stats.drafted, stats.accepted) == (3, 6, 12, 3)
    # The double does not count passes: 6 tokens less 3 accepted drafts are the target's own, one a pass.
    assert (stats.target_passes, stats.acceptance_rate, stats.acceptance_length) == (3, 0.25, 2.0)
    assert stats.finish_reason == "length"
    assert stats.seconds_to_first_text is not None and 0 < stats.seconds_to_first_text <= stats.seconds
    assert stats.tokens_per_second == pytest.approx(6 / stats.seconds)


def test_stats_without_tokens_or_drafts_divide_by_nothing() -> None:
    stats = GenerationStats(
        input_tokens=1, tokens=0, drafted=0, accepted=0, target_passes=0, seconds=0.0,
        seconds_to_first_text=None, finish_reason="stop",
    )  # fmt: skip
    assert (stats.acceptance_rate, stats.acceptance_length, stats.tokens_per_second) == (0.0, 0.0, 0.0)


def test_unary_gives_the_same_answer_in_one_piece(client: Client) -> None:
    chunks = list(client.generate("a b c", max_tokens=8, stream=False))
    assert [chunk.text for chunk in chunks] == ["a b c "]
    assert chunks[0].stats is not None and chunks[0].stats.tokens == 6


@pytest.mark.parametrize("stream", [True, False])
def test_settings_arrive_and_those_left_out_are_not_sent(client: Client, stream: bool) -> None:
    text = client.complete(
        "SETTINGS",
        max_tokens=8,
        temperature=0.5,
        top_k=7,
        seed=2**64 - 1,
        stop=["\n\n", "é"],
        num_draft_tokens=0,
        stream=stream,
    ).text
    assert json.loads(text) == {
        "text_input": ["SETTINGS"],
        "max_tokens": [8],
        "temperature": [0.5],
        "top_k": [7],
        "seed": [2**64 - 1],
        "stop_words": ["\n\n", "é"],
        "num_draft_tokens": [0],
        "stream": [stream],
        "exclude_input_in_output": [True],
    }
    assert set(json.loads(client.complete("SETTINGS", max_tokens=8).text)) == {
        "text_input",
        "max_tokens",
        "stream",
        "exclude_input_in_output",
    }


@pytest.mark.parametrize("stream", [True, False])
def test_the_servers_error_is_passed_on_in_one_line(client: Client, stream: bool) -> None:
    with pytest.raises(TrtspecError, match="the target refuses") as caught:
        client.complete("a ERROR b", max_tokens=8, stream=stream)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stream", [True, False])
def test_a_model_that_is_unavailable_is_not_taken_for_a_missing_server(client: Client, stream: bool) -> None:
    with pytest.raises(TrtspecError, match="the server answered with an error: the draft is not there"):
        client.complete("a UNAVAILABLE b", max_tokens=8, stream=stream)


def test_an_input_the_model_does_not_know_is_the_servers_error(client: Client) -> None:
    with pytest.raises(TrtspecError, match="min_tokens"):
        client.complete("a", max_tokens=8, min_tokens=2)


def test_several_streams_at_once_over_one_connection(client: Client) -> None:
    answers: dict[int, str] = {}

    def ask(i: int) -> None:
        answers[i] = client.complete(f"{i} SLOW {i}", max_tokens=8).text

    started = time.monotonic()
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert answers == {i: f"{i} SLOW {i} " for i in range(4)}
    assert time.monotonic() - started < 3.5, "four waits of a second went one after another"


def test_closing_the_iterator_cancels_the_request(client: Client, scripted: LocalServer) -> None:
    witness = scripted.model_repo / "tensorrt_llm_bls" / "1" / "cancelled"
    pieces = client.generate("first HANG", max_tokens=8)
    assert next(pieces).text == "first "
    assert not witness.exists()
    pieces.close()
    deadline = time.monotonic() + 10
    while not witness.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert witness.exists(), "the model was never told"
    witness.unlink()


def test_a_deadline_ends_the_wait(client: Client) -> None:
    started = time.monotonic()
    with pytest.raises(TrtspecError, match=r"no complete answer within 0\.5 s"):
        client.complete("first HANG", max_tokens=8, timeout_s=0.5)
    assert time.monotonic() - started < 5


def test_the_model_tells_its_chat_template(client: Client) -> None:
    info = client.info()
    assert info.chat_template is not None and info.chat_template.startswith("{% for m in messages %}")
    assert info.special_tokens == {"eos_token": "<eos>"}
    assert not info.batched


def test_on_the_real_pipeline(server: SimpleNamespace) -> None:
    """The double stands for this one: the same tensors, with a batch dimension, and passes that are counted."""
    settings = {"max_tokens": 24, "min_tokens": 24, "repetition_penalty": 1.1, "stop": ["never in it"]}
    with Client(server.grpc) as client:
        assert client.info().batched
        prompt = render_chat(
            client.info().chat_template, [{"role": "user", "content": "hello"}], True, **client.info().special_tokens
        )
        assert prompt == "<s><|im_start|>hello<|im_end|>"
        streamed = client.complete(prompt, num_draft_tokens=3, **settings)
        unary = client.complete(prompt, num_draft_tokens=3, stream=False, **settings)
        plain = client.complete(prompt, num_draft_tokens=0, **settings)
        with pytest.raises(TrtspecError, match=r"the server answered with an error: .*top_p"):
            client.complete(prompt, max_tokens=4, top_p=100.0)
    assert streamed.text == unary.text == plain.text
    assert streamed.output_ids == unary.output_ids == plain.output_ids
    assert streamed.output_ids is not None and len(streamed.output_ids) == streamed.stats.tokens == 24
    assert streamed.stats.drafted > 0 and plain.stats.drafted == 0
    # Every pass adds at least one token of the target's own; only the last block may be cut.
    assert 0 <= streamed.stats.target_passes - (24 - streamed.stats.accepted) <= 1
    assert streamed.stats.finish_reason == "length"


def test_nobody_listens(free_ports: Callable[[], dict[str, int]]) -> None:
    url = f"127.0.0.1:{free_ports()['grpc_port']}"
    started = time.monotonic()
    with Client(url) as client, pytest.raises(TrtspecError) as caught:
        client.complete("a", max_tokens=1)
    assert str(caught.value) == f"no server at {url}; start one with trtspec serve CONFIG"
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("end", [lambda server: os.kill(server.state.pid, signal.SIGKILL), LocalServer.stop])
def test_a_server_that_ends_in_the_middle_of_an_answer(
    end: Callable[[LocalServer], None],
    tmp_path: Path,
    scripted_repository: Callable[[Path], Path],
    free_ports: Callable[[], dict[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trtspec.triton.server.KILL_AFTER_S", 1.0)
    with start(tmp_path, scripted_repository, free_ports()) as server, Client(server.state.grpc_url) as client:
        pieces = client.generate("first HANG", max_tokens=8, timeout_s=60)
        assert next(pieces).text == "first "
        ending = threading.Thread(target=end, args=(server,))
        ending.start()
        started = time.monotonic()
        with pytest.raises(TrtspecError, match="the server went away in the middle of the answer"):
            list(pieces)
        assert time.monotonic() - started < 15
        ending.join()
