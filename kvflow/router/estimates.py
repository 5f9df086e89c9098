"""What computing, moving and all else costs on each node, learned from every leg.

Pure: it is told what was measured, and has no clock. What was never measured on a node, or between two, is taken from
all nodes of its role, or all pairs of that direction; where nothing was measured at all, it is the guess of
`kvflow.types`. Computing on decode nodes, most likely of the same hardware, is taken from the prefill nodes, and so is
what it takes for each token while they have only computed the last ones of prompts. `Cost.samples` counts the
measurements behind the number, wherever they were made.
"""

from collections.abc import Iterator, Mapping

from kvflow.router.fit import Fit
from kvflow.types import COMPUTE_GUESS, OVERHEAD_GUESS, TRANSFER_GUESS, Cost, Role

Pair = tuple[str, str]


class Transfers(Mapping[Pair, Cost]):
    """A snapshot. Lists the pairs that were measured, and answers for all pairs between the two pools."""

    def __init__(self, roles: Mapping[str, Role], pairs: Mapping[Pair, Cost], directions: Mapping[Role, Cost]) -> None:
        self._roles = roles
        self._pairs = pairs
        self._directions = directions
        """By the role of the node that the KV leaves."""

    def __getitem__(self, pair: Pair) -> Cost:
        found = self._pairs.get(pair)
        return self._directions[self._roles[pair[0]]] if found is None else found

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


class Estimates:
    """Of the nodes of one router, whose roles never change. One event loop owns an instance."""

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self._roles = dict(roles)
        self._compute: dict[str, Fit] = {}
        self._overhead: dict[str, Fit] = {}
        self._pairs: dict[Pair, Fit] = {}
        self._compute_of = {role: Fit(COMPUTE_GUESS, pairs=True) for role in Role}
        self._overhead_of = {role: Fit(OVERHEAD_GUESS, pairs=False) for role in Role}
        self._from = {role: Fit(TRANSFER_GUESS, pairs=False) for role in Role}
        self._snapshot: Transfers | None = None

    def compute(self, node: str) -> Cost:
        own = self._compute.get(node)
        return own.cost if own and own.cost.samples else self._compute_in(self._roles[node])

    def _compute_in(self, role: Role) -> Cost:
        """Of a node of that role of which nothing is known."""
        cost = self._compute_of[role].cost
        return self._compute_of[Role.PREFILL].cost if role is Role.DECODE and not cost.samples else cost

    def overhead(self, node: str) -> Cost:
        own = self._overhead.get(node)
        return own.cost if own and own.cost.samples else self._overhead_of[self._roles[node]].cost

    def transfers(self) -> Transfers:
        if self._snapshot is None:
            pairs = {pair: fit.cost for pair, fit in self._pairs.items() if fit.cost.samples}
            self._snapshot = Transfers(self._roles, pairs, {role: fit.cost for role, fit in self._from.items()})
        return self._snapshot

    def computed(self, node: str, tokens: int, context: int, seconds: float) -> None:
        """A node computed `tokens` behind `context` others in so many seconds."""
        role = self._roles[node]
        pool = self._compute_of[role]
        if role is Role.DECODE:  # mostly they compute one token; how more would be is for the prefill nodes to say
            pool.lean_on(self._compute_of[Role.PREFILL].cost)
        pool.learn(tokens, context, seconds)
        own = self._compute.setdefault(node, Fit(COMPUTE_GUESS, pairs=True))
        own.lean_on(self._compute_in(role))
        own.learn(tokens, context, seconds)

    def took(self, node: str, prompt_tokens: int, seconds: float) -> None:
        """A leg took so many seconds beyond the engine's own account of it."""
        pool = self._overhead_of[self._roles[node]]
        pool.learn(prompt_tokens, 0, seconds)
        own = self._overhead.setdefault(node, Fit(OVERHEAD_GUESS, pairs=False))
        own.lean_on(pool.cost)
        own.learn(prompt_tokens, 0, seconds)

    def moved(self, source: str, target: str, tokens: int, seconds: float) -> None:
        """KV of `tokens` went from one node to another. What is between nodes that are not known here is nothing."""
        if source not in self._roles or target not in self._roles:
            return
        pool, pair = self._from[self._roles[source]], (source, target)
        pool.learn(tokens, 0, seconds)
        own = self._pairs.setdefault(pair, Fit(TRANSFER_GUESS, pairs=False))
        own.lean_on(pool.cost)
        own.learn(tokens, 0, seconds)
        self._snapshot = None

    def restarted(self, node: str) -> None:
        """Another process, perhaps on another machine: what was learned of the last one is where this one begins."""
        fits = [self._compute.get(node), self._overhead.get(node)]
        fits += [fit for pair, fit in self._pairs.items() if node in pair]
        for fit in fits:
            if fit is not None:
                fit.restart()
