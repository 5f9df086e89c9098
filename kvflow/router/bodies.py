"""Bodies of requests: read once, up to a limit, parsed once, and refused in the words of vLLM's API server."""

import json
from typing import Any

from starlette.requests import Request

from kvflow.errors import RequestError
from kvflow.router.shapes import MALFORMED, UnreadableError

_SHOWN = 200
"""Characters of a wrong value that vLLM shows."""


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


def parse(raw: bytes, content_type: str) -> dict[str, Any]:
    """Raises `RequestError`. vLLM parses what is JSON by a wider rule than that by which it takes it."""
    media = content_type.lower().split(";", maxsplit=1)[0]
    body = _loaded(raw) if raw and _is_json(media.strip()) else None
    if media != "application/json":
        raise _invalid("Unsupported Media Type: Only 'application/json' is allowed", None)
    if body is None:
        raise _invalid({"type": "missing", "loc": "body", "msg": "Field required", "input": "None"}, "body")
    if not isinstance(body, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise _invalid({"type": "model_attributes_type", "loc": "body", "msg": message, "input": _shown(body)}, "body")
    return body


def _is_json(media: str) -> bool:
    return media == "application/json" or (media.startswith("application/") and media.endswith("+json"))


def _loaded(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except json.JSONDecodeError as e:
        at = f"body.{e.pos}"
        what = {"type": "json_invalid", "loc": at, "msg": "JSON decode error", "input": "<dict of 0 items>"}
        raise _invalid({**what, "ctx": {"error": e.msg}}, at) from None
    except (ValueError, RecursionError):
        raise UnreadableError("There was an error parsing the body", kind=MALFORMED) from None


def _shown(body: object) -> str:
    if isinstance(body, list):
        return f"<list of {len(body)} items>"
    text = str(body)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...[truncated]"


def _invalid(what: object, param: str | None) -> RequestError:
    return RequestError(f"1 validation error:\n  {what}", kind=MALFORMED, param=param)
