"""Scorers that go by predicted time, by cached prefixes and by failures."""

from dataclasses import replace
from math import inf, nan

import pytest

from kvflow.errors import ConfigError
from kvflow.policies import FewestFailures, HoldsPrefix, Soonest
from kvflow.types import Cost, NodeState, View
from tests.policies.build import decode, handle, prefill, turn, view

COMPUTE = Cost(fixed_s=0.0, token_s=1e-3, samples=5)
FREE = Cost(fixed_s=0.0, token_s=0.0, samples=5)
MOVE = Cost(fixed_s=0.1, token_s=0.0, samples=5)


def node(name: str, cost: Cost = COMPUTE, free_at: float = 0.0, bidirectional: bool = True) -> NodeState:
    return prefill(name, compute=cost, overhead=FREE, free_at=free_at, bidirectional=bidirectional)


def scored(*nodes: NodeState, **fields: object) -> tuple[float, ...]:
    there = replace(view(*nodes, decode()), transfers={("decode-0", n.name): MOVE for n in nodes})
    return Soonest().score(nodes, turn(prompt_tokens=1000, **fields), there)


def test_the_faster_node_is_sooner() -> None:
    assert scored(node("a"), node("b", Cost(fixed_s=0.0, token_s=4e-3))) == pytest.approx((1.0, 0.25))


def test_a_queue_counts_as_long_as_it_lasts() -> None:
    assert scored(node("a", free_at=103.0), node("b"), node("c", free_at=99.0)) == pytest.approx((0.25, 1.0, 1.0))


def test_what_is_cached_need_not_be_computed() -> None:
    assert scored(node("a"), node("b"), cached={"b": 500}) == pytest.approx((0.5, 1.0))


def test_what_can_be_pulled_need_not_be_computed() -> None:
    held = {"handle": handle(tokens=900), "new_tokens": 100}
    assert scored(node("a"), node("stock", bidirectional=False), **held) == pytest.approx((1.0, 0.2))
    gone = {"handle": handle(tokens=900, epoch="e0"), "new_tokens": 100}
    assert scored(node("a"), node("stock", bidirectional=False), **gone) == (1.0, 1.0)


def test_a_pull_that_is_slower_than_computing_is_not_counted() -> None:
    held = {"handle": handle(tokens=50), "new_tokens": 950}
    assert scored(node("a"), node("stock", bidirectional=False), **held) == (1.0, 1.0)


@pytest.mark.parametrize("bad", [nan, inf, -1.0])
def test_nonsense_in_the_estimates_gives_scores_all_the_same(bad: float) -> None:
    scores = scored(node("a", Cost(fixed_s=bad, token_s=bad), free_at=bad), node("b", FREE), node("c"))
    assert all(0 <= s <= 1 for s in scores)
    assert max(scores) == 1


# Prefixes


def prefixes(*in_flight: int, **cached: int) -> tuple[float, ...]:
    nodes = tuple(prefill(name, in_flight=n) for name, n in zip("abc", in_flight, strict=False))
    return HoldsPrefix(max_extra_legs=2).score(nodes, turn(prompt_tokens=1000, cached=cached), view())


def test_the_share_of_the_prompt_that_is_cached() -> None:
    assert prefixes(0, 0, 0, a=250, b=5000, x=9) == (0.25, 1.0, 0.0)


@pytest.mark.parametrize(("legs", "expected"), [(3, 0.5), (4, 0.0)])
def test_a_popular_prefix_does_not_overload_a_node(legs: int, expected: float) -> None:
    assert prefixes(legs, 1, a=500) == (expected, 0.0)


# Failures


def test_failures_are_forgotten_by_and_by() -> None:
    nodes = (decode("a"), decode("b", recent_failures=1.0), decode("c", recent_failures=0.25))
    assert FewestFailures().score(nodes, turn(), view()) == (1.0, 0.5, 0.8)


def test_bad_values_are_refused_by_key() -> None:
    with pytest.raises(ConfigError, match=r"^policy.routing: HoldsPrefix.max_extra_legs must be at least 0, got -1$"):
        HoldsPrefix(max_extra_legs=-1)


def test_descriptions_name_what_is_preferred() -> None:
    words = [s.describe() for s in (Soonest(), HoldsPrefix(max_extra_legs=3), FewestFailures())]
    assert words[0] == "the soonest to have computed the prompt"
    assert "3 legs" in words[1]
    assert words[2] == "fewest recent failures"


def test_empty_prompts_are_scored_too() -> None:
    nodes = (node("a"), node("b"))
    empty = View(now=100.0, prefill=nodes, decode=(decode(),))
    for scorer in (Soonest(), HoldsPrefix()):
        assert len(scorer.score(nodes, turn(prompt_tokens=0), empty)) == 2
