import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.connector.middleware import HandleMiddleware, Message, Receive, Scope, Send
from kvflow.connector.wire import NODE_PATH, RELEASE_PATH, NodeReport, event

HANDLE = {"remote_engine_id": "epoch", "kvflow": {"retained": True}}


class Client:
    """As much of vLLM's engine client as the middleware and the application below touch."""

    def __init__(self, transfer: bool = True) -> None:
        config = SimpleNamespace(engine_id="epoch", kv_role="kv_consumer") if transfer else None
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=config,
            cache_config=SimpleNamespace(block_size=128, enable_prefix_caching=True),
            model_config=SimpleNamespace(max_model_len=4096),
            parallel_config=SimpleNamespace(data_parallel_size=4, data_parallel_size_local=2, local_engines_only=False),
        )
        self.open: set[str] = set()
        self.released: list[dict[str, Any]] = []
        self.ranks: list[int | None] = []

    async def generate(self, prompt: str, request_id: str) -> AsyncGenerator[Any, None]:
        self.open.add(request_id)
        try:
            for i, word in enumerate(words := prompt.split()):
                last = i == len(words) - 1
                handle = {**HANDLE, "of": request_id} if last and word != "bare" else None
                yield SimpleNamespace(text=word, finished=last, kv_transfer_params=handle)
                await asyncio.sleep(0)
        finally:
            self.open.discard(request_id)

    async def notify_kv_transfer_request_rejected(
        self, _request_id: str, params: dict[str, Any], *, data_parallel_rank: int | None = None
    ) -> None:
        self.released.append(params)
        self.ranks.append(data_parallel_rank)


