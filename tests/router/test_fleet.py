"""What the router knows of its nodes between probes: their queues, their failures, and what legs teach. No network."""

from typing import Any

import pytest

from kvflow.connector.wire import DecodeReport, PrefillReport
from kvflow.nodes.base import NodeSpec
from kvflow.nodes.simulated import ManualClock
from kvflow.router.fleet import Fleet
from kvflow.router.upstream import Upstream
from kvflow.types import COMPUTE_GUESS, OVERHEAD_GUESS, Role

P, D = "prefill-0", "decode-0"
WHOLE: dict[str, Any] = {"queue_s": 0.5, "load_s": 0.25, "compute_s": 2.0}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def fleet(clock: ManualClock) -> Fleet:
    specs = [NodeSpec(name=P, role=Role.PREFILL, url="http://p"), NodeSpec(name=D, role=Role.DECODE, url="http://d")]
    return Fleet(specs, Upstream(connect_timeout_s=1, silence_timeout_s=1), lambda _: None, clock=clock.now)


def wait(fleet: Fleet, name: str = P) -> float:
    view = fleet.view()
    node = view.node(name)
    assert node is not None
    return view.wait_s(node)


class TestQueue:
    def test_legs_stand_behind_each_other(self, fleet: Fleet) -> None:
        with fleet.leg(P, 100, 2.0), fleet.leg(P, 50, 3.0):
            assert wait(fleet) == 5
            state = fleet.state(P)
            assert (state.in_flight, state.queued_tokens) == (2, 150)
        assert wait(fleet) == 0
        assert (fleet.state(P).in_flight, fleet.state(P).queued_tokens) == (0, 0)

    def test_time_passes_while_they_are_computed(self, fleet: Fleet, clock: ManualClock) -> None:
        with fleet.leg(P, 100, 2.0):
            clock.advance(1.5)
            assert wait(fleet) == 0.5
            clock.advance(10)
            assert wait(fleet) == 0  # late, and nobody knows by how much
            with fleet.leg(P, 100, 1.0):
                assert wait(fleet) == 1

    def test_one_that_ends_early_frees_the_node_for_the_next(self, fleet: Fleet) -> None:
        with fleet.leg(P, 100, 60.0) as first, fleet.leg(P, 100, 3.0):
            first.answered()
            assert wait(fleet) == 3
            first.answered()
            assert wait(fleet) == 3
            assert fleet.state(P).in_flight == 2

    def test_one_that_breaks_leaves_the_queue(self, fleet: Fleet) -> None:
        with pytest.raises(ValueError, match="broke"), fleet.leg(P, 100, 60.0):
            raise ValueError("broke")
        assert wait(fleet) == 0

    def test_a_leg_knows_how_long_it_was_to_wait(self, fleet: Fleet, clock: ManualClock) -> None:
        with fleet.leg(P, 100, 2.0):
            clock.advance(0.5)
            with fleet.leg(P, 100, 1.0) as second:
                assert second.wait_s == 1.5

    def test_an_answer_that_comes_as_a_whole_stands_in_it_no_longer_than_expected(
        self, fleet: Fleet, clock: ManualClock
    ) -> None:
        with fleet.leg(D, 100, 2.0, tells=False), fleet.leg(D, 100, 2.0, tells=False):
            with fleet.leg(D, 100, 0.0):
                pass
            assert wait(fleet, D) == 4.0
            clock.advance(10)
            with fleet.leg(D, 100, 0.0):
                pass
            assert wait(fleet, D) == 0
        assert wait(fleet, D) == 0

    def test_nodes_do_not_wait_for_each_other(self, fleet: Fleet) -> None:
        with fleet.leg(P, 100, 2.0):
            assert wait(fleet, D) == 0


class TestFailures:
    def test_a_failure_counts_half_after_a_minute(self, fleet: Fleet, clock: ManualClock) -> None:
        fleet.failed(P, reached=True)
        assert fleet.state(P).recent_failures == 1
        clock.advance(60)
        assert fleet.state(P).recent_failures == pytest.approx(0.5)
        fleet.failed(P, reached=True)
        assert fleet.view().prefill[0].recent_failures == pytest.approx(1.5)

    def test_success_does_not_make_it_forgotten_at_once(self, fleet: Fleet, clock: ManualClock) -> None:
        fleet.failed(P, reached=True)
        fleet.succeeded(P)
        assert (fleet.state(P).failures, fleet.state(P).recent_failures) == (0, 1)
        clock.advance(3600)
        assert fleet.state(P).recent_failures == 0

    def test_the_others_have_none(self, fleet: Fleet) -> None:
        fleet.failed(P, reached=True)
        assert fleet.state(D).recent_failures == 0


