"""One turn: take the handle, plan, prefill leg, decode leg, answer, keep the new handle, give back what is not used."""

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvflow.connector.retention import Refusal
from kvflow.connector.wire import KEY, DecodeOrder, DecodeReport, blocks_from_wire, reason_from_wire
from kvflow.conversations import Conversations
from kvflow.errors import WireError
from kvflow.router import outcomes
from kvflow.router.admit import Admitted
from kvflow.router.answer import Headers, Reply, strip, turn_headers
from kvflow.router.bindings import Bindings
from kvflow.router.claim import Claim
from kvflow.router.find import BYTES_PER_TOKEN, closing_key, id_key, new_conversation
from kvflow.router.fleet import Fleet
from kvflow.router.legs import decode_body, prefill_body
from kvflow.router.metrics import Metrics
from kvflow.router.outcomes import Prefilled
from kvflow.router.releases import Releases, rank
from kvflow.router.room import Need, Room
from kvflow.router.stream import EventFilter
from kvflow.router.upstream import Answer, EngineError, Upstream
from kvflow.types import NodeState, Path, Plan, Reason

log = logging.getLogger("kvflow.router")

_SPENT = (Reason.EXPIRED, Reason.NODE_GONE)
"""Why a handle that was not used is of no use later either."""


class EngineFailed(EngineError):
    """A node answered a leg with a server error."""

    def __init__(self, node: str, status: int) -> None:
        super().__init__(node, f"failed with status {status}", reached=True)
        self.status = status
        self.kind = "InternalServerError"


@dataclass(slots=True, kw_only=True, eq=False)
class _Turn:
    """One turn under way."""

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
class _Attempt:
    """One try at a turn, with everything decided."""

    turn: _Turn
    admitted: Admitted
    plan: Plan
    name: str
    """What the decode engine knows the turn by."""


@dataclass(slots=True)
class _Progress:
    """Of a decode leg."""

    begun: bool = False
    """The engine has answered: it has read what it was to read, and released what it was to release."""
    ended: bool = False
    """The answer was read to its end, and with it what became of the KV."""


