"""`trtspec bench serve` as a user runs it, against the pipeline with tiny engines, and against test doubles that do
what the prompt says."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.progress import Progress

from trtspec.bench.kept import Kept
from trtspec.bench.load import Answer, Ask, Sender
from trtspec.bench.serve import _first_blocks, chosen_arms
from trtspec.bench.serve_figures import cells
from trtspec.bench.serve_prompts import sent_prompts
from trtspec.bench.serve_result import Load, Row, read
from trtspec.cli import main
from trtspec.cli.bench_serve import _address, _Bars, _chat
from trtspec.errors import TrtspecError
from trtspec.prompts import Prompt
from trtspec.spec.load import load_spec
from trtspec.triton.client import Client, ModelInfo
from trtspec.triton.server import LocalServer

BLS = Path(__file__).parents[2] / "benchmarks" / "bls"
PROMPTS = ("Once upon a time there was", "def main():", "1 2 3 4 5")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[], dict[str, int]]) -> Iterator[str]:
    """gRPC address of the pipeline on tiny engines; its draft length is adaptive, and it has no chat template."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BLS))
        from tiny import tiny_server

        settings: dict[str, Any] = {"draft_length": "{policy: adaptive}", "plain_chunk_tokens": 1}
        with tiny_server(tmp_path_factory.mktemp("tiny"), free_ports(), **settings) as running:
            yield running.state.grpc_url


@pytest.fixture(scope="module")
def start_scripted(
    tmp_path_factory: pytest.TempPathFactory, scripted_repository: Callable[[Path], Path]
) -> Callable[[dict[str, int]], LocalServer]:
    """Makes a server whose models stream the prompt back, two tokens a word; not started."""

    def make(ports: dict[str, int]) -> LocalServer:
        root = tmp_path_factory.mktemp("scripted")
        return LocalServer(
            scripted_repository(root / "repo"),
            engines_root=root / "engines",
            startup_timeout_s=60,
            num_threads=1,
            state_dir=root / "state",
            **ports,
        )

    return make


@pytest.fixture(scope="module")
def scripted(
    start_scripted: Callable[[dict[str, int]], LocalServer], free_ports: Callable[[], dict[str, int]]
) -> Iterator[str]:
    """gRPC address of such a server."""
    with start_scripted(free_ports()) as running:
        yield running.state.grpc_url


def write_prompts(path: Path, *prompts: str | dict[str, Any]) -> Path:
    lines = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def bench(url: str, prompts: Path, *arguments: str) -> Result:
    """The command; what it writes is beside the prompts."""
    files = ["--json", str(prompts.with_suffix(".json"))]
    return CliRunner().invoke(main, ["bench", "serve", "--url", url, "--prompts", str(prompts), *files, *arguments])


