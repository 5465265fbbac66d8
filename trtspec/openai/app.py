"""The HTTP side: routes, errors, event streams, and clients that leave.

A client that closes its connection cancels its request down to the model, streamed or not.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from trtspec.errors import TrtspecError
from trtspec.openai.answers import Answer, ChatAnswer, CompletionAnswer
from trtspec.openai.errors import ApiError, api_error
from trtspec.openai.pipeline import Pipeline
from trtspec.openai.requests import ChatRequest, CompletionRequest, Job, chat_job, completion_job
from trtspec.openai.tokens import Tokens
from trtspec.triton.client import Chunk, ModelInfo

OWNER = "trtspec"
_DONE = "data: [DONE]\n\n"
_CLIENT_CLOSED = 499  # nobody reads it

T = TypeVar("T")


class FrontEnd:
    """What the routes share.

    Args:
        url: `host:port` of the server's gRPC.
        names: of the one model that is served, as clients may call it.
        tokenizer: the pipeline's tokenizer.json.
    """

    def __init__(self, url: str, names: Sequence[str], tokenizer: Path) -> None:
        self._url = url
        self._names = names
        self._tokenizer = tokenizer
        self._tokens: Tokens | None = None
        self._created = int(time.time())
        self.pipeline: Pipeline

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Hold the connection to the server while the application runs."""
        self.pipeline = Pipeline(self._url)
        try:
            yield
        finally:
            await self.pipeline.close()

    async def facts(self) -> tuple[ModelInfo, Tokens]:
        """What the model says of itself, and its tokenizer."""
        info = await self.pipeline.info()
        if self._tokens is None:
            self._tokens = Tokens(self._tokenizer, info.parameters)
        return info, self._tokens

    def model(self, name: str) -> dict[str, Any]:
        """The entry of a model.

        Raises:
            ApiError: there is no such model.
        """
        if name not in self._names:
            known = " or ".join(self._names)
            raise ApiError(
                f"The model {name!r} does not exist; expected {known}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return {"id": name, "object": "model", "created": self._created, "owned_by": OWNER}

    def models(self) -> dict[str, Any]:
        """The list of models."""
        return {"object": "list", "data": [self.model(name) for name in self._names]}

    async def answer(self, request: Request, answer: Answer, job: Job, stream: bool, usage: bool) -> Response:
        """Run a job; the response to it once it is sure not to be an error, or whole."""
        chunks = _merged([self.pipeline.generate(inputs) for inputs in job.inputs])
        if not stream:
            return await _while_connected(request, _whole(chunks, answer, len(job.inputs)))
        events = _events(chunks, answer, usage)
        first = await _while_connected(request, anext(events))
        return _EventStream(_after(first, events), media_type="text/event-stream")


def create_app(front: FrontEnd) -> FastAPI:
    """The application."""
    app = FastAPI(title="trtspec", lifespan=front.lifespan, openapi_url=None)

    @app.get("/health/ready")
    async def ready() -> Response:
        return Response(status_code=200 if await front.pipeline.ready() else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return front.models()

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return front.model(name)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        front.model(body.model)
        info, tokens = await front.facts()
        job = completion_job(body, info, tokens)
        answer = CompletionAnswer(body.model, job, tokens)
        return await front.answer(request, answer, job, bool(body.stream), _usage_wanted(body))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        front.model(body.model)
        info, tokens = await front.facts()
        job = chat_job(body, info, tokens)
        answer = ChatAnswer(body.model, job, tokens)
        return await front.answer(request, answer, job, bool(body.stream), _usage_wanted(body))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _error_response(_invalid(error))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path}"
        return _error_response(ApiError(message, status=error.status_code, code="unknown_url"))

    @app.exception_handler(TrtspecError)
    async def known(request: Request, error: TrtspecError) -> Response:
        return _error_response(_told(error))

    @app.exception_handler(Exception)  # and the log has it in full
    async def internal(request: Request, error: Exception) -> Response:
        return _error_response(api_error(error))

    return app


def _usage_wanted(body: CompletionRequest | ChatRequest) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


class _EventStream(StreamingResponse):
    """A stream whose source is closed with it, at once, however it ends."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(self.body_iterator, AsyncGenerator)
        async with aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


async def _after(first: str, rest: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with aclosing(rest):
        yield first
        async for event in rest:
            yield event


async def _events(
    chunks: AsyncGenerator[tuple[int, Chunk], None], answer: Answer, usage: bool
) -> AsyncGenerator[str, None]:
    """The events of a stream. An error before the first one is raised, a later one is the last event."""
    begun = False
    no_usage = {"usage": None} if usage else {}
    try:
        async with aclosing(chunks):
            async for index, chunk in chunks:
                for choice in answer.pieces(index, chunk):
                    yield _event(answer.piece([choice], **no_usage))
                    begun = True
        if usage:
            yield _event(answer.piece([], usage=answer.usage))
        yield _DONE
    except Exception as error:
        if not begun:
            raise
        yield _event(_told(error).body)


async def _whole(chunks: AsyncGenerator[tuple[int, Chunk], None], answer: Answer, num_choices: int) -> Response:
    of_choices: list[list[Chunk]] = [[] for _ in range(num_choices)]
    async with aclosing(chunks):
        async for index, chunk in chunks:
            of_choices[index].append(chunk)
    return JSONResponse(answer.whole(of_choices))


async def _merged(streams: list[AsyncGenerator[Chunk, None]]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Chunks of all streams as they come, with the index of theirs; the first error ends all."""
    arrived: asyncio.Queue[tuple[int, Chunk] | Exception] = asyncio.Queue()

    async def forward(index: int, stream: AsyncGenerator[Chunk, None]) -> None:
        try:
            async with aclosing(stream):
                async for chunk in stream:
                    arrived.put_nowait((index, chunk))
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    try:
        unfinished = len(streams)
        while unfinished:
            arrival = await arrived.get()
            if isinstance(arrival, Exception):
                raise arrival
            unfinished -= arrival[1].stats is not None
            yield arrival
    finally:
        await _cancelled(tasks)


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves.

    Raises:
        ApiError: it has left.
    """

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError("the client has left", status=_CLIENT_CLOSED)
    finally:
        await _cancelled([working, watching])


async def _cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _invalid(error: RequestValidationError) -> ApiError:
    """What is wrong with the first field at fault; of a field that may be of several types, all that was expected."""
    problems = error.errors()
    if problems[0]["type"].startswith("json_"):
        return ApiError(f"the body is not JSON: {problems[0]['ctx']['error']}")
    param = _field(problems[0]["loc"])
    messages = dict.fromkeys(problem["msg"] for problem in problems if _field(problem["loc"]) == param)
    message = " or ".join(messages)
    return ApiError(f"{param}: {message}" if param else f"the body: {message}", param=param)


def _field(loc: Sequence[int | str]) -> str | None:
    """Name of the field at a place in the body, with the indices and names inside it: `messages[0].role`."""
    if len(loc) < 2:
        return None
    inside = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc[2:]]
    # What stands behind them is the name of a type, where several are allowed.
    return str(loc[1]) + "".join(inside[:2] if loc[1] == "messages" else [])


def _told(error: Exception) -> ApiError:
    """The error as the client is told; what is our own fault is written to the log in full."""
    told = api_error(error)
    if told.status == 500:
        traceback.print_exception(error, file=sys.stderr)
    return told


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.body, status_code=error.status)
