import pytest

from kvflow.nodes.simulated.language import answer_length, attend, kv, render, tokenize, word


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", 0),
        ("one two", 2),
        ("one  two", 3),
        ("internationalisation", 3),
        ("<|im_start|>user\nhi", 4),
        ("a\n\tb \U0001f600!", 7),
        ("lone \ud800 surrogate", 5),
    ],
)
def test_tokens(text: str, pieces: int) -> None:
    assert len(tokenize(text)) == pieces
    assert all(0 <= t < 2**31 for t in tokenize(text))


def test_a_prompt_that_goes_on_begins_with_the_tokens_of_the_one_before() -> None:
    first = [{"role": "user", "content": "How are you?"}]
    answered = render(first) + "well thank you"
    then = [*first, {"role": "assistant", "content": "well thank you"}, {"role": "user", "content": "And now?"}]
    before, after = tokenize(answered), tokenize(render(then))
    assert after[: len(before)] == before


def test_messages_of_parts_tools_and_calls_are_seen() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert render(parts) == render([{"role": "user", "content": "hi"}])
    assert render(parts, tools=[{"type": "function"}]) != render(parts)
    assert render([{"role": "assistant", "tool_calls": [{"id": "1"}]}]) != render([{"role": "assistant"}])


def test_a_value_depends_on_everything_before_it() -> None:
    def last(*tokens: int) -> int:
        value = 0
        for token in tokens:
            value = kv(value, token)
        return value

    assert len({last(1, 2, 3), last(2, 1, 3), last(0, 2, 3), last(2, 3), last(1, 2, 4)}) == 5


def test_the_next_word_depends_on_every_value_and_their_order() -> None:
    states = [attend(0, values) for values in ([1, 2, 3], [1, 3, 2], [1, 2, 4], [0, 2, 3], [1, 2])]
    assert len({"".join(word(attend(s, [i])) for i in range(8)) for s in states}) == len(states)


def test_answers_have_the_lengths_they_may_have() -> None:
    assert {answer_length(attend(0, [i]), 2, 4) for i in range(100)} == {2, 3, 4}
