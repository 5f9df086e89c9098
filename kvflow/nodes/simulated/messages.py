"""`/v1/messages` of a simulated engine: the request as a chat, and the answer, whole or event by event."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from kvflow.connector import wire
from kvflow.nodes.simulated import requests
from kvflow.nodes.simulated.engine import Engine
from kvflow.nodes.simulated.language import tokenize
from kvflow.nodes.simulated.requests import Call, Refused
from kvflow.nodes.simulated.run import Step
from kvflow.nodes.simulated.settings import Settings

_SAME_IN_CHATS = ("cache_salt", "kv_transfer_params", "max_tokens", "model", "stream", "tools")


def parse(body: Mapping[str, Any], settings: Settings, request_id: str | None) -> Call:
    for name in ("model", "messages", "max_tokens"):
        if name not in body:
            raise requests.wrong(f"body.{name}", "missing", "Field required", body)
    try:
        return requests.chat(_as_chat(body), settings, request_id)
    except Refused as e:
        raise e if e.malformed else anthropic(e) from None


def count(body: Mapping[str, Any]) -> dict[str, Any]:
    tokens = len(tokenize(requests.chat_prompt(_as_chat(body))))
    return {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}


def anthropic(error: Refused) -> Refused:
    """The same error in the shape of this endpoint."""
    info = error.body["error"]
    shaped = Refused(str(error), param=None, status=error.status)
    shaped.body = {"type": "error", "error": {"type": info["type"], "message": info["message"]}}
    return shaped


def _as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    messages, system = body.get("messages"), body.get("system")
    if system and isinstance(messages, list):
        messages = [{"role": "system", "content": system}, *messages]
    same = {k: body[k] for k in _SAME_IN_CHATS if k in body}
    return {**same, "messages": messages, "stop": body.get("stop_sequences")}


async def reply(engine: Engine, call: Call) -> dict[str, Any]:
    async with aclosing(engine.generate(call.jobs[0])) as steps:
        answer = [step async for step in steps]
    text, last = "".join(step.text for step in answer), answer[-1]
    params = {} if last.params is None else {"kv_transfer_params": last.params}
    stopped = {k: v for k, v in _stop(last).items() if v is not None}
    content = [{"type": "text", "text": text}]
    return {**_head(call), "content": content, **stopped, "usage": _usage(last, len(answer)), **params}


async def events(engine: Engine, call: Call) -> AsyncGenerator[bytes]:
    number = 0
    async with aclosing(engine.generate(call.jobs[0])) as steps:
        async for step in steps:
            if step.params is not None and not engine.settings.stock:
                yield wire.event(step.params)
            if not number:
                yield _start(call, step)
                yield _event("content_block_start", content_block={"type": "text", "text": ""}, index=0)
            if step.text:
                yield _event("content_block_delta", delta={"type": "text_delta", "text": step.text}, index=0)
            number += 1
    yield _event("content_block_stop", index=0)
    yield _event("message_delta", delta=_stop(step), usage=_usage(step, number))
    yield _event("message_stop")


def _start(call: Call, first: Step) -> bytes:
    usage = {"input_tokens": first.prompt_tokens, "output_tokens": 0}
    unknown = {"stop_reason": None, "stop_sequence": None}
    return _event("message_start", message={**_head(call), "content": [], **unknown, "usage": usage})


def _head(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "message", "role": "assistant", "model": call.model}


def _stop(last: Step) -> dict[str, Any]:
    if last.finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(last.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(last: Step, tokens: int) -> dict[str, Any]:
    fresh = last.prompt_tokens - last.cached_tokens
    return {"input_tokens": fresh, "output_tokens": tokens, "cache_read_input_tokens": last.cached_tokens}


def _event(kind: str, **fields: Any) -> bytes:
    body = json.dumps({"type": kind, **fields}, separators=(",", ":"), ensure_ascii=False)
    return f"event: {kind}\ndata: {body}\n\n".encode()
