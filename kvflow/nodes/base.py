"""What a node is to the rest of kvflow: a name, a role, an address, and a life."""

from dataclasses import dataclass
from typing import Protocol

from kvflow.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A node before anything has started: what `kvflow plan` shows of it."""

    name: str
    """Unique in the graph and harmless to show to clients, such as `prefill-0`."""
    role: Role
    url: str
    """Base URL of the engine's API server, without a trailing slash."""
    command: tuple[str, ...] = ()
    """Complete command line; empty where kvflow only knows the URL."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables set on top of the environment that kvflow runs in, sorted by name."""


class Node(Protocol):
    """A node of the runtime graph. Building one does nothing; each `start` after a `stop` or a death is a new epoch."""

    @property
    def spec(self) -> NodeSpec: ...

    async def start(self) -> None:
        """Begin to come up and return at once; whether it is ready is seen at its URL. Raises `StartError`."""

    async def stop(self) -> None:
        """Go down, and return when nothing of the node is left running. Does nothing on a stopped node."""

    async def died(self) -> str:
        """Wait until the node ends without `stop` having been called; say why in one sentence, with its last log lines.

        Never returns for a node whose life is not ours.
        """
