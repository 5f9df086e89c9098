"""Where the time of a leg went inside an engine, from its arrival to its first token. Imports no vLLM."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto


class Phase(Enum):
    QUEUE = auto()
    LOAD = auto()
    COMPUTE = auto()
    ANSWER = auto()
    """The first token exists; nothing is measured any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds. None where the engine cannot say."""

    queue_s: float | None = None
    """Waiting for a place: for blocks, and once more between a transfer and the computing."""
    load_s: float | None = None
    """Reading KV from another engine."""
    compute_s: float | None = None
    """From the first step that computes to the first token."""


class Timing:
    """One request. Every moment is on the clock of the first one."""

    def __init__(self, now: float) -> None:
        self._spent = dict.fromkeys(Phase, 0.0)
        self._phase = Phase.QUEUE
        self._since = now
        self._preempted = False
        self.local_tokens = 0
        """Tokens of the prompt that the engine's own prefix cache had."""
        self.pulled_tokens = 0
        """Tokens of the prompt that were read from another engine."""

    def found(self, tokens: int) -> None:
        """Looked up before each try to start; after the start it says nothing about the first token any more."""
        if self._phase is Phase.QUEUE and not self.pulled_tokens:
            self.local_tokens = tokens

    def started(self, now: float, pulled: int) -> None:
        """The request was given blocks, `pulled` tokens of them to be filled by a transfer."""
        if self._phase is Phase.COMPUTE:
            self._preempted = True  # and began again: how long the computing alone took is not known
        elif self._phase is Phase.QUEUE:
            self.pulled_tokens = self.pulled_tokens or pulled
            self._enter(Phase.LOAD if pulled else Phase.COMPUTE, now)

    def loaded(self, now: float, *, failed: bool = False) -> None:
        """The transfer is over; the request waits to be given its turn."""
        if self._phase is Phase.LOAD:
            self._enter(Phase.QUEUE, now)
        if failed:
            self.pulled_tokens = 0

    def answered(self, now: float) -> None:
        """The first token exists. Says nothing new the second time."""
        self._enter(Phase.ANSWER, now)

    def spent(self) -> Spent:
        """Until the first token; nothing of a request that has none."""
        if self._phase is not Phase.ANSWER:
            return Spent()
        compute_s = None if self._preempted else round(self._spent[Phase.COMPUTE], 6)
        queue_s, load_s = round(self._spent[Phase.QUEUE], 6), round(self._spent[Phase.LOAD], 6)
        return Spent(queue_s=queue_s, load_s=load_s, compute_s=compute_s)

    def _enter(self, phase: Phase, now: float) -> None:
        if self._phase is not Phase.ANSWER:
            self._spent[self._phase] += max(0.0, now - self._since)
            self._phase, self._since = phase, now


class Timings:
    """Of all requests from arrival to end. Everything else about a request that is not here is passed over."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, Timing] = {}

    def __len__(self) -> int:
        return len(self._known)

    def arrived(self, request_id: str) -> None:
        self._known[request_id] = Timing(self._clock())

    def found(self, request_id: str, tokens: int) -> None:
        if timing := self._known.get(request_id):
            timing.found(tokens)

    def started(self, request_id: str, pulled: int) -> None:
        if timing := self._known.get(request_id):
            timing.started(self._clock(), pulled)

    def loaded(self, request_id: str, *, failed: bool = False) -> None:
        if timing := self._known.get(request_id):
            timing.loaded(self._clock(), failed=failed)

    def answered(self, request_id: str) -> None:
        if timing := self._known.get(request_id):
            timing.answered(self._clock())

    def ended(self, request_id: str) -> Timing | None:
        """Forget a request. One that ends with its first token, or in the step of it, has answered now."""
        timing = self._known.pop(request_id, None)
        if timing is not None:
            timing.answered(self._clock())
        return timing
