"""One turn: take the handle, plan, prefill leg, decode leg, answer, keep the new handle, give back what is not used."""

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from kvflow.connector.wire import KEY, DecodeOrder
from kvflow.conversations import Conversations
from kvflow.router import outcomes
from kvflow.router.admit import Admitted
from kvflow.router.answer import Headers, Reply, strip
from kvflow.router.bindings import Bindings
from kvflow.router.claim import Claim
from kvflow.router.expected import Work, decode_work, prefill_work
from kvflow.router.find import closing_key, new_conversation
from kvflow.router.fleet import Fleet
from kvflow.router.keeping import Keeping
from kvflow.router.legs import decode_body, prefill_body
from kvflow.router.metrics import Metrics
from kvflow.router.outcomes import Prefilled
from kvflow.router.planning import Planning
from kvflow.router.releases import Releases
from kvflow.router.stream import EventFilter
from kvflow.router.turn import Attempt, Leg, Progress, TurnUnderWay, account
from kvflow.router.upstream import EngineError, Upstream
from kvflow.types import Path, Plan, Reason

log = logging.getLogger("kvflow.router")

_SPENT = (Reason.EXPIRED, Reason.NODE_GONE)
"""Why a handle that was not used is of no use later either."""


class EngineFailed(EngineError):
    """A node answered a leg with a server error."""

    def __init__(self, node: str, status: int) -> None:
        super().__init__(node, f"failed with status {status}", reached=True)
        self.status = status
        self.kind = "InternalServerError"


