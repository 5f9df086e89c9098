"""Which node would have computed a prompt first."""

from dataclasses import dataclass

from kvflow.policies.forecast import compute_s, overhead_s, transfer_s, wait_s
from kvflow.policies.handles import obstacle
from kvflow.policies.routing.base import Nodes
from kvflow.types import Handle, NodeState, Turn, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Soonest:
    """1 for the node that is predicted to have computed the prompt first, half for one that takes twice as long, etc.

    Predicted: the wait for the prompts before it, overhead, and computing what the node has not cached; or, if that is
    quicker, pulling what the conversation's decode node keeps and computing the rest. For prefill nodes.
    """

    def score(self, nodes: Nodes, turn: Turn, view: View) -> tuple[float, ...]:
        handle = turn.handle if turn.handle is not None and obstacle(turn.handle, view) is None else None
        seconds = [_seconds(n, handle, turn, view) for n in nodes]
        least = min(seconds)
        return tuple(least / s if s > 0 else 1.0 for s in seconds)

    def describe(self) -> str:
        return "the soonest to have computed the prompt"


def _seconds(node: NodeState, handle: Handle | None, turn: Turn, view: View) -> float:
    cached = max(0, min(turn.cached.get(node.name, 0), turn.prompt_tokens))
    missing = turn.prompt_tokens - cached
    compute = compute_s(node, missing, turn)
    if handle is not None and node.bidirectional:
        pull = transfer_s(handle.node, node.name, handle.tokens - cached, view)
        compute = min(compute, pull + compute_s(node, min(turn.new_tokens, missing), turn))
    return wait_s(node, view) + overhead_s(node, turn) + compute
