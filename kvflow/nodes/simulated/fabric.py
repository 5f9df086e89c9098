"""What NIXL is between real engines: whoever knows an engine's epoch can read its blocks and tell it that it has."""

from collections.abc import Sequence
from typing import Protocol


class TransferError(Exception):
    """A transfer that did not happen. The engine that wanted it computes the tokens instead."""


class Peer(Protocol):
    def now(self) -> float:
        """The clock that this engine's deadlines are on."""

    def read(self, blocks: Sequence[int]) -> list[tuple[int, ...]]:
        """Contents of blocks as they are now. Nobody checks whether they are still what the reader believes.

        Raises `IndexError` for a block that does not exist.
        """

    def announce(self, request_id: str) -> None:
        """A reader is waiting: do not let the lease of `request_id` run out."""

    def finished(self, request_id: str) -> None:
        """The reader is done with the blocks of `request_id`, read or not."""


class Fabric:
    """Connects the simulated engines of one process. Every life of an engine joins under its own epoch."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}

    def join(self, epoch: str, peer: Peer) -> None:
        self._peers[epoch] = peer

    def leave(self, epoch: str) -> None:
        self._peers.pop(epoch, None)

    def find(self, epoch: object) -> Peer | None:
        return self._peers.get(epoch) if isinstance(epoch, str) else None
