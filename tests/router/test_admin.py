"""The admin surface on a whole kvflow: who may use it, what it shows, changes and refuses, and what it explains."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvflow.errors import ConfigError
from kvflow.nodes.simulated import ManualClock, Settings, Speed
from kvflow.router.admin import AdminKey, Control
from kvflow.router.changes import Fresh
from kvflow.tenants import Identity, Keys, Limits, Tenant, Tenants
from kvflow.tenants.catalogue import Catalogue
from kvflow.tenants.keys import hash_of
from kvflow.types import Role
from tests.cluster import BLOCK, Cluster, Reply, cluster, say, shipped_policy, text, until

KEY = "the-admin-key"
ADMIN = {"authorization": f"Bearer {KEY}"}
ACME = {"authorization": "Bearer key-of-acme"}
NAMES = ("acme", "globex")
POLICIES = ("balanced", "conservative", "off")
POLICY = "/admin/tenants/acme/policy"


def catalogue(broken: Mapping[str, str] | None = None) -> Catalogue:
    return Catalogue(policies={n: shipped_policy(n) for n in POLICIES}, broken=broken or {})


def identity(*names: str) -> Identity:
    return Identity(Keys.parse("\n".join(f"{n} {hash_of(f'key-of-{n}')}" for n in names), NAMES))


@dataclass(slots=True)
class Files:
    """What there is to be read anew."""

    fresh: Fresh
    error: ConfigError | None = None
    read: int = field(default=0)

    def __call__(self) -> Fresh:
        self.read += 1
        if self.error:
            raise self.error
        return self.fresh


@asynccontextmanager
async def administered(
    *, broken: Mapping[str, str] | None = None, apart: bool = False, **options: Any
) -> AsyncIterator[tuple[Cluster, Files]]:
    offered = catalogue(broken)
    files = Files(Fresh(catalogue=offered, identity=identity("acme")))
    limits = Limits(max_turns=4)
    tenants = [Tenant(name=n, policy=offered.policies["balanced"], limits=limits) for n in NAMES]
    served = Tenants(tenants, offered.policies, identity("acme"))
    control = Control(catalogue=offered, read=files, key=AdminKey.parse(KEY, "test"), apart=apart)
    async with cluster(tenants=served, control=control, **options) as c:
        yield c, files


async def ask(c: Cluster, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
    async with c.session.request(method, c.url + path, data=data, headers={**ADMIN, **(headers or {})}) as r:
        return Reply(r.status, {k.lower(): v for k, v in r.headers.items()}, await r.read())


async def put(c: Cluster, policy: str) -> Reply:
    return await ask(c, "PUT", POLICY, {"policy": policy})


def said(reply: Reply) -> tuple[int, str, str | None]:
    error = reply.json["error"]
    assert error["code"] == reply.status
    return reply.status, error["message"], error["param"]


async def has(c: Cluster) -> str:
    return str((await ask(c, "GET", POLICY)).json["policy"])


# Who may use it


@pytest.mark.parametrize("path", ["/admin/tenants", "/admin/policies", POLICY, "/admin/reload", "/admin/explain"])
async def test_without_a_key_there_is_no_admin_surface(path: str) -> None:
    async with cluster() as c:
        unknown = await c.get("/no/such/path")
        found = await c.get(path, ADMIN)
        assert (found.status, found.raw) == (unknown.status, unknown.raw)
        assert found.status == 404


async def test_an_address_of_its_own_leaves_the_routers_without_it() -> None:
    async with administered(apart=True) as (c, _):
        assert (await c.get("/admin/tenants", ADMIN)).status == 404
        assert c.router.admin_app is not None


@pytest.mark.parametrize(
    "headers",
    [{}, ACME, {"authorization": f"Bearer {hash_of(KEY)}"}, {"authorization": KEY}, {"x-api-key": KEY}],
)
async def test_whoever_has_not_the_key_learns_and_changes_nothing(headers: dict[str, str]) -> None:
    async with administered() as (c, _):
        for method, path in (("GET", "/admin/tenants"), ("PUT", POLICY), ("DELETE", POLICY), ("POST", "/admin/reload")):
            async with c.session.request(method, c.url + path, json={"policy": "off"}, headers=headers) as r:
                body = await r.json()
            assert r.status == 401
            assert body["error"]["type"] == "AuthenticationError"
            assert KEY not in str(body)
        assert await has(c) == "balanced"


def test_a_key_or_its_hash() -> None:
    for text_ in (KEY, hash_of(KEY)):
        key = AdminKey.parse(text_, "here")
        assert (key.fits(KEY), key.fits(hash_of(KEY)), key.fits("")) == (True, False, False)
        assert KEY not in repr(key)
    for wrong in ("two words", "sha256:0123", "SHA256:" + "0" * 64):
        with pytest.raises(ConfigError, match=r"^here: give a key without spaces, or sha256: and 64 lower-case"):
            AdminKey.parse(wrong, "here")


# What it shows


async def test_what_tenants_and_policies_there_are() -> None:
    async with administered(broken={"mine": "policy/mine.yaml is no YAML."}) as (c, _):
        listed = (await ask(c, "GET", "/admin/tenants")).json
        assert listed == {"tenants": [{"tenant": n, "policy": "balanced"} for n in NAMES]}
        one = (await ask(c, "GET", "/admin/tenants/acme")).json
        assert (one["policy"], one["limits"]["max_turns"]) == ("balanced", 4)
        assert one["words"] == shipped_policy("balanced").describe()
        shown = {p["policy"]: p for p in (await ask(c, "GET", "/admin/policies")).json["policies"]}
        assert set(shown) == {*POLICIES, "mine"}
        assert shown["off"]["words"] == shipped_policy("off").describe()
        assert shown["mine"] == {"policy": "mine", "broken": "policy/mine.yaml is no YAML."}


# What it changes


async def test_another_policy_for_one_tenant(caplog: pytest.LogCaptureFixture) -> None:
    async with administered() as (c, _):
        first = await c.chat(say("one", system=text(200)), ACME)
        with caplog.at_level(logging.INFO, "kvflow.admin"):
            answer = await put(c, "off")
        assert (answer.status, answer.json["policy"]) == (200, "off")
        assert answer.json["words"] == shipped_policy("off").describe()
        messages = say("one", first.text, "two", system=text(200))
        assert (await c.chat(messages, ACME)).reason == "policy"
        assert (await ask(c, "GET", "/admin/tenants/globex")).json["policy"] == "balanced"
    name = hash_of(KEY).removeprefix("sha256:")[:8]
    assert f"admin key {name} from 127.0.0.1: the policy of tenant acme: balanced -> off" in caplog.messages
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    ("body", "status", "message", "param"),
    [
        ({"policy": "nope"}, 400, "there is no policy 'nope'; there are balanced, conservative, off", "policy"),
        ({"policy": "mine"}, 409, "the policy 'mine' is broken: it is no YAML.", "policy"),
        ({"policy": 3}, 400, "policy must be the name of a policy", "policy"),
        ({}, 400, "policy must be the name of a policy", "policy"),
        ({"policy": "off", "ttl": 3}, 400, "'ttl' is no field; there is policy", "ttl"),
        (["off"], 400, 'the body must be JSON, as in {"policy": "conservative"}', None),
        (b"{", 400, 'the body must be JSON, as in {"policy": "conservative"}', None),
        (b"[" * 100_000, 400, 'the body must be JSON, as in {"policy": "conservative"}', None),
    ],
)
async def test_refused_changes_leave_the_old_policy(
    body: Any, status: int, message: str, param: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with administered(broken={"mine": "it is no YAML."}) as (c, _):
        assert said(await ask(c, "PUT", POLICY, body)) == (status, message, param)
        assert await has(c) == "balanced"
    if isinstance(body, dict) and isinstance(body.get("policy"), str) and len(body) == 1:
        assert f"from 127.0.0.1: the policy of tenant acme stays balanced: {message}" in caplog.text


async def test_an_unknown_tenant_and_a_wrong_method() -> None:
    async with administered() as (c, _):
        answer = await ask(c, "PUT", "/admin/tenants/initech/policy", {"policy": "off"})
        assert said(answer) == (404, "there is no tenant 'initech'; there are acme, globex", None)
        answer = await ask(c, "DELETE", POLICY)
        assert said(answer) == (405, f"{POLICY} takes GET, PUT", None)
        assert answer.headers["allow"] == "GET, PUT"
        assert (await ask(c, "GET", "/admin/nothing")).status == 404


@pytest.mark.parametrize("stock", list(Role))
async def test_engines_that_cannot_honour_a_policy(stock: Role) -> None:
    def settings(role: Role) -> Settings:
        return Settings(block_size=BLOCK, prefix_caching=False, stock=role is stock)

    async with administered(settings=settings) as (c, _):
        assert (await put(c, "off")).status == 200
        status, message, param = said(await put(c, "conservative"))
        assert (status, param) == (409, "policy")
        assert f"no {stock} node runs kvflow's connector, so nothing could be pulled back" in message
        assert await has(c) == "off"


async def test_a_thousand_swaps_under_load_lose_nothing() -> None:
    """Clients go on with their conversations until the last swap; every answer is that of one engine."""
    answered, swapping = 0, True

    async def client(c: Cluster, name: str) -> None:
        nonlocal answered
        history: list[str] = []
        while swapping or len(history) < 4:
            history = [*history[-6:], f"{name} says {answered}"]
            messages = say(*history, system=text(60, name))
            answer = await c.chat(messages, ACME)
            assert answer.status == 200, answer.raw
            assert answer.text == await c.right(messages)
            answered += 1
            history.append(answer.text)

    async with administered(prefill=2, decode=2) as (c, _):
        clients = [asyncio.create_task(client(c, name)) for name in ("a", "b", "c")]
        for i in range(1000):
            assert (await put(c, POLICIES[i % 3])).status == 200
        swapping = False
        await asyncio.gather(*clients)
        metrics = (await c.get("/metrics", ADMIN)).raw.decode()
        lines = [line for line in metrics.splitlines() if line.startswith("kvflow_turns_total{")]
        assert sum(float(line.rpartition(" ")[2]) for line in lines) == answered > 3
        assert not any(line.startswith("kvflow_leg_failures_total{") for line in metrics.splitlines())
        c.check()


@pytest.mark.parametrize(("began", "ended", "then"), [("balanced", "off", "pull"), ("off", "balanced", "cold")])
async def test_a_turn_keeps_the_policy_it_began_with_and_is_not_delayed(began: str, ended: str, then: str) -> None:
    """Swapped a thousand times while the prefill leg computes; the decode leg is told later what to keep."""

    def slow(_: Role) -> Settings:
        return Settings(block_size=BLOCK, prefix_caching=False, speed=Speed(prefill=100, decode=50))

    async def timed(c: Cluster, clock: ManualClock, seed: str, swaps: int) -> tuple[Reply, float]:
        start = clock.now()
        turn = asyncio.create_task(c.chat(say("one", system=text(200, seed)), ACME, max_tokens=8, ignore_eos=True))
        await until(lambda: clock.due() is not None)
        for i in range(swaps):
            assert (await put(c, (began, ended)[i % 2])).status == 200
        await done(clock, turn)
        return turn.result(), clock.now() - start

    clock = ManualClock()
    async with administered(settings=slow, clock=clock) as (c, _):
        await put(c, began)
        _, alone = await timed(c, clock, "sys", 0)
        first, swapped = await timed(c, clock, "too", 1000)
        assert swapped == pytest.approx(alone)
        assert await has(c) == ended
        await put(c, "balanced")
        turn = asyncio.create_task(c.chat(say("one", first.text, "two", system=text(200, "too")), ACME))
        await done(clock, turn)
        assert turn.result().path == then


async def done(clock: ManualClock, turn: asyncio.Task[Reply]) -> None:
    while not turn.done():
        if (due := clock.due()) is not None:
            clock.advance(due)
        await asyncio.sleep(0.002)


# Reading anew


async def test_keys_and_policies_are_read_anew(caplog: pytest.LogCaptureFixture) -> None:
    async with administered() as (c, files):
        theirs = {"authorization": "Bearer key-of-globex"}
        assert (await c.chat(say("hi"), theirs)).status == 401
        files.fresh = Fresh(
            catalogue=Catalogue(policies={**catalogue().policies, "mine": shipped_policy("aggressive")}),
            identity=identity("globex"),
        )
        assert (await put(c, "mine")).status == 400
        with caplog.at_level(logging.INFO, "kvflow.admin"):
            answer = await ask(c, "POST", "/admin/reload")
        assert answer.json == {"policies": ["balanced", "conservative", "mine", "off"], "broken": {}}
        assert (await c.chat(say("hi"), theirs)).status == 200
        assert (await c.chat(say("hi"), ACME)).status == 401
        assert (await put(c, "mine")).status == 200
    assert "from 127.0.0.1: read anew: 1 keys, policies balanced, conservative, mine, off" in caplog.text


async def test_what_is_not_fit_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with administered() as (c, files):
        await put(c, "conservative")
        files.error = ConfigError("keys, line 2: globex has the same key as acme.")
        status, message, _ = said(await ask(c, "POST", "/admin/reload"))
        assert (status, message) == (
            409,
            "keys and policies stay as they were: keys, line 2: globex has the same key as acme.",
        )
        files.error, files.fresh = None, Fresh(catalogue=catalogue({"mine": "why."}), identity=identity("globex"))
        status, message, _ = said(await ask(c, "POST", "/admin/reload"))
        assert (status, message) == (409, "keys and policies stay as they were: the policy mine is broken: why.")
        assert files.read == 2
        assert (await c.chat(say("hi"), ACME)).status == 200
        assert await has(c) == "conservative"
    assert caplog.text.count("keys and policies stay as they were") == 2


async def test_what_was_broken_before_hinders_nobody() -> None:
    async with administered(broken={"mine": "why."}) as (c, files):
        files.fresh = Fresh(catalogue=catalogue({"mine": "why."}), identity=identity("globex"))
        assert (await ask(c, "POST", "/admin/reload")).json["broken"] == {"mine": "why."}
        assert (await c.chat(say("hi"), ACME)).status == 401


# What would happen


async def explain(c: Cluster, body: Any, query: str = "tenant=acme", headers: Mapping[str, str] | None = None) -> Reply:
    return await ask(c, "POST", f"/admin/explain?{query}", body, headers)


async def test_an_explanation_says_what_then_happens_and_touches_nothing() -> None:
    async with administered() as (c, _):
        first = await c.chat(say("one", system=text(200)), ACME)
        body = {"messages": say("one", first.text, "two", system=text(200))}
        held = len(c.router.conversations)
        before = (await c.get("/metrics", ADMIN)).raw
        told = (await explain(c, body)).json
        again = (await explain(c, body)).json
        assert (await c.get("/metrics", ADMIN)).raw == before
        assert len(c.router.conversations) == held == 1
        assert (told["tenant"], told["policy"], told["endpoint"]) == ("acme", "balanced", "/v1/chat/completions")
        assert (told["conversation"]["found"], told["conversation"]["node"]) == (True, "decode-0")
        assert 0 < told["conversation"]["expires_in_s"] <= 480
        assert told["turn"]["prompt_tokens"] > told["turn"]["new_tokens"] > 0
        assert told["kept_for_s"] == 480
        plan = told["explanation"]["plan"]
        assert (plan["path"], plan["prefill"], plan["decode"]) == ("pull", "prefill-0", "decode-0")
        ways = {w["path"]: w for w in told["explanation"]["ways"]}
        assert ways["pull"]["chosen"]
        assert ways["cold"]["forecast"]["first_token_s"] > 0
        assert again["explanation"]["plan"] == plan
        assert (await c.chat(body["messages"], ACME)).path == "pull"
        c.check()


async def test_half_a_surrogate_pair_is_served_and_explained() -> None:
    async with administered() as (c, _):
        for field in ("session_id", "model"):
            told = await explain(c, {"messages": say("one"), field: "\ud800"})
            assert (told.status, told.json["explanation"]["error"]) == (200, None)
        served = await c.chat(say("one"), ACME, session_id="\ud800")
        assert (served.status, served.headers["x-kvflow-conversation"]) == (200, "%ED%A0%80")


async def test_another_policy_another_tenant_and_the_clients_own_headers() -> None:
    async with administered() as (c, _):
        await c.chat(say("one", system=text(200)), {**ACME, "x-conversation-id": "chat-7"})
        body = {"messages": say("one", "so?", "two", system=text(200))}
        named = {"x-conversation-id": "chat-7", "x-kvflow-retain": "30"}
        told = (await explain(c, body, "tenant=acme", named)).json
        assert (told["conversation"]["id"], told["conversation"]["found"], told["kept_for_s"]) == ("chat-7", True, 30)
        off = (await explain(c, body, "tenant=acme&policy=off", named)).json
        assert (off["policy"], off["explanation"]["plan"]["reason"], off["kept_for_s"]) == ("off", "policy", 0)
        assert await has(c) == "balanced"
        other = (await explain(c, body, "tenant=globex", named)).json
        assert (other["conversation"]["found"], other["explanation"]["plan"]["reason"]) == (False, "no-handle")


@pytest.mark.parametrize(
    ("body", "query", "endpoint"),
    [
        ({"messages": say("hi")}, "", "/v1/chat/completions"),
        ({"input": "hi"}, "", "/v1/responses"),
        ({"prompt": "hi"}, "", "/v1/completions"),
        ({"messages": say("hi")}, "&endpoint=/v1/messages", "/v1/messages"),
    ],
)
async def test_the_endpoint_is_told_by_the_body(body: dict[str, Any], query: str, endpoint: str) -> None:
    async with administered() as (c, _):
        assert (await explain(c, body, f"tenant=acme{query}")).json["endpoint"] == endpoint


@pytest.mark.parametrize(
    ("body", "query", "status", "message", "param"),
    [
        ({"messages": []}, "", 400, "tenant must be one of acme, globex", "tenant"),
        ({"messages": []}, "tenant=initech", 404, "there is no tenant 'initech'; there are acme, globex", None),
        ({"messages": []}, "tenant=acme&policy=x", 400, "there is no policy 'x'; there are balanced, ", "policy"),
        ({"messages": []}, "tenant=acme&polcy=x", 400, "'polcy' is no parameter; there are tenant, policy, ", "polcy"),
        ({"messages": []}, "tenant=acme&endpoint=/x", 400, "endpoint must be one of /v1/chat/comp", "endpoint"),
        ({}, "tenant=acme", 400, "endpoint must be one of /v1/chat/completions, /v1/completions, ", "endpoint"),
        (
            {"messages": [], "conversation_id": 3},
            "tenant=acme",
            400,
            "conversation_id must be a str",
            "conversation_id",
        ),
        (b"[]", "tenant=acme", 400, "1 validation error:", "body"),
    ],
)
async def test_questions_that_cannot_be_answered(
    body: Any, query: str, status: int, message: str, param: str | None
) -> None:
    async with administered() as (c, _):
        got = said(await explain(c, body, query))
        assert (got[0], got[2]) == (status, param)
        assert got[1].startswith(message)
