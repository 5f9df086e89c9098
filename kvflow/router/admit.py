"""A request's way in: read once, parsed once, refused with a reason, and cleaned of what only the router may say."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from kvflow.errors import RequestError
from kvflow.policies.policy import Policy
from kvflow.router.find import BYTES_PER_TOKEN, Keys, Scope, find_keys
from kvflow.router.legs import clean, splittable
from kvflow.types import Turn

DEFAULT_TENANT = "default"
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


async def admit(request: Request, endpoint: str, policy: Policy, max_body_bytes: int) -> Admitted:
    """`endpoint` is the route's own path, not what the request says of itself.

    Raises `RequestError`, and `ClientDisconnect` if the client leaves before its request is complete.
    """
    arrived = time.perf_counter()
    _check_content_type(request)
    raw = await _read(request, max_body_bytes)
    body = _parse(raw)
    scope = Scope(DEFAULT_TENANT, str(body.get("model") or ""), str(body.get("cache_salt") or ""))
    keys = find_keys(body, request.headers, scope, len(raw))
    cleaned = clean(body)
    turn = Turn(
        tenant=scope.tenant,
        model=scope.model,
        prompt_tokens=len(raw) // BYTES_PER_TOKEN + 1,
        splittable=splittable(cleaned),
    )
    return Admitted(
        endpoint=endpoint,
        body=cleaned,
        headers=_forwarded(request.headers),
        scope=scope,
        keys=keys,
        turn=turn,
        policy=policy,
        arrived=arrived,
    )


def _check_content_type(request: Request) -> None:
    if request.headers.get("content-type", "").lower().split(";", maxsplit=1)[0] != "application/json":
        raise _invalid("Unsupported Media Type: Only 'application/json' is allowed", None)


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
    if not raw:
        raise _missing()
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as e:
        at = f"body.{e.pos}"
        what = {"type": "json_invalid", "loc": at, "msg": "JSON decode error", "input": "<dict of 0 items>"}
        raise _invalid({**what, "ctx": {"error": e.msg}}, at) from None
    except (ValueError, RecursionError):
        raise RequestError("There was an error parsing the body", kind="Bad Request") from None
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
    return RequestError(f"1 validation error:\n  {what}", kind="Bad Request", param=param)


def _forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _FORWARDED if name in headers}
