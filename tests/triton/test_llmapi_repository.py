"""The repository of track llmapi: its files, and its model in the real Triton server.

TensorRT-LLM is not there; the package that the model imports is a test double (tensorrt_llm_double), laid beside the
Python backend. The repository is served as it was written.
"""

from __future__ import annotations

import json
import queue
import re
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from trtspec.errors import TrtspecError
from trtspec.spec.load import load_spec
from trtspec.spec.schema import Spec
from trtspec.triton.llmapi_repository import write_llmapi_repository

CONFIGS = Path(__file__).parents[2] / "configs"
DOUBLE = Path(__file__).parent / "tensorrt_llm_double" / "tensorrt_llm"
DEADLINE_S = 60.0
CALL_TIMEOUT_S = 2.0
TYPES = {bool: np.bool_, int: np.int32, float: np.float32, str: np.object_}


def spec_in(directory: Path, *overrides: str) -> Spec:
    """A spec of track llmapi that drafts by n-grams."""
    directory.mkdir(exist_ok=True)
    (directory / "tiny.yaml").write_text(
        f"""
version: 1
target: {{model: org/target, dtype: bfloat16, tensor_parallel: 2}}
speculation: {{method: ngram, num_draft_tokens: 4}}
hardware: {{gpu: H100-SXM, num_gpus: 4}}
engine: {{track: llmapi, runtime: tensorrt_llm, version: "1.3.0", max_batch_size: 8}}
serving: {{call_timeout_s: {CALL_TIMEOUT_S}, gpu_device_ids: {{target: [1, 3]}}}}
"""
    )
    return load_spec(directory / "tiny.yaml", overrides)


def config_of(repository: Path) -> Any:
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    return text_format.Parse((repository / "tensorrt_llm" / "config.pbtxt").read_text(), ModelConfig())


