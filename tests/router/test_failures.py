"""Nodes that fail under a turn, and clients that leave it."""

import asyncio
from typing import Any

import aiohttp
import pytest

from kvflow.nodes.simulated import Settings, Speed
from kvflow.router import Settings as RouterSettings
from kvflow.types import Role
from tests.cluster import BLOCK, Cluster, cluster, say, text, until

ASKED = say(text(300))


def go_on(answer: str) -> list[dict[str, Any]]:
    return [*ASKED, {"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]


@pytest.mark.parametrize("node", ["prefill", "decode"])
async def test_a_leg_that_fails_is_made_up_for_on_another_node(node: str) -> None:
    async with cluster(prefill=2, decode=2) as c:
        c.nodes[f"{node}-0"].faults.errors = 1
        replies = [await c.chat(say(text(100, f"chat{i}"))) for i in range(20)]
        for i, reply in enumerate(replies):
            assert reply.text == await c.right(say(text(100, f"chat{i}")))
        retried = [r for r in replies if r.reason == "retried"]
        assert [(r.path, r.headers[f"x-kvflow-{node}"]) for r in retried] == [("cold", f"{node}-1")]
        assert f'kvflow_leg_failures_total{{node="{node}-0"}} 1.0' in (await c.get("/metrics")).raw.decode()
        c.check()


async def test_a_turn_that_loses_its_decode_node_after_a_pull_is_done_again_cold() -> None:
    async with cluster(decode=2) as c:
        first = await c.chat(ASKED)
        held_by = first.headers["x-kvflow-decode"]
        c.nodes[held_by].faults.errors = 1
        second = await c.chat(go_on(first.text))
        assert second.text == await c.right(go_on(first.text))
        assert (second.path, second.reason, second.pulled) == ("cold", "retried", 0)
        assert second.headers["x-kvflow-decode"] != held_by


async def test_an_engine_that_fails_twice_is_an_error_with_its_status_and_none_of_its_words() -> None:
    async with cluster() as c:
        c.nodes["prefill-0"].faults.errors = 2
        reply = await c.chat(ASKED)
        assert reply.status == 500
        message = "prefill-0 failed with status 500"
        assert reply.json["error"] == {"message": message, "type": "InternalServerError", "param": None, "code": 500}
        assert (await c.chat(ASKED)).status == 200


@pytest.mark.parametrize("wrong", [{"min_tokens": "x"}, {"max_tokens": "abc"}, {"stream_options": 5}])
async def test_a_request_that_only_the_decode_leg_refuses_leaves_no_prompt_with_the_prefill_node(wrong: Any) -> None:
    async with cluster() as c:
        for _ in range(5):
            assert (await c.chat(ASKED, **wrong)).status == 400
        await until(lambda: c.nodes["prefill-0"].engine.occupancy().leased == 0)
        c.check()


async def test_a_client_that_leaves_between_the_legs_leaves_no_prompt_with_the_prefill_node() -> None:
    async with cluster() as c:
        c.nodes["decode-0"].faults.flowing.clear()
        asking = asyncio.create_task(c.chat(ASKED))
        await until(lambda: len(c.nodes["decode-0"].app.received) == 1)
        assert c.nodes["prefill-0"].engine.occupancy().leased == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: c.nodes["prefill-0"].engine.occupancy().leased == 0)
        c.check()


async def test_a_handle_that_no_engine_heard_of_is_there_for_the_next_try() -> None:
    async with cluster() as c:
        first = await c.chat(ASKED)
        await c.nodes["prefill-0"].stop()
        await c.probe()
        assert (await c.chat(go_on(first.text))).status == 503
        await c.nodes["prefill-0"].start()
        await c.probe()
        assert (await c.chat(go_on(first.text))).path == "pull"


async def test_a_handle_that_an_engine_was_sent_is_never_sent_again() -> None:
    """Even where the engine refused the request: it may have pulled first, and the blocks be somebody else's by now."""
    async with cluster() as c:
        first = await c.chat(ASKED)
        too_long = [*go_on(first.text), {"role": "user", "content": text(9000)}]
        assert (await c.chat(too_long)).status == 400
        second = await c.chat(go_on(first.text))
        assert (second.path, second.reason) == ("cold", "no-handle")
        assert second.text == await c.right(go_on(first.text))


@pytest.mark.parametrize("node", ["prefill-0", "decode-0"])
async def test_without_a_node_of_a_role_turns_are_refused_at_once_and_served_again_later(node: str) -> None:
    async with cluster() as c:
        await c.nodes[node].stop()
        reply = await c.chat(ASKED)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert node.split("-")[0] in reply.json["error"]["message"]
        ready = await c.get("/ready")
        assert (ready.status, (await c.get("/health")).status) == (503, 200)
        assert "cannot be reached" in ready.json["error"]["message"]
        await c.nodes[node].start()
        await c.probe()
        assert (await c.get("/ready")).status == 200
        assert (await c.chat(ASKED)).text == await c.right(ASKED)


async def test_a_restarted_decode_node_is_not_asked_for_what_it_held() -> None:
    async with cluster() as c:
        first = await c.chat(ASKED)
        await c.nodes["decode-0"].stop()
        await c.nodes["decode-0"].start()
        await c.probe()
        second = await c.chat(go_on(first.text))
        assert (second.path, second.reason) == ("cold", "node-gone")
        assert second.text == await c.right(go_on(first.text))


async def test_a_restart_that_nobody_noticed_costs_a_recomputation_and_no_wrong_token() -> None:
    async with cluster() as c:
        first = await c.chat(ASKED)
        await c.nodes["decode-0"].stop()
        await c.nodes["decode-0"].start()
        second = await c.chat(go_on(first.text))
        assert (second.path, second.reason, second.pulled) == ("cold", "transfer-failed", 0)
        assert second.text == await c.right(go_on(first.text))


async def test_a_failed_pull_is_computed_and_counted() -> None:
    async with cluster() as c:
        first = await c.chat(ASKED)
        c.nodes["prefill-0"].faults.failed_transfers = 1
        second = await c.chat(go_on(first.text))
        assert (second.path, second.reason) == ("cold", "transfer-failed")
        assert second.text == await c.right(go_on(first.text))
        assert 'kvflow_load_fallbacks_total{node="prefill-0"} 1.0' in (await c.get("/metrics")).raw.decode()


async def test_a_decode_node_that_reads_another_prompt_out_of_the_request_computes_it_itself() -> None:
    """Where the two nodes render a request differently, the prefill node's KV belongs to another prompt."""
    async with cluster() as c:
        tools = [{"type": "function", "function": {"name": "only_the_decode_node_sees_me"}}]
        c.nodes["prefill-0"].faults.ignored_fields = frozenset({"tools"})
        reply = await c.chat(ASKED, tools=tools)
        assert reply.text == await c.right(ASKED, tools=tools)
        assert 'kvflow_load_fallbacks_total{node="decode-0"} 1.0' in (await c.get("/metrics")).raw.decode()
        c.check()


async def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    async with cluster() as c:
        c.nodes["decode-0"].faults.break_after = 3
        reply = await c.chat(ASKED, stream=True, min_tokens=8)
        assert reply.status == 200
        assert reply.raw.endswith(b"data: [DONE]\n\n")
        assert reply.events[-1]["error"] == {
            "message": "decode-0 broke off the connection",
            "type": "BadGatewayError",
            "param": None,
            "code": 502,
        }
        c.check()


async def test_a_lost_handle_is_a_cold_turn() -> None:
    async with cluster() as c:
        c.nodes["decode-0"].faults.drop_handles = True
        first = await c.chat(ASKED, stream=True)
        second = await c.chat(go_on(first.text))
        assert (second.path, second.reason) == ("cold", "no-handle")


async def test_a_silent_engine_is_given_up_unless_its_answer_comes_as_a_whole() -> None:
    quick = RouterSettings(probe_interval_s=3600, silence_timeout_s=0.3)
    async with cluster(router_settings=quick) as c:
        c.nodes["decode-0"].faults.flowing.clear()
        reply = await c.chat(ASKED, stream=True)
        assert (reply.status, reply.json["error"]["message"]) == (502, "decode-0 did not answer in time")
        asking = asyncio.create_task(c.chat(ASKED))
        await until(lambda: len(c.nodes["decode-0"].app.received) == 3)
        done, _ = await asyncio.wait({asking}, timeout=1)
        assert not done
        c.nodes["decode-0"].faults.flowing.set()
        assert (await asking).status == 200


def slow(role: Role) -> Settings:
    speed = Speed(prefill=3000) if role is Role.PREFILL else Speed(decode=100)
    return Settings(block_size=BLOCK, prefix_caching=False, speed=speed)


def busy(c: Cluster, node: str) -> bool:
    occupancy = c.nodes[node].engine.occupancy()
    return occupancy.running + occupancy.waiting > 0


async def idle(c: Cluster) -> None:
    await until(lambda: not any(busy(c, name) for name in c.nodes))
    view = c.router.fleet.view()
    await until(lambda: all(n.in_flight == 0 for n in (*view.prefill, *view.decode)))
    c.check()


@pytest.mark.parametrize("node", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_the_engine_that_works_for_it(node: str, stream: bool) -> None:
    async with cluster(settings=slow) as c:
        asking = asyncio.create_task(c.chat(ASKED, stream=stream, max_tokens=2000, ignore_eos=True))
        await until(lambda: busy(c, node))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await idle(c)
        assert len(c.router.conversations) == 0


async def test_a_client_that_leaves_in_the_middle_of_a_stream_stops_it() -> None:
    async with cluster(settings=slow) as c:
        body = {"messages": ASKED, "stream": True, "max_tokens": 2000, "ignore_eos": True}
        async with c.session.post(c.url + "/v1/chat/completions", json=body) as response:
            await response.content.readany()
        await idle(c)


async def test_a_client_that_leaves_before_its_request_is_complete_costs_nothing() -> None:
    async with cluster() as c:
        host, port = c.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        writer.write(b'content-length: 1000\r\n\r\n{"messages"')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await c.chat(ASKED)).status == 200
        assert len(c.nodes["prefill-0"].app.received) == 1


async def test_hundreds_of_departures_leave_nothing_behind() -> None:
    async with cluster(settings=slow) as c:

        async def leave(after: float) -> None:
            body = {"messages": ASKED, "stream": True, "max_tokens": 100, "ignore_eos": True}
            timeout = aiohttp.ClientTimeout(total=after)
            try:
                async with c.session.post(c.url + "/v1/chat/completions", json=body, timeout=timeout) as response:
                    await response.read()
            except TimeoutError:
                return

        before = len(asyncio.all_tasks())
        for _ in range(8):
            await asyncio.gather(*(leave(0.02 * (i + 1)) for i in range(25)))
        await idle(c)
        await until(lambda: len(asyncio.all_tasks()) <= before + 2)
