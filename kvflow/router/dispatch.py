"""One turn: take the handle, plan, prefill leg, decode leg, answer, keep the new handle."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvflow.connector.wire import KEY, DecodeReport, PrefillReport, reason_from_wire
from kvflow.conversations import Conversations
from kvflow.errors import WireError
from kvflow.router.admit import Admitted
from kvflow.router.answer import Headers, Reply, error_event, strip, turn_headers
from kvflow.router.find import id_key, new_conversation
from kvflow.router.fleet import Fleet
from kvflow.router.legs import decode_body, prefill_body
from kvflow.router.metrics import Metrics
from kvflow.router.stream import EventFilter
from kvflow.router.upstream import Answer, EngineError, Upstream
from kvflow.types import Handle, NodeState, Path, Plan, Reason, View

log = logging.getLogger("kvflow.router")

EXPIRY_MARGIN_S = 6.0
"""Handles are given up this long before the engine frees the blocks: engines decline a pull in the last 5 seconds."""

_HANDLE_OVERHEAD = 4
"""Parsed JSON takes about so many times the memory of its text."""


class EngineFailed(EngineError):
    """A node answered a leg with a server error; if no other node does better, the client gets that answer."""

    def __init__(self, node: str, status: int, body: bytes) -> None:
        super().__init__(node, f"failed with status {status}", reached=True)
        self.answer_status = status
        self.body = body


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefilled:
    """The outcome of a prefill leg: an engine's refusal of the request, or what the decode leg needs."""

    params: dict[str, Any] | None = None
    report: PrefillReport | None = None
    refusal: tuple[int, bytes] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One try at a turn, with everything decided."""

    admitted: Admitted
    conversation: str
    plan: Plan
    handle: Handle | None


class Dispatcher:
    """Serves turns. Holds no state of its own between them."""

    def __init__(self, fleet: Fleet, conversations: Conversations, upstream: Upstream, metrics: Metrics) -> None:
        self._fleet = fleet
        self._conversations = conversations
        self._upstream = upstream
        self._metrics = metrics

    async def serve(self, admitted: Admitted, reply: Reply) -> None:
        """Answer a turn; a leg that breaks before the answer has begun is made up for once, cold, on other nodes.

        Raises `NoNodeError`, or `EngineError` if the second try breaks as well.
        """
        if not admitted.keys.lookup:
            self._metrics.unkeyed()
        taken = self._conversations.take(admitted.keys.lookup)
        conversation = admitted.keys.conversation or (taken.conversation if taken else new_conversation())
        handle = taken.handle if taken else None
        try:
            await self._try(self._plan(admitted, conversation, handle), reply)
        except EngineError as e:
            log.warning("%s", e)
            if reply.started:
                await self._give_up(e, reply)
            else:
                await self._try_again(self._plan(admitted, conversation, None, broken=e.node), reply)

    def _plan(self, admitted: Admitted, conversation: str, handle: Handle | None, broken: str = "") -> _Attempt:
        plan = admitted.policy.plan(replace(admitted.turn, handle=handle), _without(self._fleet.view(), broken))
        if not admitted.keys.filing:
            plan = replace(plan, retain_s=0.0)  # nobody could find it again
        if broken:
            plan = replace(plan, reason=Reason.RETRIED)
        return _Attempt(admitted=admitted, conversation=conversation, plan=plan, handle=handle)

    async def _try(self, attempt: _Attempt, reply: Reply) -> None:
        prefilled = _Prefilled()
        if attempt.plan.prefill is not None:
            prefilled = await self._prefill(attempt, attempt.plan.prefill)
        if prefilled.refusal is not None:
            status, body = prefilled.refusal
            await reply.whole(status, body)
        else:
            await self._decode(attempt, prefilled, reply)

    async def _try_again(self, attempt: _Attempt, reply: Reply) -> None:
        """The last try: what goes wrong now is the client's answer."""
        try:
            await self._try(attempt, reply)
        except EngineFailed as e:
            if reply.started:
                await self._give_up(e, reply)
            else:
                await reply.whole(e.answer_status, e.body)
        except EngineError as e:
            if not reply.started:
                raise
            await self._give_up(e, reply)

    async def _prefill(self, attempt: _Attempt, node: str) -> _Prefilled:
        a, plan = attempt.admitted, attempt.plan
        body = prefill_body(a.body, plan, attempt.handle if plan.path is Path.PULL else None)
        with self._leg(node, a.turn.prompt_tokens):
            url = self._fleet.url(node) + a.endpoint
            async with self._upstream.post(node, url, body, a.headers) as answer:
                data = await answer.read()
                _raise_server_error(answer, data)
        if answer.status != 200:
            return _Prefilled(refusal=(answer.status, data))
        params, report = _prefill_outcome(node, data)
        if report is not None:
            self._fleet.report_blocks(node, report.blocks)
            self._metrics.prefilled(node, report)
        return _Prefilled(params=params, report=report)

    async def _decode(self, attempt: _Attempt, prefilled: _Prefilled, reply: Reply) -> None:
        a, node = attempt.admitted, attempt.plan.decode
        digest = prefilled.report.prompt_digest if prefilled.report else None
        body = decode_body(a.body, attempt.plan, prefilled.params, digest)
        with self._leg(node, a.turn.prompt_tokens):
            url = self._fleet.url(node) + a.endpoint
            async with self._upstream.post(node, url, body, a.headers) as answer:
                if answer.status >= 500:
                    _raise_server_error(answer, await answer.read())
                path, headers = self._account(attempt, prefilled.report)
                if answer.streamed:
                    await self._stream(attempt, answer, path, headers, reply)
                else:
                    await self._whole(attempt, answer, headers, reply)

    def _account(self, attempt: _Attempt, report: PrefillReport | None) -> tuple[Path, Headers]:
        """What happened, as opposed to what was planned."""
        plan = attempt.plan
        pulled = report.pulled_tokens if report else 0
        path = Path.COLD if plan.path is Path.PULL and not pulled else plan.path
        reason = plan.reason
        if plan.path is Path.PULL and report is not None:
            reason = reason_from_wire(report.reason)
        self._metrics.turn(path, reason)
        return path, turn_headers(
            path=path,
            pulled=pulled,
            reason=reason,
            conversation=attempt.conversation,
            prefill=plan.prefill,
            decode=plan.decode,
        )

    async def _stream(self, attempt: _Attempt, answer: Answer, path: Path, headers: Headers, reply: Reply) -> None:
        events = EventFilter()
        begun = False
        async for chunk in answer.chunks():
            out = events.feed(chunk)
            if events.params is not None:
                self._keep(attempt, events.params)
                events.params = None
            if not out:
                continue
            if not begun:
                begun = True
                self._metrics.first_token(path, time.perf_counter() - attempt.admitted.arrived)
                await reply.start(answer.status, answer.content_type, headers)
            await reply.send(out)
        if not begun:
            await reply.start(answer.status, answer.content_type, headers)
        await reply.send(events.rest())
        await reply.end()

    async def _whole(self, attempt: _Attempt, answer: Answer, headers: Headers, reply: Reply) -> None:
        data = await answer.read()
        if answer.status == 200:
            body = _json_object(answer.node, data)
            if isinstance(params := body.get("kv_transfer_params"), dict):
                self._keep(attempt, params)
            data = json.dumps(strip(body), ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
        await reply.whole(answer.status, data, headers, answer.content_type)

    def _keep(self, attempt: _Attempt, params: dict[str, Any]) -> None:
        """File the handle of the finished turn, if the decode node kept anything."""
        node = attempt.plan.decode
        try:
            report = DecodeReport.from_wire(params.get(KEY))
            # With data parallelism, engine ids are the epoch and the rank.
            epoch = str(params["remote_engine_id"]).partition("_dp")[0] if report.retained else ""
        except (WireError, KeyError):
            return
        self._fleet.report_blocks(node, report.blocks)
        self._metrics.decoded(node, report)
        if not report.retained:
            return
        handle = Handle(
            node=node,
            epoch=epoch,
            tokens=report.tokens,
            deadline=self._fleet.view().now + report.retain_s - EXPIRY_MARGIN_S,
            params=params,
            size=_HANDLE_OVERHEAD * len(json.dumps(params)),
        )
        a = attempt.admitted
        self._conversations.put(attempt.conversation, (*a.keys.filing, id_key(attempt.conversation, a.scope)), handle)

    @contextmanager
    def _leg(self, node: str, tokens: int) -> Iterator[None]:
        """One leg on a node: counted while it lasts, and held for or against the node when it ends."""
        with self._fleet.leg(node, tokens):
            try:
                yield
            except EngineError as e:
                self._fleet.failed(node, reached=e.reached)
                self._metrics.leg_failed(node)
                raise
            self._fleet.succeeded(node)

    async def _give_up(self, error: EngineError, reply: Reply) -> None:
        """The answer had begun: end the stream with an error, as an engine would."""
        await reply.send(error_event(error))
        await reply.end()


def _without(view: View, broken: str) -> View:
    """The view without the node that has just failed under this turn, unless that empties its pool."""

    def rest(nodes: tuple[NodeState, ...]) -> tuple[NodeState, ...]:
        return tuple(n for n in nodes if n.name != broken) or nodes

    return replace(view, prefill=rest(view.prefill), decode=rest(view.decode))


def _raise_server_error(answer: Answer, data: bytes) -> None:
    if answer.status >= 500:
        raise EngineFailed(answer.node, answer.status, data)


def _json_object(node: str, data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise EngineError(node, "answered with something else than a JSON object", reached=True)
    return body


def _prefill_outcome(node: str, data: bytes) -> tuple[dict[str, Any] | None, PrefillReport | None]:
    """The handle for the decode node and the connector's report; a stock engine sends no report."""
    body = _json_object(node, data)
    choices = body.get("choices") or [{}]
    if choices[0].get("finish_reason") == "error":
        raise EngineError(node, "could not load the KV it was to pull", reached=True)
    params = body.get("kv_transfer_params")
    if not isinstance(params, dict):
        return None, None
    report = params.pop(KEY, None)
    try:
        return params, PrefillReport.from_wire(report) if report is not None else None
    except WireError as e:
        raise EngineError(node, f"sent a broken report: {e}", reached=True) from None
