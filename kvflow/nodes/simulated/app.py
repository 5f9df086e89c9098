"""The API server of a simulated engine, as an ASGI application."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kvflow.connector import wire
from kvflow.nodes.simulated import requests, shapes
from kvflow.nodes.simulated.engine import VLLM, Engine
from kvflow.nodes.simulated.language import tokenize
from kvflow.nodes.simulated.replies import events, reply
from kvflow.nodes.simulated.requests import Call, Refused
from kvflow.nodes.simulated.settings import Settings

_CLIENT_GONE = 499
Parser = Callable[[dict[str, Any], Settings, str | None], Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A request as it came in, for tests to look at."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class App:
    """Serves one `Engine`. Keeps the last requests in `received`."""

    def __init__(self, engine: Engine, *, keep: int = 256) -> None:
        self.engine = engine
        self.received: deque[Received] = deque(maxlen=keep)
        self._asgi = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completion, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/health", self._health),
                Route("/version", self._version),
                Route("/metrics", self._metrics),
                *([] if engine.settings.stock else self._own_routes()),
            ],
            exception_handlers={Refused: _refused, HTTPException: _http_error},
        )

    def _own_routes(self) -> list[Route]:
        return [Route(wire.NODE_PATH, self._node), Route(wire.RELEASE_PATH, self._release, methods=["POST"])]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._asgi(scope, receive, send)

    async def _chat(self, request: Request) -> Response:
        return await self._serve(request, requests.chat)

    async def _completion(self, request: Request) -> Response:
        return await self._serve(request, requests.completion)

    async def _serve(self, request: Request, parser: Parser) -> Response:
        body = await self._body(request)
        return await _unless_gone(request, self._answer(body, parser, request.headers.get("x-request-id")))

    async def _answer(self, body: dict[str, Any], parser: Parser, request_id: str | None) -> Response:
        await self._faults()
        try:
            seen = {k: v for k, v in body.items() if k not in self.engine.faults.ignored_fields}
            call = parser(seen, self.engine.settings, request_id)
        except Refused as e:
            if not e.malformed:
                self._reject(body)
            raise
        if call.stream:
            return _Stream(events(self.engine, call), self.engine.faults.stream_breaks())
        return JSONResponse(await reply(self.engine, call))

    async def _body(self, request: Request) -> dict[str, Any]:
        try:
            data = await request.body()
        except ClientDisconnect:
            raise HTTPException(_CLIENT_GONE, "Client disconnected") from None
        body = requests.parse(request.headers.get("content-type", ""), data)
        self.received.append(Received(path=request.url.path, headers=dict(request.headers), body=body))
        return body

    async def _faults(self) -> None:
        if self.engine.faults.error():
            raise Refused("Internal server error", param=None, status=500, kind="InternalServerError")
        await self.engine.faults.flowing.wait()

    def _reject(self, body: dict[str, Any]) -> None:
        params = body.get("kv_transfer_params")
        if isinstance(params, dict) and params.get("do_remote_prefill"):
            self.engine.reject(params)

    async def _release(self, request: Request) -> Response:
        params = (await request.json()).get("kv_transfer_params")
        if not isinstance(params, dict):
            return JSONResponse({"error": "The body must be an object with kv_transfer_params, an object."}, 400)
        self.engine.reject(params)
        return JSONResponse({})

    async def _models(self, request: Request) -> Response:  # noqa: ARG002
        settings = self.engine.settings
        return JSONResponse(shapes.models(settings.model, settings.max_model_len))

    async def _tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        requests.check_model(body, self.engine.settings)
        prompt = body.get("prompt")
        tokens = tokenize(prompt if isinstance(prompt, str) else requests.chat_prompt(body))
        limit = self.engine.settings.max_model_len
        return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None})

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        return Response()

    async def _version(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"version": VLLM})

    async def _metrics(self, request: Request) -> Response:  # noqa: ARG002
        return PlainTextResponse(_metrics(self.engine))

    async def _node(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse(self.engine.report().to_wire())


class _Stream(StreamingResponse):
    """Closes its source whatever happens, so that a client that leaves aborts the request at once."""

    def __init__(self, source: AsyncGenerator[bytes], break_after: int | None) -> None:
        super().__init__(source, media_type="text/event-stream")
        self._source = source
        self._left = break_after

    async def stream_response(self, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.body" and self._left is not None:
                self._left -= 1
                if self._left < 0:
                    raise _Broken
            await send(message)

        async with aclosing(self._source):
            # Without its end, the server closes the connection in the middle of the response.
            with suppress(_Broken):
                await super().stream_response(counted)


class _Broken(Exception):
    pass


async def _unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Cancel `answer` when the client leaves, as vLLM does."""
    task, gone = asyncio.create_task(answer), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=_CLIENT_GONE)
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(request: Request, error: Exception) -> Response:  # noqa: ARG001
    assert isinstance(error, Refused)
    return JSONResponse(error.body, status_code=error.status)


async def _http_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    assert isinstance(error, HTTPException)
    kind = HTTPStatus(error.status_code).phrase if error.status_code != _CLIENT_GONE else ""
    body = {"message": error.detail, "type": kind, "param": None, "code": error.status_code}
    return JSONResponse({"error": body}, status_code=error.status_code)


def _metrics(engine: Engine) -> str:
    """A few of vLLM's metrics, under its names."""
    now = engine.occupancy()
    values = {
        "vllm:num_requests_running": ("gauge", now.running),
        "vllm:num_requests_waiting": ("gauge", now.waiting),
        "vllm:kv_cache_usage_perc": ("gauge", 1 - now.free / now.total),
        "vllm:nixl_bytes_transferred_sum": ("counter", engine.pulled_bytes),
        "vllm:nixl_bytes_transferred_count": ("counter", engine.transfers),
    }
    label = f'{{model_name="{engine.settings.model}",engine="0"}}'
    return "".join(f"# TYPE {name} {kind}\n{name}{label} {value:g}\n" for name, (kind, value) in values.items())
