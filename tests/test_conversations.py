from kvflow.conversations import EXPIRY_MARGIN_S, LINGER_S, Conversations
from kvflow.types import Handle


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def handle(
    tokens: int = 1,
    *,
    node: str = "decode-0",
    epoch: str = "e",
    deadline: float = 2000.0,
    kept_at: float = 0.0,
    blocks: int = 1,
    size: int = 0,
) -> Handle:
    return Handle(
        node=node,
        epoch=epoch,
        tokens=tokens,
        deadline=deadline,
        pin="p",
        blocks=blocks,
        kept_at=kept_at,
        params={"a": 1},
        size=size,
    )


def store(max_count: int = 100, max_bytes: int = 10**9) -> tuple[Conversations, Clock]:
    clock = Clock()
    return Conversations(max_count=max_count, max_bytes=max_bytes, clock=clock), clock


def taken_tokens(conversations: Conversations, *keys: bytes) -> int | None:
    taken = conversations.take(keys)
    return taken.handle.tokens if taken else None


def test_a_handle_is_taken_once_under_whichever_key() -> None:
    conversations, _ = store()
    conversations.put("c", [b"1", b"2"], handle())
    assert conversations.take([b"0", b"2"]) is not None
    assert conversations.take([b"1"]) is None
    assert conversations.take([b"2"]) is None
    assert len(conversations) == 0


def test_the_first_key_that_has_one_wins_and_the_newest_under_it() -> None:
    conversations, _ = store()
    conversations.put("a", [b"short"], handle(1))
    conversations.put("b", [b"short", b"long"], handle(2))
    conversations.put("c", [b"short"], handle(3))
    assert taken_tokens(conversations, b"long", b"short") == 2
    assert taken_tokens(conversations, b"long", b"short") == 3
    assert taken_tokens(conversations, b"long", b"short") == 1
    assert taken_tokens(conversations, b"long", b"short") is None


def test_what_was_not_used_can_be_put_back() -> None:
    conversations, _ = store()
    conversations.put("c", [b"whole", b"part"], handle(7))
    taken = conversations.take([b"part"])
    assert taken is not None
    assert not taken.complete
    conversations.put_back(taken)
    again = conversations.take([b"whole"])
    assert again is not None
    assert (again.conversation, again.handle.tokens, again.complete) == ("c", 7, True)


def test_a_handle_that_can_be_used_goes_before_a_better_match_that_cannot() -> None:
    conversations, clock = store()
    conversations.put("a", [b"short"], handle(1))
    conversations.put("b", [b"long"], handle(2, deadline=1010.0))
    conversations.put("c", [b"longest"], handle(3, epoch="dead"))
    conversations.drop_epoch("dead")
    clock.now = 1011.0
    assert taken_tokens(conversations, b"longest", b"long", b"short") == 1
    assert taken_tokens(conversations, b"longest", b"long", b"short") == 3


def test_the_number_of_handles_is_bounded_and_the_oldest_go_first() -> None:
    conversations, _ = store(max_count=3)
    for i in range(10):
        conversations.put("c", [b"%d" % i], handle(i))
    assert len(conversations) == 3
    assert conversations.take([b"6"]) is None
    assert taken_tokens(conversations, b"7") == 7


def test_the_bytes_are_bounded_and_come_back_to_nothing() -> None:
    conversations, _ = store(max_bytes=100_000)
    for i in range(100):
        conversations.put("c", [b"%d" % i, b"x%d" % i], handle(size=10_000))
        assert conversations.size <= 100_000
    assert 5 <= len(conversations) <= 10
    for i in range(100):
        conversations.take([b"%d" % i])
    assert (len(conversations), conversations.size) == (0, 0)


def test_a_handle_larger_than_the_bound_is_not_kept() -> None:
    conversations, _ = store(max_bytes=1000)
    conversations.put("c", [b"1"], handle(size=2000))
    assert (len(conversations), conversations.size) == (0, 0)


def test_expired_handles_linger_to_be_told_of_and_then_go() -> None:
    conversations, clock = store()
    conversations.put("c", [b"1"], handle(1, deadline=1010.0))
    conversations.put("c", [b"2"], handle(2, deadline=1010.0))
    clock.now = 1011.0
    assert taken_tokens(conversations, b"1") == 1
    clock.now = 1011.0 + LINGER_S
    conversations.put("c", [b"3"], handle(3))
    assert len(conversations) == 1
    assert conversations.take([b"2"]) is None


def test_put_and_take_for_ever_grows_nothing() -> None:
    conversations, clock = store()
    for i in range(5000):
        clock.now += 1
        conversations.put("c", [b"same"], handle(i, deadline=clock.now + 500))
        assert taken_tokens(conversations, b"same") == i
    assert (len(conversations), conversations.size) == (0, 0)
    assert len(conversations._deadlines) < 100


def test_a_dead_epoch_loses_what_it_held_but_not_its_name() -> None:
    conversations, _ = store()
    conversations.put("c", [b"1"], handle(epoch="dead", size=5000))
    conversations.put("d", [b"2"], handle(epoch="alive", size=5000))
    before = conversations.size
    assert conversations.drop_epoch("dead") == 1
    assert conversations.drop_epoch("dead") == 0
    assert conversations.size == before - 5000
    dead, alive = conversations.take([b"1"]), conversations.take([b"2"])
    assert dead is not None
    assert alive is not None
    assert (dead.conversation, dead.handle.params) == ("c", {})
    assert alive.handle.params == {"a": 1}


