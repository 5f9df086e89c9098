"""What the router says of itself, and what it says to requests that are none."""

import asyncio
from typing import Any

import pytest

from kvflow.nodes.simulated import Settings
from kvflow.router import Settings as RouterSettings
from tests.cluster import BLOCK, cluster, say, text


async def test_models_are_the_engines() -> None:
    async with cluster() as c:
        assert (await c.get("/v1/models")).json["data"][0]["id"] == "simulated"
        for node in c.nodes.values():
            await node.stop()
        await c.probe()
        assert (await c.get("/v1/models")).status == 503


async def test_health_ready_and_version() -> None:
    async with cluster() as c:
        assert (await c.get("/health")).status == 200
        assert (await c.get("/ready")).json == {"status": "ready"}
        assert (await c.get("/version")).json["version"].count(".") == 2
        assert (await c.get("/metrics")).headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    ("raw", "content_type", "status", "says"),
    [
        (b'{"messages": [}', "application/json", 400, "JSON decode error"),
        (b"", "application/json", 400, "'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'"),
        (
            b"null",
            "application/json",
            400,
            "'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'",
        ),
        (b"[]", "application/json", 400, "or object to extract fields from', 'input': '<list of 0 items>'"),
        (b'"text"', "application/json; charset=utf-8", 400, "to extract fields from', 'input': 'text'"),
        (b'"' + b"x" * 201 + b'"', "application/json", 400, "x" * 200 + "...[truncated]'"),
        (b"{", "application/json ;", 400, "JSON decode error"),
        (b"{", "application/vnd.api+json", 400, "JSON decode error"),
        (b"{}", "application/json ;", 400, "Only 'application/json' is allowed"),
        (b"{}", "text/plain", 400, "Only 'application/json' is allowed"),
        (b"{}", "", 400, "Only 'application/json' is allowed"),
        (b'{"messages": "hi"}', "application/json", 400, "list"),
        (b'{"messages": [], "model": "other"}', "application/json", 404, "other"),
    ],
)
async def test_what_is_no_request(raw: bytes, content_type: str, status: int, says: str) -> None:
    async with cluster() as c:
        headers = {"content-type": content_type}
        async with c.session.post(c.url + "/v1/chat/completions", data=raw, headers=headers) as response:
            body = await response.json()
        assert response.status == status
        assert says in body["error"]["message"]
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["code"] == status


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"\xff\xfe\xff"])
async def test_what_cannot_even_be_read_as_json(raw: bytes) -> None:
    async with cluster() as c:
        headers = {"content-type": "application/json"}
        for path in ("/v1/chat/completions", "/v1/messages"):
            async with c.session.post(c.url + path, data=raw, headers=headers) as response:
                assert response.status == 400
                assert await response.json() == {"detail": "There was an error parsing the body"}


async def test_an_unknown_model_is_404_and_a_missing_one_is_the_one_that_is_served() -> None:
    async with cluster() as c:
        reply = await c.chat(say("hello"), model="gpt-0")
        assert (reply.status, reply.json["error"]["type"]) == (404, "NotFoundError")
        assert "gpt-0" in reply.json["error"]["message"]
        assert (await c.chat(say("hello"))).json["model"] == "simulated"


async def test_a_prompt_that_is_too_long_is_refused_in_the_engines_words() -> None:
    async with cluster() as c:
        limit = Settings(block_size=BLOCK).max_model_len
        reply = await c.chat(say(text(limit + 1)))
        assert reply.status == 400
        assert str(limit) in reply.json["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_refused_and_names_the_key(chunked: bool) -> None:
    async with cluster(router_settings=RouterSettings(max_body_bytes=10_000, probe_interval_s=3600)) as c:
        data: Any = b'{"messages": "' + b"x" * 20_000 + b'"}'
        if chunked:
            whole = data

            async def parts() -> Any:
                for i in range(0, len(whole), 1000):
                    yield whole[i : i + 1000]

            data = parts()
        headers = {"content-type": "application/json"}
        async with c.session.post(c.url + "/v1/chat/completions", data=data, headers=headers) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (413, 413)
        assert "router.max_body_mb" in error["message"]
        assert (await c.chat(say("hello"))).status == 200


@pytest.mark.parametrize("value", ["", "x" * 300, 7])
async def test_a_conversation_id_that_is_none_is_refused_by_name(value: object) -> None:
    async with cluster() as c:
        reply = await c.chat(say("hello"), conversation_id=value)
        assert (reply.status, reply.json["error"]["param"]) == (400, "conversation_id")


async def test_routes_that_are_not_there_say_so() -> None:
    async with cluster() as c:
        missing = await c.post("/v1/embeddings", {})
        assert missing.status == 404
        assert "vLLM has /v1/embeddings, but kvflow does not route it" in missing.json["error"]["message"]
        assert (await c.post("/v1/nothing", {})).json == {"detail": "Not Found"}
        wrong = await c.get("/v1/chat/completions")
        assert (wrong.status, wrong.json) == (405, {"detail": "Method Not Allowed"})
        assert wrong.headers["allow"] == "POST"


async def test_before_the_engines_are_up_turns_are_told_to_come_back() -> None:
    async with cluster() as c:
        for node in c.nodes.values():
            await node.stop()
        await c.probe()
        replies = await asyncio.gather(*(c.chat(say("hello")) for _ in range(5)))
        assert {(r.status, r.headers["retry-after"]) for r in replies} == {(503, "1")}


async def test_the_host_header_does_not_choose_what_the_engine_is_asked() -> None:
    async with cluster() as c:
        headers = {"host": "x/inference/v1/generate?"}
        async with c.session.post(c.url + "/v1/chat/completions", json={"messages": say("hi")}, headers=headers):
            pass
        assert {r.path for n in c.nodes.values() for r in n.app.received} <= {"/v1/chat/completions"}
