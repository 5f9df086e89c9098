"""What goes back to a client: kvflow's headers, errors, and nothing of how nodes talk to each other."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.types import Send

from kvflow.connector.wire import KEY
from kvflow.errors import KvflowError, RequestError
from kvflow.router.shapes import OPENAI, Shape, headers_of
from kvflow.types import Path, Reason

_LEAKS = re.compile(rb"kv_transfer_params|\bremote_(?:host|port|engine_id|request_id|block_ids)\b")
_INTERNAL = ("kv_transfer_params", "ec_transfer_params")
_SIGNS = ("do_remote_prefill", "do_remote_decode", KEY)
CARRIED = b'"kv_transfer_params":{'
"""In text that a model or a client wrote, the quotes are escaped."""
_HEADER_SAFE = "!#$&'()*+,/:;=?@[]^_`{|}~\"<>\\"

Headers = Sequence[tuple[str, str]]


class Reply:
    """One response on its way to the client, over plain ASGI. Knows whether it has begun."""

    def __init__(self, send: Send, shape: Shape = OPENAI) -> None:
        """`shape` is that of errors."""
        self._send = send
        self._shape = shape
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
        """As the whole response, or as the end of a stream that has begun."""
        if self.started:
            await self.send(self._shape.event(error))
            await self.end()
            return
        await self.whole(error.status, self._shape.body(error), [*headers, *headers_of(error)])

    async def refusal(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        """An engine's own answer to a request that it refuses, unless that speaks of what is between the nodes."""
        if _LEAKS.search(body):
            await self.error(RequestError("The engine refused this request.", status=status))
        else:
            await self.whole(status, body, (), content_type)


def strip(answer: Mapping[str, Any], *, shows_nulls: bool) -> bytes:
    """An engine's answer, as JSON, without what says where KV lies; as an engine would give it that moves none."""
    internal = dict.fromkeys(k for k in _INTERNAL if shows_nulls and k in answer)
    return _packed({k: internal.get(k, v) for k, v in answer.items() if k in internal or k not in _INTERNAL})


def _packed(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can carry
        return json.dumps(body, separators=(",", ":")).encode()


def blank(data: bytes) -> bytes:
    """The same for JSON that nobody else needs to read: a handle, where vLLM shows one, becomes null."""
    if CARRIED not in data:
        return data
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return _blank_anywhere(data)
    if not isinstance(body, dict):
        return data
    for place in (body, body.get("response")):
        if isinstance(place, dict) and "kv_transfer_params" in place:
            place["kv_transfer_params"] = None
    return _packed(body)


def blank_events(data: bytes) -> bytes:
    """The same in each of several server-sent events."""
    lines = data.split(b"\n")
    for i, line in enumerate(lines):
        if CARRIED in line:
            lines[i] = b"data: " + blank(line[5:].strip()) if line.startswith(b"data:") else _blank_anywhere(line)
    return b"\n".join(lines)


def _blank_anywhere(data: bytes) -> bytes:
    """Of a part of JSON: everything that looks like a handle. What cannot be read to its end is cut off."""
    text, carried = data.decode(errors="surrogateescape"), CARRIED.decode()
    out, at = list[str](), 0
    while (found := text.find(carried, at)) >= 0:
        start = found + len(carried) - 1
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            value, end = dict.fromkeys(_SIGNS), len(text)
        handle = any(sign in value for sign in _SIGNS)
        out += text[at:start], "null" if handle else text[start:end]
        at = end
    return "".join((*out, text[at:])).encode(errors="surrogateescape")


def turn_headers(
    *, path: Path, pulled: int, reason: Reason | None, conversation: str, prefill: str | None, decode: str
) -> Headers:
    """Node names, never addresses."""
    pairs = {
        "x-kvflow-path": path,
        "x-kvflow-pulled-tokens": str(pulled),
        "x-kvflow-reason": reason,
        "x-kvflow-conversation": quote(conversation, safe=_HEADER_SAFE, errors="surrogatepass"),
        "x-kvflow-prefill": prefill,
        "x-kvflow-decode": decode,
    }
    return [(k, v) for k, v in pairs.items() if v is not None]
