"""One tenant floods the service; what that costs another, in simulated time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from kvflow.nodes.simulated import ManualClock, Settings, Speed
from kvflow.tenants import Identity, Keys, Limits, Tenant, Tenants
from kvflow.tenants.keys import hash_of
from kvflow.types import Role
from tests.cluster import BLOCK, Cluster, Message, cluster, say, shipped_policy, text, until

KEYS = {name: {"authorization": f"Bearer key-of-{name}"} for name in ("victim", "flooder")}
USERS, TURNS, FLOOD = 2, 6, 8
SPEED = Speed(prefill=8000, decode=100, transfer=200_000, prefill_s=0.01, transfer_s=0.01)


def tenants(**limits: Any) -> Tenants:
    policy = shipped_policy("balanced")
    keys = Keys.parse("\n".join(f"{name} {hash_of(f'key-of-{name}')}" for name in KEYS), KEYS)
    both = [Tenant(name="victim", policy=policy), Tenant(name="flooder", policy=policy, limits=Limits(**limits))]
    return Tenants(both, {policy.name: policy}, Identity(keys))


@asynccontextmanager
async def running(**limits: Any) -> AsyncIterator[Cluster]:
    """The clock jumps to whatever comes next, once everybody has had the time to do what is to be done now."""

    def settings(_: Role) -> Settings:
        return Settings(block_size=BLOCK, blocks=20_000, speed=SPEED)

    clock = ManualClock()
    async with cluster(prefill=4, decode=8, tenants=tenants(**limits), settings=settings, clock=clock) as c:
        jumping = asyncio.create_task(_jump(clock))
        try:
            yield c
        finally:
            jumping.cancel()
            with suppress(asyncio.CancelledError):
                await jumping


async def _jump(clock: ManualClock) -> None:
    loop = asyncio.get_running_loop()
    quiet = looks = 0
    while True:
        began = loop.time()
        await asyncio.sleep(0.002)
        quiet, looks = quiet + 1 if loop.time() - began < 0.0035 else 0, looks + 1
        if (quiet >= 3 or looks >= 40) and (seconds := clock.due()):  # on a busy machine it never looks quiet
            clock.advance(seconds)
            quiet = looks = 0


async def first_token_s(c: Cluster, messages: list[Message]) -> tuple[float, str]:
    """Simulated seconds until the answer begins, and the answer."""
    began, body = c.clock.now(), {"messages": messages, "stream": True, "max_tokens": 12, "ignore_eos": True}
    async with c.session.post(c.url + "/v1/chat/completions", json=body, headers=KEYS["victim"]) as response:
        assert response.status == 200
        await response.content.readany()
        took = c.clock.now() - began
        await response.content.read()
    return took, "so it is"


async def user(c: Cluster, number: int) -> list[float]:
    messages, times = say(f"{number} " + text(400, f"u{number}")), []
    for turn in range(TURNS):
        took, answer = await first_token_s(c, messages)
        times.append(took)
        messages = [*messages, {"role": "assistant", "content": answer}, *say(text(100, f"u{number}t{turn}"))]
    return times


async def flood(c: Cluster, number: int) -> None:
    turn = 0
    while True:
        turn += 1
        prompt = say(f"{number} {turn} " + text(1500, f"f{number}-{turn}"))
        reply = await c.chat(prompt, KEYS["flooder"], max_tokens=8)
        if reply.status == 429:
            await asyncio.sleep(0.02)


async def slowest(*, flooded: bool, **limits: Any) -> float:
    """The 99th percentile of so few turns is their slowest, first turns included."""
    async with running(**limits) as c:
        floods = [asyncio.create_task(flood(c, i)) for i in range(FLOOD if flooded else 0)]
        try:
            if flooded:
                most = min(FLOOD, limits.get("max_turns", FLOOD))
                await until(lambda: c.router.gate.under_way("flooder") == most)
            times = await asyncio.gather(*(user(c, i) for i in range(USERS)))
        finally:
            for task in floods:
                task.cancel()
            await asyncio.gather(*floods, return_exceptions=True)
        return max(t for of_user in times for t in of_user)


async def test_a_flood_of_another_tenant_is_hardly_felt() -> None:
    alone = await slowest(flooded=False)
    limited = await slowest(flooded=True, max_turns=2, max_waiting=4)
    boundless = await slowest(flooded=True)
    assert limited <= 1.2 * alone
    assert boundless > 1.2 * alone, "else this test could not fail"
