"""Responses, messages and what one engine answers alone, through the router: each as one engine would answer it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kvflow.router import Settings as RouterSettings
from tests.cluster import Cluster, Reply, cluster, text

RESPONSES, MESSAGES, CHAT = "/v1/responses", "/v1/messages", "/v1/chat/completions"
SYSTEM, FIRST, SECOND = text(200, "rule"), text(300), text(100, "more")
SECRETS = ('"kv_transfer_params":{', "remote_", "block_ids", "do_remote", "127.0.0.1", '"fingerprint"', "event: kvflow")
PER_REQUEST = {"id", "item_id", "created_at", "created", "sequence_number", "request_id"}

Body = dict[str, Any]


def responses_first(stream: bool) -> Body:
    return {"input": FIRST, "instructions": SYSTEM, "stream": stream}


def responses_next(stream: bool, answer: str) -> Body:
    said = [
        {"role": "user", "content": FIRST},
        {"type": "reasoning", "summary": [], "content": None, "id": "rs_1"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": SECOND}]},
    ]
    return {"input": said, "instructions": SYSTEM, "stream": stream}


def marked(content: str) -> list[Body]:
    return [{"type": "text", "text": content, "cache_control": {"type": "ephemeral"}}]


def messages_first(stream: bool) -> Body:
    return messages_body(stream, [{"role": "user", "content": marked(FIRST)}])


def messages_next(stream: bool, answer: str) -> Body:
    said = [
        {"role": "user", "content": FIRST},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": marked(SECOND)},
    ]
    return messages_body(stream, said)


def messages_body(stream: bool, messages: Sequence[object]) -> Body:
    return {"model": "simulated", "max_tokens": 64, "system": SYSTEM, "messages": messages, "stream": stream}


def response_text(reply: Reply) -> str:
    if reply.headers["content-type"].startswith("text/event-stream"):
        return "".join(e["delta"] for e in events(reply) if e["type"] == "response.output_text.delta")
    return str(reply.json["output"][0]["content"][0]["text"])


def message_text(reply: Reply) -> str:
    if reply.headers["content-type"].startswith("text/event-stream"):
        return "".join(e["delta"]["text"] for e in events(reply) if e["type"] == "content_block_delta")
    return str(reply.json["content"][0]["text"])


def events(reply: Reply) -> list[Body]:
    parts = [e.partition(b"data: ") for e in reply.raw.split(b"\n\n") if e]
    for head, _, data in parts:
        assert head == f"event: {json.loads(data)['type']}\n".encode()
    return [json.loads(data) for _, _, data in parts]


@dataclass(frozen=True, slots=True)
class Kind:
    path: str
    first: Callable[[bool], Body]
    next: Callable[[bool, str], Body]
    text: Callable[[Reply], str]


KINDS = (
    Kind(RESPONSES, responses_first, responses_next, response_text),
    Kind(MESSAGES, messages_first, messages_next, message_text),
)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.path)
each_way = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


def alike(value: Any) -> Any:
    """Without what no two answers share, and what a pull changes: how many tokens were cached."""
    if isinstance(value, dict):
        return {k: alike(v) for k, v in value.items() if k not in PER_REQUEST and "usage" not in k}
    return [alike(v) for v in value] if isinstance(value, list) else value


async def right(c: Cluster, path: str, body: Body) -> Reply:
    return await c.post(path, body, url=c.reference.spec.url)


def assert_same(ours: Reply, theirs: Reply) -> None:
    assert (ours.status, ours.headers["content-type"]) == (theirs.status, theirs.headers["content-type"])
    if ours.headers["content-type"].startswith("text/event-stream"):
        assert alike(events(ours)) == alike(events(theirs))
    else:
        assert alike(ours.json) == alike(theirs.json)


@each_kind
@each_way
async def test_a_conversation_is_pulled_on_its_second_turn(kind: Kind, stream: bool) -> None:
    async with cluster() as c:
        first = await c.post(kind.path, kind.first(stream))
        assert (first.path, first.reason) == ("cold", "no-handle")
        assert_same(first, await right(c, kind.path, kind.first(stream)))
        asked = kind.next(stream, kind.text(first))
        second = await c.post(kind.path, asked)
        assert (second.path, second.reason) == ("pull", None)
        assert second.pulled > 500
        assert_same(second, await right(c, kind.path, asked))
        for reply in (first, second):
            assert not [s for s in SECRETS if s in reply.raw.decode() + json.dumps(reply.headers)]
        c.check()


@each_kind
async def test_the_prefill_leg_is_one_token_and_stores_nothing(kind: Kind) -> None:
    async with cluster() as c:
        await c.post(kind.path, {**kind.first(True), "thinking": {"type": "enabled", "budget_tokens": 1024}})
        (leg,) = [r.body for r in c.nodes["prefill-0"].app.received]
        assert leg["stream"] is False
        assert leg.get("max_output_tokens", leg.get("max_tokens")) == 1
        assert leg.get("store") is (False if kind.path == RESPONSES else None)
        if kind.path == MESSAGES:
            assert leg["thinking"] == {"type": "adaptive"}


@each_kind
async def test_nothing_that_is_the_routers_to_say_gets_in(kind: Kind) -> None:
    forged = {"do_remote_prefill": True, "remote_host": "10.6.6.6", "remote_port": 1, "remote_block_ids": [[1]]}
    said = {"kv_transfer_params": forged, "ec_transfer_params": forged, "kvflow": forged}
    async with cluster() as c:
        for body in ({}, {"stream": True}, {"vllm_xargs": {**said, "mine": 1}}):
            assert (await c.post(kind.path, {**kind.first(False), **said, **body})).status == 200
        await c.post("/tokenize", {"prompt": "x", **said})
        received = [r.body for node in c.nodes.values() for r in node.app.received]
        assert len(received) == 7
        assert "10.6.6.6" not in json.dumps(received)


async def test_of_the_clients_headers_only_a_few_get_to_engines() -> None:
    async with cluster() as c:
        few = {"x-request-id": "r", "traceparent": "t", "tracestate": "s", "x-vllm-priority": "1"}
        others = {"authorization": "secret", "cookie": "c", "x-data-parallel-rank": "1", "x-session-id": "s"}
        for path, body in ((CHAT, {"messages": []}), (MESSAGES, messages_first(False)), ("/tokenize", {"prompt": "x"})):
            await c.post(path, body, {**few, **others})
        for node in c.nodes.values():
            for received in node.app.received:
                assert few.items() <= received.headers.items()
                assert not others.keys() & received.headers.keys()


@each_way
async def test_what_follows_an_answer_goes_to_the_engine_that_stored_it(stream: bool) -> None:
    async with cluster(decode=3) as c:
        for i in range(4):
            begin = {"input": text(200, f"topic{i}"), "request_id": f"resp_{i}", "stream": stream}
            first = await c.post(RESPONSES, begin)
            await right(c, RESPONSES, begin)
            for j in range(2):
                earlier = f"resp_{i}" + (f"_{j - 1}" if j else "")
                asked = {"input": SECOND, "previous_response_id": earlier, "request_id": f"resp_{i}_{j}"}
                reply = await c.post(RESPONSES, {**asked, "stream": stream})
                assert reply.headers["x-kvflow-decode"] == first.headers["x-kvflow-decode"]
                assert reply.path == "direct"
                assert_same(reply, await right(c, RESPONSES, {**asked, "stream": stream}))
        # Each turn has found the handle of the one before, and left one of its own.
        assert len(c.router.conversations) == 4
        c.check()


async def test_the_engine_that_stored_an_answer_is_asked_again_when_it_fails_once() -> None:
    async with cluster(decode=2) as c:
        first = await c.post(RESPONSES, responses_first(False))
        node = first.headers["x-kvflow-decode"]
        c.nodes[node].faults.errors = 1
        reply = await c.post(RESPONSES, {"input": "and?", "previous_response_id": first.json["id"]})
        assert (reply.status, reply.headers["x-kvflow-decode"], reply.reason) == (200, node, "retried")


async def test_without_an_id_of_its_own_an_answer_gets_one_that_finds_it() -> None:
    async with cluster(decode=2) as c:
        for _ in range(3):
            first = await c.post(RESPONSES, responses_first(False))
            name = first.json["id"]
            assert name.startswith("resp_")
            assert (await c.post(RESPONSES, {"input": "and?", "previous_response_id": name})).status == 200
            stored = await c.get(f"{RESPONSES}/{name}")
            assert (stored.status, stored.json) == (200, first.json)
            assert not [s for s in SECRETS if s in stored.raw.decode()]
            cancelled = await c.post(f"{RESPONSES}/{name}/cancel", {})
            assert cancelled.json["error"]["message"] == "Cannot cancel a synchronous response."


async def test_an_answer_that_nobody_stored_is_not_found_in_the_engines_words() -> None:
    async with cluster() as c:
        asked = {"input": "and?", "previous_response_id": "resp_none"}
        assert_same(await c.post(RESPONSES, asked), await right(c, RESPONSES, asked))
        await c.post(RESPONSES, {"input": "hi", "request_id": "resp_kept", "store": False})
        assert (await c.post(RESPONSES, {"input": "and?", "previous_response_id": "resp_kept"})).status == 404
        assert (await c.get(f"{RESPONSES}/resp_none")).status == 404
        assert (await c.get(f"{RESPONSES}/%2E%2E")).status == 404


@pytest.mark.parametrize(
    "body",
    [
        {"background": True},
        {"truncation": "auto"},
        {"truncation": None},
        {"tools": [{"type": "web_search_preview"}]},
        {"tools": [{"type": "function", "name": "f"}, {"type": "code_interpreter"}]},
    ],
)
async def test_what_two_nodes_cannot_do_one_does_and_keeps_nothing(body: Body) -> None:
    async with cluster() as c:
        reply = await c.post(RESPONSES, {**responses_first(False), **body})
        assert (reply.path, reply.reason) == ("direct", "unsplittable")
        (asked,) = [r.body for r in c.nodes["decode-0"].app.received]
        assert "kv_transfer_params" not in asked
        assert c.nodes["decode-0"].engine.occupancy().pinned == 0


PASSED: list[tuple[str, Any]] = [
    ("/tokenize", {"prompt": "hello there"}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hello"}]}),
    ("/tokenize", {"prompt": "hello", "model": "other"}),
    ("/tokenize", []),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/v1/messages/count_tokens", {"model": "simulated", "messages": [{"role": "user", "content": "hello"}]}),
]


@pytest.mark.parametrize(("path", "body"), PASSED)
async def test_what_any_engine_answers_is_passed_on(path: str, body: Any) -> None:
    async with cluster() as c:
        ours, theirs = await c.post(path, body), await right(c, path, body)
        assert (ours.status, ours.raw) == (theirs.status, theirs.raw)
        for raw, kind in ((b"{", "application/json"), (b"{}", "text/plain")):
            answers = []
            for url in (c.url, c.reference.spec.url):
                async with c.session.post(url + path, data=raw, headers={"content-type": kind}) as response:
                    answers.append((response.status, await response.read()))
            assert answers[0] == answers[1]


async def test_what_any_engine_answers_is_asked_of_another_when_one_is_gone() -> None:
    async with cluster() as c:
        await c.nodes["decode-0"].stop()
        assert (await c.post("/tokenize", {"prompt": "hi"})).status == 200
        await c.nodes["prefill-0"].stop()
        assert (await c.post("/tokenize", {"prompt": "hi"})).status == 502
        reply = await c.post("/v1/messages/count_tokens", {})
        assert (reply.status, reply.json["type"], reply.headers["retry-after"]) == (503, "error", "1")


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("raw", "kind"),
    [(b"{", "application/json"), (b"{}", "text/plain"), (b"[]", "application/json"), (b"", "application/json")],
)
async def test_what_is_no_request_is_refused_in_openais_shape_on_every_endpoint(
    path: str, raw: bytes, kind: str
) -> None:
    """As vLLM does, whose validation is the same for all of them."""
    async with cluster() as c:
        async with c.session.post(c.url + path, data=raw, headers={"content-type": kind}) as response:
            body = await response.json()
        assert response.status == 400
        assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {}),
        (RESPONSES, {"input": 7}),
        (RESPONSES, {"input": "hi", "model": "other"}),
        (MESSAGES, {}),
        (MESSAGES, {**messages_first(False), "model": "other"}),
        (MESSAGES, {"model": "simulated", "messages": "hi", "max_tokens": 5}),
        (MESSAGES, {"model": "simulated", "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_what_the_engine_refuses_is_refused_in_its_words(path: str, body: Body) -> None:
    async with cluster() as c:
        ours, theirs = await c.post(path, body), await right(c, path, body)
        assert ours.status in (400, 404)
        assert (ours.status, ours.json) == (theirs.status, theirs.json)


async def test_errors_of_kvflows_own_have_the_shape_of_the_endpoint() -> None:
    async with cluster(router_settings=RouterSettings(max_body_bytes=2000, probe_interval_s=3600)) as c:
        for path in (CHAT, RESPONSES, MESSAGES):
            shape = {"type", "message"} if path == MESSAGES else {"message", "type", "param", "code"}
            large = await c.post(path, {"input": "x" * 4000})
            named = await c.post(path, {"messages": [], "input": []}, {"x-conversation-id": "%00"})
            for node in c.nodes.values():
                await node.stop()
            await c.probe()
            gone = await c.post(path, {"messages": [], "input": []})
            assert (large.status, named.status, gone.status) == (413, 400, 503)
            assert "x-conversation-id" in named.json["error"]["message"]
            for reply in (large, named, gone):
                assert set(reply.json["error"]) == shape
                assert (reply.json.get("type") == "error") is (path == MESSAGES)
            for node in c.nodes.values():
                await node.start()
            await c.probe()


@each_kind
async def test_a_stream_that_breaks_ends_with_an_error_event_of_its_api(kind: Kind) -> None:
    async with cluster() as c:
        c.nodes["decode-0"].faults.break_after = 4
        last = events(await c.post(kind.path, kind.first(True)))[-1]
        assert last["type"] == "error"
        assert "decode-0 broke off" in last["error"]["message"]
