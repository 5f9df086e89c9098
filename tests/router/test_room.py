"""How much is given up for a leg: no more than it needs, no less than lets it run and be kept."""

import pytest

from kvflow.router.endpoints import CHAT, COMPLETIONS, RESPONSES, Endpoint
from kvflow.router.room import FIRST_ANSWER, Need, Room
from kvflow.types import Blocks, NodeState, Path, Plan, Role

KEEP = Plan(path=Path.COLD, decode="d", retain_s=60.0, max_pinned_share=0.5)
LET_GO = Plan(path=Path.COLD, decode="d")


def node(pinned: int = 0, *, reserve: int = 10) -> NodeState:
    blocks = Blocks(free=100 - pinned, pinned=pinned, total=100, reserve=reserve)
    return NodeState(name="d", role=Role.DECODE, blocks=blocks, block_size=16)


def need(blocks: int) -> Need:
    return Need(blocks, blocks)


@pytest.mark.parametrize(("pinned", "short"), [(0, 0), (40, 0), (41, 1), (50, 10), (60, 20)])
def test_what_is_to_be_kept_must_fit_the_share(pinned: int, short: int) -> None:
    assert Room().shortage(node(pinned), KEEP, need(10)) == short


def test_the_room_of_a_request_of_the_full_length_counts_as_in_the_engine() -> None:
    assert Room().shortage(node(40, reserve=60), KEEP, need(10)) == 10


@pytest.mark.parametrize(("pinned", "short"), [(90, 0), (95, 5)])
def test_what_is_not_kept_must_only_run(pinned: int, short: int) -> None:
    assert Room().shortage(node(pinned), LET_GO, need(10)) == short


def test_nothing_is_given_up_for_a_prompt_that_can_never_be_kept() -> None:
    assert Room().shortage(node(30), KEEP, need(60)) == 0


def test_a_guess_at_the_answer_does_not_make_a_turn_one_that_can_never_be_kept() -> None:
    assert Room().shortage(node(40), KEEP, Need(10, 60)) == 40


def test_turns_under_way_count() -> None:
    room = Room()
    with room.leg("d", need(20), keeps=True):
        assert room.shortage(node(30), KEEP, need(10)) == 10
    with room.leg("d", need(20), keeps=False):
        assert room.shortage(node(30), KEEP, need(10)) == 0
        assert room.shortage(node(75), LET_GO, need(10)) == 5
    assert room.shortage(node(30), KEEP, need(10)) == 0


def test_what_was_freed_counts_until_the_next_report() -> None:
    room = Room()
    room.freed("d", 15)
    assert room.shortage(node(50), KEEP, need(10)) == 0
    room.reported("d")
    assert room.shortage(node(50), KEEP, need(10)) == 10


def test_a_node_that_has_said_nothing_is_thought_to_be_empty() -> None:
    silent = NodeState(name="d", role=Role.DECODE)
    assert Room().shortage(silent, KEEP, need(10)) == 0
    assert Room().expected(silent, 1000, None) == need(0)


def test_no_request_takes_more_than_one_of_the_full_length() -> None:
    """Its body may hold an image, and the router counts bytes."""
    assert Room().expected(node(reserve=12), 10**6, None) == need(12)


def test_an_answer_is_thought_to_be_as_long_as_others_or_as_it_may() -> None:
    room, wide = Room(), node(reserve=1000)
    assert room.expected(wide, 160, None) == Need(10, (160 + FIRST_ANSWER) // 16)
    assert room.expected(wide, 160, 10) == Need(10, 11)
    for _ in range(100):
        room.answered(1600)
    assert room.expected(wide, 160, None).whole == pytest.approx(110, abs=1)


def test_refusals_teach_that_answers_are_longer_but_not_without_end() -> None:
    room, wide = Room(), node(reserve=50)
    before = room.expected(wide, 160, None).whole
    room.refused(wide, KEEP, 160)
    assert room.expected(wide, 160, None).whole > before
    for _ in range(1000):
        room.refused(wide, KEEP, 160)
    assert room.expected(node(reserve=10**6), 160, None).whole < 5000


def test_a_refusal_of_what_could_never_be_kept_teaches_nothing() -> None:
    room, wide = Room(), node(reserve=55)
    before = room.expected(wide, 160, None)
    room.refused(wide, KEEP, 16 * 51)
    assert room.expected(wide, 160, None) == before


@pytest.mark.parametrize(
    ("endpoint", "body", "limit"),
    [
        (CHAT, {"max_tokens": 20, "max_completion_tokens": 10}, 10),
        (CHAT, {"max_output_tokens": 10}, None),
        (CHAT, {"max_tokens": -(10**9)}, None),
        (CHAT, {"max_tokens": True}, None),
        (CHAT, {"max_tokens": "x"}, None),
        (COMPLETIONS, {"max_tokens": 0}, 0),
        (RESPONSES, {"max_output_tokens": 10, "max_tokens": 1}, 10),
    ],
)
def test_a_limit_is_one_of_the_endpoints_own(endpoint: Endpoint, body: dict[str, object], limit: int | None) -> None:
    assert endpoint.longest_answer(body) == limit