def given_up(conversations: Conversations, blocks: int, node: str = "decode-0") -> list[int]:
    return [h.tokens for h in conversations.give_up(node, blocks)]


def test_the_oldest_are_given_up_until_there_is_room_and_only_on_that_node() -> None:
    conversations, _ = store()
    for i in range(1, 5):
        conversations.put(f"c{i}", [bytes([i])], handle(i, kept_at=100.0 * i, blocks=10))
    conversations.put("other", [b"other"], handle(9, node="decode-1", blocks=10))
    assert given_up(conversations, 0) == []
    assert given_up(conversations, 11) == [1, 2]
    assert taken_tokens(conversations, b"\1", b"\2") is None
    assert given_up(conversations, 1000) == [3, 4]
    assert given_up(conversations, 1) == []
    assert given_up(conversations, 1, "decode-1") == [9]
    assert given_up(conversations, 1, "decode-2") == []


def test_of_two_as_old_the_one_that_is_cheaper_to_compute_again_goes_first() -> None:
    conversations, _ = store()
    conversations.put("long", [b"1"], handle(60_000))
    conversations.put("short", [b"2"], handle(1000))
    assert given_up(conversations, 1) == [1000]


def test_what_has_little_time_left_goes_first() -> None:
    conversations, _ = store()
    conversations.put("patient", [b"1"], handle(1, kept_at=0.0, deadline=10_000.0))
    conversations.put("soon", [b"2"], handle(2, kept_at=990.0, deadline=1010.0))
    conversations.put("over", [b"3"], handle(3, kept_at=980.0, deadline=999.0))
    assert given_up(conversations, 3) == [3, 2, 1]


def test_a_tenant_with_more_than_its_share_gives_up_first() -> None:
    conversations, _ = store()
    conversations.put("a", [b"1"], handle(1, kept_at=0.0), tenant="modest")
    for i in range(2, 5):
        conversations.put(f"b{i}", [bytes([i])], handle(i, kept_at=100.0 * i), tenant="greedy")
    # Greedy has three blocks of four, then two of three; with one each, age alone counts.
    assert given_up(conversations, 4) == [2, 3, 1, 4]


def test_what_was_put_back_is_as_old_as_it_was() -> None:
    conversations, _ = store()
    conversations.put("old", [b"1"], handle(1, kept_at=0.0))
    conversations.put("new", [b"2"], handle(2, kept_at=500.0))
    taken = conversations.take([b"1"])
    assert taken is not None
    conversations.put_back(taken)
    assert given_up(conversations, 1) == [1]


def test_what_is_gone_already_is_not_given_up() -> None:
    conversations, _ = store()
    conversations.put("c", [b"1"], handle(epoch="dead"))
    conversations.drop_epoch("dead")
    assert given_up(conversations, 1) == []
    assert conversations.remove(b"1") == []
    assert len(conversations) == 0


def test_all_that_is_filed_under_a_key_can_be_removed() -> None:
    conversations, _ = store()
    conversations.put("c", [b"1", b"all"], handle(1))
    conversations.put("c", [b"2", b"all"], handle(2))
    conversations.put("d", [b"2"], handle(3))
    assert [h.tokens for h in conversations.remove(b"all")] == [1, 2]
    assert conversations.remove(b"all") == []
    assert taken_tokens(conversations, b"1", b"2") == 3


def test_what_there_is_no_room_for_is_handed_over_to_be_released() -> None:
    gone: list[int] = []
    conversations = Conversations(
        max_count=1, max_bytes=10**9, clock=Clock(), on_give_up=lambda h: gone.append(h.tokens)
    )
    for i in range(3):
        conversations.put(f"c{i}", [bytes([i])], handle(i))
    assert gone == [0, 1]


def test_several_keys_can_stand_for_the_whole() -> None:
    conversations, _ = store()
    for key, complete in ((b"1", True), (b"2", True), (b"3", False)):
        conversations.put("c", [b"1", b"2", b"3"], handle(), whole=2)
        taken = conversations.take([key])
        assert taken is not None
        assert taken.complete is complete


def test_what_the_engine_has_freed_is_not_given_up() -> None:
    conversations, clock = store()
    conversations.put("over", [b"1"], handle(1, deadline=1010.0))
    conversations.put("there", [b"2"], handle(2))
    clock.now = 1010.0 + EXPIRY_MARGIN_S + 0.1
    assert given_up(conversations, 1) == [2]
    assert taken_tokens(conversations, b"1") == 1


def test_looking_says_what_taking_would_and_leaves_it_there() -> None:
    conversations, clock = store()
    conversations.put("a", [b"short"], handle(1, deadline=1100.0))
    conversations.put("b", [b"long"], handle(2))
    for keys in ([b"short", b"long"], [b"long", b"short"], [b"none"]):
        looked = conversations.peek(keys)
        assert conversations.peek(keys) == looked
        assert len(conversations) == 2
        if (taken := conversations.take(keys)) is not None:
            conversations.put_back(taken)
        assert taken == looked
    clock.now = 1101.0
    looked = conversations.peek([b"short", b"long"])
    assert looked is not None
    assert (looked.handle.tokens, conversations.take([b"short", b"long"])) == (2, looked)
