"""What a call is answered with: all at once, or event by event."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from kvflow.connector import wire
from kvflow.nodes.simulated import shapes
from kvflow.nodes.simulated.engine import Engine
from kvflow.nodes.simulated.requests import Call
from kvflow.nodes.simulated.run import Step


class _Tally:
    """Tokens of all jobs of a call. Choices of one prompt are the same text, for the model is greedy."""

    def __init__(self, choices: int) -> None:
        self.prompt = self.completion = self.cached = 0
        self._choices = choices

    def add(self, steps: int, last: Step) -> None:
        self.prompt += last.prompt_tokens
        self.completion += steps * self._choices
        self.cached = last.cached_tokens


async def reply(engine: Engine, call: Call) -> dict[str, Any]:
    body, tally = shapes.Body(call), _Tally(call.choices)
    choices: list[dict[str, Any]] = []
    params: list[dict[str, Any] | None] = []
    for job in call.jobs:
        async with aclosing(engine.generate(job)) as steps:
            answer = [step async for step in steps]
        text = call.echo + "".join(step.text for step in answer)
        choices += [body.choice(len(choices) + i, text, answer[-1]) for i in range(call.choices)]
        params.append(answer[-1].params)
        tally.add(len(answer), answer[-1])
    return body.full(choices, shapes.full_usage(tally.prompt, tally.completion, tally.cached), params[0])


async def events(engine: Engine, call: Call) -> AsyncGenerator[bytes]:
    """The handle goes out as soon as the last output exists and before it."""
    body, tally = shapes.Body(call), _Tally(call.choices)
    for number, job in enumerate(call.jobs):
        count = 0
        async with aclosing(engine.generate(job)) as steps:
            async for step in steps:
                if step.params is not None and not engine.settings.stock:
                    yield wire.event(step.params)
                for index in range(number * call.choices, (number + 1) * call.choices):
                    for chunk in _chunks(body, call, index, step, count):
                        yield shapes.event(chunk)
                count += 1
        tally.add(count, step)
    if call.include_usage:
        yield shapes.event(body.usage_chunk(shapes.usage(tally.prompt, tally.completion, tally.cached)))
    yield shapes.DONE


def _chunks(body: shapes.Body, call: Call, index: int, step: Step, before: int) -> list[dict[str, Any]]:
    """The chunks of one choice for one step that `before` others have gone before."""
    echoed = call.echo if before == 0 else ""
    chunks = [body.chunk(index, replace(step, text=echoed + step.text))]
    if call.usage_in_chunks:
        chunks[0]["usage"] = shapes.usage(step.prompt_tokens, before + 1)
    if call.chat and before == 0:
        usage = {"usage": shapes.usage(step.prompt_tokens, 0)} if call.usage_in_chunks else {}
        chunks.insert(0, {**body.opening(index), **usage})
    return chunks
