"""The stand-in for TensorRT-LLM's backend, asked directly: the tensors of the C++ backend, by its rules."""

from __future__ import annotations

import importlib
import itertools
import json
import shutil
import sys
import threading
import time
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from trtspec.triton.backend import assemble_backend_dir

TARGET, DRAFT = "tensorrt_llm", "tensorrt_llm_draft"
STAND_IN = "trtspec.triton.backend.tensorrtllm.model"
BOS, EOS, VOCAB = 256, 257, 261
IDS = [BOS, 39, 68, 75, 75, 78]
MUST = ("output_ids", "sequence_length")


@pytest.fixture(scope="module")
def call(triton):
    """One call of an engine model with `IDS`, `num_new` new tokens and further tensors."""

    def run(num_new: int = 4, outputs: tuple[str, ...] = MUST, model: str = TARGET, **tensors: object) -> dict:
        return triton.infer(
            model,
            outputs,
            **{"input_ids": IDS, "input_lengths": len(IDS), "request_output_len": num_new, **tensors},
        )

    return run


def new_ids(answer: dict) -> list[int]:
    assert answer["output_ids"][0, 0, : len(IDS)].tolist() == IDS
    return answer["output_ids"][0, 0, len(IDS) :].tolist()


def bias_to(token: int) -> np.ndarray:
    bias = np.zeros((1, VOCAB), dtype=np.float32)
    bias[0, token] = 200.0
    return bias


def test_the_answer_holds_the_prompt_unless_told_otherwise(call) -> None:
    whole, new = call(4), call(4, exclude_input_in_output=True)
    assert whole["output_ids"].shape == (1, 1, len(IDS) + 4)
    assert whole["output_ids"].dtype == np.int32
    assert whole["sequence_length"].tolist() == [[len(IDS) + 4]]
    assert new["output_ids"].shape == (1, 1, 4)
    assert new["output_ids"][0, 0].tolist() == new_ids(whole)
    assert new["sequence_length"].tolist() == [[4]]


@pytest.mark.parametrize("outputs", [("output_ids",), ("sequence_length",), ("generation_logits",)])
def test_both_outputs_must_be_asked_for(call, outputs: tuple[str, ...]) -> None:
    with pytest.raises(InferenceServerException, match="must ask for the outputs output_ids and sequence_length"):
        call(outputs=outputs)


def test_greedy_is_what_happens_without_top_k_and_top_p(call) -> None:
    greedy = new_ids(call(8, runtime_top_k=1))
    assert new_ids(call(8)) == greedy
    assert new_ids(call(8, temperature=5.0, seed=3)) == greedy
    assert new_ids(call(8, temperature=5.0, seed=3, runtime_top_p=0.0)) == greedy
    assert new_ids(call(8, temperature=5.0, seed=3, runtime_top_p=-1.0)) == greedy
    sampled = new_ids(call(8, temperature=5.0, seed=3, runtime_top_p=1.0))
    assert sampled != greedy
    assert new_ids(call(8, temperature=5.0, seed=3, runtime_top_p=1.0)) == sampled
    assert new_ids(call(8, temperature=5.0, seed=4, runtime_top_p=1.0)) != sampled


def test_drafts_are_verified_in_one_call(call) -> None:
    right = new_ids(call(4))
    assert new_ids(call(4, draft_input_ids=right[:3])) == right
    wrong = [right[0], (right[1] + 1) % VOCAB, right[2]]
    assert new_ids(call(4, draft_input_ids=wrong)) == right[:2]


def test_draft_logits_make_the_decision(call) -> None:
    """Under the bias the target is certain of 5 and the draft, whose logits outweigh it, of 6: rejected, 5 drawn."""
    drafts = np.zeros((1, 2, VOCAB), dtype=np.float32)
    drafts[:, :, 6] = 500.0
    sampled = {"runtime_top_p": 1.0, "temperature": 1.0, "embedding_bias": bias_to(5)}
    assert new_ids(call(3, draft_input_ids=[6, 6], draft_logits=drafts, **sampled)) == [5]


