"""The BLS model against a stand-in for Triton's Python API: every response and every engine call is seen and counted.

The generated repository is imported as Triton imports it; engines are Python functions over ids.
"""

from __future__ import annotations

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

    def module(self) -> types.ModuleType:
        triton = self

        class InferenceRequest:
            def __init__(self, *, model_name: str, request_id: str, inputs: list[Tensor], **_: object) -> None:
                self.model, self.inputs = model_name, {tensor.name(): tensor.as_numpy() for tensor in inputs}
                self.id = request_id

            def exec(self) -> InferenceResponse:
                triton.calls.append((self.model, self.inputs))
                triton.ids.append(self.id)
                try:
                    outputs = triton.engines[self.model](self.inputs)
                except TritonError as error:
                    return InferenceResponse(error=error)
                return InferenceResponse([Tensor(name, array) for name, array in outputs.items()])

        utils = types.ModuleType("triton_python_backend_utils")
        utils.__dict__.update(
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
    unreachable: bool = False
    sent: list[tuple[InferenceResponse | None, int]] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, array) for name, array in self.tensors.items()]

    def request_id(self) -> str:
        return "r1"

    def requested_output_names(self) -> list[str]:
        return ["text_output", "output_ids", "finish_reason", "total_target_passes"]

    def is_cancelled(self) -> bool:
        return self.leaves_after is not None and len(self.sent) >= self.leaves_after

    def get_response_sender(self) -> Request:
        return self

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
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
    kinds = {str: np.object_, int: np.int32, bool: np.bool_, float: np.float32}
    tensors = {"text_input": "Hello", "max_tokens": 12, "stream": True, **tensors}
    request = request or Request({})
    for name, value in tensors.items():
        item = value.encode() if isinstance(value, str) else value
        request.tensors[name] = np.array([[item]], dtype=kinds[type(value)])
    model.execute([request])
    assert request.done.wait(20), "no final response"
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


def test_a_client_that_leaves_costs_at_most_one_more_call(pipeline) -> None:
    """It leaves after block 2 of 10; calls take longer than the time between two looks at the client."""

    def slowly(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(0.002)
        return answering(A)(inputs)

    model, triton = pipeline(slowly, slowly)
    request = ask(model, Request({}, leaves_after=2), max_tokens=40)
    assert finals(request) == [False, False, True]
    assert request.outputs(2)["finish_reason"] == [b"cancelled"]
    assert len(triton.calls) <= 4 + 1


@pytest.mark.parametrize("place", ["read_request", "generate"])
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

    model, triton = pipeline(answering(A), hanging, call_timeout_s="0.2", draft_rest_s="100")
    first, second = ask(model), ask(model)
    release.set()
    for request in (first, second):
        assert b"".join(request.outputs(i)["text_output"][0] for i in range(len(request.sent))) == b"a" * 12
    assert [name for name, _ in triton.calls].count("tensorrt_llm_draft") == 1
    assert "tensorrt_llm_draft is left alone for 100 s after a failure" in triton.log[-1]


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
    ask(model, temperature=1.0, **bias)
    (_, to_draft), (_, to_target) = triton.calls[:2]
    assert to_draft["embedding_bias"].shape == (1, VOCAB + 8)
    assert to_draft["embedding_bias"][0, VOCAB:].tolist() == [0.0] * 8
    assert to_target["embedding_bias"].shape == (1, VOCAB)
    assert to_target["draft_logits"].shape == (1, 3, VOCAB)


def test_logits_of_a_smaller_vocabulary_are_filled_up(pipeline) -> None:
    def draft(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return answer(inputs, [A] * 3) | {"generation_logits": np.zeros((1, 1, 3, VOCAB - 2), dtype=np.float32)}

    model, triton = pipeline(answering(A), draft, draft_vocab_size=str(VOCAB - 2))
    ask(model, temperature=1.0, max_tokens=4)
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
    for settings in ({}, {"temperature": 1.0}):
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
    ask(model, temperature=1.0)
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
    request = ask(model, temperature=1.0)
    assert triton.calls[1][1]["draft_logits"].dtype == np.float16
    assert text(request) == b"a" * 12
    model, triton = pipeline(answering(A), draft, draft_rest_s="0")  # FP32 is expected here
    ask(model, temperature=1.0)
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
    assert text(ask(model, temperature=1.0)) == b"a" * 12
    model, _ = pipeline(answering(A), answering(A), method="ngram", acceptance="tokens")
    assert "method ngram has none" in refusal(ask(model, use_draft_logits=True))
