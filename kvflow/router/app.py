"""The router as an ASGI application: routes, lifespan, and what every response has in common."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import kvflow
from kvflow.conversations import Conversations
from kvflow.errors import KvflowError, NoNodeError, RequestError
from kvflow.nodes.base import NodeSpec
from kvflow.router.admin import Admin, Control, authorise
from kvflow.router.admit import Admitted, admit
from kvflow.router.answer import Reply
from kvflow.router.bindings import Bindings
from kvflow.router.bodies import read_body
from kvflow.router.browsers import ForBrowsers
from kvflow.router.changes import Changes
from kvflow.router.dispatch import Dispatcher
from kvflow.router.endpoints import ENDPOINTS, Endpoint
from kvflow.router.explaining import Explainer
from kvflow.router.fleet import Fleet
from kvflow.router.metrics import CONTENT_TYPE, Metrics
from kvflow.router.passing import READ_BY_ANY, STORED, Passing
from kvflow.router.releases import Releases
from kvflow.router.shapes import OPENAI, headers_of, shape_at
from kvflow.router.unrouted import not_routed
from kvflow.router.upstream import EngineError, Upstream
from kvflow.tenants import Tenant, Tenants
from kvflow.tenants.gate import TOO_MANY, Gate
from kvflow.types import Handle

log = logging.getLogger("kvflow.router")

MODELS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the router needs to know besides its nodes and its tenants. Times in seconds."""

    max_body_bytes: int = 32 * 2**20
    connect_timeout_s: float = 5.0
    silence_timeout_s: float = 600.0
    probe_interval_s: float = 1.0
    max_conversations: int = 100_000
    max_conversation_bytes: int = 256 * 2**20


