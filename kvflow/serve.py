"""`kvflow serve`: the router's server and the nodes it starts, from the first line printed to the last process gone."""

import asyncio
import logging
import math
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

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
from kvflow.router.answer import Reply
from kvflow.router.shapes import Shape, shape_at
from kvflow.supervision import Supervisor

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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, until the server has a handler of its own
    with _bound(graph.router.host, graph.router.port) as listener:
        if graph.needs_embedded_model:
            with embedded.Console() as progress:
                embedded.prepare(progress)
        _listen(listener, graph.router.host, graph.router.port)
        asyncio.run(_serve(graph, listener, grace_s))


async def _serve(graph: Graph, listener: socket.socket, grace_s: float) -> None:
    failures: list[KvflowError] = []

    def fail(error: KvflowError) -> None:
        failures.append(error)
        server.should_exit = True

    @asynccontextmanager
    async def around(router: Router) -> AsyncIterator[None]:
        supervisor = Supervisor(nodes, router.fleet, fail, start_timeout_s=graph.start_timeout_s)
        announcing = asyncio.create_task(_announce(graph, router, _address(listener)), name="announcement")
        try:
            async with supervisor.running():
                yield
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)

    nodes = _nodes(graph)
    router = Router(graph.specs, graph.tenants, graph.settings, around=around)
    server = _Server(router.app, grace_s)
    await server.serve([listener])
    if failures:
        raise failures[0]
    log.info("stopped")


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


class _Server(uvicorn.Server):
    """Ends by itself when a signal comes, with the exit code of a program that did what it was asked.

    uvicorn would raise the signal once more, and cancel what takes longer than `grace_s` seconds with a traceback each.
    """

    def __init__(self, app: ASGIApp, grace_s: float) -> None:
        self._open = _OpenRequests(app)
        self._grace_s = grace_s
        too_long = math.ceil(grace_s + CLOSING_S) + 5  # only what ignores that it is broken off lasts so long
        super().__init__(
            uvicorn.Config(
                self._open,
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=too_long,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
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


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """Take the port before anything is done that would be in vain without it. Clients are refused until `_listen`."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        with _explained(host, port):
            # Connections of an earlier run that linger in the kernel are no reason to refuse.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        # Else whoever sets it too could bind as well, for as long as nobody listens.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        yield listener


def _listen(listener: socket.socket, host: str, port: int) -> None:
    # Connections inherit it, and the next run can bind beside lingering ones only if they have it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with _explained(host, port):
        listener.listen(BACKLOG)


@contextmanager
def _explained(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise StartError(
            f"cannot listen on {host}:{port}: {(e.strerror or str(e)).lower()}; "
            "choose another address with router.host and router.port."
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
