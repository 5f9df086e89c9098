"""`kvflow serve`: the router's server and the nodes it starts, from the first line printed to the last process gone."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from kvflow import embedded
from kvflow.config.addresses import addresses, base_url
from kvflow.errors import KvflowError, StartError
from kvflow.graph import Graph
from kvflow.launchers.local import LocalLauncher
from kvflow.nodes.base import Node
from kvflow.nodes.engine import EngineNode
from kvflow.nodes.external import ExternalNode
from kvflow.router import Router
from kvflow.supervision import Supervisor

log = logging.getLogger("kvflow")

SHUTDOWN_GRACE_S = 10
"""How long turns under way may go on after a signal."""
REMINDER_S = 15.0
"""How often it is said what is still awaited."""


def run(graph: Graph) -> None:
    """Serve until a signal comes. Raises `KvflowError` if something could not be started; nothing is left running."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with _listening(graph.router.host, graph.router.port) as listener:
        if graph.needs_embedded_model:
            with embedded.Console() as progress:
                embedded.prepare(progress)
        asyncio.run(_serve(graph, listener))


async def _serve(graph: Graph, listener: socket.socket) -> None:
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
    router = Router(graph.specs, graph.policy, graph.settings, around=around)
    server = _Server(_uvicorn_config(router))
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


def _uvicorn_config(router: Router) -> uvicorn.Config:
    return uvicorn.Config(
        router.app,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )


class _Server(uvicorn.Server):
    """Ends with the exit code of a program that did what it was asked; uvicorn would raise the signal once more."""

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
        """The first signal waits for the turns under way, the second ends them as if their clients had left."""
        log.info("%s: stopping%s", number.name, " at once" if self.should_exit else "")
        if self.should_exit:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        self.should_exit = True


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Bind before anything is started, so that a taken port costs nothing."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(2048)
        except OSError as e:
            raise StartError(
                f"cannot listen on {host}:{port}: {(e.strerror or str(e)).lower()}; "
                "choose another address with router.host and router.port."
            ) from None
        yield listener


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
