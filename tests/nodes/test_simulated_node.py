"""The life of a simulated node: start, stop, death, another life."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest

from kvflow.connector.wire import NODE_PATH
from kvflow.errors import ConfigError, StartError
from kvflow.nodes.base import Node, NodeSpec
from kvflow.nodes.simulated import Fabric, ManualClock, SimulatedNode, Speed
from kvflow.types import Role
from tests.net import free_ports
from tests.nodes.simulation import SMALL, settle

QUESTION = {"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True}


@pytest.fixture
def spec() -> NodeSpec:
    return NodeSpec(name="decode-0", role=Role.DECODE, url=f"http://127.0.0.1:{free_ports(1)[0]}")


@pytest.fixture
async def node(spec: NodeSpec) -> AsyncIterator[SimulatedNode]:
    node = SimulatedNode(spec, SMALL, Fabric())
    yield node
    await node.stop()


async def epoch(node: SimulatedNode) -> str:
    async with aiohttp.ClientSession() as http, http.get(node.spec.url + NODE_PATH) as response:
        return str((await response.json())["epoch"])


async def refuses(node: SimulatedNode) -> bool:
    try:
        await epoch(node)
    except aiohttp.ClientConnectorError:
        return True
    return False


async def test_it_is_a_node_and_answers_after_its_start(node: SimulatedNode, spec: NodeSpec) -> None:
    any_node: Node = node
    assert any_node.spec is spec
    assert await refuses(node)
    await any_node.start()
    assert await epoch(node) == node.engine.epoch


async def test_each_start_is_a_new_epoch(node: SimulatedNode) -> None:
    await node.start()
    first = await epoch(node)
    await node.stop()
    assert await refuses(node)
    await node.start()
    assert await epoch(node) not in ("", first)


async def test_stopping_leaves_no_task_behind_and_breaks_what_is_under_way(spec: NodeSpec) -> None:
    before = asyncio.all_tasks()
    node = SimulatedNode(spec, replace(SMALL, speed=Speed(decode=0.01)), Fabric())
    await node.start()
    async with aiohttp.ClientSession() as http, http.post(spec.url + "/v1/chat/completions", json=QUESTION) as response:
        assert response.status == 200
        await node.stop()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    await node.stop()
    assert asyncio.all_tasks() == before
    assert node.engine.occupancy().running == 0
    assert node.engine.check() == []


async def test_it_stops_while_requests_hang(node: SimulatedNode) -> None:
    await node.start()
    node.faults.flowing.clear()
    async with aiohttp.ClientSession() as http:
        hanging = asyncio.create_task(http.post(node.spec.url + "/v1/chat/completions", json=QUESTION).__aenter__())
        while not node.app.received:  # noqa: ASYNC110 - the arrival is not announced
            await asyncio.sleep(0.001)
        await node.stop()
        with pytest.raises(aiohttp.ClientError):
            await hanging


async def test_a_taken_port_is_reported(node: SimulatedNode, spec: NodeSpec) -> None:
    await node.start()
    other = SimulatedNode(replace(spec, name="decode-1"), SMALL, Fabric())
    taken = r"^decode-1 cannot start: port \d+ on 127\.0\.0\.1 is taken .*, or set cluster\.decode\.port\.$"
    with pytest.raises(StartError, match=taken):
        await other.start()
    with pytest.raises(StartError, match="decode-0 is already running"):
        await node.start()


async def test_death_is_reported_and_a_stop_is_no_death(node: SimulatedNode) -> None:
    await node.start()
    dying = asyncio.create_task(node.died())
    await node.stop()
    await settle()
    assert not dying.done()
    dying.cancel()
    await node.start()
    dying = asyncio.create_task(node.died())
    await node.crash("ran out of memory")
    assert await dying == "decode-0 ran out of memory."
    assert await refuses(node)
    await node.start()
    assert not await refuses(node)


async def test_a_slow_start_refuses_connections_until_it_is_over(spec: NodeSpec) -> None:
    clock = ManualClock()
    node = SimulatedNode(spec, replace(SMALL, speed=Speed(start_s=60)), Fabric(), clock=clock)
    await node.start()
    await settle()
    assert await refuses(node)
    clock.advance(60)
    while await refuses(node):  # noqa: ASYNC110 - the server listens as soon as it runs
        await asyncio.sleep(0.001)
    await node.stop()
    await node.start()
    await node.stop()


async def test_a_node_is_known_to_others_while_it_lives(spec: NodeSpec) -> None:
    fabric = Fabric()
    node = SimulatedNode(spec, SMALL, fabric)
    assert fabric.find(node.engine.epoch) is None
    await node.start()
    await epoch(node)
    assert fabric.find(node.engine.epoch) is node.engine
    await node.crash()
    assert fabric.find(node.engine.epoch) is None


@pytest.mark.parametrize("url", ["http://127.0.0.1", "https://127.0.0.1:80", "127.0.0.1:80"])
def test_the_url_names_a_host_and_a_port(spec: NodeSpec, url: str) -> None:
    with pytest.raises(ConfigError, match="decode-0 must be http://<host>:<port>"):
        SimulatedNode(replace(spec, url=url), SMALL, Fabric())
