"""A streamed answer on its way through the router: whole events pass as they come, kvflow's own stays here."""

import json
import logging
import re
from typing import Any

from kvflow.router.answer import CARRIED, blank_events

log = logging.getLogger("kvflow.router")

_OURS = re.compile(rb"(?:\A|(?<=\n))event: kvflow\r?\ndata: ?([^\r\n]*)\r?\n\r?\n")
_BEGINS_OURS = b"event: kvflow"
_ENDS = (b"\n\n", b"\r\n\r\n")
MAX_EVENT_BYTES = 16 * 2**20
"""Longer ones are passed on in pieces, up to where a handle begins; none of kvflow's is so long."""


class EventFilter:
    """Takes the `kvflow` event, and handles in events of vLLM's own, out of a stream of server-sent events.

    (vLLM shows a handle in `response.completed`.) It does not matter where the network cut the stream.
    Only whole events leave, so that a stream that breaks can still be ended with an event that says so. Engines escape
    line breaks inside their events, so no generated text can imitate the beginning of ours.
    """

    def __init__(self) -> None:
        self.params: dict[str, Any] | None = None
        """`kv_transfer_params` of the event, once it has come."""
        self._held = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes from the engine, return those for the client."""
        searched = max(0, len(self._held) - 3)
        self._held += chunk
        end = max(self._held.rfind(e, searched) + len(e) if e in self._held[searched:] else 0 for e in _ENDS)
        if not end and len(self._held) > MAX_EVENT_BYTES:
            end = self._piece()
        out = bytes(self._held[:end])
        del self._held[:end]
        if _BEGINS_OURS in out:
            out = _OURS.sub(self._take, out)
        return blank_events(out) if CARRIED in out else out

    def _piece(self) -> int:
        """How much of an event that is too long to hold may go."""
        carried = self._held.find(CARRIED)
        return carried if carried >= 0 else len(self._held) - len(CARRIED)

    def rest(self) -> bytes:
        """What is still owed to the client when the engine has ended its stream without a blank line."""
        return b"" if self._held.startswith(_BEGINS_OURS) else blank_events(bytes(self._held))

    def _take(self, found: re.Match[bytes]) -> bytes:
        self.params = _parse(found[1]) or self.params
        return b""


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        params = json.loads(line)["kv_transfer_params"]
    except (ValueError, KeyError, TypeError, RecursionError):
        log.warning("an engine sent a broken event; the turn is not kept")
        return None
    return params if isinstance(params, dict) else None
