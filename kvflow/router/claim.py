"""The handle that a turn has taken out of the store, until it is known what becomes of it."""

from collections.abc import Callable
from enum import Enum, auto

from kvflow.conversations import Conversations, Taken
from kvflow.router.find import closing_key
from kvflow.router.metrics import Metrics
from kvflow.router.releases import Releases
from kvflow.types import Handle, NodeState


class _State(Enum):
    UNUSED = auto()
    """No engine has heard of it."""
    SENT = auto()
    """A prefill engine may be reading it."""
    DONE = auto()
    """Read, or given up."""


class Claim:
    """Belongs to one turn, which must call `end`."""

    def __init__(self, taken: Taken | None, conversations: Conversations, releases: Releases, metrics: Metrics) -> None:
        self.taken = taken
        self.spent = False
        """Found to be of no use to anybody."""
        self.closed = False
        """Its conversation has been closed: nobody is to have it any more."""
        self._conversations = conversations
        self._releases = releases
        self._metrics = metrics
        self._state = _State.UNUSED if taken else _State.DONE
        self._reader: NodeState | None = None

    @property
    def handle(self) -> Handle | None:
        """The handle, as long as nobody has used it."""
        return self.taken.handle if self.taken and self._state is _State.UNUSED else None

    @property
    def key(self) -> bytes | None:
        """Under what the conversation that it belongs to is closed."""
        return closing_key(self.taken.conversation, self.taken.tenant) if self.taken else None

    def sending(self, reader: NodeState) -> Callable[[], None]:
        """To be called when it is on its way to a prefill node. From then on it is never put back: a second read could
        be of other KV.
        """

        def sent() -> None:
            if self._state is _State.UNUSED:
                self._state, self._reader = _State.SENT, reader

        return sent

    def answered(self, *, read: bool) -> None:
        """The prefill leg has come to its end, and with it all reading; `read`: the decode engine has been told so."""
        if self._state is not _State.DONE:
            self._state = _State.DONE
            if not read and self.taken:
                self._release(self.taken.handle, "unused")

    def give_up(self, node: str) -> Handle | None:
        """Take it for the release list of a leg on `node`, if that is where it is kept."""
        handle = self.handle
        if handle is None or handle.node != node:
            return None
        self._state = _State.DONE
        return handle

    def end(self, *, superseded: bool) -> None:
        """The turn is over. `superseded`: it has gone on with the conversation and left a handle of its own."""
        if self.taken is None:
            return
        handle = self.taken.handle
        if self._state is _State.SENT and self._reader:
            self._releases.in_doubt(handle, self._reader)
        elif self._state is _State.UNUSED and self.spent:
            self._release(handle, "expired")
        elif self._state is _State.UNUSED and self.closed:
            self._release(handle, "closed")
        elif self._state is _State.UNUSED and superseded:
            self._release(handle, "superseded")
        elif self._state is _State.UNUSED:
            self._conversations.put_back(self.taken)
        self._state = _State.DONE

    def _release(self, handle: Handle, why: str) -> None:
        self._metrics.released(why, 1)
        self._releases.handles([handle])
