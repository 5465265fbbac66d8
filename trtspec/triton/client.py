"""Talk to a running server over gRPC: stream or fetch generations, cancel them, and read what the models say of
themselves.

Uses the protocol stubs of tritonclient directly: their calls end when the server does, carry a deadline and can be
cancelled, and one channel serves any number of streams. Knows nothing of how the server was started.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from tritonclient.grpc import service_pb2

DEFAULT_URL = "127.0.0.1:8001"
STREAMING_MODEL = "tensorrt_llm_bls"
UNARY_MODEL = "tensorrt_llm_bls_unary"
CONTROL_KEY = "trtspec-control"  # name of the header that carries a server's control key
CONTROL_TIMEOUT_S = 10.0  # for calls that do not generate
_STATUS_TIMEOUT_S = 10.0  # from a stream's last response to its status
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # A server that is still starting is asked again soon, not after gRPC's growing pauses.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)


class ServerGone(TrtspecError):
    """Nobody answers at the address, or no longer."""


class ServerError(TrtspecError):
    """The server answered with an error, or not in time.

    Attributes:
        message: its own words, on one line.
        status: gRPC's name of the kind of error, such as INVALID_ARGUMENT; None if the server does not tell.
    """

    def __init__(self, problem: str, *, where: str, message: str, status: str | None, fix: str | None = None) -> None:
        super().__init__(problem, where=where, fix=fix)
        self.message = message
        self.status = status


@dataclass(frozen=True)
class GenerationStats:
    """Figures of one generation.

    Attributes:
        input_tokens: tokens of the prompt; None if the server does not say.
        tokens: tokens generated.
        drafted, accepted: draft tokens proposed and accepted.
        target_passes: calls of the target that verified or generated.
        seconds: from sending the request to its end, as the client sees it.
        seconds_to_first_text: until the first text; None if there was none.
        finish_reason: stop, length or cancelled; None if the server does not say.
    """

    input_tokens: int | None
    tokens: int
    drafted: int
    accepted: int
    target_passes: int
    seconds: float
    seconds_to_first_text: float | None
    finish_reason: str | None

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per target pass, the target's own included; 0 without a pass."""
        return self.tokens / self.target_passes if self.target_passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens over all seconds, the prompt's processing included."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Chunk:
    """One piece of a streamed generation.

    Attributes:
        text: the new text; may be empty.
        output_ids: ids of the new tokens; None if the server does not send them.
        stats: figures of the whole generation, on the last piece only.
        log_probs: one for each of the new tokens, where asked for; None if the server does not send them.
    """

    text: str
    output_ids: list[int] | None = None
    stats: GenerationStats | None = None
    log_probs: list[float] | None = None


@dataclass(frozen=True)
class Completion:
    """A whole generation: text, ids of its tokens (None if the server does not send them) and figures."""

    text: str
    output_ids: list[int] | None
    stats: GenerationStats


@dataclass(frozen=True)
class ModelInfo:
    """What a model's configuration says.

    Attributes:
        batched: inputs carry a leading batch dimension.
        decoupled: it may answer one request with several responses.
        inputs, outputs: names of its tensors.
        chat_template: the model's chat template (jinja2), or None.
        special_tokens: names that the template may use, such as bos_token -> text.
        parameters: all its parameters, by name.
    """

    batched: bool
    decoupled: bool
    inputs: frozenset[str]
    outputs: frozenset[str]
    chat_template: str | None
    special_tokens: dict[str, str]
    parameters: dict[str, str] = field(default_factory=dict)


