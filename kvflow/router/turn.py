"""What the parts of the router hand to each other while one turn is under way."""

from dataclasses import dataclass

from kvflow.connector.wire import reason_from_wire
from kvflow.router.admit import Admitted
from kvflow.router.answer import Headers, turn_headers
from kvflow.router.claim import Claim
from kvflow.router.expected import Work
from kvflow.router.find import closing_key
from kvflow.router.measure import TimedLeg
from kvflow.router.outcomes import Prefilled
from kvflow.router.upstream import Answer
from kvflow.types import Path, Plan, Reason


@dataclass(slots=True, kw_only=True, eq=False)
class TurnUnderWay:
    """One turn, from its handle being taken until something has become of that."""

    admitted: Admitted
    conversation: str
    claim: Claim
    wanted: bool = True
    """False once its conversation has been closed: nothing of it is to be kept."""
    kept: bool = False

    @property
    def key(self) -> bytes:
        return closing_key(self.conversation, self.admitted.scope.tenant)

    def close(self, key: bytes) -> None:
        """Of its own conversation, or of the one whose handle it has taken."""
        self.wanted = self.wanted and key != self.key
        self.claim.closed = self.claim.closed or key == self.claim.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a turn, with everything decided."""

    turn: TurnUnderWay
    admitted: Admitted
    plan: Plan
    name: str
    """What the decode engine knows the turn by."""
    prefill_work: Work
    decode_work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A leg whose answer has begun, with a status that is no failure of the node."""

    answer: Answer
    timed: TimedLeg


@dataclass(slots=True)
class Progress:
    """Of a decode leg."""

    begun: bool = False
    """The engine has answered: it has read what it was to read, and released what it was to release."""
    ended: bool = False
    """The answer was read to its end, and with it what became of the KV."""


def account(attempt: Attempt, prefilled: Prefilled) -> tuple[Path, Reason | None, Headers]:
    """What happened, as opposed to what was planned."""
    plan, path, reason = attempt.plan, attempt.plan.path, attempt.plan.reason
    if path is Path.PULL:
        path = Path.PULL if prefilled.pulled else Path.COLD
        reason = reason_from_wire(prefilled.report.reason) if prefilled.report else Reason.ONE_WAY
    headers = turn_headers(
        path=path,
        pulled=prefilled.pulled,
        reason=reason,
        conversation=attempt.turn.conversation,
        prefill=plan.prefill,
        decode=plan.decode,
    )
    return path, reason, headers
