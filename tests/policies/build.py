"""Views, turns and policies for the tests of this folder."""

from typing import Any

from kvflow.policies import (
    Best,
    Fixed,
    HoldsConversation,
    LeastLoaded,
    LeastPinned,
    NotFailing,
    Policy,
    Ready,
    Route,
    Routing,
    Threshold,
    Weighted,
)
from kvflow.types import Blocks, Handle, NodeState, Role, Turn, View

FILTERS = (Ready(), NotFailing(failures=3))


def prefill(name: str = "prefill-0", **fields: Any) -> NodeState:
    return NodeState(name=name, role=Role.PREFILL, **fields)


def decode(name: str = "decode-0", **fields: Any) -> NodeState:
    return NodeState(name=name, role=Role.DECODE, **{"epoch": "e1", **fields})


def pinned(share: float) -> Blocks:
    return Blocks(free=0, pinned=round(100 * share), total=100)


def view(*nodes: NodeState, now: float = 100.0) -> View:
    nodes = nodes or (prefill(), decode())
    return View(
        now=now,
        prefill=tuple(n for n in nodes if n.role is Role.PREFILL),
        decode=tuple(n for n in nodes if n.role is Role.DECODE),
    )


def handle(**fields: Any) -> Handle:
    defaults: dict[str, Any] = {"node": "decode-0", "epoch": "e1", "tokens": 1000, "deadline": 200.0, "kept_at": 50.0}
    return Handle(**{**defaults, "pin": "p", "blocks": 63, "params": {}, "size": 0, **fields})


def turn(**fields: Any) -> Turn:
    return Turn(**{"tenant": "acme", "model": "m", "prompt_tokens": 1200, **fields})


def route(*scorers: Weighted) -> Route:
    return Route(filters=FILTERS, scorers=scorers, picker=Best())


def policy(reuse: Threshold | None = None, retention: Fixed | None = None) -> Policy:
    load = Weighted(scorer=LeastLoaded(), weight=1)
    pins = Weighted(scorer=LeastPinned(), weight=1)
    holds = Weighted(scorer=HoldsConversation(max_extra_legs=4), weight=4)
    return Policy(
        name="test",
        reuse=reuse or Threshold(),
        retention=retention or Fixed(),
        routing=Routing(prefill=route(load), decode=route(holds, load, pins)),
    )
