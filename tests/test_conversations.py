from kvflow.conversations import LINGER_S, Conversations
from kvflow.types import Handle


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def handle(tokens: int = 1, *, epoch: str = "e", deadline: float = 2000.0, size: int = 0) -> Handle:
    return Handle(
        node="decode-0",
        epoch=epoch,
        tokens=tokens,
        deadline=deadline,
        pin="p",
        blocks=1,
        kept_at=0.0,
        params={"a": 1},
        size=size,
    )


def store(**limits: int) -> tuple[Conversations, Clock]:
    clock = Clock()
    limits = {"max_count": 100, "max_bytes": 10**9} | limits
    return Conversations(clock=clock, **limits), clock


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
