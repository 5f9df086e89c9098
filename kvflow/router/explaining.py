"""What would become of a request: the way of a turn up to its plan, without sending, taking or counting anything."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvflow.conversations import Conversations, Taken
from kvflow.errors import RequestError
from kvflow.policies import guard
from kvflow.policies.policy import Policy
from kvflow.router.admit import Admitted, understand
from kvflow.router.bindings import Bindings
from kvflow.router.endpoints import CHAT, COMPLETIONS, ENDPOINTS, RESPONSES, Endpoint
from kvflow.router.fleet import Fleet
from kvflow.router.planning import Planning
from kvflow.tenants import Tenant
from kvflow.types import Turn

_TOLD_BY = {"messages": CHAT, "input": RESPONSES, "prompt": COMPLETIONS}
"""A field of the body, and the endpoint that takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    tenant: Tenant
    policy: Policy
    endpoint: Endpoint
    body: dict[str, Any]
    length: int
    """Of the body, in bytes."""
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explainer:
    fleet: Fleet
    conversations: Conversations
    bindings: Bindings
    planning: Planning

    def answer(self, q: Question) -> dict[str, Any]:
        """Plain JSON. Raises `RequestError` where the request itself would be refused."""
        asking = replace(q.tenant, policy=q.policy)
        admitted = understand(q.body, q.length, q.headers, endpoint=q.endpoint, tenant=asking, bindings=self.bindings)
        found = self.conversations.peek(admitted.keys.lookup)
        turn = self.planning.turn(admitted, found, found.handle if found else None)
        view = self.fleet.view()
        explanation = guard.explained(q.policy, turn, view)
        kept = explanation.plan.retain_s if explanation.plan and admitted.keys.filing else 0.0
        return {
            "tenant": q.tenant.name,
            "policy": q.policy.name,
            "endpoint": q.endpoint.path,
            "conversation": _conversation(admitted, found, view.now),
            "turn": _turn(turn),
            "kept_for_s": kept,
            "explanation": explanation.to_json(),
        }


def endpoint(name: str | None, body: Mapping[str, Any]) -> Endpoint:
    """That of the path `name`; where none is given, the one whose prompt `body` has. Raises `RequestError`."""
    if name is not None:
        found = next((e for e in ENDPOINTS if e.path == name), None)
    else:
        found = next((e for field, e in _TOLD_BY.items() if field in body), None)
    if found is None:
        known = ", ".join(e.path for e in ENDPOINTS)
        what = f"got {name[:64]!r}" if name else f"the body has none of {', '.join(_TOLD_BY)} that would tell which"
        raise RequestError(f"endpoint must be one of {known}; {what}", param="endpoint")
    return found


def _conversation(admitted: Admitted, found: Taken | None, now: float) -> dict[str, Any]:
    if found is None:
        return {"id": admitted.keys.conversation, "found": False}
    handle = found.handle
    return {
        "id": admitted.keys.conversation or found.conversation,
        "found": True,
        "goes_on": found.complete,
        "node": handle.node,
        "tokens": handle.tokens,
        "expires_in_s": round(max(0.0, handle.deadline - now), 3),
    }


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "model": turn.model,
        "prompt_tokens": turn.prompt_tokens,
        "new_tokens": turn.new_tokens,
        "splittable": turn.splittable,
        "bound_to": turn.bound_to,
        "max_retain_s": turn.max_retain_s,
        "cached": dict(turn.cached),
    }
