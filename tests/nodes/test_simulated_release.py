"""Kept turns that a router gives up before their time."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from kvflow.connector.wire import KEY, RELEASE_PATH, DecodeOrder
from kvflow.nodes.base import NodeSpec
from kvflow.nodes.simulated import Fabric, Settings, SimulatedNode
from kvflow.types import Role
from tests.net import free_ports
from tests.nodes.simulation import COLD, DIRECT, SMALL, Answer, Pair, alone, ask, chat, job, settle

STORY = " ".join(f"line{i} of the old story" for i in range(20))
CACHING = replace(SMALL, prefix_caching=True)


def name(kept: Answer) -> str:
    return str(kept.handle["remote_request_id"])


def giving_up(*names: str, **order: Any) -> dict[str, Any]:
    return {**DIRECT, KEY: DecodeOrder(release=list(names), **order).to_wire()}


async def kept_turns(pair: Pair, count: int) -> list[Answer]:
    return [(await pair.turn(chat(f"{i} {STORY}"), share=1.0))[1] for i in range(count)]


async def started(role: Role, settings: Settings, fabric: Fabric) -> SimulatedNode:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    node = SimulatedNode(NodeSpec(name=f"{role}-0", role=role, url=url), settings, fabric)
    await node.start()
    return node


def held(kept: Answer) -> int:
    """Blocks, where no two turns share any."""
    return -(-kept.decode.tokens // SMALL.block_size)


async def test_what_is_listed_is_released_once_and_nothing_else() -> None:
    pair = Pair()
    one, two, three = await kept_turns(pair, 3)
    for _ in range(2):
        await ask(pair.decode, job("hello", giving_up(name(two), name(two), "stranger")))
        assert pair.decode.occupancy().pinned == held(one) + held(three)
    await ask(pair.decode, job("hello", giving_up(name(one), name(three))))
    assert (pair.decode.occupancy().pinned, pair.decode.occupancy().free) == (0, SMALL.blocks)
    pair.check()


async def test_it_is_free_before_the_request_waits_for_room() -> None:
    pair = Pair()
    kept = await kept_turns(pair, 4)
    async with aclosing(pair.decode.generate(job("x", max_tokens=480, ignore_eos=True))) as running:
        await anext(running)
        stuck = asyncio.create_task(ask(pair.decode, job(chat(STORY))))
        await settle()
        assert not stuck.done()
        # Behind a request that waits: what it gives up lets that one in as well.
        answers = await asyncio.gather(stuck, ask(pair.decode, job(chat(STORY), giving_up(*map(name, kept[:2])))))
    assert [a.text for a in answers] == [await alone(chat(STORY))] * 2
    assert pair.decode.occupancy().pinned == held(kept[2]) + held(kept[3])
    pair.check()


async def test_a_direct_turn_that_gives_up_its_own_conversation_finds_it_in_the_cache() -> None:
    pair = Pair(decode=CACHING)
    _, kept = await pair.turn(chat(STORY))
    prompt = chat(STORY, kept.text, "And then?")
    answer = await ask(pair.decode, job(prompt, giving_up(name(kept), retain_s=60, max_pinned_share=0.5)))
    assert answer.last.cached_tokens == kept.decode.tokens // SMALL.block_size * SMALL.block_size
    assert answer.text == await alone(prompt)
    assert pair.decode.occupancy().pinned == held(answer)
    pair.check()


async def test_a_lease_is_its_readers_to_end() -> None:
    pair = Pair()
    first = await pair.prefill_leg(chat(STORY))
    await ask(pair.prefill, job("hello", giving_up(name(first))))
    pair.prefill.reject(giving_up(name(first)))
    assert pair.prefill.occupancy().leased == 1
    answer = await pair.decode_leg(chat(STORY), first.handle)
    assert answer.text == await alone(chat(STORY))
    assert pair.prefill.occupancy().leased == 0


@pytest.mark.parametrize("release", ["all", [1], {"a": 1}, [None]])
async def test_a_list_that_makes_no_sense_releases_nothing(release: object) -> None:
    pair = Pair()
    [kept] = await kept_turns(pair, 1)
    answer = await ask(pair.decode, job("hello", {**DIRECT, KEY: {"release": release, "retain_s": 60}}))
    pair.decode.reject({KEY: {"release": release}})
    assert answer.decode.refused == "policy"
    assert pair.decode.occupancy().pinned == held(kept)


@pytest.mark.parametrize("settings", [replace(SMALL, stock=True), SMALL])
async def test_neither_a_stock_engine_nor_a_prefill_leg_releases(settings: Any) -> None:
    pair = Pair()
    [kept] = await kept_turns(pair, 1)
    pair.decode.settings = settings
    order = {"release": [name(kept)]}
    await ask(pair.decode, job("hello", {**(DIRECT if settings.stock else COLD), KEY: order}, max_tokens=1))
    assert pair.decode.occupancy().pinned == held(kept)


@pytest.mark.parametrize("wrong", [{"max_tokens": 10**6}, {"max_tokens": "many"}])
@pytest.mark.parametrize("stock", [False, True])
async def test_a_leg_that_is_refused_lets_go_of_what_waits_for_it(wrong: dict[str, Any], stock: bool) -> None:
    fabric = Fabric()
    decode = await started(Role.DECODE, SMALL, fabric)
    prefill = await started(Role.PREFILL, replace(SMALL, stock=stock), fabric)
    one, two = [
        await ask(decode.engine, job(chat(f"{i} {STORY}"), giving_up(retain_s=60, max_pinned_share=1))) for i in "12"
    ]
    legs = ((prefill, {**one.handle, **COLD}), (decode, giving_up(name(two))))
    async with aiohttp.ClientSession() as http:
        for node, params in legs:
            body = {"model": SMALL.model, "prompt": "x", **wrong, "kv_transfer_params": params}
            async with http.post(f"{node.spec.url}/v1/completions", json=body) as response:
                assert response.status == 400
    assert decode.engine.occupancy().pinned == (held(one) if stock else 0)
    await prefill.stop()
    await decode.stop()


async def test_the_release_route_frees_without_a_request() -> None:
    node = await started(Role.DECODE, SMALL, Fabric())
    kept = await ask(node.engine, job(chat(STORY), giving_up(retain_s=60, max_pinned_share=0.5)))
    assert node.engine.occupancy().pinned == held(kept)
    async with aiohttp.ClientSession(node.spec.url) as http:
        for params, status in (("x", 400), ({KEY: {"release": [name(kept)]}}, 200), ({}, 200)):
            async with http.post(RELEASE_PATH, json={"kv_transfer_params": params}) as response:
                assert response.status == status
    assert node.engine.occupancy().free == SMALL.blocks
    await node.stop()
