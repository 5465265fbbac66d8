"""Which models count as silent, with doubles of the client and of the clock that counts the CPU's work."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from trtspec.errors import TrtspecError
from trtspec.triton.client import ServerError, ServerGone
from trtspec.triton.life_signs import LifeSigns

BLS, UNARY, DRAFT, TARGET = "tensorrt_llm_bls", "tensorrt_llm_bls_unary", "tensorrt_llm_draft", "tensorrt_llm"
MODELS = {BLS, UNARY, DRAFT, TARGET, "preprocessing", "ensemble"}
LATE = ServerError("no complete answer within 10 s", where="", message="no answer", status="DEADLINE_EXCEEDED")


def error(message: str) -> ServerError:
    return ServerError(message, where="", message=message, status="INTERNAL")


class Server:
    """A double of client, metrics and processes: `faults` by model, `work` in CPU seconds a question, `asked` in order.

    A pipeline fails with its target, and drafts nothing without its draft.
    """

    def __init__(self) -> None:
        self.faults: dict[str, TrtspecError] = {}
        self.asked: list[str] = []
        self.work: dict[str, float] = {}
        self.used: dict[str, float] = dict.fromkeys(MODELS, 0.0)
        self.tokens = {BLS: [0, 0], UNARY: [0, 0]}

    def ask(self, model: str) -> None:
        self.asked.append(model)
        for each, seconds in self.work.items():
            self.used[each] += seconds
        if model in self.faults:
            raise self.faults[model]

    def complete(self, prompt: str, *, max_tokens: int, stream: bool, timeout_s: float) -> SimpleNamespace:
        self.ask(BLS if stream else UNARY)
        if TARGET in self.faults:
            raise error("tensorrt_llm: Stub process 'tensorrt_llm_0_0' is not healthy.")
        return SimpleNamespace(stats=SimpleNamespace(drafted=0 if DRAFT in self.faults else 3))

    def infer(self, model: str, inputs: dict, outputs: tuple, timeout_s: float) -> Iterator[dict]:
        assert {name: array.tolist() for name, array in inputs.items()} == {
            "input_ids": [[1]],
            "input_lengths": [[1]],
            "request_output_len": [[1]],
        }
        self.ask(model)
        yield {"output_ids": np.zeros((1, 1, 2), dtype=np.int32)}

    def cpu_s(self, model: str | None) -> float:
        return sum(self.used.values()) if model is None else self.used[model]

    def metrics(self) -> str:
        lines = ["# TYPE trtspec_emitted_tokens_total counter", 'trtspec_cycles_total{model="tensorrt_llm_bls"} 9']
        for model, (emitted, drafted) in self.tokens.items():
            lines.append(f'trtspec_emitted_tokens_total{{model="{model}"}} {emitted:.6f}')
            lines.append(f'trtspec_draft_tokens_total{{model="{model}"}} {drafted:.6f}')
        return "\n".join(lines) + "\n"


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def signs(server: Server) -> Iterator[Callable[..., LifeSigns]]:
    """Makes LifeSigns of `server`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(server.metrics().encode())

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as metrics:
        thread = threading.Thread(target=metrics.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{metrics.server_address[1]}/metrics"
        yield lambda drafts=True, url=url: LifeSigns(
            server, url, drafts=drafts, cpu_s=server.cpu_s  # type: ignore[arg-type]
        )  # fmt: skip
        metrics.shutdown()
        thread.join()


def test_idle_and_well_takes_one_request_for_each_pipeline(server: Server, signs: Callable[..., LifeSigns]) -> None:
    assert signs().silent_models(MODELS) == []
    assert server.asked == [BLS, UNARY]


def test_who_has_served_is_not_asked(server: Server, signs: Callable[..., LifeSigns]) -> None:
    watch = signs()
    server.tokens = {BLS: [40, 30], UNARY: [20, 0]}
    assert watch.silent_models(MODELS) == []
    assert server.asked == [UNARY], "tokens without drafts do not show that the draft lives"
    assert watch.silent_models(MODELS) == []
    assert server.asked == [UNARY, BLS, UNARY], "nothing was served since the last look"
    plain = signs(drafts=False)
    server.tokens[UNARY] = [21, 0]
    assert plain.silent_models({UNARY, TARGET}) == []
    assert server.asked == [UNARY, BLS, UNARY], "here nothing drafts"


def test_without_metrics_the_models_are_asked(server: Server, signs: Callable[..., LifeSigns]) -> None:
    assert signs(url="http://127.0.0.1:9/metrics").silent_models(MODELS) == []
    assert server.asked == [BLS, UNARY]


@pytest.mark.parametrize("fault", [LATE, error("Stub process 'tensorrt_llm_draft_0_0' is not healthy.")])
def test_a_draft_that_hangs_is_found_because_drafts_are_missing(
    server: Server, signs: Callable[..., LifeSigns], fault: TrtspecError
) -> None:
    server.faults[DRAFT] = fault
    assert signs().silent_models(MODELS) == [DRAFT]
    assert server.asked == [BLS, UNARY, DRAFT, DRAFT, TARGET]


def test_a_target_that_hangs_is_not_blamed_on_the_pipelines(server: Server, signs: Callable[..., LifeSigns]) -> None:
    server.faults[TARGET] = LATE
    assert signs().silent_models(MODELS) == [TARGET]


def test_a_pipeline_that_hangs_while_its_engines_answer(server: Server, signs: Callable[..., LifeSigns]) -> None:
    server.faults[UNARY] = LATE
    assert signs().silent_models(MODELS) == [UNARY]
    assert server.asked == [BLS, UNARY, DRAFT, TARGET, UNARY, UNARY]


def test_one_unanswered_request_is_none(server: Server, signs: Callable[..., LifeSigns]) -> None:
    answers = iter([LATE, None])

    def infer(model: str, *rest: object) -> Iterator[dict]:
        fault = next(answers)
        if fault:
            raise fault
        return iter(())

    server.infer = infer  # type: ignore[method-assign]
    assert not signs().is_silent(TARGET)


@pytest.mark.parametrize(
    "fault",
    [
        error("too many requests: 256 texts are waiting"),
        error("tensorrt_llm: Stub process 'tensorrt_llm_0_0' is not healthy."),  # somebody else's
        ServerGone("no server"),  # ending: its own process tells
    ],
)
def test_an_error_is_an_answer(server: Server, signs: Callable[..., LifeSigns], fault: TrtspecError) -> None:
    server.faults = {BLS: fault, DRAFT: fault}
    assert signs().silent_models(MODELS) == []


def test_who_computes_is_busy_but_not_for_ever(
    server: Server, signs: Callable[..., LifeSigns], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = signs()
    server.faults = {BLS: LATE, UNARY: LATE, DRAFT: LATE, TARGET: LATE}
    server.work = {DRAFT: 1.0, TARGET: 1.0}
    assert watch.silent_models(MODELS) == []
    server.work = {TARGET: 1.0}
    assert watch.silent_models(MODELS) == [DRAFT], "it is the target that computes"
    monkeypatch.setattr("trtspec.triton.life_signs._LONGEST_COMPUTATION_S", 0.0)
    assert watch.silent_models(MODELS) == [DRAFT, TARGET]
