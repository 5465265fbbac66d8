"""The BLS model against a stand-in for Triton's Python API: every response and every engine call is seen and counted.

The generated repository is imported as Triton imports it; engines are Python functions over ids.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

A, END, SECOND_END, VOCAB = 64, 257, 258, 261  # A: id of "a" in the tiny tokenizer
FINAL = 1
Engine = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class TritonError(Exception):
    INVALID_ARG, UNAVAILABLE, INTERNAL, CANCELLED = range(4)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        super().__init__(message)
        self.code = code

    def message(self) -> str:
        return str(self)


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] = (), error: TritonError | None = None) -> None:  # type: ignore[assignment]
        self._tensors, self._error = list(output_tensors), error

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors


@dataclass
class Triton:
    """Engines by model name, and the calls that were made of them."""

    engines: dict[str, Engine]
    calls: list[tuple[str, dict[str, np.ndarray]]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)  # of these calls
    log: list[str] = field(default_factory=list)
    counts: dict[tuple[str, ...], float] = field(default_factory=dict)  # by metric and label values
    unreachable: set[str] = field(default_factory=set)  # models whose calls raise

    def counted(self, name: str) -> dict[str, float]:
        """A metric by its label, or "" where it has none, without what is zero; once the model has ended."""
        found = {tuple(rest): count for (key, _, *rest), count in self.counts.items() if key == f"trtspec_{name}"}
        return {rest[0] if rest else "": count for rest, count in found.items() if count}

    def module(self) -> types.ModuleType:
        triton = self

        class InferenceRequest:
            def __init__(self, *, model_name: str, request_id: str, inputs: list[Tensor], **_: object) -> None:
                self.model, self.inputs = model_name, {tensor.name(): tensor.as_numpy() for tensor in inputs}
                self.id = request_id

            def exec(self) -> InferenceResponse:
                triton.calls.append((self.model, self.inputs))
                triton.ids.append(self.id)
                if self.model in triton.unreachable:
                    raise RuntimeError(f"Failed for execute the inference request. Model '{self.model}' is not ready.")
                try:
                    outputs = triton.engines[self.model](self.inputs)
                except TritonError as error:
                    return InferenceResponse(error=error)
                return InferenceResponse([Tensor(name, array) for name, array in outputs.items()])

        class MetricFamily:
            COUNTER, GAUGE = "counter", "gauge"

            def __init__(self, name: str, description: str, kind: str) -> None:
                self.name = name

            def Metric(self, labels: dict[str, str]) -> SimpleNamespace:
                key = (self.name, *labels.values())
                triton.counts.setdefault(key, 0.0)
                return SimpleNamespace(
                    increment=lambda value: triton.counts.update({key: triton.counts[key] + value}),
                    set=lambda value: triton.counts.update({key: value}),
                )

        utils = types.ModuleType("triton_python_backend_utils")
        utils.__dict__.update(
            MetricFamily=MetricFamily,
            Tensor=Tensor,
            TritonError=TritonError,
            TritonModelException=RuntimeError,
            InferenceRequest=InferenceRequest,
            InferenceResponse=InferenceResponse,
            Logger=SimpleNamespace(log_warn=self.log.append, log_error=self.log.append),
            TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        )
        return utils


@dataclass
class Request:
    """A client's request and its response sender in one."""

    tensors: dict[str, np.ndarray]
    leaves_after: int | None = None  # responses
    refuses: int | None = None  # the response that cannot be sent
    outputs_wanted: tuple[str, ...] = ("text_output", "output_ids", "finish_reason", "total_target_passes")
    asked: list[float] = field(default_factory=list)  # when it was asked whether the client has left
    sent: list[tuple[InferenceResponse | None, int]] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, array) for name, array in self.tensors.items()]

    def request_id(self) -> str:
        return "r1"

    def requested_output_names(self) -> list[str]:
        return list(self.outputs_wanted)

    def is_cancelled(self) -> bool:
        self.asked.append(time.monotonic())
        return self.leaves_after is not None and len(self.sent) >= self.leaves_after

    def get_response_sender(self) -> Request:
        return self

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if len(self.sent) == self.refuses:
            self.refuses = None
            raise RuntimeError("no shared memory")
        self.sent.append((response, flags))
        if flags == FINAL:
            self.done.set()

    def outputs(self, index: int) -> dict[str, Any]:
        response = self.sent[index][0]
        assert response is not None
        return {tensor.name(): tensor.as_numpy().reshape(-1).tolist() for tensor in response.output_tensors()}


def answering(token: int, num_max: int = 100) -> Engine:
    """An engine that writes `token` and nothing else; draft tokens that are something else are rejected."""

    def engine(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        count = int(inputs["request_output_len"][0, 0])
        drafts = inputs["draft_input_ids"][0].tolist() if "draft_input_ids" in inputs else None
        if drafts is not None:
            count = next((i for i, draft in enumerate(drafts) if draft != token), len(drafts)) + 1
        return answer(inputs, [token] * min(count, num_max))

    return engine


def answer(inputs: dict[str, np.ndarray], new: list[int]) -> dict[str, np.ndarray]:
    row = np.array([[[*inputs["input_ids"][0].tolist(), *new]]], dtype=np.int32)
    return {"output_ids": row, "sequence_length": np.array([[row.shape[2]]], dtype=np.int32)}


@pytest.fixture
def pipeline(
    pair: SimpleNamespace, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Any, Triton]]]:
    """Start the model: `pipeline(target, draft, model=name, middle=engine, **parameters)` -> (model, Triton).

    The parameter `without` is left out."""
    repository = pair.write(tmp_path / "repository")
    started = []

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] in ("1", "trtspec_decoding")]:
            del sys.modules[name]

    def start(
        target: Engine,
        draft: Engine,
        model: str = "tensorrt_llm_bls",
        middle: Engine | None = None,
        without: str = "",
        **parameters: str,
    ) -> tuple[Any, Triton]:
        from google.protobuf import json_format, text_format
        from tritonclient.grpc.model_config_pb2 import ModelConfig

        engines = {"tensorrt_llm": target, "tensorrt_llm_draft": draft, "tensorrt_llm_middle": middle}
        triton = Triton({name: engine for name, engine in engines.items() if engine is not None})
        monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton.module())
        for path in (repository / model, repository / model / "1"):
            monkeypatch.syspath_prepend(str(path))
        forget()
        config = text_format.Parse((repository / model / "config.pbtxt").read_text(), ModelConfig())
        for key, value in parameters.items():
            config.parameters[key].string_value = value
        config.parameters.pop(without, None)
        instance = importlib.import_module("1.model").TritonPythonModel()
        content = json_format.MessageToDict(config, preserving_proto_field_name=True)
        instance.initialize({"model_config": json.dumps(content), "model_name": model})
        started.append(instance)
        return instance, triton

    yield start
    for instance in started:
        instance.finalize()
    forget()


