"""What decode nodes keep: handles filed at the end of turns, and given up where a leg needs the room."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvflow.connector.retention import Refusal
from kvflow.connector.wire import DecodeReport, blocks_from_wire
from kvflow.conversations import Conversations
from kvflow.errors import WireError
from kvflow.router import outcomes
from kvflow.router.find import closing_key, id_key
from kvflow.router.fleet import Fleet
from kvflow.router.measure import TimedLeg
from kvflow.router.metrics import Metrics
from kvflow.router.outcomes import Prefilled
from kvflow.router.releases import Releases, rank
from kvflow.router.room import Need, Room
from kvflow.router.shares import Shares
from kvflow.router.turn import Attempt
from kvflow.types import NodeState, Path

log = logging.getLogger("kvflow.router")


class Keeping:
    """Between turns it holds only estimates of how full the nodes are."""

    def __init__(self, fleet: Fleet, conversations: Conversations, metrics: Metrics, releases: Releases) -> None:
        self._fleet = fleet
        self._conversations = conversations
        self._metrics = metrics
        self._releases = releases
        self.room = Room()
        self._shares = Shares(conversations)

    def confined(self, attempt: Attempt, node: NodeState, need: Need) -> Attempt:
        """The same, but that nothing is kept where the turn would not fit its tenant's share."""
        if not attempt.plan.retain_s or self._shares.fits(attempt.admitted.tenant, node, need):
            return attempt
        return replace(attempt, plan=replace(attempt.plan, retain_s=0.0, max_pinned_share=0.0))

    @contextmanager
    def leg(self, attempt: Attempt, node: NodeState, need: Need) -> Iterator[None]:
        """Count what a decode leg takes and will leave for as long as the context lasts."""
        keeps = attempt.plan.retain_s > 0
        with (
            self.room.leg(node.name, need, keeps=keeps),
            self._shares.leg(attempt.admitted.tenant, node, need, keeps=keeps),
        ):
            yield

    def to_release(self, attempt: Attempt, node: NodeState, need: Need) -> list[str]:
        """Pins that a leg is to release: those given up for its sake, and of the conversation it goes on with."""
        share = self._shares.make_room(attempt.admitted.tenant, node, need) if attempt.plan.retain_s else []
        self._metrics.released("share", len(share))
        self.room.freed(node.name, sum(h.blocks for h in share))
        pressure = self._conversations.give_up(node.name, self.room.shortage(node, attempt.plan, need))
        self._metrics.released("pressure", len(pressure))
        given_up = [*share, *pressure]
        own = attempt.turn.claim.give_up(node.name) if attempt.plan.path is Path.DIRECT else None
        handles = [*given_up, own] if own else given_up
        self.room.freed(node.name, sum(h.blocks for h in handles[len(share) :]))
        # Of several data-parallel ranks nobody knows which one will get the leg.
        self._releases.handles(h for h in handles if rank(h) is not None)
        return [h.pin for h in handles if rank(h) is None and h.epoch == node.epoch]

    def keep(self, attempt: Attempt, prefilled: Prefilled, timed: TimedLeg, params: dict[str, Any]) -> None:
        """File the handle of the finished turn, if the decode node kept anything."""
        node, turn = attempt.plan.decode, attempt.turn
        try:
            report = outcomes.decode_report(params)
            if report is None:
                return
            self._fleet.decoded(timed, attempt.plan.prefill, report)
            self._reported(attempt, report, prefilled)
            if not report.retained:
                return
            handle = outcomes.handle(node, params, report, self._fleet.now())
        except WireError as e:
            log.warning("%s ended a turn in a way that makes no sense; nothing is kept: %s", node, e)
            return
        if not turn.wanted:
            self._releases.handles([handle])
            return
        a = attempt.admitted
        keys = (*a.keys.filing, id_key(turn.conversation, a.scope), closing_key(turn.conversation, a.scope.tenant))
        self._conversations.put(turn.conversation, keys, handle, tenant=a.scope.tenant, whole=a.keys.whole)
        turn.kept = True
        excess = self._shares.excess(a.tenant, self._fleet.state(node))
        self._metrics.released("share", len(excess))
        self.room.freed(node, sum(h.blocks for h in excess))
        self._releases.handles(excess)

    def report_blocks(self, node: str, blocks: dict[str, int] | None) -> None:
        """What an engine said beside the end of a leg."""
        try:
            self._fleet.report_blocks(node, blocks_from_wire(blocks))
        except WireError as e:
            log.warning("%s reported its blocks in a way that makes no sense: %s", node, e)
        else:
            self.room.reported(node)

    def _reported(self, attempt: Attempt, report: DecodeReport, prefilled: Prefilled) -> None:
        """What the end of a turn says about the node and about answers."""
        plan = attempt.plan
        self._metrics.decoded(attempt.admitted.scope.tenant, plan.decode, report)
        self.report_blocks(plan.decode, report.blocks)
        if prefilled.report is None:
            return
        if report.refused == Refusal.SHARE:
            self.room.refused(self._fleet.state(plan.decode), plan, prefilled.report.prompt_tokens)
        elif report.retained:
            self.room.answered(report.tokens + 1 - prefilled.report.prompt_tokens)