class Dispatcher:
    """Serves turns. Between them it holds only estimates of how full the nodes are."""

    def __init__(
        self,
        fleet: Fleet,
        conversations: Conversations,
        upstream: Upstream,
        metrics: Metrics,
        releases: Releases,
        bindings: Bindings,
    ) -> None:
        self._fleet = fleet
        self._conversations = conversations
        self._upstream = upstream
        self._metrics = metrics
        self._releases = releases
        self._bindings = bindings
        self._room = Room()
        self._open: defaultdict[bytes, set[_Turn]] = defaultdict(set)
        """Turns under way, by their conversation and by that whose handle they have."""

    async def serve(self, admitted: Admitted, reply: Reply) -> None:
        """Answer a turn; a leg that breaks before the answer has begun is made up for once, cold, on other nodes.

        Raises `NoNodeError`, or `EngineError` if the second try breaks as well.
        """
        if not admitted.keys.lookup:
            self._metrics.unkeyed()
        with self._under_way(admitted) as turn:
            try:
                await self._serve(turn, reply)
            except EngineError as e:
                if not reply.started:
                    raise
                await reply.error(e)

    def close(self, tenant: str, conversation: str) -> bool:
        """Keep nothing of a conversation any more, and nothing of its turns under way. False if nobody knows it."""
        key = closing_key(conversation, tenant)
        under_way = self._open.get(key, ())
        for turn in under_way:
            turn.close(key)
        handles = self._conversations.remove(key)
        self._metrics.released("closed", len(handles))
        self._releases.handles(handles)
        return bool(handles or under_way)

    @contextmanager
    def _under_way(self, admitted: Admitted) -> Iterator[_Turn]:
        """A turn with the handle that it may use; whatever happens, something becomes of that."""
        taken = self._conversations.take(admitted.keys.lookup)
        known = taken.conversation if taken and taken.complete else new_conversation()
        claim = Claim(taken, self._conversations, self._releases, self._metrics)
        turn = _Turn(admitted=admitted, conversation=admitted.keys.conversation or known, claim=claim)
        keys = {turn.key, claim.key or turn.key}
        for key in keys:
            self._open[key].add(turn)
        try:
            yield turn
        finally:
            claim.end(superseded=turn.kept and taken is not None and taken.complete)
            for key in keys:
                self._open[key].discard(turn)
                if not self._open[key]:
                    del self._open[key]

    async def _serve(self, turn: _Turn, reply: Reply) -> None:
        try:
            await self._try(self._plan(turn), reply)
        except EngineError as e:
            log.warning("%s", e)
            if reply.started:
                raise
            await self._try(self._plan(turn, broken=e.node), reply)

    def _plan(self, turn: _Turn, broken: str = "") -> _Attempt:
        a = turn.admitted
        handle = None if broken else turn.claim.handle
        asked = replace(a.turn, handle=handle, new_tokens=_new_tokens(turn))
        # Nobody else can answer for the node that a turn is bound to.
        view = self._fleet.view() if broken == asked.bound_to else self._fleet.view().without(broken)
        plan = a.policy.plan(asked, view)
        turn.claim.spent = plan.reason in _SPENT
        if not a.keys.filing:
            plan = replace(plan, retain_s=0.0, max_pinned_share=0.0)  # nobody could find it again
        if broken:
            plan = replace(plan, reason=Reason.RETRIED)
        return _Attempt(turn=turn, admitted=a, plan=plan, name=secrets.token_hex(8))

    async def _try(self, attempt: _Attempt, reply: Reply) -> None:
        prefilled = Prefilled()
        if attempt.plan.prefill is not None:
            prefilled = await self._prefill(attempt, attempt.plan.prefill)
        if prefilled.refused or not await self._decode(attempt, prefilled, reply):
            await self._alone(attempt, reply)

    async def _prefill(self, attempt: _Attempt, node: str) -> Prefilled:
        a, claim = attempt.admitted, attempt.turn.claim
        handle = claim.handle if attempt.plan.path is Path.PULL else None
        sending = claim.sending(self._fleet.state(node)) if handle else None
        body = prefill_body(a.endpoint, a.body, attempt.plan, handle)
        async with self._leg(a, node, body, on_sent=sending) as answer:
            data = await answer.read()
        prefilled = Prefilled()
        try:
            prefilled = outcomes.prefilled(node, data) if answer.status == 200 else Prefilled(refused=True)
        finally:
            if handle:
                # Another leg of this turn may have been sent it and have broken off; that one's end is not known.
                claim.answered(read=prefilled.read)
                self._room.freed(handle.node, handle.blocks)
        if prefilled.report is not None:
            self._metrics.prefilled(node, prefilled.report)
            self._report_blocks(node, prefilled.report.blocks)
        return prefilled

    async def _alone(self, attempt: _Attempt, reply: Reply) -> None:
        """A leg was refused, perhaps for what it alone said: one engine is asked just what the client asks."""
        a, node = attempt.admitted, attempt.plan.decode
        async with self._leg(a, node, a.asked, patient=not a.body.get("stream")) as answer:
            if answer.status != 200:
                await reply.refusal(answer.status, await answer.read(), answer.content_type)
                return
            plan = Plan(path=Path.DIRECT, decode=node, reason=Reason.UNSPLITTABLE)
            await self._answer(replace(attempt, plan=plan), Prefilled(), answer, reply)

    async def _decode(self, attempt: _Attempt, prefilled: Prefilled, reply: Reply) -> bool:
        """False if the engine refuses."""
        a, node = attempt.admitted, self._fleet.state(attempt.plan.decode)
        tokens = prefilled.report.prompt_tokens if prefilled.report else a.turn.prompt_tokens
        need = self._room.expected(node, tokens, a.endpoint.longest_answer(a.body))
        pins = self._to_release(attempt, node, need)
        order = DecodeOrder(
            retain_s=attempt.plan.retain_s,
            max_pinned_share=attempt.plan.max_pinned_share,
            prompt_digest=prefilled.prompt_digest,
            release=pins or None,
            turn=attempt.name if attempt.plan.retain_s else None,
        )
        body = decode_body(a.body, prefilled.params, order)
        with (
            self._room.leg(node.name, need, keeps=attempt.plan.retain_s > 0),
            self._given_back(attempt, body.get("kv_transfer_params") or {}) as progress,
        ):
            async with self._leg(a, node.name, body, patient=not a.body.get("stream")) as answer:
                if answer.status == 200:
                    progress.begun = True
                    if a.binding:
                        self._bindings.bind(a.binding, node.name)
                    await self._answer(attempt, prefilled, answer, reply)
                progress.ended = True
        return progress.begun

    def _to_release(self, attempt: _Attempt, node: NodeState, need: Need) -> list[str]:
        """Pins that the leg is to release: those given up for its sake, and of the conversation it goes on with."""
        given_up = self._conversations.give_up(node.name, self._room.shortage(node, attempt.plan, need))
        self._metrics.released("pressure", len(given_up))
        own = attempt.turn.claim.give_up(node.name) if attempt.plan.path is Path.DIRECT else None
        handles = [*given_up, own] if own else given_up
        self._room.freed(node.name, sum(h.blocks for h in handles))
        # Of several data-parallel ranks nobody knows which one will get the leg.
        self._releases.handles(h for h in handles if rank(h) is not None)
        return [h.pin for h in handles if rank(h) is None and h.epoch == node.epoch]

    async def _answer(self, attempt: _Attempt, prefilled: Prefilled, answer: Answer, reply: Reply) -> None:
        path, reason, headers = _account(attempt, prefilled)
        if answer.streamed:
            await self._stream(attempt, prefilled, answer, path, headers, reply)
        else:
            await self._whole(attempt, prefilled, answer, headers, reply)
        self._metrics.turn(path, reason)

    async def _stream(
        self, attempt: _Attempt, prefilled: Prefilled, answer: Answer, path: Path, headers: Headers, reply: Reply
    ) -> None:
        events = EventFilter()
        async for chunk in answer.chunks():
            out = events.feed(chunk)
            if events.params is not None:
                self._keep(attempt, prefilled, events.params)
                events.params = None
            if not out:
                continue
            if not reply.started:
                self._metrics.first_token(path, time.perf_counter() - attempt.admitted.arrived)
                await reply.start(answer.status, answer.content_type, headers)
            await reply.send(out)
        if not reply.started:
            await reply.start(answer.status, answer.content_type, headers)
        await reply.send(events.rest())
        await reply.end()

    async def _whole(
        self, attempt: _Attempt, prefilled: Prefilled, answer: Answer, headers: Headers, reply: Reply
    ) -> None:
        body = outcomes.json_object(answer.node, await answer.read())
        if isinstance(params := body.get("kv_transfer_params"), dict):
            self._keep(attempt, prefilled, params)
        data = strip(body, shows_nulls=attempt.admitted.endpoint.shows_nulls)
        await reply.whole(answer.status, data, headers, answer.content_type)

    def _keep(self, attempt: _Attempt, prefilled: Prefilled, params: dict[str, Any]) -> None:
        """File the handle of the finished turn, if the decode node kept anything."""
        node, turn = attempt.plan.decode, attempt.turn
        try:
            report = outcomes.decode_report(params)
            if report is None:
                return
            self._reported(attempt.plan, report, prefilled)
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

    def _reported(self, plan: Plan, report: DecodeReport, prefilled: Prefilled) -> None:
        """What the end of a turn says about the node and about answers."""
        self._metrics.decoded(plan.decode, report)
        self._report_blocks(plan.decode, report.blocks)
        if prefilled.report is None:
            return
        if report.refused == Refusal.SHARE:
            self._room.refused(self._fleet.state(plan.decode), plan, prefilled.report.prompt_tokens)
        elif report.retained:
            self._room.answered(report.tokens + 1 - prefilled.report.prompt_tokens)

    def _report_blocks(self, node: str, blocks: dict[str, int] | None) -> None:
        try:
            self._fleet.report_blocks(node, blocks_from_wire(blocks))
        except WireError as e:
            log.warning("%s reported its blocks in a way that makes no sense: %s", node, e)
        else:
            self._room.reported(node)

    @asynccontextmanager
    async def _leg(
        self,
        a: Admitted,
        node: str,
        body: dict[str, Any],
        *,
        patient: bool = False,
        on_sent: Callable[[], None] | None = None,
    ) -> AsyncIterator[Answer]:
        """One leg on a node: counted while it lasts, and held for or against the node when it ends."""
        url = self._fleet.url(node) + a.endpoint.path
        with self._fleet.leg(node, a.turn.prompt_tokens):
            try:
                sending = self._upstream.post(node, url, body, a.headers, patient=patient, on_sent=on_sent)
                async with sending as answer:
                    if answer.status >= 500:
                        log.warning("%s answered %d: %.500r", node, answer.status, await answer.read())
                        raise EngineFailed(node, answer.status)
                    yield answer
            except EngineError as e:
                self._fleet.failed(node, reached=e.reached)
                self._metrics.leg_failed(node)
                raise
            self._fleet.succeeded(node)

    @contextmanager
    def _given_back(self, attempt: _Attempt, params: Mapping[str, Any]) -> Iterator[_Progress]:
        """Of a leg that never began, nothing is left waiting; of one whose end nobody saw, nothing is kept."""
        progress, node = _Progress(), attempt.plan.decode
        try:
            yield progress
        finally:
            if not progress.begun and (params.get("do_remote_prefill") or "release" in params.get(KEY, {})):
                self._releases.leg(node, params)
            if not (progress.ended or attempt.turn.kept) and "turn" in params.get(KEY, {}):
                self._releases.turn(node, attempt.name)


def _new_tokens(turn: _Turn) -> int:
    """Of the prompt, those that the handle does not cover."""
    a, taken = turn.admitted, turn.claim.taken
    if taken is None:
        return a.turn.prompt_tokens
    return a.keys.beyond[a.keys.lookup.index(taken.key)] // BYTES_PER_TOKEN


def _account(attempt: _Attempt, prefilled: Prefilled) -> tuple[Path, Reason | None, Headers]:
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
