import math
import random

import pytest

from kvflow.connector.retention import MAX_RETAIN_S, Ledger, Pool, Refusal, Turns, decide
from kvflow.connector.wire import DecodeOrder

POOL = Pool(total=100, reserve=30)


def order(retain_s: float = 60, share: float = 1.0) -> DecodeOrder:
    return DecodeOrder(retain_s=retain_s, max_pinned_share=share)


def test_a_turn_within_the_share_is_kept_as_long_as_ordered() -> None:
    assert decide(order(60), cost=10, pinned=0, pool=POOL) == 60


@pytest.mark.parametrize(
    "wrong", [order(0), order(-1), order(math.nan), order(share=0), order(share=-1), DecodeOrder()]
)
def test_what_is_not_ordered_is_not_kept(wrong: DecodeOrder) -> None:
    assert decide(wrong, cost=1, pinned=0, pool=POOL) is Refusal.POLICY


@pytest.mark.parametrize(("share", "cap"), [(0.5, 50), (0.009, 0), (0.7, 70), (1.0, 70), (5.0, 70)])
def test_the_cap_is_the_share_but_leaves_room_for_the_longest_request(share: float, cap: int) -> None:
    assert POOL.cap(share) == cap
    assert decide(order(share=share), cost=cap, pinned=0, pool=POOL) == 60
    assert decide(order(share=share), cost=1, pinned=cap, pool=POOL) is Refusal.SHARE


def test_a_pool_that_only_just_takes_the_longest_request_keeps_nothing() -> None:
    assert decide(order(), cost=1, pinned=0, pool=Pool(total=30, reserve=30)) is Refusal.SHARE
    assert decide(order(), cost=0, pinned=0, pool=Pool(total=30, reserve=31)) is Refusal.SHARE


def test_blocks_that_are_pinned_already_cost_nothing() -> None:
    assert decide(order(), cost=0, pinned=70, pool=POOL) == 60


def test_nothing_is_kept_for_good() -> None:
    assert decide(order(math.inf), cost=1, pinned=0, pool=POOL) == MAX_RETAIN_S


def test_a_shared_block_counts_once_and_stays_until_its_last_turn_goes() -> None:
    ledger = Ledger()
    assert ledger.cost([1, 2, 3]) == 3
    ledger.pin("a", [1, 2, 3], 10)
    assert ledger.cost([2, 3, 4]) == 1
    ledger.pin("b", [2, 3, 4], 20)
    assert ledger.pinned == 4
    assert ledger.release("a") == (1, 2, 3)
    assert (ledger.pinned, ledger.cost([1, 2])) == (3, 1)
    assert ledger.release("b") == (2, 3, 4)
    assert ledger.pinned == 0


def test_what_is_pinned_is_known_by_its_request() -> None:
    ledger = Ledger()
    ledger.pin("a", [1], 10)
    assert ("a" in ledger, "b" in ledger) == (True, False)
    ledger.release("a")
    assert "a" not in ledger


def test_release_gives_back_once() -> None:
    ledger = Ledger()
    ledger.pin("a", [1], 10)
    assert [ledger.release("a"), ledger.release("a"), ledger.release("stranger")] == [(1,), (), ()]


def test_a_pin_expires_at_its_deadline_whatever_the_order_of_pinning() -> None:
    ledger = Ledger()
    ledger.pin("late", [1], 20)
    ledger.pin("soon", [2], 10)
    assert [ledger.expired(9.9), ledger.expired(10), ledger.expired(30)] == [[], ["soon"], ["late", "soon"]]


def test_any_sequence_of_pins_and_releases_ends_with_nothing_pinned() -> None:
    rng, ledger, open_ = random.Random(3), Ledger(), dict[str, list[int]]()
    for i in range(500):
        if open_ and rng.random() < 0.5:
            name = rng.choice(sorted(open_))
            assert ledger.release(name) == tuple(open_.pop(name))
        else:
            open_[f"r{i}"] = rng.sample(range(40), rng.randrange(1, 9))
            ledger.pin(f"r{i}", open_[f"r{i}"], 0.0)
        assert ledger.pinned == len({b for blocks in open_.values() for b in blocks})
    for name in open_:
        ledger.release(name)
    assert ledger.pinned == 0


def test_a_turn_is_abandoned_before_or_after_it_was_kept() -> None:
    turns = Turns()
    turns.keep("early", "request")
    assert (turns.abandon("early"), turns.is_abandoned("early")) == ("request", False)
    assert turns.abandon("late") is None
    assert [turns.is_abandoned(name) for name in ("late", "other", None)] == [True, False, False]


def test_turns_without_a_name_are_not_remembered() -> None:
    turns = Turns(limit=1)
    turns.keep("named", "request")
    turns.keep(None, "another")
    assert turns.abandon("named") == "request"


def test_only_the_last_turns_are_remembered() -> None:
    turns = Turns(limit=2)
    for i in range(3):
        turns.keep(f"kept{i}", f"request{i}")
    assert [turns.abandon(f"kept{i}") for i in (1, 2, 0)] == ["request1", "request2", None]
    for i in range(2):
        turns.abandon(f"gone{i}")
    assert [turns.is_abandoned(name) for name in ("kept0", "gone0", "gone1")] == [False, True, True]
