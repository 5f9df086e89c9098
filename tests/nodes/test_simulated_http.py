"""A simulated engine as a client of its API sees it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from kvflow.connector.wire import EVENT_PREFIX, KEY, NODE_PATH, DecodeOrder, NodeReport
from kvflow.nodes.base import NodeSpec
from kvflow.nodes.simulated import Fabric, SimulatedNode
from kvflow.types import Role
from tests.net import free_ports
from tests.nodes.simulation import COLD, DIRECT, SMALL

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Tell me a story of some length, please."}]
KEEP = {**DIRECT, KEY: DecodeOrder(retain_s=480, max_pinned_share=0.5).to_wire()}

Build = Callable[..., SimulatedNode]


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    nodes: list[SimulatedNode] = []
    fabric = Fabric()

    async def start(role: Role = Role.DECODE, **fields: Any) -> SimulatedNode:
        spec = NodeSpec(name=f"{role}-{len(nodes)}", role=role, url=f"http://127.0.0.1:{free_ports(1)[0]}")
        nodes.append(SimulatedNode(spec, replace(SMALL, **fields), fabric))
        await nodes[-1].start()
        return nodes[-1]

    yield start
    for node in nodes:
        await node.stop()
        assert node.engine.check() == []


@pytest.fixture
async def node(start: Callable[..., Any]) -> SimulatedNode:
    started: SimulatedNode = await start()
    return started


class Client:
    def __init__(self, http: aiohttp.ClientSession, node: SimulatedNode) -> None:
        self.http = http
        self.url = node.spec.url

    async def post(self, path: str, body: object = None, **options: Any) -> tuple[int, Any]:
        options = options or {"json": body}
        async with self.http.post(self.url + path, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.text()

    async def stream(self, path: str, body: dict[str, Any]) -> list[str]:
        """The events, as text."""
        async with self.http.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.content_type == "text/event-stream"
            text = (await response.read()).decode()
        assert text.endswith("\n\n")
        return text.split("\n\n")[:-1]


@pytest.fixture
def client(http: aiohttp.ClientSession, node: SimulatedNode) -> Client:
    return Client(http, node)


def chunks(events: list[str]) -> Iterator[dict[str, Any]]:
    for event in events:
        if event.startswith("data: {"):
            yield json.loads(event.removeprefix("data: "))


def text(path: str, choice: dict[str, Any]) -> str:
    if path == COMPLETION:
        return str(choice["text"])
    return str(choice.get("message", choice.get("delta", {})).get("content", ""))


def question(path: str) -> dict[str, Any]:
    return {"messages": MESSAGES, "max_tokens": 12} if path == CHAT else {"prompt": "Once upon", "max_tokens": 12}


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what the server does next is not announced
        await asyncio.sleep(0.001)


# Answers


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_streamed_answer_is_the_same_answer(client: Client, path: str) -> None:
    status, whole = await client.post(path, question(path))
    assert status == 200
    events = await client.stream(path, {**question(path), "stream_options": {"include_usage": True}})
    *parts, usage = chunks(events)
    assert "".join(text(path, c["choices"][0]) for c in parts) == text(path, whole["choices"][0])
    assert parts[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert usage["choices"] == []
    assert {k: usage["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        k: whole["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    assert events[-1] == "data: [DONE]"


async def test_usage_comes_only_where_it_was_asked_for(client: Client) -> None:
    plain = await client.stream(CHAT, question(CHAT))
    assert not any("usage" in c for c in chunks(plain))
    options = {"include_usage": True, "continuous_usage_stats": True}
    counted = list(chunks(await client.stream(CHAT, {**question(CHAT), "stream_options": options})))
    assert [c["usage"]["completion_tokens"] for c in counted] == [*range(len(counted) - 1), len(counted) - 2]


async def test_a_chat_is_answered_like_its_rendered_prompt(client: Client) -> None:
    _, asked = await client.post(CHAT, question(CHAT))
    _, tokens = await client.post("/tokenize", {"messages": MESSAGES})
    _, completed = await client.post(COMPLETION, {"prompt": tokens["tokens"], "max_tokens": 12})
    assert tokens["count"] == asked["usage"]["prompt_tokens"]
    assert completed["choices"][0]["text"] == asked["choices"][0]["message"]["content"]


async def test_several_choices_and_prompts(client: Client) -> None:
    _, two = await client.post(CHAT, {**question(CHAT), "n": 2})
    assert [c["index"] for c in two["choices"]] == [0, 1]
    assert two["choices"][0]["message"] == two["choices"][1]["message"]
    _, four = await client.post(COMPLETION, {"prompt": ["One day", "At night"], "n": 2, "max_tokens": 4})
    assert [c["index"] for c in four["choices"]] == [0, 1, 2, 3]
    assert four["usage"]["completion_tokens"] == 16
    streamed = list(chunks(await client.stream(COMPLETION, {"prompt": ["One day", "At night"], "max_tokens": 4})))
    assert {c["choices"][0]["index"] for c in streamed} == {0, 1}


async def test_the_prompt_is_echoed_on_request(client: Client) -> None:
    _, plain = await client.post(COMPLETION, question(COMPLETION))
    _, echoed = await client.post(COMPLETION, {**question(COMPLETION), "echo": True})
    assert echoed["choices"][0]["text"] == "Once upon" + plain["choices"][0]["text"]
    streamed = chunks(await client.stream(COMPLETION, {**question(COMPLETION), "echo": True}))
    assert "".join(c["choices"][0]["text"] for c in streamed) == echoed["choices"][0]["text"]


async def test_a_request_id_is_kept(http: aiohttp.ClientSession, node: SimulatedNode) -> None:
    async with http.post(node.spec.url + CHAT, json=question(CHAT), headers={"x-request-id": "mine"}) as response:
        assert (await response.json())["id"] == "chatcmpl-mine"
    [received] = node.app.received
    assert (received.path, received.body, received.headers["x-request-id"]) == (CHAT, question(CHAT), "mine")


# Handles


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_stream_carries_the_handle_before_the_end_of_the_answer(
    client: Client, node: SimulatedNode, path: str
) -> None:
    _, whole = await client.post(path, {**question(path), "kv_transfer_params": KEEP})
    assert whole["kv_transfer_params"][KEY]["retained"]
    events = await client.stream(path, {**question(path), "kv_transfer_params": KEEP})
    at = next(i for i, e in enumerate(events) if e.startswith("event: "))
    assert [e.startswith("event: ") for e in events].count(True) == 1
    assert events[at].encode().startswith(EVENT_PREFIX)
    [last] = chunks(events[at + 1 :])
    assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    params = json.loads(events[at].split("data: ")[1])["kv_transfer_params"]
    assert params["remote_engine_id"] == node.engine.epoch
    assert params[KEY]["fingerprint"] == whole["kv_transfer_params"][KEY]["fingerprint"]


async def test_no_params_no_event(client: Client) -> None:
    assert not any(e.startswith("event: ") for e in await client.stream(CHAT, question(CHAT)))
    _, whole = await client.post(CHAT, question(CHAT))
    assert whole["kv_transfer_params"] is None


async def test_a_stock_engine_streams_no_handle_and_has_no_node_route(
    http: aiohttp.ClientSession, start: Callable[..., Any]
) -> None:
    client = Client(http, await start(stock=True))
    events = await client.stream(CHAT, {**question(CHAT), "kv_transfer_params": COLD})
    assert not any(e.startswith("event: ") for e in events)
    _, whole = await client.post(CHAT, {**question(CHAT), "kv_transfer_params": COLD})
    assert KEY not in whole["kv_transfer_params"]
    assert (await client.get(NODE_PATH))[0] == 404


async def test_two_nodes_over_http(http: aiohttp.ClientSession, start: Callable[..., Any]) -> None:
    prefill, decode = await start(Role.PREFILL), await start(Role.DECODE)
    first = {**question(CHAT), "max_tokens": 1, "kv_transfer_params": COLD}
    _, prefilled = await Client(http, prefill).post(CHAT, first)
    second = {**question(CHAT), "kv_transfer_params": prefilled["kv_transfer_params"]}
    _, answer = await Client(http, decode).post(CHAT, second)
    _, alone = await Client(http, await start()).post(CHAT, question(CHAT))
    assert answer["choices"] == alone["choices"]
    assert decode.engine.pulled_tokens == alone["usage"]["prompt_tokens"]


async def test_a_refused_decode_leg_lets_the_prefill_node_go(
    http: aiohttp.ClientSession, start: Callable[..., Any]
) -> None:
    prefill, decode = await start(Role.PREFILL), await start(Role.DECODE)
    first = {**question(CHAT), "max_tokens": 1, "kv_transfer_params": COLD}
    _, prefilled = await Client(http, prefill).post(CHAT, first)
    assert prefill.engine.occupancy().leased == 1
    bad = {**question(CHAT), "max_tokens": 0, "kv_transfer_params": prefilled["kv_transfer_params"]}
    status, _ = await Client(http, decode).post(CHAT, bad)
    assert (status, prefill.engine.occupancy().leased) == (400, 0)


# Other routes


async def test_the_node_says_who_it_is(client: Client, node: SimulatedNode) -> None:
    report = NodeReport.from_wire(json.loads((await client.get(NODE_PATH))[1]))
    assert report == node.engine.report()
    assert (report.epoch, report.role, report.block_size) == (node.engine.epoch, "decode", 4)


async def test_small_routes(client: Client) -> None:
    assert await client.get("/health") == (200, "")
    assert json.loads((await client.get("/version"))[1]) == {"version": "0.32.0"}
    [model] = json.loads((await client.get("/v1/models"))[1])["data"]
    assert (model["id"], model["max_model_len"]) == ("simulated", 512)
    assert 'vllm:num_requests_running{model_name="simulated",engine="0"} 0' in (await client.get("/metrics"))[1]


# Errors


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "param", "words"),
    [
        (CHAT, {**question(CHAT), "model": "x"}, 404, "NotFoundError", "model", "The model `x` does not exist."),
        (CHAT, {}, 400, "Bad Request", "body.messages", "Field required"),
        (CHAT, {"messages": "hi"}, 400, "Bad Request", "body.messages", "valid list"),
        (CHAT, [], 400, "Bad Request", "body", "valid dictionary"),
        (CHAT, {**question(CHAT), "max_tokens": 0}, 400, "BadRequestError", "max_tokens", "at least 1, got 0"),
        (CHAT, {**question(CHAT), "max_tokens": "x"}, 400, "Bad Request", "body.max_tokens", "valid integer"),
        (
            CHAT,
            {**question(CHAT), "max_completion_tokens": 999},
            400,
            "BadRequestError",
            "max_completion_tokens",
            "512",
        ),
        (CHAT, {**question(CHAT), "min_tokens": 13}, 400, "BadRequestError", None, "max_tokens=12, got 13"),
        (CHAT, {**question(CHAT), "stop": 5}, 400, "Bad Request", "body.stop", "valid string or list"),
        (
            CHAT,
            {**question(CHAT), "kv_transfer_params": "x"},
            400,
            "Bad Request",
            "body.kv_transfer_params",
            "dictionary",
        ),
        (COMPLETION, {}, 400, "Bad Request", "body", "Either prompt or prompt_embeds"),
        (COMPLETION, {"prompt": {"a": 1}}, 400, "Bad Request", "body.prompt", "valid string"),
        (
            COMPLETION,
            {"prompt": "word " * 600},
            400,
            "BadRequestError",
            "input_tokens",
            "This model's maximum context length is 512 tokens. However, your prompt contains 601 input tokens",
        ),
        ("/nowhere", {}, 404, "Not Found", None, "Not Found"),
    ],
)
async def test_errors_are_vllms(
    client: Client, path: str, body: object, status: int, kind: str, param: str | None, words: str
) -> None:
    got, answer = await client.post(path, body)
    assert (got, answer["error"]["code"], answer["error"]["type"]) == (status, status, kind)
    assert answer["error"]["param"] == param
    assert words in answer["error"]["message"]


async def test_what_is_not_json_is_refused(client: Client) -> None:
    status, broken = await client.post(CHAT, data=b'{"a"', headers={"content-type": "application/json"})
    assert (status, broken["error"]["param"]) == (400, "body.4")
    status, form = await client.post(CHAT, data=b"{}", headers={"content-type": "text/plain"})
    assert status == 400
    assert "Only 'application/json' is allowed" in form["error"]["message"]


# Clients that leave


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_request(
    http: aiohttp.ClientSession, start: Callable[..., Any], stream: bool
) -> None:
    node = await start(speed=replace(SMALL.speed, decode=0.01))
    body = {**question(CHAT), "stream": stream}
    leaving = asyncio.create_task(Client(http, node).post(CHAT, body))
    await eventually(lambda: node.engine.occupancy().running == 1)
    leaving.cancel()
    await eventually(lambda: node.engine.occupancy().running == 0)
    assert node.engine.occupancy().free == SMALL.blocks


# Failures on demand


async def test_errors_on_demand(client: Client, node: SimulatedNode) -> None:
    node.faults.errors = 2
    codes = [(await client.post(CHAT, question(CHAT)))[0] for _ in range(3)]
    assert codes == [500, 500, 200]


async def test_a_stream_breaks_on_demand(client: Client, node: SimulatedNode) -> None:
    node.faults.break_after = 3
    seen = b""
    async with client.http.post(client.url + CHAT, json={**question(CHAT), "stream": True}) as response:
        with suppress(aiohttp.ClientPayloadError):
            async for part in response.content.iter_any():
                seen += part
            pytest.fail("the stream came to a proper end")
    assert seen.count(b"\n\n") == 3
    assert node.engine.occupancy().running == 0
    assert (await client.stream(CHAT, question(CHAT)))[-1] == "data: [DONE]"


async def test_requests_hang_on_demand(client: Client, node: SimulatedNode) -> None:
    node.faults.flowing.clear()
    hanging = asyncio.create_task(client.post(CHAT, question(CHAT)))
    await eventually(lambda: len(node.app.received) == 1)
    assert not hanging.done()
    node.faults.flowing.set()
    assert (await hanging)[0] == 200


async def test_the_requests_that_are_kept_are_the_last_ones(client: Client, node: SimulatedNode) -> None:
    for i in range(3):
        await client.post("/tokenize", {"prompt": str(i)})
    assert [r.body["prompt"] for r in node.app.received] == ["0", "1", "2"]
    assert node.app.received.maxlen is not None
