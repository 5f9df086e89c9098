"""Kept turns that the router gives up, in vLLM's real scheduler; the worker's part is played by the tests."""

import pickle
from typing import Any

import pytest

from kvflow.connector.wire import KEY
from tests.connector.turns import COLD, DIRECT, FROM_PREFILL, LONGEST, TOKEN, ids, keep, pulled

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def giving_up(*names: object, retain_s: float = 0, **more: Any) -> dict[str, Any]:
    return {**DIRECT, KEY: {"retain_s": retain_s, "max_pinned_share": 1.0, "release": list(names)}, **more}


def kept(engine: Any, *names: str, tokens: int = 40) -> None:
    for i, name in enumerate(names):
        engine.add(name, ids(tokens, seed=i), keep())
        assert engine.run(name)[KEY]["retained"]
    engine.step()


def turn(engine: Any, name: str, prompt: list[int], params: dict[str, Any]) -> list[int]:
    """The blocks that are kept at its end."""
    engine.add(name, prompt, params)
    blocks: list[int] = engine.run(name)["remote_block_ids"][0]
    return blocks


def not_coming(engine: Any, name: str, params: dict[str, Any]) -> None:
    """What vLLM makes of a request that its API server refused, and of one posted to the release route."""
    engine.add(name, [0], params, abort_immediately=True)
    engine.abort(name)


def state(engine: Any) -> dict[str, int]:
    ours = engine.scheduler.connector.connector_scheduler
    return {k: len(v) for k, v in vars(ours).items() if hasattr(v, "__len__") and not isinstance(v, str)}


