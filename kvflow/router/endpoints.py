"""The endpoints that serve turns, and all in which they differ. Each is the engine's own, under the same path.

Read from `entrypoints/openai/{chat_completion,completion,responses}` and `entrypoints/anthropic` of vLLM 0.32.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvflow.router.history import Body, Message, anthropic_messages, chat_messages, responses_items

_CLIENT_SIDE_TOOLS = frozenset({"function", "custom", "namespace"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    path: str
    messages: Callable[[Body], Sequence[Message] | None] | None
    """What a conversation is found by; None where the prompt is plain text or token ids."""
    splittable: Callable[[Body], bool]
    """Whether two nodes can serve the request as one would."""
    keepable: Callable[[Body], bool] = lambda _: True
    """Whether the answer brings the handle of all that the engine would keep."""
    answer_fields: frozenset[str]
    """Fields that shape the answer and leave the prompt alone; the prefill leg's one token is thrown away."""
    prefill_fields: Mapping[str, Any]
    """What the prefill leg says whatever the client said."""
    other_limits: frozenset[str] = frozenset()
    """Fields that bound the answer too, where the client sets them."""
    no_tool: object = "none"
    """`tool_choice` for: no tool is called."""
    prefill_forms: Callable[[dict[str, Any]], None] = lambda _: None
    """Changes inside fields that shape both the prompt and the answer."""
    shows_nulls: bool = True
    """Whether the engine's answer has the fields that are null."""
    stores: bool = False
    """Whether the engine can keep answers for later requests to refer to."""

    def longest_answer(self, body: Body) -> int | None:
        """Tokens, by the client's own limits; None where it set none."""
        names = (*(k for k in self.prefill_fields if k.startswith("max_")), *self.other_limits)
        limits = [v for k in names if type(v := body.get(k)) is int and v >= 0]
        return min(limits, default=None)


def _one_choice(body: Body) -> bool:
    """A handle is read once, so several choices cannot share one; log-probabilities of the prompt, and what `echo` adds
    to them, exist only where the prompt is computed; truncation depends on the output length, which differs between the
    legs.
    """
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
        return False
    if any(body.get(k) not in (None, False) for k in ("use_beam_search", "echo")):
        return False
    return all(body.get(k) is None for k in ("prompt_logprobs", "prompt_embeds", "truncate_prompt_tokens", "suffix"))


def _splittable_chat(body: Body) -> bool:
    return "messages" in body and _one_choice(body)


def _splittable_completion(body: Body) -> bool:
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return bool(prompt) and all(type(t) is int for t in prompt) and _one_choice(body)
    return isinstance(prompt, str) and prompt != "" and _one_choice(body)


def _splittable_response(body: Body) -> bool:
    """Any other `truncation`, null too, truncates, which depends on the output length."""
    return bool(body.get("input")) and body.get("truncation", "disabled") == "disabled" and _one_generation(body)


def _one_generation(body: Body) -> bool:
    """Tools that the server calls make several requests to the engine out of one, and a background request answers
    before its turn has ended; neither brings back all handles."""
    tools = body.get("tools") or []
    if body.get("background") or not isinstance(tools, list):
        return False
    return all(isinstance(t, Mapping) and t.get("type") in _CLIENT_SIDE_TOOLS for t in tools)


def _thin_messages(body: dict[str, Any]) -> None:
    """A thinking budget must be below `max_tokens`, and only the engine of the decode leg needs it and the format."""
    thinking, config = body.get("thinking"), body.get("output_config")
    if isinstance(thinking, Mapping) and thinking.get("type") == "enabled":
        body["thinking"] = {"type": "adaptive"}
    if isinstance(config, Mapping):
        body["output_config"] = {k: v for k, v in config.items() if k != "format"}


_OPENAI_ANSWER_FIELDS = frozenset(
    {
        "best_of",
        "include_reasoning",
        "logprob_token_ids",
        "logprobs",
        "min_tokens",
        "response_format",
        "return_prompt_text",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "stream_options",
        "structured_outputs",
        "thinking_token_budget",
        "top_logprobs",
    }
)

CHAT = Endpoint(
    path="/v1/chat/completions",
    messages=chat_messages,
    splittable=_splittable_chat,
    answer_fields=_OPENAI_ANSWER_FIELDS,
    prefill_fields={"stream": False, "max_tokens": 1},
    other_limits=frozenset({"max_completion_tokens"}),
)
COMPLETIONS = Endpoint(
    path="/v1/completions",
    messages=None,
    splittable=_splittable_completion,
    answer_fields=_OPENAI_ANSWER_FIELDS,
    prefill_fields={"stream": False, "max_tokens": 1},
)
RESPONSES = Endpoint(
    path="/v1/responses",
    messages=responses_items,
    splittable=_splittable_response,
    keepable=_one_generation,
    answer_fields=frozenset(
        {"enable_response_messages", "include", "include_reasoning", "structured_outputs", "text", "top_logprobs"}
    ),
    prefill_fields={"stream": False, "store": False, "background": False, "max_output_tokens": 1},
    stores=True,
)
MESSAGES = Endpoint(
    path="/v1/messages",
    messages=anthropic_messages,
    splittable=_splittable_chat,
    answer_fields=frozenset(),
    prefill_fields={"stream": False, "max_tokens": 1},
    no_tool={"type": "none"},
    prefill_forms=_thin_messages,
    shows_nulls=False,
)

ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
