"""That the bodies of a simulated engine have the fields of vLLM's, no more and no fewer."""

import json
import subprocess
import sys
from contextlib import aclosing
from typing import Any

import pytest

from kvflow.nodes.simulated import Engine, Fabric, shapes
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


def test_models_and_errors(vllm: dict[str, Any]) -> None:
    assert keys(shapes.models("m", 5)) == keys(vllm["models"])
    assert keys(Refused("x", param=None).body) == keys(vllm["error"])
