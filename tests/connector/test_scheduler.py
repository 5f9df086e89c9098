"""Inside vLLM's own scheduler. The worker's part, and NIXL's, is played by the tests."""

import random
import time
from typing import Any

import pytest

from kvflow.connector.wire import KEY

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BLOCK = 16
LONGEST = 16
TOKEN = 7
DIRECT = {"do_remote_decode": False, "do_remote_prefill": False}
COLD = {"do_remote_decode": True, "do_remote_prefill": False}
FROM_PREFILL = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "prefill",
    "remote_request_id": "there",
    "remote_host": "h",
    "remote_port": 1,
    "tp_size": 1,
}


def ids(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(n)]


def keep(retain_s: float = 60, share: float = 1.0, **more: Any) -> dict[str, Any]:
    return {**DIRECT, KEY: {"retain_s": retain_s, "max_pinned_share": share}, **more}


def pull(handle: dict[str, Any], minimum: int = 0, **changed: Any) -> dict[str, Any]:
    """What the router makes of a handle for the next prefill leg."""
    order = {"min_pull_tokens": minimum, "fingerprint": handle[KEY]["fingerprint"], **changed}
    return {**handle, **COLD, "remote_block_ids": [list(g) for g in handle["remote_block_ids"]], KEY: order}


def held(scheduling: Any, tokens: list[int], answer: int = 5, **more: Any) -> dict[str, Any]:
    """The handle of a turn on some decode node."""
    engine = scheduling.decode()
    engine.add("turn", tokens, keep(), answer=answer, **more)
    handle: dict[str, Any] = engine.run("turn")
    return handle


def pulled(engine: Any, name: str = "next") -> int:
    """Blocks that the worker was told to fetch for a request; -1 if it was told nothing of it."""
    receive = engine.meta.reqs_to_recv.get(name)
    if receive is None:
        return -1
    return len(receive.local_block_ids[0]) if receive.local_block_ids else 0


