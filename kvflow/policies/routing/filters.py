"""Which nodes may take a turn."""

from dataclasses import dataclass

from kvflow.policies import check
from kvflow.policies.routing.base import Nodes
from kvflow.types import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Hard: a node that does not answer takes nothing."""

    def keep(self, nodes: Nodes, turn: Turn) -> Nodes:  # noqa: ARG002
        return tuple(n for n in nodes if n.ready)

    def describe(self) -> str:
        return "ready nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFailing:
    """Soft: leave out nodes whose last `failures` legs all failed, unless that leaves out every node."""

    failures: int = 3

    def __post_init__(self) -> None:
        check.whole("policy.routing: NotFailing.failures", self.failures, low=1)

    def keep(self, nodes: Nodes, turn: Turn) -> Nodes:  # noqa: ARG002
        return tuple(n for n in nodes if n.failures < self.failures) or nodes

    def describe(self) -> str:
        return f"if possible nodes with fewer than {self.failures} failures in a row"
