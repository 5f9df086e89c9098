"""A streamed answer on its way through the router: bytes pass as they come, kvflow's own event stays here."""

import json
import logging
from typing import Any

from kvflow.connector.wire import EVENT_PREFIX

log = logging.getLogger("kvflow.router")

_END = b"\n\n"


class EventFilter:
    """Takes the `kvflow` event out of a stream of server-sent events, wherever the network cut it.

    Engines escape line breaks inside their events, so no generated text can imitate the beginning of one.
    """

    def __init__(self) -> None:
        self.params: dict[str, Any] | None = None
        """`kv_transfer_params` of the event, once it is complete."""
        self._held = b""
        self._line_start = True

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes from the engine, return those for the client."""
        data, self._held = self._held + chunk, b""
        start = self._find(data)
        if start < 0:
            keep = self._partial(data)
            return self._pass(data[: len(data) - keep], data[len(data) - keep :])
        end = data.find(_END, start)
        if end < 0:
            return self._pass(data[:start], data[start:])
        self.params = _parse(data[start + len(EVENT_PREFIX) : end])
        return self._pass(data[:start] + data[end + len(_END) :], b"")

    def rest(self) -> bytes:
        """What is still owed to the client when the engine has ended its stream."""
        return b"" if self._held.startswith(EVENT_PREFIX) else self._held

    def _pass(self, out: bytes, held: bytes) -> bytes:
        self._held = held
        if out:
            self._line_start = out.endswith(b"\n")
        return out

    def _find(self, data: bytes) -> int:
        if self._line_start and data.startswith(EVENT_PREFIX):
            return 0
        at = data.find(b"\n" + EVENT_PREFIX)
        return at + 1 if at >= 0 else -1

    def _partial(self, data: bytes) -> int:
        """Bytes at the end of `data` that may be the beginning of the event."""
        for n in range(min(len(EVENT_PREFIX) - 1, len(data)), 0, -1):
            starts_line = data[-n - 1 : -n] == b"\n" if len(data) > n else self._line_start
            if starts_line and EVENT_PREFIX.startswith(data[-n:]):
                return n
        return 0


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        params = json.loads(line.removeprefix(b"data:"))["kv_transfer_params"]
    except (ValueError, KeyError, TypeError):
        log.warning("an engine sent a broken event; the turn is not kept")
        return None
    return params if isinstance(params, dict) else None
