"""Generations of the BLS model on a running server, as asynchronous streams: any number at once in one thread.

Knows gRPC and the model's tensors; not HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trtspec.errors import TrtspecError
from trtspec.triton.client import (
    CHANNEL_OPTIONS,
    CONTROL_TIMEOUT_S,
    STREAMING_MODEL,
    Chunk,
    ChunkReader,
    ModelInfo,
    explained,
    generation_request,
    incomplete,
    model_info,
    server_error,
)

REQUEST_TIMEOUT_S = 600.0
# An error ends the stream with its own gRPC status, instead of as a text among the answers.
_ERRORS_AS_STATUS = (("triton_grpc_error", "true"),)


class Pipeline:
    """A connection to the BLS model of one server. To be made and used inside one event loop.

    Args:
        url: `host:port` of the server's gRPC.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._channel = grpc.aio.insecure_channel(url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._info: ModelInfo | None = None

    async def close(self) -> None:
        """Close the connection; generations in flight are cancelled."""
        await self._channel.close()

    async def ready(self) -> bool:
        """Whether the server says that the model is ready."""
        request = service_pb2.ModelReadyRequest(name=STREAMING_MODEL)
        try:
            return bool((await self._stub.ModelReady(request, timeout=1.0)).ready)
        except grpc.RpcError:
            return False

    async def info(self) -> ModelInfo:
        """What the model's configuration says (asked once).

        Raises:
            TrtspecError: no server, or it has no such model.
        """
        if self._info is None:
            request = service_pb2.ModelConfigRequest(name=STREAMING_MODEL)
            try:
                self._info = model_info(await self._stub.ModelConfig(request, timeout=CONTROL_TIMEOUT_S))
            except grpc.RpcError as error:
                raise await self._explained(error, CONTROL_TIMEOUT_S) from error
        return self._info

    async def generate(self, inputs: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """Chunks of one generation; the last, and only it, has `stats`. Closing the generator cancels the request.

        Args:
            inputs: the model's tensors by name; those that are None are left out.

        Raises:
            TrtspecError: no server, its error, or the time is over.
        """
        info = await self.info()
        request = generation_request(STREAMING_MODEL, info, **inputs)
        reader = ChunkReader(info, bool(inputs.get("return_log_probs")))
        answered = asyncio.Event()
        call = self._stub.ModelStreamInfer(
            _open(request, answered), timeout=REQUEST_TIMEOUT_S, metadata=_ERRORS_AS_STATUS
        )
        ended = False
        try:
            async for message in call:
                # An error is the last response, though Triton does not mark it so.
                final = message.infer_response.parameters["triton_final_response"].bool_param
                ended = final or bool(message.error_message)
                if message.error_message:
                    raise server_error(message.error_message, self._url)
                chunk = reader.read(message.infer_response)
                yield chunk
                if chunk.stats is not None:
                    return
            raise incomplete(self._url)
        except grpc.RpcError as error:
            raise await self._explained(error, REQUEST_TIMEOUT_S, reader.had_text) from error
        finally:
            answered.set()
            if ended:  # a stream that is cancelled now, before its status has come, Triton 2.51 never lets go
                await call.code()
            else:
                call.cancel()

    async def _explained(self, error: Any, timeout_s: float, after_text: bool = False) -> TrtspecError:
        live = error.code() != grpc.StatusCode.UNAVAILABLE or await self._live()
        return explained(error, self._url, timeout_s, live=live, after_text=after_text)

    async def _live(self) -> bool:
        try:
            return bool((await self._stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=1.0)).live)
        except grpc.RpcError:
            return False


async def _open(
    request: service_pb2.ModelInferRequest, answered: asyncio.Event
) -> AsyncGenerator[service_pb2.ModelInferRequest, None]:
    """One request; the stream stays open until it is answered: Triton 2.51 may crash where it is closed before."""
    yield request
    await answered.wait()
