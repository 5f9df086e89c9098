"""Which of several nodes suits a turn better."""

from dataclasses import dataclass

from kvflow.policies import check
from kvflow.policies.handles import holds
from kvflow.policies.routing.base import Nodes
from kvflow.types import NodeState, Turn, View


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

    Overloaded: it has more than `max_extra_legs` legs more under way than the least busy candidate. A weight above the
    sum of all other weights makes this the only reason to leave. Leaving costs no correctness and no recomputation: the
    prefill node pulls from the old node all the same.
    """

    max_extra_legs: int = 8

    def __post_init__(self) -> None:
        check.whole("policy.routing: HoldsConversation.max_extra_legs", self.max_extra_legs)

    def score(self, nodes: Nodes, turn: Turn, view: View) -> tuple[float, ...]:  # noqa: ARG002
        limit = min(n.in_flight for n in nodes) + self.max_extra_legs
        return tuple(float(holds(n, turn) and n.in_flight <= limit) for n in nodes)

    def describe(self) -> str:
        return (
            "the node that holds the conversation, "
            f"unless it has over {self.max_extra_legs} legs more under way than the least busy one"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsPrefix:
    """The share of the prompt that the node is believed to have in its prefix cache; 0 once the node is overloaded.

    Overloaded: as in `HoldsConversation`. A prefix that many conversations share would otherwise draw all of them to
    the node that had it first. For prefill nodes.
    """

    max_extra_legs: int = 8

    def __post_init__(self) -> None:
        check.whole("policy.routing: HoldsPrefix.max_extra_legs", self.max_extra_legs)

    def score(self, nodes: Nodes, turn: Turn, view: View) -> tuple[float, ...]:  # noqa: ARG002
        limit = min(n.in_flight for n in nodes) + self.max_extra_legs
        return tuple(_cached_share(n, turn) if n.in_flight <= limit else 0.0 for n in nodes)

    def describe(self) -> str:
        return (
            "the node that has most of the prompt cached, "
            f"unless it has over {self.max_extra_legs} legs more under way than the least busy one"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FewestFailures:
    """1 for a node without recent failures, half for one with one, a third for one with two, and so on.

    A failure counts for less the longer ago it was, so a node that has failed comes back by and by.
    """

    def score(self, nodes: Nodes, turn: Turn, view: View) -> tuple[float, ...]:  # noqa: ARG002
        return tuple(1 / (1 + max(0.0, n.recent_failures)) for n in nodes)

    def describe(self) -> str:
        return "fewest recent failures"


def _pinned_share(node: NodeState) -> float:
    if node.blocks is None or node.blocks.total <= 0:
        return 0.0
    return min(1.0, node.blocks.pinned / node.blocks.total)


def _cached_share(node: NodeState, turn: Turn) -> float:
    return max(0.0, min(1.0, turn.cached.get(node.name, 0) / max(1, turn.prompt_tokens)))
