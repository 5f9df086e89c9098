"""One turn: take the handle, plan, prefill leg, decode leg, answer, keep the new handle."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvflow.connector.wire import RELEASE_PATH, blocks_from_wire, reason_from_wire
from kvflow.conversations import Conversations, Taken
from kvflow.errors import RequestError, WireError
from kvflow.router import outcomes
from kvflow.router.admit import Admitted
from kvflow.router.answer import Headers, Reply, error_event, refusal, strip, turn_headers
from kvflow.router.find import id_key, new_conversation
from kvflow.router.fleet import Fleet
from kvflow.router.legs import decode_body, prefill_body
from kvflow.router.metrics import Metrics
from kvflow.router.outcomes import Prefilled
from kvflow.router.stream import EventFilter
from kvflow.router.upstream import Answer, EngineError, Upstream
from kvflow.types import NodeState, Path, Plan, Reason, View

log = logging.getLogger("kvflow.router")

DRAIN_S = 2.0
_SPENT = (Reason.EXPIRED, Reason.NODE_GONE)
"""Why a handle that was not used is of no use later either."""


class EngineFailed(EngineError):
    """A node answered a leg with a server error."""

    def __init__(self, node: str, status: int) -> None:
        super().__init__(node, f"failed with status {status}", reached=True)
        self.status = status
        self.kind = "InternalServerError"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One try at a turn, with everything decided."""

    admitted: Admitted
    conversation: str
    plan: Plan
    taken: Taken | None
    """The handle that this attempt may use."""