class Router:
    """The parts of one running router, and the ASGI application over them (`app`).

    `admin_app` is the one for the admin surface, where that is to have an address of its own.
    """

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        tenants: Tenants,
        settings: Settings | None = None,
        *,
        control: Control | None = None,
        around: Callable[["Router"], AbstractAsyncContextManager[None]] = lambda _: nullcontext(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`around` is entered when the router is ready to probe and left after its last turn."""
        self.settings = s = settings or Settings()
        self.tenants = tenants
        self.metrics = Metrics()
        self.gate = Gate(clock)
        self.upstream = Upstream(connect_timeout_s=s.connect_timeout_s, silence_timeout_s=s.silence_timeout_s)
        self.fleet = Fleet(nodes, self.upstream, self._epoch_ended, clock=clock)
        self.releases = Releases(self.fleet, self.upstream)
        self.conversations = Conversations(
            max_count=s.max_conversations,
            max_bytes=s.max_conversation_bytes,
            clock=clock,
            on_give_up=self._forgotten,
        )
        self.bindings = Bindings(s.max_conversations)
        self.dispatcher = Dispatcher(
            self.fleet, self.conversations, self.upstream, self.metrics, self.releases, self.bindings
        )
        self.passing = Passing(fleet=self.fleet, upstream=self.upstream, bindings=self.bindings)
        self._around = around
        control = control or Control.of(tenants)
        self._admin_key = control.key
        self.changes = Changes(tenants, control.catalogue, self.fleet.view, control.read)
        admin = self._admin(control)
        own = admin.routes() if admin else []
        self.admin_app = self._application(own) if control.apart else None
        self.app = self._application(
            [*self._routes(), *([] if control.apart else own)],
            middleware=[Middleware(ForBrowsers)],
            lifespan=self._lifespan,
        )

    def identify(self, request: Request) -> Tenant:
        """Raises `RequestError`, 401."""
        return self.tenants.identify(request.headers, request.client and request.client.host)

    async def serve(self, admitted: Admitted, reply: Reply) -> None:
        """One turn, when its tenant may have one more. Raises `RequestError`."""
        async with self.gate.turn(admitted.tenant):
            await self.dispatcher.serve(admitted, reply)

    @contextmanager
    def refusals(self, tenant: Tenant) -> Iterator[None]:
        """Count what is refused because the tenant has too many turns."""
        try:
            yield
        except RequestError as e:
            if e.status == TOO_MANY:
                self.metrics.turn_refused(tenant.name)
            raise

    def _admin(self, control: Control) -> Admin | None:
        if control.key is None:
            return None
        explainer = Explainer(
            fleet=self.fleet,
            conversations=self.conversations,
            bindings=self.bindings,
            planning=self.dispatcher.planning,
        )
        return Admin(control.key, self.changes, explainer, self.settings.max_body_bytes)

    @staticmethod
    def _application(routes: list[Route], **more: Any) -> Starlette:
        handlers = {HTTPException: not_routed, RequestError: _refused, Exception: _broken}
        return Starlette(routes=routes, exception_handlers=handlers, **more)

    def _epoch_ended(self, epoch: str) -> None:
        self.conversations.drop_epoch(epoch)
        self.releases.epoch_ended(epoch)

    def _forgotten(self, handle: Handle) -> None:
        self.metrics.released("forgotten", 1)
        self.releases.handles([handle])

    def _routes(self) -> list[Route]:
        passed = [*((path, "POST") for path in READ_BY_ANY), *STORED]
        return [
            *(Route(e.path, _Engines(_turn(self, e), e.path), methods=["POST"]) for e in ENDPOINTS),
            *(Route(path, _Engines(_pass(self, path), path), methods=[method]) for path, method in passed),
            Route("/v1/models", self._models),
            Route("/v1/conversations/{conversation:path}", self._close, methods=["DELETE"]),
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
                await self.releases.drain()

    async def _models(self, request: Request) -> Response:
        """The engines' own answer; both pools serve the same models."""
        self.identify(request)
        for node in (*self.fleet.view().decode, *self.fleet.view().prefill):
            if node.ready:
                with suppress(EngineError):
                    url = self.fleet.url(node.name) + "/v1/models"
                    status, body = await self.upstream.get(node.name, url, MODELS_TIMEOUT_S)
                    return Response(body, status, media_type="application/json")
        raise NoNodeError("no node is ready to say which models there are")

    async def _close(self, request: Request) -> Response:
        """Give back all that is kept of a conversation; the answer has the shape of OpenAI's own."""
        name = request.path_params["conversation"]
        if not self.dispatcher.close(self.identify(request).name, name):
            raise RequestError(f"nothing is kept of a conversation {name!r}", status=404, kind="NotFoundError")
        return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200)

    async def _ready(self, _: Request) -> Response:
        if missing := self.fleet.missing():
            raise NoNodeError("; ".join(missing))
        return JSONResponse({"status": "ready"})

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": kvflow.__version__})

    async def _metrics_page(self, request: Request) -> Response:
        """Where there are tenants, it shows all of them what each does, so none of them may see it."""
        if self.tenants.identified:
            authorise(self._admin_key, request.headers)
        return Response(
            self.metrics.render(self.fleet, self.conversations, self.gate, self.tenants.names), media_type=CONTENT_TYPE
        )


_Work = Callable[[Request, Reply], Awaitable[None]]


def _turn(router: Router, endpoint: Endpoint) -> _Work:
    async def serve(request: Request, reply: Reply) -> None:
        s = router.settings
        tenant = router.identify(request)
        with router.refusals(tenant):
            router.gate.check(tenant)
            admitted = await admit(request, endpoint, tenant, router.bindings, s.max_body_bytes)
            await _unless_gone(request.receive, router.serve(admitted, reply))

    return serve


def _pass(router: Router, path: str) -> _Work:
    async def serve(request: Request, reply: Reply) -> None:
        tenant = router.identify(request)
        data = await read_body(request, router.settings.max_body_bytes)
        await _unless_gone(request.receive, router.passing.serve(request, path, data, reply, tenant))

    return serve


@dataclass(frozen=True, slots=True)
class _Engines:
    """What engines answer.

    Plain ASGI, so that one task owns a request from its first byte to its last, and its end frees everything.
    """

    serve: _Work = field(repr=False)
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, shape_at(self.path))
        try:
            await self.serve(Request(scope, receive), reply)
        except ClientDisconnect:
            log.debug("a client left")
        except KvflowError as e:
            await reply.error(e)
        except Exception:
            log.exception("unexpected error")
            await reply.error(_fault())


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


async def _refused(_: Request, e: Exception) -> Response:
    assert isinstance(e, RequestError)
    return Response(OPENAI.body(e), e.status, dict(headers_of(e)), media_type="application/json")


async def _broken(_: Request, e: Exception) -> Response:  # noqa: ARG001 - the server logs what is raised again
    return Response(OPENAI.body(_fault()), 500, media_type="application/json")