class Dispatcher:
    """Serves turns."""

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
        self._keeping = Keeping(fleet, conversations, metrics, releases)
        self.planning = Planning(fleet, metrics)
        self._open: defaultdict[bytes, set[TurnUnderWay]] = defaultdict(set)
        """Turns under way, by their conversation and by that whose handle they have."""

    async def serve(self, admitted: Admitted, reply: Reply) -> None:
        """Answer a turn; a leg that breaks before the answer has begun is made up for once, cold, on other nodes.

        Raises `NoNodeError`, or `EngineError` if the second try breaks as well.
        """
        if not admitted.keys.lookup:
            self._metrics.unkeyed(admitted.scope.tenant)
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
    def _under_way(self, admitted: Admitted) -> Iterator[TurnUnderWay]:
        """A turn with the handle that it may use; whatever happens, something becomes of that."""
        taken = self._conversations.take(admitted.keys.lookup)
        known = taken.conversation if taken and taken.complete else new_conversation()
        claim = Claim(taken, self._conversations, self._releases, self._metrics)
        turn = TurnUnderWay(admitted=admitted, conversation=admitted.keys.conversation or known, claim=claim)
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

    async def _serve(self, turn: TurnUnderWay, reply: Reply) -> None:
        try:
            await self._try(self._plan(turn), reply)
        except EngineError as e:
            log.warning("%s", e)
            if reply.started:
                raise
            await self._try(self._plan(turn, broken=e.node), reply)

    def _plan(self, turn: TurnUnderWay, broken: str = "") -> Attempt:
        a, claim = turn.admitted, turn.claim
        planned = self.planning.plan(a, claim.taken, claim.handle, broken)
        claim.spent = planned.plan.reason in _SPENT
        return Attempt(
            turn=turn,
            admitted=a,
            plan=planned.plan,
            name=secrets.token_hex(8),
            prefill_work=prefill_work(planned.view, planned.plan, planned.turn),
            decode_work=decode_work(planned.view, planned.plan, planned.turn),
        )

    async def _try(self, attempt: Attempt, reply: Reply) -> None:
        prefilled = Prefilled()
        if attempt.plan.prefill is not None:
            prefilled = await self._prefill(attempt, attempt.plan.prefill)
        if prefilled.refused or not await self._decode(attempt, prefilled, reply):
            await self._alone(attempt, reply)

    async def _prefill(self, attempt: Attempt, node: str) -> Prefilled:
        a, claim = attempt.admitted, attempt.turn.claim
        handle = claim.handle if attempt.plan.path is Path.PULL else None
        sending = claim.sending(self._fleet.state(node)) if handle else None
        body = prefill_body(a.endpoint, a.body, attempt.plan, handle)
        async with self._leg(a, node, body, attempt.prefill_work, on_sent=sending) as leg:
            data = await leg.answer.read()
            leg.timed.answered()
        prefilled = Prefilled()
        try:
            prefilled = outcomes.prefilled(node, data) if leg.answer.status == 200 else Prefilled(refused=True)
        finally:
            if handle:
                # Another leg of this turn may have been sent it and have broken off; that one's end is not known.
                claim.answered(read=prefilled.read)
                self._keeping.room.freed(handle.node, handle.blocks)
        if not prefilled.refused:
            self.planning.computed(a, node)
            self._fleet.prefilled(leg.timed, handle.node if handle else None, a.turn.prompt_tokens, prefilled.report)
        if prefilled.report is not None:
            self.planning.counted(a, prefilled.report.prompt_tokens)
            self._metrics.prefilled(a.scope.tenant, node, prefilled.report)
            self._keeping.report_blocks(node, prefilled.report.blocks)
        return prefilled

    async def _alone(self, attempt: Attempt, reply: Reply) -> None:
        """A leg was refused, perhaps for what it alone said: one engine is asked just what the client asks."""
        a, node = attempt.admitted, attempt.plan.decode
        plan = Plan(path=Path.DIRECT, decode=node, reason=Reason.UNSPLITTABLE)
        work = decode_work(self._fleet.view(), plan, a.turn)
        async with self._leg(a, node, a.asked, work, patient=not a.body.get("stream")) as leg:
            answer = leg.answer
            if answer.status != 200:
                await reply.refusal(answer.status, await answer.read(), answer.content_type)
                return
            await self._answer(replace(attempt, plan=plan), Prefilled(), leg, reply)

    async def _decode(self, attempt: Attempt, prefilled: Prefilled, reply: Reply) -> bool:
        """False if the engine refuses."""
        a, node = attempt.admitted, self._fleet.state(attempt.plan.decode)
        tokens = prefilled.report.prompt_tokens if prefilled.report else a.turn.prompt_tokens
        need = self._keeping.room.expected(node, tokens, a.endpoint.longest_answer(a.body))
        attempt = self._keeping.confined(attempt, node, need)
        pins = self._keeping.to_release(attempt, node, need)
        order = DecodeOrder(
            retain_s=attempt.plan.retain_s,
            max_pinned_share=attempt.plan.max_pinned_share,
            prompt_digest=prefilled.prompt_digest,
            release=pins or None,
            turn=attempt.name if attempt.plan.retain_s else None,
        )
        body = decode_body(a.body, prefilled.params, order)
        with (
            self._keeping.leg(attempt, node, need),
            self._given_back(attempt, body.get("kv_transfer_params") or {}) as progress,
        ):
            patient = not a.body.get("stream")
            async with self._leg(a, node.name, body, attempt.decode_work, patient=patient) as leg:
                if leg.answer.status == 200:
                    progress.begun = True
                    if a.binding:
                        self._bindings.bind(a.binding, node.name, tenant=a.scope.tenant)
                    await self._answer(attempt, prefilled, leg, reply)
                progress.ended = True
        return progress.begun

    async def _answer(self, attempt: Attempt, prefilled: Prefilled, leg: Leg, reply: Reply) -> None:
        path, reason, headers = account(attempt, prefilled)
        if leg.answer.streamed:
            await self._stream(attempt, prefilled, leg, path, headers, reply)
        else:
            await self._whole(attempt, prefilled, leg, headers, reply)
        self._metrics.turn(attempt.admitted.scope.tenant, path, reason)

    async def _stream(
        self, attempt: Attempt, prefilled: Prefilled, leg: Leg, path: Path, headers: Headers, reply: Reply
    ) -> None:
        events, answer = EventFilter(), leg.answer
        async for chunk in answer.chunks():
            leg.timed.answered()
            out = events.feed(chunk)
            if events.params is not None:
                self._keeping.keep(attempt, prefilled, leg.timed, events.params)
                events.params = None
            if not out:
                continue
            if not reply.started:
                a = attempt.admitted
                self._metrics.first_token(a.scope.tenant, path, time.perf_counter() - a.arrived)
                await reply.start(answer.status, answer.content_type, headers)
            await reply.send(out)
        if not reply.started:
            await reply.start(answer.status, answer.content_type, headers)
        await reply.send(events.rest())
        await reply.end()

    async def _whole(self, attempt: Attempt, prefilled: Prefilled, leg: Leg, headers: Headers, reply: Reply) -> None:
        answer = leg.answer
        body = outcomes.json_object(answer.node, await answer.read())
        if isinstance(params := body.get("kv_transfer_params"), dict):
            self._keeping.keep(attempt, prefilled, leg.timed, params)
        data = strip(body, shows_nulls=attempt.admitted.endpoint.shows_nulls)
        await reply.whole(answer.status, data, headers, answer.content_type)

    @asynccontextmanager
    async def _leg(
        self,
        a: Admitted,
        node: str,
        body: dict[str, Any],
        work: Work,
        *,
        patient: bool = False,
        on_sent: Callable[[], None] | None = None,
    ) -> AsyncIterator[Leg]:
        """One leg on a node: counted while it lasts, and held for or against the node when it ends."""
        url = self._fleet.url(node) + a.endpoint.path
        with self._fleet.leg(node, work.tokens, work.seconds, tells=not patient) as timed:
            try:
                sending = self._upstream.post(node, url, body, a.headers, patient=patient, on_sent=on_sent)
                async with sending as answer:
                    if answer.status >= 500:
                        log.warning("%s answered %d: %.500r", node, answer.status, await answer.read())
                        raise EngineFailed(node, answer.status)
                    yield Leg(answer=answer, timed=timed)
            except EngineError as e:
                self._fleet.failed(node, reached=e.reached)
                self._metrics.leg_failed(node)
                raise
            self._fleet.succeeded(node)

    @contextmanager
    def _given_back(self, attempt: Attempt, params: Mapping[str, Any]) -> Iterator[Progress]:
        """Of a leg that never began, nothing is left waiting; of one whose end nobody saw, nothing is kept."""
        progress, node = Progress(), attempt.plan.decode
        try:
            yield progress
        finally:
            if not progress.begun and (params.get("do_remote_prefill") or "release" in params.get(KEY, {})):
                self._releases.leg(node, params)
            if not (progress.ended or attempt.turn.kept) and "turn" in params.get(KEY, {}):
                self._releases.turn(node, attempt.name)
