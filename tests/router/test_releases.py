"""What decode nodes keep is given back: under pressure, on request, and when nobody needs it any more."""

import asyncio
import socket
from typing import Any

import pytest

from kvflow.nodes.simulated import ManualClock, Settings
from kvflow.router import Settings as RouterSettings
from kvflow.types import Role
from tests.cluster import BLOCK, Cluster, Message, Reply, cluster, say, text, until


def user(content: str) -> Message:
    return {"role": "user", "content": content}


async def turn(c: Cluster, messages: list[Message], headers: dict[str, str] | None = None, **body: Any) -> Reply:
    reply = await c.chat(messages, headers, **body)
    assert reply.text == await c.right(messages)
    return reply


def goes_on(messages: list[Message], reply: Reply, more: str = "go on") -> list[Message]:
    return [*messages, {"role": "assistant", "content": reply.text}, user(more)]


def pinned(c: Cluster, node: str = "decode-0") -> int:
    return c.nodes[node].engine.occupancy().pinned


def small(_: Role) -> Settings:
    """At a share of 0.5, room for about four conversations of 300 tokens."""
    return Settings(block_size=BLOCK, blocks=160, max_model_len=1024, prefix_caching=False)


async def test_a_new_conversation_takes_the_room_of_the_oldest() -> None:
    async with cluster(settings=small, clock=ManualClock()) as c:
        chats = [say(text(300, f"chat{i}")) for i in range(8)]
        replies = []
        for chat in chats:
            replies.append(await turn(c, chat))
            c.advance(10)  # so that age counts for more than how long answers happen to be
        assert c.nodes["decode-0"].engine.occupancy().pinned <= 80
        page = (await c.get("/metrics")).raw.decode()
        assert 'kvflow_turns_kept_total{outcome="kept",tenant="default"} 8.0' in page
        assert 'outcome="share"' not in page
        # The newest first: each one that is kept again would push out one that is to be looked at.
        again = [await turn(c, goes_on(chats[i], replies[i]), {"x-kvflow-retain": "no"}) for i in range(7, -1, -1)]
        assert [r.path for r in again] == ["pull"] * 3 + ["cold"] * 5
        assert {r.reason for r in again[3:]} == {"no-handle"}
        await until(lambda: pinned(c) == 0)
        c.check()


async def test_a_busy_node_makes_room_before_the_legs_that_need_it() -> None:
    """Kept turns and turns under way never wait for each other."""
    async with cluster(settings=small) as c:
        for i in range(6):
            await turn(c, say(text(300, f"old{i}")))
        chats = [say(text(300, f"new{i}")) for i in range(6)]
        replies = await asyncio.gather(*(c.chat(chat) for chat in chats))
        assert [r.text for r in replies] == [await c.right(chat) for chat in chats]
        c.check()


async def test_what_a_turn_goes_on_with_is_never_given_up_for_its_own_sake() -> None:
    async with cluster(settings=small) as c:
        chats = [say(text(300, f"chat{i}")) for i in range(3)]
        for _ in range(3):
            for i, chat in enumerate(chats):
                reply = await turn(c, chat)
                assert reply.path == ("pull" if len(chat) > 1 else "cold")
                chats[i] = goes_on(chat, reply, "more")
        c.check()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_short_turn_goes_to_the_node_that_holds_the_conversation(stream: bool) -> None:
    caching = Settings(block_size=BLOCK)
    async with cluster(policy="aggressive", decode=2, settings=lambda _: caching) as c:
        first = await turn(c, say(text(300)))
        asked = goes_on(say(text(300)), first)
        second = await turn(c, asked, stream=stream)
        assert (second.path, second.reason, second.pulled) == ("direct", None, 0)
        assert "x-kvflow-prefill" not in second.headers
        assert second.headers["x-kvflow-decode"] == first.headers["x-kvflow-decode"]
        third = await turn(c, goes_on(asked, second, text(200, "long")))
        assert third.path == "pull"
        held_by = first.headers["x-kvflow-decode"]
        assert c.nodes[held_by].engine.occupancy().leased == 1  # what the direct turn went on with has been released
        c.check()


