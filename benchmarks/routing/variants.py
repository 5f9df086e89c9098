"""A policy as shipped, and the same with its scorers changed."""

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum

from kvflow.policies import Policy
from kvflow.policies.routing import HoldsConversation, HoldsPrefix, Route, Routing, Soonest, Weighted

_HOLDS = (HoldsConversation, HoldsPrefix, Soonest)
_NO_LIMIT = 1_000_000
_ALL_THAT_COUNTS = 1000.0


class Variant(StrEnum):
    SHIPPED = "shipped"
    NONE = "no-affinity"
    ONLY = "only-affinity"


def varied(policy: Policy, variant: Variant) -> Policy:
    change = {Variant.SHIPPED: lambda w: w, Variant.NONE: _without, Variant.ONLY: _only}[variant]
    routing = policy.routing
    return replace(
        policy, routing=Routing(prefill=_each(routing.prefill, change), decode=_each(routing.decode, change))
    )


def _each(route: Route, change: Callable[[Weighted], Weighted]) -> Route:
    return replace(route, scorers=tuple(change(w) for w in route.scorers))


def _without(weighted: Weighted) -> Weighted:
    return replace(weighted, weight=0.0) if isinstance(weighted.scorer, _HOLDS) else weighted


def _only(weighted: Weighted) -> Weighted:
    scorer = weighted.scorer
    if isinstance(scorer, HoldsConversation | HoldsPrefix):
        boundless = replace(scorer, max_extra_legs=_NO_LIMIT, max_work=_NO_LIMIT)
        return Weighted(scorer=boundless, weight=_ALL_THAT_COUNTS)
    return weighted
