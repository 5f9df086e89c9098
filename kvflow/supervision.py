"""Keeps the nodes of a graph alive: starts them, waits for them, restarts what dies, stops everything at the end."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvflow.errors import KvflowError, StartError
from kvflow.launchers.backoff import Backoff
from kvflow.nodes.base import Node
from kvflow.router.fleet import Fleet

log = logging.getLogger("kvflow")


@dataclass(frozen=True, slots=True)
class _End:
    """How a life ended. `why` has a cause where that was an error that nobody foresaw."""

    why: KvflowError
    ready_s: float | None
    """How long the node was ready before; None: it never was."""


class Supervisor:
    """Owns the processes of one run.

    A node that does not become ready in its first life is a fault of the configuration: it is stopped, and `on_failure`
    is told why, once for each such node. After that, whatever ends a life (the node dies, cannot be started, or is not
    ready after `start_timeout_s`) is logged, and the node is started again after a pause that grows while it keeps
    failing. No node waits for another.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        fleet: Fleet,
        on_failure: Callable[[KvflowError], object],
        *,
        start_timeout_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes = nodes
        self._fleet = fleet
        self._on_failure = on_failure
        self._start_timeout_s = start_timeout_s
        self._sleep = sleep
        self._clock = clock

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Nodes are begun on entry, without waiting for them, and gone on exit."""
        tasks = [asyncio.create_task(self._keep(node), name=f"lives of {node.spec.name}") for node in self._nodes]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, node: Node) -> None:
        backoff = Backoff()
        try:
            end = await self._live(node)
            if end.ready_s is None:
                raise end.why
            while True:
                pause_s = backoff.after(end.ready_s or 0.0)
                log.error(
                    "starting %s again in %.0f s: %s", node.spec.name, pause_s, end.why, exc_info=end.why.__cause__
                )
                await self._sleep(pause_s)
                end = await self._live(node)
        except Exception as e:
            self._on_failure(_explained(node, e))

    async def _live(self, node: Node) -> _End:
        """One life, from its start until nothing of it is left."""
        try:
            end = await self._until_end(node)
            self._fleet.gone(node.spec.name)
            return end
        finally:
            await _to_the_end(_stop(node))

    async def _until_end(self, node: Node) -> _End:
        ready_at: float | None = None
        try:
            await self._come_up(node)
            ready_at = self._clock()
            why = KvflowError(await node.died())
        except Exception as e:
            why = _explained(node, e)
        return _End(why, None if ready_at is None else self._clock() - ready_at)

    async def _come_up(self, node: Node) -> None:
        name = node.spec.name
        await node.start()
        died = asyncio.create_task(node.died(), name=f"death of {name}")
        ready = asyncio.create_task(self._fleet.ready(name), name=f"readiness of {name}")
        try:
            await asyncio.wait({died, ready}, timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                raise StartError(died.result())
            if not ready.done():
                why = self._fleet.why(name)
                raise StartError(
                    f"{name} was not ready after {self._start_timeout_s:g} s (cluster.start_timeout_s): it {why}"
                )
            ready.result()
        finally:
            died.cancel()
            ready.cancel()
            await asyncio.gather(died, ready, return_exceptions=True)


def _explained(node: Node, error: Exception) -> KvflowError:
    if isinstance(error, KvflowError):
        return error
    explained = StartError(f"{node.spec.name} could not be kept running: {type(error).__name__}: {error}")
    explained.__cause__ = error
    return explained


async def _stop(node: Node) -> None:
    """What one node does at its end is no reason to leave another running."""
    try:
        await node.stop()
    except Exception:
        log.exception("%s could not be stopped", node.spec.name)


async def _to_the_end(work: Coroutine[None, None, None]) -> None:
    """Also where whoever waits for it is cancelled: nobody else would know of a node that is half stopped."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    finally:
        await asyncio.wait({task})
