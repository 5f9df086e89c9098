"""Clients that leave, in vLLM's real scheduler: what becomes of pins, leases, blocks and the prefix cache.

The worker's part, and NIXL's, is played by the tests: a transfer that ends has notified the engine that it read from.
"""

from typing import Any

import pytest

from kvflow.connector.wire import KEY
from tests.connector.turns import COLD, DIRECT, FROM_PREFILL, TOKEN, held, ids, keep, pull, pulled

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NEXT = [*ids(40), *[TOKEN] * 4, *ids(9, seed=1)]


def for_decode() -> dict[str, Any]:
    return {**FROM_PREFILL, **keep(do_remote_prefill=True)}


def leg(engine: Any, scheduling: Any, role: str) -> None:
    """A request that has KV to pull: from the decode node of the last turn, or from the prefill node of this one."""
    engine.add("next", NEXT, pull(held(scheduling, ids(40))) if role == "prefill" else for_decode(), answer=5)


@pytest.mark.parametrize("role", ["prefill", "decode"])
class TestWhilePulling:
    def test_before_anything_was_scheduled_the_source_is_told(self, scheduling: Any, role: str) -> None:
        engine = getattr(scheduling, role)()
        leg(engine, scheduling, role)
        engine.abort("next")
        engine.step()
        assert pulled(engine) == 0  # nothing is read, but the source is named
        assert engine.meta.reqs_to_recv["next"].remote.request_id
        assert (engine.free, engine.idle) == (60, True)

    def test_a_transfer_goes_on_to_its_end_and_its_blocks_are_nobody_elses_until_then(
        self, scheduling: Any, role: str
    ) -> None:
        engine = getattr(scheduling, role)(caching=True)
        leg(engine, scheduling, role)
        engine.step()
        taken = 60 - engine.free
        assert pulled(engine) >= 3
        engine.abort("next")
        for _ in range(3):
            engine.step()
            assert (60 - engine.free, engine.idle) == (taken, False)  # vLLM goes on asking the worker
        engine.step(received=["next"])
        assert (engine.free, engine.idle) == (60, True)

    @pytest.mark.parametrize("end", ["received", "failed"])
    def test_what_it_read_is_not_in_the_prefix_cache(self, scheduling: Any, role: str, end: str) -> None:
        engine = getattr(scheduling, role)(caching=True)
        leg(engine, scheduling, role)
        engine.step()
        engine.abort("next")
        engine.step(**{end: ["next"]})
        assert engine.cached == 0

    def test_leaving_when_all_was_read_but_nothing_computed(self, scheduling: Any, role: str) -> None:
        engine = getattr(scheduling, role)(caching=True)
        leg(engine, scheduling, role)
        engine.step()
        engine.step(received=["next"])
        engine.abort("next")
        engine.step()
        assert (engine.free, engine.idle) == (60, True)

    def test_leaving_in_the_middle_of_the_answer(self, scheduling: Any, role: str) -> None:
        engine = getattr(scheduling, role)()
        leg(engine, scheduling, role)
        engine.step()
        engine.step(received=["next"])
        engine.step()
        engine.abort("next")
        engine.step()
        assert "next" in engine.meta.reqs_not_processed
        assert (engine.free, engine.idle, engine.meta.reqs_to_send) == (60, True, {})


class TestSteps:
    """With asynchronous scheduling, as on GPUs, a step may still write the blocks of a request that has left."""

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_blocks_that_a_step_still_writes_are_not_given_to_a_transfer(self, scheduling: Any, role: str) -> None:
        engine = getattr(scheduling, role)(overlapping=True, batch=32)
        engine.add("leg", ids(100), {**COLD, KEY: {}} if role == "prefill" else keep())
        first, second = engine.begin(), engine.begin()
        engine.abort("leg")
        assert engine.free < 60
        engine.end(first)
        assert engine.free < 60
        engine.end(second)
        assert engine.free == 60

    def test_nor_are_those_of_a_turn_that_is_released_as_soon_as_it_has_ended(self, scheduling: Any) -> None:
        engine = scheduling.decode(overlapping=True)
        engine.add("turn", ids(40), keep(), answer=5, sampling={"ignore_eos": False, "stop_token_ids": [TOKEN]})
        first, second = engine.begin(), engine.begin()
        assert engine.end(first)["turn"][KEY]["retained"]
        engine.add("next", ids(10), {**DIRECT, KEY: {"release": ["turn"]}})
        assert engine.free == 60 - 3
        engine.end(second)
        assert engine.free == 60


class TestWhoeverComesFirst:
    """A router whose client has left says that a leg will not come, and cannot know whether it has arrived."""

    def told(self, engine: Any) -> None:
        engine.add("word", [0], for_decode(), abort_immediately=True)
        engine.abort("word")

    def test_what_a_leg_is_reading_is_not_let_go(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        engine.add("leg", NEXT, for_decode(), answer=5)
        engine.step()
        assert pulled(engine, "leg") >= 3
        self.told(engine)
        engine.step()
        assert pulled(engine, "word") == -1
        engine.step(received=["leg"])
        assert engine.run("leg")[KEY]["retained"]

    def test_what_was_let_go_is_not_read(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        self.told(engine)
        engine.step()
        assert pulled(engine, "word") == 0
        engine.add("leg", NEXT, for_decode(), answer=5)
        engine.step()
        assert pulled(engine, "leg") == 0
        report = engine.run("leg")[KEY]
        assert (report["retained"], report["load_failed"]) == (True, True)

    def test_two_legs_do_not_read_the_same(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        engine.add("leg", NEXT, for_decode(), answer=5)
        engine.add("again", NEXT, for_decode(), answer=5)
        engine.step()
        assert (pulled(engine, "leg"), pulled(engine, "again")) == (4, 0)
