"""The pipeline's metrics: adding up, with a double of Triton's Python API, and on the endpoint of the real server."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import re
import signal
import sys
import threading
import time
import types
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trtspec.triton
from trtspec.triton.client import Client
from trtspec.triton.server import LocalServer
from trtspec.triton.server_state import family

SOURCE = Path(trtspec.triton.__file__).parent / "models" / "metrics.py"
DOCKER = Path(__file__).parents[2] / "docker"
DEADLINE_S = 20.0
CYCLE = {"chosen": 3, "drafted": 3, "accepted": 2, "emitted": 3, "draft_s": 0.25, "verify_s": 0.5, "pipeline_s": 0.125}
PLAIN = CYCLE | {"chosen": 0, "drafted": 0, "accepted": 0, "emitted": 8, "draft_s": 0.0}
AFTER_BOTH = {
    "cycles": 2,
    "emitted_tokens": 11,
    "target_passes": 9,
    "drafts": 1,
    "draft_tokens": 3,
    "accepted_tokens": 2,
    "accepted_at_position 1": 1,
    "accepted_at_position 2": 1,
    "accepted_at_position 3": 0,
    "draft_length 0": 1,
    "draft_length 3": 1,
    "draft_seconds": 0.25,
    "verify_seconds": 1.0,
    "pipeline_seconds": 0.25,
}


class TritonDouble:
    """The values of Triton's metrics by name and label values; `refuses` makes every change of one fail."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self.log: list[str] = []
        self.writers: set[str] = set()
        self.deleted: list[str] = []
        self.refuses = False

    def module(self) -> types.ModuleType:
        triton = self

        class Metric:
            def __init__(self, key: tuple[str, ...], kind: str) -> None:
                self.key, self.kind = key, kind
                triton.values.setdefault(key, 0.0)

            def increment(self, value: float) -> None:
                assert self.kind == "counter" and value > 0
                self._change(triton.values[self.key] + value)

            def set(self, value: float) -> None:
                assert self.kind == "gauge"
                self._change(value)

            def _change(self, value: float) -> None:
                triton.writers.add(threading.current_thread().name)
                if triton.refuses:
                    raise RuntimeError("the server is ending")
                triton.values[self.key] = value

        class MetricFamily:
            COUNTER, GAUGE = "counter", "gauge"

            def __init__(self, name: str, description: str, kind: str) -> None:
                assert description
                self.name, self.kind = name, kind

            def __del__(self) -> None:
                triton.deleted.append(self.name)

            def Metric(self, labels: dict[str, str]) -> Metric:
                assert next(iter(labels)) == "model"
                return Metric((self.name, *labels.values()), self.kind)

        utils = types.ModuleType("triton_python_backend_utils")
        utils.__dict__.update(MetricFamily=MetricFamily, Logger=SimpleNamespace(log_warn=self.log.append))
        return utils

    def of(self, model: str) -> dict[str, float]:
        """Values of one model, without what all names have in common: `drafts`, `fallbacks draft_failed`."""
        return {short(name, *rest): value for (name, of, *rest), value in self.values.items() if of == model}


def short(name: str, *labels: str) -> str:
    return " ".join((name.removeprefix("trtspec_").removesuffix("_total"), *labels))


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> TritonDouble:
    double = TritonDouble()
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", double.module())
    return double


