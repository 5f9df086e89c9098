"""Filters → weighted scorers → picker: the three interfaces of routing. None holds state; the view does."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvflow.types import NodeState, Turn, View

Nodes = tuple[NodeState, ...]


@runtime_checkable
class Filter(Protocol):
    def keep(self, nodes: Nodes, turn: Turn) -> Nodes:
        """Those of `nodes`, in the same order, that may take `turn`.

        A hard filter may keep none, and the turn is refused; a soft one returns all rather than none. `nodes` may be
        empty.
        """

    def describe(self) -> str:
        """A few words: "ready nodes"."""


@runtime_checkable
class Scorer(Protocol):
    def score(self, nodes: Nodes, turn: Turn, view: View) -> tuple[float, ...]:
        """One number from 0 to 1 for each of `nodes`, in their order; more is better. `nodes` is never empty."""

    def describe(self) -> str:
        """A few words that name what is preferred: "least loaded"."""


@runtime_checkable
class Picker(Protocol):
    def pick(self, nodes: Nodes, scores: Sequence[float], turn: Turn) -> NodeState:
        """One of `nodes`, given the weighted sum of scores of each. `nodes` is never empty."""

    def describe(self) -> str:
        """A few words: "the best"."""
