"""The lives of nodes: real supervisor and fleet, nodes that do as the test says."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kvflow.errors import ConfigError, KvflowError, StartError
from kvflow.nodes.base import NodeSpec
from kvflow.router.fleet import Fleet
from kvflow.router.upstream import EngineError, Upstream
from kvflow.supervision import Supervisor
from kvflow.types import Role
from tests.cluster import until

NEVER = 3600.0
"""No test waits so long."""


@dataclass(eq=False)
class FakeNode:
    """Each `start` does what the next of `lives` says: raise it, come up (True), or stay silent (False)."""

    name: str
    lives: list[Exception | bool] = field(default_factory=list)
    alive: bool = False
    started: int = 0
    stopped: int = 0
    in_start: Callable[[], Awaitable[object]] | None = None
    in_stop: Callable[[], Awaitable[object]] | None = None
    died_error: Exception | None = None
    answers: bool = False
    probe: Callable[[str], Awaitable[object]] | None = None
    end: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""

    @property
    def spec(self) -> NodeSpec:
        return NodeSpec(name=self.name, role=Role.DECODE, url=f"http://{self.name}")

    async def start(self) -> None:
        self.started += 1
        life = self.lives.pop(0) if self.lives else True
        if isinstance(life, Exception):
            raise life
        self.alive, self.end = True, asyncio.Event()
        if self.in_start:
            await self.in_start()
        if life:
            self.answers = True
            assert self.probe
            await self.probe(self.name)

    async def stop(self) -> None:
        self.stopped += 1
        if self.in_stop:
            await self.in_stop()
        self.alive = self.answers = False

    async def died(self) -> str:
        await self.end.wait()
        if self.died_error:
            raise self.died_error
        return self.why

    def die(self, why: str = "a ended.") -> None:
        self.alive = self.answers = False
        self.why = why
        self.end.set()


class FakeUpstream(Upstream):
    """Probes reach the fake nodes."""

    def __init__(self, nodes: tuple[FakeNode, ...]) -> None:
        super().__init__(connect_timeout_s=1, silence_timeout_s=1)
        self._nodes = {n.name: n for n in nodes}

    async def get(self, node: str, url: str, timeout_s: float) -> tuple[int, bytes]:  # noqa: ARG002
        if not self._nodes[node].answers:
            raise EngineError(node, "cannot be reached", reached=False)
        return (200 if url.endswith("/health") else 404), b""


@dataclass
class Run:
    fleet: Fleet
    failures: list[KvflowError] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    now: float = 0.0
    proceed: asyncio.Event = field(default_factory=asyncio.Event)
    """Clear it to hold the pauses."""

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)
        await self.proceed.wait()

    def ready(self, node: FakeNode) -> bool:
        return next(n.ready for n in self.fleet.view().decode if n.name == node.name)


@asynccontextmanager
async def supervised(*nodes: FakeNode, start_timeout_s: float = NEVER) -> AsyncIterator[Run]:
    """Leaves neither a task nor a node behind, or fails."""
    before = asyncio.all_tasks()
    run = Run(Fleet([n.spec for n in nodes], FakeUpstream(nodes), lambda _: None))
    run.proceed.set()
    for node in nodes:
        node.probe = run.fleet.probe
    supervisor = Supervisor(
        nodes, run.fleet, run.failures.append, start_timeout_s=start_timeout_s, sleep=run.sleep, clock=lambda: run.now
    )
    async with supervisor.running():
        yield run
    assert asyncio.all_tasks() <= before
    assert not any(n.alive for n in nodes if not n.in_stop)


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.exc_info]


async def test_a_node_that_dies_is_forgotten_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    a, b = FakeNode("a"), FakeNode("b")
    async with supervised(a, b) as run:
        await until(lambda: run.ready(a) and run.ready(b))
        run.proceed.clear()
        a.die("a was killed by SIGKILL")
        await until(lambda: run.pauses == [1.0])
        assert (run.ready(a), run.ready(b)) == (False, True)
        run.proceed.set()
        await until(lambda: run.ready(a))
        assert (a.started, b.started, b.stopped) == (2, 1, 0)
    assert "starting a again in 1 s: a was killed by SIGKILL" in caplog.text
    assert run.failures == []
    assert tracebacks(caplog) == []


async def test_a_later_life_that_cannot_start_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    a, b = FakeNode("a", [True, StartError("port taken"), StartError("port taken")]), FakeNode("b")
    async with supervised(a, b) as run:
        await until(lambda: run.ready(a) and run.ready(b))
        a.die()
        await until(lambda: run.ready(a) and a.started == 4)
        assert run.pauses == [1.0, 2.0, 4.0]
        assert (run.ready(b), b.started, b.stopped) == (True, 1, 0)
    assert run.failures == []
    assert "starting a again in 2 s: port taken" in caplog.text
    assert tracebacks(caplog) == []


async def test_an_error_that_nobody_foresaw_orphans_no_node(caplog: pytest.LogCaptureFixture) -> None:
    a = FakeNode("a", [True, OSError("no more processes")])
    async with supervised(a) as run:
        await until(lambda: run.ready(a))
        a.die()
        await until(lambda: run.ready(a) and a.started == 3)
        a.died_error = RuntimeError("lost it")
        a.die()
        await until(lambda: a.started == 4)
        a.died_error = None
    assert run.failures == []
    assert tracebacks(caplog) == [
        "starting a again in 2 s: a could not be kept running: OSError: no more processes",
        "starting a again in 4 s: a could not be kept running: RuntimeError: lost it",
    ]


async def test_a_later_life_that_never_gets_ready_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    a = FakeNode("a", [True, False, False])
    async with supervised(a, start_timeout_s=0.01) as run:
        await until(lambda: run.ready(a))
        a.die()
        await until(lambda: run.ready(a) and a.started == 4)
        assert a.stopped == 3
    assert run.pauses == [1.0, 2.0, 4.0]
    assert run.failures == []
    assert (
        "starting a again in 2 s: a was not ready after 0.01 s (cluster.start_timeout_s): it has ended" in caplog.text
    )


async def test_only_time_that_a_node_was_ready_makes_up_for_its_failures() -> None:
    a = FakeNode("a")
    async with supervised(a) as run:

        async def slowly() -> None:
            run.now += 1000

        a.in_start = slowly
        for started, ready_s in enumerate((10, 10, 300, 10), start=1):
            await until(lambda n=started: run.ready(a) and a.started == n)  # type: ignore[misc]
            run.now += ready_s
            a.die()
        await until(lambda: a.started == 5)
    assert run.pauses == [1.0, 2.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("life", "said"),
    [
        (StartError("a cannot start: port taken"), "a cannot start: port taken"),
        (ConfigError("a: no such thing"), "a: no such thing"),
        (OSError("no more processes"), "a could not be kept running: OSError: no more processes"),
        (False, "a was not ready after 0.01 s (cluster.start_timeout_s): it has not answered yet"),
    ],
)
async def test_a_first_life_must_come_up(life: Exception | bool, said: str) -> None:
    a, b = FakeNode("a", [life]), FakeNode("b")
    async with supervised(a, b, start_timeout_s=0.01) as run:
        await until(lambda: bool(run.failures) and run.ready(b))
        assert (a.alive, a.started, b.alive) == (False, 1, True)
    assert [str(e) for e in run.failures] == [said]
    assert not isinstance(life, KvflowError) or run.failures == [life]


async def test_a_death_before_the_node_was_ever_ready_is_told() -> None:
    a, b = FakeNode("a", [False]), FakeNode("b", [False])
    async with supervised(a, b) as run:
        await until(lambda: a.alive and b.alive)
        a.die("a ended with exit status 2")
        b.die("b ended with exit status 3")
        await until(lambda: len(run.failures) == 2)
    assert sorted(map(str, run.failures)) == ["a ended with exit status 2", "b ended with exit status 3"]


async def test_a_node_that_cannot_be_stopped_leaves_the_others_stopped(caplog: pytest.LogCaptureFixture) -> None:
    async def breaks() -> None:
        raise RuntimeError("will not")

    a, b = FakeNode("a", in_stop=breaks), FakeNode("b")
    async with supervised(a, b) as run:
        await until(lambda: run.ready(a) and run.ready(b))
        a.die()
        await until(lambda: a.started == 2 and run.ready(a))
    assert (a.stopped, b.stopped, b.alive) == (2, 1, False)
    assert tracebacks(caplog) == ["a could not be stopped"] * 2


async def test_the_end_may_come_in_a_pause_or_during_a_start() -> None:
    waiting, starting, unborn = FakeNode("a"), FakeNode("b", in_start=asyncio.Event().wait), FakeNode("c")
    async with supervised(waiting, starting) as run:
        await until(lambda: run.ready(waiting) and starting.alive)
        run.proceed.clear()
        waiting.die()
        await until(lambda: run.pauses == [1.0])
    assert (waiting.started, starting.alive) == (1, False)
    async with supervised(unborn):
        pass
    assert not unborn.alive


async def test_the_end_waits_for_a_stop_that_is_under_way() -> None:
    stopping, may_end = asyncio.Event(), asyncio.Event()

    async def slowly() -> None:
        stopping.set()
        await may_end.wait()

    a = FakeNode("a", in_stop=slowly)
    async with supervised(a) as run:
        await until(lambda: run.ready(a))
        a.die()
        await stopping.wait()
        asyncio.get_running_loop().call_later(0.05, may_end.set)
    assert may_end.is_set()
    assert (a.started, a.stopped) == (1, 1)


async def test_nothing_is_said_of_ends_that_were_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    a = FakeNode("a")
    async with supervised(a) as run:
        await until(lambda: run.ready(a))
    assert (a.stopped, caplog.text, run.failures) == (1, "", [])
