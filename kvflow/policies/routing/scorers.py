"""Which of several nodes suits a turn better."""

from dataclasses import dataclass

from kvflow.policies import check
from kvflow.policies.handles import holds
from kvflow.policies.routing.base import Nodes
from kvflow.types import NodeState, Turn, View

LITTLE_WORK_S = 0.5
"""Differences that are small beside these seconds of work are no reason to prefer a node."""
MIN_WORK_S = 2.0
"""No node is overloaded by less than these seconds of work of late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLoaded:
    """1 for the least loaded node, about half for one with twice its load, and so on towards 0.

    Load is the legs under way plus their prompt tokens, where `tokens_per_leg` queued tokens weigh as much as one leg.
    The ratio, not the difference: one leg more matters on an idle pool and hardly on a busy one.
    """

    tokens_per_leg: int = 2048

    def __post_init__(self) -> None:
        check.whole("policy.routing: LeastLoaded.tokens_per_leg", self.tokens_per_leg, low=1)

    def score(self, nodes: Nodes, turn: Turn, view: View) -> tuple[float, ...]:  # noqa: ARG002
        loads = [1 + n.in_flight + n.queued_tokens / self.tokens_per_leg for n in nodes]
        return tuple(min(loads) / load for load in loads)

    def describe(self) -> str:
        return f"least loaded ({self.tokens_per_leg} queued tokens count as one leg)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastPinned:
    """1 minus the pinned share of the node's blocks; a node that has not reported yet counts as empty."""

    def score(self, nodes: Nodes, turn: Turn, view: View) -> tuple[float, ...]:  # noqa: ARG002
        return tuple(1 - _pinned_share(n) for n in nodes)

    def describe(self) -> str:
        return "fewest pinned blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsConversation:
    """1 for the node that holds the conversation's KV, 0 for all others, and 0 for that node too once it is overloaded.

    Overloaded: it has more than `max_extra_legs` legs more under way than the least busy candidate, or has of late done
    more than `max_work` times the mean, so that a few conversations that never rest make no hot spot. A weight above
    the sum of all other weights makes this the only reason to leave. Leaving costs no correctness and no recomputation:
    the prefill node pulls from the old node all the same.
    """

    max_extra_legs: int = 8
    max_work: float = 1.2

    def __post_init__(self) -> None:
        check.whole("policy.routing: HoldsConversation.max_extra_legs", self.max_extra_legs)
        check.number("policy.routing: HoldsConversation.max_work", self.max_work, low=1)

    def score(self, nodes: Nodes, turn: Turn, view: View) -> tuple[float, ...]:
        free = _not_overloaded(nodes, view, self.max_extra_legs, self.max_work)
        return tuple(float(holds(n, turn) and ok) for n, ok in zip(nodes, free, strict=True))

    def describe(self) -> str:
        return f"the node that holds the conversation, {_unless(self.max_extra_legs, self.max_work)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsPrefix:
    """The share of the prompt that the node is believed to have in its prefix cache; 0 once the node is overloaded.

    Overloaded: as in `HoldsConversation`, or one would wait there longer, compared with the node that is free the
    soonest, than computing those tokens takes. A prefix that many conversations share would otherwise draw all of them
    to the node that had it first. For prefill nodes.
    """

    max_extra_legs: int = 8
    max_work: float = 1.2

    def __post_init__(self) -> None:
        check.whole("policy.routing: HoldsPrefix.max_extra_legs", self.max_extra_legs)
        check.number("policy.routing: HoldsPrefix.max_work", self.max_work, low=1)

    def score(self, nodes: Nodes, turn: Turn, view: View) -> tuple[float, ...]:
        free = _not_overloaded(nodes, view, self.max_extra_legs, self.max_work)
        soonest = min(view.wait_s(n) for n in nodes)
        return tuple(
            _cached_share(n, turn) if ok and view.wait_s(n) - soonest <= _saved_s(n, turn) else 0.0
            for n, ok in zip(nodes, free, strict=True)
        )

    def describe(self) -> str:
        limits = _unless(self.max_extra_legs, self.max_work)
        return f"the node that has most of the prompt cached, {limits} or waiting for it costs more than it saves"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastWorked:
    """1 for the node that has done least of late, less for others by how they compare with the mean.

    Where few turns are under way at a time, `LeastLoaded` finds all nodes idle, and by chance one gets more than its
    share of the conversations that come back.
    """

    def score(self, nodes: Nodes, turn: Turn, view: View) -> tuple[float, ...]:  # noqa: ARG002
        worked = [n.worked.now(view.now) for n in nodes]
        # With too little done by all, what one has done more says nothing, and its cache is worth more.
        unit = max(LITTLE_WORK_S, sum(worked) / len(worked))
        least = min(worked)
        return tuple((least + unit) / (w + unit) for w in worked)

    def describe(self) -> str:
        return "least work of late"


@dataclass(frozen=True, slots=True, kw_only=True)
class FewestFailures:
    """1 for a node without recent failures, half for one with one, a third for one with two, and so on.

    A failure counts for less the longer ago it was, so a node that has failed comes back by and by.
    """

    def score(self, nodes: Nodes, turn: Turn, view: View) -> tuple[float, ...]:  # noqa: ARG002
        return tuple(1 / (1 + max(0.0, n.recent_failures)) for n in nodes)

    def describe(self) -> str:
        return "fewest recent failures"


def _not_overloaded(nodes: Nodes, view: View, max_extra_legs: int, max_work: float) -> list[bool]:
    """With too little done by all, what one has done more says nothing."""
    limit = min(n.in_flight for n in nodes) + max_extra_legs
    worked = [n.worked.now(view.now) for n in nodes]
    most = max(MIN_WORK_S, max_work * sum(worked) / len(worked))
    return [n.in_flight <= limit and w <= most for n, w in zip(nodes, worked, strict=True)]


def _unless(max_extra_legs: int, max_work: float) -> str:
    return (
        f"unless it has over {max_extra_legs} legs more under way than the least busy one "
        f"or has of late done over {max_work:g} times the mean"
    )


def _pinned_share(node: NodeState) -> float:
    if node.blocks is None or node.blocks.total <= 0:
        return 0.0
    return min(1.0, node.blocks.pinned / node.blocks.total)


def _saved_s(node: NodeState, turn: Turn) -> float:
    return node.compute.seconds(turn.cached.get(node.name, 0))


def _cached_share(node: NodeState, turn: Turn) -> float:
    return max(0.0, min(1.0, turn.cached.get(node.name, 0) / max(1, turn.prompt_tokens)))
