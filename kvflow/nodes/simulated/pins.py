"""Blocks that outlive their request, until somebody has read them or their time is up."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvflow.nodes.simulated.blocks import Block, BlockPool


@dataclass(slots=True)
class _Pin:
    blocks: list[Block]
    deadline: float
    retained: bool


class Pins:
    """Both kinds: a prefill node's lease for the decode node to come, a decode node's retained turns.

    Only retained turns count as pinned, as they do for the real connector.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pins: dict[str, _Pin] = {}
        self._retained: Counter[int] = Counter()
        """How many retained turns share each block."""

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def pinned(self) -> int:
        """Blocks of retained turns."""
        return len(self._retained)

    def cost(self, blocks: Iterable[Block]) -> int:
        """How many of the blocks are not pinned yet."""
        return sum(1 for b in blocks if b.id not in self._retained)

    def hold(self, request_id: str, blocks: list[Block], deadline: float, *, retained: bool) -> None:
        """Take over the blocks of a request that has ended."""
        self._pins[request_id] = _Pin(blocks, deadline, retained)
        if retained:
            self._retained.update(b.id for b in blocks)

    def renew(self, request_id: str) -> None:
        """Its reader has announced itself: keep it until then."""
        if request_id in self._pins:
            self._pins[request_id].deadline = math.inf

    def end(self, request_id: str) -> None:
        """Does nothing where there is nothing to end: a handle used twice, or too late."""
        pin = self._pins.pop(request_id, None)
        if pin is None:
            return
        if pin.retained:
            self._retained -= Counter(b.id for b in pin.blocks)
        self._pool.release(pin.blocks)

    def release(self, request_ids: Iterable[str]) -> bool:
        """End retained turns that nobody will read; a lease is its reader's to end. True if any was there to end."""
        known = {i for i in request_ids if i in self._pins and self._pins[i].retained}
        for request_id in known:
            self.end(request_id)
        return bool(known)

    def expire(self, now: float) -> bool:
        """End what is due. True if anything was."""
        due = [i for i, pin in self._pins.items() if pin.deadline <= now]
        for request_id in due:
            self.end(request_id)
        return bool(due)

    def clear(self) -> None:
        self.expire(math.inf)

    def next_deadline(self) -> float | None:
        return min((p.deadline for p in self._pins.values() if p.deadline < math.inf), default=None)

    def users(self) -> int:
        return sum(len(p.blocks) for p in self._pins.values())
