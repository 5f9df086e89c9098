"""Routing over many nodes: no hot spot, and what belongs together stays together."""

import asyncio
import random
from dataclasses import replace

import pytest

from benchmarks.routing.play import Mix, play
from benchmarks.routing.variants import Variant, varied
from kvflow.nodes.simulated import Settings, Speed
from kvflow.types import Role
from tests.cluster import BLOCK, Cluster, Message, cluster, say, shipped_policy, text
from tests.policies.build import decode, prefill, turn, view

BALANCED = shipped_policy("balanced")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("load", [8, 32, 96])
@pytest.mark.parametrize("name", ["balanced", "adaptive"])
def test_no_hot_spot_under_a_skewed_mix_and_conversations_stay_together(name: str, load: int, seed: int) -> None:
    result = play(shipped_policy(name), Mix(load=load, turns=1200, seed=seed))
    assert result.imbalance(Role.PREFILL) < 1.3
    assert result.imbalance(Role.DECODE) < 1.3
    assert result.together > 0.9 * result.held > 0


@pytest.mark.parametrize("load", [8, 32, 96])
def test_prefixes_are_found_where_they_were_computed(load: int) -> None:
    mix = Mix(load=load, turns=1200, seed=1)
    with_affinity, without = play(BALANCED, mix), play(varied(BALANCED, Variant.NONE), mix)
    assert with_affinity.prefix_tokens > 1.1 * without.prefix_tokens


async def test_a_whole_kvflow_of_twelve_nodes_has_no_hot_spot() -> None:
    """Turns that each node has answered, where a third of all are of two of forty conversations."""
    chance = random.Random(3)
    histories: list[list[Message]] = [say(f"{i} " + text(80, f"c{i}")) for i in range(40)]
    free = set(range(40))

    def settings(_: Role) -> Settings:
        return Settings(block_size=BLOCK, speed=Speed(prefill=20_000, decode=600, transfer=400_000))

    async def user(c: Cluster, turns: int) -> None:
        for _ in range(turns):
            number = chance.choices(sorted(free), [1 / (1 + i) for i in sorted(free)])[0]
            free.discard(number)
            messages = histories[number]
            answer = await c.chat(messages, max_tokens=20, ignore_eos=True)
            messages += [{"role": "assistant", "content": answer.text}, *say(text(20, "more"))]
            free.add(number)

    async with cluster(prefill=4, decode=8, settings=settings) as c:
        await asyncio.gather(*(user(c, 25) for _ in range(12)))
        for role, count in ((Role.PREFILL, 4), (Role.DECODE, 8)):
            turns = [
                sum(r.path == "/v1/chat/completions" for r in n.app.received)
                for n in c.nodes.values()
                if n.spec.role is role
            ]
            assert sum(turns) >= 290
            assert max(turns) / (sum(turns) / count) < 1.3, turns
        c.check()


def test_the_same_seed_plays_the_same() -> None:
    mix = Mix(load=8, turns=100)
    assert play(BALANCED, mix).to_json() == play(BALANCED, mix).to_json()


def test_a_node_that_failed_gets_fewer_turns_and_comes_back() -> None:
    def share(failures: float) -> int:
        nodes = [prefill(f"prefill-{i}") for i in range(4)]
        nodes[0] = replace(nodes[0], recent_failures=failures)
        world = view(*nodes, decode())
        return sum(BALANCED.plan(turn(prompt_tokens=n), world).prefill == "prefill-0" for n in range(100, 300))

    assert share(3.0) == 0
    assert share(0.0) > 25, "of 200 over four nodes"
