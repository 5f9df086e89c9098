"""Decode legs.

vLLM's scheduler is the real one; the worker's part, and NIXL's, is played by the tests.
"""

import time
from typing import Any

import pytest

from kvflow.connector.wire import KEY
from tests.connector.turns import COLD, DIRECT, FROM_PREFILL, LONGEST, ids, keep, pulled

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class TestKeeping:
    def test_a_turn_is_kept_with_all_that_has_been_computed(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        engine.add("turn", ids(40), keep(), answer=5)
        handle = engine.run("turn")
        report = handle[KEY]
        assert (report["retained"], report["tokens"], handle["remote_num_tokens"]) == (True, 44, 44)
        assert len(handle["remote_block_ids"][0]) == 3
        assert report["blocks"] == {"free": 57, "pinned": 3, "total": 60, "reserve": LONGEST + 1}
        assert engine.free == 57

    def test_its_deadline_reaches_the_worker_and_the_handle(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        engine.add("turn", ids(40), keep(33))
        engine.step()
        assert "turn" in engine.meta.reqs_in_batch  # without it the worker ignores the deadline
        engine.step()
        deadline = engine.meta.reqs_to_send["turn"]
        assert 30 < deadline - time.perf_counter() < 33

    def test_an_engine_with_pins_sleeps(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        engine.add("turn", ids(40), keep())
        engine.run("turn")
        engine.step()
        assert (engine.idle, engine.free) == (True, 57)

    def test_a_pull_ends_the_pin(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        engine.add("turn", ids(40), keep())
        engine.run("turn")
        engine.step(sent=["turn"])
        assert engine.free == 60
        engine.step()

    def test_what_expired_in_sleep_is_free_when_a_request_arrives(self, scheduling: Any) -> None:
        engine = scheduling.decode(blocks=40)
        for i in range(2):
            engine.add(f"turn{i}", ids(150, seed=i), keep(0.3))
            deadline = engine.run(f"turn{i}")["remote_blocks_expiry_time"]
        engine.step()
        assert (engine.idle, engine.free) == (True, 20)
        time.sleep(max(0.0, deadline - time.perf_counter()))
        for i in range(2):
            engine.add(f"long{i}", ids(250), None)
        assert set(engine.step()) == {"long0", "long1"}
        engine.step(sent=["turn0", "turn1"])  # the worker's own clock follows
        assert engine.free == 40

    def test_a_pin_expires_though_the_engine_is_busy(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        engine.add("other", ids(20), None, answer=200)
        engine.add("turn", ids(40), keep(0.3))
        deadline = engine.run("turn")["remote_blocks_expiry_time"]
        assert engine.free == 60 - 3 - 2
        time.sleep(max(0.0, deadline - time.perf_counter()))
        engine.step()
        assert engine.free == 60 - 2

    @pytest.mark.parametrize(
        "params",
        [
            keep(0),
            keep(share=0),
            {**DIRECT, KEY: {}},
            {**DIRECT, KEY: 7},
            {**DIRECT, KEY: {"retain_s": "60", "max_pinned_share": 1}},
        ],
    )
    def test_what_is_not_to_be_kept_is_freed_at_once_and_struck_from_the_workers_list(
        self, scheduling: Any, params: dict[str, Any]
    ) -> None:
        engine = scheduling.decode()
        engine.add("turn", ids(40), params)
        answer = engine.run("turn")
        assert set(answer) == {KEY}
        assert answer[KEY]["refused"] == "policy"
        assert engine.free == 60
        engine.step()
        assert "turn" in engine.meta.reqs_not_processed
        assert engine.meta.reqs_to_send == {}

    @pytest.mark.parametrize("params", [None, {}, DIRECT])
    def test_a_request_without_an_order_is_as_on_an_engine_that_transfers_nothing(
        self, scheduling: Any, params: dict[str, Any] | None
    ) -> None:
        engine = scheduling.decode()
        engine.add("turn", ids(40), params)
        assert engine.run("turn") is None
        assert engine.free == 60

    def test_an_aborted_turn_is_not_kept(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        engine.add("turn", ids(40), keep(), answer=50)
        engine.step()
        engine.abort("turn")
        engine.step()
        assert engine.free == 60
        assert "turn" in engine.meta.reqs_not_processed

    def test_embeddings_cannot_be_told_apart_and_are_not_kept(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        engine.add("turn", None, keep())
        assert engine.run("turn")[KEY]["refused"] == "unhashable"
        assert engine.free == 60

    def test_there_is_always_room_for_the_longest_request(self, scheduling: Any) -> None:
        engine = scheduling.decode(blocks=LONGEST + 20)
        reports = []
        for i in range(12):
            engine.add(f"turn{i}", ids(40, seed=i), keep())
            reports.append(engine.run(f"turn{i}")[KEY])
        assert [r["retained"] for r in reports] == [True] * 6 + [False] * 6
        assert reports[-1]["refused"] == "share"
        engine.add("long", ids(200), None, answer=55)
        engine.run("long", most=60)

    def test_turns_that_share_blocks_pay_for_them_once(self, scheduling: Any) -> None:
        engine = scheduling.decode(caching=True)
        for i in range(3):
            engine.add(f"turn{i}", [*ids(64), *ids(20, seed=i)], keep())
            last = engine.run(f"turn{i}")[KEY]
        assert last["blocks"]["pinned"] == 4 + 3 * 2
        engine.step(sent=["turn0", "turn2"])
        assert engine.free == 60 - 6
        engine.step(sent=["turn1"])
        assert engine.free == 60

    def test_a_window_that_slid_on_is_not_pinned(self, scheduling: Any) -> None:
        engine = scheduling.decode(window=32)
        engine.add("turn", ids(160), keep(), answer=3)
        report = engine.run("turn")[KEY]
        assert report["retained"]
        assert report["blocks"]["pinned"] == 60 - engine.free
        assert 11 < report["blocks"]["pinned"] < 16
        engine.step(sent=["turn"])
        assert engine.free == 60

    def test_an_engine_that_is_not_bidirectional_keeps_nothing(self, scheduling: Any) -> None:
        engine = scheduling.decode(bidirectional=False)
        engine.add("turn", ids(40), keep())
        assert not (engine.run("turn") or {}).get("remote_block_ids")
        engine.step()
        assert engine.free == 60


class TestAnswering:
    """The decode leg's own pull from the prefill node."""

    def test_the_prompt_comes_from_the_prefill_node_and_the_turn_is_kept(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        engine.add("turn", ids(40), {**FROM_PREFILL, **keep(do_remote_prefill=True)}, answer=2)
        engine.step()
        assert pulled(engine, "turn") == 3
        engine.step(received=["turn"])
        report = engine.run("turn")[KEY]
        assert (report["tokens"], report["load_failed"]) == (41, False)

    def test_what_the_prefill_node_computed_counts_as_added_to_the_cache(self, scheduling: Any) -> None:
        engine = scheduling.decode(caching=True)
        for name, cached in (("cold", 0), ("pulled", 17)):
            params = {**FROM_PREFILL, "remote_prefill_cached_tokens": cached, **keep(do_remote_prefill=True)}
            params["remote_request_id"] = name
            engine.add(name, ids(40, seed=cached), params)
            engine.step()
            engine.step(received=[name])
            engine.run(name)
            assert engine.prefills[name].num_cache_creation_tokens == 32 - cached
            assert engine.prefills[name].num_external_cached_tokens >= 39

    def test_a_broken_pull_is_reported_and_the_prompt_computed(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        engine.add("turn", ids(40), {**FROM_PREFILL, **keep(do_remote_prefill=True)}, answer=2)
        engine.step()
        engine.step(failed=["turn"])
        report = engine.run("turn")[KEY]
        assert (report["load_failed"], report["tokens"]) == (True, 41)

    def test_another_prompt_than_the_prefill_nodes_is_computed(self, scheduling: Any) -> None:
        prefill, engine = scheduling.prefill(), scheduling.decode()
        prefill.add("leg", ids(40), {**COLD, KEY: {}})
        digest = prefill.run("leg")[KEY]["prompt_digest"]
        for name, prompt, blocks in (("same", ids(40), 3), ("other", ids(40, seed=1), 0)):
            order = {"retain_s": 60, "max_pinned_share": 1.0, "prompt_digest": digest}
            engine.add(name, prompt, {**FROM_PREFILL, KEY: order})
            engine.step()
            assert pulled(engine, name) == blocks

    def test_a_turn_that_never_ran_tells_the_prefill_node(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        engine.add("turn", ids(40), {**FROM_PREFILL, **keep(do_remote_prefill=True)})
        engine.abort("turn")
        engine.step()
        assert pulled(engine, "turn") == 0
