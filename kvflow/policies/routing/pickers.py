"""Which node the scores point to."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvflow.policies.routing.base import Nodes
from kvflow.types import NodeState, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The node with the highest score.

    Equals are told apart by a hash of the turn with the node's name (rendezvous hashing): the same turn always goes to
    the same node, different turns spread evenly, and a node that joins or leaves moves no turn between the others.
    Taking the first instead would send all of a quiet system's work to one node.
    """

    def pick(self, nodes: Nodes, scores: Sequence[float], turn: Turn) -> NodeState:
        best = max(scores)
        equals = [n for n, s in zip(nodes, scores, strict=True) if s == best]
        return max(equals, key=lambda n: _rank(n, turn))

    def describe(self) -> str:
        return "the best"


def _rank(node: NodeState, turn: Turn) -> bytes:
    text = "\0".join((node.name, turn.tenant, turn.model, str(turn.prompt_tokens)))
    return blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
