"""Handles by conversation, in memory: filed under several keys, taken once, bounded, expiring.

One event loop owns an instance; no method awaits, so each is atomic to the router's tasks.
"""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvflow.types import Handle

LINGER_S = 60.0
"""A handle is remembered this long after its deadline, so that the next turn is told `expired`, not `no-handle`."""

_ENTRY_BYTES = 400
_KEY_BYTES = 200


@dataclass(frozen=True, slots=True)
class Taken:
    """A handle that has left the store, and the conversation that it belonged to."""

    conversation: str
    handle: Handle
    keys: tuple[bytes, ...]
    """Where it was filed, the key of the whole conversation first."""
    complete: bool
    """It was found under that first key: the request goes on where the conversation stood."""


@dataclass(slots=True)
class _Entry:
    conversation: str
    handle: Handle
    keys: tuple[bytes, ...]
    cost: int


class Conversations:
    """The store. `max_count` handles and about `max_bytes` bytes at most; beyond either the oldest are forgotten."""

    def __init__(self, *, max_count: int, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._by_key: dict[bytes, dict[int, None]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._next = 0
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes, about."""
        return self._bytes

    def take(self, keys: Iterable[bytes]) -> Taken | None:
        """Remove and return the newest handle filed under the first of `keys` that has one.

        One that has expired or lost its engine is returned only where there is none that could still be used.
        """
        found = [(key, next(reversed(under))) for key in keys if (under := self._by_key.get(key))]
        if not found:
            return None
        key, number = next((f for f in found if self._usable(f[1])), found[0])
        entry = self._remove(number)
        return Taken(entry.conversation, entry.handle, entry.keys, key == entry.keys[0])

    def put_back(self, taken: Taken) -> None:
        """Undo `take` where the handle has not been used."""
        self.put(taken.conversation, taken.keys, taken.handle)

    def put(self, conversation: str, keys: Sequence[bytes], handle: Handle) -> None:
        """File `handle` under all of `keys`. Nothing is kept if there are none."""
        if not keys:
            return
        self._sweep()
        number, self._next = self._next, self._next + 1
        unique = tuple(dict.fromkeys(keys))
        entry = _Entry(conversation, handle, unique, handle.size + _ENTRY_BYTES + _KEY_BYTES * len(unique))
        self._entries[number] = entry
        self._bytes += entry.cost
        for key in unique:
            self._by_key.setdefault(key, {})[number] = None
        heapq.heappush(self._deadlines, (handle.deadline, number))
        while self._entries and (len(self._entries) > self._max_count or self._bytes > self._max_bytes):
            self._remove(next(iter(self._entries)))

    def drop_epoch(self, epoch: str) -> int:
        """Give up every handle of an engine process that is gone; return how many.

        What is left of each is enough to tell its conversation's next turn `node-gone`, until it expires.
        """
        dropped = 0
        for entry in self._entries.values():
            if entry.handle.epoch == epoch and entry.handle.params:
                entry.handle = replace(entry.handle, params={}, size=0)
                cost = _ENTRY_BYTES + _KEY_BYTES * len(entry.keys)
                self._bytes += cost - entry.cost
                entry.cost = cost
                dropped += 1
        return dropped

    def _usable(self, number: int) -> bool:
        handle = self._entries[number].handle
        return bool(handle.params) and handle.deadline > self._clock()

    def _remove(self, number: int) -> _Entry:
        entry = self._entries.pop(number)
        self._bytes -= entry.cost
        for key in entry.keys:
            under = self._by_key[key]
            del under[number]
            if not under:
                del self._by_key[key]
        return entry

    def _sweep(self) -> None:
        """Forget what expired a while ago. The heap may name entries that were taken; those are skipped."""
        horizon = self._clock() - LINGER_S
        while self._deadlines and self._deadlines[0][0] < horizon:
            _, number = heapq.heappop(self._deadlines)
            if number in self._entries:
                self._remove(number)
        if len(self._deadlines) > 2 * len(self._entries) + 64:
            self._deadlines = [(e.handle.deadline, n) for n, e in self._entries.items()]
            heapq.heapify(self._deadlines)