class TestReleasing:
    def test_what_a_decode_leg_lists_is_free_at_once(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        kept(engine, "a", "b", "c")
        assert engine.free == 60 - 9
        engine.add("next", ids(20), giving_up("a", "c"))
        assert engine.free == 60 - 3
        report = engine.run("next")[KEY]
        assert report["blocks"]["pinned"] == 3

    def test_the_worker_is_told_once_and_its_answer_changes_nothing(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        kept(engine, "a", "b")
        engine.add("next", ids(20), giving_up("a"), answer=9)
        engine.step()
        assert pickle.loads(pickle.dumps(engine.meta)).released == {"a"}  # the way to a worker process
        engine.step(sent=["a"])
        assert engine.meta.released == set()
        assert engine.free == 60 - 3 - 2
        engine.run("next")
        engine.step(sent=["b"])
        assert engine.free == 60

    def test_a_request_runs_on_what_it_gives_up_itself(self, scheduling: Any) -> None:
        engine = scheduling.decode(blocks=LONGEST + 10)
        kept(engine, "a", "b", "c")
        engine.add("busy", ids(200), None, answer=50)
        engine.step()
        assert engine.free < 9
        engine.add("next", ids(140), giving_up("a", "b", "c"))
        assert "next" in engine.step()

    def test_what_is_unknown_over_or_listed_twice_is_passed_over(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        kept(engine, "a", "b", "running")
        engine.step(sent=["b"])
        engine.add("running2", ids(20), keep(), answer=50)
        engine.step()
        for i in range(2):
            engine.add(f"next{i}", ids(20), giving_up("a", "a", "b", "stranger", "running2", f"next{i}"))
            engine.run(f"next{i}")
            assert engine.free == 60 - 3 - 2
        engine.step(sent=["a"])
        assert engine.run("running2")[KEY]["retained"]

    def test_a_pull_that_ended_in_the_same_step_is_no_trouble(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        kept(engine, "a")
        engine.add("next", ids(20), giving_up("a"), answer=3)
        engine.step(sent=["a"])  # the worker's report crossed the release
        assert engine.free == 60 - 2
        engine.run("next")
        assert engine.free == 60

    def test_a_turn_may_be_released_before_the_worker_knows_its_deadline(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        engine.add("a", ids(40), keep())
        engine.run("a")
        engine.add("next", ids(20), giving_up("a"))
        engine.step()
        assert set(engine.meta.reqs_to_send) == {"a"}
        assert engine.meta.released == {"a"}
        engine.step(sent=["a"])
        assert engine.free == 60

    @pytest.mark.parametrize("release", ["a", [1], {"a": 1}, [None], 7])
    def test_a_list_that_makes_no_sense_releases_nothing(self, scheduling: Any, release: object) -> None:
        engine = scheduling.decode()
        kept(engine, "a")
        engine.add("next", ids(20), {**DIRECT, KEY: {"release": release, "retain_s": 60, "max_pinned_share": 1.0}})
        assert engine.run("next")[KEY]["refused"] == "policy"
        assert engine.free == 60 - 3

    def test_neither_a_prefill_leg_nor_a_prefill_nodes_lease_is_touched(self, scheduling: Any) -> None:
        engine = scheduling.prefill()
        engine.add("leg", ids(40), {**COLD, KEY: {}})
        engine.run("leg")
        engine.add("other", ids(20), giving_up("leg"))
        engine.run("other")
        assert engine.free == 60 - 3
        decode = scheduling.decode()
        kept(decode, "a")
        decode.add("prefill", ids(20), {**COLD, KEY: {"release": ["a"]}})
        decode.run("prefill")
        decode.step(sent=["prefill"])
        assert decode.free == 60 - 3

    def test_shared_blocks_stay_until_their_last_turn_goes(self, scheduling: Any) -> None:
        engine = scheduling.decode(caching=True)
        for i in range(2):
            engine.add(f"turn{i}", [*ids(64), *ids(20, seed=i)], keep())
            engine.run(f"turn{i}")
        not_coming(engine, "x", giving_up("turn0"))
        assert engine.free == 60 - 6
        not_coming(engine, "y", giving_up("turn1"))
        assert engine.free == 60


class TestAbandoning:
    """A turn whose end the router has not seen, by the name that the router gave it."""

    def named(self, engine: Any, request: str, name: str, answer: int = 1) -> None:
        params = keep()
        params[KEY]["turn"] = name
        engine.add(request, ids(40), params, answer=answer)

    def test_what_was_kept_of_it_is_released(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        for i in range(2):
            self.named(engine, f"r{i}", f"turn{i}")
            engine.run(f"r{i}")
        for _ in range(2):
            not_coming(engine, "x", {KEY: {"abandon": ["turn0", "stranger"]}})
            assert engine.free == 60 - 3
            engine.step()
        engine.step(sent=["r0"])
        assert engine.free == 60 - 3

    def test_what_is_not_kept_yet_will_not_be(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        self.named(engine, "r", "turn", answer=5)
        engine.step()
        not_coming(engine, "x", {KEY: {"abandon": ["turn"]}})
        assert engine.run("r")[KEY]["refused"] == "policy"
        assert engine.free == 60

    @pytest.mark.parametrize("order", [{"abandon": "turn"}, {"abandon": [1]}, {"abandon": ["turn"], "release": 5}])
    def test_a_list_that_makes_no_sense_abandons_nothing(self, scheduling: Any, order: dict[str, Any]) -> None:
        engine = scheduling.decode()
        self.named(engine, "r", "turn")
        engine.run("r")
        not_coming(engine, "x", {KEY: order})
        assert engine.free == 60 - 3

    def test_turns_without_a_name_are_none_of_it(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        not_coming(engine, "x", {KEY: {"abandon": [""]}})
        kept(engine, "a")
        assert engine.free == 60 - 3


class TestDirect:
    """A turn without a prefill leg, which gives up what its own conversation has pinned."""

    def test_it_continues_in_the_blocks_of_its_history(self, scheduling: Any) -> None:
        engine = scheduling.decode(caching=True)
        first = turn(engine, "first", ids(100), keep())
        again = turn(engine, "next", [*ids(100), TOKEN, *ids(20, seed=9)], giving_up("first", retain_s=60))
        assert again[:6] == first[:6]
        assert engine.free == 60 - 8

    def test_in_a_full_pool_the_history_is_the_last_to_be_overwritten(self, scheduling: Any) -> None:
        engine = scheduling.decode(caching=True, blocks=LONGEST + 8)
        first = turn(engine, "first", ids(100), keep())
        engine.add("busy", ids(230, seed=5), None, answer=20)
        engine.step()
        assert engine.free < 8
        again = turn(engine, "next", [*ids(100), TOKEN, *ids(10, seed=9)], giving_up("first", retain_s=60))
        assert again[:6] == first[:6]


class TestNotComing:
    """`POST /kvflow/release`, and requests that vLLM's API server refuses."""

    @pytest.mark.parametrize("idle", [True, False])
    def test_a_list_alone_releases_and_leaves_nothing_behind(self, scheduling: Any, idle: bool) -> None:
        engine = scheduling.decode()
        if not idle:
            engine.add("busy", ids(20), None, answer=100)
        before = state(engine)
        kept(engine, "a", "b")
        not_coming(engine, "x", {KEY: {"release": ["a", "b", "stranger"]}})
        assert engine.free == 60 - (0 if idle else 2)
        assert not engine.idle  # a step follows, which tells the worker
        engine.step()
        assert engine.meta.released == {"a", "b"}
        engine.step(sent=["a", "b"])
        assert state(engine) == before
        assert engine.idle == idle
        assert pulled(engine, "x") == -1

    def test_with_a_prefill_nodes_handle_both_are_let_go(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        before = state(engine)
        kept(engine, "a")
        not_coming(engine, "x", {**FROM_PREFILL, KEY: {"release": ["a"], "prompt_digest": "00", "retain_s": 60}})
        assert engine.free == 60
        engine.step(sent=["a"])
        assert pulled(engine, "x") == 0
        assert engine.meta.reqs_to_recv["x"].remote.request_id == "there"
        assert state(engine) == before

    @pytest.mark.parametrize("params", [{}, {KEY: {}}, {KEY: 7}, {KEY: {"release": 5}}, {KEY: {"release": []}}])
    def test_nothing_to_release_is_no_trouble(self, scheduling: Any, params: dict[str, Any]) -> None:
        engine = scheduling.decode()
        before = state(engine)
        not_coming(engine, "x", params)
        engine.step()
        assert (state(engine), engine.idle, engine.free) == (before, True, 60)

    def test_an_engine_that_keeps_nothing_releases_nothing(self, scheduling: Any) -> None:
        engine = scheduling.decode(bidirectional=False)
        not_coming(engine, "x", {KEY: {"release": ["a"]}})
        engine.step()
        assert (engine.idle, engine.free) == (True, 60)
