"""A request's way in: read once, parsed once, refused with a reason, and cleaned of what only the router may say."""

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any

from starlette.requests import Request

from kvflow.errors import RequestError
from kvflow.policies.policy import Policy
from kvflow.policies.retention import MIN_TTL_S
from kvflow.router.bindings import Bindings, binding
from kvflow.router.endpoints import Endpoint
from kvflow.router.find import BYTES_PER_TOKEN, Keys, Scope, find_keys
from kvflow.router.legs import clean
from kvflow.router.shapes import MALFORMED
from kvflow.types import Turn

DEFAULT_TENANT = "default"
RETAIN_HEADER = "x-kvflow-retain"
"""Of a request: how long its KV may be kept at most."""
_FORWARDED = ("x-request-id", "traceparent", "tracestate")


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
    policy: Policy
    binding: bytes | None = None
    """Under what it is noted which node stored the answer; None if none does."""
    arrived: float
    """`time.perf_counter` at arrival."""


async def admit(
    request: Request, endpoint: Endpoint, policy: Policy, bindings: Bindings, max_body_bytes: int
) -> Admitted:
    """Raises `RequestError`, and `ClientDisconnect` if the client leaves before its request is complete."""
    arrived = time.perf_counter()
    _check_content_type(request)
    raw = await read_body(request, max_body_bytes)
    said = _parse(raw)
    asked = clean(said)
    # vLLM would make up such an id itself, but then only reading the answer would tell it.
    named = endpoint.stores and endpoint.messages and endpoint.messages(asked)
    body = {"request_id": f"resp_{secrets.token_hex(8)}", **asked} if named else asked
    scope = Scope(DEFAULT_TENANT, str(body.get("model") or ""), str(body.get("cache_salt") or ""))
    keys = find_keys(endpoint, {**said, **body}, request.headers, scope, len(raw))
    turn = Turn(
        tenant=scope.tenant,
        model=scope.model,
        prompt_tokens=len(raw) // BYTES_PER_TOKEN + 1,
        splittable=endpoint.splittable(body),
        max_retain_s=_max_retain_s(request.headers.get(RETAIN_HEADER)),
    )
    return Admitted(
        endpoint=endpoint,
        asked=asked,
        body=body,
        headers=forwarded(request.headers),
        scope=scope,
        keys=keys,
        turn=_bound(turn, body.get("previous_response_id"), bindings) if endpoint.stores else turn,
        policy=policy,
        binding=_binding(endpoint, body, scope),
        arrived=arrived,
    )


def _binding(endpoint: Endpoint, body: Mapping[str, Any], scope: Scope) -> bytes | None:
    own = body.get("request_id")
    stored = endpoint.stores and isinstance(own, str) and body.get("store", True)
    return binding(scope.tenant, str(own)) if stored else None


def _bound(turn: Turn, follows: object, bindings: Bindings) -> Turn:
    """Whoever stored the answer that is followed answers alone; anybody else will say that it is not there."""
    if follows is None:
        return turn
    node = bindings.node(binding(turn.tenant, follows)) if isinstance(follows, str) else None
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


def _check_content_type(request: Request) -> None:
    if request.headers.get("content-type", "").lower().split(";", maxsplit=1)[0] != "application/json":
        raise _invalid("Unsupported Media Type: Only 'application/json' is allowed", None)


async def read_body(request: Request, limit: int) -> bytes:
    """Stops reading at the limit, so that nobody can fill the router's memory."""
    too_large = RequestError(
        f"the request body is larger than {limit} bytes, the limit set by router.max_body_mb",
        status=413,
        kind="RequestEntityTooLargeError",
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def _parse(raw: bytes) -> dict[str, Any]:
    if not raw:
        raise _missing()
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as e:
        at = f"body.{e.pos}"
        what = {"type": "json_invalid", "loc": at, "msg": "JSON decode error", "input": "<dict of 0 items>"}
        raise _invalid({**what, "ctx": {"error": e.msg}}, at) from None
    except (ValueError, RecursionError):
        raise RequestError("There was an error parsing the body", kind=MALFORMED) from None
    if body is None:
        raise _missing()
    if not isinstance(body, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        shown = f"<list of {len(body)} items>" if isinstance(body, list) else str(body)
        raise _invalid({"type": "model_attributes_type", "loc": "body", "msg": message, "input": shown}, "body")
    return body


def _missing() -> RequestError:
    return _invalid({"type": "missing", "loc": "body", "msg": "Field required", "input": "None"}, "body")


def _invalid(what: object, param: str | None) -> RequestError:
    """In the words of vLLM, whose API server would have refused it."""
    return RequestError(f"1 validation error:\n  {what}", kind=MALFORMED, param=param)


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _FORWARDED if name in headers}
