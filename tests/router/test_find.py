from collections.abc import Mapping
from typing import Any

import pytest

from kvflow.errors import RequestError
from kvflow.router.endpoints import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Endpoint
from kvflow.router.find import MAX_LINKS, TEXT_CHUNK, Keys, Scope, find_keys, id_key

SCOPE = Scope("tenant", "model", "")
WHOLE = 12345
WHOLE = 12345


def keys(
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    scope: Scope = SCOPE,
    endpoint: Endpoint | None = None,
) -> Keys:
    return find_keys(endpoint or (COMPLETIONS if "prompt" in body else CHAT), body, headers or {}, scope, WHOLE)


def chat(*texts: str, system: str | None = None) -> dict[str, Any]:
    """User and assistant in turn, beginning with the user."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]
    return {"messages": messages}


def finds(later: Keys, earlier: Keys) -> bool:
    return bool(set(later.lookup) & set(earlier.filing))


def test_the_next_turn_finds_the_conversation_however_the_answer_is_sent_back() -> None:
    first = keys(chat("hello", system="be brief"))
    assert finds(keys(chat("hello", "hi!", "and now?", system="be brief")), first)
    assert finds(keys(chat("hello", "<think>stripped</think>", "and now?", system="be brief")), first)


def test_the_longest_match_comes_first() -> None:
    second = keys(chat("a", "b", "c"))
    third = keys(chat("a", "b", "c", "d", "e"))
    assert third.lookup.index(second.filing[0]) < third.lookup.index(keys(chat("a")).filing[0])


@pytest.mark.parametrize(
    "later",
    [
        chat("a", "b", "c", "d", "e", system="s"),
        chat("a", "b", "c", "d", "other", system="s"),
        chat("a", "rewritten", "c", "x", "y", system="s"),
        chat("a", "b", "c", "d", "changed", "f", "g", system="s"),
        chat("a", "b", "c", system="s"),
    ],
    ids=["regenerated", "branched", "answer-rewritten", "branched-later", "truncated"],
)
def test_rewritten_histories_still_find_it(later: dict[str, Any]) -> None:
    assert finds(keys(later), keys(chat("a", "b", "c", "d", "e", system="s")))


def test_what_comes_after_a_key_is_counted_without_the_answer_that_it_led_to() -> None:
    earlier, later = chat("a", "b" * 700, "c" * 50), chat("a", "b" * 700, "c" * 50, "d" * 900, "e" * 300)
    found = keys(later)
    beyond = dict(zip(found.lookup, found.beyond, strict=True))
    assert 300 < beyond[keys(earlier).filing[0]] < 400
    assert 1250 < beyond[keys(chat("a")).filing[0]] < 1450
    assert found.beyond[0] == 0


def test_after_an_id_whose_messages_are_new_comes_the_whole_request() -> None:
    found = keys({"conversation_id": "mine", **chat("a", "b", "c")})
    assert found.beyond[found.lookup.index(id_key("mine", SCOPE))] == WHOLE


@pytest.mark.parametrize("prompt", ["x" * 1000, [1] * 250])
def test_what_comes_after_a_chunk_of_a_prompt_is_counted_in_bytes(prompt: object) -> None:
    assert keys({"prompt": prompt}).beyond[0] in range(220, 240)


RESPONSES_TURN = {
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": "42"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "and now?"}]},
    ],
}


def test_a_response_is_found_by_what_the_model_did_not_say() -> None:
    later = keys(RESPONSES_TURN, endpoint=RESPONSES)
    assert len(later.lookup) == 4
    assert finds(later, keys({"instructions": "be brief", "input": "hello"}, endpoint=RESPONSES))
    assert not finds(later, keys({"input": "hello"}, endpoint=RESPONSES))
    assert finds(later, keys({**RESPONSES_TURN, "input": RESPONSES_TURN["input"][:4]}, endpoint=RESPONSES))


def test_a_response_is_found_by_its_id_alone() -> None:
    first = keys({"input": "hello", "request_id": "resp_1"}, endpoint=RESPONSES)
    second = keys({"input": "more", "previous_response_id": "resp_1", "request_id": "resp_2"}, endpoint=RESPONSES)
    third = keys({"input": "hello", "previous_response_id": "resp_2"}, endpoint=RESPONSES)
    assert finds(second, first)
    assert second.beyond == (WHOLE,)
    assert finds(third, second)
    assert not finds(third, first)
    assert not finds(keys({"input": "more", "previous_response_id": "resp_1"}, scope=Scope("b", "model", "")), first)


@pytest.mark.parametrize("extra", [{"background": True}, {"tools": [{"type": "mcp"}]}])
def test_what_brings_back_no_handle_is_filed_under_nothing(extra: dict[str, Any]) -> None:
    assert keys({**RESPONSES_TURN, **extra, "request_id": "resp_1"}, endpoint=RESPONSES).filing == ()
    assert keys({**RESPONSES_TURN, **extra, "session_id": "s"}, endpoint=RESPONSES).filing == ()


def anthropic(*contents: Any, system: Any = "be brief") -> Keys:
    messages = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    return keys({"system": system, "messages": messages}, endpoint=MESSAGES)


def test_anthropics_marks_and_headers_come_and_go_and_change_nothing() -> None:
    def marked(text: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]

    def billed(number: int) -> list[dict[str, Any]]:
        return [{"type": "text", "text": f"x-anthropic-billing-header: {number}"}, *marked("rules")]

    assert finds(anthropic("hello", "hi", marked("more")), anthropic(marked("hello")))
    assert finds(anthropic("hello", "hi", "more", system=billed(2)), anthropic("hello", system=billed(1)))
    assert not finds(anthropic("hello", "hi", "more", system="other"), anthropic("hello"))


def test_a_shared_system_prompt_is_no_conversation() -> None:
    assert not finds(keys(chat("one question", system="s" * 5000)), keys(chat("another", system="s" * 5000)))


@pytest.mark.parametrize(
    "other", [Scope("other", "model", ""), Scope("tenant", "other", ""), Scope("tenant", "model", "salt")]
)
def test_nothing_is_found_across_scopes(other: Scope) -> None:
    body = chat("hello", "hi", "more")
    assert not finds(keys(body, scope=other), keys(body))
    assert not finds(keys({"conversation_id": "x"}, scope=other), keys({"conversation_id": "x"}))


def test_long_conversations_are_filed_under_few_keys() -> None:
    texts = [str(i) for i in range(2001)]
    found = keys(chat(*texts))
    assert len(found.filing) < 15
    assert finds(keys(chat(*texts, "answer", "next")), found)
    assert finds(keys(chat(*texts[:1501])), found)


def test_a_short_chat_does_not_take_the_handle_of_a_long_one_that_began_alike() -> None:
    assert not finds(keys(chat("hi")), keys(chat("hi", "hello", "tell me a story", "once", "go on")))


def test_the_cost_is_bounded_whatever_is_sent() -> None:
    assert keys({"messages": [0] * 500_000}) == Keys((), ())
    assert len(keys({"messages": [{"role": "user", "content": "x"}] * 100_000}).lookup) == MAX_LINKS
    assert len(keys({"prompt": "x" * 10_000_000}).lookup) == MAX_LINKS
    assert len(keys({"prompt": [1] * 10_000_000}).lookup) == MAX_LINKS


@pytest.mark.parametrize("kind", [str, list])
def test_plain_prompts_grow(kind: type) -> None:
    text = "".join(chr(97 + i % 26) for i in range(TEXT_CHUNK * 10))
    first, second, other = text[: TEXT_CHUNK * 6], text[: TEXT_CHUNK * 8], text[: TEXT_CHUNK * 2] + text[::-1]
    prompts = [p if kind is str else [ord(c) for c in p] for p in (first, second, other)]
    found = [keys({"prompt": p}) for p in prompts]
    assert finds(found[1], found[0])
    assert not finds(found[2], found[0])


@pytest.mark.parametrize("prompt", ["short", "", None, ["several", "prompts"], [1, 2], {"not": "a prompt"}, 7])
def test_prompts_without_a_key(prompt: object) -> None:
    assert keys({"prompt": prompt}) == Keys((), ())


@pytest.mark.parametrize("messages", [[], [None], ["x"], [{"role": "user", "content": "a"}, 5]])
def test_odd_messages_are_left_to_the_engine_to_refuse(messages: list[Any]) -> None:
    assert keys({"messages": messages}) == Keys((), ())


def test_half_a_surrogate_pair_is_text_like_any_other() -> None:
    assert len(keys({"messages": [{"role": "user", "content": "\ud800"}]}).lookup) == 1
    assert len(keys({"prompt": "\ud800" * TEXT_CHUNK}).lookup) == 1


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"conversation_id": "mine"}, {}),
        ({"session_id": "mine"}, {}),
        ({"metadata": {"conversation_id": "mine"}}, {}),
        ({}, {"x-conversation-id": "mine"}),
        ({}, {"x-session-id": "mine"}),
    ],
)
def test_an_explicit_id_finds_its_conversation_whatever_the_messages_are(
    body: dict[str, Any], headers: dict[str, str]
) -> None:
    found = keys({**body, **chat("a", "b", "c")}, headers)
    assert found.conversation == "mine"
    assert id_key("mine", SCOPE) == found.lookup[-1] == found.filing[-1]
    assert finds(keys({**body, **chat("entirely", "other")}, headers), found)
    assert not finds(keys({**body, **chat("a new one")}, headers), found)
    assert not finds(keys(chat("a", "b", "c")), found)


def test_conversations_under_one_id_are_told_apart_by_their_messages() -> None:
    """As where an id names a session or a pod: each finds its own first."""
    shared = {"x-session-id": "pod-1"}
    first, other = keys(chat("a"), shared), keys(chat("b"), shared)
    later = keys(chat("a", "x", "c"), shared)
    assert first.filing[0] in later.lookup
    assert later.lookup.index(first.filing[0]) < later.lookup.index(id_key("pod-1", SCOPE))
    assert other.filing[0] not in later.lookup


def test_ids_in_headers_come_in_utf_8_and_percent_encoded() -> None:
    latin = "会話".encode().decode("latin-1")
    assert keys(chat("a"), {"x-session-id": latin}).conversation == "会話"
    assert keys(chat("a"), {"x-conversation-id": "50%25%20%C3%A0"}).conversation == "50% à"


@pytest.mark.parametrize("session", ["x" * 5000, "a\nb"])
def test_session_ids_are_the_clients_to_choose(session: str) -> None:
    assert keys({"session_id": session}).conversation == session
    assert keys(chat("a"), {"x-session-id": session}).conversation == session
    assert keys({"session_id": 7, **chat("a")}).conversation is None


@pytest.mark.parametrize("value", ["", "x" * 257, "a\nb", 5, {}, ["x"], "\ud800"])
def test_an_id_that_is_none_is_refused_by_name(value: object) -> None:
    with pytest.raises(RequestError, match="conversation_id must be a string of 1 to 256"):
        keys({"conversation_id": value})
    with pytest.raises(RequestError, match=r"metadata\.conversation_id"):
        keys({"metadata": {"conversation_id": value}})