class TestLearning:
    """Ten legs of one kind, after which the costs are those of that kind."""

    def prefill(self, fleet: Fleet, clock: ManualClock, seconds: float, report: PrefillReport | None) -> None:
        for _ in range(10):
            with fleet.leg(P, 100, 0.0) as leg:
                clock.advance(seconds)
                leg.answered()
            fleet.prefilled(leg, D, 1000, report)

    def decode(self, fleet: Fleet, clock: ManualClock, prefill: str | None, report: DecodeReport) -> None:
        for _ in range(10):
            with fleet.leg(D, 100, 0.0) as leg:
                clock.advance(3.0)
                leg.answered()
                clock.advance(30.0)
            fleet.decoded(leg, prefill, report)

    def test_a_prefill_leg(self, fleet: Fleet, clock: ManualClock) -> None:
        report = PrefillReport(prompt_tokens=1000, local_tokens=100, pulled_tokens=500, **WHOLE)
        self.prefill(fleet, clock, 3.0, report)
        view = fleet.view()
        node = view.prefill[0]
        assert node.compute.seconds(400, 600) == pytest.approx(2.0, rel=0.1)
        assert node.overhead.seconds(1000) == pytest.approx(0.25, rel=0.1)
        assert view.transfer(D, P).seconds(500) == pytest.approx(0.25, rel=0.1)
        assert view.transfer(P, D).samples == 0

    def test_a_decode_leg_after_one(self, fleet: Fleet, clock: ManualClock) -> None:
        report = DecodeReport(prompt_tokens=1000, local_tokens=200, pulled_tokens=800, **WHOLE)
        self.decode(fleet, clock, P, report)
        view = fleet.view()
        assert view.transfer(P, D).seconds(800) == pytest.approx(0.25, rel=0.1)
        assert view.decode[0].overhead.seconds(1000) == pytest.approx(0.25, rel=0.1)
        assert view.decode[0].compute.seconds(1, 999) == pytest.approx(2.0, rel=0.1)
        assert view.prefill[0].compute == COMPUTE_GUESS

    def test_a_direct_leg(self, fleet: Fleet, clock: ManualClock) -> None:
        report = DecodeReport(prompt_tokens=1000, local_tokens=200, pulled_tokens=0, **WHOLE)
        self.decode(fleet, clock, None, report)
        view = fleet.view()
        assert view.decode[0].compute.seconds(800, 200) == pytest.approx(2.0, rel=0.1)
        assert view.prefill[0].compute == COMPUTE_GUESS
        assert not view.transfers

    def test_a_stock_prefill_node_is_timed_from_outside(self, fleet: Fleet, clock: ManualClock) -> None:
        self.prefill(fleet, clock, 3.0, None)
        assert fleet.state(P).compute.seconds(1000) == pytest.approx(3.0, rel=0.1)
        assert fleet.state(P).overhead == OVERHEAD_GUESS

    def test_an_engine_that_does_not_measure(self, fleet: Fleet, clock: ManualClock) -> None:
        before = fleet.state(P)
        self.prefill(fleet, clock, 3.0, PrefillReport(prompt_tokens=1000))
        self.decode(fleet, clock, P, DecodeReport(load_s=1.0))
        after = fleet.state(P)
        assert (after.compute, after.overhead) == (before.compute, before.overhead)
        assert not fleet.view().transfers

    def test_an_answer_that_comes_as_a_whole_says_nothing_of_the_overhead(self, fleet: Fleet) -> None:
        with fleet.leg(D, 100, 0.0) as leg:
            pass
        report = DecodeReport(prompt_tokens=1000, local_tokens=200, pulled_tokens=800, **WHOLE)
        fleet.decoded(leg, P, report)
        assert fleet.state(D).overhead == OVERHEAD_GUESS

    def test_an_answer_that_begins_before_its_first_token_neither(self, fleet: Fleet, clock: ManualClock) -> None:
        report = DecodeReport(prompt_tokens=1000, local_tokens=0, pulled_tokens=1000, queue_s=9, load_s=9, compute_s=9)
        self.decode(fleet, clock, P, report)
        assert fleet.state(D).overhead == OVERHEAD_GUESS

    @pytest.mark.parametrize("huge", [10**400, 1e300])
    def test_an_engine_that_talks_nonsense(self, fleet: Fleet, clock: ManualClock, huge: float) -> None:
        report = PrefillReport(prompt_tokens=10**400, pulled_tokens=5, queue_s=huge, load_s=huge, compute_s=huge)
        self.prefill(fleet, clock, 3.0, report)
        local = DecodeReport(prompt_tokens=3, local_tokens=10**400, pulled_tokens=0, queue_s=huge, compute_s=huge)
        self.decode(fleet, clock, None, local)
        assert fleet.state(P).compute == COMPUTE_GUESS
        assert not fleet.view().transfers

    def test_a_node_that_starts_again_is_known_by_its_past(self, fleet: Fleet, clock: ManualClock) -> None:
        report = PrefillReport(prompt_tokens=1000, local_tokens=100, pulled_tokens=500, **WHOLE)
        self.prefill(fleet, clock, 3.0, report)
        before = fleet.state(P).compute
        fleet.gone(P)
        assert fleet.state(P).compute == before