class TestKeeping:
    def test_a_turn_is_kept_with_all_that_has_been_computed(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        engine.add("turn", ids(40), keep(), answer=5)
        handle = engine.run("turn")
        report = handle[KEY]
        assert (report["retained"], report["tokens"], handle["remote_num_tokens"]) == (True, 44, 44)
        assert len(handle["remote_block_ids"][0]) == 3
        assert report["blocks"] == {"free": 57, "pinned": 3, "total": 60}
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


class TestPulling:
    def test_all_that_is_held_is_pulled_and_reported(self, scheduling: Any) -> None:
        handle, engine = held(scheduling, ids(40)), scheduling.prefill()
        engine.add("next", [*ids(40), *[TOKEN] * 4, *ids(9, seed=1)], pull(handle))
        engine.step()
        assert pulled(engine) == 3
        assert engine.meta.reqs_to_recv["next"].remote.num_tokens == 44
        engine.step(received=["next"])
        answer = engine.run("next")
        report = answer[KEY]
        assert (report["verified_tokens"], report["pulled_tokens"], report["prompt_tokens"]) == (44, 44, 53)
        assert "reason" not in report
        assert answer["do_remote_prefill"]

    @pytest.mark.parametrize(("edited", "blocks"), [(0, 0), (20, 1), (35, 2), (43, 2)])
    def test_an_edited_history_pulls_the_blocks_before_the_edit(
        self, scheduling: Any, edited: int, blocks: int
    ) -> None:
        handle, engine = held(scheduling, ids(40)), scheduling.prefill()
        prompt = [*ids(40), *[TOKEN] * 4, *ids(30, seed=1)]
        prompt[edited] += 1
        engine.add("next", prompt, pull(handle))
        engine.step()
        assert pulled(engine) == blocks
        remote = engine.meta.reqs_to_recv["next"].remote
        assert remote.block_ids == [handle["remote_block_ids"][0][:blocks]]
        assert remote.num_tokens == blocks * BLOCK
        if blocks:
            engine.step(received=["next"])
            report = engine.run("next")[KEY]
            assert (report["pulled_tokens"], report["reason"]) == (blocks * BLOCK, "diverged")

    def test_a_shorter_prompt_pulls_the_front_of_the_list_not_its_end(self, scheduling: Any) -> None:
        handle, engine = held(scheduling, ids(100)), scheduling.prefill()
        engine.add("next", ids(50), pull(handle))
        engine.step()
        assert engine.meta.reqs_to_recv["next"].remote.block_ids == [handle["remote_block_ids"][0][:3]]
        engine.step(received=["next"])
        assert engine.run("next")[KEY]["pulled_tokens"] == 48

    def test_the_local_cache_comes_first(self, scheduling: Any) -> None:
        handle, engine = held(scheduling, ids(100)), scheduling.prefill(caching=True)
        engine.add("warm", ids(40), None)
        engine.run("warm")
        engine.add("next", [*ids(100), *[TOKEN] * 4, 1, 2], pull(handle))
        engine.step()
        assert pulled(engine) == 7 - 2
        engine.step(received=["next"])
        report = engine.run("next")[KEY]
        assert (report["local_tokens"], report["pulled_tokens"]) == (32, 104 - 32)

    @pytest.mark.parametrize(
        ("minimum", "warm", "reason"),
        [(105, 0, "below-threshold"), (73, 40, "below-threshold"), (0, 106, "local-cache")],
    )
    def test_a_pull_that_does_not_happen_still_ends_the_pin(
        self, scheduling: Any, minimum: int, warm: int, reason: str
    ) -> None:
        handle, engine = held(scheduling, ids(100)), scheduling.prefill(caching=True)
        prompt = [*ids(100), *[TOKEN] * 4, *ids(20, seed=1)]
        if warm:
            engine.add("warm", prompt[: warm + 10], None)
            engine.run("warm")
        engine.add("next", prompt, pull(handle, minimum))
        answer = engine.step()["next"]
        assert pulled(engine) == 0
        assert (answer[KEY]["pulled_tokens"], answer[KEY]["reason"]) == (0, reason)

    @pytest.mark.parametrize(
        "fingerprint",
        [None, {}, "x", {"block_size": 16, "stride": 1, "tokens": 44, "digests": "AAAA"}],
    )
    def test_without_proof_nothing_is_pulled(self, scheduling: Any, fingerprint: object) -> None:
        handle, engine = held(scheduling, ids(40)), scheduling.prefill()
        engine.add("next", [*ids(40), *[TOKEN] * 5], pull(handle, fingerprint=fingerprint))
        report = engine.step()["next"][KEY]
        assert pulled(engine) == 0
        assert (report["verified_tokens"], report["reason"]) == (0, "diverged")

    def test_a_handle_without_any_order_of_ours_is_not_pulled(self, scheduling: Any) -> None:
        handle, engine = held(scheduling, ids(40)), scheduling.prefill()
        engine.add("next", [*ids(40), *[TOKEN] * 5], {k: v for k, v in pull(handle).items() if k != KEY})
        engine.step()
        assert pulled(engine) == 0

    @pytest.mark.parametrize(
        "changed",
        [
            {"remote_num_tokens": 43},
            {"remote_num_tokens": None},
            {"remote_num_tokens": "x"},
            {"remote_block_ids": [[1]]},
        ],
    )
    def test_a_handle_that_contradicts_its_fingerprint_is_not_pulled(
        self, scheduling: Any, changed: dict[str, Any]
    ) -> None:
        handle, engine = held(scheduling, ids(40)), scheduling.prefill()
        engine.add("next", [*ids(40), *[TOKEN] * 5], {**pull(handle), **changed})
        engine.step()
        assert pulled(engine) == 0

    def test_somebody_elses_salt_verifies_nothing(self, scheduling: Any) -> None:
        handle, engine = held(scheduling, ids(40), cache_salt="a"), scheduling.prefill()
        for salt, verified in (("a", 44), ("b", 0), (None, 0)):
            engine.add(f"salt {salt}", [*ids(40), *[TOKEN] * 5], pull(handle), cache_salt=salt)
            engine.step()
            assert pulled(engine, f"salt {salt}") == -(-verified // BLOCK)

    @pytest.mark.parametrize("missing", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"])
    def test_half_a_handle_is_none(self, scheduling: Any, missing: str) -> None:
        handle, engine = held(scheduling, ids(40)), scheduling.prefill()
        engine.add("next", [*ids(40), *[TOKEN] * 5], {k: v for k, v in pull(handle).items() if k != missing})
        report = engine.step()["next"][KEY]
        assert report["pulled_tokens"] == 0

    @pytest.mark.parametrize("blocks", [5, "x", {"a": 1}, [1, 2], [[1], None], []])
    def test_block_lists_that_are_none_do_not_reach_the_worker(self, scheduling: Any, blocks: object) -> None:
        handle, engine = held(scheduling, ids(40)), scheduling.prefill()
        engine.add("next", [*ids(40), *[TOKEN] * 5], {**pull(handle), "remote_block_ids": blocks})
        assert engine.step()["next"][KEY]["pulled_tokens"] == 0
        assert pulled(engine) == -1

    def test_prompt_logprobs_need_every_position_computed(self, scheduling: Any) -> None:
        handle, engine = held(scheduling, ids(40)), scheduling.prefill()
        engine.add(
            "next",
            [*ids(40), *[TOKEN] * 5],
            pull(handle),
            sampling={"prompt_logprobs": 1, "skip_reading_prefix_cache": True},
        )
        report = engine.step()["next"][KEY]
        assert (pulled(engine), report["pulled_tokens"], report["reason"]) == (0, 0, "unsplittable")

    def test_an_engine_that_is_not_bidirectional_does_not_wait_for_ever(self, scheduling: Any) -> None:
        handle, engine = held(scheduling, ids(40)), scheduling.prefill(bidirectional=False)
        engine.add("next", [*ids(40), *[TOKEN] * 5], pull(handle))
        assert engine.step()["next"][KEY]["reason"] == "one-way"

    def test_layers_with_a_window_pull_all_or_nothing(self, scheduling: Any) -> None:
        decode, engine = scheduling.decode(window=32), scheduling.prefill(window=32)
        decode.add("turn", ids(100), keep(), answer=5)
        handle = decode.run("turn")
        whole = [*ids(100), *[TOKEN] * 4, 1, 2]
        for name, prompt, verified in (("whole", whole, 104), ("edited", [*whole[:90], 1, *whole[91:]], 0)):
            engine.add(name, prompt, pull(handle))
            engine.step()
            assert (pulled(engine, name) > 0) == (verified > 0)
            assert engine.meta.reqs_to_recv[name].remote.num_tokens == verified


class TestTrouble:
    def test_a_broken_pull_is_computed_and_does_not_wait_for_a_second_one(self, scheduling: Any) -> None:
        handle, engine = held(scheduling, ids(40)), scheduling.prefill()
        engine.add("next", [*ids(40), *[TOKEN] * 5], pull(handle))
        engine.step()
        engine.step(failed=["next"])
        report = engine.run("next", most=5)[KEY]
        assert (report["verified_tokens"], report["pulled_tokens"], report["reason"]) == (44, 0, "transfer-failed")

    def test_a_full_engine_pulls_once_there_is_room(self, scheduling: Any) -> None:
        handle, engine = held(scheduling, ids(100)), scheduling.prefill(blocks=LONGEST + 1)
        engine.add("big", ids(200), None, answer=3)
        engine.step()
        engine.add("next", [*ids(100), *[TOKEN] * 5], pull(handle))
        engine.step()
        assert pulled(engine) == -1
        engine.run("big")
        engine.step()
        assert pulled(engine) == 7
        engine.step(received=["next"])
        assert engine.run("next")[KEY]["pulled_tokens"] == 104

    def test_a_preempted_request_does_not_pull_again(self, scheduling: Any) -> None:
        handle, engine = held(scheduling, ids(64)), scheduling.prefill(blocks=LONGEST + 1)
        engine.add("other", ids(150, seed=1), None, answer=100)
        engine.step()
        engine.add("next", [*ids(64), *[TOKEN] * 5], pull(handle), answer=60)
        engine.step()
        assert pulled(engine) == 5
        request = engine.scheduler.requests["next"]
        engine.step(received=["next"])
        while not request.num_preemptions:
            engine.step()
        report = engine.run("next", most=300)[KEY]
        assert report["pulled_tokens"] == 68

    def test_a_request_that_is_aborted_while_it_pulls_leaves_nothing(self, scheduling: Any) -> None:
        handle, engine = held(scheduling, ids(40)), scheduling.prefill()
        engine.add("next", [*ids(40), *[TOKEN] * 5], pull(handle))
        engine.step()
        engine.abort("next")
        engine.step(failed=["next"])
        assert engine.free == 60
        assert engine.idle

    def test_nothing_is_remembered_of_requests_that_have_ended(self, scheduling: Any) -> None:
        handle, engine = held(scheduling, ids(40)), scheduling.prefill()
        ours = engine.scheduler.connector.connector_scheduler
        before = {k: len(v) for k, v in vars(ours).items() if hasattr(v, "__len__") and not isinstance(v, str)}
        for i in range(20):
            params = [pull(handle), {**COLD, KEY: {}}, keep(0), keep(), {**FROM_PREFILL, **keep()}][i % 5]
            engine.add(f"r{i}", [*ids(40), *[TOKEN] * 5], params)
            engine.step()
            engine.step(received=[f"r{i}"] if i % 5 == 0 else [], failed=[])
            engine.step(sent=[f"r{i}"] if i % 5 not in (2,) else [])
        engine.step()
        after = {k: len(v) for k, v in vars(ours).items() if hasattr(v, "__len__") and not isinstance(v, str)}
        assert after == before
        assert engine.free == 60