class Application:
    """An API server in the small: the path names the answer's kind, the query is the prompt."""

    def __init__(self, client: Client) -> None:
        self.state = SimpleNamespace(engine_client=client)

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        kind = b"application/json" if scope["path"] == "/json" else b"text/event-stream; charset=utf-8"
        status = 404 if scope["path"] == NODE_PATH else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"Content-Type", kind)]})
        prompt = scope["query_string"].decode()
        async for output in self.state.engine_client.generate(prompt, request_id=prompt):
            await send(
                {"type": "http.response.body", "body": b"data: %b\n\n" % output.text.encode(), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def scope(app: Application, path: str = "/sse", query: str = "a b c", kind: str = "http") -> Scope:
    return {"type": kind, "method": "GET", "path": path, "query_string": query.encode(), "app": app}


async def never() -> Message:
    raise AssertionError("nobody asks for the body")


class Server:
    def __init__(self, client: Client | None = None) -> None:
        self.client = client or Client()
        self.app = Application(self.client)
        self.served = HandleMiddleware(self.app)

    async def messages(self, **request: str) -> AsyncIterator[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await self.served(scope(self.app, **request), never, send)
        for message in sent:
            yield message

    async def body(self, **request: str) -> bytes:
        return b"".join([m.get("body", b"") async for m in self.messages(**request)])


def with_handle(of: str) -> bytes:
    return event({**HANDLE, "of": of})


async def test_the_handle_comes_before_the_output_that_it_came_with() -> None:
    body = await Server().body(query="a b c")
    assert body == b"data: a\n\ndata: b\n\n" + with_handle("a b c") + b"data: c\n\ndata: [DONE]\n\n"


async def test_answers_that_are_not_streams_stay_as_they_are() -> None:
    assert await Server().body(path="/json") == b"data: a\n\ndata: b\n\ndata: c\n\ndata: [DONE]\n\n"


async def test_a_stream_without_a_handle_stays_as_it_is() -> None:
    assert await Server().body(query="a bare") == b"data: a\n\ndata: bare\n\ndata: [DONE]\n\n"


async def test_every_request_gets_its_own_handle() -> None:
    server = Server()
    prompts = [f"{'word ' * (i % 5)}r{i}" for i in range(30)]
    bodies = await asyncio.gather(*(server.body(query=p) for p in prompts))
    for prompt, body in zip(prompts, bodies, strict=True):
        assert body.count(b"event: kvflow") == 1
        assert with_handle(prompt) in body


async def test_outputs_may_be_drawn_in_another_task() -> None:
    server = Server()

    async def elsewhere(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.create_task(server.app(scope, receive, send))

    assert with_handle("x y") in await _body(HandleMiddleware(elsewhere), scope(server.app, query="x y"))


async def test_a_client_that_leaves_leaves_nothing_open() -> None:
    server = Server()

    async def gone(message: Message) -> None:
        if message.get("body"):
            raise OSError("the client has left")

    with pytest.raises(OSError, match="left"):
        await server.served(scope(server.app), never, gone)
    await asyncio.sleep(0.01)
    assert server.client.open == set()
    assert with_handle("next") in await server.body(query="next")


async def test_a_cancelled_request_closes_the_engines_stream() -> None:
    server = Server()
    started = asyncio.Event()

    async def stuck(message: Message) -> None:
        if message.get("body"):
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(server.served(scope(server.app), never, stuck))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.01)
    assert server.client.open == set()


async def test_a_replaced_engine_client_is_watched_too() -> None:
    server = Server()
    await server.body()
    server.app.state.engine_client = Client()
    assert with_handle("a b c") in await server.body()


async def test_a_generator_outside_any_request_works() -> None:
    server = Server()
    await server.body()
    assert [o.text async for o in server.client.generate("a b", request_id="direct")] == ["a", "b"]


async def test_node_report() -> None:
    pytest.importorskip("vllm")
    messages = [m async for m in Server().messages(path=NODE_PATH)]
    assert messages[0]["status"] == 200
    report = NodeReport.from_wire(json.loads(messages[1]["body"]))
    assert (report.epoch, report.role, report.block_size, report.max_model_len) == ("epoch", "decode", 128, 4096)


async def test_an_engine_that_transfers_nothing_has_no_node_report() -> None:
    messages = [m async for m in Server(Client(transfer=False)).messages(path=NODE_PATH)]
    assert messages[0]["status"] == 404


async def test_of_several_ranks_none_is_told_not_to_wait_for_what_another_may_be_reading() -> None:
    server = Server()
    params = {"do_remote_prefill": True, "kvflow": {"release": ["x"]}}
    assert (await _post(server, json.dumps({"kv_transfer_params": params}).encode()))[0]["status"] == 200
    assert server.client.released == [{**params, "do_remote_prefill": False}]


async def test_a_release_reaches_the_engine_however_its_body_is_cut() -> None:
    server = Server()
    server.client.vllm_config.parallel_config.data_parallel_size = 1
    assert (await _post(server, b'{"kv_transfer_', b'params": {"a": 1}}'))[0]["status"] == 200
    assert server.client.released == [{"a": 1}]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"kv_transfer_params": 7}', b"\xff"])
async def test_a_release_of_nothing_is_refused(body: bytes) -> None:
    server = Server()
    assert (await _post(server, body))[0]["status"] == 400
    assert server.client.released == []


@pytest.mark.parametrize("rank", [None, 0, 3])
async def test_a_release_goes_to_the_rank_that_it_names(rank: int | None) -> None:
    server = Server()
    body = {"kv_transfer_params": {"a": 1}, "data_parallel_rank": rank}
    assert (await _post(server, json.dumps(body).encode()))[0]["status"] == 200
    assert server.client.ranks == [rank]


@pytest.mark.parametrize("rank", [-1, 4, 1.0, "0", True, [0]])
async def test_a_rank_that_there_is_not_is_refused(rank: object) -> None:
    server = Server()
    answer = await _post(server, json.dumps({"kv_transfer_params": {}, "data_parallel_rank": rank}).encode())
    assert answer[0]["status"] == 400
    assert "0 to 3" in json.loads(answer[1]["body"])["error"]
    assert server.client.released == []


async def test_ranks_of_other_api_servers_are_not_this_ones() -> None:
    server = Server()
    server.client.vllm_config.parallel_config.local_engines_only = True
    body = b'{"kv_transfer_params": {}, "data_parallel_rank": 2}'
    assert (await _post(server, body))[0]["status"] == 400


async def test_what_is_not_http_passes() -> None:
    assert [m async for m in Server().messages(kind="websocket")] == [{"type": "websocket.close"}]


async def _post(server: Server, *parts: bytes) -> list[Message]:
    sent: list[Message] = []
    left = list(parts)

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Message) -> None:
        sent.append(message)

    await server.served({**scope(server.app, path=RELEASE_PATH), "method": "POST"}, receive, send)
    return sent


async def _body(app: HandleMiddleware, request: Scope) -> bytes:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await app(request, never, send)
    return b"".join(m.get("body", b"") for m in sent)
