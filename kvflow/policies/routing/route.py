"""How a node is chosen, for each role."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvflow.errors import ConfigError, NoNodeError
from kvflow.policies import check
from kvflow.policies.routing.base import Filter, Nodes, Picker, Scorer
from kvflow.policies.routing.pickers import Best
from kvflow.types import NodeState, Role, Turn, View

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """A scorer and how much it counts among the others; with `weight` 0 it is switched off."""

    scorer: Scorer
    weight: float = 1.0

    def __post_init__(self) -> None:
        check.kind("policy.routing: Weighted.scorer", self.scorer, Scorer)
        check.number("policy.routing: Weighted.weight", self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """What the picker is shown, and what that is made of."""

    nodes: Nodes
    scores: tuple[Sequence[float], ...]
    """For each scorer of the route, those of all nodes."""
    sums: tuple[float, ...]
    """Weighted, for each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """All filters in order, then the weighted sum of all scorers, then the picker."""

    filters: Sequence[Filter] = ()
    scorers: Sequence[Weighted] = ()
    picker: Picker = field(default_factory=Best)

    def __post_init__(self) -> None:
        object.__setattr__(self, "filters", _items("filters", self.filters, Filter))
        object.__setattr__(self, "scorers", _items("scorers", self.scorers, Weighted))
        check.kind("policy.routing: picker", self.picker, Picker)

    def candidates(self, role: Role, pool: Nodes, turn: Turn) -> Nodes:
        """The nodes of `pool` that may take `turn`.

        Raises `NoNodeError`, naming `role` and the filter that left none.
        """
        if not pool:
            raise NoNodeError(f"There is no {role} node.")
        nodes = pool
        for f in self.filters:
            nodes = f.keep(nodes, turn)
            if not nodes:
                which = f"none of {len(pool)} is among the {f.describe()}"
                raise NoNodeError(f"No {role} node can take the request: {which}.")
        return nodes

    def left_out(self, pool: Nodes, turn: Turn) -> dict[str, str]:
        """By the names of those nodes of `pool` that are no candidates: the words of the filter that left them out."""
        out: dict[str, str] = {}
        nodes = pool
        for f in self.filters:
            kept = f.keep(nodes, turn)
            names = {n.name for n in kept}
            out.update({n.name: f.describe() for n in nodes if n.name not in names})
            nodes = kept
        return out

    def rate(self, candidates: Nodes, turn: Turn, view: View) -> "Rated":
        """Every scorer's opinion of every candidate. `candidates` is not empty."""
        scores = tuple(w.scorer.score(candidates, turn, view) for w in self.scorers)
        sums = [0.0] * len(candidates)
        for w, column in zip(self.scorers, scores, strict=True):
            sums = [a + w.weight * b for a, b in zip(sums, column, strict=True)]
        return Rated(nodes=candidates, scores=scores, sums=tuple(sums))

    def pick(self, candidates: Nodes, turn: Turn, view: View) -> NodeState:
        """One of `candidates`, which is not empty."""
        rated = self.rate(candidates, turn, view)
        return self.picker.pick(rated.nodes, rated.sums, turn)

    def describe(self) -> str:
        scorers = ", ".join(f"{w.scorer.describe()} (weight {w.weight:g})" for w in self.scorers if w.weight)
        among = " and ".join(f.describe() for f in self.filters)
        return f"{self.picker.describe()} of {among or 'all nodes'}, preferring {scorers or 'none'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    prefill: Route
    decode: Route

    def __post_init__(self) -> None:
        check.kind("policy.routing.prefill", self.prefill, Route)
        check.kind("policy.routing.decode", self.decode, Route)

    def describe(self) -> list[str]:
        return [
            f"Prefill: {self.prefill.describe()}.",
            f"Decode: {self.decode.describe()}.",
        ]


def _items(key: str, items: object, wanted: type[T]) -> tuple[T, ...]:
    """Configuration hands over lists; the parts keep tuples, so that nobody can change them later."""
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise ConfigError(f"policy.routing: {key} must be a list, got {type(items).__name__}")
    for i, item in enumerate(items):
        check.kind(f"policy.routing: {key}[{i}]", item, wanted)
    return tuple(items)