class Dispatcher:
    """Serves turns. Between them it holds nothing but the releases that are under way."""

    def __init__(self, fleet: Fleet, conversations: Conversations, upstream: Upstream, metrics: Metrics) -> None:
        self._fleet = fleet
        self._conversations = conversations
        self._upstream = upstream
        self._metrics = metrics
        self._releases: set[asyncio.Task[None]] = set()

    async def serve(self, admitted: Admitted, reply: Reply) -> None:
        """Answer a turn; a leg that breaks before the answer has begun is made up for once, cold, on other nodes.

        Raises `NoNodeError`, or `EngineError` if the second try breaks as well.
        """
        if not admitted.keys.lookup:
            self._metrics.unkeyed()
        taken = self._conversations.take(admitted.keys.lookup)
        known = taken.conversation if taken and taken.complete else new_conversation()
        conversation = admitted.keys.conversation or known
        try:
            try:
                await self._try(self._plan(admitted, conversation, taken), reply)
            except EngineError as e:
                log.warning("%s", e)
                if reply.started:
                    raise
                await self._try(self._plan(admitted, conversation, None, broken=e.node), reply)
        except EngineError as e:
            if not reply.started:
                raise
            await reply.send(error_event(e))
            await reply.end()

    def _plan(self, admitted: Admitted, conversation: str, taken: Taken | None, broken: str = "") -> _Attempt:
        turn = replace(admitted.turn, handle=taken.handle if taken else None)
        try:
            plan = admitted.policy.plan(turn, _without(self._fleet.view(), broken))
        except RequestError:
            self._put_back(taken)
            raise
        if taken and plan.path is not Path.PULL and plan.reason not in _SPENT:
            self._put_back(taken)
        if not admitted.keys.filing:
            plan = replace(plan, retain_s=0.0)  # nobody could find it again
        if broken:
            plan = replace(plan, reason=Reason.RETRIED)
        used = taken if plan.path is Path.PULL else None
        return _Attempt(admitted=admitted, conversation=conversation, plan=plan, taken=used)

    def _put_back(self, taken: Taken | None) -> None:
        """No engine has heard of the handle: the next turn may have it."""
        if taken:
            self._conversations.put_back(taken)

    async def _try(self, attempt: _Attempt, reply: Reply) -> None:
        prefilled = Prefilled()
        if attempt.plan.prefill is not None:
            prefilled = await self._prefill(attempt, attempt.plan.prefill)
        if prefilled.refusal is not None:
            # The handle is not put back: vLLM can refuse after it has pulled, and a second read would be of other KV.
            status, body = prefilled.refusal
            await reply.whole(status, refusal(status, body))
        else:
            await self._decode(attempt, prefilled, reply)

    async def _prefill(self, attempt: _Attempt, node: str) -> Prefilled:
        a = attempt.admitted
        body = prefill_body(a.body, attempt.plan, attempt.taken.handle if attempt.taken else None)
        async with self._leg(a, node, body) as answer:
            data = await answer.read()
        if answer.status != 200:
            return Prefilled(refusal=(answer.status, data))
        prefilled = outcomes.prefilled(node, data)
        if prefilled.report is not None:
            self._metrics.prefilled(node, prefilled.report)
            self._report_blocks(node, prefilled.report.blocks)
        return prefilled

    async def _decode(self, attempt: _Attempt, prefilled: Prefilled, reply: Reply) -> None:
        a, node = attempt.admitted, attempt.plan.decode
        body = decode_body(a.body, attempt.plan, prefilled.params, prefilled.prompt_digest)
        with self._released_unless_handed_over(node, prefilled.params) as handed_over:
            async with self._leg(a, node, body, patient=not a.body.get("stream")) as answer:
                if answer.status == 200:
                    handed_over.set()
                    await self._answer(attempt, prefilled, answer, reply)
                else:
                    data = refusal(answer.status, await answer.read())
                    await reply.whole(answer.status, data, (), answer.content_type)

    async def _answer(self, attempt: _Attempt, prefilled: Prefilled, answer: Answer, reply: Reply) -> None:
        path, reason, headers = _account(attempt, prefilled)
        if answer.streamed:
            await self._stream(attempt, answer, path, headers, reply)
        else:
            await self._whole(attempt, answer, headers, reply)
        self._metrics.turn(path, reason)

    async def _stream(self, attempt: _Attempt, answer: Answer, path: Path, headers: Headers, reply: Reply) -> None:
        events = EventFilter()
        async for chunk in answer.chunks():
            out = events.feed(chunk)
            if events.params is not None:
                self._keep(attempt, events.params)
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

    async def _whole(self, attempt: _Attempt, answer: Answer, headers: Headers, reply: Reply) -> None:
        body = outcomes.json_object(answer.node, await answer.read())
        if isinstance(params := body.get("kv_transfer_params"), dict):
            self._keep(attempt, params)
        await reply.whole(answer.status, strip(body), headers, answer.content_type)

    def _keep(self, attempt: _Attempt, params: dict[str, Any]) -> None:
        """File the handle of the finished turn, if the decode node kept anything."""
        node, a = attempt.plan.decode, attempt.admitted
        try:
            report = outcomes.decode_report(params)
            if report is None:
                return
            self._metrics.decoded(node, report)
            self._report_blocks(node, report.blocks)
            if not report.retained:
                return
            handle = outcomes.handle(node, params, report, self._fleet.view().now)
        except WireError as e:
            log.warning("%s ended a turn in a way that makes no sense; nothing is kept: %s", node, e)
            return
        keys = (*a.keys.filing, id_key(attempt.conversation, a.scope))
        self._conversations.put(attempt.conversation, keys, handle)

    def _report_blocks(self, node: str, blocks: dict[str, int] | None) -> None:
        try:
            self._fleet.report_blocks(node, blocks_from_wire(blocks))
        except WireError as e:
            log.warning("%s reported its blocks in a way that makes no sense: %s", node, e)

    @asynccontextmanager
    async def _leg(
        self, a: Admitted, node: str, body: dict[str, Any], *, patient: bool = False
    ) -> AsyncIterator[Answer]:
        """One leg on a node: counted while it lasts, and held for or against the node when it ends."""
        url = self._fleet.url(node) + a.endpoint
        with self._fleet.leg(node, a.turn.prompt_tokens):
            try:
                async with self._upstream.post(node, url, body, a.headers, patient=patient) as answer:
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
    def _released_unless_handed_over(self, node: str, params: dict[str, Any] | None) -> Iterator[asyncio.Event]:
        """See to it that a prefill node does not keep a prompt for a decode leg that never began."""
        handed_over = asyncio.Event()
        try:
            yield handed_over
        finally:
            if params and not handed_over.is_set():
                self._in_background(self._release(node, params))

    async def _release(self, node: str, params: dict[str, Any]) -> None:
        url, body = self._fleet.url(node) + RELEASE_PATH, {"kv_transfer_params": params}
        try:
            async with self._upstream.post(node, url, body, {}):
                return
        except EngineError as e:
            log.info("a prompt stays with its prefill node until its lease ends: %s", e)

    async def drain(self) -> None:
        """Let the releases that are under way come to their end, but not for long: leases end by themselves."""
        if self._releases:
            _, late = await asyncio.wait(self._releases, timeout=DRAIN_S)
            for task in late:
                task.cancel()

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name="release")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)


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
        conversation=attempt.conversation,
        prefill=plan.prefill,
        decode=plan.decode,
    )
    return path, reason, headers


def _without(view: View, broken: str) -> View:
    """The view without the node that has just failed under this turn, unless that empties its pool."""

    def rest(nodes: tuple[NodeState, ...]) -> tuple[NodeState, ...]:
        return tuple(n for n in nodes if n.name != broken) or nodes

    return replace(view, prefill=rest(view.prefill), decode=rest(view.decode))
