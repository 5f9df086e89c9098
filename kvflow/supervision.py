"""Keeps the nodes of a graph alive: starts them, waits for them, restarts what dies, stops everything at the end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from kvflow.errors import KvflowError, StartError
from kvflow.launchers.backoff import Backoff
from kvflow.nodes.base import Node
from kvflow.router.fleet import Fleet

log = logging.getLogger("kvflow")


class Supervisor:
    """Owns the processes of one run. `on_failure` is told, once, why a node did not come up in the first place.

    A node that dies before it was ever ready is a fault of the configuration and ends the run; one that dies later is
    started again, after a pause that grows while it keeps dying.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        fleet: Fleet,
        on_failure: Callable[[KvflowError], object],
        *,
        start_timeout_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._nodes = nodes
        self._fleet = fleet
        self._on_failure = on_failure
        self._start_timeout_s = start_timeout_s
        self._sleep = sleep

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Nodes are begun on entry, without waiting for them, and gone on exit."""
        tasks = [asyncio.create_task(self._live(node), name=f"life of {node.spec.name}") for node in self._nodes]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(node.stop() for node in self._nodes))

    async def _live(self, node: Node) -> None:
        try:
            await self._first_life(node)
            await self._later_lives(node)
        except KvflowError as e:
            self._on_failure(e)

    async def _first_life(self, node: Node) -> None:
        name = node.spec.name
        await node.start()
        died = asyncio.create_task(node.died(), name=f"death of {name}")
        ready = asyncio.create_task(self._fleet.ready(name), name=f"readiness of {name}")
        try:
            await asyncio.wait({died, ready}, timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                raise StartError(died.result())
            if not ready.done():
                raise StartError(f"{name} was not ready after {self._start_timeout_s:g} s (cluster.start_timeout_s)")
        finally:
            died.cancel()
            ready.cancel()
            await asyncio.gather(died, ready, return_exceptions=True)

    async def _later_lives(self, node: Node) -> None:
        backoff, clock = Backoff(), asyncio.get_running_loop().time
        while True:
            born = clock()
            why = await node.died()
            self._fleet.gone(node.spec.name)
            pause = backoff.after(clock() - born)
            log.error("%s; it is started again in %.0f s", why, pause)
            await self._sleep(pause)
            await node.stop()
            await node.start()