@pytest.fixture
def module(double: TritonDouble) -> Any:
    """metrics.py as the model's process imports it."""
    spec = importlib.util.spec_from_file_location("metrics_under_test", SOURCE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def until(true: Callable[[], bool], what: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def test_a_cycle_with_drafts_and_one_without(module: Any, double: TritonDouble) -> None:
    metrics = module.Metrics("m", max_draft_len=3)
    metrics.cycle(**CYCLE)
    metrics.cycle(**PLAIN)
    metrics.close()
    found = double.of("m")
    assert AFTER_BOTH.items() <= found.items()
    assert found["requests_in_flight"] == 0 and {v for k, v in found.items() if k.startswith("fallbacks")} == {0}


def test_passes_of_an_engine_that_drafts_by_itself_are_not_guessed(module: Any, double: TritonDouble) -> None:
    metrics = module.Metrics("m", counts_passes=False)
    metrics.cycle(**PLAIN)
    metrics.close()
    assert double.of("m")["target_passes"] == 0 and double.of("m")["emitted_tokens"] == 8


def test_requests_fallbacks_and_errors(module: Any, double: TritonDouble) -> None:
    metrics = module.Metrics("m")
    for _ in range(3):
        metrics.request_began()
    metrics.request_ended("stop")
    metrics.request_ended("refused")
    metrics.fallback("draft_timeout")
    metrics.fallback("something_new")
    metrics.target_error("timeout")
    metrics.close()
    wanted = {
        "requests_in_flight": 1,
        "requests stop": 1,
        "requests refused": 1,
        "requests length": 0,
        "fallbacks draft_timeout": 1,
        "fallbacks something_new": 1,
        "fallbacks draft_failed": 0,
        "target_errors timeout": 1,
        "target_errors failed": 0,
    }
    assert wanted.items() <= double.of("m").items()


def test_what_can_be_known_is_there_from_the_start(module: Any, double: TritonDouble) -> None:
    metrics = module.Metrics("m", max_draft_len=2)
    found = double.of("m")
    metrics.close()
    assert set(found.values()) == {0.0}
    assert {short(name) for name, family in module.FAMILIES.items() if not family.label} <= found.keys()
    assert {"accepted_at_position 1", "accepted_at_position 2"} == {k for k in found if "position" in k}
    assert {"draft_length 0", "draft_length 1", "draft_length 2"} == {k for k in found if "length " in k}


def test_totals_of_sixteen_threads_are_exact(
    module: Any, double: TritonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WRITE_PERIOD_S", 0.001)
    metrics = module.Metrics("m", max_draft_len=3)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work() -> None:
        for _ in range(500):
            metrics.request_began()
            metrics.cycle(**CYCLE)
            metrics.fallback("draft_failed")
            metrics.target_error("failed")
            metrics.request_ended("length")

    try:
        with ThreadPoolExecutor(16) as threads:
            for done in [threads.submit(work) for _ in range(16)]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    metrics.close()
    found, times = double.of("m"), 16 * 500
    wanted = {
        "cycles": 1,
        "emitted_tokens": 3,
        "accepted_tokens": 2,
        "accepted_at_position 2": 1,
        "draft_seconds": 0.25,
    }
    wanted |= {"fallbacks draft_failed": 1, "target_errors failed": 1, "requests length": 1, "requests_in_flight": 0}
    assert {name: found[name] for name in wanted} == {name: times * value for name, value in wanted.items()}
    assert double.writers <= {"MainThread", "metrics"}, "a request waits for the server"


def test_a_server_that_refuses_metrics_stops_nothing(
    module: Any, double: TritonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WRITE_PERIOD_S", 0.001)
    metrics = module.Metrics("m")
    double.refuses = True
    until(lambda: bool(double.log), lambda: "nothing was logged")
    time.sleep(0.05)
    assert double.log == ["m: metrics cannot be written: RuntimeError('the server is ending')"], "once is enough"
    double.refuses = False
    metrics.request_began()
    until(lambda: double.of("m")["requests_in_flight"] == 1, lambda: double.of("m"))
    metrics.close()


def test_no_series_is_taken_from_the_server(module: Any, double: TritonDouble) -> None:
    metrics = module.Metrics("m")
    metrics.close()
    del metrics
    gc.collect()
    assert double.deleted == [], "another process of the model may be counting there"


MODEL = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils

from .metrics import Metrics


class TritonPythonModel:
    def initialize(self, args):
        self.metrics = Metrics(args["model_name"], max_draft_len=3)

    def execute(self, requests):
        for request in requests:
            calls = pb_utils.get_input_tensor_by_name(request, "calls").as_numpy().item()
            for name, values in json.loads(calls):
                getattr(self.metrics, name)(**values)
        done = np.ones((1, 1), dtype=np.bool_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("done", done)]) for _ in requests]

    def finalize(self):
        self.metrics.close()
        del self.metrics  # while the server still listens
"""
CONFIG = """
backend: "python"
input [ { name: "calls" data_type: TYPE_STRING dims: [ 1, 1 ] } ]
output [ { name: "done" data_type: TYPE_BOOL dims: [ 1, 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
SERIES = re.compile(r"(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)")


class Endpoint:
    """A server with two models, `one` and `two`, whose requests are calls of their Metrics; and what it publishes."""

    def __init__(self, server: LocalServer, triton: Any) -> None:
        self.server, self._triton = server, triton

    def call(self, model: str, *calls: tuple[str, dict[str, object]]) -> None:
        self._triton.infer(model, calls=json.dumps(calls))

    def text(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server.metrics_port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    def values(self, model: str) -> dict[str, float]:
        """Values of the pipeline's metrics by short name and further label."""
        values = {}
        for found in SERIES.finditer(self.text()):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', found["labels"]))
            if found["name"].startswith("trtspec_") and labels.pop("model") == model:
                values[short(found["name"], *labels.values())] = float(found["value"])
        return values

    def shows(self, model: str, wanted: dict[str, float]) -> None:
        until(lambda: wanted.items() <= self.values(model).items(), lambda: (wanted, self.values(model)))

    def reload(self, model: str) -> None:
        with Client(self.server.state.grpc_url, control_key=self.server.state.token) as client:
            client.reload(model, timeout_s=DEADLINE_S)

    def processes(self, model: str) -> list[int]:
        return [pid for pid, line in family(self.server.state.token).items() if f"/{model}/" in line]


@pytest.fixture(scope="module")
def endpoint(
    tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[], dict[str, int]], triton_class: Any
) -> Iterator[Endpoint]:
    root = tmp_path_factory.mktemp("metrics")
    for model in ("one", "two"):
        version = root / "repository" / model / "1"
        version.mkdir(parents=True)
        (version / "metrics.py").write_text(SOURCE.read_text())
        (version / "model.py").write_text(MODEL)
        (version.parent / "config.pbtxt").write_text(CONFIG)
    server = LocalServer(
        root / "repository", engines_root=root, state_dir=root / "state", num_threads=1, **free_ports()
    )
    server.start()
    triton = triton_class(f"127.0.0.1:{server.grpc_port}")
    try:
        with Client(server.state.grpc_url) as client:
            until(client.ready, server.log.read_text)
        until(lambda: "Started Metrics Service" in server.log.read_text(), server.log.read_text)  # the last to come
        yield Endpoint(server, triton)
    finally:
        triton.close()
        server.stop()


def test_names_and_labels_on_the_endpoint(endpoint: Endpoint, module: Any) -> None:
    text = endpoint.text()
    for name, row in module.FAMILIES.items():
        kind = "gauge" if name == module.IN_FLIGHT else "counter"
        assert f"# HELP {name} {row.help}\n# TYPE {name} {kind}\n" in text
        for labels in re.findall(rf"^{name}\{{(.*)\}}", text, re.MULTILINE):
            assert set(re.findall(r"(\w+)=", labels)) == {"model", row.label or "model"}
    assert set(endpoint.values("one").values()) == set(endpoint.values("two").values()) == {0.0}


def test_triton_publishes_what_dashboard_and_alerts_ask_of_it(endpoint: Endpoint) -> None:
    published = {found["name"] for found in SERIES.finditer(endpoint.text())}
    files = [DOCKER / "grafana" / "dashboards" / "trtspec.json", DOCKER / "prometheus" / "alerts.yml"]
    asked = {name for file in files for name in re.findall(r"\b(?:nv|trtspec)_\w+_\w+(?=[{\[])", file.read_text())}
    assert len(asked) > 15 and asked <= published


def test_two_processes_count_under_the_same_names(endpoint: Endpoint) -> None:
    endpoint.call("one", ("cycle", CYCLE), ("cycle", PLAIN), ("request_began", {}), ("fallback", {"reason": "new"}))
    endpoint.call("two", ("cycle", CYCLE))
    endpoint.shows("one", AFTER_BOTH | {"requests_in_flight": 1, "fallbacks new": 1})
    endpoint.shows("two", {"cycles": 1, "target_passes": 1, "accepted_at_position 2": 1, "requests_in_flight": 0})
    endpoint.call("one", ("request_ended", {"finish_reason": "stop"}))
    endpoint.shows("one", {"requests_in_flight": 0, "requests stop": 1})


def test_counts_outlive_their_process_and_go_on_after_a_reload(endpoint: Endpoint) -> None:
    before = endpoint.values("one")["cycles"]
    endpoint.call("one", ("cycle", CYCLE))
    endpoint.reload("one")  # at once: what was not written yet is written by close
    endpoint.shows("one", {"cycles": before + 1})
    endpoint.call("one", ("cycle", CYCLE), ("request_began", {}))
    endpoint.shows("one", {"cycles": before + 2, "requests_in_flight": 1})


def test_the_next_process_may_be_there_before_the_last_one_has_ended(endpoint: Endpoint) -> None:
    before = endpoint.values("two")["cycles"]
    (old,) = endpoint.processes("two")
    config = endpoint.server.model_repo / "two" / "config.pbtxt"
    config.write_text(CONFIG + 'parameters { key: "changed" value { string_value: "" } }\n')
    with Client(endpoint.server.state.grpc_url, control_key=endpoint.server.state.token) as client:
        client._stub.RepositoryModelLoad(_load_request("two"), timeout=DEADLINE_S, metadata=client._control)
    until(lambda: old not in endpoint.processes("two"), lambda: "the old process does not end")
    for count in range(1, 4):
        endpoint.call("two", ("cycle", CYCLE), ("request_began", {}))
        endpoint.shows("two", {"cycles": before + count, "requests_in_flight": count})


def _load_request(model: str) -> Any:
    from tritonclient.grpc import service_pb2

    return service_pb2.RepositoryModelLoadRequest(model_name=model)


def test_a_killed_process_leaves_no_request_in_flight(endpoint: Endpoint) -> None:
    endpoint.call("one", ("request_began", {}), ("target_error", {"kind": "failed"}))
    until(lambda: endpoint.values("one")["target_errors failed"] > 0, lambda: endpoint.values("one"))
    before = endpoint.values("one")
    (pid,) = endpoint.processes("one")
    os.kill(pid, signal.SIGKILL)
    endpoint.reload("one")
    endpoint.shows("one", before | {"requests_in_flight": 0})
    endpoint.call("one", ("target_error", {"kind": "failed"}))
    endpoint.shows(
        "one", before | {"requests_in_flight": 0, "target_errors failed": before["target_errors failed"] + 1}
    )


def test_the_server_ends_in_order(endpoint: Endpoint) -> None:
    endpoint.call("one", ("cycle", CYCLE))
    process = endpoint.server._process
    endpoint.server.stop()
    assert process is not None and process.returncode == 0