def ask(model: Any, request: Request | None = None, **tensors: Any) -> Request:
    """Send one request and wait for its final response."""
    request = send(model, request, **tensors)
    assert request.done.wait(20), "no final response"
    return request


def send(model: Any, request: Request | None = None, **tensors: Any) -> Request:
    """Send one request; a list has a value for each of its texts."""
    kinds = {str: np.object_, int: np.int32, bool: np.bool_, float: np.float32}
    tensors = {"text_input": "Hello", "max_tokens": 12, "stream": True, **tensors}
    request = request or Request({})
    num_texts = max(len(value) if isinstance(value, list) else 1 for value in tensors.values())
    for name, value in tensors.items():
        values = value if isinstance(value, list) else [value] * num_texts
        items = [[item.encode() if isinstance(item, str) else item] for item in values]
        request.tensors[name] = np.array(items, dtype=kinds[type(values[0])])
    model.execute([request])
    return request


def finals(request: Request) -> list[bool]:
    return [flags == FINAL for _, flags in request.sent]


def test_blocks_are_sent_as_they_are_accepted(pipeline) -> None:
    model, triton = pipeline(answering(A), answering(A))
    request = ask(model)
    assert [request.outputs(i)["output_ids"] for i in range(3)] == [[A] * 4] * 3
    assert finals(request) == [False, False, True]
    assert [name for name, _ in triton.calls] == ["tensorrt_llm_draft", "tensorrt_llm"] * 3


def test_the_unary_model_sends_one_response(pipeline) -> None:
    model, _ = pipeline(answering(A), answering(A), model="tensorrt_llm_bls_unary")
    request = ask(model, stream=False)
    assert finals(request) == [True]
    assert request.outputs(0)["text_output"] == [b"a" * 12]


def test_no_token_is_one_final_response(pipeline) -> None:
    model, _ = pipeline(answering(A, num_max=0), answering(A))
    request = ask(model, num_draft_tokens=0)
    assert finals(request) == [True]
    assert request.outputs(0)["output_ids"] == []
    assert request.outputs(0)["finish_reason"] == [b"stop"]


