"""Clients that leave, at any moment and by the hundred: nothing works on, stays pinned, or remains."""

import asyncio
import os
from random import Random
from typing import Any

import pytest

from kvflow.nodes.simulated import Settings, Speed
from kvflow.types import Role
from tests.cluster import BLOCK, Cluster, Message, cluster, say, text, until

DEPARTURES = 300


def slow_enough(_: Role) -> Settings:
    """A turn takes some tens of milliseconds, so that a client can leave in any part of it."""
    speed = Speed(prefill=50_000, decode=1000, transfer=50_000, prefill_s=0.002, transfer_s=0.002)
    return Settings(block_size=BLOCK, blocks=2048, max_model_len=1024, speed=speed)


def tasks() -> int:
    return len(asyncio.all_tasks())


def sockets() -> int:
    """Open connections and listeners of this process, which is the client, the router and the engines."""
    links = (os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd))
    return sum(link.startswith("socket:") for link in links)


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


async def leaves(c: Cluster, chat: list[Message], after_s: float, **body: Any) -> None:
    """Ask, and hang up after a time, wherever the turn is then."""
    asking = asyncio.create_task(c.chat(chat, **body))
    await asyncio.wait({asking}, timeout=after_s)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def quiet(c: Cluster) -> None:
    """All that was under way has come to its end, and pins are those that the router knows of, one for each handle."""
    known = c.router.conversations

    def at_rest() -> bool:
        seen = [node.engine.occupancy() for node in c.nodes.values()]
        return not any(o.running or o.waiting for o in seen) and sum(o.leased for o in seen) == len(known)

    await until(at_rest)
    c.check()


@pytest.mark.parametrize("policy", ["balanced", "aggressive"])
async def test_hundreds_of_clients_that_leave_at_any_moment_leave_nothing_behind(policy: str) -> None:
    random = Random(policy)
    async with cluster(decode=2, prefill=2, policy=policy, settings=slow_enough) as c:
        chats = [say(text(150, f"chat{i}")) for i in range(12)]
        chats = [[*chat, {"role": "assistant", "content": (await c.chat(chat)).text}] for chat in chats]
        await quiet(c)
        await c.session.get(c.url + "/health")
        before = tasks(), sockets()
        for _ in range(DEPARTURES // 10):
            asked = [
                [*random.choice(chats), {"role": "user", "content": text(random.randrange(80))}] for _ in range(10)
            ]
            await asyncio.gather(
                *(leaves(c, a, random.uniform(0, 0.08), stream=random.random() < 0.5, max_tokens=40) for a in asked)
            )
        await quiet(c)
        await until(lambda: tasks() <= before[0])
        await until(lambda: sockets() <= before[1])
        right = await c.right(chats[0][:1])
        assert (await c.chat(chats[0][:1])).text == right


async def test_a_handle_that_is_lost_on_its_way_is_abandoned() -> None:
    """The engine has kept the turn and said so, to a router that was no longer there to hear it."""
    async with cluster(settings=slow_enough) as c:
        for stream in (True, False):
            for i in range(20):
                await leaves(c, say(text(50, f"{stream}{i}")), 0.004 + i * 0.001, stream=stream, max_tokens=4)
        await quiet(c)