def test_arms_beside_each_other_on_the_real_pipeline(tiny: str, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", *PROMPTS)
    load = ["--concurrency", "1,3", "--rate", "40", "--rounds", "2", "--requests", "4", "--warmup", "1", "-n", "12"]
    done = bench(tiny, prompts, *load, "--csv", str(tmp_path / "p.csv"))
    assert done.exit_code == 0, done.output
    result = read(tmp_path / "p.json")
    assert result.arms == ["on", "off", "adaptive"] and [str(load) for load in result.loads] == [
        "1 client",
        "3 clients",
        "40 requests/s",
    ]
    assert len(result.rows) == 3 * 3 * 2 * 4 and len(result.slices) == 3 * 3 * 2
    assert len((tmp_path / "p.csv").read_text().splitlines()) == len(result.rows) + 1
    assert not list(tmp_path.glob("*.partial"))
    by_arm = {cell.arm: cell for cell in cells(result)}
    for row in result.rows:
        answer = row.answer
        assert answer.error is None and answer.tokens == 12 and answer.finish == "length"
        assert answer.reused_blocks is None and answer.input_tokens, "the stand-in does not count blocks"
        assert 0 <= answer.sent_s <= answer.blocks[0][0] <= answer.blocks[-1][0] <= answer.end_s
        assert [seconds for seconds, _ in answer.blocks] == sorted(seconds for seconds, _ in answer.blocks)
        if row.arm == "off":
            assert (answer.drafted, answer.passes, len(answer.blocks)) == (0, 12, 12)
        if row.arm == "on":
            # Every pass emits what was accepted and one token of the target's own.
            assert 0 < answer.accepted <= answer.drafted and answer.passes == len(answer.blocks) == 12 - answer.accepted
    assert by_arm["on"].acceptance_length and by_arm["on"].acceptance_length > 1
    assert by_arm["off"].acceptance_length == 1 and by_arm["off"].acceptance_rate is None
    # Greedy answers are the same in all arms, and every counted request repeats a prompt that was read before.
    assert not any("not the same text" in note for note in result.notes)
    assert all(row.repeats for row in result.rows) and "72 of 72 requests repeat a prompt" in result.notes[0]
    # In an open loop all arms have the same arrivals; in every round another arm is first.
    arrivals = {
        (row.arm, row.round, row.index): round(row.planned_s, 2) for row in result.rows if row.load.kind == "rate"
    }
    assert all(abs(at - arrivals["off", number, index]) < 0.02 for (_, number, index), at in arrivals.items())
    begun = [line for line in done.stderr.splitlines() if line.startswith("1 client, ")]
    assert [line.split(",")[1].strip() for line in begun] == ["on", "off", "adaptive", "off", "adaptive", "on"]
    assert "1 client, adaptive against off: " in done.stdout


def test_unique_beginnings_are_never_sent_twice(tiny: str, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", "x" * 150)
    few = ["--concurrency", "1", "--rounds", "2", "--requests", "2", "--warmup", "1", "-n", "4", "--arms", "on,off"]
    assert bench(tiny, prompts, *few).exit_code == 0
    same = read(tmp_path / "p.json")
    assert [row.repeats for row in same.rows if row.arm == "on"] == [3, 4, 9, 10]
    assert bench(tiny, prompts, *few, "--unique").exit_code == 0
    unique = read(tmp_path / "p.json")
    assert all(row.repeats == 0 for row in unique.rows)
    assert unique.notes[0].startswith("every request had a beginning of its own")
    longer = unique.rows[0].answer.input_tokens - same.rows[0].answer.input_tokens  # type: ignore[operator]
    assert longer == len("(123456123456) "), "the tokens of a mark, which is in front"


class Canned:
    """A client whose answers are given."""

    def __init__(self, outputs: tuple[str, ...], *responses: dict[str, Any]) -> None:
        inputs = frozenset({"text_input", "max_tokens", "return_perf_metrics"})
        self._info = ModelInfo(True, True, inputs, frozenset(outputs), None, {}, {})
        self._responses = responses
        self.asked: list[Any] = []

    def info(self, model: str) -> ModelInfo:
        return self._info

    def infer(self, model: str, inputs: Any, outputs: list[str], timeout_s: float) -> Iterator[dict[str, Any]]:
        self.asked.append((inputs, outputs))
        for response in self._responses:
            yield {name: np.array([value]) for name, value in response.items()}

    def answer(self, cache: bool = True) -> Answer:
        sender = Sender(self, "m", cache=cache, timeout_s=1)  # type: ignore[arg-type]
        return sender.send(Ask("p", 5), time.monotonic(), threading.Event())


BLOCKS = ("kv_cache_reused_blocks", "kv_cache_alloc_total_blocks")


def test_reused_blocks_are_known_where_blocks_are_counted() -> None:
    counts = Canned(("text_output", *BLOCKS), {"text_output": b"a", BLOCKS[0]: 0, BLOCKS[1]: 3})
    assert counts.answer().reused_blocks == 0
    inputs, outputs = counts.asked[0]
    assert inputs["return_perf_metrics"].tolist() == [[True]] and set(BLOCKS) < set(outputs)
    assert Canned(BLOCKS, {BLOCKS[0]: 2, BLOCKS[1]: 3}).answer().reused_blocks == 2
    assert Canned(BLOCKS, {BLOCKS[0]: 0, BLOCKS[1]: 0}).answer().reused_blocks is None
    assert Canned(("text_output",), {"text_output": b"a"}).answer().reused_blocks is None
    counts.answer(cache=False)
    assert "return_perf_metrics" not in counts.asked[1][0] and not set(BLOCKS) & set(counts.asked[1][1])


def test_tokens_are_spread_over_pieces_of_a_server_that_sends_no_ids() -> None:
    names = ("text_output", "num_output_tokens", "total_accepted_draft_tokens")
    pieces = [dict(zip(names, values, strict=True)) for values in ((b"one ", 4, 1), (b"", 4, 1), (b"two", 10, 4))]
    answer = Canned(names, *pieces).answer()
    assert [tokens for _, tokens in answer.blocks] == [5.0, 5.0]
    assert (answer.tokens, answer.accepted, answer.passes) == (10.0, 4, 6)
    untold = Canned(names[:1], {"text_output": b"one "}, {"text_output": b"two"}).answer()
    assert (untold.tokens, untold.digest) == (2.0, sha256(b"one two").hexdigest()[:16])


def test_sampled_answers_are_the_same_from_run_to_run(tiny: str, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", *PROMPTS)
    few = ["--concurrency", "2", "--rounds", "2", "--requests", "3", "--warmup", "0", "-n", "8", "-t", "0.8"]
    digests = []
    for _ in range(2):
        assert bench(tiny, prompts, *few, "--arms", "off").exit_code == 0
        digests.append([row.answer.digest for row in read(tmp_path / "p.json").rows])
    assert digests[0] == digests[1]
    assert digests[0][:3] != digests[0][3:], "both rounds have the same seeds"


def test_an_earlier_run_and_a_plan_stand_beside_it(tiny: str, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", *PROMPTS)
    few = ["--concurrency", "1", "--rounds", "1", "--requests", "3", "--warmup", "0", "--arms", "on,off"]
    assert bench(tiny, prompts, *few, "-n", "8").exit_code == 0
    old = (tmp_path / "p.json").rename(tmp_path / "old.json")
    point = {"batch": 1, "num_draft_tokens": 3, "speed_up": 2.0, "speed_up_interval": [1.9, 2.1]}
    point |= {"tokens_per_pass": 2.5, "cycle_ms": 10.0, "plain_ms": 8.0}
    (tmp_path / "plan.json").write_text(json.dumps({"methods": [{"points": [point]}]}))
    beside = ["--compare", str(old), "--plan", str(tmp_path / "plan.json")]
    done = bench(tiny, prompts, *few, "-n", "8", *beside)
    assert done.exit_code == 0, done.output
    assert "1 client, on, against old.json: " in done.stdout
    assert "1 client, planned 2.00 (1.90 to 2.10), measured " in done.stdout
    assert "planned and measured tokens a pass 2.50 and " in done.stdout
    figures = json.loads((tmp_path / "p.json").read_text())
    (beside_plan,) = figures["against_plan"]["points"]
    assert beside_plan["planned"]["batch"] == 1
    made_of, value = beside_plan["factors"], beside_plan["measured"]["value"]
    assert made_of["tokens_per_pass"] * made_of["plain_ms"] / made_of["cycle_ms"] == pytest.approx(value)
    assert [each["arm"] for each in figures["against_old"]["ratios"]] == ["on", "off"]
    (tmp_path / "p.json").unlink()
    refused = bench(tiny, prompts, *few, "-n", "9", *beside)
    assert refused.exit_code == 1 and "the settings differ (max_tokens: 8, now 9)" in refused.stderr
    assert "requests" not in refused.stderr.split("error:")[0], "something was measured before"
    other = bench(tiny, prompts, *few, "-n", "8", "--num-draft-tokens", "2", *beside[2:])
    assert other.exit_code == 1 and "plans no batch size that is measured here" in other.stderr


def test_rounds_by_time(tiny: str, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", *PROMPTS)
    few = ["--duration", "0.5", "--rounds", "1", "--warmup", "0", "--arms", "on,off", "-n", "4"]
    assert bench(tiny, prompts, *few, "--concurrency", "2", "--rate", "20").exit_code == 0
    result = read(tmp_path / "p.json")
    assert all(0 <= row.planned_s < 0.6 for row in result.rows)
    arrived = [len(result.rows_of(result.loads[1], arm)) for arm in ("on", "off")]
    assert arrived[0] == arrived[1] > 2 and result.rows_of(result.loads[0], "on")
    never = bench(tiny, prompts, *few, "--rate", "0.001")
    assert never.exit_code == 1 and "no request arrives within 0.5 s at 0.001 requests/s" in never.stderr
    assert not list(tmp_path.glob("*.partial"))


def test_bars_show_the_whole_and_what_runs_now() -> None:
    progress = Progress()
    bars = _Bars(progress)
    bars.started("warm-up", 2)
    bars.started("1 client, on", 5)
    for _ in range(3):
        bars.advance()
    bars.progress(1, 4)
    shown = [(task.description, task.completed, task.total) for task in progress.tasks]
    assert shown == [("all rounds", 1, 4), ("1 client, on", 3, 5)]


def test_plain_answers_in_pieces_are_named() -> None:
    load = Load("concurrency", 1)
    rows = [Row(load, arm, 1, 0, 1, None, 0, 0.0, Answer(0.0, 1.0, ((0.5, 16.0),))) for arm in ("on", "off")]
    assert "begin with 16.0 tokens at once" in _first_blocks(rows)[0]
    assert _first_blocks(rows[:1]) == []


def test_messages_without_a_template_are_refused(tiny: str, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", "a", {"messages": [{"role": "user", "content": "b"}]})
    done = bench(tiny, prompts)
    assert (done.exit_code, done.stderr) == (
        1,
        f"error: {prompts}:2: `messages` need a chat template, and the server publishes none; give CONFIG, whose "
        "target may have one, or write `prompt` texts\n",
    )


def test_texts_and_messages_get_the_template_and_errors_are_counted_by_kind(scripted: str, tmp_path: Path) -> None:
    said = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Say hi"}]
    prompts = write_prompts(tmp_path / "p.jsonl", "Say hi", {"messages": said, "category": "chat"}, "now ERROR please")
    load = ["--concurrency", "2", "--rounds", "2", "--requests", "3", "--warmup", "0", "--num-draft-tokens", "4"]
    done = bench(scripted, prompts, *load)
    assert done.exit_code == 0, done.output
    result = read(tmp_path / "p.json")
    assert result.arms == ["on", "off"], "the double does not say that it is adaptive"
    texts = {1: "<user> Say hi <assistant> ", 2: "<system> Be brief <user> Say hi <assistant> "}
    for row in result.rows:
        if row.prompt == 3:
            assert (row.answer.error, row.answer.message) == ("error", "the target refuses")
        else:
            assert row.answer.digest == sha256(texts[row.prompt].encode()).hexdigest()[:16]
            assert row.answer.tokens == 2 * len(texts[row.prompt].split()) and row.answer.reused_blocks is None
    assert [row.category for row in result.rows[:3]] == [None, "chat", None]
    on, off = cells(result)
    assert (on.answered, on.requests, on.errors) == (4, 6, {"error": 2})
    assert on.acceptance_rate == 0.25 and off.acceptance_rate is None
    assert any(note.startswith("4 of 12 requests failed (4 error)") for note in result.notes)
    assert bench(scripted, prompts, *load, "--raw").exit_code == 1, "messages without a template"


def test_every_setting_reaches_the_model(scripted: str) -> None:
    with Client(scripted) as client:
        sender = Sender(client, "tensorrt_llm_bls", cache=True, timeout_s=60)
        answer = sender.send(Ask("SETTINGS", 7, 2, 0.5, 11), time.monotonic(), threading.Event())
    sent = {
        "text_input": ["SETTINGS"],
        "max_tokens": [7],
        "temperature": [0.5],
        "seed": [11],
        "num_draft_tokens": [2],
        "stream": [True],
        "exclude_input_in_output": [True],
    }
    assert answer.digest == sha256(f"{json.dumps(sent)} ".encode()).hexdigest()[:16]


def test_time_counts_from_when_a_request_was_planned(scripted: str) -> None:
    with Client(scripted) as client:
        sender = Sender(client, "tensorrt_llm_bls", cache=True, timeout_s=60)
        answer = sender.send(Ask("one SLOW three", 8), time.monotonic() - 5.0, threading.Event())
        late = Sender(client, "tensorrt_llm_bls", cache=True, timeout_s=0.5)
        failed = late.send(Ask("one HANG", 8), time.monotonic(), threading.Event())
    assert 5.0 <= answer.sent_s <= (answer.first_s or 0) and answer.end_s - answer.sent_s > 0.9
    assert [tokens for _, tokens in answer.blocks] == [2, 2, 2]
    assert answer.later[0] == 4 and answer.later[1] > 0.9
    assert failed.error == "timed out" and 0.4 < failed.end_s < 30


def test_no_prompt_that_is_answered_is_an_error(scripted: str, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", "ERROR")
    done = bench(scripted, prompts, "--num-draft-tokens", "4", "--concurrency", "1")
    assert done.exit_code == 1
    assert "error: no prompt was answered; the first error: the target refuses; nothing was complete yet" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


def info(**parameters: str) -> ModelInfo:
    inputs = frozenset({"text_input", "max_tokens", "num_draft_tokens"})
    return ModelInfo(True, True, inputs, frozenset(), None, {}, parameters)


def test_arms_are_those_that_the_server_can_be_asked_for() -> None:
    assert chosen_arms(info(num_draft_tokens="4"), None, None) == (("on", "off"), 4)
    assert chosen_arms(info(num_draft_tokens="4"), None, 6) == (("on", "off"), 6)
    adaptive = info(num_draft_tokens="4", draft_length_policy="adaptive")
    assert chosen_arms(adaptive, None, None) == (("on", "off", "adaptive"), 4)
    assert chosen_arms(info(num_draft_tokens="0", method="medusa"), None, None) == (("default",), None)
    assert chosen_arms(info(), ("off", "default"), None) == (("off", "default"), None)


@pytest.mark.parametrize(
    ("parameters", "arms", "message"),
    [
        ({"num_draft_tokens": "4"}, ("adaptive",), "draft length is not adaptive .its policy is fixed.*default"),
        ({"num_draft_tokens": "0", "method": "medusa"}, ("on", "off"), "cannot switch .* .its method is medusa"),
        ({}, ("on",), "how many tokens are to be drafted is not known.*give CONFIG, or --num-draft-tokens"),
    ],
)
def test_arms_that_it_cannot_are_refused(parameters: dict[str, str], arms: tuple[str, ...], message: str) -> None:
    with pytest.raises(TrtspecError, match=message):
        chosen_arms(info(**parameters), arms, None)


def test_config_says_where_the_server_is_and_how_it_chats(
    tiny_model_dir: Path, tiny_draft_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "s.yaml").write_text(
        f"version: 1\nname: mine\ntarget: {{model: {tiny_model_dir}}}\n"
        f"speculation: {{method: draft_target, num_draft_tokens: 3, draft: {{model: {tiny_draft_dir}}}}}\n"
        "serving: {grpc_port: 7001}\n"
    )
    spec = load_spec(tmp_path / "s.yaml")
    assert _address(None, spec) == "127.0.0.1:7001" and _address("h:1", spec) == "h:1"
    said = [{"role": "user", "content": "hi"}]
    targets, servers = _chat(info(), spec), _chat(replace(info(), chat_template="server"), spec)
    assert targets and targets(said) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert servers and servers(said) == "server" and _chat(info(), None) is None


def test_without_a_name_the_result_is_in_the_cache(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_prompts(tmp_path / "p.jsonl", "a")
    few = ["--arms", "default", "--concurrency", "1", "--rounds", "1", "--requests", "1", "--warmup", "0", "-n", "3"]
    done = CliRunner().invoke(main, ["bench", "serve", "--url", tiny, "--prompts", "p.jsonl", *few])
    file = Path(".cache", "bench", f"{tiny.replace(':', '-')}.serve.json")
    assert done.exit_code == 0 and f"written: {file}" in done.stderr and read(file).arms == ["default"]
    assert re.search(r"^\d+\.\d tokens/s at 1 client \(default\)\.$", done.stdout, re.MULTILINE)


def test_marks_stand_before_the_first_words_of_a_prompt() -> None:
    prompts = [Prompt(1, "hello"), Prompt(2, "", messages=({"role": "system", "content": "s"},))]
    plain, _ = sent_prompts(prompts[:1], None, "f")[0], None
    assert (plain.marked(), plain.marked("(1) ")) == ("hello", "(1) hello")

    def chat(messages: Any) -> str:
        return "<s>" + "".join(f"[{each['role']}]{each['content'].strip()}" for each in messages)

    text, talk = sent_prompts(prompts, chat, "f")
    assert (text.marked(), text.marked("(1) ")) == ("<s>[user]hello", "<s>[user](1) hello")
    assert talk.marked("(2) ") == "<s>[system](2) s"


@contextlib.contextmanager
def listener(answers: bool) -> Iterator[str]:
    """Address of somebody who speaks HTTP, or who says nothing at all."""
    if answers:
        server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
        server.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[assignment, method-assign]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
        server.server_close()
    else:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            yield f"127.0.0.1:{silent.getsockname()[1]}"


def test_somebody_who_speaks_http_is_told_from_nobody(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", "a")
    with listener(answers=True) as url:
        done = bench(url, prompts)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"error: {url}: somebody listens there, but does not answer as Triton's gRPC does; ")
    nobody = bench(url, prompts)
    assert nobody.exit_code == 1 and nobody.stderr.startswith(
        f"error: no server at {url}; start one with trtspec serve"
    )


def test_somebody_who_says_nothing_does_not_hang_it(tmp_path: Path) -> None:
    with listener(answers=False) as url:
        done = bench(url, write_prompts(tmp_path / "p.jsonl", "a"))
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and url in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--concurrency", "0"], 2, "expected numbers from 1 to 512"),
        (["--concurrency", "1,two"], 2, "expected numbers from 1 to 512"),
        (["--rate", "-1"], 2, "expected requests per second, above 0"),
        (["--rate", "nan"], 2, "expected requests per second, above 0"),
        (["--rate", "inf"], 2, "expected requests per second, above 0"),
        (["--rate", "fast"], 2, "expected requests per second, above 0"),
        (["--arms", "on,of"], 2, "'of' is no arm; expected some of on,off,adaptive,default"),
        (["--requests", "3", "--duration", "2"], 2, "give one"),
        (["--duration", "0"], 2, "--duration"),
        (["--temperature", "nan"], 2, "--temperature"),
        (["--duration", "inf"], 2, "is no number to work with"),
        (["--timeout", "nan"], 2, "--timeout"),
        (["--url", "127.0.0.1"], 1, "is no address; expected HOST:PORT"),
        (["--url", "http://127.0.0.1:8001"], 1, "is no address; expected HOST:PORT"),
        (["--url", "127.0.0.1:99999"], 1, "is no address; expected HOST:PORT"),
        (["--json", "nowhere/r.json"], 1, "nowhere is no directory"),
        (["--json", "same", "--csv", "same"], 1, "two results have one place"),
        (["--compare", "nothing.json"], 1, "nothing.json: no such file"),
        (["--plan", "nothing.json"], 1, "no such plan"),
    ],
)
def test_nonsense_is_refused_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_prompts(tmp_path / "p.jsonl", "a")
    done = CliRunner().invoke(main, ["bench", "serve", "--prompts", "p.jsonl", *arguments])
    assert done.exit_code == code and message in done.stderr and "Traceback" not in done.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "a"}\n{"prompt"\n', ":2: not JSON"),
        ('{"prompt": 3}', ":1: `prompt` is not"),
    ],
)
def test_broken_prompt_files_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    done = bench("127.0.0.1:1", tmp_path / "p.jsonl")
    assert done.exit_code == 1 and message in done.stderr
    assert CliRunner().invoke(main, ["bench", "serve"]).exit_code == 2


def test_an_interrupted_run_goes_on_where_it_ended(scripted: str, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", "one SLOW", "two SLOW")
    arguments = ["--json", str(tmp_path / "p.json"), "--concurrency", "2", "--rounds", "2", "--requests", "2"]
    arguments += ["--warmup", "0", "--num-draft-tokens", "4"]
    command = [sys.executable, "-m", "trtspec", "bench", "serve", "--url", scripted, "--prompts", str(prompts)]
    kept = tmp_path / "p.json.partial"
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: kept.exists() and '"slice"' in kept.read_text())
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, "")
    assert f"requests are kept in {kept}; the same command goes on there\nerror: interrupted\n" in err
    assert not (tmp_path / "p.json").exists()
    first = [json.loads(line) for line in kept.read_text().splitlines()]
    with kept.open("a") as file:
        file.write('{"row": {"load"')  # as if it had been killed while writing
    other = bench(scripted, prompts, *arguments[2:], "-n", "9")
    assert (
        other.exit_code == 1 and "keeps an unfinished run with other settings (max_tokens: 64, now 9)" in other.stderr
    )
    again = bench(scripted, prompts, *arguments[2:])
    assert again.exit_code == 0, again.output
    assert "going on after " in again.stderr and not kept.exists()
    result = read(tmp_path / "p.json")
    assert len(result.slices) == 4 and len(result.rows) == 8
    assert len({(row.arm, row.round, row.index) for row in result.rows}) == 8
    measured = next(record["row"]["answer"] for record in first if "row" in record)
    assert any(row.answer.end_s == measured["end_s"] for row in result.rows), "measured again instead of kept"


def test_a_server_that_dies_midway_loses_nothing(
    start_scripted: Callable[[dict[str, int]], LocalServer],
    free_ports: Callable[[], dict[str, int]],
    tmp_path: Path,
) -> None:
    prompts, ports = write_prompts(tmp_path / "p.jsonl", "one SLOW", "two SLOW"), free_ports()
    kept = tmp_path / "p.json.partial"
    arguments = ["--concurrency", "1", "--rounds", "3", "--requests", "2", "--warmup", "0", "--num-draft-tokens", "4"]
    results: list[Result] = []
    with start_scripted(ports) as running:
        url = running.state.grpc_url
        thread = threading.Thread(target=lambda: results.append(bench(url, prompts, *arguments)))
        thread.start()
        wait_for(lambda: kept.exists() and '"slice"' in kept.read_text())
        os.kill(running.state.pid, signal.SIGKILL)
        thread.join(60)
    (died,) = results
    assert died.exit_code == 1 and "error: the server is gone: " in died.stderr and died.stderr.count("error:") == 1
    assert f"requests are kept in {kept}; the same command goes on there" in died.stderr
    with start_scripted(ports):
        again = bench(url, prompts, *arguments)
    assert again.exit_code == 0, again.output
    assert "going on after " in again.stderr and len(read(tmp_path / "p.json").rows) == 12


def test_a_strange_file_in_the_place_of_what_is_kept_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "x.partial").write_text("my notes\n")
    with pytest.raises(TrtspecError, match="is there, and no unfinished load test"):
        Kept(tmp_path / "x.partial", {"settings": {}})
    assert (tmp_path / "x.partial").read_text() == "my notes\n"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
