"""What was said in a request, as a list of messages, wherever its endpoint carries them.

Only for finding conversations: what two requests share is settled by the engine, token by token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Body = Mapping[str, Any]

_BILLING = "x-anthropic-billing-header"
"""How a block begins that coding agents put in front of each request, new every time; vLLM leaves it out as well."""


def chat_messages(body: Body) -> Sequence[Message] | None:
    """None where they are none; the engine will say so."""
    return _all_messages(body.get("messages"))


def anthropic_messages(body: Body) -> Sequence[Message] | None:
    messages = _all_messages(body.get("messages"))
    return None if messages is None else [*_instructions(_without_billing(body.get("system"))), *messages]


def responses_items(body: Body) -> Sequence[Message] | None:
    said = body.get("input")
    items = [{"role": "user", "content": said}] if isinstance(said, str) else _all_messages(said)
    return None if items is None else [*_instructions(body.get("instructions")), *items]


def by_model(message: Message) -> bool:
    """Whether the model said it: an answer, or an item of one."""
    if message.get("role") is not None:
        return bool(message["role"] == "assistant")
    kind = message.get("type")
    return isinstance(kind, str) and (kind == "reasoning" or kind.endswith("_call"))


def settled(message: Message) -> Message:
    """The same for all ways in which clients send the same message again.

    They move `cache_control` to the newest message, and write one block of text as a string or as a list.
    """
    out = {k: v for k, v in message.items() if k != "cache_control" and (k, v) != ("type", "message")}
    content = message.get("content")
    if isinstance(content, list):
        blocks = [_settled_block(b) if isinstance(b, Mapping) else b for b in content]
        out["content"] = blocks[0]["text"] if len(blocks) == 1 and _is_plain(blocks[0]) else blocks
    return out


def _settled_block(block: Message) -> Message:
    return {k: v for k, v in block.items() if k != "cache_control"}


def _is_plain(block: object) -> bool:
    return isinstance(block, Mapping) and block.keys() == {"type", "text"} and isinstance(block["text"], str)


def _all_messages(value: object) -> Sequence[Message] | None:
    return value if isinstance(value, list) and all(isinstance(m, Mapping) for m in value) else None


def _instructions(text: object) -> list[Message]:
    return [{"role": "system", "content": text}] if text else []


def _without_billing(system: object) -> object:
    if not isinstance(system, list):
        return system
    return [b for b in system if not (isinstance(b, Mapping) and str(b.get("text")).startswith(_BILLING))]
