"""Legs that end before the engine was given them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvflow.connector.middleware import HandleMiddleware, Message, Receive, Scope, Send
from kvflow.connector.wire import KEY
from tests.connector.test_middleware import Application, Client, scope
from tests.connector.turns import COLD, DIRECT, FROM_PREFILL

PULL = {**FROM_PREFILL, **COLD, KEY: {"min_pull_tokens": 1}}
GIVING_UP = {**DIRECT, KEY: {"release": ["a"]}}

Handler = Callable[[Client, dict[str, Any]], Awaitable[None]]


async def refuse(_client: Client, _body: dict[str, Any]) -> None:
    pass


async def fail(_client: Client, _body: dict[str, Any]) -> None:
    raise RuntimeError("a bug in a handler")


async def prepare_only(client: Client, _body: dict[str, Any]) -> None:
    """The stream of a client that left before it was begun."""
    client.generate("a b", request_id="x")


async def serve(client: Client, _body: dict[str, Any]) -> None:
    async for _ in client.generate("a b", request_id="x"):
        pass


async def leave_early(client: Client, _body: dict[str, Any]) -> None:
    outputs = client.generate("a b", request_id="x")
    await anext(outputs)
    await outputs.aclose()


async def tell(client: Client, body: dict[str, Any]) -> None:
    """vLLM's own handlers, for decode legs that they refuse."""
    await client.notify_kv_transfer_request_rejected("x", body["kv_transfer_params"])


async def cancelled(client: Client, body: dict[str, Any]) -> None:
    """As vLLM does when the client leaves: the handler is cancelled, and nobody waits for its end."""

    async def handler() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await tell(client, body)

    task = asyncio.create_task(handler())
    await asyncio.sleep(0)
    task.cancel()


async def post(
    handler: Handler,
    data: object,
    headers: list[tuple[bytes, bytes]] | None = None,
    client: Client | None = None,
    *,
    path: str = "/v1/chat/completions",
) -> Client:
    """The engine's client, with what it was asked for."""
    client = client or Client()
    whole = json.dumps(data).encode()
    parts = [whole[i : i + 7] for i in range(0, len(whole), 7)]

    async def app(scope: Scope, receive: Receive, _send: Send) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        await handler(scope["app"].state.engine_client, json.loads(body + message["body"]))

    async def receive() -> Message:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(_message: Message) -> None:
        raise AssertionError("nothing is added")

    request = {**scope(Application(client), path), "method": "POST", "headers": headers or []}
    await HandleMiddleware(app)(request, receive, send)
    return client


@pytest.mark.parametrize("params", [PULL, GIVING_UP, {**DIRECT, KEY: {"abandon": ["a"]}}, {**FROM_PREFILL, KEY: {}}])
@pytest.mark.parametrize("handler", [refuse, prepare_only])
async def test_the_engine_is_told_of_a_leg_that_will_not_come(handler: Handler, params: dict[str, Any]) -> None:
    assert (await post(handler, {"kv_transfer_params": params})).released == [params]


async def test_and_of_one_that_a_bug_has_stopped() -> None:
    client = Client()
    with pytest.raises(RuntimeError, match="bug"):
        await post(fail, {"kv_transfer_params": PULL}, client=client)
    assert client.released == [PULL]


@pytest.mark.parametrize("handler", [serve, leave_early])
async def test_what_has_reached_the_engine_is_the_engines(handler: Handler) -> None:
    assert (await post(handler, {"kv_transfer_params": PULL})).released == []


@pytest.mark.parametrize("handler", [tell, cancelled])
async def test_the_engine_is_not_told_twice(handler: Handler) -> None:
    assert len((await post(handler, {"kv_transfer_params": FROM_PREFILL})).released) == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        7,
        {"kv_transfer_params": None},
        {"kv_transfer_params": 7},
        {"kv_transfer_params": {}},
        {"kv_transfer_params": {**COLD, KEY: {}}},
        {"kv_transfer_params": {**DIRECT, KEY: {"retain_s": 5, "release": []}}},
        {"kv_transfer_params": {**DIRECT, KEY: 7}},
    ],
)
async def test_where_nobody_waits_nobody_is_told(body: object) -> None:
    assert (await post(refuse, body)).released == []


async def test_other_endpoints_have_no_legs() -> None:
    """A client could write there what only the router may say."""
    assert (await post(refuse, {"kv_transfer_params": PULL}, path="/tokenize")).released == []


@pytest.mark.parametrize(("value", "rank"), [(b"2", 2), (b"9", None), (b"-1", None), (b"x", None)])
async def test_the_rank_that_the_leg_was_for_is_told(value: bytes, rank: int | None) -> None:
    client = await post(refuse, {"kv_transfer_params": PULL}, [(b"x-data-parallel-rank", value)])
    assert (client.released, client.ranks) == ([PULL], [rank])


async def test_an_engine_that_is_dead_is_not_the_clients_trouble(caplog: pytest.LogCaptureFixture) -> None:
    async def dead(*_: Any, **__: Any) -> None:
        raise ConnectionError("engine dead")

    async def die(client: Client, _body: dict[str, Any]) -> None:
        client.notify_kv_transfer_request_rejected = dead  # type: ignore[method-assign]

    await post(die, {"kv_transfer_params": PULL})
    assert "will not come" in caplog.text