def tree(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def write(out: Path, spec: Spec, model_path: str = "/engines/target") -> Path:
    return write_llmapi_repository(out_dir=out, spec=spec, model_path=model_path)


# --- files


def test_the_repository_is_one_self_contained_model(tmp_path: Path) -> None:
    out = write(tmp_path / "r", spec_in(tmp_path))
    files = {"config.pbtxt", "1/model.py", "1/model.yaml", "1/llmapi_request.py", "1/tensors.py"}
    assert set(tree(out)) == {f"tensorrt_llm/{name}" for name in files}
    assert tree(write(tmp_path / "again", spec_in(tmp_path))) == tree(out)
    content = yaml.safe_load((out / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert content["model"] == "/engines/target"
    assert content["speculative_config"]["decoding_type"] == "NGram"


def test_the_config_says_what_the_public_model_says(tmp_path: Path) -> None:
    """Names, types and shapes of public clients; batching and streams as in model.yaml; no GPU asked of Triton."""
    config = config_of(write(tmp_path / "r", spec_in(tmp_path)))
    assert (config.name, config.backend, config.max_batch_size) == ("tensorrt_llm", "python", 0)
    assert config.model_transaction_policy.decoupled
    assert [(group.count, group.kind) for group in config.instance_group] == [(1, 2)]  # KIND_CPU
    inputs = {tensor.name: (tensor.data_type, list(tensor.dims), tensor.optional) for tensor in config.input}
    text, boolean, uint64, int32, fp32 = 13, 1, 5, 8, 11
    assert inputs.pop("text_input") == (text, [-1], False)
    assert inputs.pop("sampling_param_stop") == (text, [-1], True)
    assert inputs.pop("image_url") == (text, [-1], True)
    kinds = {
        boolean: "streaming stop return_finish_reason return_stop_reason return_cumulative_logprob "
        "sampling_param_exclude_input_from_output sampling_param_return_perf_metrics",
        int32: "sampling_param_best_of sampling_param_top_k sampling_param_max_tokens",
        fp32: "sampling_param_temperature sampling_param_top_p sampling_param_frequency_penalty "
        "sampling_param_presence_penalty",
        uint64: "sampling_param_seed lora_id",
        text: "lora_name lora_path lora_ckpt_source",
    }
    assert inputs == {name: (kind, [1], True) for kind, names in kinds.items() for name in names.split()}
    int64 = 9
    outputs = {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in config.output}
    assert outputs == {
        **dict.fromkeys(("text_output", "finish_reason", "stop_reason"), (text, [-1])),
        **dict.fromkeys(("cumulative_logprob", "kv_cache_hit_rate"), (fp32, [-1])),
        **dict.fromkeys((f"kv_cache_{n}_block" for n in ("reused", "missed")), (int32, [-1])),
        **dict.fromkeys((f"kv_cache_alloc_{n}_blocks" for n in ("new", "total")), (int32, [-1])),
        **dict.fromkeys(
            (f"{n}_time_ns" for n in ("arrival", "first_scheduled", "first_token", "last_token")), (int64, [1])
        ),
        "acceptance_rate": (fp32, [1]),
        **dict.fromkeys(("total_accepted_draft_tokens", "total_draft_tokens"), (int32, [1])),
    }


def test_an_older_version_has_no_inputs_for_images_and_lora(tmp_path: Path) -> None:
    names = {t.name for t in config_of(write(tmp_path / "r", spec_in(tmp_path, "engine.version=1.2.1"))).input}
    assert "sampling_param_seed" in names and not names & {"image_url", "lora_id", "lora_name", "lora_path"}


def test_something_else_is_not_overwritten_and_an_engine_repository_is(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("precious")
    with pytest.raises(TrtspecError, match=r"thesis: something else than a model repository"):
        write(tmp_path / "thesis", spec)
    older = tmp_path / "r" / "tensorrt_llm_draft" / "1"
    older.mkdir(parents=True)
    (tmp_path / "r" / "tensorrt_llm").mkdir()
    (tmp_path / "r" / "tensorrt_llm" / "config.pbtxt").touch()
    write(tmp_path / "r", spec)
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["tensorrt_llm"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r", "thesis", "tiny.yaml"]


def test_a_refused_spec_leaves_the_old_repository(tmp_path: Path) -> None:
    out = write(tmp_path / "r", spec_in(tmp_path))
    before = tree(out)
    with pytest.raises(TrtspecError, match="int8 KV cache"):
        write(out, spec_in(tmp_path, "target.kv_cache_dtype=int8"))
    assert tree(out) == before


def test_the_model_imports_nothing_that_the_container_lacks(tmp_path: Path) -> None:
    """Neither trtspec nor, before its environment is set, tensorrt_llm."""
    out = write(tmp_path / "r", spec_in(tmp_path))
    script = textwrap.dedent(
        """
        import importlib, sys, types
        sys.path[:0] = [DIRECTORY + "/1", DIRECTORY]
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("trtspec", "torch", "tensorrt_llm", "pydantic"):
                    raise AssertionError("imports " + name)
        sys.meta_path.insert(0, Refuse())
        utils = types.ModuleType("triton_python_backend_utils")
        utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
        sys.modules[utils.__name__] = utils
        print(importlib.import_module("1.model").TritonPythonModel.__name__)
        """
    ).replace("DIRECTORY", repr(str(out / "tensorrt_llm")))
    done = subprocess.run([sys.executable, "-I", "-B", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "TritonPythonModel\n", done.stderr


# --- the running model


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[], dict[str, int]]
) -> Iterator[Callable[..., Any]]:
    """Start a server: `start(model_path=...)` on the spec of this file, `start(spec)` on another."""
    from trtspec.triton.server import LocalServer

    started = []

    def run(spec: Spec | None = None, model_path: str = "/engines/target", decoupled: bool = True) -> LocalServer:
        root = tmp_path_factory.mktemp("llmapi")
        repository = write(root / "repository", spec or spec_in(root), model_path)
        if not decoupled:
            config = repository / "tensorrt_llm" / "config.pbtxt"
            text = config.read_text()
            assert "decoupled: true" in text
            config.write_text(text.replace("decoupled: true", "decoupled: false"))
        backend = root / "state" / "backends" / "python"
        backend.mkdir(parents=True)
        shutil.copytree(DOUBLE, backend / "tensorrt_llm", ignore=shutil.ignore_patterns("__pycache__"))
        server = LocalServer(
            repository,
            engines_root=root / "engines",
            num_threads=1,
            startup_timeout_s=60.0,
            state_dir=root / "state",
            **free_ports(),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMPI_COMM_WORLD_SIZE", "2")
            patch.setenv("OMPI_MCA_btl", "tcp")
            server.start()
        started.append(server)
        return server

    yield run
    for server in started:
        server.stop()


def wait_ready(server: Any) -> None:
    from trtspec.triton.client import Client

    deadline = time.monotonic() + DEADLINE_S
    with Client(server.state.grpc_url) as client:
        while not client.ready():
            server._require_alive("while it was starting")
            assert time.monotonic() < deadline, server.log.read_text()
            time.sleep(0.1)


@pytest.fixture(scope="module")
def server(start: Callable[..., Any]) -> Any:
    server = start()
    wait_ready(server)
    return server


@pytest.fixture(scope="module")
def address(server: Any) -> str:
    return str(server.state.grpc_url)


class Call:
    """One request to the decoupled model, by the public client."""

    def __init__(self, address: str, request_id: str = "", **tensors: Any) -> None:
        import tritonclient.grpc as grpcclient
        from tritonclient.utils import np_to_triton_dtype

        inputs = []
        for name, value in tensors.items():
            items = value if isinstance(value, list) else [value]
            kind = np.uint64 if name in ("sampling_param_seed", "lora_id") else TYPES[type(items[0])]
            array = np.array([item.encode() if isinstance(item, str) else item for item in items], dtype=kind)
            tensor = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        self._received: queue.Queue = queue.Queue()
        self._client = grpcclient.InferenceServerClient(address)
        self._client.start_stream(lambda result, error: self._received.put((result, error)), stream_timeout=DEADLINE_S)
        self._client.async_stream_infer("tensorrt_llm", inputs, request_id=request_id, enable_empty_final_response=True)

    def next(self) -> dict[str, Any]:
        """The next response, with `final`; or `error`."""
        result, error = self._received.get(timeout=DEADLINE_S)
        if error is not None:
            return {"error": error.message(), "status": error.status(), "final": True}
        response = result.get_response()
        outputs: dict[str, Any] = {}
        for output in response.outputs:
            array = result.as_numpy(output.name)
            assert array.shape == (1,)
            value = array[0]
            outputs[output.name] = value.decode() if isinstance(value, bytes) else value
        return {**outputs, "final": response.parameters["triton_final_response"].bool_param}

    def all(self) -> list[dict[str, Any]]:
        """Every response up to the final one, after which nothing comes."""
        responses = [self.next()]
        while not responses[-1]["final"]:
            responses.append(self.next())
        self.close()
        assert self._received.empty(), "a response after the final one"
        return responses

    def close(self, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


def ask(address: str, prompt: str, **tensors: Any) -> dict[str, Any]:
    """The one response of a request that does not stream."""
    (response,) = Call(address, text_input=prompt, **tensors).all()
    return response


def shown(address: str, what: str, **tensors: Any) -> Any:
    return json.loads(ask(address, f"show {what}", **tensors)["text_output"])


def test_http_clients_and_the_launchers_probe_get_text(server: Any) -> None:
    """generate_stream for streams; generate too, as long as one response comes."""
    from trtspec.triton.launch import probe

    address = f"127.0.0.1:{server.state.http_port}"
    probe(address, llmapi=True)
    url = f"http://{address}/v2/models/tensorrt_llm"
    body = {"text_input": "count 3", "streaming": True, "sampling_param_max_tokens": 2, "return_finish_reason": True}
    with urllib.request.urlopen(f"{url}/generate_stream", json.dumps(body).encode(), timeout=DEADLINE_S) as answer:
        events = [json.loads(line.removeprefix(b"data: ")) for line in answer.read().splitlines() if line]
    assert [event["text_output"] for event in events] == ["w1 ", "w2 "]
    assert events[-1]["finish_reason"] == "length"
    body = {"text_input": "count 3"}
    with urllib.request.urlopen(f"{url}/generate", json.dumps(body).encode(), timeout=DEADLINE_S) as answer:
        assert json.load(answer)["text_output"] == "w1 w2 w3 "


def test_the_llm_gets_what_model_yaml_says(address: str) -> None:
    arguments = shown(address, "arguments")
    assert (arguments["model"], arguments["tensor_parallel_size"]) == ("/engines/target", 2)
    assert arguments["speculative_config"]["max_draft_len"] == 4
    assert "triton_config" not in arguments


def test_the_llm_sees_its_gpus_and_no_foreign_mpi_job(address: str) -> None:
    assert shown(address, "environment") == {
        "CUDA_VISIBLE_DEVICES": "1,3",
        "TRTLLM_VISIBLE_DEVICES": "1,3",
        "OMPI_MCA_btl": "tcp",
    }


def test_one_response_without_streaming(address: str) -> None:
    assert ask(address, "count 5") == {"text_output": "w1 w2 w3 w4 w5 ", "final": True}
    assert ask(address, "count 5", sampling_param_max_tokens=2)["text_output"] == "w1 w2 "


def test_a_stream_comes_in_pieces_that_join_to_the_whole(address: str) -> None:
    responses = Call(address, text_input="count 5", streaming=True).all()
    assert [response["text_output"] for response in responses] == ["w1 ", "w2 ", "w3 ", "w4 ", "w5 "]
    assert [response["final"] for response in responses] == [False] * 4 + [True]


def test_the_prompt_is_put_in_front_when_asked(address: str) -> None:
    responses = Call(
        address, text_input="count 2", streaming=True, sampling_param_exclude_input_from_output=False
    ).all()
    assert "".join(response["text_output"] for response in responses) == "count 2w1 w2 "


def test_what_is_returned_on_request_has_its_type(address: str) -> None:
    flags = ("finish_reason", "stop_reason", "cumulative_logprob")
    asked = {f"return_{name}": True for name in flags}
    response = ask(address, "count 9", sampling_param_stop=["w3", "w7"], sampling_param_max_tokens=20, **asked)
    assert response == {
        "text_output": "w1 w2 ",
        "finish_reason": "stop",
        "stop_reason": "w3",
        "cumulative_logprob": np.float32(-1.5),
        "final": True,
    }
    assert response["cumulative_logprob"].dtype == np.float32
    cut = ask(address, "count 9", sampling_param_max_tokens=2, return_finish_reason=True, return_stop_reason=True)
    assert (cut["finish_reason"], cut["stop_reason"]) == ("length", "")


def test_figures_of_a_request_have_their_types(address: str) -> None:
    responses = Call(address, text_input="count 3", streaming=True, sampling_param_return_perf_metrics=True).all()
    assert set(responses[0]) == {"text_output", "final"}
    last = responses[-1]
    expected = {
        "kv_cache_reused_block": np.int32(3),
        "kv_cache_missed_block": np.int32(1),
        "kv_cache_alloc_new_blocks": np.int32(2),
        "kv_cache_alloc_total_blocks": np.int32(5),
        "kv_cache_hit_rate": np.float32(0.75),
        "arrival_time_ns": np.int64(5_000_001_000),
        "first_scheduled_time_ns": np.int64(5_000_002_000),
        "first_token_time_ns": np.int64(5_000_030_000),
        "last_token_time_ns": np.int64(6_000_000_000),
        "acceptance_rate": np.float32(0.5),
        "total_accepted_draft_tokens": np.int32(10),
        "total_draft_tokens": np.int32(20),
    }
    assert {name: last[name] for name in expected} == expected
    assert {name: last[name].dtype for name in expected} == {name: value.dtype for name, value in expected.items()}


def test_sampling_inputs_become_sampling_parameters(address: str) -> None:
    defaults = shown(address, "sampling")
    assert {name for name, value in defaults.items() if value} == {"max_tokens"}
    given = shown(
        address,
        "sampling",
        sampling_param_temperature=0.7,
        sampling_param_top_k=20,
        sampling_param_top_p=0.9,
        sampling_param_seed=2**63 + 5,
        sampling_param_frequency_penalty=0.5,
        sampling_param_presence_penalty=-0.25,
        sampling_param_max_tokens=100,
        sampling_param_stop=["a", "", "b"],
        sampling_param_best_of=1,
    )
    assert {name: value for name, value in given.items() if value} == {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "seed": 2**63 + 5,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.25,
        "max_tokens": 100,
        "stop": ["a", "b"],
    }


def test_greedy_is_greedy_however_it_is_said(address: str) -> None:
    for said in (
        {"sampling_param_temperature": 0.0, "sampling_param_top_p": 0.9},
        {"sampling_param_top_k": 1, "sampling_param_temperature": 0.7},
        {"sampling_param_top_k": 0, "sampling_param_top_p": 1.0},
    ):
        params = shown(address, "sampling", **said)
        assert not any(params[name] for name in ("temperature", "top_k", "top_p", "seed"))


def test_without_a_seed_every_answer_is_a_new_draw(address: str) -> None:
    seeds = {shown(address, "sampling", sampling_param_temperature=1.0)["seed"] for _ in range(3)}
    assert len(seeds) == 3 and None not in seeds


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"sampling_param_temperature": -1.0}, "sampling_param_temperature is -1.0; expected 0 or more"),
        ({"sampling_param_top_p": 100.0}, "sampling_param_top_p is 100.0; expected more than 0, at most 1"),
        ({"sampling_param_top_k": -3}, "sampling_param_top_k is -3; expected 0 or more"),
        ({"sampling_param_max_tokens": 0}, "sampling_param_max_tokens is 0; expected 1 or more"),
        ({"sampling_param_best_of": 2}, "sampling_param_best_of is 2; one answer is generated a request, expected 1"),
        ({"image_url": "http://x/y.png"}, "image_url is not supported: this deployment takes text only"),
        ({"lora_id": 7}, "lora_id is not supported: the model is loaded without LoRA"),
        ({"text_input": ""}, "text_input is empty; expected some text"),
        ({"text_input": ["a", "b"]}, "text_input has shape [2]; expected one text a request"),
        ({"sampling_param_seed": [1, 2]}, "sampling_param_seed"),
        ({"text_input": "toolong"}, "The prompt is longer than max_input_len"),
        ({"stop": True}, "stop is true without a request id"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(address: str, tensors: dict[str, Any], message: str) -> None:
    (response,) = Call(address, **{"text_input": "count 3", **tensors}).all()
    assert message in response["error"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"sampling_param_temperature": 0.7}, "sampling_param_temperature is 0.7; this TensorRT-LLM decodes greedily"),
        ({"sampling_param_top_k": 5}, "sampling_param_top_k is 5; this TensorRT-LLM decodes greedily"),
        (
            {"sampling_param_presence_penalty": 0.5},
            "sampling_param_presence_penalty is 0.5; drafts are verified without",
        ),
    ],
)
def test_what_drafts_inside_the_model_cannot_honour_is_refused(
    tmp_path: Path, tensors: dict[str, Any], message: str
) -> None:
    """MTP on TensorRT-LLM 1.2: neither sampling nor penalties."""
    from trtspec.triton.models.llmapi_request import Settings, read_request
    from trtspec.triton.models.tensors import Inputs

    config = config_of(write(tmp_path / "r", spec_in(tmp_path, "engine.version=1.2.1", "speculation.method=mtp")))
    settings = Settings.parse({key: value.string_value for key, value in config.parameters.items()})

    def read(given: dict[str, Any]) -> dict[str, Any]:
        arrays = {name: np.array([value], dtype=TYPES[type(value)]) for name, value in given.items()}
        return read_request(Inputs({"text_input": np.array([b"x"], dtype=np.object_), **arrays}), settings).sampling

    assert read({name: type(value)(0) for name, value in tensors.items()}) == {}
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tensors)


def test_a_crash_in_the_middle_is_one_final_error(address: str) -> None:
    responses = Call(address, text_input="crash", streaming=True).all()
    assert responses[0]["text_output"] == "w1 "
    assert "device-side assert" in responses[-1]["error"] and len(responses) == 2


def test_a_generation_without_an_end_is_one_final_error(address: str) -> None:
    (response,) = Call(address, text_input="vanish").all()
    assert "ended without its last output" in response["error"]


def test_an_llm_that_hangs_is_given_up(address: str) -> None:
    before = shown(address, "aborted")
    started = time.monotonic()
    (response,) = Call(address, text_input="hang").all()
    assert f"has not answered for {CALL_TIMEOUT_S:g} s" in response["error"]
    assert time.monotonic() - started >= CALL_TIMEOUT_S
    assert shown(address, "aborted") == before + 1


def test_slow_is_not_hanging(address: str) -> None:
    """Together longer than the time-out of one step, each step shorter."""
    number = int(CALL_TIMEOUT_S / 0.05) + 5
    assert ask(address, f"slow {number}", sampling_param_max_tokens=100)["text_output"].endswith(f"w{number} ")


def test_stop_cancels_the_request_of_that_id(address: str) -> None:
    before = shown(address, "aborted")
    running = Call(address, "r1", text_input="slow 1000", streaming=True, sampling_param_max_tokens=1000)
    other = Call(address, "r2", text_input="slow 10", sampling_param_max_tokens=1000)
    assert running.next()["text_output"] == "w1 "
    (stopped,) = Call(address, "r1", text_input="x", stop=True).all()
    assert "request 'r1' is cancelled" in stopped["error"]
    last = running.all()[-1]
    assert "request 'r1' is cancelled" in last["error"]
    assert other.all()[-1]["text_output"].endswith("w10 ")
    (nothing,) = Call(address, "r1", text_input="x", stop=True).all()
    assert "no request 'r1' is running" in nothing["error"]
    assert shown(address, "aborted") == before + 1


def test_a_client_that_leaves_ends_its_generation(address: str) -> None:
    before = shown(address, "aborted")
    running = Call(address, text_input="slow 1000", streaming=True, sampling_param_max_tokens=1000)
    running.next()
    running.close(cancel=True)
    deadline = time.monotonic() + 10
    while shown(address, "aborted") == before:
        assert time.monotonic() < deadline, "nobody told the LLM"
        time.sleep(0.05)


def test_many_requests_are_in_the_llm_together(address: str) -> None:
    calls = [Call(address, text_input="slow 20", sampling_param_max_tokens=100) for _ in range(12)]
    assert all(call.all()[-1]["text_output"].endswith("w20 ") for call in calls)
    assert shown(address, "most_running") >= 6


def test_a_model_that_was_set_to_answer_once_does_so(start: Callable[..., Any]) -> None:
    """For clients that cannot stream, decoupled may be set to false in config.pbtxt."""
    import tritonclient.grpc as grpcclient

    server = start(decoupled=False)
    wait_ready(server)
    with grpcclient.InferenceServerClient(str(server.state.grpc_url)) as client:

        def infer(prompt: str, streaming: bool) -> str:
            text = grpcclient.InferInput("text_input", [1], "BYTES")
            flag = grpcclient.InferInput("streaming", [1], "BOOL")
            text.set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
            flag.set_data_from_numpy(np.array([streaming]))
            result = client.infer("tensorrt_llm", [text, flag], client_timeout=DEADLINE_S)
            return str(result.as_numpy("text_output")[0].decode())

        assert infer("count 3", streaming=False) == "w1 w2 w3 "
        with pytest.raises(Exception, match="streaming is true; this model answers once, expected false"):
            infer("count 3", streaming=True)
        with pytest.raises(Exception, match="device-side assert"):
            infer("crash", streaming=False)
        assert infer("count 1", streaming=False) == "w1 "
    server.stop()


def test_the_example_of_deepseek_v3_is_loaded_and_answers(start: Callable[..., Any]) -> None:
    server = start(load_spec(CONFIGS / "deepseek-v3-mtp-llmapi.yaml"))
    wait_ready(server)
    arguments = shown(str(server.state.grpc_url), "arguments")
    assert arguments["speculative_config"] == {
        "decoding_type": "MTP",
        "max_draft_len": 1,
        "allow_advanced_sampling": True,
    }
    assert shown(str(server.state.grpc_url), "environment") == {"OMPI_MCA_btl": "tcp"}
    server.stop()


def test_an_llm_that_does_not_start_says_why(start: Callable[..., Any]) -> None:
    server = start(model_path="/engines/nothing")
    deadline = time.monotonic() + DEADLINE_S
    while "no checkpoint in /engines/nothing" not in (log := server.log.read_text()):
        assert time.monotonic() < deadline, log
        time.sleep(0.1)
    assert "the LLM does not start" in log
