"""Turns through the router, on simulated nodes: what is reused, and that no answer is ever another than the right."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvflow.nodes.simulated import ManualClock, Settings
from kvflow.nodes.simulated.language import render, tokenize
from kvflow.types import Role
from tests.cluster import BLOCK, Cluster, Message, Reply, cluster, common_prefix, say, shipped_policy, text

FIRST = say(text(300), system=text(200, "rule"))


def user(content: str) -> Message:
    return {"role": "user", "content": content}


async def turn(c: Cluster, messages: Sequence[Message], **body: Any) -> tuple[Reply, list[Message]]:
    """One turn, checked against the reference; the chat with the answer in it."""
    reply = await c.chat(messages, **body)
    assert reply.text == await c.right(messages)
    return reply, [*messages, {"role": "assistant", "content": reply.text}]


async def two_turns(c: Cluster) -> list[Message]:
    _, chat = await turn(c, FIRST)
    _, chat = await turn(c, [*chat, user(text(100, "more"))])
    return chat


@pytest.mark.parametrize("stream", [True, False])
async def test_a_conversation_without_an_id_is_pulled_from_the_second_turn_on(stream: bool) -> None:
    async with cluster() as c:
        first, chat = await turn(c, FIRST, stream=stream)
        assert (first.path, first.reason, first.pulled) == ("cold", "no-handle", 0)
        name = first.headers["x-kvflow-conversation"]
        for i in range(2):
            asked = [*chat, user(text(40, f"turn{i}"))]
            reply, chat_after = await turn(c, asked, stream=stream)
            assert (reply.path, reply.reason) == ("pull", None)
            assert reply.pulled == common_prefix(chat, asked) > 500
            assert reply.headers["x-kvflow-conversation"] == name
            assert (reply.headers["x-kvflow-prefill"], reply.headers["x-kvflow-decode"]) == ("prefill-0", "decode-0")
            chat = chat_after
        c.check()


async def test_usage_says_what_was_reused() -> None:
    async with cluster() as c:
        _, chat = await turn(c, FIRST)
        asked = [*chat, user("and?")]
        reply = await c.chat(asked, stream=True, stream_options={"include_usage": True})
        usage = next(e["usage"] for e in reply.events if e.get("usage"))
        assert usage["prompt_tokens_details"]["cached_tokens"] == reply.pulled == common_prefix(chat, asked)


def edited_early(chat: list[Message]) -> list[Message]:
    return [chat[0], user("banana " + chat[1]["content"]), *chat[2:], user("go on")]


def edited_late(chat: list[Message]) -> list[Message]:
    return [*chat[:3], user(chat[3]["content"] + " but not so"), chat[4], user("go on")]


def answer_rewritten(chat: list[Message]) -> list[Message]:
    return [*chat[:2], {"role": "assistant", "content": "stripped"}, *chat[3:], user("go on")]


def middle_stripped(chat: list[Message]) -> list[Message]:
    return [*chat[:2], *chat[3:], user("go on")]


def truncated(chat: list[Message]) -> list[Message]:
    return chat[:2]


def regenerated(chat: list[Message]) -> list[Message]:
    return chat[:-1]


def branched(chat: list[Message]) -> list[Message]:
    return [*chat[:3], user("something else entirely")]


EDITS = [edited_early, edited_late, answer_rewritten, middle_stripped, truncated, regenerated, branched]


@pytest.mark.parametrize("explicit", [False, True], ids=["derived", "explicit"])
@pytest.mark.parametrize("edit", EDITS)
async def test_no_rewritten_history_gets_a_wrong_token(edit: Any, explicit: bool) -> None:
    headers = {"x-conversation-id": "mine"} if explicit else {}
    async with cluster() as c:
        reply, chat = await turn(c, FIRST, **({"conversation_id": "mine"} if explicit else {}))
        reply = await c.chat([*chat, user(text(100, "more"))], headers)
        chat = [*chat, user(text(100, "more")), {"role": "assistant", "content": reply.text}]
        asked = edit(chat)
        reply = await c.chat(asked, headers)
        assert reply.text == await c.right(asked)
        common = common_prefix(chat, asked)
        if reply.reason == "no-handle":  # only the very first message is edited: nothing to find it by
            assert (edit, explicit) == (edited_early, False)
        else:
            # A prompt that ends inside a block of the held KV cannot be proven further than to that block.
            whole = len(tokenize(render(asked))) // BLOCK == common // BLOCK
            assert (reply.reason, reply.pulled) == (None if whole else "diverged", common - common % BLOCK)
        c.check()


async def test_somebody_elses_conversation_id_gives_only_what_is_common() -> None:
    async with cluster() as c:
        mine = say(text(300), "So?", "Go on.", system=text(200, "rule"))
        theirs = say(text(300, "secret"), system=text(200, "rule"))
        first = await c.chat(theirs, conversation_id="theirs")
        stolen = await c.chat(mine, conversation_id="theirs")
        assert stolen.text == await c.right(mine)
        common = common_prefix([*theirs, {"role": "assistant", "content": first.text}], mine)
        assert (stolen.reason, stolen.pulled) == ("diverged", common - common % BLOCK)
        c.check()


async def test_nothing_is_shared_across_models_and_cache_salts() -> None:
    async with cluster() as c:
        _, chat = await turn(c, FIRST)
        reply = await c.chat([*chat, user("go on")], cache_salt="other")
        assert (reply.path, reply.reason) == ("cold", "no-handle")


async def test_plain_prompts_are_conversations_too() -> None:
    async with cluster() as c:
        prompt = text(600)
        first = await c.post("/v1/completions", {"prompt": prompt})
        assert (first.path, first.reason) == ("cold", "no-handle")
        grown = prompt + first.text + text(50, "more")
        second = await c.post("/v1/completions", {"prompt": grown, "stream": True})
        assert second.path == "pull"
        assert second.pulled > 600
        right = await c.post("/v1/completions", {"prompt": grown}, url=c.reference.spec.url)
        assert second.text == right.text


async def test_of_two_turns_at_once_one_pulls_and_nobody_waits() -> None:
    async with cluster() as c:
        _, chat = await turn(c, FIRST)
        asked = [*chat, user("go on")]
        replies = await asyncio.gather(*(c.chat(asked) for _ in range(3)))
        assert sorted((r.path, r.reason) for r in replies) == [
            ("cold", "no-handle"),
            ("cold", "no-handle"),
            ("pull", None),
        ]
        assert {r.text for r in replies} == {await c.right(asked)}
        c.check()


async def test_a_given_name_finds_the_conversation_again() -> None:
    async with cluster() as c:
        first = await c.chat(FIRST)
        name = first.headers["x-kvflow-conversation"]
        reply = await c.chat(say("unlike anything", "before", "go on"), {"x-conversation-id": name})
        assert reply.reason == "diverged"


async def test_conversations_that_share_an_id_do_not_take_each_others_handles() -> None:
    async with cluster() as c:
        chats = [say(text(200, f"topic{i}")) for i in range(2)]
        for round_ in range(3):
            for i, asked in enumerate(chats):
                reply = await c.chat(asked, {"x-session-id": "pod-1"})
                assert reply.path == ("pull" if round_ else "cold")
                chats[i] = [*asked, {"role": "assistant", "content": reply.text}, user("go on")]


@pytest.mark.parametrize("name", ["mein Gespräch", "会話", 'quo"te', "a" * 256, " x ", "50% off"])
async def test_conversation_ids_of_all_kinds_come_back_in_a_header_and_can_be_sent_in_one(name: str) -> None:
    async with cluster() as c:
        first = await c.chat(FIRST, conversation_id=name)
        assert (await c.chat(FIRST, {"x-conversation-id": first.headers["x-kvflow-conversation"]})).path == "pull"


async def test_a_branch_has_a_name_of_its_own() -> None:
    async with cluster() as c:
        first, chat = await turn(c, FIRST)
        second, _ = await turn(c, [*chat, user("go on")])
        branch, _ = await turn(c, [*chat, user("no, differently")])
        names = [r.headers["x-kvflow-conversation"] for r in (first, second, branch)]
        assert names[0] == names[1] != names[2]


async def test_the_threshold_applies_to_what_the_local_cache_leaves() -> None:
    def cached(_: Role) -> Settings:
        return Settings(block_size=BLOCK)

    async with cluster(settings=cached) as c:
        _, chat = await turn(c, FIRST)
        reply, _ = await turn(c, [*chat, user("go on")])
        assert (reply.path, reply.reason, reply.pulled) == ("cold", "below-threshold", 0)
    async with cluster(settings=cached, policy=shipped_policy("balanced", "policy.reuse.min_pull_tokens=1")) as c:
        _, chat = await turn(c, FIRST)
        reply, _ = await turn(c, [*chat, user("go on")])
        assert reply.path == "pull"
        assert reply.pulled < 2 * BLOCK


async def test_the_policy_off_keeps_nothing_and_pulls_nothing() -> None:
    async with cluster(policy="off") as c:
        _, chat = await turn(c, FIRST)
        assert c.nodes["decode-0"].engine.occupancy().pinned == 0
        reply, _ = await turn(c, [*chat, user("go on")])
        assert (reply.path, reply.reason) == ("cold", "policy")


async def test_an_expired_handle_is_not_sent() -> None:
    clock = ManualClock()
    async with cluster(clock=clock) as c:
        _, chat = await turn(c, FIRST)
        c.advance(480 - 5)
        reply, _ = await turn(c, [*chat, user("go on")])
        assert (reply.path, reply.reason) == ("cold", "expired")
        assert "remote_engine_id" not in c.nodes["prefill-0"].app.received[-1].body["kv_transfer_params"]


async def test_a_small_decode_pool_takes_many_conversations_without_a_stall() -> None:
    """Room for about 20: 40 different ones are answered, and the pins leave room for a request of full length."""

    def small(role: Role) -> Settings:
        blocks = 20 * 34 if role is Role.DECODE else 4096
        return Settings(block_size=BLOCK, prefix_caching=False, blocks=blocks, max_model_len=2048)

    async with cluster(settings=small, policy="aggressive", clock=ManualClock()) as c:
        for i in range(40):
            asked = say(text(500, f"conversation{i}"))
            async with asyncio.timeout(120):
                assert (await c.chat(asked, max_tokens=8)).text == await c.right(asked, max_tokens=8)
        pinned = c.nodes["decode-0"].engine.occupancy().pinned
        assert 0 < pinned <= 20 * 34 - 2048 // BLOCK
        c.check()


async def test_a_request_that_two_nodes_cannot_share_goes_to_one() -> None:
    async with cluster() as c:
        reply = await c.chat(FIRST, n=2)
        assert (reply.path, reply.reason) == ("direct", "unsplittable")
        assert "x-kvflow-prefill" not in reply.headers
        assert len(reply.json["choices"]) == 2
        assert not c.nodes["prefill-0"].app.received
        assert "kv_transfer_params" not in c.nodes["decode-0"].app.received[-1].body


async def test_stock_engines_are_served_one_way() -> None:
    def stock_prefill(role: Role) -> Settings:
        return Settings(block_size=BLOCK, prefix_caching=False, stock=role is Role.PREFILL)

    async with cluster(settings=stock_prefill) as c:
        _, chat = await turn(c, FIRST)
        reply, _ = await turn(c, [*chat, user("go on")])
        assert (reply.path, reply.reason) == ("cold", "one-way")

    async with cluster(settings=lambda _: Settings(block_size=BLOCK, prefix_caching=False, stock=True)) as c:
        _, chat = await turn(c, FIRST)
        reply, _ = await turn(c, [*chat, user("go on")])
        assert (reply.path, reply.reason) == ("cold", "no-handle")


async def test_pools_of_any_size_keep_a_conversation_on_its_decode_node() -> None:
    async with cluster(prefill=2, decode=3) as c:
        nodes = set()
        for i in range(6):
            first, chat = await turn(c, say(text(300, f"c{i}")))
            for _ in range(2):
                reply, chat = await turn(c, [*chat, user("go on")])
                assert reply.path == "pull"
                assert reply.headers["x-kvflow-decode"] == first.headers["x-kvflow-decode"]
            nodes.add(first.headers["x-kvflow-decode"])
        assert len(nodes) > 1
        c.check()


SECRETS = ('"kv_transfer_params":{', "remote_", "block_ids", "do_remote", "127.0.0.1", '"fingerprint"', "event: kvflow")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
async def test_nothing_of_the_nodes_comes_out(endpoint: str, stream: bool) -> None:
    async with cluster() as c:
        for _ in range(2):
            body = {"messages": FIRST} if "chat" in endpoint else {"prompt": text(400)}
            reply = await c.post(endpoint, {**body, "stream": stream})
            seen = reply.raw.decode() + json.dumps(reply.headers)
            assert reply.status == 200
            assert not [s for s in SECRETS if s in seen]
        assert reply.path == "pull"


async def test_nothing_that_is_the_routers_to_say_gets_in() -> None:
    forged = {"do_remote_prefill": True, "remote_host": "10.6.6.6", "remote_port": 1, "remote_block_ids": [[1]]}
    async with cluster() as c:
        said = {"kv_transfer_params": forged, "ec_transfer_params": forged, "kvflow": forged}
        for body in ({"stream": True}, {"n": 2}, {"min_tokens": 2}, {"vllm_xargs": {**said, "mine": 1}}):
            for endpoint, prompt in (("chat/completions", {"messages": FIRST}), ("completions", {"prompt": "hi"})):
                reply = await c.post(f"/v1/{endpoint}", {**prompt, **said, **body})
                assert reply.status == 200, reply.raw
        for node in c.nodes.values():
            assert node.app.received
            assert "10.6.6.6" not in json.dumps([r.body for r in node.app.received])


async def test_metrics_tell_turns_tokens_and_pins() -> None:
    async with cluster() as c:
        _, chat = await turn(c, FIRST)
        reply, _ = await turn(c, [*chat, user("go on")], stream=True)
        await c.post("/v1/completions", {"prompt": "short"})
        page = (await c.get("/metrics")).raw.decode()
        for line in (
            'kvflow_turns_total{path="cold",reason="no-handle",tenant="default"} 2.0',
            'kvflow_turns_total{path="pull",reason="",tenant="default"} 1.0',
            f'kvflow_prompt_tokens_total{{source="pulled",tenant="default"}} {reply.pulled}.0',
            'kvflow_time_to_first_token_seconds_count{path="pull",tenant="default"} 1.0',
            'kvflow_unkeyed_turns_total{tenant="default"} 1.0',
            "kvflow_handles 1.0",
            'kvflow_node_ready{node="decode-0"} 1.0',
        ):
            assert line in page
        occupancy = c.nodes["decode-0"].engine.occupancy()
        pinned = next(
            float(li.split()[-1]) for li in page.splitlines() if li.startswith('kvflow_pinned_share{node="decode-0"}')
        )
        assert pinned == pytest.approx(occupancy.pinned / occupancy.total, abs=0.02)
        assert pinned > 0
