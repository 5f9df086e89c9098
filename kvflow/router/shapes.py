"""kvflow's own errors, in the shape of the API that a client speaks."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from kvflow.errors import KvflowError, RequestError

MALFORMED = HTTPStatus.BAD_REQUEST.phrase
"""Kind of what vLLM refuses before it looks at the endpoint; OpenAI-shaped on every one of them."""


class UnreadableError(RequestError):
    """A body that vLLM's web framework refuses before vLLM's own words."""


_ANTHROPIC_KINDS = {
    "AuthenticationError": "authentication_error",
    "PermissionDeniedError": "permission_error",
    "RateLimitError": "rate_limit_error",
}
"""What Anthropic's API calls refusals of ours; those of engines keep vLLM's names there, as with vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    body: Callable[[KvflowError], bytes]
    event: Callable[[KvflowError], bytes]
    """The end of a stream that has begun."""


def shape_at(path: str) -> Shape:
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    return RESPONSES if path.startswith("/v1/responses") else OPENAI


def _openai(error: KvflowError) -> dict[str, Any]:
    if isinstance(error, UnreadableError):
        return {"detail": str(error)}
    param = error.param if isinstance(error, RequestError) else None
    return {"error": {"message": str(error), "type": error.kind, "param": param, "code": error.status}}


def _anthropic(error: KvflowError) -> dict[str, Any]:
    if error.kind == MALFORMED:
        return _openai(error)
    return {"type": "error", "error": {"type": _ANTHROPIC_KINDS.get(error.kind, error.kind), "message": str(error)}}


def headers_of(error: KvflowError) -> list[tuple[str, str]]:
    """What an error's response says besides its body."""
    out = [("www-authenticate", "Bearer")] if error.status == 401 else []
    retry = error.retry_after if isinstance(error, RequestError) else None
    return out if retry is None else [*out, ("retry-after", str(retry))]


def _packed(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


OPENAI = Shape(
    body=lambda e: _packed(_openai(e)),
    event=lambda e: b"data: " + _packed(_openai(e)) + b"\n\ndata: [DONE]\n\n",
)
RESPONSES = Shape(
    body=OPENAI.body,
    event=lambda e: b"event: error\ndata: " + _packed({"type": "error", **_openai(e)}) + b"\n\n",
)
ANTHROPIC = Shape(
    body=lambda e: _packed(_anthropic(e)),
    event=lambda e: b"event: error\ndata: " + _packed(_anthropic(e)) + b"\n\n",
)
