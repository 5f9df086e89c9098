"""A policy: reuse + retention + routing, put together into one pure function from a turn and the view to a plan."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvflow.errors import ConfigError, NoNodeError
from kvflow.policies import check, handles
from kvflow.policies.explain import Explanation, explain
from kvflow.policies.retention import Retention
from kvflow.policies.reuse import Option, Reuse
from kvflow.policies.routing import Routing
from kvflow.policies.routing.base import Nodes
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
        decode = self.decode_node(turn, view)
        if not turn.splittable:
            return Plan(path=Path.DIRECT, decode=decode.name, reason=Reason.UNSPLITTABLE)
        seconds, share = self._keep(turn, decode)
        if turn.bound_to is not None:
            return Plan(path=Path.DIRECT, decode=decode.name, retain_s=seconds, max_pinned_share=share)
        choice = self.reuse.choose(turn, self.options(turn, decode, view), view)
        option = choice.option
        return Plan(
            path=option.path,
            decode=option.decode.name,
            prefill=option.prefill.name if option.prefill else None,
            min_pull_tokens=choice.min_pull_tokens,
            retain_s=seconds,
            max_pinned_share=share,
            reason=choice.reason or option.reason,
        )

    def decode_node(self, turn: Turn, view: View) -> NodeState:
        """The node that answers. Raises `NoNodeError`."""
        # Before all filters: no other node could answer.
        bound = next((n for n in view.decode if n.name == turn.bound_to and n.ready), None)
        if bound is not None:
            return bound
        route = self.routing.decode
        return route.pick(route.candidates(Role.DECODE, view.decode, turn), turn, view)

    def options(self, turn: Turn, decode: NodeState, view: View) -> tuple[Option, ...]:
        """What is possible for a turn that `decode` is to answer. Raises `NoNodeError` where nothing is."""
        obstacle = self.obstacle(turn.handle, view)
        direct = [] if obstacle else self._direct(turn, decode)
        try:
            return (*self._split(turn, decode, obstacle, view), *direct)
        except NoNodeError:
            if not direct:
                raise
            return tuple(direct)

    def prefill_candidates(self, turn: Turn, obstacle: Reason | None, view: View) -> tuple[Nodes, Reason | None]:
        """Prefill nodes that may take the turn, only those that can pull where it can be one of them; and why not.

        Raises `NoNodeError`.
        """
        candidates = self.routing.prefill.candidates(Role.PREFILL, view.prefill, turn)
        if obstacle is not None:
            return candidates, obstacle
        able = tuple(n for n in candidates if n.bidirectional)
        return able or candidates, None if able else Reason.ONE_WAY

    def explain(self, turn: Turn, view: View) -> Explanation:
        """`plan` with everything that led to it. Never raises `NoNodeError`: that is an explanation too."""
        return explain(self, turn, view)

    def describe(self) -> list[str]:
        """The policy in plain words, one sentence a part."""
        return [self.reuse.describe(), self._describe_retention(), *self.routing.describe()]

    def _direct(self, turn: Turn, decode: NodeState) -> list[Option]:
        """Leaving the turn to the node that holds its conversation, if that node would find what it holds."""
        handle = turn.handle
        if handle is None or handle.node != decode.name or not decode.prefix_caching:
            return []
        # Its prefix cache finds whole blocks, where a pull may end inside one.
        again = handle.tokens % decode.block_size if decode.block_size else 0
        return [Option(path=Path.DIRECT, decode=decode, computed_tokens=turn.new_tokens + again)]

    def _split(self, turn: Turn, decode: NodeState, obstacle: Reason | None, view: View) -> Iterator[Option]:
        """Cold, and pull where there is a node that can; both on the same prefill node."""
        handle = turn.handle
        candidates, obstacle = self.prefill_candidates(turn, obstacle, view)
        prefill = self.routing.prefill.pick(candidates, turn, view)
        cached = min(turn.cached.get(prefill.name, 0), turn.prompt_tokens)
        cold = turn.prompt_tokens - cached
        yield Option(path=Path.COLD, decode=decode, prefill=prefill, computed_tokens=cold, reason=obstacle)
        if obstacle is None and handle is not None:
            yield Option(
                path=Path.PULL,
                decode=decode,
                prefill=prefill,
                computed_tokens=min(turn.new_tokens, cold),
                pulled_tokens=max(0, handle.tokens - cached),
            )

    def obstacle(self, handle: Handle | None, view: View) -> Reason | None:
        """Why nothing can be pulled, whatever the prefill node; None if something can."""
        if not self.reuse.enabled:
            return Reason.POLICY
        if handle is None:
            return Reason.NO_HANDLE
        return handles.obstacle(handle, view)

    def _keep(self, turn: Turn, decode: NodeState) -> tuple[float, float]:
        keep = self.retention.keep(turn, decode)
        seconds = keep.seconds if turn.max_retain_s is None else min(keep.seconds, turn.max_retain_s)
        wanted = self.reuse.enabled and decode.bidirectional and seconds > 0 and keep.max_pinned_share > 0
        return (seconds, keep.max_pinned_share) if wanted else (0.0, 0.0)

    def _describe_retention(self) -> str:
        return (
            self.retention.describe() if self.reuse.enabled else "Retention: nothing is kept, since nothing is reused."
        )
