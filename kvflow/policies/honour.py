"""Whether nodes that run can do what a policy promises."""

from collections.abc import Iterator

from kvflow.errors import NoNodeError
from kvflow.policies import guard
from kvflow.policies.policy import Policy
from kvflow.types import Handle, NodeState, Role, Turn, View

_TOKENS = 1024
"""Of the turns on which a policy is tried."""


def obstacle(policy: Policy, view: View) -> str | None:
    """Why the nodes that run cannot honour `policy`, as a predicate; None if they can, or nobody knows yet."""
    pools = {Role.PREFILL: view.prefill, Role.DECODE: view.decode}
    running = {role: [n for n in pool if n.ready] for role, pool in pools.items()}
    if policy.reuse.enabled:
        for role, nodes in running.items():
            if nodes and not any(n.bidirectional for n in pools[role]):
                return f"reuses, and no {role} node runs kvflow's connector, so nothing could be pulled back"
    if not all(running.values()):
        return None
    for turn in _turns(view):
        try:
            error = guard.decide(policy, turn, view).error
        except NoNodeError as e:
            return f"leaves no node that could serve a turn: {e}"
        if error:
            return f"fails: {error}"
    return None


def _turns(view: View) -> Iterator[Turn]:
    first = Turn(tenant="", model="", prompt_tokens=_TOKENS)
    yield first
    for node in view.decode:
        if node.ready and node.bidirectional:
            yield Turn(
                tenant="", model="", prompt_tokens=2 * _TOKENS, new_tokens=_TOKENS, handle=_handle(node, view.now)
            )


def _handle(node: NodeState, now: float) -> Handle:
    return Handle(
        node=node.name,
        epoch=node.epoch,
        tokens=_TOKENS,
        deadline=now + 60,
        pin="",
        blocks=_TOKENS // max(1, node.block_size),
        kept_at=now,
        params={},
        size=0,
    )
