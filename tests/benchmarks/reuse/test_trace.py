from itertools import pairwise

from benchmarks.reuse.capacity import best_hits
from benchmarks.reuse.trace import Shape, TraceTurn, returning, trace

TTL_S = 60.0


def by_conversation(turns: list[TraceTurn]) -> list[list[TraceTurn]]:
    return [[t for t in turns if t.conversation == c] for c in sorted({t.conversation for t in turns})]


def test_a_seed_decides_everything() -> None:
    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


def test_turns_come_in_order_of_time_and_of_their_conversation() -> None:
    turns = trace(0)
    assert [t.at for t in turns] == sorted(t.at for t in turns)
    conversations = by_conversation(turns)
    assert len(conversations) == 100
    for conversation in conversations:
        assert [t.number for t in conversation] == list(range(len(conversation)))
        assert 2 <= len(conversation) <= 5


def test_every_prompt_is_the_history_and_something_new() -> None:
    for conversation in by_conversation(trace(0)):
        assert conversation[0].prompt == conversation[0].new
        for before, after in pairwise(conversation):
            assert after.prompt == before.prompt + before.answer + after.new


def test_conversations_are_mixed() -> None:
    turns = trace(0)
    assert sum(a.conversation != b.conversation for a, b in pairwise(turns)) > 0.8 * len(turns)


def test_think_times_lie_on_both_sides_of_the_ttl_and_none_near_it() -> None:
    thinking = [b.at - a.at for c in by_conversation(trace(0)) for a, b in pairwise(c)]
    assert sum(t > TTL_S for t in thinking) == 8
    assert not [t for t in thinking if 0.6 * TTL_S < t < 1.2 * TTL_S]


def test_the_whole_trace_is_short() -> None:
    assert all(trace(seed)[-1].at < 200 for seed in range(10))


def test_its_shape_can_be_chosen() -> None:
    shape = Shape(turns=(3, 3), first=(5, 5), new=(2, 2), answer=(4, 4), think_s=(1, 2), pausing=0)
    turns = trace(0, conversations=7, span_s=10, shape=shape)
    assert [t.prompt for t in by_conversation(turns)[0]] == [5, 11, 17]
    assert returning(turns) == 14
    assert turns[-1].at < 10 + 2 * 2


def test_memory_for_twenty_conversations_holds_a_good_part_of_a_hundred() -> None:
    """Else neither a perfect cache nor a broken one could be told from another."""
    turns = trace(0)
    mean = sum(-(-t.held // 16) for t in turns) / len(turns)
    some = sum(best_hits(turns, capacity=round(20 * mean), ttl_s=TTL_S, block_size=16))
    everything = sum(best_hits(turns, capacity=10**6, ttl_s=TTL_S, block_size=16))
    assert everything == returning(turns) - 8
    assert 0.4 * everything < some < 0.8 * everything