async def test_a_direct_turn_reuses_what_its_node_holds() -> None:
    async with cluster(policy="aggressive", settings=lambda _: Settings(block_size=BLOCK)) as c:
        first = await turn(c, say(text(300)))
        second = await c.chat(goes_on(say(text(300)), first))
        usage = second.json["usage"]
        assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 3 * BLOCK


async def test_without_a_prefix_cache_no_turn_is_direct() -> None:
    async with cluster(policy="aggressive") as c:
        first = await turn(c, say(text(300)))
        assert (await turn(c, goes_on(say(text(300)), first))).path == "pull"


async def test_what_is_not_worth_a_pull_is_released_once_the_conversation_has_gone_on() -> None:
    async with cluster(policy="conservative") as c:
        chat = say("a short beginning")
        first = await turn(c, chat)
        asked = goes_on(chat, first)
        second = await turn(c, asked)
        assert (second.path, second.reason) == ("cold", "below-threshold")
        await until(lambda: c.nodes["decode-0"].engine.occupancy().leased == 1)
        assert len(c.router.conversations) == 1
        assert 'kvflow_handles_released_total{why="superseded"} 1.0' in (await c.get("/metrics")).raw.decode()


async def test_a_closed_conversation_gives_everything_back() -> None:
    async with cluster() as c:
        for i in range(2):
            await c.chat(say(text(100, f"part{i}")), conversation_id="mine/ü")
        kept = await turn(c, say(text(100, "other")))
        before = pinned(c)
        reply = await c.delete("/v1/conversations/mine%2F%C3%BC")
        assert (reply.status, reply.json) == (200, {"id": "mine/ü", "object": "conversation.deleted", "deleted": True})
        await until(lambda: 0 < pinned(c) < before)
        assert (await turn(c, goes_on(say(text(100, "other")), kept))).path == "pull"
        gone = await c.delete("/v1/conversations/mine%2F%C3%BC")
        assert (gone.status, gone.json["error"]["type"]) == (404, "NotFoundError")


async def test_a_conversation_without_an_id_is_closed_by_the_name_in_its_answers() -> None:
    async with cluster() as c:
        reply = await turn(c, say(text(100)))
        assert (await c.delete(f"/v1/conversations/{reply.headers['x-kvflow-conversation']}")).status == 200
        await until(lambda: pinned(c) == 0)
        assert (await turn(c, goes_on(say(text(100)), reply))).reason == "no-handle"


async def test_a_turn_under_way_is_not_kept_once_its_conversation_is_closed() -> None:
    async with cluster() as c:
        c.nodes["decode-0"].faults.flowing.clear()
        asking = asyncio.create_task(c.chat(say(text(100)), conversation_id="mine"))
        await until(lambda: len(c.nodes["decode-0"].app.received) == 1)
        assert (await c.delete("/v1/conversations/mine")).status == 200
        c.nodes["decode-0"].faults.flowing.set()
        assert (await asking).text == await c.right(say(text(100)))
        await until(lambda: pinned(c) == 0)
        assert len(c.router.conversations) == 0


async def test_a_client_may_say_that_nothing_is_to_be_kept() -> None:
    async with cluster() as c:
        first = await turn(c, say(text(300)), {"x-kvflow-retain": "no"})
        assert (pinned(c), len(c.router.conversations)) == (0, 0)
        assert (await turn(c, goes_on(say(text(300)), first))).reason == "no-handle"


@pytest.mark.parametrize(("said", "kept_s"), [("20", 20), ("100000", 480), (" 12.5 ", 12.5)])
async def test_a_client_may_say_how_long_up_to_the_policys_time(said: str, kept_s: float) -> None:
    clock = ManualClock()
    async with cluster(clock=clock) as c:
        await c.chat(say(text(300)), {"x-kvflow-retain": said})
        c.advance(kept_s - 0.1)
        assert pinned(c) > 0
        c.advance(0.2)
        assert pinned(c) == 0


