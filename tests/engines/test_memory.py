"""Memory on real engines: far more conversations than there is room for, and clients that leave."""

import asyncio
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from benchmarks.reuse.capacity import best_hits
from benchmarks.reuse.trace import Shape, TraceTurn, returning, trace
from tests.engines import tiny
from tests.engines.serving import BLOCK, Message, Serving, ask_cold, start
from tests.net import until

pytestmark = pytest.mark.engine

SHARE = 0.75
ROOM_FOR = 20
"""Conversations."""
SHAPE = Shape(turns=(2, 4), first=(300, 600), new=(20, 60), answer=(4, 8))
BLOCKS_EACH = 5
"""Of a conversation of such a shape, about."""
KV_BLOCKS = round(ROOM_FOR * BLOCKS_EACH / SHARE)
TTL_S = 60.0
LEASE_S = 30.0
MARGIN_S = 6.0
"""The router gives a handle up this long before the engine does."""
STALL_S = 60.0
"""The released engine makes a turn wait for minutes. Without a stall, a turn takes less than a second."""


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("crowded")
    model = tiny.make(tiny.Kind.QWEN3, folder / "model")
    serving = start(
        folder / "serve.log",
        f"model.path={model}",
        "model.name=tiny",
        "model.max_model_len=1024",
        "+model.engine_args.enforce_eager=true",
        "cluster.prefill.prefix_caching=false",
        f"cluster.decode.kv_blocks={KV_BLOCKS}",
        f"policy.retention.max_pinned_share={SHARE}",
        f"policy.retention.ttl_s={TTL_S}",
    )
    try:
        serving.wait_ready()
        yield serving
        assert serving.stop(signal.SIGTERM) == 0
    finally:
        if serving.process.poll() is None:
            serving.process.kill()
            serving.process.wait()


def words(seed: int, count: int) -> str:
    """About so many tokens, different for every seed."""
    return " ".join(f"{(seed * 7919 + i * 31) % 97:02d}" for i in range(count // 3))


class Crowd:
    """Plays a trace, each turn at its time or as soon as the one before it has been answered."""

    def __init__(self, serving: Serving, session: aiohttp.ClientSession, turns: list[TraceTurn]) -> None:
        self.serving = serving
        self.session = session
        self.turns = turns
        self.histories: dict[int, list[Message]] = {}
        self.names: set[str] = set()
        self.happened: list[tuple[TraceTurn, bool]] = []
        """Each turn with its real time and lengths, and whether it was a hit."""
        self.began = time.monotonic()

    async def play(self) -> None:
        conversations: dict[int, list[TraceTurn]] = {}
        for turn in self.turns:
            conversations.setdefault(turn.conversation, []).append(turn)
        await asyncio.gather(*map(self._converse, conversations.values()))

    async def _converse(self, turns: list[TraceTurn]) -> None:
        for turn in turns:
            await asyncio.sleep(max(0.0, self.began + turn.at - time.monotonic()))
            await self._take(turn)

    async def _take(self, turn: TraceTurn) -> None:
        history = self.histories.setdefault(turn.conversation, [])
        history.append({"role": "user", "content": words(1000 * turn.conversation + turn.number, turn.new)})
        at = time.monotonic() - self.began
        body = {"messages": history, "max_tokens": turn.answer, "ignore_eos": True, "temperature": 0}
        async with self.session.post(f"{self.serving.url}/v1/chat/completions", json=body) as response:
            answer, headers = await response.json(), response.headers
            assert response.status == 200, answer
        history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        self.names.add(headers["x-kvflow-conversation"])
        usage = answer["usage"]
        real = replace(turn, at=at, prompt=usage["prompt_tokens"], answer=usage["completion_tokens"])
        self.happened.append((real, headers["x-kvflow-path"] == "pull"))


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=STALL_S))


async def test_a_hundred_conversations_in_a_pool_for_twenty(
    crowded: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    at_first = settled_usage(crowded, "decode")
    async with session() as s:
        crowd = Crowd(crowded, s, trace(1, conversations=100, shape=SHAPE))
        await crowd.play()
        turns = [t for t, _ in sorted(crowd.happened, key=lambda h: h[0].at)]
        capacity = int(SHARE * (KV_BLOCKS - 1))
        best = sum(best_hits(turns, capacity=capacity, ttl_s=TTL_S - MARGIN_S, block_size=BLOCK))
        hits = sum(hit for _, hit in crowd.happened)
        with capsys.disabled():
            print(f"\nhits: {hits} of {returning(turns)}; a cache that knows what fits: {best}")
        assert 0.2 < best / returning(turns) < 0.95  # else there is nothing to be seen
        assert hits >= 0.9 * best
        for number in range(0, 100, 25):
            asked = [*crowd.histories[number], {"role": "user", "content": "And now?"}]
            body: dict[str, Any] = {"messages": asked, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
            async with s.post(f"{crowded.url}/v1/chat/completions", json=body) as response:
                tokens = (await response.json())["choices"][0]["token_ids"]
                crowd.names.add(response.headers["x-kvflow-conversation"])
            cold = ask_cold(crowded, asked, max_tokens=8)
            assert tokens == cold.tokens
            crowd.names.add(cold.headers["x-kvflow-conversation"])
        closed = [await close(crowded, s, name) for name in sorted(crowd.names)]
        assert closed.count(200) >= ROOM_FOR // 2  # the others were given up before, or have expired
        assert set(closed) <= {200, 404}
    until(lambda: settled_usage(crowded, "decode") == at_first, TTL_S / 3)


async def test_clients_that_leave_leave_nothing_in_the_engines(crowded: Serving) -> None:
    at_first = {role: settled_usage(crowded, role) for role in ("prefill", "decode")}
    chat = [{"role": "user", "content": words(5, 600)}]
    async with session() as s:
        for i in range(12):
            body = {"messages": chat, "max_tokens": 300, "ignore_eos": True, "stream": i % 2 == 0}
            headers = {"x-conversation-id": f"left-{i % 3}"}  # some go on from what another has left
            asking = asyncio.create_task(_first_bytes(s, crowded, body, headers))
            await asyncio.wait({asking}, timeout=0.02 * 1.5**i)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        until(lambda: not any(under_way(crowded, role) for role in ("prefill", "decode")), 30)
        for i in range(3):
            assert await close(crowded, s, f"left-{i}") in (200, 404)
    until(lambda: settled_usage(crowded, "decode") == at_first["decode"], TTL_S / 3)
    # Where a client left just when the prefill node had answered, its prompt stays for the rest of the lease.
    until(lambda: settled_usage(crowded, "prefill") == at_first["prefill"], LEASE_S + 10)


async def _first_bytes(s: aiohttp.ClientSession, serving: Serving, body: Any, headers: dict[str, str]) -> None:
    async with s.post(f"{serving.url}/v1/chat/completions", json=body, headers=headers) as response:
        await response.content.readany()
        await response.content.readany()


async def close(serving: Serving, s: aiohttp.ClientSession, name: str) -> int:
    async with s.delete(f"{serving.url}/v1/conversations/{name}") as response:
        return response.status


def under_way(serving: Serving, role: str) -> float:
    return sum(serving.metric(role, f"vllm:num_requests_{state}") for state in ("running", "waiting"))


def settled_usage(serving: Serving, role: str) -> float:
    """Share of the engine's blocks that somebody uses. It is published with the engine's next step."""
    tick = {"messages": [{"role": "user", "content": "tick"}], "max_tokens": 2}
    serving.post_to(role, "/v1/chat/completions", tick)
    return serving.metric(role, "vllm:kv_cache_usage_perc")
