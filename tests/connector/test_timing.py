"""Where a leg's time went: the arithmetic alone, and as vLLM's own scheduler drives it."""

from typing import Any

import pytest

from kvflow.connector.timing import Spent, Timing, Timings
from kvflow.connector.wire import KEY, DecodeReport, PrefillReport
from tests.connector.turns import COLD, FROM_PREFILL, ids, keep, pull

ON_VLLM = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Watch:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TestOneRequest:
    def test_what_pulls_nothing_queues_and_computes(self) -> None:
        timing = Timing(10)
        timing.started(12, 0)
        timing.answered(15)
        assert timing.spent() == Spent(queue_s=2, load_s=0, compute_s=3)

    def test_a_transfer_is_told_from_the_wait_after_it(self) -> None:
        timing = Timing(10)
        timing.found(16)
        timing.started(11, 32)
        timing.loaded(15)
        timing.found(48)  # vLLM counts what was loaded as found
        timing.started(15.5, 0)
        timing.answered(18)
        assert timing.spent() == Spent(queue_s=1.5, load_s=4, compute_s=2.5)
        assert (timing.local_tokens, timing.pulled_tokens) == (16, 32)

    def test_a_transfer_that_broke_took_its_time_and_moved_nothing(self) -> None:
        timing = Timing(10)
        timing.started(11, 32)
        timing.loaded(13, failed=True)
        timing.started(13, 0)
        timing.answered(14)
        assert timing.spent() == Spent(queue_s=1, load_s=2, compute_s=1)
        assert timing.pulled_tokens == 0

    def test_of_a_preempted_prompt_nobody_knows_what_the_computing_took(self) -> None:
        timing = Timing(10)
        timing.started(11, 0)
        timing.started(20, 0)
        timing.answered(30)
        assert timing.spent() == Spent(queue_s=1, load_s=0, compute_s=None)

    def test_what_happens_after_the_first_token_changes_nothing(self) -> None:
        timing = Timing(10)
        timing.started(11, 0)
        timing.answered(12)
        timing.started(20, 5)
        timing.loaded(21)
        timing.answered(22)
        assert timing.spent() == Spent(queue_s=1, load_s=0, compute_s=1)

    def test_before_the_first_token_there_is_nothing_to_say(self) -> None:
        timing = Timing(10)
        timing.started(11, 0)
        assert timing.spent() == Spent()


class TestManyRequests:
    def test_each_has_its_own_time_and_is_forgotten_at_its_end(self) -> None:
        watch = Watch()
        timings = Timings(watch)
        timings.arrived("a")
        watch.now += 1
        timings.arrived("b")
        timings.started("a", 0)
        watch.now += 1
        timings.started("b", 0)
        timings.answered("a")
        watch.now += 5
        first, second = timings.ended("a"), timings.ended("b")
        assert first is not None
        assert second is not None
        assert first.spent() == Spent(queue_s=1, load_s=0, compute_s=1)
        assert second.spent() == Spent(queue_s=1, load_s=0, compute_s=5)
        assert len(timings) == 0

    def test_requests_that_are_none_of_ours_are_passed_over(self) -> None:
        timings = Timings(Watch())
        timings.found("x", 1)
        timings.started("x", 1)
        timings.loaded("x", failed=True)
        timings.answered("x")
        assert timings.ended("x") is None


class TestOnTheWire:
    def test_an_engine_that_does_not_measure_says_nothing(self) -> None:
        assert not {"queue_s", "load_s", "compute_s"} & PrefillReport(prompt_tokens=3).to_wire().keys()
        assert PrefillReport.from_wire({"prompt_tokens": 3}).compute_s is None

    @pytest.mark.parametrize("report", [PrefillReport(prompt_tokens=3, load_s=0.5), DecodeReport(compute_s=1.5)])
    def test_what_is_measured_comes_back(self, report: PrefillReport | DecodeReport) -> None:
        assert type(report).from_wire(report.to_wire()) == report


