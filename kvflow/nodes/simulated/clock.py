"""Time as the simulation sees it, so that tests can own it."""

import asyncio
import heapq
import itertools
import time
from typing import Any, Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, monotonic."""

    async def sleep(self, seconds: float) -> None:
        """Let others run even for 0 seconds."""


class RealClock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """Stands still until `advance` is called."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        await future

    def due(self) -> float | None:
        """Seconds until somebody wakes; None where nobody sleeps."""
        return max(0.0, self._sleepers[0][0] - self._now) if self._sleepers else None

    def advance(self, seconds: float) -> None:
        """Wake whoever sleeps no longer than this, in order; they run when the caller next awaits something."""
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            future = heapq.heappop(self._sleepers)[2]
            if not future.done():
                future.set_result(None)


class Signal:
    """Wakes everybody who waits for a change of something that can also change by itself at a known time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._event = asyncio.Event()

    def send(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, until: float | None) -> None:
        """Return at the next `send`, or at `until` on the clock."""
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._event.wait())]
        if until is not None:
            tasks.append(asyncio.create_task(self._clock.sleep(until - self._clock.now())))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
