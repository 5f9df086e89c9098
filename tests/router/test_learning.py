"""Turns through the whole router, on nodes whose speed is known: what is learned is that speed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from kvflow.nodes.simulated import ManualClock, Settings
from kvflow.nodes.simulated.settings import Speed
from kvflow.types import Role, View
from tests.cluster import BLOCK, Cluster, Message, cluster, say, shipped_policy, text

PREFILL = Speed(prefill=2000, prefill_s=0.05, transfer=20_000, transfer_s=0.02)
DECODE = Speed(prefill=500, prefill_s=0.1, transfer=10_000, transfer_s=0.03)
SIZES = (60, 700, 150, 400, 90, 900, 250, 500, 120, 60, 1000, 300)


@asynccontextmanager
async def timed(policy: str, *overrides: str, prefix_caching: bool = False) -> AsyncIterator[Cluster]:
    """One client at a time: the clock jumps to whenever a node has done with something, and stands still else."""

    def settings(role: Role) -> Settings:
        speed = PREFILL if role is Role.PREFILL else DECODE
        caching = prefix_caching and role is Role.DECODE
        return Settings(block_size=BLOCK, blocks=20_000, prefix_caching=caching, speed=speed)

    clock = ManualClock()
    async with cluster(policy=shipped_policy(policy, *overrides), settings=settings, clock=clock) as c:
        jumping = asyncio.create_task(_jump(clock))
        try:
            yield c
        finally:
            jumping.cancel()
            with suppress(asyncio.CancelledError):
                await jumping


async def _jump(clock: ManualClock) -> None:
    while True:
        await asyncio.sleep(0)
        if seconds := clock.due():
            clock.advance(seconds)


async def talk(c: Cluster, seed: str) -> list[str]:
    """Two turns of each of several conversations, of different lengths; the paths taken."""
    paths = []
    for i, words in enumerate(SIZES):
        chat: list[Message] = say(text(words, f"{seed}{i}-"))
        for _ in range(2):
            reply = await c.chat(chat, stream=True)
            paths.append(reply.path)
            chat = [*chat, {"role": "assistant", "content": reply.text}, *say(text(SIZES[-i - 1], f"{seed}more{i}-"))]
    return paths


def right(tokens: int, speed: Speed) -> float:
    return speed.prefill_time(tokens)


@pytest.mark.parametrize("tokens", [100, 400, 1000])
async def test_computing_and_moving_come_out_as_the_nodes_do_them(tokens: int) -> None:
    async with timed("balanced") as c:
        paths = await talk(c, "a")
        assert {"cold", "pull"} == set(paths)
        view: View = c.router.fleet.view()
        prefill, decode = view.prefill[0], view.decode[0]
        assert prefill.compute.seconds(tokens) == pytest.approx(PREFILL.prefill_time(tokens), rel=0.1)
        back, forth = view.transfer(decode.name, prefill.name), view.transfer(prefill.name, decode.name)
        assert back.seconds(tokens) == pytest.approx(PREFILL.transfer_time(tokens), rel=0.1)
        assert forth.seconds(tokens) == pytest.approx(DECODE.transfer_time(tokens), rel=0.1)
        assert prefill.overhead.seconds(tokens) < 1e-3  # there is none: the clock stands still on the way
        assert prefill.in_flight == 0
        assert view.wait_s(prefill) == 0


async def test_direct_turns_teach_what_the_decode_node_computes() -> None:
    async with timed("balanced", "policy.reuse.direct_below_tokens=5000", prefix_caching=True) as c:
        paths = await talk(c, "a")
        paths += await talk(c, "b")
        assert "direct" in paths
        decode = c.router.fleet.view().decode[0]
        for tokens in (100, 400, 1000):
            assert decode.compute.seconds(tokens) == pytest.approx(DECODE.prefill_time(tokens), rel=0.15)


async def test_they_are_shown_to_prometheus() -> None:
    async with timed("balanced") as c:
        before = (await c.get("/metrics")).raw.decode()
        await talk(c, "a")
        page = (await c.get("/metrics")).raw.decode()
    shown = [line.rpartition(" ") for line in page.splitlines() if "_seconds_per_token{" in line]
    found = {name: float(value) for name, _, value in shown}
    assert "_seconds_per_token{" not in before
    per_token = PREFILL.prefill_time(1000) / 1000
    assert found['kvflow_compute_seconds_per_token{node="prefill-0"}'] == pytest.approx(per_token, rel=0.1)
    assert 'kvflow_transfer_seconds_per_token{source="decode-0",target="prefill-0"}' in found
    assert 'kvflow_transfer_seconds_per_token{source="prefill-0",target="decode-0"}' in found


async def test_while_a_prompt_is_computed_its_node_is_taken() -> None:
    async with timed("balanced") as c:
        await talk(c, "a")
        prompt = say(text(800, "long"))
        seen = []

        async def look() -> None:
            while True:
                view = c.router.fleet.view()
                if view.prefill[0].in_flight:
                    seen.append((view.wait_s(view.prefill[0]), view.prefill[0].queued_tokens))
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        await c.chat(prompt)
        looking.cancel()
        wait_s, tokens = max(seen)
        assert tokens > 500
        assert wait_s == pytest.approx(PREFILL.prefill_time(tokens), rel=0.1)
        assert c.router.fleet.view().prefill[0].queued_tokens == 0
