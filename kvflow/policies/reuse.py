"""Which handles are worth pulling, and which turns are best left to the node that holds the conversation."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvflow.policies import check
from kvflow.types import Handle, Reason


@runtime_checkable
class Reuse(Protocol):
    """Decides on handles that could be pulled; that they can be (node there, not expired) is the policy's own check."""

    @property
    def enabled(self) -> bool:
        """False: no handle is ever pulled, so nothing need be retained either."""

    @property
    def min_pull_tokens(self) -> int:
        """The engine pulls only if at least so many tokens are verified and not in the prefill node's own cache."""

    @property
    def direct_below_tokens(self) -> int:
        """A turn with less to compute stays on the decode node that holds its conversation; 0: none does."""

    def refuse(self, handle: Handle) -> Reason | None:
        """Why `handle` is not worth a pull, or None to pull it. Asked only while `enabled`."""

    def describe(self) -> str:
        """One plain sentence with every number of the part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """Pull from `min_pull_tokens` on: a transfer has a fixed cost that a short history does not pay back.

    64 is the engine's own default (`kv_recompute_threshold`). Turns with fewer than `direct_below_tokens` tokens
    to compute need no transfer: the decode node that holds their conversation does that between others' steps.
    """

    enabled: bool = True
    min_pull_tokens: int = 64
    direct_below_tokens: int = 0

    def __post_init__(self) -> None:
        check.flag("policy.reuse.enabled", self.enabled)
        check.whole("policy.reuse.min_pull_tokens", self.min_pull_tokens)
        check.whole("policy.reuse.direct_below_tokens", self.direct_below_tokens)

    def refuse(self, handle: Handle) -> Reason | None:
        return Reason.BELOW_THRESHOLD if handle.tokens < self.min_pull_tokens else None

    def describe(self) -> str:
        if not self.enabled:
            return "Reuse: never; every turn is computed from its first token."
        least = f"{self.min_pull_tokens} tokens or more"
        pull = f"Reuse: pull a conversation's KV from its decode node where that saves {least}"
        if not self.direct_below_tokens:
            return f"{pull}."
        return f"{pull}; turns with fewer than {self.direct_below_tokens} to compute go to that node directly."