@ON_VLLM
class TestInsideVllm:
    def test_a_prefill_leg_says_where_its_time_went(self, scheduling: Any) -> None:
        engine = scheduling.prefill()
        engine.add("leg", ids(40), dict(COLD))
        report = PrefillReport.from_wire(engine.run("leg")[KEY])
        assert report.load_s == 0
        assert report.queue_s is not None
        assert report.compute_s is not None
        assert report.compute_s > 0

    def test_a_pull_is_time_spent_loading(self, scheduling: Any) -> None:
        source, engine = scheduling.decode(), scheduling.prefill()
        source.add("turn", ids(40), keep(), answer=5)
        engine.add("next", [*ids(40), *[7] * 4, *ids(9, seed=1)], pull(source.run("turn")))
        engine.step()
        engine.step()
        engine.step(received=["next"])
        report = PrefillReport.from_wire(engine.run("next")[KEY])
        assert report.pulled_tokens == 44
        assert report.load_s is not None
        assert report.load_s > 0
        assert report.compute_s is not None

    def test_a_decode_leg_says_what_it_moved_and_what_it_had(self, scheduling: Any) -> None:
        engine = scheduling.decode(caching=True)
        for name in ("first", "second"):
            engine.add(name, ids(40), {**keep(0), **FROM_PREFILL, "remote_request_id": name}, answer=3)
            engine.step()
            engine.step(received=[name])
            report = DecodeReport.from_wire(engine.run(name)[KEY])
            had = 0 if name == "first" else 32
            assert (report.prompt_tokens, report.local_tokens, report.pulled_tokens) == (40, had, 40 - had)
            assert report.load_s is not None
            assert report.load_s > 0

    def test_a_direct_leg_computes_what_its_cache_does_not_have(self, scheduling: Any) -> None:
        engine = scheduling.decode(caching=True)
        engine.add("first", ids(40), keep(), answer=3)
        kept = DecodeReport.from_wire(engine.run("first")[KEY])
        engine.add("next", ids(60), keep(), answer=3)
        report = DecodeReport.from_wire(engine.run("next")[KEY])
        assert (kept.retained, kept.local_tokens, kept.pulled_tokens, kept.load_s) == (True, 0, 0, 0)
        assert (report.prompt_tokens, report.local_tokens) == (60, 32)

    @pytest.mark.parametrize("overlapping", [False, True])
    def test_the_time_to_the_first_token_does_not_grow_with_the_answer(
        self, scheduling: Any, monkeypatch: pytest.MonkeyPatch, overlapping: bool
    ) -> None:
        watch = Watch()
        monkeypatch.setattr("time.perf_counter", watch)
        engine = scheduling.decode(overlapping=overlapping)
        engine.add("turn", ids(40), keep(0), answer=30)
        for _ in range(100):
            watch.now += 1
            if "turn" in (ended := engine.step()):
                break
        report = DecodeReport.from_wire((ended["turn"] or {})[KEY])
        assert (report.queue_s, report.compute_s) == (1, 1)

    def test_preemption_before_the_first_token_leaves_the_computing_unknown(self, scheduling: Any) -> None:
        engine = scheduling.prefill(batch=16)
        request = engine.add("leg", ids(40), dict(COLD))
        engine.step()
        engine.scheduler.running.remove(request)
        engine.scheduler._preempt_request(request, 0.0)
        report = PrefillReport.from_wire(engine.run("leg")[KEY])
        assert report.queue_s is not None
        assert report.compute_s is None

    def test_what_was_aborted_is_followed_by_legs_that_are_timed(self, scheduling: Any) -> None:
        engine = scheduling.decode()
        engine.add("gone", ids(40), {**keep(), **FROM_PREFILL})
        engine.abort("gone")
        engine.add("left", ids(40), keep(), answer=9)
        engine.step()
        engine.abort("left")
        engine.add("gone", ids(40), keep(), answer=3)  # the name of one that is forgotten
        report = DecodeReport.from_wire(engine.run("gone")[KEY])
        assert report.compute_s is not None
