import asyncio
from typing import Any

import pytest

from kvflow.errors import RequestError
from kvflow.nodes.simulated import ManualClock
from kvflow.tenants import Limits, Tenant
from kvflow.tenants.gate import Gate
from tests.cluster import shipped_policy

POLICY = shipped_policy("off")


def tenant(**limits: Any) -> Tenant:
    return Tenant(name="acme", policy=POLICY, limits=Limits(**limits))


class Turns:
    """Turns that go through a gate, each until it is told to end."""

    def __init__(self, limited: Tenant) -> None:
        self.clock = ManualClock()
        self.gate = Gate(self.clock.now)
        self.limited = limited
        self.begun: list[int] = []
        self.ends: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def come(self, number: int) -> None:
        self.ends[number] = asyncio.Event()
        self.tasks[number] = asyncio.create_task(self._turn(number))
        await settle()

    async def end(self, number: int) -> None:
        self.ends[number].set()
        await settle()

    async def leave(self, number: int) -> None:
        self.tasks[number].cancel()
        await settle()

    async def _turn(self, number: int) -> None:
        async with self.gate.turn(self.limited):
            self.begun.append(number)
            await self.ends[number].wait()

    @property
    def counts(self) -> tuple[int, int]:
        return self.gate.under_way("acme"), self.gate.waiting("acme")


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_turns_beyond_the_limit_begin_in_the_order_in_which_they_came() -> None:
    turns = Turns(tenant(max_turns=2, max_wait_s=60))
    for number in range(5):
        await turns.come(number)
    assert (turns.begun, turns.counts) == ([0, 1], (2, 3))
    await turns.end(1)
    assert (turns.begun, turns.counts) == ([0, 1, 2], (2, 2))
    for number in (0, 2, 3, 4):
        await turns.end(number)
    assert (turns.begun, turns.counts) == ([0, 1, 2, 3, 4], (0, 0))


async def test_without_a_limit_everybody_begins() -> None:
    turns = Turns(tenant())
    for number in range(100):
        await turns.come(number)
    assert turns.counts == (100, 0)
    for number in range(100):
        await turns.end(number)
    assert turns.counts == (0, 0)


async def test_beyond_the_line_turns_are_refused_at_once() -> None:
    turns = Turns(tenant(max_turns=1, max_waiting=1, max_wait_s=60))
    await turns.come(0)
    turns.gate.check(turns.limited)
    await turns.come(1)
    with pytest.raises(RequestError) as early:
        turns.gate.check(turns.limited)
    await turns.come(2)
    with pytest.raises(RequestError) as e:
        await turns.tasks[2]
    assert str(e.value) == str(early.value)
    assert (e.value.status, e.value.kind) == (429, "RateLimitError")
    assert "1 turns of tenant 'acme' are under way" in str(e.value)
    assert e.value.retry_after is not None
    assert 1 <= e.value.retry_after <= 60
    for number in (0, 1):
        await turns.end(number)
    assert turns.counts == (0, 0)


async def test_who_has_waited_for_too_long_is_refused_and_keeps_no_place() -> None:
    turns = Turns(tenant(max_turns=1, max_wait_s=0))
    await turns.come(0)
    await turns.come(1)
    with pytest.raises(RequestError, match="none of them ended within 0 s"):
        await turns.tasks[1]
    assert turns.counts == (1, 0)
    await turns.end(0)
    await turns.come(2)
    assert turns.begun == [0, 2]
    await turns.end(2)


async def test_a_client_that_leaves_the_line_makes_room() -> None:
    turns = Turns(tenant(max_turns=1, max_wait_s=60))
    for number in range(3):
        await turns.come(number)
    await turns.leave(1)
    assert turns.counts == (1, 1)
    await turns.end(0)
    assert turns.begun == [0, 2]
    await turns.end(2)
    assert turns.counts == (0, 0)


async def test_a_place_that_is_handed_to_a_client_that_leaves_goes_to_the_next() -> None:
    turns = Turns(tenant(max_turns=1, max_wait_s=60))
    for number in range(3):
        await turns.come(number)
    turns.ends[0].set()
    while turns.gate.waiting("acme") == 2:  # noqa: ASYNC110 - the place is handed over, and nobody has taken it yet
        await asyncio.sleep(0)
    await turns.leave(1)
    assert 2 in turns.begun
    for number in (1, 2):
        await turns.end(number)
    assert turns.counts == (0, 0)


async def test_a_turn_that_fails_gives_its_place_back() -> None:
    gate = Gate(ManualClock().now)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            async with gate.turn(tenant(max_turns=1)):
                raise ZeroDivisionError
    assert gate.under_way("acme") == 0


async def test_tenants_do_not_wait_for_each_other() -> None:
    gate = Gate(ManualClock().now)
    other = Tenant(name="globex", policy=POLICY, limits=Limits(max_turns=1))
    async with gate.turn(tenant(max_turns=1)), gate.turn(other):
        assert (gate.under_way("acme"), gate.under_way("globex")) == (1, 1)
