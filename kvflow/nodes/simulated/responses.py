"""`/v1/responses` of a simulated engine: the request as a chat, and the answer, whole or event by event."""

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from kvflow.connector import wire
from kvflow.nodes.simulated import requests
from kvflow.nodes.simulated.engine import Engine
from kvflow.nodes.simulated.requests import Call, Refused
from kvflow.nodes.simulated.run import Step
from kvflow.nodes.simulated.settings import Settings

_SAME_IN_CHATS = (
    "cache_salt",
    "ignore_eos",
    "kv_transfer_params",
    "model",
    "stop",
    "stop_token_ids",
    "stream",
    "tools",
)
_DEFAULTS: dict[str, Any] = {
    "instructions": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "none",
    "tools": [],
    "top_p": 1.0,
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt": None,
    "reasoning": None,
    "service_tier": "auto",
    "text": None,
    "truncation": "disabled",
    "user": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Of what is echoed from the request."""
_ALWAYS_NULL = ("top_logprobs", "ec_transfer_params", "input_messages", "output_messages")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, understood."""

    call: Call
    body: Mapping[str, Any]
    messages: Sequence[Message]
    store: "Store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An answer that later requests can refer to."""

    messages: Sequence[Message]
    """All that was said, the answer last."""
    response: Mapping[str, Any]


Store = dict[str, Stored]


def not_found(response: str) -> Refused:
    message = f"Response with id '{response}' not found."
    return Refused(message, param="response_id", status=404, kind="invalid_request_error")


def parse(store: Store, body: Mapping[str, Any], settings: Settings, _: str | None = None) -> Asked:
    said = body.get("input")
    if "input" not in body:
        raise requests.wrong("body.input", "missing", "Field required", body)
    if not isinstance(said, str | list):
        raise requests.wrong("body.input", "list_type", "Input should be a valid list", said)
    requests.check_model(body, settings)
    messages = [*_earlier(body, store), *_messages(said)]
    instructions = body.get("instructions")
    shown = [{"role": "system", "content": instructions}, *messages] if instructions else messages
    same = {k: body[k] for k in _SAME_IN_CHATS if k in body}
    chat = {**same, "messages": shown, "max_completion_tokens": body.get("max_output_tokens")}
    call = requests.chat(chat, settings, None)
    name = body.get("request_id") or f"resp_{uuid4().hex[:16]}"
    return Asked(call=replace(call, id=name), body=body, messages=messages, store=store)


def _earlier(body: Mapping[str, Any], store: Store) -> Sequence[Message]:
    name = body.get("previous_response_id")
    if name is None:
        return ()
    if name not in store:
        raise not_found(name)
    return store[name].messages


def _messages(said: str | list[Any]) -> list[Message]:
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    return [_message(item) for item in said if item.get("type") != "reasoning"]


def _message(item: Mapping[str, Any]) -> Message:
    if item.get("type") == "function_call":
        return {"role": "assistant", "tool_calls": [item]}
    if item.get("type") == "function_call_output":
        return {"role": "tool", "content": item.get("output")}
    return {"role": item.get("role"), "content": item.get("content")}


class Answer:
    """What all parts of the answer to one request share."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.text = ""
        self.tokens = 0
        self._created = int(time.time())
        self._item = f"msg_{uuid4().hex[:16]}"
        self._sequence = 0

    def add(self, step: Step) -> None:
        self.text += step.text
        self.tokens += 1

    def response(self, last: Step | None = None) -> dict[str, Any]:
        """Without `last`, as it is at the beginning."""
        status = "in_progress" if last is None else "incomplete" if last.finish == "length" else "completed"
        return {
            "id": self.asked.call.id,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.asked.call.model,
            "object": "response",
            "output": [self._message("completed")] if last else [],
            "max_output_tokens": self.asked.call.jobs[0].max_tokens,
            "status": status,
            "usage": self._usage(last) if last else None,
            "kv_transfer_params": last.params if last else None,
            **{k: self.asked.body.get(k, default) for k, default in _DEFAULTS.items()},
            **dict.fromkeys(_ALWAYS_NULL),
        }

    def stored(self, last: Step) -> Stored:
        messages = [*self.asked.messages, {"role": "assistant", "content": self.text}]
        return Stored(messages=messages, response=self.response(last))

    def opening(self) -> list[bytes]:
        response = self.response()
        text = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", item=self._message("in_progress"), output_index=0),
            self._event("response.content_part.added", **self._place(), part=text),
        ]

    def delta(self, text: str) -> bytes:
        return self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def closing(self, last: Step) -> list[bytes]:
        message = self._message("completed")
        return [
            self._event("response.output_text.done", **self._place(), text=self.text, logprobs=[]),
            self._event("response.content_part.done", **self._place(), part=message["content"][0]),
            self._event("response.output_item.done", item=message, output_index=0),
            self._event("response.completed", response=self.response(last)),
        ]

    def _place(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self._item, "output_index": 0}

    def _message(self, status: str) -> dict[str, Any]:
        text: dict[str, Any] = {"annotations": [], "text": self.text, "type": "output_text", "logprobs": None}
        content = [text] if status == "completed" else []
        head = {"id": self._item, "role": "assistant", "status": status, "type": "message"}
        return {**head, "content": content, "phase": None}

    def _usage(self, last: Step) -> dict[str, Any]:
        per_turn: dict[str, Any] = {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
        tool: dict[str, Any] = {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
        return {
            "input_tokens": last.prompt_tokens,
            "input_tokens_details": {"cached_tokens": last.cached_tokens, "cache_write_tokens": 0, **per_turn},
            "output_tokens": self.tokens,
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0, **tool},
            "total_tokens": last.prompt_tokens + self.tokens,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return f"event: {kind}\ndata: {json.dumps(body, separators=(',', ':'), ensure_ascii=False)}\n\n".encode()


async def reply(engine: Engine, asked: Asked) -> dict[str, Any]:
    answer = Answer(asked)
    async with aclosing(engine.generate(asked.call.jobs[0])) as steps:
        async for step in steps:
            answer.add(step)
    _keep(answer, step)
    return answer.response(step)


async def events(engine: Engine, asked: Asked) -> AsyncGenerator[bytes]:
    answer = Answer(asked)
    for event in answer.opening():
        yield event
    async with aclosing(engine.generate(asked.call.jobs[0])) as steps:
        async for step in steps:
            answer.add(step)
            if step.params is not None and not engine.settings.stock:
                yield wire.event(step.params)
            if step.text:
                yield answer.delta(step.text)
    _keep(answer, step)
    for event in answer.closing(step):
        yield event


def _keep(answer: Answer, last: Step) -> None:
    if answer.asked.body.get("store", True):
        answer.asked.store[answer.asked.call.id] = answer.stored(last)
