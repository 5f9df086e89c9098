"""Routing over many nodes: no hot spot, and what belongs together stays together."""

from dataclasses import replace

import pytest

from benchmarks.routing.play import Mix, play
from benchmarks.routing.variants import Variant, varied
from kvflow.types import Role
from tests.cluster import shipped_policy
from tests.policies.build import decode, prefill, turn, view

BALANCED = shipped_policy("balanced")


@pytest.mark.parametrize("load", [32, 96])
def test_no_hot_spot_under_a_skewed_mix_and_conversations_stay_together(load: int) -> None:
    mix = Mix(load=load, turns=1200, seed=1)
    result, without = play(BALANCED, mix), play(varied(BALANCED, Variant.NONE), mix)
    assert result.imbalance(Role.PREFILL) < 1.3
    assert result.imbalance(Role.DECODE) < 1.3
    assert result.together > 0.9 * result.held > 0
    assert result.prefix_tokens > 1.1 * without.prefix_tokens


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