def test_acceptance_is_reported_when_performance_is_asked_for(call) -> None:
    right = new_ids(call(4))
    drafts = [right[0], right[1], (right[2] + 1) % VOCAB]
    outputs = (*MUST, "acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
    answer = call(4, outputs, draft_input_ids=drafts, return_perf_metrics=True)
    assert (answer["total_accepted_draft_tokens"], answer["total_draft_tokens"]) == (2, 3)
    assert answer["acceptance_rate"] == pytest.approx(2 / 3)
    assert call(4, outputs, draft_input_ids=drafts)["total_draft_tokens"] == 0


def test_generation_logits_and_log_probabilities_are_those_of_the_runtime(call, pair: SimpleNamespace) -> None:
    from trtspec.decoding.engine_call import EngineRequest
    from trtspec.runtime.torch_runtime import TorchRuntime

    outputs = (*MUST, "generation_logits", "output_log_probs", "cum_log_probs")
    answer = call(3, outputs, return_generation_logits=True, return_log_probs=True)
    request = EngineRequest(np.array(IDS, dtype=np.int32), 3, return_generation_logits=True, return_log_probs=True)
    result = TorchRuntime(pair.engines["target"], kv_cache_bytes=32 << 20).execute(request)
    assert new_ids(answer) == result.output_ids.tolist()
    assert answer["generation_logits"].shape == (1, 1, 3, VOCAB)
    assert answer["generation_logits"].dtype == np.float32
    np.testing.assert_allclose(answer["generation_logits"][0, 0], result.generation_logits, atol=1e-4)
    np.testing.assert_allclose(answer["output_log_probs"][0, 0], result.log_probs, atol=1e-4)
    assert answer["cum_log_probs"] == pytest.approx(result.log_probs.sum(), abs=1e-4)


def test_what_was_not_asked_for_is_one_zero(call) -> None:
    answer = call(3, (*MUST, "generation_logits", "context_logits", "output_log_probs"))
    assert answer["generation_logits"].shape == (1, 1, 1, 1)
    assert answer["context_logits"] == 0.0
    assert answer["output_log_probs"].shape == (1, 1, 1)


def test_an_end_id_ends_the_answer_and_is_not_in_it(call) -> None:
    assert new_ids(call(4, embedding_bias=bias_to(EOS), end_id=EOS)) == []
    assert new_ids(call(4, embedding_bias=bias_to(EOS), end_id=EOS, draft_input_ids=[EOS, 5, 5])) == []
    assert new_ids(call(4, embedding_bias=bias_to(EOS), end_id=-1)) == [EOS] * 4
    late = new_ids(call(4, embedding_bias=bias_to(EOS), end_id=EOS, min_tokens=2))
    assert len(late) == 2


def test_stop_and_bad_words_are_lists_of_ids(call) -> None:
    stop = np.array([[[5, 5, 7], [2, 3, -1]]], dtype=np.int32)
    assert new_ids(call(6, embedding_bias=bias_to(5), stop_words_list=stop)) == [5, 5]
    bad = np.array([[[5, 5], [2, -1]]], dtype=np.int32)
    ids = new_ids(call(6, embedding_bias=bias_to(5), bad_words_list=bad))
    assert 5 in ids
    assert (5, 5) not in itertools.pairwise(ids)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"input_lengths": 3}, "input_lengths is 3 for 6 input_ids"),
        ({"input_ids": [5, 900], "input_lengths": 2}, "900"),
        ({"input_ids": [5, -1], "input_lengths": 2}, "-1"),
        ({"request_output_len": 0}, "request_output_len is 0; expected 1 or more"),
        ({"beam_width": 2}, "beam_width is 2; expected 1"),
        ({"streaming": True}, "streaming is not supported: streaming needs a decoupled model"),
        ({"return_context_logits": True}, "return_context_logits is not supported"),
        ({"lora_task_id": np.array([[1]], dtype=np.uint64)}, "lora_task_id is not supported"),
        ({"runtime_top_p": 3.0}, "top_p"),
        ({"temperature": float("inf"), "runtime_top_k": 3}, "temperature is inf"),
        ({"draft_input_ids": [5] * 6, "request_output_len": 7}, "at most 5"),
        ({"draft_input_ids": [5, 5], "draft_logits": np.zeros((1, 3, VOCAB), dtype=np.float32)}, "draft_logits"),
        ({"stop_words_list": np.array([[[5, 5], [2, 1]]], dtype=np.int32)}, "stop_words_list has end offset 1 after 2"),
        ({"request_output_len": 5000}, "max_seq_len"),
    ],
)
def test_bad_requests_are_refused_by_name(call, tensors: dict[str, object], message: str) -> None:
    with pytest.raises(InferenceServerException) as refused:
        call(**{"num_new": 3, **tensors})
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert message in refused.value.message()


