"""TensorRT-LLM's LLM API as one Triton model: text in, text out; speculation happens inside the LLM.

model.yaml beside this file holds the arguments of `LLM(...)`. Every request is a coroutine in one event loop, so that
one process serves many requests and the LLM batches them. The text of a stream comes in pieces; joined, they are the
whole answer.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
import yaml

from .llmapi_request import ClientRequest, Settings, read_request
from .tensors import Inputs, Refused

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# What mpirun tells its children. A server started by it passes it on, and the LLM's own MPI processes would believe it.
_MPI_JOB = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_FIRST_", "OMPI_APP_CTX_", "OMPI_MCA_orte_", "ORTE_", "PMI_")
_PMIX_SETTINGS = "PMIX_MCA_"  # of PMIX_*, these are settings of the user, not of the job


class TritonPythonModel:
    """One process of the model, which starts those of the LLM."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the settings and load the model. Triton calls the model ready afterwards."""
        config = json.loads(args["model_config"])
        try:
            self._settings = Settings.parse(
                {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
            )
        except ValueError as error:
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from None
        self._streams = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        content = yaml.safe_load(Path(__file__).with_name("model.yaml").read_text(encoding="utf-8"))
        triton = content.pop("triton_config")
        self._poll_s = triton["cancellation_check_period_ms"] / 1000.0
        self._running: dict[str, set[Running]] = {}
        self._tasks: set[Future[None]] = set()  # the event loop itself refers to its tasks weakly
        _set_environment(self._settings.gpu_device_ids)
        # Only now: CUDA reads the environment once, when it is imported.
        from tensorrt_llm import LLM, SamplingParams
        from tensorrt_llm.llmapi.llm_utils import update_llm_args_with_extra_dict

        self._sampling_params = SamplingParams
        try:
            self._llm = LLM(**update_llm_args_with_extra_dict({}, content))
        except Exception as error:
            raise pb_utils.TritonModelException(f"the LLM does not start: {error}") from error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand each request to the event loop; the answers come through their response senders."""
        for request in requests:
            task = asyncio.run_coroutine_threadsafe(self._serve(request, request.get_response_sender()), self._loop)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def finalize(self) -> None:
        """End the LLM. Triton calls this when every request has had its last response."""
        self._llm.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        # References in cycles keep the LLM's processes, and with them this one, alive.
        del self._llm
        gc.collect()

    async def _serve(self, request: Any, sender: Any) -> None:
        """Answer one request. Whatever happens, the sender gets exactly one final response."""
        request_id = request.request_id()
        try:
            inputs = Inputs({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
            if inputs.flag("stop"):
                self._stop(request_id, sender)
                return
            client = read_request(inputs, self._settings)
            if client.stream and not self._streams:
                raise Refused("streaming is true; this model answers once, expected false")
            with self._registered(request) as running:
                await self._answer(client, running, Answer(client, request.requested_output_names()), sender)
        except Cancelled:
            _send_error(sender, f"request {request_id!r} is cancelled", pb_utils.TritonError.CANCELLED)
        except TimeoutError as error:
            _send_error(sender, str(error), pb_utils.TritonError.UNAVAILABLE)
        except ValueError as error:  # ours, or the LLM's own judgement of the request
            _send_error(sender, str(error), pb_utils.TritonError.INVALID_ARG)
        except Exception as error:
            pb_utils.Logger.log_error(f"request {request_id!r} failed: {error!r}")
            _send_error(sender, f"the LLM failed: {error!r}", pb_utils.TritonError.INTERNAL)

    @contextmanager
    def _registered(self, request: Any) -> Iterator[Running]:
        """A request that others can stop by its id, which several may share."""
        running = Running(request, self._poll_s)
        group = self._running.setdefault(request.request_id(), set())
        group.add(running)
        try:
            yield running
        finally:
            group.discard(running)
            if not group:
                self._running.pop(request.request_id(), None)

    async def _answer(self, client: ClientRequest, running: Running, answer: Answer, sender: Any) -> None:
        """Send responses until the final one is sent.

        Raises:
            Cancelled: the client has left, or stopped the request.
            TimeoutError: the LLM has stopped answering.
            Exception: whatever the LLM says. In every case no final response is sent yet.
        """
        # In pieces also where one response is wanted: a request that hangs and a client that has left are noticed.
        generation = self._llm.generate_async(
            client.prompt, sampling_params=self._sampling_params(**client.sampling), streaming=True
        )
        async with aclosing(self._outputs(generation, running)) as outputs:
            async for output in outputs:
                if output.finished:
                    sender.send(answer.last(output), flags=_FINAL)
                    return
                if client.stream and (response := answer.piece(output)) is not None:
                    sender.send(response)
        raise RuntimeError("the generation ended without its last output")

    async def _outputs(self, generation: Any, running: Running) -> AsyncGenerator[Any, None]:
        """What the LLM generates, for as long as the client waits for it."""
        outputs, finished = aiter(generation), False
        step: asyncio.Future[Any] | None = None
        try:
            while not finished:
                step = asyncio.ensure_future(anext(outputs))
                deadline = time.monotonic() + self._settings.call_timeout_s
                while not step.done():
                    await asyncio.wait({step}, timeout=self._poll_s)
                    running.check()
                    if not step.done() and time.monotonic() > deadline:
                        raise TimeoutError(f"the LLM has not answered for {self._settings.call_timeout_s:g} s")
                try:
                    output = step.result()
                except StopAsyncIteration:
                    return
                running.check()
                finished = output.finished
                yield output
        finally:
            if step is not None:
                step.cancel()
            if not finished:
                generation.abort()

    def _stop(self, request_id: str, sender: Any) -> None:
        """Cancel every running request of this id; the answer is an error all the same, as public clients expect."""
        group = self._running.get(request_id, set()) if request_id else set()
        for running in group:
            running.stopped = True
        if not request_id:
            _send_error(sender, "stop is true without a request id", pb_utils.TritonError.INVALID_ARG)
        elif not group:
            _send_error(sender, f"no request {request_id!r} is running", pb_utils.TritonError.NOT_FOUND)
        else:
            _send_error(sender, f"request {request_id!r} is cancelled", pb_utils.TritonError.CANCELLED)


class Cancelled(Exception):
    """The client has left, or somebody stopped the request by its id."""


class Running:
    """A request that is being answered."""

    def __init__(self, request: Any, poll_s: float) -> None:
        self.stopped = False
        self._request = request
        self._poll_s = poll_s
        self._asked = time.monotonic()

    def check(self) -> None:
        """Raise Cancelled if nobody waits for the answer; asks the server once a while, since that costs time."""
        now = time.monotonic()
        if not self.stopped and now - self._asked >= self._poll_s:
            self._asked = now
            self.stopped = bool(self._request.is_cancelled())
        if self.stopped:
            raise Cancelled


class Answer:
    """The responses to one request: new text, and with the last of it what the client wants to know beside it."""

    def __init__(self, client: ClientRequest, wanted: list[str]) -> None:
        self._client = client
        self._wanted = frozenset(wanted)
        self._prefix = "" if client.exclude_input else client.prompt
        self._num_sent = 0  # characters of the generated text

    def piece(self, output: Any) -> Any | None:
        """Response with the text since the last one; None when there is none."""
        text = self._new_text(output)
        return self._response({"text_output": _text(text)}) if text else None

    def last(self, output: Any) -> Any:
        """The last response.

        Raises:
            RuntimeError: the LLM does not say what the client asked for.
        """
        completion = output.outputs[0]
        outputs = {"text_output": _text(self._new_text(output))}
        for name in self._client.outputs:
            value = getattr(completion, name)
            if name == "cumulative_logprob":
                if value is None:
                    raise RuntimeError("return_cumulative_logprob: the LLM reports no log probabilities")
                outputs[name] = np.array([value], dtype=np.float32)
            else:
                outputs[name] = _text("" if value is None else str(value))
        if self._client.return_perf_metrics:
            outputs |= _metrics(getattr(completion, "request_perf_metrics", None))
        return self._response(outputs)

    def _new_text(self, output: Any) -> str:
        text = output.outputs[0].text
        new, self._num_sent = self._prefix + text[self._num_sent :], len(text)
        self._prefix = ""
        return new

    def _response(self, outputs: dict[str, np.ndarray]) -> Any:
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in outputs.items() if name in self._wanted]
        )


def _metrics(metrics: Any) -> dict[str, np.ndarray]:
    """The figures of one request: KV cache, times (ns on the LLM's clock), and acceptance where it speculates."""
    if metrics is None:
        raise RuntimeError("sampling_param_return_perf_metrics: the LLM reports none")
    cache, times, speculation = metrics.kv_cache_metrics, metrics.timing_metrics, metrics.speculative_decoding
    outputs = {
        "kv_cache_reused_block": np.array([cache.num_reused_blocks], dtype=np.int32),
        "kv_cache_missed_block": np.array([cache.num_missed_blocks], dtype=np.int32),
        "kv_cache_alloc_new_blocks": np.array([cache.num_new_allocated_blocks], dtype=np.int32),
        "kv_cache_alloc_total_blocks": np.array([cache.num_total_allocated_blocks], dtype=np.int32),
        "kv_cache_hit_rate": np.array([cache.kv_cache_hit_rate], dtype=np.float32),
    }
    for name in ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time"):
        ns = getattr(times, name) // timedelta(microseconds=1) * 1000
        outputs[f"{name}_ns"] = np.array([ns], dtype=np.int64)
    if speculation is not None:
        outputs["acceptance_rate"] = np.array([speculation.acceptance_rate], dtype=np.float32)
        for name in ("total_accepted_draft_tokens", "total_draft_tokens"):
            outputs[name] = np.array([getattr(speculation, name)], dtype=np.int32)
    return outputs


def _set_environment(gpu_device_ids: str | None) -> None:
    """Make the processes that the LLM starts see their GPUs, and no MPI job that is not theirs."""
    for name in list(os.environ):
        if name.startswith(_MPI_JOB) or (name.startswith("PMIX_") and not name.startswith(_PMIX_SETTINGS)):
            del os.environ[name]
    if gpu_device_ids is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["TRTLLM_VISIBLE_DEVICES"] = gpu_device_ids


def _send_error(sender: Any, message: str, code: Any) -> None:
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)), flags=_FINAL)


def _text(text: str) -> np.ndarray:
    return np.array([text.encode("utf-8")], dtype=np.object_)
