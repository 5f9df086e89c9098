"""Whether the decode node keeps the KV of a turn that has ended, and what it keeps already."""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvflow.connector.wire import DecodeOrder

MAX_RETAIN_S = 86_400.0
"""A day: whatever is ordered, nothing stays pinned for good."""


class Refusal(StrEnum):
    """Words of `DecodeReport.refused`."""

    POLICY = "policy"
    SHARE = "share"
    UNHASHABLE = "unhashable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The engine's KV block pool, in blocks."""

    total: int
    reserve: int
    """What one request of the full context length needs."""

    def cap(self, share: float) -> int:
        """Most that may be pinned: never so much that a request of the full length could not run."""
        return min(int(min(max(share, 0.0), 1.0) * self.total), self.total - self.reserve)


def decide(order: DecodeOrder, *, cost: int, pinned: int, pool: Pool) -> float | Refusal:
    """Seconds to keep a turn whose pin would take `cost` more blocks from the pool, or why it is not kept."""
    # Not "retain_s <= 0": NaN is no order to keep anything either.
    if not order.retain_s > 0 or not order.max_pinned_share > 0:
        return Refusal.POLICY
    if pinned + cost > pool.cap(order.max_pinned_share):
        return Refusal.SHARE
    return min(order.retain_s, MAX_RETAIN_S)


@dataclass(frozen=True, slots=True)
class Pin:
    blocks: tuple[int, ...]
    deadline: float


class Turns:
    """What became of the turns that the router names: kept, or abandoned before their end. The last `limit` of each.

    A router whose client leaves does not know whether the turn has ended meanwhile and its handle was lost on the way.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, str] = OrderedDict()
        self._abandoned: OrderedDict[str, None] = OrderedDict()

    def keep(self, turn: str | None, request_id: str) -> None:
        if turn is not None:
            self._kept[turn] = request_id
            if len(self._kept) > self._limit:
                self._kept.popitem(last=False)

    def abandon(self, turn: str) -> str | None:
        """The request that was kept for the turn, to be released; None for a turn that is not to be kept."""
        if turn in self._kept:
            return self._kept.pop(turn)
        self._abandoned[turn] = None
        if len(self._abandoned) > self._limit:
            self._abandoned.popitem(last=False)
        return None

    def is_abandoned(self, turn: str | None) -> bool:
        return turn in self._abandoned


class Ledger:
    """Blocks pinned for turns that have ended. A block that several turns share counts once, as it does in the pool."""

    def __init__(self) -> None:
        self._pins: dict[str, Pin] = {}
        self._holders: Counter[int] = Counter()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pins

    @property
    def pinned(self) -> int:
        return len(self._holders)

    def cost(self, blocks: Iterable[int]) -> int:
        """How many of the blocks are not pinned yet."""
        return sum(1 for b in frozenset(blocks) if b not in self._holders)

    def pin(self, request_id: str, blocks: Iterable[int], deadline: float) -> None:
        """Once for each request. No block may be given twice."""
        self._pins[request_id] = pin = Pin(tuple(blocks), deadline)
        self._holders.update(pin.blocks)

    def release(self, request_id: str) -> tuple[int, ...]:
        """The blocks to give back to the pool, as they were given; none for a request that is not pinned."""
        pin = self._pins.pop(request_id, None)
        if pin is None:
            return ()
        self._holders.subtract(pin.blocks)
        for block in pin.blocks:
            if not self._holders[block]:
                del self._holders[block]
        return pin.blocks

    def expired(self, now: float) -> list[str]:
        return [request_id for request_id, pin in self._pins.items() if pin.deadline <= now]
