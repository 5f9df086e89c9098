"""A request's way in: read once, parsed once, refused with a reason, and cleaned of what only the router may say."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any

from starlette.requests import Request

from kvflow.errors import RequestError
from kvflow.policies.retention import MIN_TTL_S
from kvflow.router.bindings import Bindings, binding
from kvflow.router.bodies import parse, read_body
from kvflow.router.endpoints import Endpoint
from kvflow.router.find import BYTES_PER_TOKEN, Keys, Scope, find_keys
from kvflow.router.isolation import confined, confined_headers, no_such_response
from kvflow.router.legs import clean
from kvflow.tenants import Tenant
from kvflow.types import Turn

RETAIN_HEADER = "x-kvflow-retain"
"""Of a request: how long its KV may be kept at most."""
_FORWARDED = ("x-request-id", "traceparent", "tracestate", "x-vllm-priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request that will be served."""

    endpoint: Endpoint
    asked: dict[str, Any]
    """What the client asks, no more than that."""
    body: dict[str, Any]
    """The same, with a name for the answer where engines store it."""
    headers: dict[str, str]
    """Those that are passed on to engines."""
    scope: Scope
    keys: Keys
    turn: Turn
    tenant: Tenant
    """As it was when the request came; its policy is that of the whole turn."""
    binding: bytes | None = None
    """Under what it is noted which node stored the answer; None if none does."""
    arrived: float
    """`time.perf_counter` at arrival."""


async def admit(
    request: Request, endpoint: Endpoint, tenant: Tenant, bindings: Bindings, max_body_bytes: int
) -> Admitted:
    """Raises `RequestError`, and `ClientDisconnect` if the client leaves before its request is complete."""
    arrived = time.perf_counter()
    raw = await read_body(request, max_body_bytes)
    said = parse(raw, request.headers.get("content-type", ""))
    return understand(
        said, len(raw), request.headers, endpoint=endpoint, tenant=tenant, bindings=bindings, arrived=arrived
    )


def understand(
    said: dict[str, Any],
    length: int,
    headers: Mapping[str, str],
    *,
    endpoint: Endpoint,
    tenant: Tenant,
    bindings: Bindings,
    arrived: float = 0.0,
) -> Admitted:
    """What a tenant's request means, without touching anything. `length` is that of its body, in bytes.

    Raises `RequestError`.
    """
    asked = confined(clean(said), endpoint, tenant)
    # vLLM would make up such an id itself, but then only reading the answer would tell it.
    named = endpoint.stores and endpoint.messages and endpoint.messages(asked)
    body = {"request_id": f"resp_{secrets.token_hex(8)}", **asked} if named else asked
    scope = Scope(tenant.name, str(body.get("model") or ""), str(body.get("cache_salt") or ""))
    keys = find_keys(endpoint, {**said, **body}, headers, scope, length)
    turn = Turn(
        tenant=scope.tenant,
        model=scope.model,
        prompt_tokens=length // BYTES_PER_TOKEN + 1,
        splittable=endpoint.splittable(body),
        max_retain_s=_max_retain_s(headers.get(RETAIN_HEADER)),
    )
    return Admitted(
        endpoint=endpoint,
        asked=asked,
        body=body,
        headers=confined_headers(forwarded(headers), tenant),
        scope=scope,
        keys=keys,
        turn=_bound(turn, body.get("previous_response_id"), bindings, tenant) if endpoint.stores else turn,
        tenant=tenant,
        binding=_binding(endpoint, body, scope),
        arrived=arrived,
    )


def _binding(endpoint: Endpoint, body: Mapping[str, Any], scope: Scope) -> bytes | None:
    own = body.get("request_id")
    stored = endpoint.stores and isinstance(own, str) and body.get("store", True)
    return binding(scope.tenant, str(own)) if stored else None


def _bound(turn: Turn, follows: object, bindings: Bindings, tenant: Tenant) -> Turn:
    """Whoever stored the answer that is followed answers alone; anybody else will say that it is not there.

    An engine that is asked for an answer of another tenant's might have it.
    """
    if follows is None:
        return turn
    node = bindings.node(binding(turn.tenant, follows)) if isinstance(follows, str) else None
    if node is None and tenant.isolated:
        raise no_such_response(str(follows))
    return replace(turn, bound_to=node, splittable=turn.splittable and node is not None)


def _max_retain_s(value: str | None) -> float | None:
    if value is None:
        return None
    if value.strip().lower() == "no":
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        seconds = nan
    if not MIN_TTL_S <= seconds < inf:
        what = f'must be "no" or a number of seconds from {MIN_TTL_S:g} on, got {value!r}'
        raise RequestError(f"the header {RETAIN_HEADER} {what}", param=RETAIN_HEADER)
    return seconds


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _FORWARDED if name in headers}