def test_an_error_in_the_middle_is_one_final_response(pipeline) -> None:
    healthy = answering(A)

    def failing(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if inputs["input_ids"].shape[1] > 10:
            raise TritonError("out of order", TritonError.INTERNAL)
        return healthy(inputs)

    model, _ = pipeline(failing, answering(A))
    request = ask(model, max_tokens=40)
    assert finals(request) == [False, False, True]
    error = request.sent[-1][0].error()  # type: ignore[union-attr]
    assert (error.message(), error.code) == ("tensorrt_llm: out of order", TritonError.UNAVAILABLE)


@pytest.mark.parametrize("drafts", ["good", "failing"])
def test_nothing_is_kept_of_a_request_that_is_answered(pipeline, drafts: str) -> None:
    """Without the garbage collector, which comes by every few minutes: no reference leads in a circle."""

    def failing(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        raise TritonError("out of order", TritonError.INTERNAL)

    def known() -> list[object]:
        names = {"Text", "Reply", "Answer", "Generation", "Departure", "MeasuredPace"}
        return [one for one in gc.get_objects() if type(one).__name__ in names]

    model, _ = pipeline(answering(A), answering(A) if drafts == "good" else failing)
    ask(model)
    gc.collect()
    gc.disable()
    try:
        earlier = known()  # of other tests, whose threads may still be there
        for _ in range(3):
            ask(model)
            ask(model, temperature=1.0, stream=False)
        kept, deadline = [None], time.monotonic() + 5
        while kept and time.monotonic() < deadline:
            time.sleep(0.05)  # until its threads have let go of the last one
            kept = [one for one in known() if not any(one is other for other in earlier)]
        assert kept == []
    finally:
        gc.enable()


def test_a_client_that_leaves_costs_at_most_one_more_call(pipeline) -> None:
    """It leaves after block 2 of 10; calls take longer than the time between two looks at the client."""

    def slowly(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(0.05)
        return answering(A)(inputs)

    model, triton = pipeline(slowly, slowly)
    request = ask(model, Request({}, leaves_after=2), max_tokens=40)
    assert finals(request) == [False, False, True]
    assert request.outputs(2)["finish_reason"] == [b"cancelled"]
    assert len(triton.calls) <= 4 + 1


@pytest.mark.parametrize("place", ["read_requests", "Generation", "make_drafter", "run"])
def test_a_crash_in_the_pipeline_is_one_final_response(pipeline, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    model, triton = pipeline(answering(A), answering(A))
    monkeypatch.setattr(sys.modules["1.model"], place, lambda *_, **__: 1 / 0)
    request = ask(model)
    assert finals(request) == [True]
    assert "ZeroDivisionError" in request.sent[0][0].error().message()  # type: ignore[union-attr]
    assert "ZeroDivisionError" in triton.log[0]


def test_a_slow_draft_is_left_alone_for_a_while(pipeline) -> None:
    """The first request waits for its time-out once; the second does not wait at all, and both get their text."""
    release = threading.Event()

    def hanging(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        release.wait(20)
        return answer(inputs, [A])

    model, triton = pipeline(answering(A), hanging, draft_timeout_s="0.2", draft_rest_s="100")
    first, second = ask(model), ask(model)
    release.set()
    for request in (first, second):
        assert b"".join(request.outputs(i)["text_output"][0] for i in range(len(request.sent))) == b"a" * 12
    assert [name for name, _ in triton.calls].count("tensorrt_llm_draft") == 1
    assert [line for line in triton.log if "without drafts" in line] == [
        "request 'r1' went on without drafts: tensorrt_llm_draft did not answer within 0.2 s"
    ]
    model.finalize()
    assert triton.counted("fallbacks_total") == {"draft_timeout": 1, "draft_resting": 2}
    assert triton.counted("cycles_total") == {"": 3}


def test_an_end_id_that_the_engine_left_out_is_seen(pipeline) -> None:
    """Draft and target both end after one token; the C++ backend shows neither end id."""
    model, triton = pipeline(answering(A, num_max=1), answering(A, num_max=1))
    request = ask(model)
    assert request.outputs(0)["output_ids"] == [A]
    assert request.outputs(0)["finish_reason"] == [b"stop"]
    assert triton.calls[1][1]["draft_input_ids"].tolist() == [[A, END]]


def test_drafts_that_are_rejected_are_no_end(pipeline) -> None:
    model, _ = pipeline(answering(A), answering(A + 1))
    request = ask(model, max_tokens=3)
    assert [request.outputs(i)["output_ids"] for i in range(3)] == [[A]] * 3
    assert request.outputs(2)["finish_reason"] == [b"length"]


def test_a_second_end_id_ends_too(pipeline) -> None:
    model, triton = pipeline(answering(SECOND_END), answering(A))
    request = ask(model, num_draft_tokens=0)
    assert request.outputs(0)["output_ids"] == []
    assert request.outputs(0)["finish_reason"] == [b"stop"]
    sent = triton.calls[0][1]
    assert sent["end_id"].tolist() == [[END]]
    assert sent["stop_words_list"].tolist() == [[[SECOND_END], [1]]]


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({}, {"runtime_top_k": 1}),
        ({"temperature": 0.0}, {"runtime_top_k": 1}),
        ({"temperature": 0.5}, {"temperature": 0.5, "runtime_top_p": 1.0}),
        ({"top_k": 7}, {"temperature": 1.0, "runtime_top_k": 7, "runtime_top_p": 1.0}),
        ({"temperature": 2.0, "top_p": 0.5}, {"temperature": 2.0, "runtime_top_p": 0.5}),
        ({"repetition_penalty": 1.5}, {"runtime_top_k": 1, "repetition_penalty": 1.5}),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, {"presence_penalty": 0.5, "frequency_penalty": 0.25}),
    ],
)
def test_sampling_settings_reach_draft_and_target(pipeline, settings: dict[str, Any], sent: dict[str, float]) -> None:
    model, triton = pipeline(answering(A), answering(A), acceptance="tokens")
    ask(model, **settings)
    target = triton.calls[1][1]
    assert {name: target[name].item() for name in sent} == sent
    assert ("seed" in target) == ("temperature" in sent)
    draft = triton.calls[0][1]
    penalties = [name for name in sent if name.endswith("penalty")]
    assert {name: draft[name].item() for name in penalties} == {name: sent[name] for name in penalties}


def test_every_call_of_a_request_has_a_seed_of_its_own(pipeline) -> None:
    def seeds() -> list[int]:
        model, triton = pipeline(answering(A), answering(A), acceptance="tokens")
        ask(model, Request({"seed": np.array([[5]], dtype=np.uint64)}), temperature=1.0)
        return [sent["seed"].item() for name, sent in triton.calls if name == "tensorrt_llm"]

    first = seeds()
    assert len(set(first)) == len(first) == 3
    assert seeds() == first


def test_vocabularies_padded_differently_fit(pipeline) -> None:
    """The draft has 8 ids more than the target: its logits are cut, the bias it gets is filled up with 0."""

    def draft(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = answer(inputs, [A] * int(inputs["request_output_len"][0, 0]))
        rows = outputs["sequence_length"].item() - inputs["input_ids"].shape[1]
        return outputs | {"generation_logits": np.zeros((1, 1, rows, VOCAB + 8), dtype=np.float32)}

    model, triton = pipeline(answering(A), draft, draft_vocab_size=str(VOCAB + 8))
    bias = {"embedding_bias_words": "a", "embedding_bias_weights": 3.0}
    ask(model, temperature=1.0, top_p=1.0, **bias)
    (_, to_draft), (_, to_target) = triton.calls[:2]
    assert to_draft["embedding_bias"].shape == (1, VOCAB + 8)
    assert to_draft["embedding_bias"][0, VOCAB:].tolist() == [0.0] * 8
    assert to_target["embedding_bias"].shape == (1, VOCAB)
    assert to_target["draft_logits"].shape == (1, 3, VOCAB)


def test_logits_of_a_smaller_vocabulary_are_filled_up(pipeline) -> None:
    def draft(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return answer(inputs, [A] * 3) | {"generation_logits": np.zeros((1, 1, 3, VOCAB - 2), dtype=np.float32)}

    model, triton = pipeline(answering(A), draft, draft_vocab_size=str(VOCAB - 2))
    ask(model, temperature=1.0, top_p=1.0, max_tokens=4)
    assert triton.calls[1][1]["draft_logits"][0, :, -2:].tolist() == [[-np.inf] * 2] * 3


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"accumulate_tokens": "true"}, "parameter accumulate_tokens is 'true'; expected it unset"),
        ({"multimodal_encoders_name": "vision"}, "parameter multimodal_encoders_name is 'vision'"),
        ({"num_draft_tokens": "four"}, "invalid literal"),
        ({"method": "trees"}, "parameter method is 'trees'; expected one of none, draft_target, early_exit, ngram"),
        ({"method": "cascade"}, "parameter tensorrt_llm_middle_model_name is missing from config.pbtxt"),
        ({"method": "ngram", "ngram_max_ngram": "0"}, "parameter ngram_max_ngram is 0; expected 1 or more"),
        ({"method": "tree", "tree_branching": "2,x"}, "parameter tree_branching is 2,x; expected whole numbers"),
        ({"without": "method"}, "parameter method is missing from config.pbtxt"),
        ({"without": "tensorrt_llm_draft_model_name"}, "parameter tensorrt_llm_draft_model_name is missing"),
        ({"logits_dtype": "BF16"}, "parameter logits_dtype is 'BF16'; expected FP32 or FP16"),
    ],
)
def test_parameters_that_cannot_work_stop_the_model_from_loading(
    pipeline, parameters: dict[str, str], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        pipeline(answering(A), answering(A), **parameters)


# Other drafters than a draft model

MIDDLE = {
    "method": "cascade",
    "cascade_num_draft_tokens": "2",
    "tensorrt_llm_middle_model_name": "tensorrt_llm_middle",
    "middle_max_seq_len": "512",
    "middle_vocab_size": str(VOCAB),
    "middle_returns_logits": "true",
}


def with_logits(engine: Engine, vocab_size: int = VOCAB, dtype: type = np.float32, level: float = 0.0) -> Engine:
    """The same engine, with generation logits: END as likely as all other ids, every one of them at `level`."""

    def answering_logits(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = engine(inputs)
        rows = outputs["sequence_length"].item() - inputs["input_ids"].shape[1]
        return outputs | {"generation_logits": np.full((1, 1, rows, vocab_size), level, dtype=dtype)}

    return answering_logits


def text(request: Request) -> bytes:
    return b"".join(request.outputs(i)["text_output"][0] for i in range(len(request.sent)))


def test_a_look_up_calls_the_target_alone(pipeline) -> None:
    """The prompt ends in `aaa`, so `a` is what it looks up."""
    model, triton = pipeline(answering(A), answering(A + 1), method="ngram", ngram_max_ngram="2", acceptance="tokens")
    for settings in ({}, {"temperature": 1.0, "top_p": 1.0}):
        triton.calls.clear()
        request = ask(model, text_input="xaaa", **settings)
        assert text(request) == b"a" * 12
        assert [name for name, _ in triton.calls] == ["tensorrt_llm"] * 3
        for _, sent in triton.calls:
            assert sent["draft_input_ids"].tolist() == [[A] * 3]
            assert "draft_logits" not in sent


def test_the_window_of_a_look_up_is_a_parameter(pipeline) -> None:
    model, triton = pipeline(answering(A), answering(A), method="ngram", ngram_window="2", acceptance="tokens")
    ask(model, text_input="abcab", max_tokens=2)
    assert "draft_input_ids" not in triton.calls[0][1]


def test_a_cascade_calls_draft_middle_and_target(pipeline) -> None:
    model, triton = pipeline(answering(A), answering(A), middle=answering(A), **MIDDLE)
    request = ask(model)
    assert text(request) == b"a" * 12
    # two from the draft, accepted, with the middle model's own token: three for the target
    assert [name.removeprefix("tensorrt_llm") for name, _ in triton.calls] == ["_draft", "_middle", ""] * 3
    assert [sent["draft_input_ids"].shape[1] for name, sent in triton.calls if "draft_input_ids" in sent] == [2, 3] * 3
    assert len({sent["request_output_len"].item() for name, sent in triton.calls if name == "tensorrt_llm"}) == 1


def test_logits_of_a_cascade_pass_from_level_to_level_without_end_ids(pipeline) -> None:
    """Vocabularies of 261, 259 and 265 ids; each level's logits are fitted to the next."""
    model, triton = pipeline(
        answering(A),
        with_logits(answering(A), VOCAB + 4, level=1.0),
        middle=with_logits(answering(A), VOCAB - 2, level=2.0),
        draft_vocab_size=str(VOCAB + 4),
        **MIDDLE | {"middle_vocab_size": str(VOCAB - 2)},
    )
    ask(model, temperature=1.0, top_p=1.0)
    (_, to_draft), (_, to_middle), (_, to_target) = triton.calls[:3]
    assert to_draft["return_generation_logits"].item() and to_middle["return_generation_logits"].item()
    assert "return_generation_logits" not in to_target
    for sent in (to_draft, to_middle):  # nothing may end, and every level says so to its engine
        assert sent["min_tokens"].item() == sent["request_output_len"].item()
        assert SECOND_END in sent["bad_words_list"][0, 0]
    for sent, level, num_ids, known in ((to_middle, 1.0, VOCAB - 2, VOCAB - 2), (to_target, 2.0, VOCAB, VOCAB - 2)):
        rows = sent["draft_logits"][0]
        assert rows.shape == (sent["draft_input_ids"].shape[1], num_ids)
        banned = [token for token in range(num_ids) if token in (END, SECOND_END) or token >= known]
        assert np.all(rows[:, banned] == -np.inf)
        assert np.all(np.delete(rows, banned, axis=1) == level)


@pytest.mark.parametrize(("broken", "calls"), [("draft", 2), ("middle", 2)])
def test_a_level_of_a_cascade_that_fails_is_left_out(pipeline, broken: str, calls: int) -> None:
    def failing(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        raise TritonError("out of order", TritonError.INTERNAL)

    engines = {"draft": answering(A), "middle": answering(A)} | {broken: failing}
    model, triton = pipeline(answering(A), engines["draft"], middle=engines["middle"], draft_rest_s="0", **MIDDLE)
    request = ask(model)
    assert text(request) == b"a" * 12
    assert [name for name, _ in triton.calls].count(f"tensorrt_llm_{broken}") == calls
    assert any(f"without drafts: tensorrt_llm_{broken}: out of order" in line for line in triton.log)
    verified = [sent for name, sent in triton.calls if name == "tensorrt_llm" and "draft_input_ids" in sent]
    assert bool(verified) == (broken == "draft")


TREE = {"method": "tree", "tree_branching": "2,1", "num_draft_tokens": "4", "acceptance": "tokens"}


def preferring(first: int, second: int) -> Engine:
    """Writes `first`; its logits have `second` in the second place."""

    def engine(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = with_logits(answering(first))(inputs)
        outputs["generation_logits"][..., first] = 2.0
        outputs["generation_logits"][..., second] = 1.0
        return outputs

    return engine


def test_the_paths_of_a_tree_are_under_way_at_the_same_time(pipeline) -> None:
    meeting = threading.Barrier(2, timeout=10)

    def target(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        meeting.wait()  # for the other path
        return answering(A)(inputs)

    model, triton = pipeline(target, preferring(A, A + 1), **TREE)
    request = ask(model)
    assert text(request) == b"a" * 12
    verified = [sent["draft_input_ids"][0].tolist() for name, sent in triton.calls if name == "tensorrt_llm"]
    assert sorted(verified) == [[A, A]] * 4 + [[A + 1, A]] * 4
    ids = [call_id for call_id, (name, _) in zip(triton.ids, triton.calls, strict=True) if name == "tensorrt_llm"]
    assert {ids.count(call_id) for call_id in ids} == {4} and len(set(ids)) == 2  # two calls of a cycle are not one
    drafted = [sent["input_ids"].shape[1] for name, sent in triton.calls if name == "tensorrt_llm_draft"]
    assert len(drafted) == 8 and drafted[1] == drafted[0] + 1  # behind the context, and behind the second child


def test_an_own_token_in_another_path_of_a_tree_is_gone_on_with(pipeline) -> None:
    model, triton = pipeline(answering(A + 1), preferring(A, A + 1), **TREE)
    request = ask(model)
    assert text(request) == b"b" * 12
    # the second path begins with b; behind it the draft wants a, so the target's own token ends the cycle
    assert sum(name == "tensorrt_llm" for name, _ in triton.calls) == 2 * 6


@pytest.mark.parametrize("path", [A, A + 1])
def test_a_path_that_fails_ends_the_request(pipeline, path: int) -> None:
    def target(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if inputs["draft_input_ids"][0, 0] == path:
            raise TritonError("out of order", TritonError.INTERNAL)
        return answering(A)(inputs)

    model, _ = pipeline(target, preferring(A, A + 1), **TREE)
    request = ask(model)
    assert finals(request) == [True]
    error = request.sent[0][0].error()
    assert (error.code, error.message()) == (TritonError.UNAVAILABLE, "tensorrt_llm: out of order")


def test_a_draft_that_cannot_grow_a_tree_is_left_out(pipeline) -> None:
    model, triton = pipeline(answering(A), answering(A), draft_rest_s="0", **TREE)
    assert text(ask(model)) == b"a" * 12
    assert any("without drafts: tensorrt_llm_draft answered without generation_logits" in line for line in triton.log)


def test_float16_logits_go_and_come_as_float16(pipeline) -> None:
    draft = with_logits(answering(A), dtype=np.float16)
    model, triton = pipeline(answering(A), draft, logits_dtype="FP16")
    request = ask(model, temperature=1.0, top_p=1.0)
    assert triton.calls[1][1]["draft_logits"].dtype == np.float16
    assert text(request) == b"a" * 12
    model, triton = pipeline(answering(A), draft, draft_rest_s="0")  # FP32 is expected here
    ask(model, temperature=1.0, top_p=1.0)
    assert "answered generation_logits as float16" in triton.log[-1]


@pytest.mark.parametrize("method", ["medusa", "eagle", "lookahead", "redrafter", "none"])
def test_where_the_engine_drafts_the_pipeline_decodes_plainly(pipeline, method: str) -> None:
    model, triton = pipeline(answering(A), answering(A), method=method, num_draft_tokens="0", acceptance="tokens")
    for settings in ({}, {"num_draft_tokens": 0}, {"use_draft_logits": False}):
        triton.calls.clear()
        request = ask(model, **settings)
        assert text(request) == b"a" * 12
        # one token a pass where nothing drafts; not known where the engine does
        assert request.outputs(-1)["total_target_passes"] == [12 if method == "none" else 0]
        assert {name for name, _ in triton.calls} == {"tensorrt_llm"}
        assert all("draft_input_ids" not in sent for _, sent in triton.calls)
    where = "nothing drafts here" if method == "none" else f"the engine drafts by itself ({method})"
    assert refusal(ask(model, num_draft_tokens=3)) == f"num_draft_tokens is 3; {where}, expected 0"
    reason = f"use_draft_logits is true; method {method} has none, expected false"
    assert refusal(ask(model, use_draft_logits=True)) == reason


def refusal(request: Request) -> str:
    assert finals(request) == [True]
    error = request.sent[0][0].error()  # type: ignore[union-attr]
    assert error.code == TritonError.INVALID_ARG
    return error.message()


def test_an_engine_that_ignores_the_temperature_is_not_asked_to_sample(pipeline) -> None:
    settings = {"method": "medusa", "num_draft_tokens": "0", "acceptance": "tokens", "greedy_only": "true"}
    model, _ = pipeline(answering(A), answering(A), **settings)
    assert text(ask(model, temperature=0.0)) == b"a" * 12
    assert text(ask(model, temperature=0.7, top_k=1)) == b"a" * 12
    assert refusal(ask(model, temperature=0.7)) == (
        "the request samples (temperature 0.7); the engine's own drafting (medusa) decodes greedily, "
        "expected temperature 0 or top_k 1"
    )


def test_draft_logits_that_no_engine_has_are_refused(pipeline) -> None:
    model, _ = pipeline(answering(A), answering(A), draft_returns_logits="false")
    reason = "use_draft_logits is true; tensorrt_llm_draft cannot return generation logits, expected false"
    assert refusal(ask(model, use_draft_logits=True)) == reason
    assert text(ask(model, temperature=1.0, top_p=1.0)) == b"a" * 12
    model, _ = pipeline(answering(A), answering(A), method="ngram", acceptance="tokens")
    assert "method ngram has none" in refusal(ask(model, use_draft_logits=True))


# Calls that come too late


def plain(request: Request) -> list[int]:
    """All ids of a stream."""
    return [token for index in range(len(request.sent)) for token in request.outputs(index)["output_ids"]]


def counting(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A target that writes the next letter of the alphabet, whatever is proposed."""
    start = inputs["input_ids"].shape[1]
    wanted = [A + (start + i) % 26 for i in range(int(inputs["request_output_len"][0, 0]))]
    drafts = inputs["draft_input_ids"][0].tolist() if "draft_input_ids" in inputs else None
    if drafts is not None:
        num_accepted = next((i for i, (a, b) in enumerate(zip(drafts, wanted, strict=False)) if a != b), len(drafts))
        wanted = wanted[: num_accepted + 1]
    return answer(inputs, wanted)


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def num_workers() -> int:
    return sum(thread.name == "request" for thread in threading.enumerate())


@pytest.mark.parametrize("method", ["draft_target", "tree"])
def test_a_draft_that_is_too_late_leaves_its_generation_to_go_on(pipeline, method: str) -> None:
    """Its third call hangs; when it comes back at last, it changes nothing."""
    release = threading.Event()
    contexts: list[int] = []

    def hanging(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        contexts.append(inputs["input_ids"].shape[1])
        if len(contexts) == 3:
            release.wait(20)
        return with_logits(counting)(inputs)

    settings = {"method": "tree", "tree_branching": "2,1", "acceptance": "tokens"} if method == "tree" else {}
    workers = num_workers()
    model, triton = pipeline(counting, hanging, draft_timeout_s="0.3", draft_rest_s="100", **settings)
    workers = num_workers() - workers
    request = ask(model, max_tokens=20)
    assert plain(request) == [A + (6 + i) % 26 for i in range(20)]
    assert sum(finals(request)) == 1 and finals(request)[-1]
    assert len(contexts) == 3
    sent = len(request.sent)
    assert num_workers() == workers + 1
    release.set()
    until(lambda: num_workers() == workers, "the thread that was late stays")
    assert plain(ask(model, num_draft_tokens=0)) == [A + (6 + i) % 26 for i in range(12)]
    model.finalize()
    assert len(request.sent) == sent
    assert triton.counted("fallbacks_total").keys() == {"draft_timeout", "draft_resting"}
    assert triton.counted("fallbacks_total")["draft_timeout"] == 1
    assert triton.counted("emitted_tokens_total") == {"": 32}
    assert triton.counted("requests_in_flight") == {}


def test_a_draft_that_is_too_late_twice_is_given_up(pipeline) -> None:
    release = threading.Event()

    def hanging(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        release.wait(20)
        return answer(inputs, [A])

    model, triton = pipeline(counting, hanging, draft_timeout_s="0.1", draft_rest_s="0")
    assert plain(ask(model)) == [A + (6 + i) % 26 for i in range(12)]
    release.set()
    model.finalize()
    assert [name for name, _ in triton.calls].count("tensorrt_llm_draft") == 2
    assert triton.counted("fallbacks_total") == {"draft_timeout": 2}
    assert triton.counted("cycles_total") == {"": 3}


@pytest.mark.parametrize("method", ["draft_target", "tree"])
def test_a_target_that_is_too_late_is_one_error(pipeline, method: str) -> None:
    release = threading.Event()
    calls: list[int] = []

    def hanging(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        calls.append(0)
        if len(calls) > 2:
            release.wait(20)
        return counting(inputs)

    settings = {"method": "tree", "tree_branching": "2", "acceptance": "tokens"} if method == "tree" else {}
    model, triton = pipeline(hanging, with_logits(counting), call_timeout_s="0.2", max_concurrency="1", **settings)
    request = ask(model)
    assert finals(request) == [False] * (len(request.sent) - 1) + [True]
    error = request.sent[-1][0].error()
    assert (error.code, error.message()) == (TritonError.UNAVAILABLE, "tensorrt_llm did not answer within 0.2 s")
    sent = len(request.sent)
    release.set()
    assert plain(ask(model)) == [A + (6 + i) % 26 for i in range(12)]  # by the only worker's successor
    model.finalize()
    assert len(request.sent) == sent
    assert triton.counted("target_errors_total") == {"timeout": 1}
    assert triton.counted("requests_total") == {"error": 1, "length": 1}
    assert triton.counted("requests_in_flight") == {}
    assert model.load.in_flight == 0


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_response_that_cannot_be_sent_ends_the_request_and_no_worker(pipeline, refused: int) -> None:
    """A stream of three responses; after a gap nothing but an error comes."""
    model, triton = pipeline(answering(A), answering(A), max_concurrency="1")
    request = ask(model, Request({}, refuses=refused))
    assert finals(request) == [False] * refused + [True]
    error = request.sent[-1][0].error()
    assert (error.code, error.message()) == (TritonError.INTERNAL, "internal error: a response could not be sent")
    assert any("a response could not be sent: RuntimeError('no shared memory')" in line for line in triton.log)
    assert text(ask(model)) == b"a" * 12
    model.finalize()
    assert len(request.sent) == refused + 1
    assert sum(triton.counted("requests_total").values()) == 2
    assert triton.counted("requests_in_flight") == {}


# How long a draft is left alone


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """The clock of a model's engines, once it has started."""

    def stop() -> SimpleNamespace:
        clock = SimpleNamespace(now=1000.0)
        monkeypatch.setattr(sys.modules["1.engine_model"], "time", SimpleNamespace(monotonic=lambda: clock.now))
        return clock

    return stop


def failing_while(broken: threading.Event) -> Engine:
    def engine(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if broken.is_set():
            raise TritonError("out of order", TritonError.INTERNAL)
        return answering(A)(inputs)

    return engine


def test_the_rest_doubles_with_every_trial_that_fails(pipeline, clock) -> None:
    broken = threading.Event()
    broken.set()
    model, triton = pipeline(answering(A), failing_while(broken), draft_rest_s="10")
    time_now = clock()

    def drafts(after_s: float) -> int:
        time_now.now += after_s
        triton.calls.clear()
        assert text(ask(model)) == b"a" * 12
        return [name for name, _ in triton.calls].count("tensorrt_llm_draft")

    assert drafts(0) == 1  # fails: 10 s
    assert (drafts(9.9), drafts(0.2)) == (0, 1)  # fails: 20 s
    assert (drafts(19.9), drafts(0.2)) == (0, 1)  # fails: 40 s
    assert drafts(39.9) == 0
    broken.clear()
    assert drafts(0.2) == 3
    broken.set()
    assert drafts(0) == 1  # the first failure again: 10 s
    assert (drafts(9.9), drafts(0.2)) == (0, 1)
    for _ in range(6):
        time_now.now += 10_000
        assert drafts(0) == 1
    assert (drafts(79.9), drafts(0.2)) == (0, 1)  # never longer than 8 times


def test_requests_that_fail_together_are_one_failure(pipeline, clock) -> None:
    meeting = threading.Barrier(4, timeout=10)

    def draft(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not meeting.broken:
            meeting.wait()
        raise TritonError("out of order", TritonError.INTERNAL)

    model, triton = pipeline(answering(A), draft, draft_rest_s="10", max_concurrency="4")
    time_now = clock()
    for request in [send(model) for _ in range(4)]:
        assert request.done.wait(20)
    assert [name for name, _ in triton.calls].count("tensorrt_llm_draft") == 4
    meeting.abort()
    time_now.now += 10.1
    ask(model)
    assert [name for name, _ in triton.calls].count("tensorrt_llm_draft") == 5


def test_one_request_tries_while_the_others_do_without(pipeline, clock) -> None:
    broken, trial, release = threading.Event(), threading.Event(), threading.Event()
    broken.set()

    def draft(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not broken.is_set():
            trial.set()
            release.wait(20)
        return failing_while(broken)(inputs)

    model, triton = pipeline(answering(A), draft, draft_rest_s="10")
    time_now = clock()
    ask(model)
    time_now.now += 10.1
    broken.clear()
    trying = send(model)
    assert trial.wait(20)
    triton.calls.clear()
    for _ in range(3):
        assert text(ask(model)) == b"a" * 12
    assert {name for name, _ in triton.calls} == {"tensorrt_llm"}
    assert not trying.done.is_set()
    release.set()
    assert trying.done.wait(20) and text(trying) == b"a" * 12
    triton.calls.clear()
    ask(model)
    assert [name for name, _ in triton.calls].count("tensorrt_llm_draft") == 3


@pytest.mark.parametrize("reason", ["failed", "missing", "nonsense", "timeout"])
def test_why_a_cycle_had_no_drafts_is_counted(pipeline, reason: str) -> None:
    def draft(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if reason == "timeout":
            time.sleep(0.5)
        if reason == "failed":
            raise TritonError("out of order", TritonError.INTERNAL)
        return answer(inputs, [VOCAB + 1])

    for rest_s, expected in (("0", {f"draft_{reason}": 2}), ("100", {f"draft_{reason}": 1, "draft_resting": 1})):
        model, triton = pipeline(answering(A), draft, draft_timeout_s="0.1", draft_rest_s=rest_s)
        triton.unreachable |= {"tensorrt_llm_draft"} if reason == "missing" else set()
        assert text(ask(model)) == b"a" * 12
        model.finalize()
        assert triton.counted("fallbacks_total") == expected


# Several texts in one request

WANTED = ("text_output", "output_ids", "finish_reason", "batch_index", "num_output_tokens", "generation_logits")


def repeating(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """An engine that writes the first letter of the prompt again and again."""
    return with_logits(answering(int(inputs["input_ids"][0, 1])), level=1.0)(inputs)


def test_the_responses_of_several_streamed_texts_say_whose_they_are(pipeline) -> None:
    model, triton = pipeline(repeating, repeating)
    request = ask(
        model, Request({}, outputs_wanted=WANTED), text_input=["ax", "bxx", "c"], max_tokens=[6, 12, 1], stream=True
    )
    assert finals(request) == [False] * (len(request.sent) - 1) + [True]
    texts, reasons = {0: b"", 1: b"", 2: b""}, {}
    for index in range(len(request.sent)):
        outputs = request.outputs(index)
        (place,) = outputs["batch_index"]
        assert place not in reasons, "a response after the text's last one"
        texts[place] += outputs["text_output"][0]
        if "finish_reason" in outputs:
            reasons[place] = outputs["finish_reason"][0], outputs["num_output_tokens"][0]
    assert texts == {0: b"a" * 6, 1: b"b" * 12, 2: b"c"}
    assert reasons == {0: (b"length", 6), 1: (b"length", 12), 2: (b"length", 1)}
    assert len(set(triton.ids)) == 3  # an engine tells texts by these
    model.finalize()
    assert triton.counted("requests_total") == {"length": 1}
    assert (triton.counted("requests_in_flight"), model.load.in_flight) == ({}, 0)


def test_several_texts_that_are_not_streamed_come_in_a_response_each(pipeline) -> None:
    model, _ = pipeline(repeating, repeating)
    request = ask(model, Request({}, outputs_wanted=WANTED), text_input=["ax", "bxx"], max_tokens=[9, 2], stream=False)
    assert finals(request) == [False, True]
    answers = [request.outputs(index) for index in range(2)]
    assert {(*outputs["batch_index"], *outputs["text_output"]) for outputs in answers} == {
        (0, b"aaaaaaaaa"),
        (1, b"bb"),
    }


def test_several_texts_in_one_response_are_rows_of_one_length(pipeline) -> None:
    model, _ = pipeline(repeating, repeating, model="tensorrt_llm_bls_unary", pad_id="7")
    request = ask(
        model,
        Request({}, outputs_wanted=WANTED),
        text_input=["ax", "bxx", "c"],
        max_tokens=[2, 5, 1],
        stream=False,
        exclude_input_in_output=[True, False, True],
        return_generation_logits=True,
    )
    assert finals(request) == [True]
    outputs = {tensor.name(): tensor.as_numpy() for tensor in request.sent[0][0].output_tensors()}
    assert outputs["text_output"].reshape(-1).tolist() == [b"aa", b"bxxbbbbb", b"c"]
    assert outputs["output_ids"].tolist() == [[A, A, 7, 7, 7], [A + 1] * 5, [A + 2, 7, 7, 7, 7]]
    assert outputs["num_output_tokens"].tolist() == [[2], [5], [1]]
    assert outputs["batch_index"].tolist() == [[0], [1], [2]]
    assert outputs["generation_logits"].shape == (3, 1, 5, VOCAB)
    assert outputs["generation_logits"][:, 0, :, 0].tolist() == [[1, 1, 0, 0, 0], [1] * 5, [1, 0, 0, 0, 0]]


@pytest.mark.parametrize("stream", [True, False])
def test_one_text_that_fails_ends_the_whole_request_once(pipeline, stream: bool) -> None:
    """The others would be under way for a long time."""

    def target(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(0.02)
        if inputs["input_ids"][0, 1] == A + 1 and inputs["input_ids"].shape[1] > 10:
            raise TritonError("out of order", TritonError.INTERNAL)
        return repeating(inputs)

    model, triton = pipeline(target, repeating, model=f"tensorrt_llm_bls{'' if stream else '_unary'}")
    request = ask(model, text_input=["ax", "bxx", "cx"], max_tokens=400, stream=stream)
    until(lambda: model.load.in_flight == 0, "the other texts go on")
    model.finalize()
    assert finals(request) == [False] * (len(request.sent) - 1) + [True]
    error = request.sent[-1][0].error()
    assert (error.code, error.message()) == (TritonError.UNAVAILABLE, "tensorrt_llm: out of order")
    assert len(triton.calls) < 40  # of more than 600
    assert triton.counted("requests_total") == {"error": 1}
    assert triton.counted("requests_in_flight") == {}


def test_what_is_wrong_with_one_of_several_texts_is_said_with_its_number(pipeline) -> None:
    model, triton = pipeline(repeating, repeating)
    assert refusal(ask(model, text_input=["a", ""])) == "text 1: text_input is empty; expected some text"
    assert refusal(ask(model, text_input=["a", "b"], max_tokens=[3, 0])) == (
        "text 1: max_tokens is 0; expected 1 or more"
    )
    assert refusal(ask(model, text_input=["a", "b"], stream=[True, False])) == (
        "stream is true for some of the texts; expected the same for all of them"
    )
    short = Request({"top_k": np.array([[1]], dtype=np.int32)})
    assert refusal(ask(model, short, text_input=["a", "b"])) == "text 0: top_k has shape [1, 1]; expected 2 rows"
    assert triton.calls == []


def test_a_client_that_leaves_ends_all_its_texts(pipeline) -> None:
    def slowly(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(0.05)
        return repeating(inputs)

    model, triton = pipeline(slowly, slowly)
    request = ask(model, Request({}, leaves_after=4), text_input=["ax", "bxx", "cx"], max_tokens=400)
    model.finalize()
    assert finals(request) == [False] * (len(request.sent) - 1) + [True]
    assert len(request.sent) <= 4 + 2 * 3
    assert len(triton.calls) <= 3 * 6
    assert triton.counted("requests_total") == {"cancelled": 1}
    assert (triton.counted("requests_in_flight"), model.load.in_flight) == ({}, 0)


# Load


def test_more_than_may_wait_are_refused_at_once(pipeline) -> None:
    begun, release = threading.Event(), threading.Event()

    def target(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        begun.set()
        release.wait(20)
        return answering(A)(inputs)

    model, triton = pipeline(target, answering(A), max_concurrency="1", max_queued="2")
    served = [send(model)]
    assert begun.wait(20)
    served += [send(model), send(model)]
    refused = ask(model)
    error = refused.sent[0][0].error()
    assert finals(refused) == [True]
    assert (error.code, error.message()) == (
        TritonError.UNAVAILABLE,
        "too many requests: 2 texts are waiting; expected fewer than 2",
    )
    assert not any(request.sent for request in served)
    release.set()
    for request in served:
        assert request.done.wait(20) and text(request) == b"a" * 12
    model.finalize()
    assert triton.counted("requests_total") == {"length": 3, "refused": 1}
    assert triton.counted("requests_in_flight") == {}


def test_cycles_are_counted_as_they_were(pipeline) -> None:
    model, triton = pipeline(answering(A), answering(A))
    for count in (3, 3, 0):
        ask(model, num_draft_tokens=count)
    model.finalize()
    totals = {
        name: triton.counted(f"{name}_total").get("")
        for name in ("cycles", "emitted_tokens", "target_passes", "drafts", "draft_tokens", "accepted_tokens")
    }
    assert totals == {
        "cycles": 7,
        "emitted_tokens": 36,
        "target_passes": 18,
        "drafts": 6,
        "draft_tokens": 18,
        "accepted_tokens": 18,
    }
    assert triton.counted("accepted_at_position_total") == {"1": 6, "2": 6, "3": 6}
    assert triton.counted("draft_length_total") == {"3": 6, "0": 1}
    assert triton.counted("fallbacks_total") == {}
    assert all(triton.counted(f"{part}_seconds_total")[""] > 0 for part in ("draft", "verify", "pipeline"))


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled", "refused", "error", "crash"])
def test_however_a_request_ends_it_is_no_longer_in_flight(
    pipeline, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    def target(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(0.02)
        if reason == "error":
            raise TritonError("out of order", TritonError.INTERNAL)
        return answering(A, num_max=0 if reason == "stop" else 100)(inputs)

    model, triton = pipeline(target, answering(A))
    if reason == "crash":
        monkeypatch.setattr(sys.modules["1.model"], "run", lambda *_: 1 / 0)
    leaves = {"leaves_after": 0} if reason == "cancelled" else {}
    request = ask(model, Request({}, **leaves), max_tokens=0 if reason == "refused" else 40)
    model.finalize()
    assert sum(finals(request)) == 1
    assert triton.counted("requests_total") == {"error" if reason == "crash" else reason: 1}
    assert (triton.counted("requests_in_flight"), model.load.in_flight) == ({}, 0)
    asked = len(request.asked)
    time.sleep(0.05)
    assert len(request.asked) == asked  # the request is gone with its last response


@pytest.mark.parametrize(
    ("lengths", "drafted"),
    [
        ({"draft_length_policy": "schedule", "draft_length_schedule": "1:2,8:1"}, [2, 2, 2, 2]),
        ({"draft_length_policy": "schedule", "draft_length_schedule": "4:0"}, []),
        ({"draft_length_policy": "fixed"}, [3, 3, 3]),
    ],
)
def test_drafts_are_as_long_as_the_policy_says_unless_the_client_does(
    pipeline, lengths: dict[str, str], drafted: list[int]
) -> None:
    model, triton = pipeline(answering(A), answering(A), **lengths)

    def sent() -> list[int]:
        tensors = [inputs for name, inputs in triton.calls if name == "tensorrt_llm" and "draft_input_ids" in inputs]
        triton.calls.clear()
        return [inputs["draft_input_ids"].shape[1] for inputs in tensors]

    assert text(ask(model)) == b"a" * 12
    assert sent() == drafted
    assert text(ask(model, num_draft_tokens=3)) == b"a" * 12
    assert sent() == [3, 3, 3]


def test_texts_that_wait_are_no_load(pipeline) -> None:
    """Two are worked on, and cost what two cost; three more wait."""
    lengths = {"draft_length_policy": "schedule", "draft_length_schedule": "1:0,2:2"}
    model, triton = pipeline(answering(A), answering(A), max_concurrency="2", **lengths)
    assert text(ask(model)) == b"a" * 12
    assert not any("draft_input_ids" in inputs for _, inputs in triton.calls)
    requests = [send(model, max_tokens=60) for _ in range(5)]
    for request in requests:
        assert request.done.wait(20) and text(request) == b"a" * 60
    verified = [inputs["draft_input_ids"].shape[1] for _, inputs in triton.calls if "draft_input_ids" in inputs]
    assert len(verified) > 20 and set(verified) <= {1, 2}


def test_in_turns_no_draft_is_made_beside_a_verification(pipeline) -> None:
    lock, inside, mixed, most = threading.Lock(), {"draft": 0, "target": 0}, [], {"draft": 0, "target": 0}

    def noting(role: str) -> Engine:
        def engine(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            with lock:
                inside[role] += 1
                most[role] = max(most[role], inside[role])
                mixed.append(all(inside.values()))
            time.sleep(0.003)
            with lock:
                inside[role] -= 1
            return answering(A)(inputs)

        return engine

    model, _ = pipeline(noting("target"), noting("draft"), alternate_phases="true", max_concurrency="6")
    requests = [send(model, max_tokens=40) for _ in range(6)]
    for request in requests:
        assert request.done.wait(20) and text(request) == b"a" * 40
    assert not any(mixed)
    assert min(most.values()) > 1


def test_in_turns_what_decodes_plainly_waits_for_nobody(pipeline) -> None:
    release, drafts = threading.Event(), threading.Event()

    def draft(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        drafts.set()
        assert release.wait(20)
        return answering(A)(inputs)

    model, _ = pipeline(answering(A), draft, alternate_phases="true", draft_timeout_s="20")
    other = send(model)
    assert drafts.wait(20)
    plain = send(model, num_draft_tokens=0)
    assert plain.done.wait(10) and not other.done.is_set()
    release.set()
    assert other.done.wait(20)
    assert text(plain) == text(other) == b"a" * 12


@pytest.mark.parametrize("length", [150, 20])
def test_in_turns_who_reads_a_long_prompt_holds_nobody_up(pipeline, length: int) -> None:
    """A short one is waited for."""
    release, reads = threading.Event(), threading.Event()

    def draft(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if length <= inputs["input_ids"].shape[1] < length + 5:
            reads.set()
            assert release.wait(20)
        return answering(A)(inputs)

    model, _ = pipeline(answering(A), draft, alternate_phases="true", draft_timeout_s="20")
    reader = send(model, text_input="b" * length)
    assert reads.wait(20)
    other = send(model, text_input="b")
    assert other.done.wait(10 if length > 128 else 0.5) is (length > 128)
    release.set()
    for request in (reader, other):
        assert request.done.wait(20) and text(request) == b"a" * 12


def test_in_turns_a_draft_that_is_too_late_holds_nobody_up(pipeline) -> None:
    release, hangs = threading.Event(), threading.Event()

    def draft(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if inputs["input_ids"].shape[1] == 7:
            hangs.set()
            release.wait(20)
        return answering(A)(inputs)

    model, _ = pipeline(answering(A), draft, alternate_phases="true", draft_timeout_s="0.3", draft_rest_s="0")
    stuck = send(model, text_input="stucky")
    assert hangs.wait(20)
    others = [ask(model, num_draft_tokens=count) for count in (3, 0)]
    assert stuck.done.wait(20)
    assert [text(request) for request in (stuck, *others)] == [b"a" * 12] * 3
    release.set()
