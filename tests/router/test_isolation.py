"""Two tenants on the same engines: neither gets anything of the other's, neither text nor speed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvflow.nodes.simulated import Settings
from kvflow.router.admin import AdminKey, Control
from kvflow.tenants import Identity, Keys, Tenant, Tenants
from kvflow.tenants.keys import hash_of
from kvflow.types import Role
from tests.cluster import BLOCK, Cluster, Message, Reply, cluster, say, shipped_policy, text

NAMES = ("acme", "globex")
ACME, GLOBEX = ({"authorization": f"Bearer key-of-{name}"} for name in NAMES)
SYSTEM = text(160, "system")


def two(proxies: tuple[str, ...] = ()) -> Tenants:
    policy = shipped_policy("balanced")
    keys = Keys.parse("\n".join(f"{name} {hash_of(f'key-of-{name}')}" for name in NAMES), NAMES)
    tenants = [Tenant(name=name, policy=policy) for name in NAMES]
    return Tenants(tenants, {policy.name: policy}, Identity(keys, proxies))


@asynccontextmanager
async def shared(*, caching: bool = True, proxies: tuple[str, ...] = ()) -> AsyncIterator[Cluster]:
    def settings(_: Role) -> Settings:
        return Settings(block_size=BLOCK, prefix_caching=caching)

    async with cluster(tenants=two(proxies), settings=settings) as c:
        yield c
        c.check()


def cached(reply: Reply) -> int:
    """Tokens that no engine computed for a turn."""
    usage = reply.json["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0)


async def history(c: Cluster, **body: Any) -> list[Message]:
    """What globex has said, as it would go on."""
    first = await c.chat(say("a secret", system=SYSTEM), GLOBEX, **body)
    assert first.status == 200, first.raw
    return say("a secret", first.text, "and now?", system=SYSTEM)


@pytest.mark.parametrize("caching", [True, False])
async def test_anothers_exact_history_brings_no_token(caching: bool) -> None:
    async with shared(caching=caching) as c:
        messages = await history(c)
        theirs = await c.chat(messages, ACME)
        assert (theirs.path, theirs.reason, theirs.pulled, cached(theirs)) == ("cold", "no-handle", 0, 0)
        own = await c.chat(messages, GLOBEX)
        assert own.path == ("cold" if caching else "pull")  # a prefix cache has it all
        assert cached(own) > 100
        assert own.text == theirs.text == await c.right(messages)


@pytest.mark.parametrize("caching", [True, False])
async def test_anothers_conversation_id_brings_no_token(caching: bool) -> None:
    async with shared(caching=caching) as c:
        messages = await history(c, conversation_id="chat-7")
        theirs = await c.chat(messages, ACME, conversation_id="chat-7")
        assert (theirs.path, theirs.pulled, cached(theirs)) == ("cold", 0, 0)
        assert cached(await c.chat(messages, GLOBEX, conversation_id="chat-7")) > 100


async def test_the_name_that_kvflow_gave_anothers_conversation_brings_no_token() -> None:
    async with shared() as c:
        first = await c.chat(say("a secret", system=SYSTEM), GLOBEX)
        name = first.headers["x-kvflow-conversation"]
        messages = say("a secret", first.text, "and now?", system=SYSTEM)
        theirs = await c.chat(messages, ACME, conversation_id=name)
        assert (theirs.pulled, cached(theirs)) == (0, 0)


async def test_anothers_cache_salt_brings_no_token_even_as_engines_know_it() -> None:
    async with shared() as c:
        messages = await history(c, cache_salt="ours")
        salts = {r.body["cache_salt"] for node in c.nodes.values() for r in node.app.received if "cache_salt" in r.body}
        assert len(salts) == 1
        for salt in ("ours", *salts):
            theirs = await c.chat(messages, ACME, cache_salt=salt)
            assert (theirs.pulled, cached(theirs)) == (0, 0)
        assert cached(await c.chat(messages, GLOBEX, cache_salt="ours")) > 100


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/completions"])
async def test_no_endpoint_shares_what_engines_cache(path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {"model": "simulated", "messages": say(text(200)), "max_tokens": 8},
        "/v1/responses": {"input": text(200)},
        "/v1/completions": {"prompt": text(200)},
    }
    body = bodies[path]
    async with shared() as c:
        assert (await c.post(path, body, GLOBEX)).status == 200
        theirs, own = await c.post(path, body, ACME), await c.post(path, body, GLOBEX)
        assert (theirs.pulled, cached(theirs)) == (0, 0)
        assert cached(own) > 100


async def test_what_one_node_serves_alone_is_not_shared_either() -> None:
    async with shared() as c:
        for headers in (GLOBEX, ACME):
            reply = await c.chat(say(text(200)), headers, n=2)
            assert (reply.path, cached(reply)) == ("direct", 0)


async def test_a_salt_that_engines_refuse_is_theirs_to_refuse() -> None:
    async with shared() as c:
        for salt in ("", 7):
            refused = await c.chat(say("hello"), ACME, cache_salt=salt)
            body = {"messages": say("hello"), "cache_salt": salt}
            plain = await c.post("/v1/chat/completions", body, url=c.reference.spec.url)
            assert refused.status == plain.status


MEDIA = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": None, "uuid": "logo"}]


@pytest.mark.parametrize(
    ("path", "field", "said", "where"),
    [
        ("/v1/chat/completions", "messages", {"role": "user", "content": MEDIA}, "content"),
        ("/tokenize", "messages", {"role": "user", "content": MEDIA}, "content"),
        ("/v1/responses", "input", {"type": "function_call_output", "call_id": "c", "output": MEDIA}, "output"),
    ],
)
async def test_media_that_only_a_name_stands_for_are_never_anothers(
    path: str, field: str, said: Any, where: str
) -> None:
    def received(c: Cluster) -> list[Any]:
        bodies = [r.body for node in c.nodes.values() for r in node.app.received if r.body]
        assert bodies
        return [body[field][0][where] for body in bodies]

    async with shared() as c:
        names: list[set[str]] = []
        for headers in (ACME, GLOBEX, ACME):
            for node in c.nodes.values():
                node.app.received.clear()
            await c.post(path, {field: [said]}, headers)
            assert all(parts[0] == MEDIA[0] for parts in received(c))
            names.append({parts[1]["uuid"] for parts in received(c)})
        assert names[0] == names[2]
        assert [len(n) for n in names] == [1, 1, 1]
        assert len(names[0] | names[1] | {"logo"}) == 3
    async with cluster() as c:
        await c.post(path, {field: [said]})
        assert all(parts == MEDIA for parts in received(c))


async def test_anothers_stored_response_is_not_there() -> None:
    async with shared() as c:
        stored = (await c.post("/v1/responses", {"input": text(100)}, GLOBEX)).json["id"]
        nothing = await c.get(f"/v1/responses/resp_{'0' * 16}", ACME)
        for reply in (
            await c.get(f"/v1/responses/{stored}", ACME),
            await c.post(f"/v1/responses/{stored}/cancel", {}, ACME),
            await c.post("/v1/responses", {"input": "go on", "previous_response_id": stored}, ACME),
        ):
            assert reply.status == nothing.status == 404
            assert reply.json["error"]["message"] == f"Response with id '{stored}' not found."
            assert reply.json["error"].keys() == nothing.json["error"].keys()
        assert (await c.get(f"/v1/responses/{stored}", GLOBEX)).json["id"] == stored
        goes_on = await c.post("/v1/responses", {"input": "go on", "previous_response_id": stored}, GLOBEX)
        assert (goes_on.status, goes_on.path) == (200, "direct")


async def test_an_id_that_a_client_chose_overwrites_nobodys_response() -> None:
    async with shared() as c:
        stored = (await c.post("/v1/responses", {"input": text(100)}, GLOBEX)).json
        other = await c.post("/v1/responses", {"input": "mine", "request_id": stored["id"]}, ACME)
        assert other.json["id"] != stored["id"]
        assert (await c.get(f"/v1/responses/{stored['id']}", GLOBEX)).json["output"] == stored["output"]


async def test_only_its_own_tenant_closes_a_conversation() -> None:
    async with shared(caching=False) as c:
        messages = await history(c, conversation_id="chat-7")
        assert (await c.delete("/v1/conversations/chat-7", ACME)).status == 404
        assert (await c.chat(messages, GLOBEX, conversation_id="chat-7")).path == "pull"
        assert (await c.delete("/v1/conversations/chat-7", GLOBEX)).status == 200


async def test_no_tenant_decides_who_goes_first() -> None:
    async with shared() as c:
        await c.chat(say("hello"), {**ACME, "x-vllm-priority": "-5"}, priority=-5)
        for node in c.nodes.values():
            for request in node.app.received:
                assert "priority" not in request.body
                assert "x-vllm-priority" not in request.headers


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("post", "/v1/chat/completions", {"messages": say("hello")}),
        ("post", "/v1/messages", {"messages": say("hello"), "max_tokens": 5}),
        ("post", "/v1/responses", {"input": "hello"}),
        ("post", "/tokenize", {"prompt": "hello"}),
        ("get", "/v1/models", None),
        ("get", "/v1/responses/resp_1", None),
        ("delete", "/v1/conversations/x", None),
    ],
)
async def test_without_a_key_nothing_is_served(method: str, path: str, body: Any) -> None:
    async with shared() as c:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-kvflow-tenant": "acme"}):
            reply = await (c.post(path, body, headers) if method == "post" else getattr(c, method)(path, headers))
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
            kind = "authentication_error" if path == "/v1/messages" else "AuthenticationError"
            assert reply.json["error"]["type"] == kind
        assert not any(r.body for node in c.nodes.values() for r in node.app.received)


async def test_what_says_nothing_of_tenants_needs_no_key() -> None:
    async with shared() as c:
        assert [(await c.get(path)).status for path in ("/health", "/ready", "/version")] == [200, 200, 200]


async def test_a_proxy_is_believed_and_a_tenant_that_it_made_up_is_refused() -> None:
    async with shared(proxies=("127.0.0.1",)) as c:
        assert (await c.chat(say("hello"), {"x-kvflow-tenant": "acme"})).status == 200
        refused = await c.chat(say("hello"), {"x-kvflow-tenant": "initech"})
        assert (refused.status, refused.json["error"]["type"]) == (403, "PermissionDeniedError")
        assert "acme" not in refused.json["error"]["message"]


async def test_without_tenants_bodies_reach_engines_as_they_are() -> None:
    async with cluster() as c:
        await c.chat(say("hello"), {"x-vllm-priority": "3"}, priority=3)
        received = [r for node in c.nodes.values() for r in node.app.received]
        assert received
        assert all("cache_salt" not in r.body and r.body["priority"] == 3 for r in received)
        assert all(r.headers["x-vllm-priority"] == "3" for r in received)


async def test_counters_are_per_tenant_and_no_tenant_sees_them() -> None:
    tenants = two()
    control = replace(Control.of(tenants), key=AdminKey.parse("the-admin-key", "here"))
    async with cluster(tenants=tenants, control=control) as c:
        for opening, headers in (("one", ACME), ("two", GLOBEX), ("three", GLOBEX)):
            await c.chat(say(opening), headers)
        for headers in ({}, ACME, {"authorization": "Bearer wrong"}):
            refused = await c.get("/metrics", headers)
            assert (refused.status, b"kvflow_turns" in refused.raw) == (401, False)
        page = (await c.get("/metrics", {"authorization": "Bearer the-admin-key"})).raw.decode()
        for tenant, count in (("acme", 1), ("globex", 2)):
            assert f'kvflow_turns_total{{path="cold",reason="no-handle",tenant="{tenant}"}} {count}.0' in page


async def test_without_an_admin_key_nobody_sees_the_counters_of_all() -> None:
    async with shared() as c:
        assert (await c.get("/metrics", ACME)).status == 401
