"""Requests that one engine answers on its own, passed to it and back as they are: no conversation, no policy."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from starlette.requests import Request

from kvflow.errors import NoNodeError, RequestError
from kvflow.router.admit import forwarded
from kvflow.router.answer import Reply, blank
from kvflow.router.bindings import Bindings, binding
from kvflow.router.fleet import Fleet
from kvflow.router.isolation import confined_headers, no_such_response, with_own_media
from kvflow.router.legs import clean
from kvflow.router.shapes import MALFORMED, UnreadableError
from kvflow.router.stream import EventFilter
from kvflow.router.upstream import Answer, EngineError, Upstream
from kvflow.tenants import Tenant
from kvflow.types import NodeState, Role, View

READ_BY_ANY = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
"""Endpoints that every engine answers alike. The path is the engine's too."""

STORED = ("/v1/responses/{response_id}", "GET"), ("/v1/responses/{response_id}/cancel", "POST")
"""Endpoints for which the engine that stored the answer is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    fleet: Fleet
    upstream: Upstream
    bindings: Bindings

    async def serve(self, request: Request, path: str, data: bytes, reply: Reply, tenant: Tenant) -> None:
        """`path` is the route's own. What breaks before the answer has begun is tried on one other node.

        Raises `RequestError` (`NoNodeError` among them) and `EngineError`.
        """
        data = _cleaned(data, tenant)
        headers = confined_headers(forwarded(request.headers), tenant)
        if (content_type := request.headers.get("content-type")) is not None:
            headers["content-type"] = content_type
        first, *others = self._nodes(request.path_params.get("response_id"), tenant)
        try:
            await self._ask(first.name, request, path, data, headers, reply)
        except EngineError as e:
            self.fleet.failed(e.node, reached=e.reached)
            if reply.started or not others:
                raise
            await self._ask(others[0].name, request, path, data, headers, reply)

    def _nodes(self, response: str | None, tenant: Tenant) -> Sequence[NodeState]:
        """Whom to ask, best first."""
        view = self.fleet.view()
        bound = None if response is None else self.bindings.node(binding(tenant.name, response))
        if response is not None and bound is None and tenant.isolated:
            raise no_such_response(response)
        nodes = _idlest(view) if response is None else [n for n in _idlest(view) if n.role is Role.DECODE]
        if bound is not None:
            nodes = [n for n in nodes if n.name == bound] or nodes
        if not nodes:
            raise NoNodeError("; ".join(self.fleet.missing()))
        return nodes

    async def _ask(
        self, node: str, request: Request, path: str, data: bytes, headers: Mapping[str, str], reply: Reply
    ) -> None:
        url = self.fleet.url(node) + _filled(path, request)
        async with self.upstream.request(request.method, node, url, data, headers) as answer:
            if answer.streamed:
                await _stream(answer, reply)
            else:
                await reply.whole(answer.status, blank(await answer.read()), (), answer.content_type)


def _idlest(view: View) -> list[NodeState]:
    return sorted((n for n in (*view.decode, *view.prefill) if n.ready), key=lambda n: n.queued_tokens)


def _filled(path: str, request: Request) -> str:
    ids = {k: quote(v, safe="") for k, v in request.path_params.items()}
    if not {".", ".."}.isdisjoint(ids.values()):
        raise RequestError("Not Found", status=404, kind="Not Found")  # they would climb out of their place in the path
    query = request.url.query
    return path.format_map(ids) + (f"?{query}" if query else "")


def _cleaned(data: bytes, tenant: Tenant) -> bytes:
    """What is no JSON object is the engine's to refuse, but not what only this process cannot read."""
    try:
        body = json.loads(data)
    except RecursionError:
        raise UnreadableError("There was an error parsing the body", kind=MALFORMED) from None
    except ValueError:
        return data
    if not isinstance(body, dict) or (cleaned := with_own_media(clean(body), tenant)) == body:
        return data
    return json.dumps(cleaned, separators=(",", ":")).encode()


async def _stream(answer: Answer, reply: Reply) -> None:
    events = EventFilter()
    await reply.start(answer.status, answer.content_type, ())
    async for chunk in answer.chunks():
        if out := events.feed(chunk):
            await reply.send(out)
    await reply.send(events.rest())
    await reply.end()
