import pytest

from kvflow.connector.pull import Pull, cut, decode_order, has_handle, prefill_order
from kvflow.connector.wire import KEY, DecodeOrder, PrefillOrder, PrefillReport
from kvflow.errors import WireError
from kvflow.types import Reason

HANDLE = {
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
}


def offer(verified: int = 800, minimum: int = 0, prompt: int = 1000, offered: int = 800) -> Pull:
    return Pull(prompt=prompt, offered=offered, verified=verified, minimum=minimum)


def settled(pull: Pull, local: int) -> PrefillReport:
    pull.settle(pull.wanted(local))
    return pull.report(None)


def test_what_is_verified_and_not_local_is_pulled() -> None:
    report = settled(offer(), local=128)
    assert (report.verified_tokens, report.local_tokens, report.pulled_tokens, report.reason) == (800, 128, 672, None)


@pytest.mark.parametrize(("minimum", "pulled"), [(0, 100), (100, 100), (101, 0)])
def test_the_threshold_applies_to_what_is_left(minimum: int, pulled: int) -> None:
    report = settled(offer(minimum=minimum), local=700)
    assert (report.pulled_tokens, report.reason) == (pulled, None if pulled else Reason.BELOW_THRESHOLD)


@pytest.mark.parametrize("local", [800, 896])
def test_a_local_cache_that_has_it_all_is_the_reason(local: int) -> None:
    report = settled(offer(), local=local)
    assert (report.pulled_tokens, report.reason) == (0, Reason.LOCAL_CACHE)


def test_a_changed_prompt_is_the_reason_whether_or_not_something_was_pulled() -> None:
    assert settled(offer(verified=0), local=0).reason is Reason.DIVERGED
    assert settled(offer(verified=256), local=0).reason is Reason.DIVERGED


def test_a_prompt_proven_as_far_as_it_can_be_has_not_diverged() -> None:
    pull = offer(verified=256, prompt=300)
    pull.provable = 256
    assert settled(pull, local=0).reason is None


def test_without_a_handle_there_is_no_reason() -> None:
    assert settled(Pull(prompt=10), local=0) == PrefillReport(prompt_tokens=10)


@pytest.mark.parametrize("obstacle", [Reason.ONE_WAY, Reason.UNSPLITTABLE])
def test_an_obstacle_pulls_nothing(obstacle: Reason) -> None:
    pull = offer()
    pull.obstacle = obstacle
    assert (settled(pull, local=0).pulled_tokens, pull.reason()) == (0, obstacle)


def test_asking_again_before_blocks_are_there_changes_nothing() -> None:
    pull = offer()
    assert [pull.wanted(0), pull.wanted(0), pull.wanted(128)] == [800, 800, 672]


def test_a_pull_happens_once_though_the_request_is_preempted() -> None:
    pull = offer()
    settled(pull, local=0)
    assert pull.wanted(512) == 0
    pull.settle(0)
    assert (pull.report(None).pulled_tokens, pull.report(None).local_tokens) == (800, 0)


def test_a_pull_that_broke_is_not_tried_again() -> None:
    pull = offer()
    settled(pull, local=0)
    pull.fail()
    report = settled(pull, local=128)
    assert (report.pulled_tokens, report.local_tokens, report.reason) == (0, 128, Reason.TRANSFER_FAILED)


def test_a_handle_is_whole_or_none() -> None:
    assert has_handle(HANDLE)
    for key in HANDLE:
        assert not has_handle({k: v for k, v in HANDLE.items() if k != key})
        assert not has_handle({**HANDLE, key: None})


@pytest.mark.parametrize(("tokens", "left"), [(0, []), (1, [5]), (16, [5]), (17, [5, 6]), (48, [5, 6, 7])])
def test_blocks_are_cut_from_the_end(tokens: int, left: list[int]) -> None:
    assert cut([[5, 6, 7], [8, 9, 10]], tokens, 16) == [left, [b + 3 for b in left]]


def test_without_orders_nothing_is_pulled_or_kept() -> None:
    assert prefill_order({}) == PrefillOrder()
    assert decode_order({KEY: None}) == DecodeOrder()


@pytest.mark.parametrize("data", [7, "x", [1], {"min_pull_tokens": "64"}, {"min_pull_tokens": None}])
def test_broken_prefill_orders_are_refused(data: object) -> None:
    with pytest.raises(WireError, match=r"^PrefillOrder: "):
        prefill_order({KEY: data})


@pytest.mark.parametrize("data", [7, "x", {"retain_s": "60"}, {"retain_s": True}, {"max_pinned_share": None}])
def test_broken_decode_orders_are_refused(data: object) -> None:
    with pytest.raises(WireError, match=r"^DecodeOrder: "):
        decode_order({KEY: data})
