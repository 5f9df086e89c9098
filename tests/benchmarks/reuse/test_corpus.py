from collections.abc import Sequence
from itertools import pairwise

import pytest

from benchmarks.reuse.corpus import Conversation, Kind, Message, corpus, interleaved

EACH = 20


def conversations(kind: Kind) -> list[Conversation]:
    return corpus(3, each=EACH, kinds=[kind])


def sent(conversation: Conversation) -> list[list[Message]]:
    """Messages of its requests, each answered with words of its own."""
    answers = [" ".join(f"answer{i}-{w}" for w in range(10)) for i in range(len(conversation.requests))]
    return [request.body(answers)["messages"] for request in conversation.requests]


def begins_with(messages: Sequence[Message], start: Sequence[Message]) -> bool:
    return list(messages[: len(start)]) == list(start)


def goes_on(conversation: Conversation) -> list[bool]:
    """For each request but the first, whether it repeats all of the one before it and adds to that."""
    return [len(b) > len(a) and begins_with(b, a) for a, b in pairwise(sent(conversation))]


def test_a_seed_decides_everything() -> None:
    assert corpus(1, each=2) == corpus(1, each=2)
    assert corpus(1, each=2) != corpus(2, each=2)


@pytest.mark.parametrize("kind", Kind)
def test_every_conversation_has_several_turns_and_ends_with_somebody_elses_word(kind: Kind) -> None:
    for conversation in conversations(kind):
        assert conversation.kind is kind
        assert len(conversation.requests) >= (2 if kind in (Kind.REGENERATED, Kind.TOOLS) else 3)
        for messages in sent(conversation):
            assert messages[0]["role"] == "system"
            assert messages[-1]["role"] in ("user", "tool")


def test_system_prompts_are_shared() -> None:
    seen = {str(sent(c)[0][0]) for c in corpus(3, each=EACH)}
    assert 1 < len(seen) <= 4


@pytest.mark.parametrize("kind", [Kind.GROWING, Kind.STRIPPED, Kind.TOOLS])
def test_some_kinds_only_grow(kind: Kind) -> None:
    assert all(all(goes_on(c)) for c in conversations(kind))


@pytest.mark.parametrize("kind", [Kind.BRANCHING, Kind.EDITED, Kind.REGENERATED, Kind.TRUNCATED])
def test_the_others_do_not(kind: Kind) -> None:
    assert sum(not all(goes_on(c)) for c in conversations(kind)) > EACH / 2


def test_stripped_answers_are_the_end_of_what_was_said() -> None:
    *_, last = sent(conversations(Kind.STRIPPED)[0])
    first = next(m for m in last if m["role"] == "assistant")
    assert first["content"] == " ".join(f"answer0-{w}" for w in range(5, 10))


def test_branches_go_on_from_an_answer_and_come_back() -> None:
    came_back = 0
    for conversation in conversations(Kind.BRANCHING):
        requests = sent(conversation)
        for at, (a, b) in enumerate(pairwise(requests), start=1):
            if not begins_with(b, a):
                came_back += any(len(b) > len(r) > 2 and begins_with(b, r) for r in requests[1 : at - 1])
    assert came_back > EACH / 2


def test_regenerated_requests_are_the_same_to_the_letter() -> None:
    repeats = [a == b for c in conversations(Kind.REGENERATED) for a, b in pairwise(sent(c))]
    assert 0.2 < sum(repeats) / len(repeats) < 0.8


def test_truncated_histories_keep_the_system_prompt_and_the_last_messages() -> None:
    for conversation in conversations(Kind.TRUNCATED):
        requests = sent(conversation)
        cut = [(a, b) for a, b in pairwise(requests) if not begins_with(b, a)]
        assert cut
        for a, b in cut:
            assert b[0] == a[0]
            assert all(m in a or m["content"].startswith("answer") for m in b[1:-1])


def test_every_result_belongs_to_a_call() -> None:
    sizes = []
    for conversation in conversations(Kind.TOOLS):
        assert all(request.tools for request in conversation.requests)
        *_, last = sent(conversation)
        called = [call["id"] for m in last for call in m.get("tool_calls", [])]
        results = [m for m in last if m["role"] == "tool"]
        assert called == [m["tool_call_id"] for m in results]
        sizes += [len(m["content"].split()) for m in results]
    assert min(sizes) <= 10
    assert max(sizes) >= 150


def test_every_request_is_sent_once_and_in_the_order_of_its_conversation() -> None:
    made = corpus(3, each=4)
    order = interleaved(made, 5, open_at_once=6)
    assert order == interleaved(made, 5, open_at_once=6)
    assert order != interleaved(made, 6, open_at_once=6)
    for number, conversation in enumerate(made):
        assert [r for c, r in order if c == number] == list(range(len(conversation.requests)))


def test_no_more_are_open_than_asked_for() -> None:
    made = corpus(3, each=4)
    going: set[int] = set()
    most = 0
    for number, request in interleaved(made, 5, open_at_once=6):
        going.add(number)
        most = max(most, len(going))
        if request == len(made[number].requests) - 1:
            going.remove(number)
    assert most == 6
