"""Stand-in for TensorRT-LLM's Triton backend: serves engine models of the same repository with the torch runtime.

Takes and answers the tensors of the C++ backend: requests must ask for output_ids and sequence_length, output_ids hold
the prompt unless told otherwise and never the end id, a request with neither top_k nor top_p is greedy, `stop` cancels.
An engine that drafts by itself decodes plainly here, to the same greedy text, and counts no drafts. What cannot be
honoured is refused by name. Knows Triton's Python backend and the runtime.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from trtspec.decoding.engine_call import Cancelled, EngineRequest, EngineResult
from trtspec.decoding.sampling import SamplingParams
from trtspec.errors import TrtspecError
from trtspec.runtime.engine import DRAFT_TOKENS_EXTERNAL
from trtspec.runtime.one_thread import OneThread, without_openmp_threads
from trtspec.runtime.torch_runtime import TorchRuntime
from trtspec.triton.check import parameter_faults
from trtspec.triton.check_engine import engine_faults
from trtspec.triton.models.tensors import Inputs, Refused, split_word_list

DEFAULT_KV_CACHE_BYTES = 1 << 30
_ASK_S = 0.2  # from one question whether the client has left to the next: each is a round trip to the server process
_NUMPY_DTYPES = {"FP32": np.float32, "FP16": np.float16}
_LOOKAHEAD_SIZES = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_NOT_SUPPORTED = {
    "this engine has no encoder": (
        "encoder_input_features",
        "encoder_output_lengths",
        "decoder_input_ids",
        "decoder_input_lengths",
        "cross_attention_mask",
        "skip_cross_attn_blocks",
    ),
    "this engine has no prompt table": ("prompt_embedding_table", "prompt_table_extra_ids", "prompt_vocab_size"),
    "this engine has no multimodal positions": ("mrope_rotary_cos_sin", "mrope_position_deltas"),
    "this engine has no LoRA weights": ("lora_task_id", "lora_weights", "lora_config"),
    "the torch runtime does not do it": (
        "draft_acceptance_threshold",
        "runtime_top_p_min",
        "runtime_top_p_decay",
        "runtime_top_p_reset_ids",
        "beam_search_diversity_rate",
        "return_context_logits",
        "context_phase_params",
        "retention_token_range_starts",
        "retention_token_range_ends",
        "retention_token_range_priorities",
        "retention_token_range_durations_ms",
        "retention_decode_priority",
        "retention_decode_duration_ms",
        "guided_decoding_guide_type",
        "guided_decoding_guide",
    ),
    "streaming needs a decoupled model, and this one is not": ("streaming",),
}

_Call = tuple[Any, Any, Inputs, EngineRequest, frozenset[str], threading.Event]
"""Request, response sender, inputs, engine call, outputs that were asked for, and what stops it."""


class TritonPythonModel:
    """One engine model in one process."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine that the model's gpt_model_path names."""
        if int(np.__version__.split(".")[0]) >= 2:
            raise pb_utils.TritonModelException(f"numpy {np.__version__}: Triton's Python backend needs numpy<2")
        config = json.loads(args["model_config"])
        if config.get("model_transaction_policy", {}).get("decoupled"):
            raise pb_utils.TritonModelException("decoupled engine models need the C++ backend; set decoupled: false")
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        if faults := parameter_faults(config["name"], parameters, "tensorrtllm", "config.pbtxt"):
            raise pb_utils.TritonModelException("\n".join(faults))
        engine_dir = local_engine_dir(parameters.get("gpt_model_path", ""), os.environ)
        self._one_thread = OneThread()
        try:
            self._runtime = self._one_thread(partial(self._loaded, engine_dir, parameters))
        except TrtspecError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        types = {output["name"]: output["data_type"] for output in config["output"]}
        self._logits_dtype = types["generation_logits"].removeprefix("TYPE_")
        if faults := list(engine_faults(parameters, self._logits_dtype, self._runtime.config, "config.pbtxt")):
            raise pb_utils.TritonModelException("\n".join(faults))
        self._parameters = parameters
        self._exclude_input = parameters.get("exclude_input_in_output") == "true"
        self._num_threads = max(1, config["max_batch_size"])
        self._threads = ThreadPoolExecutor(
            self._num_threads, thread_name_prefix="engine", initializer=without_openmp_threads
        )
        self._lock = threading.Lock()
        self._running: dict[str, list[threading.Event]] = {}  # request id -> what stops its requests

    def _loaded(self, engine_dir: Path, parameters: Mapping[str, str]) -> TorchRuntime:
        return TorchRuntime(
            engine_dir,
            device=os.environ.get("TRTSPEC_DEVICE", "cpu"),
            kv_cache_bytes=int(parameters.get("trtspec_kv_cache_bytes", DEFAULT_KV_CACHE_BYTES)),
            num_threads=int(os.environ["OMP_NUM_THREADS"]) if "OMP_NUM_THREADS" in os.environ else None,
            here=self._one_thread,
        )

    def execute(self, requests: list[Any]) -> None:
        """Hand each request to a thread; a `stop` takes effect at once.

        Those that come together share their first forward pass too: all are read before one is begun, and each that
        finds a free thread is announced.
        """
        arrival_ns = time.time_ns()
        accepted = [self._accept(request, request.get_response_sender()) for request in requests]
        calls = [call for call in accepted if call is not None]
        with self._lock:
            num_running = sum(map(len, self._running.values())) - len(calls)
        num_free = max(0, self._num_threads - num_running)
        for _ in calls[:num_free]:
            self._runtime.announce()
        for place, call in enumerate(calls):
            self._threads.submit(self._run, *call, arrival_ns, place < num_free)

    def finalize(self) -> None:
        """Finish what is under way."""
        self._threads.shutdown()
        self._one_thread.close()

    def _accept(self, request: Any, sender: Any) -> _Call | None:
        """What a thread is to run; None for a request that is answered already."""
        request_id = request.request_id()
        try:
            inputs = Inputs({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
            if inputs.flag("stop"):
                if not request_id:
                    raise Refused("stop needs the request id of the request to stop")
                with self._lock:
                    for stopped in self._running.get(request_id, ()):
                        stopped.set()
                sender.send(pb_utils.InferenceResponse([]), flags=_FINAL)
                return None
            wanted = frozenset(request.requested_output_names())
            if not {"output_ids", "sequence_length"} <= wanted:
                raise Refused("a request must ask for the outputs output_ids and sequence_length")
            call = self._read(inputs)
        except (Refused, ValueError) as error:
            _send_error(sender, str(error), pb_utils.TritonError.INVALID_ARG)
            return None
        stop = threading.Event()
        with self._lock:
            self._running.setdefault(request_id, []).append(stop)
        return request, sender, inputs, call, wanted, stop

    def _read(self, inputs: Inputs) -> EngineRequest:
        """The call of one request, by the rules of the mode that the engine was built for."""
        call = read_call(inputs)
        if call.draft_tokens is not None and self._runtime.config.speculative_decoding_mode != DRAFT_TOKENS_EXTERNAL:
            raise Refused("draft_input_ids is not supported: the engine was not built for mode draft_tokens_external")
        check_lookahead_sizes(inputs, self._parameters)
        medusa = self._parameters.get("decoding_mode") == "medusa" and "speculation" not in self._runtime.config.stamp
        if medusa and not call.sampling.greedy:
            call = replace(call, sampling=replace(call.sampling, temperature=0.0))  # TensorRT-LLM's Medusa is greedy
        return call

    def _run(
        self,
        request: Any,
        sender: Any,
        inputs: Inputs,
        call: EngineRequest,
        wanted: frozenset[str],
        stop: threading.Event,
        arrival_ns: int,
        announced: bool,
    ) -> None:
        started_ns = time.time_ns()
        try:
            result = self._runtime.execute(
                call, cancelled=_seldom(request.is_cancelled, or_at_once=stop.is_set), announced=announced
            )
            exclude = inputs.flag("exclude_input_in_output", self._exclude_input)
            outputs = answer(call, result, inputs, exclude, (arrival_ns, started_ns, time.time_ns()))
            for name in ("context_logits", "generation_logits"):
                outputs[name] = outputs[name].astype(_NUMPY_DTYPES[self._logits_dtype])
            tensors = [pb_utils.Tensor(name, array) for name, array in outputs.items() if name in wanted]
            sender.send(pb_utils.InferenceResponse(tensors), flags=_FINAL)
        except Cancelled:
            _send_error(sender, "the request was stopped", pb_utils.TritonError.CANCELLED)
        except TrtspecError as error:
            _send_error(sender, str(error), pb_utils.TritonError.INVALID_ARG)
        except Exception as error:
            pb_utils.Logger.log_error(f"request {request.request_id()!r} failed: {error!r}")
            _send_error(sender, f"internal error: {error!r}", pb_utils.TritonError.INTERNAL)
        finally:
            with self._lock:
                events = self._running[request.request_id()]
                events.remove(stop)
                if not events:
                    del self._running[request.request_id()]


def _seldom(question: Callable[[], bool], or_at_once: Callable[[], bool]) -> Callable[[], bool]:
    """The last answer to `question`, asked anew now and then; the second question is asked each time."""
    asked_s, answer = time.monotonic(), False

    def either() -> bool:
        nonlocal asked_s, answer
        if or_at_once():
            return True
        if not answer and time.monotonic() - asked_s > _ASK_S:
            asked_s, answer = time.monotonic(), question()
        return answer

    return either


def local_engine_dir(path: str, environment: Any) -> Path:
    """Where the engine at `path` of the server's mount point lies on this machine."""
    mount, root = environment.get("TRTSPEC_ENGINE_MOUNT"), environment.get("TRTSPEC_ENGINE_ROOT")
    if mount and root and PurePosixPath(path).is_relative_to(mount):
        return Path(root) / PurePosixPath(path).relative_to(mount)
    return Path(path)


def read_call(inputs: Inputs) -> EngineRequest:
    """The tensors of one request as an engine call.

    Raises:
        Refused: something is missing, out of range or not supported; the message names the tensor.
    """
    for reason, names in _NOT_SUPPORTED.items():
        inputs.refuse(names, reason)
    for name in ("beam_width", "num_return_sequences"):
        if inputs.integer(name, 1) != 1:
            raise Refused(f"{name} is {inputs.integer(name)}; expected 1")
    ids = _ids(inputs, "input_ids")
    if ids is None or not len(ids) or inputs.integer("input_lengths") != len(ids):
        given = 0 if ids is None else len(ids)
        raise Refused(f"input_lengths is {inputs.integer('input_lengths')} for {given} input_ids; expected the same")
    max_new_tokens = inputs.integer("request_output_len", minimum=1)
    if max_new_tokens is None:
        raise Refused("request_output_len is missing; expected 1 or more")
    end_id = inputs.integer("end_id", minimum=-1)
    drafts = _ids(inputs, "draft_input_ids")
    draft_logits = inputs.array("draft_logits") if drafts is not None and len(drafts) else None
    if draft_logits is not None:
        draft_logits = _without_batch(draft_logits, 2, "draft_logits").astype(np.float32)
    bias = inputs.array("embedding_bias")
    return EngineRequest(
        input_ids=ids,
        max_new_tokens=max_new_tokens,
        sampling=_sampling(inputs),
        end_id=None if end_id == -1 else end_id,
        stop_sequences=_word_list(inputs, "stop_words_list"),
        bad_words=_word_list(inputs, "bad_words_list"),
        embedding_bias=_without_batch(bias, 1, "embedding_bias") if bias is not None and bias.size else None,
        draft_tokens=drafts if drafts is not None and len(drafts) else None,
        draft_logits=draft_logits,
        min_new_tokens=inputs.integer("min_tokens", 0, minimum=0) or 0,
        return_generation_logits=inputs.flag("return_generation_logits"),
        return_log_probs=inputs.flag("return_log_probs"),
    )


def check_lookahead_sizes(inputs: Inputs, parameters: Mapping[str, str]) -> None:
    """The sizes of one request are given together, and are no larger than the model's.

    Raises:
        Refused: they are not.
    """
    given = [name for name in _LOOKAHEAD_SIZES if name in inputs]
    if given and parameters.get("decoding_mode") != "lookahead":
        raise Refused(f"{given[0]} is not supported: the engine does not look ahead")
    if given and len(given) < len(_LOOKAHEAD_SIZES):
        raise Refused(f"{given[0]} comes alone; expected all of {', '.join(_LOOKAHEAD_SIZES)}")
    for name in given:
        value, most = inputs.integer(name, minimum=0), int(parameters[name])
        if value is not None and value > most:
            raise Refused(f"{name} is {value}; expected at most the model's {most}")


def _sampling(inputs: Inputs) -> SamplingParams:
    """TensorRT-LLM's rule: top_p of 0 or less counts as absent, and with neither top_k nor top_p it is greedy."""
    top_k = inputs.integer("runtime_top_k", 0, minimum=0) or 0
    top_p = inputs.number("runtime_top_p", 0.0) or 0.0
    temperature = inputs.number("temperature", 1.0)
    params = SamplingParams(
        temperature=temperature if temperature is not None and (top_k or top_p > 0) else 0.0,
        top_k=top_k,
        top_p=top_p if top_p > 0 else 1.0,
        repetition_penalty=inputs.number("repetition_penalty", 1.0) or 1.0,
        presence_penalty=inputs.number("presence_penalty", 0.0) or 0.0,
        frequency_penalty=inputs.number("frequency_penalty", 0.0) or 0.0,
        seed=inputs.integer("seed", 0) or 0,
    )
    params.validate()
    return params


def answer(
    call: EngineRequest, result: EngineResult, inputs: Inputs, exclude_input: bool, times_ns: tuple[int, int, int]
) -> dict[str, np.ndarray]:
    """Every output of an engine model, batch and beam dimension in front; what was not asked for is one zero."""
    new = result.output_ids
    if len(new) and new[-1] == call.end_id:
        new = new[:-1]  # as the C++ backend does: ids hold what is to be shown
    ids = new if exclude_input else np.concatenate([call.input_ids, new])
    logits = result.generation_logits if call.return_generation_logits else None
    log_probs = result.log_probs if call.return_log_probs else None
    perf = inputs.flag("return_perf_metrics")
    arrival, started, ended = times_ns if perf else (0, 0, 0)
    drafted, accepted = (result.num_draft_tokens, result.num_accepted) if perf else (0, 0)
    return {
        "output_ids": ids.astype(np.int32)[np.newaxis, np.newaxis],
        "sequence_length": _one(len(ids), np.int32),
        "cum_log_probs": _one(0.0 if log_probs is None else float(log_probs.sum()), np.float32),
        "output_log_probs": _floats(np.zeros(1) if log_probs is None else log_probs),
        "context_logits": np.zeros((1, 1, 1), dtype=np.float32),
        "generation_logits": _floats(np.zeros((1, 1)) if logits is None else logits),
        "batch_index": _one(0, np.int32),
        "sequence_index": _one(0, np.int32),
        "context_phase_params": np.zeros((1, 1), dtype=np.uint8),
        "kv_cache_alloc_new_blocks": _one(0, np.int32),
        "kv_cache_reused_blocks": _one(0, np.int32),
        "kv_cache_alloc_total_blocks": _one(0, np.int32),
        "arrival_time_ns": _one(arrival, np.int64),
        "first_scheduled_time_ns": _one(started, np.int64),
        "first_token_time_ns": _one(ended, np.int64),
        "last_token_time_ns": _one(ended, np.int64),
        "acceptance_rate": _one(accepted / drafted if drafted else 0.0, np.float32),
        "total_accepted_draft_tokens": _one(accepted, np.int32),
        "total_draft_tokens": _one(drafted, np.int32),
        "num_input_tokens": _one(len(call.input_ids), np.int32),
        "num_output_tokens": _one(len(new), np.int32),
    }


def _ids(inputs: Inputs, name: str) -> np.ndarray | None:
    array = inputs.array(name)
    return None if array is None else _without_batch(array, 1, name)


def _word_list(inputs: Inputs, name: str) -> tuple[tuple[int, ...], ...]:
    array = inputs.array(name)
    return () if array is None else split_word_list(_without_batch(array, 2, name), name)


def _without_batch(array: np.ndarray, rank: int, name: str) -> np.ndarray:
    """The tensor of one request, `rank` dimensions."""
    if array.ndim == rank + 1 and array.shape[0] == 1:
        return array[0]
    if array.ndim != rank:
        raise Refused(f"{name} has shape {list(array.shape)}; expected {rank} dimensions for one request")
    return array


def _one(value: float, dtype: type) -> np.ndarray:
    return np.array([[value]], dtype=dtype)


def _floats(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array[np.newaxis, np.newaxis], dtype=np.float32)


def _send_error(sender: Any, message: str, code: Any) -> None:
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)), flags=_FINAL)
