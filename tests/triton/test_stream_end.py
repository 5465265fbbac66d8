"""How clients end a stream: read to its status after the last response, cancelled before it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from trtspec.triton.client import STREAMING_MODEL, Client, ServerError

STATUS_AFTER_S = 0.1


@pytest.fixture
def served() -> Iterator[SimpleNamespace]:
    """A server of one model in this process: `url`, `ends` of its streams, and what the next one `answers`."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    found = SimpleNamespace(ends=[], error="", responses=1, ended=threading.Event())

    class Service(service_pb2_grpc.GRPCInferenceServiceServicer):
        def ModelConfig(self, request: Any, context: Any) -> Any:
            answer = service_pb2.ModelConfigResponse()
            answer.config.name = STREAMING_MODEL
            answer.config.model_transaction_policy.decoupled = True
            return answer

        def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
            next(requests)  # the client closes its side when it has its answer
            for number in range(found.responses):
                message = service_pb2.ModelStreamInferResponse(error_message=found.error)
                last = number == found.responses - 1 and not found.error  # Triton marks no error as the last
                message.infer_response.parameters["triton_final_response"].bool_param = last
                yield message
                time.sleep(STATUS_AFTER_S)
            found.ends.append("cancelled" if not context.is_active() else "read")
            found.ended.set()

    server = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Service(), server)
    found.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield found
    server.stop(None).wait()


@pytest.mark.parametrize("error", ["", "text_input is empty"])
def test_a_stream_is_read_to_its_status(served: SimpleNamespace, error: str) -> None:
    served.error = error
    with Client(served.url) as client:
        if error:
            with pytest.raises(ServerError, match=error):
                list(client.generate("a", max_tokens=1))
        else:
            assert len(list(client.generate("a", max_tokens=1))) == 1
        assert served.ended.wait(10) and served.ends == ["read"]


def test_a_client_that_leaves_cancels(served: SimpleNamespace) -> None:
    served.responses = 3
    with Client(served.url) as client:
        chunks = client.generate("a", max_tokens=1)
        next(chunks)
        chunks.close()
    assert not served.ended.wait(5 * STATUS_AFTER_S)  # the server's generator was closed at a response before the last


def test_the_gateway_reads_to_the_status_too(served: SimpleNamespace) -> None:
    from trtspec.openai.pipeline import Pipeline

    async def ask() -> int:
        pipeline = Pipeline(served.url)
        return len([chunk async for chunk in pipeline.generate({"text_input": "a", "max_tokens": 1})])

    assert asyncio.run(ask()) == 1
    assert served.ended.wait(10) and served.ends == ["read"]
