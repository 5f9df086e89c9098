"""From an admitted request to a plan: what the router knows about it, put before its tenant's policy."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvflow.conversations import Taken
from kvflow.policies import guard
from kvflow.router.admit import Admitted
from kvflow.router.find import BYTES_PER_TOKEN
from kvflow.router.fleet import Fleet
from kvflow.router.lengths import Lengths
from kvflow.router.metrics import Metrics
from kvflow.router.prefixes import Prefixes
from kvflow.types import Handle, Plan, Reason, Turn, View

log = logging.getLogger("kvflow.router")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and what it was made from."""

    plan: Plan
    turn: Turn
    view: View


class Planning:
    """One event loop owns an instance."""

    def __init__(self, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._lengths = Lengths()
        self._prefixes = Prefixes()

    def turn(self, admitted: Admitted, taken: Taken | None, handle: Handle | None) -> Turn:
        """What a policy may know. `handle` is that of `taken`, as long as it can be used."""
        tenant, prompt = admitted.scope.tenant, admitted.turn.prompt_tokens
        beyond = prompt if taken is None else admitted.keys.tokens_beyond(taken.key)
        return replace(
            admitted.turn,
            handle=handle,
            prompt_tokens=max(1, self._lengths.tokens(tenant, prompt)),
            new_tokens=self._lengths.tokens(tenant, beyond),
            cached=self._cached(admitted),
        )

    def _cached(self, admitted: Admitted) -> Mapping[str, int]:
        found = self._prefixes.find(admitted.keys.prefixes, self._fleet.view().prefill)
        tenant = admitted.scope.tenant
        tokens = {n: self._lengths.tokens(tenant, length // BYTES_PER_TOKEN) for n, length in found.items()}
        return MappingProxyType(tokens)  # a policy sees it, and the legs are counted by it afterwards

    def plan(self, admitted: Admitted, taken: Taken | None, handle: Handle | None, broken: str = "") -> Planned:
        """`broken` is a node that has failed this turn. Raises `NoNodeError`."""
        turn, view = self.turn(admitted, taken, None if broken else handle), self._fleet.view()
        # Nobody else can answer for the node that a turn is bound to.
        view = view if broken == turn.bound_to else view.without(broken)
        policy = admitted.tenant.policy
        decision = guard.decide(policy, turn, view)
        if decision.error is not None:
            log.error("policy %s of tenant %s failed; its turn goes cold: %s", policy.name, turn.tenant, decision.error)
            self._metrics.policy_failed(policy.name)
        plan = decision.plan
        if not admitted.keys.filing:
            plan = replace(plan, retain_s=0.0, max_pinned_share=0.0)  # nobody could find it again
        if broken:
            plan = replace(plan, reason=Reason.RETRIED)
        return Planned(plan=plan, turn=turn, view=view)

    def counted(self, admitted: Admitted, prompt_tokens: int) -> None:
        """An engine has said how long the prompt is."""
        self._lengths.counted(admitted.scope.tenant, admitted.turn.prompt_tokens, prompt_tokens)

    def computed(self, admitted: Admitted, node: str) -> None:
        """A prefill node has computed the prompt."""
        self._prefixes.computed(admitted.keys.prefixes, self._fleet.state(node))
