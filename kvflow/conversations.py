"""Handles by conversation, in memory: filed under several keys, taken once, bounded, expiring, given up by value.

One event loop owns an instance; no method awaits, so each is atomic to the router's tasks.
"""

import heapq
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kvflow.types import Handle

EXPIRY_MARGIN_S = 6.0
"""Handles are given up this long before the engine frees the blocks: engines decline a pull in the last 5 seconds."""
LINGER_S = 60.0
"""A handle is remembered this long after its deadline, so that the next turn is told `expired`, not `no-handle`."""

LOOK_AT = 64
"""So many of a node's oldest handles are compared when one must be given up, which bounds the cost of the choice."""
COSTLY_TOKENS = 32_768
"""Where computing a prompt's attention costs about as much as all the rest of it; beyond, length costs twice."""

_ENTRY_BYTES = 400
_KEY_BYTES = 200


@dataclass(frozen=True, slots=True)
class Taken:
    """A handle that has left the store, and the conversation that it belonged to."""

    conversation: str
    tenant: str
    handle: Handle
    keys: tuple[bytes, ...]
    """Where it was filed, that of the whole conversation first."""
    key: bytes
    """Where it was found."""
    whole: int = 1
    """How many of `keys` stand for the whole conversation."""

    @property
    def complete(self) -> bool:
        """The request goes on where the conversation stood, or repeats its last one."""
        return self.key in self.keys[: self.whole]


@dataclass(slots=True)
class _Entry:
    conversation: str
    tenant: str
    handle: Handle
    keys: tuple[bytes, ...]
    whole: int
    cost: int


