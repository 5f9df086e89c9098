"""What one tenant may take: turns at a time, and room for what is kept."""

import asyncio
import random
from typing import Any

import pytest

from kvflow.nodes.simulated import ManualClock, Settings
from kvflow.tenants import Identity, Keys, Limits, Tenant, Tenants
from kvflow.tenants.keys import hash_of
from kvflow.types import Role
from tests.cluster import BLOCK, Cluster, cluster, say, shipped_policy, text, until

KEYS = {name: {"authorization": f"Bearer key-of-{name}"} for name in ("acme", "globex")}


def tenants(**limits: Any) -> Tenants:
    """`acme` has limits, `globex` none."""
    policy = shipped_policy("balanced", "policy.retention.max_pinned_share=1")
    keys = Keys.parse("\n".join(f"{name} {hash_of(f'key-of-{name}')}" for name in KEYS), KEYS)
    both = [
        Tenant(name="acme", policy=policy, limits=Limits(**limits)),
        Tenant(name="globex", policy=policy),
    ]
    return Tenants(both, {policy.name: policy}, Identity(keys))


def small(_: Role) -> Settings:
    return Settings(block_size=BLOCK, blocks=400, max_model_len=1600, prefix_caching=False)


def stop(c: Cluster) -> None:
    for node in c.nodes.values():
        node.engine.faults.flowing.clear()


def flow(c: Cluster) -> None:
    for node in c.nodes.values():
        node.engine.faults.flowing.set()


async def test_too_many_turns_are_refused_in_the_shape_of_their_api_and_others_go_on() -> None:
    async with cluster(tenants=tenants(max_turns=1, max_waiting=1, max_wait_s=600)) as c:
        stop(c)
        first = asyncio.create_task(c.chat(say("one"), KEYS["acme"]))
        await until(lambda: c.router.gate.under_way("acme") == 1)
        second = asyncio.create_task(c.chat(say("two"), KEYS["acme"]))
        await until(lambda: c.router.gate.waiting("acme") == 1)
        refused = await c.chat(say("three"), KEYS["acme"])
        assert (refused.status, refused.json["error"]["type"]) == (429, "RateLimitError")
        assert int(refused.headers["retry-after"]) >= 1
        anthropic = await c.post("/v1/messages", {"messages": say("x"), "max_tokens": 3}, KEYS["acme"])
        assert (anthropic.status, anthropic.json["error"]["type"]) == (429, "rate_limit_error")
        third = asyncio.create_task(c.chat(say("mine"), KEYS["globex"]))
        await until(lambda: c.router.gate.under_way("globex") == 1)
        flow(c)
        assert [(await reply).status for reply in (first, second, third)] == [200, 200, 200]
        assert (c.router.gate.under_way("acme"), c.router.gate.waiting("acme")) == (0, 0)
        c.check()


async def test_a_client_that_leaves_the_line_leaves_nothing() -> None:
    async with cluster(tenants=tenants(max_turns=1, max_wait_s=600)) as c:
        stop(c)
        first = asyncio.create_task(c.chat(say("one"), KEYS["acme"]))
        await until(lambda: c.router.gate.under_way("acme") == 1)
        second = asyncio.create_task(c.chat(say("two"), KEYS["acme"]))
        await until(lambda: c.router.gate.waiting("acme") == 1)
        second.cancel()
        await until(lambda: c.router.gate.waiting("acme") == 0)
        flow(c)
        assert (await first).status == 200
        assert (await c.chat(say("three"), KEYS["acme"])).status == 200
        c.check()


async def test_what_is_kept_for_a_tenant_stays_within_its_share() -> None:
    """100 of 400 blocks: room for the newest of its conversations, and none is taken from others."""
    chance = random.Random(5)
    async with cluster(tenants=tenants(max_pinned_share=0.25), settings=small, clock=ManualClock()) as c:
        held = c.router.conversations
        for number in range(24):
            name = "acme" if number % 4 else "globex"
            messages = say(f"{number} " + text(chance.randrange(60, 420), f"s{number}"))
            assert (await c.chat(messages, KEYS[name])).status == 200
            assert held.blocks_of("acme", "decode-0") <= 100
            c.advance(1)
        assert held.blocks_of("acme", "decode-0") > 40
        others = held.blocks_of("globex", "decode-0")
        assert others > 0
        kept = held.blocks_of("acme", "decode-0") + others
        await until(lambda: c.nodes["decode-0"].engine.occupancy().pinned == kept)
        c.check()


async def test_a_turn_that_is_larger_than_its_share_is_not_kept_and_takes_nothing_from_the_others() -> None:
    async with cluster(tenants=tenants(max_pinned_share=0.05), settings=small) as c:
        assert (await c.chat(say("short"), KEYS["acme"])).status == 200
        before = c.router.conversations.blocks_of("acme", "decode-0")
        assert 0 < before <= 20
        messages = say(text(500))
        answer = await c.chat(messages, KEYS["acme"])
        assert answer.text == await c.right(messages)
        assert c.router.conversations.blocks_of("acme", "decode-0") == before
        c.check()


async def test_turns_at_the_same_time_share_the_room() -> None:
    async with cluster(tenants=tenants(max_pinned_share=0.25), settings=small) as c:
        for _ in range(2):
            await asyncio.gather(*(c.chat(say(text(300, f"t{i}")), KEYS["acme"]) for i in range(6)))
            assert 0 < c.router.conversations.blocks_of("acme", "decode-0") <= 100
        c.check()


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_the_ends_of_the_scale(share: float) -> None:
    async with cluster(tenants=tenants(max_pinned_share=share), settings=small) as c:
        await c.chat(say(text(100)), KEYS["acme"])
        assert bool(c.router.conversations.blocks_of("acme", "decode-0")) == bool(share)
        c.check()


@pytest.mark.parametrize("seed", [1, 2])
async def test_turns_at_the_same_time_pin_no_more_than_the_share_even_for_a_moment(seed: int) -> None:
    """What does not fit beside the turns under way is not kept, rather than given up afterwards."""
    chance = random.Random(seed)
    peak = 0

    async def conversation(c: Cluster, number: int) -> None:
        messages = say(f"{number} " + text(chance.randrange(60, 400), f"c{number}"))
        for _ in range(3):
            answer = await c.chat(messages, KEYS["acme"])
            messages = [*messages, {"role": "assistant", "content": answer.text}, *say(text(40, "more"))]

    async def talk(c: Cluster, numbers: list[int]) -> None:
        while numbers:
            await conversation(c, numbers.pop())

    async def look(c: Cluster) -> None:
        nonlocal peak
        while True:
            peak = max(peak, c.nodes["decode-0"].engine.occupancy().pinned)
            await asyncio.sleep(0)

    async with cluster(tenants=tenants(max_pinned_share=0.25), settings=small) as c:
        looking = asyncio.create_task(look(c))
        numbers = list(range(12))
        await asyncio.gather(*(talk(c, numbers) for _ in range(4)))
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        assert 0 < peak <= 100