def test_stop_cancels_the_request_with_the_same_id(triton) -> None:
    """Each thread asks for many tokens; both are stopped by their own id, an unknown id stops nobody."""
    errors: dict[str, Exception] = {}

    def long(name: str) -> None:
        tensors = {"input_ids": IDS, "input_lengths": len(IDS), "request_output_len": 500, "end_id": -1}
        try:
            while True:
                triton.infer(TARGET, MUST, request_id=name, **tensors)
        except InferenceServerException as error:
            errors[name] = error

    def stop(name: str) -> None:
        stopping = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}
        assert triton.infer(TARGET, request_id=name, **stopping) == {}

    threads = [threading.Thread(target=long, args=(name,), daemon=True) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    stop("unknown")
    for index, name in enumerate(("second", "first")):
        assert len(errors) == index
        deadline = time.monotonic() + 20
        while name not in errors and time.monotonic() < deadline:
            stop(name)
            time.sleep(0.01)
        assert "the request was stopped" in str(errors[name])


def test_stop_needs_a_request_id(call) -> None:
    with pytest.raises(InferenceServerException, match="stop needs the request id"):
        call(stop=True)


def test_the_backend_directory_is_what_triton_wants(tmp_path: Path) -> None:
    for _ in range(2):
        assert assemble_backend_dir(tmp_path / "backends") == tmp_path / "backends"
    python = tmp_path / "backends" / "python"
    assert {path.name for path in python.iterdir()} == {
        "libtriton_python.so",
        "triton_python_backend_stub",
        "triton_python_backend_utils.py",
    }
    assert not (python / "libtriton_python.so").is_symlink()
    assert (python / "triton_python_backend_stub").is_symlink()
    assert (python / "triton_python_backend_stub").resolve().is_file()
    assert (tmp_path / "backends" / "tensorrtllm" / "model.py").is_file()


class Answers:
    """A double of one request and its response sender: tensors in, the response or error out."""

    def __init__(self, tensors: dict[str, np.ndarray], outputs: tuple[str, ...]) -> None:
        self.tensors, self.outputs = tensors, outputs
        self.sent: list[SimpleNamespace] = []
        self.done = threading.Event()

    def inputs(self) -> list[SimpleNamespace]:
        return [as_tensor(name, array) for name, array in self.tensors.items()]

    def requested_output_names(self) -> tuple[str, ...]:
        return self.outputs

    def request_id(self) -> str:
        return ""

    def is_cancelled(self) -> bool:
        return False

    def get_response_sender(self) -> Answers:
        return self

    def send(self, response: SimpleNamespace, flags: int = 0) -> None:
        self.sent.append(response)
        self.done.set()


def test_who_has_left_is_noticed_by_few_questions(load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question is a round trip to the server process."""
    questions: list[float] = []

    def is_cancelled(self: Answers) -> bool:
        questions.append(time.monotonic())
        return len(questions) == 3

    ask = load()
    monkeypatch.setattr(Answers, "is_cancelled", is_cancelled)
    monkeypatch.setattr(sys.modules[STAND_IN], "_ASK_S", 0.02)
    with pytest.raises(ValueError, match="the request was stopped"):
        ask(num_new=200)
    assert len(questions) == 3 and all(later - earlier > 0.02 for earlier, later in itertools.pairwise(questions))


def as_tensor(name: str, array: np.ndarray) -> SimpleNamespace:
    return SimpleNamespace(name=lambda: name, as_numpy=lambda: array)


@pytest.fixture
def load(pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Load a copy of the target's engine in the stand-in, outside of Triton, with a double of its Python module.

    `build` and `pretrained` change the engine's config.json, `parameters` config.pbtxt. Answers a function that runs
    one request and gives its outputs; raises RuntimeError where the model does not load.
    """
    loaded = []

    def run(logits_dtype: str = "FP32", build=(), pretrained=(), **parameters: str):
        engine = Path(shutil.copytree(pair.engines["target"], tmp_path / "engines" / "target"))
        content = json.loads((engine / "config.json").read_text())
        content["build_config"] |= dict(build)
        content["pretrained_config"] |= dict(pretrained)
        (engine / "config.json").write_text(json.dumps(content))
        monkeypatch.setenv("TRTSPEC_ENGINE_MOUNT", "/engines")
        monkeypatch.setenv("TRTSPEC_ENGINE_ROOT", str(tmp_path / "engines"))
        utils = types.ModuleType("triton_python_backend_utils")
        utils.__dict__.update(
            TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
            TritonModelException=RuntimeError,
            Tensor=as_tensor,
            TritonError=lambda message, code: SimpleNamespace(message=message, code=code),
            InferenceResponse=lambda tensors=(), error=None: SimpleNamespace(tensors=tensors, error=error),
            Logger=SimpleNamespace(log_error=print),
        )
        utils.TritonError.INVALID_ARG = utils.TritonError.CANCELLED = utils.TritonError.INTERNAL = 0  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, utils.__name__, utils)
        monkeypatch.delitem(sys.modules, STAND_IN, raising=False)
        model = importlib.import_module(STAND_IN).TritonPythonModel()
        config = {
            "name": TARGET,
            "max_batch_size": 8,
            "parameters": {
                key: {"string_value": value}
                for key, value in {"gpt_model_path": "/engines/target", **parameters}.items()
            },
            "output": [{"name": "generation_logits", "data_type": f"TYPE_{logits_dtype}", "dims": [-1, -1, -1]}],
        }
        model.initialize({"model_config": json.dumps(config)})
        loaded.append(model)

        def ask(num_new: int = 4, outputs: tuple[str, ...] = MUST, **tensors: object) -> dict[str, np.ndarray]:
            given = {"input_ids": IDS, "input_lengths": len(IDS), "request_output_len": num_new, **tensors}
            request = Answers(
                {key: value if isinstance(value, np.ndarray) else np.array([value]) for key, value in given.items()},
                outputs,
            )
            model.execute([request])
            assert request.done.wait(60)
            (response,) = request.sent
            if response.error is not None:
                raise ValueError(response.error.message)
            return {tensor.name(): tensor.as_numpy() for tensor in response.tensors}

        return ask

    yield run
    for model in loaded:
        model.finalize()


MEDUSA = {
    "build": {"speculative_decoding_mode": 4},
    "pretrained": {"num_medusa_heads": 2},
    "decoding_mode": "medusa",
    "medusa_choices": "{0}, {1}, {0, 0}",
}
LOOKAHEAD = {
    "build": {"speculative_decoding_mode": 8, "max_draft_len": 15},
    "decoding_mode": "lookahead",
    "lookahead_window_size": "4",
    "lookahead_ngram_size": "3",
    "lookahead_verification_set_size": "4",
}


@pytest.mark.parametrize("method", [MEDUSA, LOOKAHEAD, {"build": {"speculative_decoding_mode": 16}}])
def test_an_engine_that_drafts_by_itself_answers_the_same_greedy_text(load, call, method: dict) -> None:
    mode = {"decoding_mode": "redrafter"} if len(method) == 1 else {}
    ask = load(**method, **mode)
    outputs = (*MUST, "total_draft_tokens", "acceptance_rate")
    answer = ask(8, outputs, return_perf_metrics=True)
    assert new_ids(answer) == new_ids(call(8))
    assert (answer["total_draft_tokens"], answer["acceptance_rate"]) == (0, 0.0)
    with pytest.raises(ValueError, match="draft_input_ids is not supported: the engine was not built for mode"):
        ask(draft_input_ids=[5, 5])


def test_medusa_is_greedy_at_every_temperature(load, call) -> None:
    hot = {"temperature": np.float32([5.0]), "runtime_top_p": np.float32([1.0])}
    greedy = new_ids(call(8))
    assert new_ids(call(8, temperature=5.0, runtime_top_p=1.0)) != greedy
    assert new_ids(load(**MEDUSA)(8, **hot)) == greedy


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 3, 4), None),
        ((2, 2, 1), None),
        ((4, 3, None), "lookahead_window_size comes alone; expected all of"),
        ((5, 3, 4), "lookahead_window_size is 5; expected at most the model's 4"),
        ((4, 3, 5), "lookahead_verification_set_size is 5; expected at most the model's 4"),
    ],
)
def test_sizes_of_one_request_stay_within_those_of_the_model(load, sizes: tuple, message: str | None) -> None:
    names = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
    given = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    ask = load(**LOOKAHEAD)
    if message is None:
        assert len(new_ids(ask(4, **given))) == 4
        return
    with pytest.raises(ValueError, match=message):
        ask(4, **given)


