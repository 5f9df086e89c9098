from benchmarks.reuse.capacity import best_hits
from benchmarks.reuse.trace import TraceTurn, trace

BLOCK = 16
FOREVER = 1e9


def turn(conversation: int, at: float, held: int = BLOCK) -> TraceTurn:
    return TraceTurn(conversation=conversation, number=0, at=at, new=held, prompt=held, answer=1)


def hits(turns: list[TraceTurn], *, capacity: int = 2, ttl_s: float = FOREVER) -> list[bool]:
    return best_hits(turns, capacity=capacity, ttl_s=ttl_s, block_size=BLOCK)


def test_what_fits_is_held() -> None:
    assert hits([turn(0, 0), turn(1, 1), turn(0, 2), turn(1, 3)]) == [False, False, True, True]


def test_what_was_used_longest_ago_makes_room() -> None:
    turns = [turn(0, 0), turn(1, 1), turn(0, 2), turn(2, 3), turn(0, 4), turn(1, 5)]
    assert hits(turns) == [False, False, True, False, True, False]


def test_a_turn_gives_back_what_its_conversation_held() -> None:
    assert hits([turn(0, 0), turn(1, 1), turn(0, 2), turn(0, 3), turn(1, 4)])[-1]


def test_blocks_count_whole() -> None:
    turns = [turn(0, 0, held=BLOCK + 1), turn(1, 1), turn(0, 2)]
    assert not hits(turns, capacity=2)[-1]
    assert hits(turns, capacity=3)[-1]


def test_the_last_token_of_an_answer_is_not_held() -> None:
    one = TraceTurn(conversation=0, number=0, at=0, new=10, prompt=10, answer=7)
    assert hits([one, turn(0, 1)], capacity=1)[-1]


def test_time_ends_it_and_every_turn_begins_anew() -> None:
    turns = [turn(0, 0), turn(0, 9), turn(0, 18), turn(0, 28)]
    assert hits(turns, ttl_s=10) == [False, True, True, False]


def test_a_turn_too_long_for_everything_drives_nobody_out() -> None:
    turns = [turn(0, 0), turn(1, 1, held=3 * BLOCK), turn(1, 2), turn(0, 3)]
    assert hits(turns) == [False, False, False, True]


def test_more_memory_is_never_worse() -> None:
    turns = trace(0)
    rates = [sum(hits(turns, capacity=capacity, ttl_s=60)) for capacity in (0, 50, 200, 400, 800)]
    assert rates[0] == 0
    assert rates == sorted(set(rates))
