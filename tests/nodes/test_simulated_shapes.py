"""That the bodies of a simulated engine have the fields of vLLM's, no more and no fewer."""

import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from kvflow.nodes.simulated import Engine, Fabric, messages, responses, shapes
from kvflow.nodes.simulated.replies import events, reply
from kvflow.nodes.simulated.requests import Call, Refused, chat, completion
from kvflow.types import Role
from tests.nodes.simulation import SMALL

BODY = {"messages": [{"role": "user", "content": "Hello."}], "prompt": "Hello.", "max_tokens": 4}
WITH_USAGE = {**BODY, "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def vllm() -> dict[str, Any]:
    pytest.importorskip("vllm.version")
    command = [sys.executable, "-W", "ignore", "-m", "tests.nodes.vllm_shapes"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    shapes: dict[str, Any] = json.loads(out)
    return shapes


def keys(value: object) -> object:
    """What is left of a body without its values."""
    if isinstance(value, dict):
        return {k: keys(v) for k, v in value.items()}
    return [keys(value[0])] if isinstance(value, list) and value else None


def engine() -> Engine:
    return Engine(role=Role.DECODE, fabric=Fabric(), settings=SMALL)


async def stream(call: Call) -> list[dict[str, Any]]:
    async with aclosing(events(engine(), call)) as parts:
        return [json.loads(e.removeprefix(b"data: ")) async for e in parts if e != shapes.DONE]


async def test_whole_answers(vllm: dict[str, Any]) -> None:
    assert keys(await reply(engine(), chat(BODY, SMALL, None))) == keys(vllm["chat"])
    assert keys(await reply(engine(), completion(BODY, SMALL, None))) == keys(vllm["text"])


async def test_streamed_chats(vllm: dict[str, Any]) -> None:
    *parts, end = await stream(chat({**BODY, "stream": True}, SMALL, None))
    assert [keys(parts[0]), keys(parts[1]), keys(end)] == [
        keys(vllm["chat opening"]),
        keys(vllm["chat chunk"]),
        keys(vllm["chat end"]),
    ]
    usage = (await stream(chat(WITH_USAGE, SMALL, None)))[-1]
    assert keys(usage) == keys(vllm["chat usage"])


async def test_streamed_completions(vllm: dict[str, Any]) -> None:
    first, *_, end = await stream(completion({**BODY, "stream": True}, SMALL, None))
    assert [keys(first), keys(end)] == [keys(vllm["text chunk"]), keys(vllm["text end"])]
    usage = (await stream(completion(WITH_USAGE, SMALL, None)))[-1]
    assert keys(usage) == keys(vllm["text usage"])


async def by_type(events: AsyncGenerator[bytes]) -> dict[str, Any]:
    async with aclosing(events) as parts:
        bodies = [json.loads(e.partition(b"data: ")[2]) async for e in parts]
    return {b["type"]: b for b in bodies}


async def test_responses(vllm: dict[str, Any]) -> None:
    asked = responses.parse({}, {"input": "Hello.", "max_output_tokens": 40}, SMALL)
    assert keys(await responses.reply(engine(), asked)) == keys(vllm["responses"])
    found = await by_type(responses.events(engine(), asked))
    whole = {k: found[k].pop("response") for k in found if "response" in found[k]}
    theirs = vllm["responses events"]
    assert {k: keys(v) for k, v in whole.items()} == {k: keys(theirs[k].pop("response")) for k in whole}
    assert {k: keys(v) for k, v in found.items()} == {k: keys(v) for k, v in theirs.items()}


async def test_messages(vllm: dict[str, Any]) -> None:
    call = messages.parse({**BODY, "model": SMALL.model}, SMALL, None)
    assert keys(await messages.reply(engine(), call)) == keys(vllm["messages"])
    found = await by_type(messages.events(engine(), call))
    assert {k: keys(v) for k, v in found.items()} == {k: keys(v) for k, v in vllm["messages events"].items()}
    assert keys(messages.count(BODY)) == keys(vllm["count_tokens"])
    assert keys(messages.anthropic(Refused("x", param=None)).body) == keys(vllm["messages error"])


def test_models_and_errors(vllm: dict[str, Any]) -> None:
    assert keys(shapes.models("m", 5)) == keys(vllm["models"])
    assert keys(Refused("x", param=None).body) == keys(vllm["error"])
