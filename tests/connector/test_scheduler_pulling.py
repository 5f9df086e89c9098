"""Prefill legs.

vLLM's scheduler is the real one; the worker's part, and NIXL's, is played by the tests.
"""

from typing import Any

import pytest

from kvflow.connector.wire import KEY
from tests.connector.turns import BLOCK, COLD, FROM_PREFILL, LONGEST, TOKEN, held, ids, keep, pull, pulled

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


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

    def test_a_request_that_is_aborted_before_it_ran_ends_the_pin(self, scheduling: Any) -> None:
        handle, engine = held(scheduling, ids(40)), scheduling.prefill()
        for name, params in (("kept", pull(handle)), ("cold", {**COLD, KEY: {}})):
            engine.add(name, [*ids(40), *[TOKEN] * 5], params)
            engine.abort(name)
        engine.step()
        assert (pulled(engine, "kept"), pulled(engine, "cold")) == (0, -1)
        assert engine.meta.reqs_to_recv["kept"].remote.request_id == handle["remote_request_id"]

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
