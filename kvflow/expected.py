"""What would become of typical turns on idle nodes, by the same explanation that a running server gives."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvflow.config.addresses import pool_of
from kvflow.graph import Graph
from kvflow.policies import guard
from kvflow.policies.policy import Policy
from kvflow.types import Handle, NodeState, Path, Role, Turn, View

HISTORIES = (512, 4096, 32768)
"""Tokens of a conversation that goes on."""
NEW = (32, 512)
"""Tokens that come to it."""
BLOCK = 16
"""Tokens; the engines' own may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Times are guesses until nodes have been measured."""

    history: int
    """0: a first turn."""
    new: int
    path: Path | None
    """None where no node could serve the turn."""
    first_token_s: float | None


def expected(graph: Graph, policy: Policy) -> list[Expected]:
    view = _idle(graph)
    return [_expected(policy, history, new, view) for history, new in _shapes(graph.config.model.max_model_len)]


def _shapes(longest: int) -> Iterator[tuple[int, int]]:
    yield 0, min(NEW[-1], longest)
    for history in HISTORIES:
        for new in NEW:
            if history + new <= longest:
                yield history, new


def _expected(policy: Policy, history: int, new: int, view: View) -> Expected:
    turn = Turn(
        tenant="",
        model="",
        prompt_tokens=history + new,
        new_tokens=new,
        handle=_handle(view.decode[0], history, view.now) if history else None,
    )
    said = guard.explained(policy, turn, view)
    forecasts = [w.forecast.first_token_s for w in said.ways if w.chosen and w.forecast]
    return Expected(
        history=history,
        new=new,
        path=said.plan.path if said.plan else None,
        first_token_s=forecasts[0] if forecasts else None,
    )


def _idle(graph: Graph) -> View:
    """As if every node ran kvflow's connector, was ready, and had nothing to do."""

    def nodes(role: Role) -> tuple[NodeState, ...]:
        caching = pool_of(graph.config.cluster, role).prefix_caching
        return tuple(
            NodeState(name=s.name, role=role, epoch=s.name, block_size=BLOCK, prefix_caching=caching)
            for s in graph.specs
            if s.role is role
        )

    return View(now=0.0, prefill=nodes(Role.PREFILL), decode=nodes(Role.DECODE))


def _handle(node: NodeState, tokens: int, now: float) -> Handle:
    return Handle(
        node=node.name,
        epoch=node.epoch,
        tokens=tokens,
        deadline=now + 60,
        pin="",
        blocks=tokens // BLOCK,
        kept_at=now,
        params={},
        size=0,
    )
