"""The router as an ASGI application: routes, lifespan, and what every response has in common."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import kvflow
from kvflow.conversations import Conversations
from kvflow.errors import KvflowError, NoNodeError, RequestError
from kvflow.nodes.base import NodeSpec
from kvflow.policies.policy import Policy
from kvflow.router.admit import admit
from kvflow.router.answer import Reply, error_body, error_event
from kvflow.router.dispatch import Dispatcher
from kvflow.router.fleet import Fleet
from kvflow.router.metrics import CONTENT_TYPE, Metrics
from kvflow.router.upstream import EngineError, Upstream

log = logging.getLogger("kvflow.router")

TURN_ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MODELS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the router needs to know besides its nodes and its policy. Times in seconds."""

    max_body_bytes: int = 32 * 2**20
    connect_timeout_s: float = 5.0
    silence_timeout_s: float = 600.0
    probe_interval_s: float = 1.0
    max_conversations: int = 100_000
    max_conversation_bytes: int = 256 * 2**20


class Router:
    """The parts of one running router, and the ASGI application over them (`app`)."""

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        policy: Policy,
        settings: Settings | None = None,
        *,
        around: Callable[["Router"], AbstractAsyncContextManager[None]] = lambda _: nullcontext(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`around` is entered when the router is ready to probe and left after its last turn."""
        self.settings = s = settings or Settings()
        self.policy = policy
        self.conversations = Conversations(
            max_count=s.max_conversations, max_bytes=s.max_conversation_bytes, clock=clock
        )
        self.upstream = Upstream(connect_timeout_s=s.connect_timeout_s, silence_timeout_s=s.silence_timeout_s)
        self.fleet = Fleet(nodes, self.upstream, self.conversations.drop_epoch, clock=clock)
        self.metrics = Metrics()
        self.dispatcher = Dispatcher(self.fleet, self.conversations, self.upstream, self.metrics)
        self._around = around
        self.app = Starlette(
            routes=self._routes(),
            exception_handlers={HTTPException: _not_routed, RequestError: _refused, Exception: _broken},
            lifespan=self._lifespan,
        )

    def _routes(self) -> list[Route]:
        turns = [Route(path, _TurnEndpoint(self, path), methods=["POST"]) for path in TURN_ENDPOINTS]
        return [
            *turns,
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/version", self._version),
            Route("/metrics", self._metrics_page),
        ]

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self.upstream, self._around(self):
            watching = asyncio.create_task(self.fleet.watch(self.settings.probe_interval_s), name="probes")
            try:
                yield
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching
                await self.dispatcher.drain()

    async def _models(self, _: Request) -> Response:
        """The engines' own answer; both pools serve the same models."""
        for node in (*self.fleet.view().decode, *self.fleet.view().prefill):
            if node.ready:
                with suppress(EngineError):
                    url = self.fleet.url(node.name) + "/v1/models"
                    status, body = await self.upstream.get(node.name, url, MODELS_TIMEOUT_S)
                    return Response(body, status, media_type="application/json")
        raise NoNodeError("no node is ready to say which models there are")

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200)

    async def _ready(self, _: Request) -> Response:
        if missing := self.fleet.missing():
            raise NoNodeError("; ".join(missing))
        return JSONResponse({"status": "ready"})

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": kvflow.__version__})

    async def _metrics_page(self, _: Request) -> Response:
        return Response(self.metrics.render(self.fleet, self.conversations), media_type=CONTENT_TYPE)


@dataclass(frozen=True, slots=True)
class _TurnEndpoint:
    """Plain ASGI, so that one task owns a turn from its first byte to its last, and its end frees everything."""

    router: Router = field(repr=False)
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send)
        try:
            request = Request(scope, receive)
            admitted = await admit(request, self.path, self.router.policy, self.router.settings.max_body_bytes)
            await _unless_gone(receive, self.router.dispatcher.serve(admitted, reply))
        except ClientDisconnect:
            log.debug("a client left")
        except KvflowError as e:
            await _end(reply, e)
        except Exception:
            log.exception("unexpected error")
            await _end(reply, _fault())


async def _end(reply: Reply, error: KvflowError) -> None:
    if not reply.started:
        await reply.error(error)
        return
    await reply.send(error_event(error))
    await reply.end()


def _fault() -> KvflowError:
    """A fault of ours. The log has the traceback; the client gets one sentence."""
    return KvflowError("kvflow failed to serve this request")


async def _unless_gone(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Do the work; when the client leaves first, cancel it, which closes its connections to engines."""
    working = asyncio.create_task(work, name="turn")
    leaving = asyncio.create_task(_client_leaves(receive), name="client")
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _not_routed(request: Request, e: Exception) -> Response:
    """404 and 405 in the shape that clients of the OpenAI API expect."""
    assert isinstance(e, HTTPException)
    what = {
        404: f"kvflow does not serve {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
    }.get(e.status_code, str(e.detail))
    kind = {404: "NotFoundError", 405: "MethodNotAllowedError"}.get(e.status_code, "BadRequestError")
    error = RequestError(what, status=e.status_code, kind=kind)
    return Response(error_body(error), e.status_code, e.headers, media_type="application/json")


async def _refused(_: Request, e: Exception) -> Response:
    assert isinstance(e, RequestError)
    headers = {"retry-after": str(e.retry_after)} if e.retry_after is not None else None
    return Response(error_body(e), e.status, headers, media_type="application/json")


async def _broken(_: Request, e: Exception) -> Response:  # noqa: ARG001 - the server logs what is raised again
    return Response(error_body(_fault()), 500, media_type="application/json")
