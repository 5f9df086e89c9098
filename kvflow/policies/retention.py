"""Whether, how long, and with what share of decode memory the KV of a finished turn is kept."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvflow.errors import ConfigError
from kvflow.policies import check
from kvflow.types import NodeState, Turn

MIN_TTL_S = 10.0
"""Engines decline a pull within 5 s of the end of a pin; a shorter life could hardly ever be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """`seconds` 0 or `max_pinned_share` 0: keep nothing. See `Plan.retain_s` and `Plan.max_pinned_share`."""

    seconds: float
    max_pinned_share: float


@runtime_checkable
class Retention(Protocol):
    def keep(self, turn: Turn, decode: NodeState) -> Keep:
        """What `decode`, the node that will answer `turn`, is to keep of it."""

    def describe(self) -> str:
        """One plain sentence with every number of the part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Keep every turn equally long. 480 s is the engine's own default (`decoder_kv_blocks_ttl`); it has no share."""

    ttl_s: float = 480.0
    max_pinned_share: float = 0.5

    def __post_init__(self) -> None:
        self._check_ttl()
        check.number("policy.retention.max_pinned_share", self.max_pinned_share, high=1)

    def _check_ttl(self) -> None:
        key = "policy.retention.ttl_s"
        check.number(key, self.ttl_s, low=float("-inf"))
        if self.ttl_s != 0 and self.ttl_s < MIN_TTL_S:
            raise ConfigError(f"{key} must be 0 or at least {MIN_TTL_S:g} seconds, got {self.ttl_s:g}")

    def keep(self, turn: Turn, decode: NodeState) -> Keep:  # noqa: ARG002 - the same for all
        return Keep(seconds=self.ttl_s, max_pinned_share=self.max_pinned_share)

    def describe(self) -> str:
        if not self.ttl_s or not self.max_pinned_share:
            return "Retention: nothing is kept after a turn."
        share = f"{self.max_pinned_share:.0%}"
        return f"Retention: every turn's KV for {self.ttl_s:g} s, in at most {share} of a decode node's blocks."
