"""The yardstick for retention: hits of a cache that always knows what fits, and keeps what was used last."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.reuse.trace import TraceTurn


@dataclass(frozen=True, slots=True)
class _Kept:
    blocks: int
    deadline: float


def best_hits(turns: Sequence[TraceTurn], *, capacity: int, ttl_s: float, block_size: int) -> list[bool]:
    """For each turn of a trace in order of time, whether its conversation's last turn is still held when it comes.

    `capacity` is in blocks of `block_size` tokens: the pool times the policy's share. Nothing is held for longer than
    `ttl_s` seconds. A turn takes no time, and gives back what its conversation held before; what has been held longest
    makes room. A turn too long for all of `capacity` is not held, and drives nobody out.
    """
    held: OrderedDict[int, _Kept] = OrderedDict()
    hits = []
    for turn in turns:
        _expire(held, turn.at)
        hits.append(held.pop(turn.conversation, None) is not None)
        blocks = -(-turn.held // block_size)
        if blocks <= capacity:
            _make_room(held, capacity - blocks)
            held[turn.conversation] = _Kept(blocks, turn.at + ttl_s)
    return hits


def _expire(held: OrderedDict[int, _Kept], now: float) -> None:
    """All are kept equally long, so they end in the order in which they came."""
    while held and next(iter(held.values())).deadline <= now:
        held.popitem(last=False)


def _make_room(held: OrderedDict[int, _Kept], room: int) -> None:
    used = sum(kept.blocks for kept in held.values())
    while used > room:
        used -= held.popitem(last=False)[1].blocks
