"""One request and what a server said to it, byte for byte."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from typing import Any
from urllib.parse import urlsplit

JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    body: Mapping[str, Any] | bytes | None
    """None for a GET."""
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event. `data` is parsed where it is JSON."""

    name: str
    data: Any


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    raw: bytes
    broken_off: bool = False
    """The connection ended before the body did."""

    @property
    def streamed(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def events(self) -> list[Event]:
        *blocks, rest = self.raw.decode().split("\n\n")
        assert self.broken_off or not rest, f"half an event: {rest!r}"
        return [_event(block) for block in blocks]


def send(url: str, request: Request) -> Response:
    where = urlsplit(url)
    connection = HTTPConnection(where.hostname or "", where.port, timeout=300)
    try:
        method = "GET" if request.body is None else "POST"
        body = request.body if request.body is None or isinstance(request.body, bytes) else _dumped(request.body)
        connection.request(method, request.path, body, dict(request.headers))
        response = connection.getresponse()
        headers = {k.lower(): v for k, v in response.getheaders()}
        return Response(response.status, headers, *_read(response))
    finally:
        connection.close()


def _read(response: HTTPResponse) -> tuple[bytes, bool]:
    try:
        return response.read(), False
    except IncompleteRead as e:
        return e.partial, True


def _dumped(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _event(block: str) -> Event:
    name, data = "", ""
    for line in block.split("\n"):
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        else:
            assert field == "data", f"not an event: {block!r}"
            data += value
    return Event(name, data if data == "[DONE]" else json.loads(data))