class Client:
    """A connection to one server. Safe to use from several threads at once.

    Args:
        url: `host:port` of the server's gRPC.
        control_key: what a server that others can reach asks of those who load and unload models.
    """

    def __init__(self, url: str = DEFAULT_URL, *, control_key: str = "") -> None:
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        self.url = url
        self._channel = grpc.insecure_channel(url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._control = [(f"triton-grpc-protocol-{CONTROL_KEY}", control_key)]
        self._info: dict[str, ModelInfo] = {}

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; generations in flight are cancelled."""
        self._channel.close()

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int,
        min_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        bad_words: Sequence[str] = (),
        end_id: int | None = None,
        log_probs: bool = False,
        num_draft_tokens: int | None = None,
        stream: bool = True,
        exclude_input: bool | None = True,
        model: str | None = None,
        timeout_s: float = 600.0,
    ) -> Iterator[Chunk]:
        """Generate text; settings left out are the server's (greedy, its default number of draft tokens).

        Args:
            prompt: plain text, any chat template already applied.
            end_id: id that ends the answer instead of the model's own; -1: only its length does.
            log_probs: asks for the log probabilities of the new tokens.
            num_draft_tokens: draft tokens a cycle; 0 decodes plainly.
            stream: as it comes, through the decoupled model; else in one piece, through the unary model.
            exclude_input: text without the prompt.
            model: another model with the same tensors; it streams only if it is decoupled.
            timeout_s: longest time for the whole generation, in seconds.

        Yields:
            Pieces of text; the last one, and only it, has `stats`. Closing the iterator cancels the generation.

        Raises:
            TrtspecError: no server, its error message, or the time is over.
        """
        import grpc

        model = model or (STREAMING_MODEL if stream else UNARY_MODEL)
        if temperature and not top_k and top_p is None:
            top_p = 1.0  # a temperature alone may mean greedy to a server
        info = self.info(model)
        request = generation_request(
            model,
            info,
            text_input=prompt,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            stop_words=list(stop) or None,
            bad_words=list(bad_words) or None,
            end_id=end_id,
            return_log_probs=log_probs or None,
            num_draft_tokens=num_draft_tokens,
            stream=stream if "stream" in info.inputs else None,
            exclude_input_in_output=exclude_input,
        )
        reader = ChunkReader(info, log_probs)
        responses = self._stream(request, timeout_s) if info.decoupled else self._unary(request, timeout_s)
        try:
            for response in responses:
                chunk = reader.read(response)
                yield chunk
                if chunk.stats is not None:
                    return
            raise incomplete(self.url)
        except grpc.RpcError as error:
            raise self._explain(error, timeout_s, after_text=reader.had_text) from error
        finally:
            responses.close()

    def complete(self, prompt: str, **settings: Any) -> Completion:
        """The whole generation of `generate` with the same settings."""
        chunks = list(self.generate(prompt, **settings))
        stats = chunks[-1].stats
        assert stats is not None
        ids = [token for chunk in chunks for token in chunk.output_ids or ()]
        sent = any(chunk.output_ids is not None for chunk in chunks)
        return Completion("".join(chunk.text for chunk in chunks), ids if sent else None, stats)

    def infer(
        self, model: str, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str], timeout_s: float = 600.0
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Ask any model: tensors in, tensors out, one dictionary a response; those without tensors are left out.

        Raises:
            TrtspecError: no server, its error message, or the time is over.
        """
        import grpc
        from tritonclient.grpc import InferResult, service_pb2
        from tritonclient.utils import np_to_triton_dtype

        request = service_pb2.ModelInferRequest(model_name=model)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        for name, array in inputs.items():
            request.inputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
            request.raw_input_contents.append(np.ascontiguousarray(array).tobytes())
        for name in outputs:
            request.outputs.add(name=name)
        decoupled = self.info(model).decoupled
        responses = self._stream(request, timeout_s) if decoupled else self._unary(request, timeout_s)
        try:
            for response in responses:
                result = InferResult(response)
                if response.outputs:
                    yield {output.name: result.as_numpy(output.name) for output in response.outputs}
                if response.parameters["triton_final_response"].bool_param or not decoupled:
                    return
            raise incomplete(self.url)
        except grpc.RpcError as error:
            raise self._explain(error, timeout_s) from error
        finally:
            responses.close()

    def ready(self) -> bool:
        """Whether the server says that it and all its models are ready; it may still not answer."""
        import grpc
        from tritonclient.grpc import service_pb2

        try:
            return bool(self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=1.0).ready)
        except grpc.RpcError:
            return False

    def _live(self) -> bool:
        import grpc
        from tritonclient.grpc import service_pb2

        try:
            return bool(self._stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=1.0).live)
        except grpc.RpcError:
            return False

    def info(self, model: str = STREAMING_MODEL) -> ModelInfo:
        """What the model's configuration says (asked once).

        Raises:
            TrtspecError: no server, or it has no such model.
        """
        from tritonclient.grpc import service_pb2

        if model not in self._info:
            with self._explained(CONTROL_TIMEOUT_S):
                answer = self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=model), timeout=CONTROL_TIMEOUT_S)
            self._info[model] = model_info(answer)
        return self._info[model]

    def ready_models(self) -> set[str]:
        """Names of the models that the server holds for ready.

        Raises:
            TrtspecError: no server.
        """
        from tritonclient.grpc import service_pb2

        with self._explained(CONTROL_TIMEOUT_S):
            index = self._stub.RepositoryIndex(
                service_pb2.RepositoryIndexRequest(ready=True), timeout=CONTROL_TIMEOUT_S, metadata=self._control
            )
        return {model.name for model in index.models}

    def reload(self, model: str, timeout_s: float) -> None:
        """Unload and load a model, which is the only way to get back one whose process died.

        Raises:
            TrtspecError: no server, or the model does not load.
        """
        from tritonclient.grpc import service_pb2

        with self._explained(timeout_s):
            for call, request in (
                (self._stub.RepositoryModelUnload, service_pb2.RepositoryModelUnloadRequest(model_name=model)),
                (self._stub.RepositoryModelLoad, service_pb2.RepositoryModelLoadRequest(model_name=model)),
            ):
                call(request, timeout=timeout_s, metadata=self._control)

    def _stream(self, request: Any, timeout_s: float) -> Generator[service_pb2.ModelInferResponse, None, None]:
        """Responses of the decoupled model; closing the generator before the last of them cancels the request."""
        import grpc

        answered = threading.Event()
        call = self._stub.ModelStreamInfer(kept_open(request, answered), timeout=timeout_s)
        ended = False
        try:
            for message in call:
                # An error is the last response, though Triton does not mark it so.
                final = message.infer_response.parameters["triton_final_response"].bool_param
                ended = final or bool(message.error_message)
                if message.error_message:
                    raise server_error(message.error_message, self.url)
                yield message.infer_response
        finally:
            answered.set()
            if ended:  # a stream that is cancelled now, before its status has come, Triton 2.51 never lets go
                too_late = threading.Timer(_STATUS_TIMEOUT_S, call.cancel)
                too_late.start()
                with suppress(grpc.RpcError):
                    deque(call, maxlen=0)
                too_late.cancel()
            else:
                call.cancel()

    def _unary(self, request: Any, timeout_s: float) -> Generator[service_pb2.ModelInferResponse, None, None]:
        """The one response of the unary model."""
        yield self._stub.ModelInfer(request, timeout=timeout_s)

    @contextmanager
    def _explained(self, timeout_s: float) -> Iterator[None]:
        import grpc

        try:
            yield
        except grpc.RpcError as error:
            raise self._explain(error, timeout_s) from error

    def _explain(self, error: Any, timeout_s: float, after_text: bool = False) -> TrtspecError:
        import grpc

        live = error.code() != grpc.StatusCode.UNAVAILABLE or self._live()
        return explained(error, self.url, timeout_s, live=live, after_text=after_text)