class Conversations:
    """The store. `max_count` handles and about `max_bytes` bytes at most; beyond either the oldest are given up.

    `on_give_up` is called with each handle that is forgotten for want of room here.
    """

    def __init__(
        self,
        *,
        max_count: int,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        on_give_up: Callable[[Handle], object] = lambda _: None,
    ) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._clock = clock
        self._on_give_up = on_give_up
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._by_key: dict[bytes, dict[int, None]] = {}
        self._by_node: dict[str, OrderedDict[int, None]] = {}
        """The oldest first."""
        self._by_tenant: dict[tuple[str, str], OrderedDict[int, None]] = {}
        """The same, by node and tenant."""
        self._shares: dict[str, Counter[str]] = {}
        """Blocks of each node's handles, by tenant."""
        self._deadlines: list[tuple[float, int]] = []
        self._lingering: list[tuple[float, int]] = []
        """Those of which the engine has nothing any more. Both heaps may name entries that were taken."""
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
        found = self._find(keys)
        if found is None:
            return None
        key, number = found
        return self._taken(key, self._remove(number))

    def peek(self, keys: Iterable[bytes]) -> Taken | None:
        """What `take` would return, which stays where it is."""
        found = self._find(keys)
        return self._taken(found[0], self._entries[found[1]]) if found else None

    def _find(self, keys: Iterable[bytes]) -> tuple[bytes, int] | None:
        found = [(key, next(reversed(under))) for key in keys if (under := self._by_key.get(key))]
        return next((f for f in found if self._usable(f[1])), found[0]) if found else None

    def _taken(self, key: bytes, entry: _Entry) -> Taken:
        return Taken(entry.conversation, entry.tenant, entry.handle, entry.keys, key, entry.whole)

    def put_back(self, taken: Taken) -> None:
        """Undo `take` where the handle has not been used."""
        number = self._put(taken.conversation, taken.tenant, taken.keys, taken.handle, taken.whole)
        self._by_node[taken.handle.node].move_to_end(number, last=False)
        self._by_tenant[taken.handle.node, taken.tenant].move_to_end(number, last=False)
        self._keep_bounds()

    def put(
        self, conversation: str, keys: Sequence[bytes], handle: Handle, *, tenant: str = "", whole: int = 1
    ) -> None:
        """File `handle` under all of `keys`, of which there must be one; the first `whole` stand for all of it."""
        self._put(conversation, tenant, tuple(dict.fromkeys(keys)), handle, whole)
        self._keep_bounds()

    def blocks_of(self, tenant: str, node: str) -> int:
        """Blocks that are kept for a tenant on a decode node."""
        return self._shares.get(node, Counter[str]())[tenant]

    def give_up(self, node: str, blocks: int, *, tenant: str | None = None) -> list[Handle]:
        """Remove the least valuable handles of a decode node until they make up `blocks`, and return them.

        With `tenant` only that one's. Else those of tenants with more than an equal share of the node's blocks go
        first. Among one tenant's, the value of a block is what is left of its time, more where the conversation is
        long, because a long one costs more a token to compute again.
        """
        self._sweep()
        given_up: list[Handle] = []
        while blocks > 0 and (number := self._least_valuable(node, tenant)) is not None:
            handle = self._remove(number).handle
            given_up.append(handle)
            blocks -= handle.blocks
        return given_up

    def remove(self, key: bytes) -> list[Handle]:
        """Remove all that is filed under `key`, and return what engines may still keep of it."""
        handles = [self._remove(number).handle for number in list(self._by_key.get(key, ()))]
        return [h for h in handles if h.params]

    def _put(self, conversation: str, tenant: str, keys: tuple[bytes, ...], handle: Handle, whole: int) -> int:
        self._sweep()
        number, self._next = self._next, self._next + 1
        entry = _Entry(conversation, tenant, handle, keys, whole, handle.size + _ENTRY_BYTES + _KEY_BYTES * len(keys))
        self._entries[number] = entry
        self._bytes += entry.cost
        for key in keys:
            self._by_key.setdefault(key, {})[number] = None
        self._by_node.setdefault(handle.node, OrderedDict())[number] = None
        self._by_tenant.setdefault((handle.node, tenant), OrderedDict())[number] = None
        self._shares.setdefault(handle.node, Counter())[tenant] += handle.blocks
        heapq.heappush(self._deadlines, (handle.deadline, number))
        return number

    def _keep_bounds(self) -> None:
        while self._entries and (len(self._entries) > self._max_count or self._bytes > self._max_bytes):
            handle = self._remove(next(iter(self._entries))).handle
            if handle.params:
                self._on_give_up(handle)

    def drop_epoch(self, epoch: str) -> int:
        """Give up every handle of an engine process that is gone; return how many.

        What is left of each is enough to tell its conversation's next turn `node-gone`, until it expires.
        """
        dropped = 0
        for number, entry in self._entries.items():
            if entry.handle.epoch == epoch and entry.handle.params:
                self._remove_from_node(number, entry)
                entry.handle = replace(entry.handle, params={}, size=0)
                cost = _ENTRY_BYTES + _KEY_BYTES * len(entry.keys)
                self._bytes += cost - entry.cost
                entry.cost = cost
                dropped += 1
        return dropped

    def _least_valuable(self, node: str, tenant: str | None) -> int | None:
        shares = self._shares.get(node, Counter[str]())
        equal = sum(shares.values()) / max(1, len(shares))
        held = self._by_node.get(node, ()) if tenant is None else self._by_tenant.get((node, tenant), ())
        oldest = islice(held, LOOK_AT)
        found = [(shares[self._entries[n].tenant] <= equal, self._value(n), n) for n in oldest]
        return min(found)[2] if found else None

    def _value(self, number: int) -> float:
        h = self._entries[number].handle
        life = max(h.deadline - h.kept_at, 1e-9)
        return max(0.0, h.deadline - self._clock()) / life * (1 + h.tokens / COSTLY_TOKENS)

    def _usable(self, number: int) -> bool:
        handle = self._entries[number].handle
        return bool(handle.params) and handle.deadline > self._clock()

    def _remove(self, number: int) -> _Entry:
        entry = self._entries.pop(number)
        self._bytes -= entry.cost
        self._remove_from_node(number, entry)
        for key in entry.keys:
            under = self._by_key[key]
            del under[number]
            if not under:
                del self._by_key[key]
        return entry

    def _remove_from_node(self, number: int, entry: _Entry) -> None:
        node = entry.handle.node
        if number not in self._by_node.get(node, ()):
            return  # its engine is gone
        del self._by_node[node][number]
        own = self._by_tenant[node, entry.tenant]
        del own[number]
        if not own:
            del self._by_tenant[node, entry.tenant]
        shares = self._shares[node]
        shares[entry.tenant] -= entry.handle.blocks
        if not shares[entry.tenant]:
            del shares[entry.tenant]
        if not self._by_node[node]:
            del self._by_node[node]
            self._shares.pop(node)

    def _sweep(self) -> None:
        """Take from the nodes what they keep no longer, and forget what expired a while ago."""
        now = self._clock()
        for due in self._due(self._deadlines, now - EXPIRY_MARGIN_S):
            self._remove_from_node(due[1], self._entries[due[1]])
            heapq.heappush(self._lingering, due)
        for _, number in list(self._due(self._lingering, now - LINGER_S)):
            self._remove(number)
        if len(self._deadlines) + len(self._lingering) > 2 * len(self._entries) + 64:
            gone = {number for _, number in self._lingering}
            ends = [(e.handle.deadline, n) for n, e in self._entries.items()]
            self._deadlines = [end for end in ends if end[1] not in gone]
            self._lingering = [end for end in ends if end[1] in gone]
            heapq.heapify(self._deadlines)
            heapq.heapify(self._lingering)

    def _due(self, ends: list[tuple[float, int]], horizon: float) -> Iterator[tuple[float, int]]:
        while ends and ends[0][0] < horizon:
            due = heapq.heappop(ends)
            if due[1] in self._entries:
                yield due
