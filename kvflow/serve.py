"""`kvflow serve`: the router's server and the nodes it starts, from the first line printed to the last process gone."""

import asyncio
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvflow import embedded
from kvflow.config.addresses import addresses, base_url
from kvflow.errors import KvflowError, RequestError, StartError
from kvflow.graph import Graph
from kvflow.launchers.local import LocalLauncher
from kvflow.nodes.base import Node
from kvflow.nodes.engine import EngineNode
from kvflow.nodes.external import ExternalNode
from kvflow.router import Router
from kvflow.router.admin import Control
from kvflow.router.answer import Reply
from kvflow.router.shapes import Shape, shape_at
from kvflow.supervision import Supervisor
from kvflow.tenants import Tenants

log = logging.getLogger("kvflow")

SHUTDOWN_GRACE_S = 10.0
"""How long turns under way may go on after a signal."""
CLOSING_S = 1.0
"""How long clients have to read the end of an answer that is broken off."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""
REMINDER_S = 15.0
"""How often it is said what is still awaited."""


def run(graph: Graph, *, grace_s: float = SHUTDOWN_GRACE_S) -> None:
    """Serve until a signal comes, and then for at most `grace_s` seconds while turns are under way.

    Raises `KvflowError` if something could not be started. Nothing is left running.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    tenants, control = graph.open()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, until the server has a handler of its own
    with bound(_router_place(graph)) as listener, _admin_listener(graph, control) as admin:
        if graph.needs_embedded_model:
            with embedded.Console() as progress:
                embedded.prepare(progress)
        _listen(listener, _router_place(graph))
        if admin is not None:
            _listen(admin, _admin_place(*admin.getsockname()[:2]))
        asyncio.run(_serve(graph, tenants, control, _Listeners(router=listener, admin=admin), grace_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listeners:
    router: socket.socket
    admin: socket.socket | None
    """Where the admin surface has an address of its own."""


async def _serve(graph: Graph, tenants: Tenants, control: Control, listeners: _Listeners, grace_s: float) -> None:
    failures: list[KvflowError] = []

    def fail(error: KvflowError) -> None:
        failures.append(error)
        server.should_exit = True

    @asynccontextmanager
    async def around(router: Router) -> AsyncIterator[None]:
        supervisor = Supervisor(nodes, router.fleet, fail, start_timeout_s=graph.start_timeout_s)
        announcing = asyncio.create_task(_announce(graph, router, _address(listeners.router)), name="announcement")
        try:
            aside = _administered(router, control, listeners.admin)
            async with aside, _reloading(router, server), supervisor.running():
                yield
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)

    nodes = _nodes(graph)
    router = Router(graph.specs, tenants, graph.settings, control=control, around=around)
    server = _Server(router.app, grace_s)
    await server.serve([listeners.router])
    if failures:
        raise failures[0]
    log.info("stopped")


@asynccontextmanager
async def _administered(router: Router, control: Control, listener: socket.socket | None) -> AsyncIterator[None]:
    """Serve the admin surface at an address of its own, if it has one."""
    if control.key is not None:
        where = "the router's own address" if listener is None else _address(listener)
        log.info("tenants can be changed with admin key %s at %s", control.key.name, where)
    if listener is None or router.admin_app is None:
        yield
        return
    server = _Aside(router.admin_app)
    serving = asyncio.create_task(server.serve([listener]), name="admin")
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)


@asynccontextmanager
async def _reloading(router: Router, server: "_Server") -> AsyncIterator[None]:
    """SIGHUP reads keys and policies anew; where it says that kvflow's terminal is gone, it ends kvflow."""
    loop, under_way = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    began_in_terminal = _has_terminal()

    async def reload() -> None:
        with suppress(RequestError):  # which has been logged
            await router.changes.reload("SIGHUP")

    def hung_up() -> None:
        if began_in_terminal and not _has_terminal():
            server.stop(signal.SIGHUP)
            return
        task = asyncio.create_task(reload(), name="reload")
        under_way.add(task)
        task.add_done_callback(under_way.discard)

    loop.add_signal_handler(signal.SIGHUP, hung_up)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        await asyncio.gather(*under_way, return_exceptions=True)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        return False
    return True


def _nodes(graph: Graph) -> list[Node]:
    if not graph.starts_nodes:
        return [ExternalNode(spec) for spec in graph.specs]
    if graph.simulates_nodes:
        from kvflow.nodes.simulated import Fabric, SimulatedNode

        fabric = Fabric()
        return [SimulatedNode(spec, graph.simulated(spec.role), fabric) for spec in graph.specs]
    launcher = LocalLauncher(log_dir=graph.log_dir)
    ports = {
        a.name: {f"cluster.{a.role}.port": a.port, f"cluster.{a.role}.side_channel_port": a.side_channel_port}
        for a in addresses(graph.config.cluster)
    }
    return [EngineNode(spec, launcher, ports[spec.name]) for spec in graph.specs]


def _uvicorn(app: ASGIApp, **more: Any) -> uvicorn.Config:
    # Whose address a proxy names in a header of its own is for nobody to believe: addresses decide who is trusted.
    return uvicorn.Config(app, proxy_headers=False, log_config=None, access_log=False, server_header=False, **more)


