"""The API server of a simulated engine, as an ASGI application."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kvflow.connector import wire
from kvflow.nodes.simulated import messages, replies, requests, responses, shapes
from kvflow.nodes.simulated.engine import VLLM, Engine
from kvflow.nodes.simulated.language import tokenize
from kvflow.nodes.simulated.requests import Refused
from kvflow.nodes.simulated.settings import Settings

_CLIENT_GONE = 499
Asked = TypeVar("Asked")
Parser = Callable[[dict[str, Any], Settings, str | None], Asked]
Replier = Callable[[Engine, Asked], Awaitable[dict[str, Any]]]
Streamer = Callable[[Engine, Asked], AsyncGenerator[bytes]]


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
        self._stored: responses.Store = {}
        self._asgi = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completion, methods=["POST"]),
                Route("/v1/responses", self._responses, methods=["POST"]),
                Route("/v1/responses/{response_id}", self._stored_response),
                Route("/v1/responses/{response_id}/cancel", self._cancel, methods=["POST"]),
                Route("/v1/messages", self._messages, methods=["POST"]),
                Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
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
        return await self._serve(request, requests.chat, replies.reply, replies.events)

    async def _completion(self, request: Request) -> Response:
        return await self._serve(request, requests.completion, replies.reply, replies.events)

    async def _messages(self, request: Request) -> Response:
        return await self._serve(request, messages.parse, messages.reply, messages.events)

    async def _responses(self, request: Request) -> Response:
        parse = partial(responses.parse, self._stored)
        return await self._serve(request, parse, responses.reply, responses.events)

    async def _serve(
        self, request: Request, parse: Parser[Asked], reply: Replier[Asked], events: Streamer[Asked]
    ) -> Response:
        body = await self._body(request)
        work = self._answer(body, request.headers.get("x-request-id"), parse, reply, events)
        return await _unless_gone(request, work)

    async def _answer(
        self,
        body: dict[str, Any],
        request_id: str | None,
        parse: Parser[Asked],
        reply: Replier[Asked],
        events: Streamer[Asked],
    ) -> Response:
        await self._faults()
        try:
            seen = {k: v for k, v in body.items() if k not in self.engine.faults.ignored_fields}
            asked = parse(seen, self.engine.settings, request_id)
        except Refused as e:
            # vLLM's own handlers see no request that is malformed; kvflow's middleware does.
            if not self.engine.settings.stock or not e.malformed:
                self._reject(body)
            raise
        if body.get("stream"):
            return _Stream(events(self.engine, asked), self.engine.faults.stream_breaks())
        return JSONResponse(await reply(self.engine, asked))

    async def _stored_response(self, request: Request) -> Response:
        return JSONResponse(self._stored_as(request.path_params["response_id"]))

    async def _cancel(self, request: Request) -> Response:
        self._stored_as(request.path_params["response_id"])
        message = "Cannot cancel a synchronous response."
        raise Refused(message, param="response_id", kind="invalid_request_error")

    def _stored_as(self, name: str) -> dict[str, Any]:
        if name not in self._stored:
            raise responses.not_found(name)
        return dict(self._stored[name].response)

    async def _count_tokens(self, request: Request) -> Response:
        return JSONResponse(messages.count(await self._body(request)))

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
        if isinstance(params, dict):
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

    async def _detokenize(self, request: Request) -> Response:
        """Its tokens are hashes, so the text of one is its number."""
        body = await self._body(request)
        requests.check_model(body, self.engine.settings)
        return JSONResponse({"prompt": " ".join(map(str, body.get("tokens") or ()))})

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
