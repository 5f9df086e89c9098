"""HTTP from the router to the engines. Whatever goes wrong there becomes an `EngineError` that names the node only."""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, Self

import aiohttp

from kvflow.errors import KvflowError


class EngineError(KvflowError):
    """A node did not answer a leg. `reached` is False if the request never got there."""

    status = 502
    kind = "BadGatewayError"

    def __init__(self, node: str, what: str, *, reached: bool) -> None:
        super().__init__(f"{node} {what}")
        self.node = node
        self.what = what
        self.reached = reached


class Answer:
    """An engine's response whose status and content type are known and whose body may still be coming."""

    def __init__(self, node: str, response: aiohttp.ClientResponse) -> None:
        self.node = node
        self.status = response.status
        self.content_type = response.headers.get("content-type", "application/json")
        self._response = response

    @property
    def streamed(self) -> bool:
        return self.content_type.startswith("text/event-stream")

    async def read(self) -> bytes:
        with _translated(self.node):
            return await self._response.read()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as the network delivers it."""
        with _translated(self.node):
            async for chunk in self._response.content.iter_any():
                yield chunk


@contextmanager
def _translated(node: str) -> Iterator[None]:
    """Turns a failure of the HTTP client into an `EngineError` without addresses in it."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise EngineError(node, "cannot be reached", reached=False) from None
    except TimeoutError:
        raise EngineError(node, "did not answer in time", reached=True) from None
    except (aiohttp.ClientError, OSError):
        raise EngineError(node, "broke off the connection", reached=True) from None


async def _tell_sent(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx()


class Upstream:
    """A connection pool to all engines. Use as an asynchronous context manager, inside the loop that serves.

    `connect_timeout_s` bounds getting a connection, `silence_timeout_s` the time without a byte from an engine, except
    where an answer is awaited as a whole.
    """

    def __init__(self, *, connect_timeout_s: float, silence_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=silence_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Engines close idle connections after 5 s by default; reusing one later would fail a turn for nothing.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(_tell_sent)
        self._session = aiohttp.ClientSession(
            timeout=self._timeout,
            connector=connector,
            trace_configs=[trace],
            headers={"accept-encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),  # what one engine sets for one client is no business of another
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def post(
        self,
        node: str,
        url: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        *,
        patient: bool = False,
        on_sent: Callable[[], None] | None = None,
    ) -> AsyncIterator[Answer]:
        """Send JSON. Leaving before the answer is read to its end closes the connection, and the engine aborts.

        `patient` is for answers that come as a whole, when they are complete: silence then means nothing. `on_sent` is
        called when the request is on its way, before which no engine can have heard of it.
        """
        data = json.dumps(body, separators=(",", ":")).encode()
        sent = {**headers, "content-type": "application/json"}
        async with self.request("POST", node, url, data, sent, patient=patient, on_sent=on_sent) as answer:
            yield answer

    @asynccontextmanager
    async def request(
        self,
        method: str,
        node: str,
        url: str,
        data: bytes,
        headers: Mapping[str, str],
        *,
        patient: bool = False,
        on_sent: Callable[[], None] | None = None,
    ) -> AsyncIterator[Answer]:
        """As `post`, for what is sent as it is."""
        assert self._session is not None
        patience = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s)
        timeout = patience if patient else self._timeout
        with _translated(node):
            response = await self._session.request(
                method,
                url,
                data=data or None,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
                trace_request_ctx=on_sent,
            )
            if 300 <= response.status < 400:
                response.close()
                raise EngineError(node, "wants to send the request somewhere else", reached=True)
        try:
            yield Answer(node, response)
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def get(self, node: str, url: str, timeout_s: float) -> tuple[int, bytes]:
        assert self._session is not None
        with _translated(node):
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.get(url, timeout=timeout, allow_redirects=False) as response:
                return response.status, await response.read()
