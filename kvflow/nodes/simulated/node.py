"""A simulated engine as a node of the graph: it serves its API on its URL, inside the event loop that starts it."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import uvicorn

from kvflow.errors import ConfigError, StartError
from kvflow.launchers.ports import refusal
from kvflow.nodes.base import NodeSpec
from kvflow.nodes.simulated.app import App
from kvflow.nodes.simulated.clock import Clock, RealClock
from kvflow.nodes.simulated.engine import Engine
from kvflow.nodes.simulated.fabric import Fabric
from kvflow.nodes.simulated.faults import Faults
from kvflow.nodes.simulated.settings import Settings


class SimulatedNode:
    """Implements `Node`. `app` and `engine` are its present life, or its last one while it is down.

    `settings` may be replaced between two lives; `faults` outlives them.
    """

    def __init__(
        self,
        spec: NodeSpec,
        settings: Settings,
        fabric: Fabric,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self.faults = Faults()
        self._spec = spec
        self._address = _address(spec)
        self._fabric = fabric
        self._clock = clock or RealClock()
        self._life: _Life | None = None
        self._why = "ended"
        self.app = self._new_app()

    @property
    def spec(self) -> NodeSpec:
        return self._spec

    @property
    def engine(self) -> Engine:
        return self.app.engine

    async def start(self) -> None:
        if self._life is not None and not self._life.over:
            raise StartError(f"{self._spec.name} is already running.")
        listener = self._bind()
        self.app = self._new_app()
        self._life = _Life(self.app, listener, self._clock, self.settings.speed.start_s)

    async def stop(self) -> None:
        life, self._life = self._life, None
        if life is not None:
            await life.end()

    async def crash(self, why: str = "was killed") -> None:
        """End as a process does that dies: connections break, the KV is gone, and `died` returns."""
        if self._life is not None:
            self._why = why
            await self._life.end()

    async def died(self) -> str:
        """Of the life that runs when this is called; a life that `stop` ended has not died."""
        life = self._life
        if life is not None:
            await life.wait()
            if self._life is life:
                return f"{self._spec.name} {self._why}."
        return await asyncio.Future()

    def _new_app(self) -> App:
        engine = Engine(
            role=self._spec.role,
            fabric=self._fabric,
            settings=self.settings,
            clock=self._clock,
            faults=self.faults,
        )
        return App(engine)

    def _bind(self) -> socket.socket:
        host, port = self._address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # With the protocol named, asyncio sends what is written at once.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            if not self.settings.speed.start_s:
                listener.listen()  # so that whoever connects after `start` waits instead of being refused
        except OSError as e:
            listener.close()
            key = f"cluster.{self._spec.role}.port"
            raise StartError(refusal(e, host, port, who=self._spec.name, key=key)) from None
        return listener


class _Life:
    """From a listening socket to the last of its connections."""

    def __init__(self, app: App, listener: socket.socket, clock: Clock, start_s: float) -> None:
        self._app = app
        self._listener = listener
        self._server = _Server(app)
        self._task = asyncio.create_task(self._run(clock, start_s))

    @property
    def over(self) -> bool:
        return self._task.done()

    async def wait(self) -> None:
        await asyncio.wait({self._task})

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._app.engine.leave()
        await self._server.kill()
        self._listener.close()

    async def _run(self, clock: Clock, start_s: float) -> None:
        await clock.sleep(start_s)
        self._app.engine.join()
        await self._server.serve(sockets=[self._listener])


class _Server(uvicorn.Server):
    """Signals belong to the process that hosts the simulation; and an engine that ends takes nobody's leave."""

    def __init__(self, app: App) -> None:
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none"))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def kill(self) -> None:
        """Break all connections and wait until every request has noticed."""
        for server in getattr(self, "servers", ()):
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)


def _address(spec: NodeSpec) -> tuple[str, int]:
    url = urlsplit(spec.url)
    if url.scheme != "http" or not url.hostname or not url.port:
        raise ConfigError(f"The URL of the simulated node {spec.name} must be http://<host>:<port>, got {spec.url!r}")
    return url.hostname, url.port
