"""What is known of a server without a spec: who is found at an address, and what stands for its target's engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from trtspec.errors import TrtspecError
from trtspec.parity import served
from trtspec.parity.served import described, spec_of_model, spec_of_server
from trtspec.prompts import read_prompts
from trtspec.triton import server_state
from trtspec.triton.client import ModelInfo, ServerGone
from trtspec.triton.server_state import ServerState, build_stamp, find

INFO = ModelInfo(
    batched=True,
    decoupled=True,
    inputs=frozenset(),
    outputs=frozenset(),
    chat_template=None,
    special_tokens={},
)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerState:
    """A server whose process is alive, with its record; nothing else is known on this machine."""
    links = tmp_path / "links"
    (tmp_path / "state").mkdir()
    links.mkdir()
    monkeypatch.setattr(server_state, "SHARED_MEMORY", links)
    monkeypatch.setattr(server_state, "command_line", lambda pid: "tritonserver\0trtspec_0_" if pid == 7 else "")
    engines = tmp_path / "engines"
    made = ServerState(
        pid=7,
        token="trtspec_0_",
        host="127.0.0.1",
        http_port=8000,
        grpc_port=8001,
        metrics_port=8002,
        model_repo=str(tmp_path / "repository"),
        engines_root=str(engines),
        build=build_stamp(tmp_path / "repository", engines),
        log="",
    )
    made.write(tmp_path / "state")
    return made


@pytest.mark.parametrize(
    ("host", "url", "is_found"),
    [
        ("127.0.0.1", "127.0.0.1:8001", True),
        ("127.0.0.1", "localhost:8001", True),
        ("127.0.0.1", "127.0.0.1:8000", False),  # HTTP
        ("127.0.0.1", "127.0.0.2:8001", False),
        ("0.0.0.0", "127.0.0.2:8001", True),
        ("0.0.0.0", "192.0.2.1:8001", False),  # nobody's
        ("127.0.0.1", "no such host:8001", False),
        ("127.0.0.1", "8001", False),
    ],
)
def test_a_server_is_found_by_its_address(
    state: ServerState, tmp_path: Path, host: str, url: str, is_found: bool
) -> None:
    there = replace(state, host=host, ready=True)
    there.write(tmp_path / "state")  # as when it becomes ready: the link is there already
    assert find(url) == (there if is_found else None)


def test_a_server_that_is_gone_is_not_found(state: ServerState, tmp_path: Path) -> None:
    replace(state, pid=8).write(tmp_path / "state")
    assert find(state.grpc_url) is None
    state.write(tmp_path / "state")
    assert find(state.grpc_url) == state
    state.remove(tmp_path / "state")
    assert find(state.grpc_url) is None and not list(server_state.SHARED_MEMORY.iterdir())


def test_links_of_other_users_are_not_followed(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert find(state.grpc_url) is None


def test_the_spec_of_a_server_is_what_was_built_checked_as_its_file_says(
    state: ServerState, tmp_path: Path, tiny_model_dir: Path
) -> None:
    file, engines = tmp_path / "tiny.yaml", Path(state.engines_root)
    file.write_text(
        f"version: 1\ntarget: {{model: {tiny_model_dir}}}\nspeculation: {{method: ngram}}\nparity: {{num_prompts: 5}}\n"
    )
    resolved = spec_of_model(str(tiny_model_dir), ["speculation.method=ngram", "speculation.num_draft_tokens=7"])
    engines.mkdir()
    record = engines / "manifest.json"
    record.write_text(json.dumps({"spec": {"file": str(file), "resolved": resolved.model_dump(mode="json")}}))
    spec = spec_of_server(state.grpc_url, ["parity.max_tokens=9"])
    assert (spec.speculation.num_draft_tokens, spec.parity.num_prompts, spec.parity.max_tokens) == (7, 5, 9)
    assert (spec.source, spec.engines_dir) == (file, engines)

    file.unlink()
    assert spec_of_server(state.grpc_url).parity.num_prompts == resolved.parity.num_prompts

    (engines / "target").mkdir()
    (engines / "target" / "config.json").write_text("{}")
    with pytest.raises(TrtspecError, match="built again since"):
        spec_of_server(state.grpc_url)


def test_a_model_is_a_spec_in_its_own_type(save_model: Callable[..., Path], tmp_path: Path) -> None:
    model = str(save_model(tmp_path / "half", torch_dtype="float16"))
    spec = spec_of_model(model)
    assert (spec.name, spec.target.dtype, spec.speculation.method) == ("half", "float16", "none")
    assert len(read_prompts(spec.prompts_path)) >= 8
    assert spec_of_model(model, ["target.dtype=bfloat16"]).target.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parity.num_prompts=none"], "--set parity.num_prompts: "),
        (["parity.nonsense=1"], "--set parity.nonsense: "),
        (["speculation.method=medusa"], "--set speculation: method medusa needs"),
        (["parity.prompts=nowhere.jsonl"], ""),
    ],
)
def test_an_override_that_is_wrong_is_named(tiny_model_dir: Path, overrides: list[str], message: str) -> None:
    if not message:
        assert spec_of_model(str(tiny_model_dir), overrides).prompts_path == Path.cwd() / "nowhere.jsonl"
        return
    with pytest.raises(TrtspecError) as caught:
        spec_of_model(str(tiny_model_dir), overrides)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


class FakeClient:
    """A server that says what `parameters` holds; None: it has no model that speculates; or it is not there."""

    parameters: dict[str, str] | None = None
    gone = False

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def info(self, model: str) -> ModelInfo:
        if self.gone:
            raise ServerGone("no server at somewhere:1")
        if self.parameters is None:
            raise TrtspecError(f"unknown model {model}")
        return replace(INFO, parameters=self.parameters)


@pytest.mark.parametrize(
    ("parameters", "overrides", "expected"),
    [
        (None, [], {"end_ids": (2, 0), "longest": 512, "input": 512, "drafts": 0}),
        (
            {"end_ids": "2", "max_input_len": "100", "target_max_seq_len": "200", "num_draft_tokens": "5"},
            ["engine.max_seq_len=1500"],
            {"end_ids": (2,), "longest": 200, "input": 100, "drafts": 5},
        ),
        (
            {"tensorrt_llm_draft_model_name": "tensorrt_llm_draft", "end_ids": "${end_ids}"},
            ["engine.max_seq_len=1500"],
            {"end_ids": (2, 0), "longest": 1500, "input": 1500, "drafts": 4},
        ),
        (
            {"tensorrt_llm_draft_model_name": "${tensorrt_llm_draft_model_name}", "num_draft_tokens": "many"},
            ["engine.max_input_len=50"],
            {"end_ids": (2, 0), "longest": 512, "input": 50, "drafts": 0},
        ),
        (
            {"tensorrt_llm_draft_model_name": "", "num_draft_tokens": "0"},
            [],
            {"end_ids": (2, 0), "longest": 512, "input": 512, "drafts": 0},
        ),
    ],
)
def test_what_stands_for_the_engine_of_a_foreign_target(
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    parameters: dict[str, str] | None,
    overrides: list[str],
    expected: dict[str, Any],
) -> None:
    """Template variables that were never filled in say nothing."""
    monkeypatch.setattr(FakeClient, "parameters", parameters)
    monkeypatch.setattr(served, "Client", FakeClient)
    config = described(spec_of_model(str(tiny_model_dir), overrides), "somewhere:1")
    assert config.vocab_size == 280
    assert {
        "end_ids": config.eos_token_ids,
        "longest": config.max_seq_len,
        "input": config.build["max_input_len"],
        "drafts": config.stamp["num_draft_tokens"],
    } == expected


def test_nothing_stands_for_a_target_that_is_not_there_or_quantised(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "Client", FakeClient)
    monkeypatch.setattr(FakeClient, "gone", True)
    with pytest.raises(TrtspecError, match="no server at somewhere:1"):
        described(spec_of_model(str(tiny_model_dir)), "somewhere:1")
    for settings in (["target.quantization=fp8"], ["target.kv_cache_dtype=int8", "engine.kv_cache_reuse=false"]):
        with pytest.raises(TrtspecError, match="no reference for a quantised target"):
            described(spec_of_model(str(tiny_model_dir), settings), "somewhere:1")
