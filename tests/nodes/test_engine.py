import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvflow.errors import StartError
from kvflow.launchers.local import LocalLauncher
from kvflow.nodes.base import Node, NodeSpec
from kvflow.nodes.engine import EngineNode
from kvflow.types import Role
from tests.launchers.processes import alive, engine, pids

Build = Callable[..., EngineNode]


@pytest.fixture
async def build(tmp_path: Path) -> AsyncIterator[Build]:
    launcher = LocalLauncher(log_dir=tmp_path, term_s=0.2, rest_s=0.2)
    nodes: list[EngineNode] = []

    def build(*options: str, ports: dict[str, int] | None = None) -> EngineNode:
        url, env = "http://127.0.0.1:8100", (("A", "1"),)
        spec = NodeSpec(name="prefill-0", role=Role.PREFILL, url=url, command=engine(*options), env=env)
        nodes.append(EngineNode(spec, launcher, ports or {}))
        return nodes[-1]

    yield build
    for node in nodes:
        await node.stop()


async def engine_pids(log: Path) -> list[int]:
    return await asyncio.to_thread(pids, log)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "prefill-0.log"


async def test_each_start_after_a_stop_is_a_new_process(build: Build, log: Path) -> None:
    node: Node = build()
    await node.stop()
    await node.start()
    [first] = await engine_pids(log)
    await node.stop()
    assert not alive(first)
    await node.start()
    [second] = await engine_pids(log)
    assert second != first
    assert alive(second)


async def test_death_is_reported_with_the_end_of_the_log(build: Build, log: Path) -> None:
    node = build("--say=ValueError: no such model", "--exit=3")
    await node.start()
    assert await node.died() == (
        f"prefill-0 ended with exit status 3; the end of its log {log}:\n"
        f"  pid {pids(log)[0]}\n  ValueError: no such model\n  up"
    )


async def test_death_by_signal_takes_the_rest_of_the_engine_along(build: Build, log: Path) -> None:
    node = build("--children=2", "--deaf-children")
    await node.start()
    *children, leader = await engine_pids(log)
    os.kill(leader, signal.SIGKILL)
    assert (await node.died()).startswith("prefill-0 was killed by SIGKILL; ")
    assert not any(map(alive, children))


async def test_after_a_death_it_can_be_started_again(build: Build) -> None:
    node = build("--exit=0")
    for _ in range(2):
        await node.start()
        assert "exit status 0" in await node.died()


async def test_a_stopped_node_has_not_died(build: Build, log: Path) -> None:
    node = build()
    await node.start()
    await engine_pids(log)
    death = asyncio.create_task(node.died())
    await asyncio.sleep(0)
    await node.stop()
    await asyncio.sleep(0)
    assert not death.done()
    death.cancel()


async def test_a_taken_port_is_found_before_anything_starts(build: Build, log: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        node = build(ports={"cluster.prefill.port": 0, "cluster.prefill.side_channel_port": port})
        with pytest.raises(StartError, match=rf"prefill-0 .*port {port} .*cluster\.prefill\.side_channel_port"):
            await node.start()
    assert os.listdir(log.parent) == []


async def test_a_command_that_cannot_be_run() -> None:
    spec = NodeSpec(name="prefill-1", role=Role.PREFILL, url="http://127.0.0.1:1", command=("/does/not/exist",))
    node = EngineNode(spec, LocalLauncher(log_dir=Path("/dev/null/logs")), {})
    with pytest.raises(StartError, match="prefill-1 cannot be started"):
        await node.start()
