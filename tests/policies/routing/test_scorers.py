"""Scorers that go by predicted time, by cached prefixes and by failures."""

from dataclasses import replace
from math import inf, nan

import pytest

from kvflow.errors import ConfigError
from kvflow.policies import FewestFailures, HoldsConversation, HoldsPrefix, LeastWorked, Soonest
from kvflow.types import Cost, NodeState, View, Worked
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


def worked(name: str, seconds: float, moment: float = 100.0) -> NodeState:
    return decode(name, worked=Worked(seconds, moment))


def test_who_has_done_least_of_late_is_preferred() -> None:
    nodes = (worked("a", 10), worked("b", 20), worked("c", 30))
    assert LeastWorked().score(nodes, turn(), view()) == pytest.approx((1.0, 0.75, 0.6))
    assert LeastWorked().score((decode("a"), decode("b")), turn(), view()) == (1.0, 1.0)


def test_work_counts_for_half_as_much_a_minute_later() -> None:
    done = Worked(8.0, 100.0)
    assert (done.now(100.0), done.now(160.0), done.now(220.0)) == (8.0, 4.0, 2.0)
    assert done.plus(1.0, 160.0) == Worked(5.0, 160.0)
    assert done.now(50.0) == 8.0, "a clock that goes back makes nothing of nothing"
    nodes = (worked("a", 40, moment=100.0 - 120.0), worked("b", 10))
    assert LeastWorked().score(nodes, turn(), view(now=100.0)) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(("seconds", "expected"), [(11.9, 1.0), (14.0, 0.0)])
def test_the_holder_gives_way_when_it_has_done_more_than_its_part(seconds: float, expected: float) -> None:
    nodes = (worked("decode-0", seconds), worked("decode-1", 8.0), worked("decode-2", 10.0))
    assert HoldsConversation(max_work=1.2).score(nodes, turn(handle=handle()), view())[0] == expected
    assert HoldsPrefix(max_work=1.2).score(nodes, turn(cached={"decode-0": 1200}), view())[0] == expected


def test_where_hardly_anything_was_done_nobody_has_done_too_much() -> None:
    nodes = (worked("decode-0", 1.9), worked("decode-1", 0.0))
    assert HoldsConversation().score(nodes, turn(handle=handle()), view()) == (1.0, 0.0)


@pytest.mark.parametrize("scorer", [HoldsConversation, HoldsPrefix])
def test_less_than_its_part_cannot_be_too_much(scorer: type) -> None:
    with pytest.raises(ConfigError, match=f"{scorer.__name__}.max_work must be at least 1, got 0.9"):
        scorer(max_work=0.9)


@pytest.mark.parametrize(("wait", "expected"), [(0.4, 0.5), (0.6, 0.0)])
def test_a_cached_prefix_is_not_waited_for_longer_than_computing_it_takes(wait: float, expected: float) -> None:
    """500 tokens at 1 ms each."""
    nodes = (prefill("a", compute=COMPUTE, free_at=100.0 + wait), prefill("b", compute=COMPUTE))
    assert HoldsPrefix().score(nodes, turn(prompt_tokens=1000, cached={"a": 500}), view()) == (expected, 0.0)
