"""An ASGI middleware for the engine's API server: `--middleware kvflow.connector.middleware.HandleMiddleware`.

vLLM puts `kv_transfer_params` into answers that are not streamed and leaves them out of streams. The engine client's
final output of a request does carry them, so `generate` of that one client object is wrapped, and a context variable
leads from the output back to the HTTP request that it belongs to. vLLM offers no hook for this; nothing of its files
is changed.
"""

import functools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from kvflow.connector import versions
from kvflow.connector.wire import NODE_PATH, RELEASE_PATH, VERSION, NodeReport, event

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


@dataclass(slots=True)
class _Found:
    """What the engine has returned for one HTTP request; of several prompts or choices, the last."""

    params: dict[str, Any] | None = None

    def take(self) -> dict[str, Any] | None:
        params, self.params = self.params, None
        return params


_FOUND: ContextVar[_Found | None] = ContextVar("kvflow_found", default=None)


class HandleMiddleware:
    """Adds the handle to event streams, ahead of the output that it came with, and answers kvflow's own routes."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._client: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope["app"].state.engine_client
        if scope["path"] == NODE_PATH and scope["method"] == "GET" and client.vllm_config.kv_transfer_config:
            await _answer(send, node_report(client.vllm_config).to_wire())
            return
        if scope["path"] == RELEASE_PATH and scope["method"] == "POST":
            await _release(client, receive, send)
            return
        self._watch(client)
        await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = _Found()
        token = _FOUND.set(found)
        try:
            await self._app(scope, receive, _Appending(send, found))
        finally:
            _FOUND.reset(token)

    def _watch(self, client: Any) -> None:
        if client is self._client:
            return
        generate = client.generate

        @functools.wraps(generate)
        def watched(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            # The variable is read here, in the request's own context; the outputs may be drawn in another task.
            return _noting(generate(*args, **kwargs), _FOUND.get())

        client.generate = watched
        self._client = client


def node_report(vllm_config: Any) -> NodeReport:
    """With data parallelism the engine ids in handles have a suffix, `_dp0` and so on, after the epoch."""
    transfer = vllm_config.kv_transfer_config
    return NodeReport(
        version=VERSION,
        epoch=transfer.engine_id,
        role=_ROLES.get(transfer.kv_role, str(transfer.kv_role)),
        vllm=versions.installed(),
        block_size=vllm_config.cache_config.block_size,
        max_model_len=vllm_config.model_config.max_model_len,
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
    )


class _Appending:
    """`send` of one request, which puts kvflow's event into an event stream as soon as there is one."""

    def __init__(self, send: Send, found: _Found) -> None:
        self._send = send
        self._found = found
        self._streams = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._streams = _is_event_stream(message.get("headers", ()))
        elif message["type"] == "http.response.body" and self._streams and (params := self._found.take()) is not None:
            # vLLM sends whole events, so in front of a message no event is cut in two.
            message = {**message, "body": event(params) + message.get("body", b"")}
        await self._send(message)


async def _noting(outputs: AsyncGenerator[Any, None], found: _Found | None) -> AsyncGenerator[Any, None]:
    try:
        async for output in outputs:
            if found is not None and output.finished and output.kv_transfer_params is not None:
                found.params = output.kv_transfer_params
            yield output
    finally:
        # A consumer that leaves early must close vLLM's generator too, which then aborts the request.
        await outputs.aclose()


async def _release(client: Any, receive: Receive, send: Send) -> None:
    """What vLLM does itself for a request that its handlers refuse, but not for one that fails validation before."""
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    try:
        params = dict(json.loads(body)["kv_transfer_params"])
    except (ValueError, TypeError, KeyError):
        await _answer(send, {"error": "The body must be an object with kv_transfer_params, an object."}, status=400)
        return
    await client.notify_kv_transfer_request_rejected(f"kvflow-release-{uuid4().hex}", params)
    await _answer(send, {})


def _is_event_stream(headers: Any) -> bool:
    return any(k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)


async def _answer(send: Send, body: dict[str, Any], status: int = 200) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
