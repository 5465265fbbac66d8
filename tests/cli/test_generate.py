"""`trtspec generate` as a user runs it, against test doubles that stream the prompt back."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from trtspec.cli import main
from trtspec.triton.server import LocalServer


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory,
    scripted_repository: Callable[[Path], Path],
    free_ports: Callable[[], dict[str, int]],
) -> Iterator[LocalServer]:
    root = tmp_path_factory.mktemp("generate")
    with LocalServer(
        scripted_repository(root / "repo"),
        engines_root=root,
        state_dir=root / "engines" / ".server",
        startup_timeout_s=60,
        num_threads=1,
        **free_ports(),
    ) as running:
        yield running


def generate(server: LocalServer, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["generate", "--url", server.state.grpc_url, *arguments], input=stdin)


def test_the_chat_template_is_applied_and_figures_go_to_stderr(server: LocalServer) -> None:
    result = generate(server, "Say hi", "--system", "Be brief", "--num-draft-tokens", "4")
    assert result.exit_code == 0, result.output
    assert result.stdout == "<system> Be brief <user> Say hi <assistant> \n"
    assert re.fullmatch(
        r"14 tokens in \d+\.\d\d s: \d+\.\d tokens/s, first text after \d+\.\d\d s; acceptance rate 0\.25 "
        r"\(7 of 28 draft tokens\), acceptance length 2\.00 tokens per target pass\n",
        result.stderr,
    )


def test_raw_sends_the_prompt_as_it_is(server: LocalServer) -> None:
    assert generate(server, "--raw", "Say hi").stdout == "Say hi \n"


def test_plain_decoding_says_so(server: LocalServer) -> None:
    result = generate(server, "--raw", "Say hi", "--num-draft-tokens", "0")
    assert result.stderr.endswith("; no drafts\n")


def test_the_prompt_may_come_from_standard_input(server: LocalServer) -> None:
    assert generate(server, "--raw", "-", stdin="from\na pipe: é\n").stdout == "from a pipe: é \n"


def test_every_option_reaches_the_model(server: LocalServer) -> None:
    options = ["-n", "7", "-t", "0.5", "--top-k", "3", "--seed", "11", "--stop", "a", "--stop", "b"]
    sent = json.loads(generate(server, "--raw", "SETTINGS", *options, "--num-draft-tokens", "2").stdout)
    assert sent == {
        "text_input": ["SETTINGS"],
        "max_tokens": [7],
        "temperature": [0.5],
        "top_k": [3],
        "seed": [11],
        "stop_words": ["a", "b"],
        "num_draft_tokens": [2],
        "stream": [True],
        "exclude_input_in_output": [True],
    }


def test_json_is_one_line_with_text_and_figures(server: LocalServer) -> None:
    result = generate(server, "--raw", "Say hi", "--json", "--num-draft-tokens", "4")
    assert result.stderr == "" and result.stdout.count("\n") == 1
    answer = json.loads(result.stdout)
    seconds = {key: answer.pop(key) for key in ("seconds", "seconds_to_first_text", "tokens_per_second")}
    assert all(value > 0 for value in seconds.values())
    assert answer == {
        "text": "Say hi ",
        "input_tokens": 2,
        "tokens": 4,
        "drafted": 8,
        "accepted": 2,
        "target_passes": 2,
        "acceptance_rate": 0.25,
        "acceptance_length": 2.0,
        "finish_reason": "length",
    }


def test_text_is_shown_as_it_comes_and_ctrl_c_ends_it(server: LocalServer) -> None:
    witness = server.model_repo / "tensorrt_llm_bls" / "1" / "cancelled"
    command = [sys.executable, "-m", "trtspec", "generate", "--url", server.state.grpc_url, "--raw", "first HANG"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(6) == b"first ", "nothing was shown before the end"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"error: interrupted\n")
    assert witness.exists(), "the model was never told"


def test_the_servers_error_is_one_line(server: LocalServer) -> None:
    result = generate(server, "--raw", "a ERROR")
    assert result.exit_code == 1
    assert result.stderr == f"error: {server.state.grpc_url}: the server answered with an error: the target refuses\n"
    assert result.stdout == "a "


def test_a_timeout_is_one_line(server: LocalServer) -> None:
    result = generate(server, "--raw", "HANG", "--timeout", "0.5")
    assert result.exit_code == 1
    assert result.stderr == f"error: {server.state.grpc_url}: no complete answer within 0.5 s\n"


def test_with_a_config_the_running_server_is_found_wherever_it_listens(server: LocalServer) -> None:
    config = server.model_repo.parent / "demo.yaml"
    config.write_text(
        "version: 1\ntarget: {model: x, dtype: float32}\nspeculation: {method: none}\noutput: {engines: engines}\n"
    )
    result = CliRunner().invoke(main, ["generate", "--config", str(config), "--raw", "Say hi"])
    assert (result.exit_code, result.stdout) == (0, "Say hi \n"), result.output


def test_with_a_config_and_no_server_the_specs_port_is_asked(
    tmp_path: Path, free_ports: Callable[[], dict[str, int]]
) -> None:
    config, port = tmp_path / "demo.yaml", free_ports()["grpc_port"]
    config.write_text("version: 1\ntarget: {model: x, dtype: float32}\nspeculation: {method: none}\n")
    setting = f"serving.grpc_port={port}"
    result = CliRunner().invoke(main, ["generate", "--config", str(config), "--set", setting, "Say hi"])
    assert result.exit_code == 1
    assert result.stderr == f"error: no server at 127.0.0.1:{port}; start one with trtspec serve CONFIG\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([""], "PROMPT"),
        (["x", "--config", "a.yaml", "--url", "b:1"], "--config and --url"),
        (["x", "--raw", "--system", "s"], "--raw"),
        (["x", "--max-tokens", "0"], "--max-tokens"),
        (["x", "--top-p", "0"], "--top-p"),
        (["x", "--temperature", "-1"], "--temperature"),
        (["x", "--seed", str(2**64)], "--seed"),
        ([], "PROMPT"),
    ],
)
def test_usage_errors(arguments: list[str], problem: str) -> None:
    result = CliRunner().invoke(main, ["generate", *arguments])
    assert result.exit_code == 2
    assert problem in result.stderr
