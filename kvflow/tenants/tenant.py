"""One tenant, as a turn sees it: a value, so that a turn keeps what it began with."""

from dataclasses import dataclass, field

from kvflow.policies.policy import Policy

DEFAULT = "default"
"""The tenant of everybody, where none are configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one tenant may take; None is no limit."""

    max_turns: int | None = None
    """Turns under way at a time."""
    max_waiting: int = 16
    """Turns that may wait for one of those to end; one more is refused."""
    max_wait_s: float = 5.0
    """How long each of them waits before it is refused."""
    max_pinned_share: float | None = None
    """Share of each decode node's blocks, 0 to 1, that what is kept for the tenant may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    name: str
    policy: Policy
    limits: Limits = field(default_factory=Limits)
    isolated: bool = True
    """Shares no prefix cache and no stored response with others. False for the one tenant of everybody."""
