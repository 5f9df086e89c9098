"""The two tenants' clients, and phases with and without the flood."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import aiohttp

from benchmarks.paths.client import Client, TurnError, session

VICTIM, FLOODER = "victim", "flooder"
REFUSED = 429
_ANSWER, _FLOOD_ANSWER = 12, 8
"""Tokens."""
_AGAIN_S = 0.05
"""After which a client that was refused tries again; far sooner than it is told to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    users: int = 4
    """Of the victim, each with one turn at a time."""
    turns: int = 10
    """Of a conversation; then the user begins another."""
    clients: int = 24
    """Of the flooder."""
    phases: int = 4
    """Each of which is a time without the flood, and one with it."""
    phase_s: float = 10.0


@dataclass(slots=True)
class Times:
    """Of the victim's turns, seconds to the first token, by whether they were sent during the flood."""

    quiet: list[float] = field(default_factory=list)
    flooded: list[float] = field(default_factory=list)
    flood_answered: int = 0
    flood_refused: int = 0


async def play(url: str, mix: Mix, keys: dict[str, str]) -> Times:
    """Raises `TurnError` if a turn of the victim's is not answered, or one of the flooder's for another reason."""
    times = Times()
    async with session() as s:
        victim = Client(s, url, keys[VICTIM])
        await _phase(victim, mix, -1, [])  # so that speeds are known and connections open
        for phase in range(mix.phases):
            await _phase(victim, mix, 2 * phase, times.quiet)
            async with _flood(s, url, keys[FLOODER], mix, phase, times):
                await _phase(victim, mix, 2 * phase + 1, times.flooded)
    return times


async def _phase(victim: Client, mix: Mix, phase: int, times: list[float]) -> None:
    until = time.perf_counter() + mix.phase_s
    async with asyncio.TaskGroup() as group:
        for number in range(mix.users):
            group.create_task(_user(victim, mix, f"p{phase}u{number}", until, times))


async def _user(victim: Client, mix: Mix, name: str, until: float, times: list[float]) -> None:
    turn, messages = 0, list[dict[str, str]]()
    while time.perf_counter() < until:
        if turn % mix.turns == 0:
            messages = [{"role": "user", "content": _text(400, f"{name}c{turn}")}]
        answer = await victim.ask(messages, tokens=_ANSWER)
        times.append(answer.first_s)
        turn += 1
        said = {"role": "assistant", "content": answer.text}
        messages = [*messages, said, {"role": "user", "content": _text(100, f"{name}t{turn}")}]


@asynccontextmanager
async def _flood(
    s: aiohttp.ClientSession, url: str, key: str, mix: Mix, phase: int, times: Times
) -> AsyncIterator[None]:
    clients = [asyncio.create_task(_floods(s, url, key, f"p{phase}f{n}", times)) for n in range(mix.clients)]
    try:
        yield
    finally:
        ended = [c for c in clients if c.done()]
        for client in clients:
            client.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*clients, return_exceptions=True)
    for client in ended:
        client.result()


async def _floods(s: aiohttp.ClientSession, url: str, key: str, name: str, times: Times) -> None:
    turn = 0
    while True:
        turn += 1
        messages = [{"role": "user", "content": _text(1500, f"{name}t{turn}")}]
        body = {"messages": messages, "max_tokens": _FLOOD_ANSWER}
        headers = {"authorization": f"Bearer {key}"}
        async with s.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            said = await response.text()
        if response.status == REFUSED:
            times.flood_refused += 1
            await asyncio.sleep(_AGAIN_S)
        elif response.status == 200:
            times.flood_answered += 1
        else:
            raise TurnError(f"a turn of the flood was answered with {response.status}: {said[:500]}")


def _text(words: int, seed: str) -> str:
    return f"{seed} " + " ".join(f"{seed}{i % 89}" for i in range(words))
