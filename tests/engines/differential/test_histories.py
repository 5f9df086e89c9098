"""Thinking that a template takes out of a history: all before the cut is reused, and the answer is a cold run's."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.engines.differential.row import text
from tests.engines.differential.servers import Pair
from tests.engines.serving import BLOCK, Answer, Message, ask, ask_cold
from tests.net import post

pytestmark = pytest.mark.engine

THINKING: Mapping[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
BUDGET: Mapping[str, Any] = {**THINKING, "thinking_token_budget": 6, "max_tokens": 16}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def tokens(servers: Pair, messages: Sequence[Message]) -> list[int]:
    body = {"messages": list(messages), **THINKING}
    found: list[int] = json.loads(post(f"{servers.kvflow.engine('prefill')}/tokenize", body)[1])["tokens"]
    return found


def common(held: list[int], prompt: list[int]) -> int:
    """Tokens that they begin with alike, to the block where the prompt leaves what is held."""
    same = next((i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt)))
    return same if same == len(held) else same - same % BLOCK


def in_the_text(reasoning: str, content: str) -> Message:
    return {"role": "assistant", "content": f"<think>\n{reasoning}\n</think>\n\n{content}"}


def in_its_field(reasoning: str, content: str) -> Message:
    return {"role": "assistant", "content": content, "reasoning": reasoning}


def left_out(_: str, content: str) -> Message:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize("sent_back", [in_the_text, in_its_field, left_out])
def test_three_turns_that_lose_their_thinking(servers: Pair, sent_back: Callable[[str, str], Message]) -> None:
    chat: list[Message] = [user(text(f"Thinking, {sent_back.__name__}"))]
    held: list[int] = []
    for turn in range(3):
        reply = ask(servers.kvflow, chat, **BUDGET)
        prompt = tokens(servers, chat)
        expected = common(held, prompt)
        assert reply.pulled == reply.cached == expected
        assert reply.path == ("pull" if turn else "cold")
        assert turn == 0 or BLOCK <= expected < len(held)
        assert reply.tokens == ask_cold(servers.kvflow, chat, **BUDGET).tokens
        held = prompt + reply.tokens[:-1]
        chat += [sent_back(*thought_and_said(reply)), user(f"And after that? {text(f'Turn {turn}')}")]


def test_thinking_before_a_tool_call_stays(servers: Pair) -> None:
    """No user has spoken since, so the template keeps it, and all that was generated may be reused."""
    chat: list[Message] = [user(text("Thinking, with a tool"))]
    first = ask(servers.kvflow, chat, **BUDGET)
    held = tokens(servers, chat) + first.tokens[:-1]
    call = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    thought, said = thought_and_said(first)
    chat += [{**in_its_field(thought, said), "tool_calls": [call]}]
    chat += [{"role": "tool", "tool_call_id": "call_1", "content": "It is here."}]
    second = ask(servers.kvflow, chat, **BUDGET)
    assert second.path == "pull"
    assert second.pulled == common(held, tokens(servers, chat))
    assert second.tokens == ask_cold(servers.kvflow, chat, **BUDGET).tokens


def thought_and_said(reply: Answer) -> tuple[str, str]:
    message = json.loads(reply.raw)["choices"][0]["message"]
    assert message["reasoning"]
    return message["reasoning"], message["content"] or ""
