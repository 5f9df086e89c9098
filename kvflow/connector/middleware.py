"""An ASGI middleware for the engine's API server: `--middleware kvflow.connector.middleware.HandleMiddleware`.

vLLM puts `kv_transfer_params` into answers that are not streamed and leaves them out of streams. The engine client's
final output of a request does carry them, so `generate` of that one client object is wrapped, and a context variable
leads from the output back to the HTTP request that it belongs to. vLLM offers no hook for this; nothing of its files
is changed.

A leg may end before the engine was given it: refused, or its client left. Other engines would keep KV for it, and what
it was to release would stay pinned. Then the engine is told that the leg will not come. vLLM does so itself, but only
for decode legs, and only for those that one of its handlers refuses.
"""

import asyncio
import functools
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from kvflow.connector import versions
from kvflow.connector.pull import has_handle
from kvflow.connector.wire import KEY, NODE_PATH, RELEASE_PATH, VERSION, NodeReport, event

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)

_TURNS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")
"""Where vLLM takes `kv_transfer_params`."""
_RANK_HEADER = b"x-data-parallel-rank"
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


@dataclass(slots=True)
class _Found:
    """What the engine has returned for one HTTP request; of several prompts or choices, the last."""

    params: dict[str, Any] | None = None
    body: list[bytes] = field(default_factory=list)
    """Of the HTTP request, for as long as it has not reached the engine."""
    reached: bool = False
    """The engine was given the request, or told that it will not come."""

    def take(self) -> dict[str, Any] | None:
        params, self.params = self.params, None
        return params

    def reach(self) -> None:
        self.reached = True
        self.body.clear()


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
        found = _Found()
        try:
            await self._serve(scope, receive, send, found)
        finally:
            await _give_up(client, scope, found)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, found: _Found) -> None:
        token = _FOUND.set(found)
        try:
            await self._app(scope, _Remembering(receive, found), _Appending(send, found))
        finally:
            _FOUND.reset(token)

    def _watch(self, client: Any) -> None:
        if client is self._client:
            return
        generate, rejected = client.generate, client.notify_kv_transfer_request_rejected

        @functools.wraps(generate)
        def watched(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            # The variable is read here, in the request's own context; the outputs may be drawn in another task.
            return _noting(generate(*args, **kwargs), _FOUND.get())

        @functools.wraps(rejected)
        async def noted(*args: Any, **kwargs: Any) -> None:
            if found := _FOUND.get():
                found.reach()
            await rejected(*args, **kwargs)

        client.generate, client.notify_kv_transfer_request_rejected = watched, noted
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


class _Remembering:
    """`receive` of one request, which remembers the body until the request has reached the engine."""

    def __init__(self, receive: Receive, found: _Found) -> None:
        self._receive = receive
        self._found = found

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not self._found.reached:
            self._found.body.append(message.get("body", b""))
        return message


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
    if found is not None:
        found.reach()
    try:
        async for output in outputs:
            if found is not None and output.finished and output.kv_transfer_params is not None:
                found.params = output.kv_transfer_params
            yield output
    finally:
        # A consumer that leaves early must close vLLM's generator too, which then aborts the request.
        await outputs.aclose()


async def _release(client: Any, receive: Receive, send: Send) -> None:
    """Tell the engine of a leg that will not come."""
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    data = _object(body)
    params, rank = data.get("kv_transfer_params"), data.get("data_parallel_rank")
    if not isinstance(params, dict):
        await _answer(send, {"error": "The body must be an object with kv_transfer_params, an object."}, status=400)
    elif rank is not None and not _exists(client, rank):
        ranks = f"a whole number from 0 to {_ranks(client) - 1}"
        await _answer(send, {"error": f"data_parallel_rank must be {ranks}, or absent."}, status=400)
    else:
        if rank is None and _ranks(client) > 1:
            # The rank that reads it may be another than the one that is told not to wait for it.
            params = {**params, "do_remote_prefill": False}
        await _tell(client, params, rank)
        await _answer(send, {})


async def _give_up(client: Any, scope: Scope, found: _Found) -> None:
    """Tell the engine of a leg that has ended without having reached it, where somebody waits to hear."""
    if found.reached or not found.body or scope["path"] not in _TURNS:
        return
    await asyncio.sleep(0)  # a handler that was cancelled right now may be about to tell the engine itself
    params = _object(b"".join(found.body)).get("kv_transfer_params")
    if found.reached or not isinstance(params, dict) or not _is_awaited(params):
        return
    rank = next((int(v) for k, v in scope.get("headers", ()) if k == _RANK_HEADER and v.isdigit()), None)
    try:
        await _tell(client, params, rank if _exists(client, rank) else None)
    except Exception:  # as vLLM: nothing is owed to the client, who has his answer or has left
        log.warning("The engine could not be told of a leg that will not come", exc_info=True)


async def _tell(client: Any, params: dict[str, Any], rank: int | None) -> None:
    name = f"kvflow-release-{uuid4().hex}"
    await client.notify_kv_transfer_request_rejected(name, params, data_parallel_rank=rank)


def _is_awaited(params: dict[str, Any]) -> bool:
    order = params.get(KEY)
    return has_handle(params) or (isinstance(order, dict) and bool(order.get("release") or order.get("abandon")))


def _object(body: bytes | bytearray) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _exists(client: Any, rank: object) -> bool:
    return type(rank) is int and 0 <= rank < _ranks(client)


def _ranks(client: Any) -> int:
    """How many of the engine's data-parallel ranks this API server can address; as vLLM counts them."""
    parallel = client.vllm_config.parallel_config
    return int(parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size)


def _is_event_stream(headers: Any) -> bool:
    return any(k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)


async def _answer(send: Send, body: dict[str, Any], status: int = 200) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
