"""How much is given up for a leg: no more than it needs, no less than lets it run and be kept."""

import pytest

from kvflow.router.room import FIRST_ANSWER, Room
from kvflow.types import Blocks, NodeState, Path, Plan, Role

KEEP = Plan(path=Path.COLD, decode="d", retain_s=60.0, max_pinned_share=0.5)
LET_GO = Plan(path=Path.COLD, decode="d")


def node(pinned: int = 0, *, reserve: int = 10) -> NodeState:
    blocks = Blocks(free=100 - pinned, pinned=pinned, total=100, reserve=reserve)
    return NodeState(name="d", role=Role.DECODE, blocks=blocks, block_size=16)


@pytest.mark.parametrize(("pinned", "short"), [(0, 0), (40, 0), (41, 1), (50, 10), (60, 20)])
def test_what_is_to_be_kept_must_fit_the_share(pinned: int, short: int) -> None:
    assert Room().shortage(node(pinned), KEEP, 10) == short


def test_the_room_of_a_request_of_the_full_length_counts_as_in_the_engine() -> None:
    assert Room().shortage(node(40, reserve=60), KEEP, 10) == 10


@pytest.mark.parametrize(("pinned", "short"), [(90, 0), (95, 5)])
def test_what_is_not_kept_must_only_run(pinned: int, short: int) -> None:
    assert Room().shortage(node(pinned), LET_GO, 10) == short


def test_nothing_is_given_up_for_a_turn_that_can_never_be_kept() -> None:
    assert Room().shortage(node(30, reserve=60), KEEP, 60) == 0


def test_a_request_that_only_looks_long_gets_the_room_of_the_longest() -> None:
    """Its body may hold an image, and the router counts bytes."""
    assert Room().shortage(node(50, reserve=12), KEEP, 10**6) == 12


def test_turns_under_way_count() -> None:
    room = Room()
    with room.leg("d", 20, keeps=True):
        assert room.shortage(node(30), KEEP, 10) == 10
    with room.leg("d", 20, keeps=False):
        assert room.shortage(node(30), KEEP, 10) == 0
        assert room.shortage(node(75), LET_GO, 10) == 5
    assert room.shortage(node(30), KEEP, 10) == 0


def test_what_was_freed_counts_until_the_next_report() -> None:
    room = Room()
    room.freed("d", 15)
    assert room.shortage(node(50), KEEP, 10) == 0
    room.reported("d")
    assert room.shortage(node(50), KEEP, 10) == 10


def test_a_node_that_has_said_nothing_is_thought_to_be_empty() -> None:
    silent = NodeState(name="d", role=Role.DECODE)
    assert Room().shortage(silent, KEEP, 10) == 0
    assert Room().expected(silent, 1000, {}) == 0


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_an_answer_is_thought_to_be_as_long_as_others_or_as_it_may(limit: str) -> None:
    room = Room()
    assert room.expected(node(), 160, {}) == (160 + FIRST_ANSWER) / 16
    assert room.expected(node(), 160, {limit: 10}) == 11
    assert room.expected(node(), 160, {limit: "x"}) == room.expected(node(), 160, {})
    for _ in range(100):
        room.answered(1600)
    assert room.expected(node(), 160, {}) == pytest.approx(110, abs=1)


def test_refusals_teach_that_answers_are_longer_but_not_without_end() -> None:
    room = Room()
    before = room.expected(node(), 160, {})
    for _ in range(1000):
        room.refused()
    assert before < room.expected(node(), 160, {}) < 5000
