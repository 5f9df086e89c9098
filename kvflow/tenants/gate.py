"""How many turns of a tenant are under way at a time; the next ones wait in line, and those beyond that are refused."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import ceil

from kvflow.errors import RequestError
from kvflow.tenants.tenant import Tenant

TOO_MANY = 429
LONGEST_RETRY_S = 60
_NEWEST = 0.2
"""Weight of the newest turn in the average duration."""


@dataclass(slots=True)
class _Line:
    """Of one tenant."""

    under_way: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    turn_s: float = 1.0
    """How long a turn takes, about."""

    def leave(self) -> None:
        """Hand the place to who has waited longest, or give it up."""
        while self.waiting:
            first = self.waiting.popleft()
            if not first.done():
                first.set_result(None)
                return
        self.under_way -= 1


class Gate:
    """One event loop owns an instance. A tenant without a limit passes at no cost."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lines: dict[str, _Line] = {}

    def under_way(self, tenant: str) -> int:
        """Turns that have passed and not ended."""
        line = self._lines.get(tenant)
        return line.under_way if line else 0

    def waiting(self, tenant: str) -> int:
        line = self._lines.get(tenant)
        return len(line.waiting) if line else 0

    def check(self, tenant: Tenant) -> None:
        """Raises `RequestError`, 429, if a turn that came now would be refused at once: its body need not be read."""
        limits, line = tenant.limits, self._lines.get(tenant.name)
        if line is None or limits.max_turns is None or line.under_way < limits.max_turns:
            return
        if len(line.waiting) >= limits.max_waiting:
            raise _refused(tenant, line, f"{limits.max_waiting} more are waiting")

    @asynccontextmanager
    async def turn(self, tenant: Tenant) -> AsyncIterator[None]:
        """One turn: waits its turn to begin, and is under way for as long as the context lasts.

        Raises `RequestError`, 429, with the seconds after which another try makes sense.
        """
        line = self._lines.setdefault(tenant.name, _Line())
        await self._enter(tenant, line)
        began = self._clock()
        try:
            yield
        finally:
            line.turn_s += _NEWEST * (self._clock() - began - line.turn_s)
            line.leave()

    async def _enter(self, tenant: Tenant, line: _Line) -> None:
        limits = tenant.limits
        if limits.max_turns is None or line.under_way < limits.max_turns:
            line.under_way += 1
            return
        self.check(tenant)
        place = asyncio.get_running_loop().create_future()
        line.waiting.append(place)
        try:
            await asyncio.wait({place}, timeout=limits.max_wait_s)
        except asyncio.CancelledError:
            self._forgo(line, place)
            raise
        if not place.done():
            self._forgo(line, place)
            raise _refused(tenant, line, f"none of them ended within {limits.max_wait_s:g} s")

    def _forgo(self, line: _Line, place: asyncio.Future[None]) -> None:
        """Whoever waited has left; if the place was handed over just now, it goes to the next."""
        if place.done():
            line.leave()
        else:
            line.waiting.remove(place)


def _refused(tenant: Tenant, line: _Line, why: str) -> RequestError:
    most = tenant.limits.max_turns or 1
    soon = ceil(line.turn_s * (1 + len(line.waiting) / most))
    message = f"{most} turns of tenant {tenant.name!r} are under way, as many as it may have, and {why}"
    retry = max(1, min(LONGEST_RETRY_S, soon))
    return RequestError(message, status=TOO_MANY, kind="RateLimitError", retry_after=retry)