def test_sizes_of_lookahead_need_an_engine_that_looks_ahead(load) -> None:
    with pytest.raises(ValueError, match="lookahead_window_size is not supported: the engine does not look ahead"):
        load()(4, lookahead_window_size=4)


def test_logits_of_two_bytes_go_both_ways(load, call) -> None:
    ask = load("FP16", pretrained={"logits_dtype": "float16"})
    outputs = (*MUST, "generation_logits")
    half, whole = ask(3, outputs, return_generation_logits=True), call(3, outputs, return_generation_logits=True)
    assert half["generation_logits"].dtype == np.float16
    np.testing.assert_allclose(half["generation_logits"], whole["generation_logits"], atol=0.02)
    drafts = np.zeros((1, 2, VOCAB), dtype=np.float16)
    drafts[:, :, 6] = 500.0
    sampled = {"runtime_top_p": np.float32([1.0]), "temperature": np.float32([1.0]), "embedding_bias": bias_to(5)}
    assert new_ids(ask(3, draft_input_ids=[6, 6], draft_logits=drafts, **sampled)) == [5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decoding_mod": "medusa"}, "parameters.decoding_mod is unknown to tensorrt_llm; did you mean decoding_mode?"),
        ({"max_beam_width": "one"}, "parameters.max_beam_width is 'one'; expected a whole number"),
        ({"decoding_mode": "medusa"}, "decoding_mode is medusa, but .* was built for mode draft_tokens_external"),
        ({"build": MEDUSA["build"]}, "decoding_mode is unset, but .* was built for mode medusa"),
        (LOOKAHEAD | {"lookahead_ngram_size": "5"}, "max_draft_len is 15, but lookahead sizes"),
        ({"logits_dtype": "FP16"}, "generation_logits are FP16, but .* was built with logits_dtype float32"),
        ({"gpu_device_ids": "0,1"}, "gpu_device_ids is '0,1', but .* was built for 1 ranks"),
    ],
)
def test_a_config_that_does_not_fit_the_engine_does_not_load(load, settings: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        load(**settings)