def kept_open(request: Any, answered: threading.Event) -> Iterator[Any]:
    """Our side of a stream: the request, and nothing until it is answered; Triton 2.51 may crash if it ends before."""
    yield request
    answered.wait()


_INPUTS = {  # name -> datatype on the wire, field of InferTensorContents that carries it
    "text_input": ("BYTES", "bytes_contents"),
    "max_tokens": ("INT32", "int_contents"),
    "min_tokens": ("INT32", "int_contents"),
    "temperature": ("FP32", "fp32_contents"),
    "top_k": ("INT32", "int_contents"),
    "top_p": ("FP32", "fp32_contents"),
    "repetition_penalty": ("FP32", "fp32_contents"),
    "presence_penalty": ("FP32", "fp32_contents"),
    "frequency_penalty": ("FP32", "fp32_contents"),
    "seed": ("UINT64", "uint64_contents"),
    "stop_words": ("BYTES", "bytes_contents"),
    "bad_words": ("BYTES", "bytes_contents"),
    "end_id": ("INT32", "int_contents"),
    "embedding_bias_words": ("BYTES", "bytes_contents"),
    "embedding_bias_weights": ("FP32", "fp32_contents"),
    "return_log_probs": ("BOOL", "bool_contents"),
    "num_draft_tokens": ("INT32", "int_contents"),
    "stream": ("BOOL", "bool_contents"),
    "exclude_input_in_output": ("BOOL", "bool_contents"),
}


def generation_request(model: str, info: ModelInfo, **values: Any) -> service_pb2.ModelInferRequest:
    """The message of one request: a number, text, truth value or list of them a tensor; those that are None are left
    out."""
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in values.items():
        if value is None:
            continue
        datatype, contents = _INPUTS[name]
        items = value if isinstance(value, list) else [value]
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[*([1] if info.batched else []), len(items)])
        getattr(tensor.contents, contents).extend([item.encode() for item in items] if datatype == "BYTES" else items)
    return request