class _Aside(uvicorn.Server):
    """A second server in the same loop, which leaves signals to the first."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(_uvicorn(app, lifespan="off", timeout_graceful_shutdown=math.ceil(CLOSING_S)))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server(uvicorn.Server):
    """Ends by itself when a signal comes, with the exit code of a program that did what it was asked.

    uvicorn would raise the signal once more, and cancel what takes longer than `grace_s` seconds with a traceback each.
    """

    def __init__(self, app: ASGIApp, grace_s: float) -> None:
        self._open = _OpenRequests(app)
        self._grace_s = grace_s
        too_long = math.ceil(grace_s + CLOSING_S) + 5  # only what ignores that it is broken off lasts so long
        super().__init__(_uvicorn(self._open, lifespan="on", timeout_graceful_shutdown=too_long))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def stop(self, number: signal.Signals) -> None:
        """The first signal waits for the requests under way, the second breaks them off."""
        log.info("%s: stopping%s", number.name, " at once" if self.should_exit else "")
        if self.should_exit:
            self._break_off()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._grace_s, self._break_off)
        await super().shutdown(sockets)

    def _break_off(self) -> None:
        self._open.break_off()
        asyncio.get_running_loop().call_later(CLOSING_S, self._hang_up)

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _Answer:
    """What has been sent of one answer."""

    def __init__(self, send: Send, shape: Shape) -> None:
        self._send = send
        self._shape = shape
        self._begun = self._streamed = self._ended = False

    @property
    def breakable(self) -> bool:
        """One that comes as a whole and has begun is there; only its client is slow to take it."""
        return self._streamed or not self._begun

    async def send(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self._begun = True
            self._streamed = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
        else:
            self._ended = not message.get("more_body", False)

    async def break_off(self) -> None:
        reply = Reply(self._send, self._shape)
        error = RequestError("kvflow is stopping", status=503, kind="ServiceUnavailableError", retry_after=1)
        if not self._begun:
            await reply.error(error)
        elif self._streamed and not self._ended:
            await reply.send(self._shape.event(error))
            await reply.end()


class _OpenRequests:
    """ASGI middleware that knows what is under way, and can break it off so that clients are told and nodes let go."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._broken_off = False
        self._open: dict[_Answer, asyncio.Timeout] = {}

    def break_off(self) -> None:
        """Whatever is under way, and whatever still comes."""
        self._broken_off = True
        for answer, limit in self._open.items():
            if answer.breakable:
                limit.reschedule(0)
        self._open.clear()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, shape_at(scope["path"]))
        if self._broken_off:
            await answer.break_off()
            return
        try:
            async with asyncio.timeout(None) as limit:
                self._open[answer] = limit
                await self._app(scope, receive, answer.send)
        except TimeoutError:
            if not limit.expired():
                raise
            await answer.break_off()
        finally:
            self._open.pop(answer, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where to listen, and the keys that say so."""

    host: str
    port: int
    keys: str


def _router_place(graph: Graph) -> Place:
    return Place(host=graph.router.host, port=graph.router.port, keys="router.host and router.port")


@contextmanager
def _admin_listener(graph: Graph, control: Control) -> Iterator[socket.socket | None]:
    admin = graph.config.admin
    if control.key is None or admin.port is None:
        yield None
        return
    with bound(_admin_place(admin.host, admin.port)) as listener:
        yield listener


def _admin_place(host: str, port: int) -> Place:
    return Place(host=host, port=port, keys="admin.host and admin.port")


@contextmanager
def bound(place: Place) -> Iterator[socket.socket]:
    """Take the port before anything is done that would be in vain without it. Clients are refused until `_listen`."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    # Only where the protocol is named does asyncio send what is written at once; else a second write, such as the body
    # after the headers or the next event of a stream, waits until the client has acknowledged the first: up to 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        with _explained(place):
            # Connections of an earlier run that linger in the kernel are no reason to refuse.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((place.host, place.port))
        # Else whoever sets it too could bind as well, for as long as nobody listens.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        yield listener


def _listen(listener: socket.socket, place: Place) -> None:
    # Connections inherit it, and the next run can bind beside lingering ones only if they have it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with _explained(place):
        listener.listen(BACKLOG)


@contextmanager
def _explained(place: Place) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise StartError(
            f"cannot listen on {place.host}:{place.port}: {(e.strerror or str(e)).lower()}; "
            f"choose another address with {place.keys}."
        ) from None


def _address(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return base_url(host, port)


async def _announce(graph: Graph, router: Router, address: str) -> None:
    """Say what is going on until both pools can serve."""
    clock = asyncio.get_running_loop().time
    began = reminded = clock()
    names = ", ".join(spec.name for spec in graph.specs)
    if graph.simulates_nodes:
        log.info("simulating %s: what they answer comes from no model", names)
    elif graph.starts_nodes:
        log.info("starting %s; their logs are in %s", names, graph.log_dir)
    else:
        log.info("waiting for %s", names)
    while missing := router.fleet.missing():
        await asyncio.sleep(0.2)
        if clock() - reminded >= REMINDER_S:
            reminded = clock()
            log.info("not ready after %.0f s: %s", clock() - began, "; ".join(missing))
    log.info("ready after %.0f s: %s at %s/v1", clock() - began, graph.model, address)
