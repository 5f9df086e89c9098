"""Plain HTTP from a test, ports that are free, and waiting."""

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from random import SystemRandom
from typing import Any

_RANDOM = SystemRandom()


def post(url: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, bytes, dict[str, str]]:
    sent = {"content-type": "application/json", **(headers or {})}
    return _open(urllib.request.Request(url, json.dumps(body).encode(), sent))


def get(url: str) -> tuple[int, bytes]:
    return _open(urllib.request.Request(url))[:2]


def _open(request: urllib.request.Request) -> tuple[int, bytes, dict[str, str]]:
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return response.status, response.read(), dict(response.headers)
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read(), dict(e.headers)


def until(condition: Callable[[], bool], seconds: float, explain: Callable[[], str] = str) -> None:
    """Wait for something that nothing announces."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """From below the range that systems take for outgoing connections, so that no such one gets them meanwhile."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            try:
                listener = held.enter_context(socket.create_server(("127.0.0.1", _RANDOM.randrange(20_000, 32_000))))
            except OSError:
                continue
            found.append(listener.getsockname()[1])
    return found