def model_info(answer: service_pb2.ModelConfigResponse) -> ModelInfo:
    """What the answer to a question for a model's configuration says."""
    config = answer.config
    texts = {key: value.string_value for key, value in config.parameters.items()}
    return ModelInfo(
        batched=config.max_batch_size > 0,
        decoupled=config.model_transaction_policy.decoupled,
        inputs=frozenset(tensor.name for tensor in config.input),
        outputs=frozenset(tensor.name for tensor in config.output),
        chat_template=texts.get("chat_template") or None,
        special_tokens={name: texts[name] for name in ("bos_token", "eos_token") if name in texts},
        parameters=texts,
    )


class ChunkReader:
    """Reads the responses to one request, in their order, as chunks; the request counts as sent when this is made.

    Attributes:
        had_text: some text has come.
    """

    def __init__(self, info: ModelInfo, log_probs: bool) -> None:
        self._decoupled = info.decoupled
        self._log_probs = log_probs
        self._outputs: dict[str, Any] = {}
        self._started = time.monotonic()
        self._first_text_at: float | None = None

    @property
    def had_text(self) -> bool:
        return self._first_text_at is not None

    def read(self, response: service_pb2.ModelInferResponse) -> Chunk:
        """The chunk of the next response; it has `stats` if the response is the last."""
        received = _outputs(response)
        self._outputs |= received
        text, ids = received.get("text_output", ""), received.get("output_ids")
        scores = received.get("output_log_probs") if self._log_probs else None
        now = time.monotonic()
        if text and self._first_text_at is None:
            self._first_text_at = now
        if self._decoupled and not response.parameters["triton_final_response"].bool_param:
            return Chunk(text, ids, log_probs=scores)
        first = None if self._first_text_at is None else self._first_text_at - self._started
        return Chunk(text, ids, _stats(self._outputs, now - self._started, first), scores)


def explained(error: Any, url: str, timeout_s: float, *, live: bool, after_text: bool = False) -> TrtspecError:
    """One line for a failed call.

    Args:
        error: the RpcError.
        live: the server answers; asked only when the call says UNAVAILABLE, as a model may of its own.
        after_text: the answer had begun.
    """
    import grpc

    code, details = error.code(), error.details() or ""
    if not live:
        if after_text:
            return ServerGone("the server went away in the middle of the answer", where=url)
        return ServerGone(f"no server at {url}", fix="start one with trtspec serve CONFIG")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        problem = f"no complete answer within {timeout_s:g} s"
        return ServerError(problem, where=url, message=problem, status=code.name)
    return server_error(details or code.name, url, code.name)


def server_error(message: str, url: str, status: str | None = None) -> ServerError:
    """The server's own message as an error, with what to do about it where that is known."""
    fix = None
    if "is not healthy" in message:
        fix = "the model's process died; trtspec serve loads it again within seconds: try again"
    message = " ".join(message.split())
    problem = f"the server answered with an error: {message}"
    return ServerError(problem, where=url, message=message, status=status, fix=fix)


def incomplete(url: str) -> TrtspecError:
    """The error for responses that ended without a last one."""
    return TrtspecError("the server ended the answer before it was complete", where=url)


def _outputs(response: service_pb2.ModelInferResponse) -> dict[str, Any]:
    """Output name -> str, list of numbers (output_ids, output_log_probs) or a number; batch 1."""
    from tritonclient.grpc import InferResult

    result = InferResult(response)
    values: dict[str, Any] = {}
    for output in response.outputs:
        array = result.as_numpy(output.name).ravel()
        if output.name in ("output_ids", "output_log_probs"):
            values[output.name] = array.tolist()
        elif output.datatype == "BYTES":
            values[output.name] = b"".join(array.tolist()).decode("utf-8", errors="replace")
        elif array.size:
            values[output.name] = array[0].item()
    return values


def _stats(outputs: dict[str, Any], seconds: float, seconds_to_first_text: float | None) -> GenerationStats:
    tokens = int(outputs.get("num_output_tokens", 0))
    accepted = int(outputs.get("total_accepted_draft_tokens", 0))
    # Every pass adds one token of the target's own, so a server that does not count its passes still tells them.
    passes = outputs.get("total_target_passes", max(tokens - accepted, 1 if tokens else 0))
    return GenerationStats(
        input_tokens=outputs.get("num_input_tokens"),
        tokens=tokens,
        drafted=int(outputs.get("total_draft_tokens", 0)),
        accepted=accepted,
        target_passes=int(passes),
        seconds=seconds,
        seconds_to_first_text=seconds_to_first_text,
        finish_reason=outputs.get("finish_reason") or None,
    )
