from collections import Counter
from typing import Any

import pytest

from kvflow.errors import ConfigError, NoNodeError
from kvflow.policies import (
    Best,
    HoldsConversation,
    LeastLoaded,
    LeastPinned,
    NotFailing,
    Ready,
    Route,
    Routing,
    Weighted,
)
from kvflow.types import Role
from tests.policies.build import decode, handle, pinned, turn, view


def test_ready_is_hard() -> None:
    up, down = decode("a"), decode("b", ready=False)
    assert Ready().keep((down, up), turn()) == (up,)
    assert Ready().keep((down,), turn()) == ()


def test_not_failing_gives_way_when_all_fail() -> None:
    good, bad = decode("a", failures=2), decode("b", failures=3)
    assert NotFailing(failures=3).keep((good, bad), turn()) == (good,)
    assert NotFailing(failures=3).keep((bad,), turn()) == (bad,)


def test_least_loaded_counts_legs_and_queued_tokens() -> None:
    idle, one_leg, long_prompt = decode("a"), decode("b", in_flight=1), decode("c", in_flight=1, queued_tokens=2000)
    scores = LeastLoaded(tokens_per_leg=1000).score((one_leg, idle, long_prompt), turn(), view())
    assert scores == pytest.approx((1 / 2, 1.0, 1 / 4))


def test_least_pinned_prefers_free_memory() -> None:
    nodes = (decode("a", blocks=pinned(0.25)), decode("b"), decode("c", blocks=pinned(1.0)))
    assert LeastPinned().score(nodes, turn(), view()) == (0.75, 1.0, 0.0)


@pytest.mark.parametrize(("in_flight", "expected"), [(3, 1.0), (4, 1.0), (5, 0.0)])
def test_the_holder_scores_until_it_is_overloaded(in_flight: int, expected: float) -> None:
    nodes = (decode("decode-0", in_flight=in_flight), decode("decode-1", in_flight=1))
    assert HoldsConversation(max_extra_legs=3).score(nodes, turn(handle=handle()), view()) == (expected, 0.0)


def test_a_restarted_engine_holds_nothing() -> None:
    assert HoldsConversation().score((decode("decode-0", epoch="e2"),), turn(handle=handle()), view()) == (0.0,)
    assert HoldsConversation().score((decode("decode-0"),), turn(), view()) == (0.0,)


def test_best_takes_the_highest() -> None:
    nodes = (decode("a"), decode("b"), decode("c"))
    assert Best().pick(nodes, (0.1, 0.9, 0.5), turn()).name == "b"


def test_equals_are_spread_over_all_nodes_and_repeatably() -> None:
    nodes = tuple(decode(f"decode-{i}") for i in range(4))
    turns = [turn(prompt_tokens=i) for i in range(400)]
    picked = [Best().pick(nodes, (1.0,) * 4, t).name for t in turns]
    assert picked == [Best().pick(nodes[::-1], (1.0,) * 4, t).name for t in turns]
    assert min(Counter(picked)[n.name] for n in nodes) > 50


def test_a_node_that_leaves_moves_no_turn_between_the_others() -> None:
    nodes = tuple(decode(f"decode-{i}") for i in range(4))
    for t in (turn(prompt_tokens=i) for i in range(50)):
        before = Best().pick(nodes, (1.0,) * 4, t)
        if before.name != "decode-3":
            assert Best().pick(nodes[:3], (1.0,) * 3, t) == before


def test_weights_decide_between_scorers() -> None:
    loaded = decode("loaded", in_flight=1, blocks=pinned(0.0))
    full = decode("full", blocks=pinned(1.0))

    def pick(load: float, pins: float) -> str:
        scorers = [Weighted(scorer=LeastLoaded(), weight=load), Weighted(scorer=LeastPinned(), weight=pins)]
        return Route(scorers=scorers).pick((loaded, full), turn(), view()).name

    assert pick(load=3, pins=1) == "full"
    assert pick(load=1, pins=3) == "loaded"


def test_without_filters_and_scorers_any_node_will_do() -> None:
    node = decode("a", ready=False)
    route = Route()
    assert route.pick(route.candidates(Role.DECODE, (node,), turn()), turn(), view()) is node


def test_the_filter_that_leaves_none_is_named() -> None:
    with pytest.raises(NoNodeError, match="No decode node can take the request: none of 1 is among the ready nodes"):
        Route(filters=[Ready()]).candidates(Role.DECODE, (decode(ready=False),), turn())


def test_a_list_given_to_a_route_is_not_kept() -> None:
    filters: list[Any] = [Ready()]
    route = Route(filters=filters)
    filters.clear()
    assert route.filters == (Ready(),)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Weighted(scorer=LeastLoaded(), weight=-1),
            "policy.routing: Weighted.weight must be at least 0, got -1",
        ),
        (
            lambda: Weighted(scorer=Ready(), weight=1),  # type: ignore[arg-type]
            "policy.routing: Weighted.scorer must be a Scorer, got Ready",
        ),
        (
            lambda: HoldsConversation(max_extra_legs=-1),
            "policy.routing: HoldsConversation.max_extra_legs must be at least 0, got -1",
        ),
        (
            lambda: LeastLoaded(tokens_per_leg=0),
            "policy.routing: LeastLoaded.tokens_per_leg must be at least 1, got 0",
        ),
        (lambda: NotFailing(failures=0), "policy.routing: NotFailing.failures must be at least 1, got 0"),
        (
            lambda: Route(filters=[LeastLoaded()]),  # type: ignore[list-item]
            "policy.routing: filters[0] must be a Filter, got LeastLoaded",
        ),
        (
            lambda: Route(scorers=[LeastLoaded()]),  # type: ignore[list-item]
            "policy.routing: scorers[0] must be a Weighted, got LeastLoaded",
        ),
        (lambda: Route(filters=5), "policy.routing: filters must be a list, got int"),  # type: ignore[arg-type]
        (lambda: Route(picker=Ready()), "policy.routing: picker must be a Picker, got Ready"),  # type: ignore[arg-type]
        (
            lambda: Routing(prefill=Route(), decode=None),  # type: ignore[arg-type]
            "policy.routing.decode must be a Route, got NoneType",
        ),
    ],
)
def test_bad_values_are_refused_by_key(build: Any, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        build()
    assert str(e.value) == message


def test_description_has_the_numbers() -> None:
    words = Route(
        filters=[Ready(), NotFailing(failures=3)],
        scorers=[Weighted(scorer=HoldsConversation(max_extra_legs=8), weight=4), Weighted(scorer=LeastPinned())],
    ).describe()
    assert words == (
        "the best of ready nodes and if possible nodes with fewer than 3 failures in a row, preferring "
        "the node that holds the conversation, unless it has over 8 legs more under way than the least busy one "
        "or has of late done over 1.2 times the mean (weight 4), fewest pinned blocks (weight 1)"
    )
