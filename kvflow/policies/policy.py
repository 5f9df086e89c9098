"""A policy: reuse + retention + routing, put together into one pure function from a turn and the view to a plan."""

from dataclasses import dataclass

from kvflow.errors import ConfigError
from kvflow.policies import check
from kvflow.policies.retention import Retention
from kvflow.policies.reuse import Reuse
from kvflow.policies.routing import Routing
from kvflow.types import Handle, NodeState, Path, Plan, Reason, Role, Turn, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Holds no state: the same turn and view always give the same plan."""

    name: str
    reuse: Reuse
    retention: Retention
    routing: Routing

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"policy.name must be a non-empty string, got {self.name!r}")
        check.kind("policy.reuse", self.reuse, Reuse)
        check.kind("policy.retention", self.retention, Retention)
        check.kind("policy.routing", self.routing, Routing)

    def plan(self, turn: Turn, view: View) -> Plan:
        """Raises `NoNodeError` where a role that the turn needs has no node for it."""
        decode = self._decode(turn, view)
        if not turn.splittable:
            return Plan(path=Path.DIRECT, decode=decode.name, reason=Reason.UNSPLITTABLE)
        seconds, share = self._keep(turn, decode)
        if turn.bound_to is not None or self._is_direct(turn, decode, view):
            return Plan(path=Path.DIRECT, decode=decode.name, retain_s=seconds, max_pinned_share=share)
        prefill, reason = self._prefill(turn, view)
        return Plan(
            path=Path.PULL if reason is None else Path.COLD,
            decode=decode.name,
            prefill=prefill.name,
            min_pull_tokens=self.reuse.min_pull_tokens if reason is None else 0,
            retain_s=seconds,
            max_pinned_share=share,
            reason=reason,
        )

    def describe(self) -> list[str]:
        """The policy in plain words, one sentence a part."""
        return [self.reuse.describe(), self._describe_retention(), *self.routing.describe()]

    def _decode(self, turn: Turn, view: View) -> NodeState:
        route = self.routing.decode
        candidates = route.candidates(Role.DECODE, view.decode, turn)
        bound = next((n for n in candidates if n.name == turn.bound_to), None)
        return bound or route.pick(candidates, turn)

    def _is_direct(self, turn: Turn, decode: NodeState, view: View) -> bool:
        """Whether the node that holds the conversation has so little to compute that it should do it alone."""
        handle = turn.handle
        if handle is None or handle.node != decode.name or not decode.prefix_caching:
            return False
        if self._obstacle(handle, view) is not None:
            return False
        # Its prefix cache finds whole blocks, where a pull may end inside one.
        again = handle.tokens % decode.block_size if decode.block_size else 0
        return turn.new_tokens + again < self.reuse.direct_below_tokens

    def _prefill(self, turn: Turn, view: View) -> tuple[NodeState, Reason | None]:
        """The prefill node and why it pulls nothing; a pull may only go to a node that runs the connector."""
        route = self.routing.prefill
        candidates = route.candidates(Role.PREFILL, view.prefill, turn)
        reason = self._obstacle(turn.handle, view)
        if reason is None:
            able = tuple(n for n in candidates if n.bidirectional)
            reason = None if able else Reason.ONE_WAY
            candidates = able or candidates
        return route.pick(candidates, turn), reason

    def _obstacle(self, handle: Handle | None, view: View) -> Reason | None:
        if not self.reuse.enabled:
            return Reason.POLICY
        if handle is None:
            return Reason.NO_HANDLE
        return _unusable(handle, view) or self.reuse.refuse(handle)

    def _keep(self, turn: Turn, decode: NodeState) -> tuple[float, float]:
        keep = self.retention.keep(turn, decode)
        seconds = keep.seconds if turn.max_retain_s is None else min(keep.seconds, turn.max_retain_s)
        wanted = self.reuse.enabled and decode.bidirectional and seconds > 0 and keep.max_pinned_share > 0
        return (seconds, keep.max_pinned_share) if wanted else (0.0, 0.0)

    def _describe_retention(self) -> str:
        return (
            self.retention.describe() if self.reuse.enabled else "Retention: nothing is kept, since nothing is reused."
        )


def _unusable(handle: Handle, view: View) -> Reason | None:
    """Why nobody could pull through `handle`, whatever the policy."""
    node = next((n for n in view.decode if n.name == handle.node), None)
    if node is None or not node.ready or node.epoch != handle.epoch:
        return Reason.NODE_GONE
    if view.now >= handle.deadline:
        return Reason.EXPIRED
    return None if node.bidirectional else Reason.ONE_WAY
