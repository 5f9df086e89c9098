"""Which path a turn takes: which handles are worth pulling, which turns are best left to the node that holds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvflow.policies import check
from kvflow.types import NodeState, Path, Reason, Turn, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way in which a turn could be served, with the nodes that it would be served by."""

    path: Path
    decode: NodeState
    prefill: NodeState | None = None
    """None on `Path.DIRECT`."""
    computed_tokens: int
    """Of the prompt, those that somebody has to compute; estimated."""
    pulled_tokens: int = 0
    """Those that would move from the decode node that keeps the conversation to the prefill node."""
    reason: Reason | None = None
    """Why it is not a pull; None on `Path.PULL` and where `Path.DIRECT` needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the options that were offered."""

    option: Option
    min_pull_tokens: int = 0
    """See `Plan.min_pull_tokens`; only of a pull."""
    reason: Reason | None = None
    """In place of the option's own, where there was a better one to pull."""


@runtime_checkable
class Reuse(Protocol):
    """Chooses among what is possible; what is (node there, not expired) is the policy's own check."""

    @property
    def enabled(self) -> bool:
        """False: no handle is ever pulled, so nothing need be retained either."""

    def choose(self, turn: Turn, options: Sequence[Option], view: View) -> Choice:
        """One of `options`: cold, then pull and direct, each if it is possible. With no prefill node, direct alone."""

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

    def choose(self, turn: Turn, options: Sequence[Option], view: View) -> Choice:  # noqa: ARG002
        by_path = {o.path: o for o in options}
        pull, direct = by_path.get(Path.PULL), by_path.get(Path.DIRECT)
        if turn.handle is not None and turn.handle.tokens < self.min_pull_tokens and Path.COLD in by_path:
            return Choice(option=by_path[Path.COLD], reason=Reason.BELOW_THRESHOLD if pull or direct else None)
        if direct and (direct.computed_tokens < self.direct_below_tokens or Path.COLD not in by_path):
            return Choice(option=direct)
        if pull:
            return Choice(option=pull, min_pull_tokens=self.min_pull_tokens)
        return Choice(option=by_path[Path.COLD])

    def describe(self) -> str:
        if not self.enabled:
            return "Reuse: never; every turn is computed from its first token."
        least = f"{self.min_pull_tokens} tokens or more"
        pull = f"Reuse: pull a conversation's KV from its decode node where that saves {least}"
        if not self.direct_below_tokens:
            return f"{pull}."
        return f"{pull}; turns with fewer than {self.direct_below_tokens} to compute go to that node directly."
