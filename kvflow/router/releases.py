"""KV that is given back before its time, because nobody will read it, and only once nobody can be reading it."""

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from kvflow.connector.wire import KEY, RELEASE_PATH, DecodeOrder
from kvflow.router.fleet import Fleet
from kvflow.router.upstream import EngineError, Upstream
from kvflow.types import Handle, NodeState

log = logging.getLogger("kvflow.router")

DRAIN_S = 2.0
_RANK = re.compile(r"_dp(\d+)$")


class Releases:
    """Releases that go to decode engines on their own; those that have a leg to ride along with do that.

    A handle must have been taken out of the store before it comes here.
    """

    def __init__(self, fleet: Fleet, upstream: Upstream) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_doubt: defaultdict[str, list[Handle]] = defaultdict(list)
        """By epoch of the prefill engine that may be reading them."""

    def leg(self, node: str, params: Mapping[str, Any]) -> None:
        """Of a decode leg that did not begin: what the prefill node keeps for it, and what it was to release."""
        self._start(node, {"kv_transfer_params": dict(params)})

    def turn(self, node: str, name: str) -> None:
        """Nobody saw how it ended: whatever is kept of it, or would be, is not to be."""
        self._start(node, {"kv_transfer_params": {KEY: DecodeOrder(abandon=[name]).to_wire()}})

    def handles(self, handles: Iterable[Handle]) -> None:
        """Nobody reads these, nor will."""
        pins: defaultdict[tuple[str, int | None], list[str]] = defaultdict(list)
        for handle in handles:
            if self._still_there(handle):
                pins[handle.node, rank(handle)].append(handle.pin)
        for (node, where), names in pins.items():
            body: dict[str, Any] = {"kv_transfer_params": {KEY: DecodeOrder(release=names).to_wire()}}
            self._start(node, body if where is None else {**body, "data_parallel_rank": where})

    def in_doubt(self, handle: Handle, reader: NodeState) -> None:
        """A leg that was to read it broke off.

        As long as the reader lives it tells the decode engine itself when it is done; once it is gone, nobody does.
        """
        if not reader.epoch or self._fleet.state(reader.name).epoch != reader.epoch:
            self.handles([handle])
            return
        now = self._fleet.now()
        waiting = [h for h in self._in_doubt[reader.epoch] if h.deadline > now]
        self._in_doubt[reader.epoch] = [*waiting, handle]

    def epoch_ended(self, epoch: str) -> None:
        """An engine process is gone, and with it all that it was reading."""
        self.handles(self._in_doubt.pop(epoch, ()))

    async def drain(self) -> None:
        """Let what is under way come to its end, but not for long: leases and pins end by themselves."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=DRAIN_S)
            for task in late:
                task.cancel()

    def _still_there(self, handle: Handle) -> bool:
        node = self._fleet.view().node(handle.node)
        return node is not None and node.epoch == handle.epoch and bool(handle.params)

    def _start(self, node: str, body: dict[str, Any]) -> None:
        task = asyncio.create_task(self._send(node, body), name="release")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, node: str, body: dict[str, Any]) -> None:
        try:
            async with self._upstream.post(node, self._fleet.url(node) + RELEASE_PATH, body, {}):
                return
        except EngineError as e:
            log.info("some KV stays where it is until its time is up: %s", e)


def rank(handle: Handle) -> int | None:
    """The data-parallel rank that keeps a handle; None for an engine without ranks. vLLM has it in the engine's id."""
    found = _RANK.search(str(handle.params.get("remote_engine_id")))
    return int(found[1]) if found else None
