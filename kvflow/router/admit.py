"""A request's way in: read once, parsed once, refused with a reason, and cleaned of what only the router may say."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from kvflow.errors import RequestError
from kvflow.policies.policy import Policy
from kvflow.router.find import Keys, Scope, find_keys
from kvflow.router.legs import clean, splittable
from kvflow.types import Turn

DEFAULT_TENANT = "default"
_BYTES_PER_TOKEN = 4
_FORWARDED = ("x-request-id", "traceparent", "tracestate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request that will be served."""

    endpoint: str
    """Path of the engine's endpoint, which is the client's."""
    body: dict[str, Any]
    headers: dict[str, str]
    """Those that are passed on to engines."""
    scope: Scope
    keys: Keys
    turn: Turn
    policy: Policy
    arrived: float
    """`time.perf_counter` at arrival."""


async def admit(request: Request, policy: Policy, max_body_bytes: int) -> Admitted:
    """Raises `RequestError`, and `ClientDisconnect` if the client leaves before its request is complete."""
    arrived = time.perf_counter()
    _check_content_type(request)
    raw = await _read(request, max_body_bytes)
    body = _parse(raw)
    scope = Scope(DEFAULT_TENANT, str(body.get("model") or ""), str(body.get("cache_salt") or ""))
    keys = find_keys(body, request.headers, scope)
    cleaned = clean(body)
    turn = Turn(
        tenant=scope.tenant,
        model=scope.model,
        prompt_tokens=len(raw) // _BYTES_PER_TOKEN + 1,
        splittable=splittable(cleaned),
    )
    return Admitted(
        endpoint=request.url.path,
        body=cleaned,
        headers=_forwarded(request.headers),
        scope=scope,
        keys=keys,
        turn=turn,
        policy=policy,
        arrived=arrived,
    )


def _check_content_type(request: Request) -> None:
    media = request.headers.get("content-type", "").split(";", maxsplit=1)[0].strip().lower()
    if media != "application/json":
        raise RequestError(
            f"Unsupported Media Type: only 'application/json' is allowed, got {media or 'none'!r}",
            status=415,
            kind="UnsupportedMediaTypeError",
            param="content-type",
        )


async def _read(request: Request, limit: int) -> bytes:
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
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as e:
        why = str(e) if isinstance(e, json.JSONDecodeError) else "it is not valid UTF-8, or nested too deeply"
        raise RequestError(f"the request body is not valid JSON: {why}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the request body must be a JSON object, got {type(body).__name__}")
    return body


def _forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _FORWARDED if name in headers}


__all__ = ["Admitted", "ClientDisconnect", "admit"]
