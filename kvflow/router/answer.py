"""What goes back to a client: kvflow's headers, OpenAI-shaped errors, and nothing of how nodes talk to each other."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.types import Send

from kvflow.errors import KvflowError, RequestError
from kvflow.types import Path, Reason

_LEAKS = re.compile(rb"kv_transfer_params|\bremote_(?:host|port|engine_id|request_id|block_ids)\b")
_INTERNAL = ("kv_transfer_params", "ec_transfer_params")
_HEADER_SAFE = "!#$&'()*+,/:;=?@[]^_`{|}~\"<>\\"

Headers = Sequence[tuple[str, str]]


class Reply:
    """One response on its way to the client, over plain ASGI. Knows whether it has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def start(self, status: int, content_type: str, headers: Headers, length: int | None = None) -> None:
        all_headers = [("content-type", content_type), *headers]
        if length is not None:
            all_headers.append(("content-length", str(length)))
        raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in all_headers]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        self.started = True

    async def send(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(
        self, status: int, body: bytes, headers: Headers = (), content_type: str = "application/json"
    ) -> None:
        await self.start(status, content_type, headers, len(body))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def error(self, error: KvflowError, headers: Headers = ()) -> None:
        retry = getattr(error, "retry_after", None)
        extra = [("retry-after", str(retry))] if retry is not None else []
        await self.whole(error.status, error_body(error), [*headers, *extra])


def error_body(error: KvflowError) -> bytes:
    param = error.param if isinstance(error, RequestError) else None
    info = {"message": str(error), "type": error.kind, "param": param, "code": error.status}
    return json.dumps({"error": info}, separators=(",", ":")).encode()


def error_event(error: KvflowError) -> bytes:
    """An error in a stream that has begun; shaped as vLLM's own."""
    return b"data: " + error_body(error) + b"\n\ndata: [DONE]\n\n"


def strip(answer: Mapping[str, Any]) -> bytes:
    """An engine's answer, as JSON, without the fields that say where KV lies."""
    body = {k: v for k, v in answer.items() if k not in _INTERNAL}
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can carry
        return json.dumps(body, separators=(",", ":")).encode()


def refusal(status: int, body: bytes) -> bytes:
    """An engine's own answer to a request that it refuses, unless that speaks of what is between the nodes."""
    if not _LEAKS.search(body):
        return body
    return error_body(RequestError("The engine refused this request.", status=status))


def turn_headers(
    *, path: Path, pulled: int, reason: Reason | None, conversation: str, prefill: str | None, decode: str
) -> Headers:
    """Node names, never addresses."""
    pairs = {
        "x-kvflow-path": path,
        "x-kvflow-pulled-tokens": str(pulled),
        "x-kvflow-reason": reason,
        "x-kvflow-conversation": quote(conversation, safe=_HEADER_SAFE),
        "x-kvflow-prefill": prefill,
        "x-kvflow-decode": decode,
    }
    return [(k, v) for k, v in pairs.items() if v is not None]