@pytest.mark.parametrize("said", ["yes", "", "-1", "0", "9.9", "nan", "inf", "10s"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_nonsense_about_keeping_is_refused_by_its_name(said: str, path: str) -> None:
    async with cluster() as c:
        reply = await c.post(path, {"messages": say("hi"), "max_tokens": 4}, {"x-kvflow-retain": said})
        assert reply.status == 400
        message = reply.json["error"]["message"]
        assert message.startswith('the header x-kvflow-retain must be "no" or a number of seconds from 10 on')
        assert c.nodes["prefill-0"].app.received == c.nodes["decode-0"].app.received


async def test_an_expired_handle_is_released_not_left_to_its_end() -> None:
    clock = ManualClock()
    async with cluster(clock=clock) as c:
        first = await turn(c, say(text(300)), {"x-kvflow-retain": "20"})
        c.advance(15)  # the router gives a handle up 6 seconds early
        second = await c.chat(goes_on(say(text(300)), first), {"x-kvflow-retain": "no"})
        assert (second.path, second.reason) == ("cold", "expired")
        await until(lambda: pinned(c) == 0)


async def test_a_refused_turn_leaves_nothing_pinned() -> None:
    async with cluster() as c:
        first = await turn(c, say(text(300)))
        too_long = goes_on(say(text(300)), first, text(9000))
        assert (await c.chat(too_long)).status == 400
        await until(lambda: pinned(c) == 0)


async def test_what_could_not_be_pulled_is_released() -> None:
    async with cluster() as c:
        first = await turn(c, say(text(300)))
        c.nodes["prefill-0"].faults.failed_transfers = 1
        second = await c.chat(goes_on(say(text(300)), first), {"x-kvflow-retain": "no"})
        assert (second.path, second.reason) == ("cold", "transfer-failed")
        await until(lambda: pinned(c) == 0)


async def test_a_handle_whose_reader_died_is_released_when_that_is_known() -> None:
    async with cluster(prefill=1) as c:
        first = await turn(c, say(text(300)))
        c.nodes["prefill-0"].faults.flowing.clear()
        asking = asyncio.create_task(c.chat(goes_on(say(text(300)), first), {"x-kvflow-retain": "no"}))
        await until(lambda: len(c.nodes["prefill-0"].app.received) == 2)
        await c.nodes["prefill-0"].stop()
        assert (await asking).status in (502, 503)
        assert pinned(c) > 0  # the engine may be reading still, for all that the router knows
        await c.nodes["prefill-0"].start()
        await c.probe()
        await until(lambda: pinned(c) == 0)


async def test_what_the_store_has_no_room_for_is_released() -> None:
    async with cluster(router_settings=RouterSettings(probe_interval_s=3600, max_conversations=2)) as c:
        for i in range(4):
            await turn(c, say(text(100, f"chat{i}")))
        await until(lambda: c.nodes["decode-0"].engine.occupancy().leased == 2)


async def test_a_handle_whose_reader_died_is_released_though_another_node_made_up_for_it() -> None:
    async with cluster(prefill=2) as c:
        first = await turn(c, say(text(300)))
        names = ("prefill-0", "prefill-1")
        for name in names:
            c.nodes[name].faults.flowing.clear()
        before = {name: len(c.nodes[name].app.received) for name in names}

        def asked(name: str) -> bool:
            return len(c.nodes[name].app.received) > before[name]

        asking = asyncio.create_task(c.chat(goes_on(say(text(300)), first), {"x-kvflow-retain": "no"}))
        await until(lambda: any(map(asked, names)))
        dead, other = sorted(names, key=asked, reverse=True)
        await c.nodes[dead].stop()
        await c.nodes[dead].start()
        await until(lambda: asked(other))
        assert pinned(c) > 0
        await c.probe()  # the first reader is known to be gone before the turn has ended
        c.nodes[other].faults.flowing.set()
        assert (await asking).reason == "retried"
        await until(lambda: pinned(c) == 0)


async def test_a_handle_that_another_leg_may_be_reading_is_not_released_for_the_retrys_sake() -> None:
    async with cluster(prefill=2) as c:
        first = await turn(c, say(text(300)))
        c.nodes["prefill-0"].faults.errors = c.nodes["prefill-1"].faults.errors = 1
        asked = goes_on(say(text(300)), first)
        assert (await c.chat(asked, {"x-kvflow-retain": "no"})).status == 500
        assert (await c.chat(say("hi"), {"x-kvflow-retain": "no"})).status == 200
        assert pinned(c) > 0


async def test_what_has_expired_makes_no_room() -> None:
    """The engine has freed it long ago, however long the router remembers it."""
    clock = ManualClock()
    async with cluster(settings=small, clock=clock) as c:
        for i in range(4):
            await c.chat(say(text(300, f"old{i}")), {"x-kvflow-retain": "20"})
        c.advance(21)
        for i in range(6):
            await c.chat(say(text(300, f"new{i}")))
        page = (await c.get("/metrics")).raw.decode()
        assert 'kvflow_turns_kept_total{outcome="kept",tenant="default"} 10.0' in page
        late = await c.chat([*say(text(300, "old0")), {"role": "assistant", "content": "?"}, user("go on")])
        assert late.reason == "expired"


@pytest.mark.parametrize("n", [1, 2])
async def test_a_body_that_is_long_for_other_reasons_drives_nobody_out(n: int) -> None:
    async with cluster(settings=lambda _: Settings(block_size=BLOCK, blocks=400, max_model_len=1024)) as c:
        for i in range(6):
            await turn(c, say(text(300, f"chat{i}")))
        c.nodes["decode-0"].faults.flowing.clear()
        asking = asyncio.create_task(c.chat(say("hi"), n=n, user="x" * 2**19))
        other = asyncio.create_task(c.chat(say("ho"), {"x-kvflow-retain": "no"}))
        await until(lambda: len(c.nodes["decode-0"].app.received) == 8)
        assert len(c.router.conversations) == 6
        c.nodes["decode-0"].faults.flowing.set()
        await asyncio.gather(asking, other)


async def test_a_handle_that_was_not_sent_yet_when_the_client_left_is_there_for_the_next_turn() -> None:
    async with cluster() as c:
        first = await turn(c, say(text(300)))
        asked = goes_on(say(text(300)), first)
        node = c.nodes["prefill-0"]
        await node.stop()  # and something listens there that accepts no connection
        port = int(node.spec.url.rpartition(":")[2])
        with socket.socket() as full:
            full.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            full.bind(("127.0.0.1", port))
            full.listen(0)
            waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(1)]
            asking = asyncio.create_task(c.chat(asked))
            await until(lambda: c.router.fleet.state("prefill-0").in_flight == 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            for _, writer in waiting:
                writer.close()
        await until(lambda: len(c.router.conversations) == 1)
        await node.start()
        await c.probe()
        assert (await turn(c, asked)).path == "pull"


async def test_closing_reaches_a_handle_that_a_branch_has_taken() -> None:
    async with cluster(policy="conservative") as c:
        first = await turn(c, say(text(300)))
        name = first.headers["x-kvflow-conversation"]
        c.nodes["decode-0"].faults.flowing.clear()
        # It cannot be split, so it reads nothing, but has the handle while it is under way.
        branch = asyncio.create_task(c.chat([*say(text(300)), user("another question")], n=2))
        await until(lambda: len(c.router.conversations) == 0)
        assert (await c.delete(f"/v1/conversations/{name}")).status == 200
        c.nodes["decode-0"].faults.flowing.set()
        assert (await branch).status == 200
        await until(lambda: pinned(c) == 0)
        assert len(c.router.conversations) == 0
