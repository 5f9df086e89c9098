"""Whether the decode node keeps the KV of a turn that has ended, and what it keeps already."""

from collections import Counter
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


class Ledger:
    """Blocks pinned for turns that have ended. A block that several turns share counts once, as it does in the pool."""

    def __init__(self) -> None:
        self._turns: dict[str, frozenset[int]] = {}
        self._holders: Counter[int] = Counter()

    @property
    def pinned(self) -> int:
        return len(self._holders)

    def cost(self, blocks: Iterable[int]) -> int:
        """How many of the blocks are not pinned yet."""
        return sum(1 for b in frozenset(blocks) if b not in self._holders)

    def pin(self, request_id: str, blocks: Iterable[int]) -> None:
        self.release(request_id)
        self._turns[request_id] = frozenset(blocks)
        self._holders.update(self._turns[request_id])

    def release(self, request_id: str) -> None:
        """Does nothing for a request that is not pinned."""
        for block in self._turns.pop(request_id, frozenset()):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
