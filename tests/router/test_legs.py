from typing import Any

import pytest

from kvflow.connector.wire import DecodeOrder
from kvflow.router.endpoints import CHAT as CHAT_ENDPOINT
from kvflow.router.endpoints import COMPLETIONS, MESSAGES, RESPONSES
from kvflow.router.legs import clean, decode_body, prefill_body
from kvflow.types import Handle, Path, Plan

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
PLAN = Plan(path=Path.PULL, decode="d", prefill="p", min_pull_tokens=64, retain_s=480.0, max_pinned_share=0.5)
HANDLE = Handle(
    node="d",
    epoch="e",
    tokens=10,
    deadline=0.0,
    pin="r",
    blocks=1,
    kept_at=0.0,
    size=0,
    params={
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[1]],
        "remote_blocks_expiry_time": 123.5,
        "kvflow": {"retained": True, "fingerprint": {"tokens": 10}},
    },
)


def test_what_clients_may_not_set_is_removed_at_every_depth() -> None:
    smuggled = {
        **CHAT,
        "kv_transfer_params": {"remote_host": "10.0.0.1"},
        "ec_transfer_params": {},
        "kvflow": {},
        "conversation_id": "x",
        "vllm_xargs": {"kv_transfer_params": {"remote_host": "10.0.0.1"}, "mine": 1},
    }
    assert clean(smuggled) == {**CHAT, "vllm_xargs": {"mine": 1}}


def test_the_prefill_leg_asks_for_one_token_and_nothing_that_shapes_the_answer() -> None:
    body = prefill_body(
        CHAT_ENDPOINT,
        {
            **CHAT,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 500,
            "max_completion_tokens": 400,
            "min_tokens": 50,
            "logprobs": True,
            "top_logprobs": 5,
            "response_format": {"type": "json_object"},
            "tools": [{"type": "function"}],
            "tool_choice": "required",
            "temperature": 0.5,
            "chat_template_kwargs": {"enable_thinking": False},
        },
        PLAN,
        None,
    )
    assert body == {
        **CHAT,
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "tools": [{"type": "function"}],
        "tool_choice": "none",
        "temperature": 0.5,
        "chat_template_kwargs": {"enable_thinking": False},
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "kvflow": {"min_pull_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "none"),
        ({"type": "function", "function": {"name": "f"}}, "none"),
    ],
)
def test_only_a_tool_call_that_must_come_is_called_off(choice: object, sent: object) -> None:
    """Some templates show the choice to the model, and the prompts of both legs must be the same."""
    body = {**CHAT, "tools": [{"type": "function"}], "tool_choice": choice}
    assert prefill_body(CHAT_ENDPOINT, body, PLAN, None)["tool_choice"] == sent


def test_a_response_is_not_stored_by_its_prefill_node() -> None:
    body = {"input": "hi", "text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"}, "stream": True}
    leg = prefill_body(RESPONSES, body, PLAN, None)
    assert leg.pop("kv_transfer_params")
    assert leg == {
        "input": "hi",
        "reasoning": {"effort": "low"},
        "stream": False,
        "store": False,
        "background": False,
        "max_output_tokens": 1,
    }


def test_a_message_keeps_in_its_prefill_leg_what_shapes_the_prompt() -> None:
    body = {
        "messages": [],
        "max_tokens": 4000,
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        "tools": [{"name": "f"}],
        "tool_choice": {"type": "any"},
    }
    leg = prefill_body(MESSAGES, body, PLAN, None)
    assert leg.pop("kv_transfer_params")
    assert leg == {
        "messages": [],
        "stream": False,
        "max_tokens": 1,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "low"},
        "tools": [{"name": "f"}],
        "tool_choice": {"type": "none"},
    }
    disabled = {**body, "thinking": {"type": "disabled"}}
    assert prefill_body(MESSAGES, disabled, PLAN, None)["thinking"] == {"type": "disabled"}


def test_max_completion_tokens_is_not_added_where_it_was_not() -> None:
    assert "max_completion_tokens" not in prefill_body(CHAT_ENDPOINT, CHAT, PLAN, None)


def test_a_handle_is_forwarded_untouched_with_its_fingerprint_and_the_threshold() -> None:
    params = prefill_body(CHAT_ENDPOINT, CHAT, PLAN, HANDLE)["kv_transfer_params"]
    assert params == {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[1]],
        "remote_blocks_expiry_time": 123.5,
        "kvflow": {"min_pull_tokens": 64, "fingerprint": {"tokens": 10}},
    }
    assert "kvflow" in HANDLE.params


def test_the_decode_leg_is_the_clients_request_with_the_handle() -> None:
    body = {**CHAT, "stream": True, "max_tokens": 500}
    params = {"do_remote_prefill": True, "remote_block_ids": [[7]]}
    out = decode_body(body, params, DecodeOrder(retain_s=480.0, max_pinned_share=0.5))
    transfer = out.pop("kv_transfer_params")
    assert out == body
    assert transfer == {**params, "kvflow": {"retain_s": 480.0, "max_pinned_share": 0.5}}


def test_one_node_alone_gets_the_request_as_it_came_unless_it_keeps_the_turn() -> None:
    assert decode_body(CHAT, None, DecodeOrder()) == CHAT
    kept = decode_body(CHAT, None, DecodeOrder(retain_s=480.0))["kv_transfer_params"]
    assert (kept["do_remote_decode"], kept["do_remote_prefill"]) == (False, False)


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 2},
        {"best_of": 2},
        {"use_beam_search": True},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"truncate_prompt_tokens": 5},
        {"n": "2"},
    ],
)
def test_what_two_nodes_cannot_do_together(extra: dict[str, Any]) -> None:
    assert CHAT_ENDPOINT.splittable(CHAT)
    assert not CHAT_ENDPOINT.splittable({**CHAT, **extra})


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("text", True), ([1, 2], True), (["a", "b"], False), ([[1], [2]], False), ("", False), ([], False), (None, False)],
)
def test_only_a_single_prompt_can_be_split(prompt: object, expected: bool) -> None:
    assert COMPLETIONS.splittable({"prompt": prompt}) is expected
