"""What tests can make go wrong. Set on the object, never over HTTP."""

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Faults:
    errors: int = 0
    """Answer so many of the next requests with status 500."""
    break_after: int | None = None
    """Close the connection of the next stream after so many events; once."""
    failed_transfers: int = 0
    """Let so many of this node's next pulls fail."""
    ignored_fields: frozenset[str] = frozenset()
    """Make prompts as if these fields of requests were not there, as another version of a template might."""
    drop_handles: bool = False
    """Answer without a handle, whatever was ordered."""
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    """While cleared, requests are accepted and not answered."""

    def __post_init__(self) -> None:
        self.flowing.set()

    def error(self) -> bool:
        self.errors, hit = max(0, self.errors - 1), self.errors > 0
        return hit

    def transfer_fails(self) -> bool:
        self.failed_transfers, hit = max(0, self.failed_transfers - 1), self.failed_transfers > 0
        return hit

    def stream_breaks(self) -> int | None:
        self.break_after, after = None, self.break_after
        return after
