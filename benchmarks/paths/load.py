"""What else the nodes are doing while a turn is measured."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from benchmarks.paths.client import Client
from benchmarks.paths.grid import Load, words

PREFILL_TOKENS = 400
STREAMS = 4
STREAM_TOKENS = 400
_ONCE = {"x-kvflow-retain": "no"}
_HEAD_START_S = 0.05


@asynccontextmanager
async def loaded(load: Load, client: Client, seed: object) -> AsyncIterator[None]:
    """The load is there when the context is entered, and gone when it is left. Nothing of it is kept."""
    match load:
        case Load.IDLE:
            yield
        case Load.PREFILL:
            async with _prefilling(client, seed):
                yield
        case Load.DECODE:
            async with _decoding(client, seed):
                yield


@asynccontextmanager
async def _prefilling(client: Client, seed: object) -> AsyncIterator[None]:
    prompt = [{"role": "user", "content": words(PREFILL_TOKENS, ("load", seed))}]
    busy = asyncio.create_task(client.ask(prompt, tokens=1, headers=_ONCE), name="load")
    await asyncio.sleep(_HEAD_START_S)  # it must be the first to arrive, and that nobody announces
    try:
        yield
    finally:
        await busy


@asynccontextmanager
async def _decoding(client: Client, seed: object) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for number in range(STREAMS):
            prompt = [{"role": "user", "content": words(24, ("load", number, seed))}]
            answer = await stack.enter_async_context(client.stream(prompt, tokens=STREAM_TOKENS, headers=_ONCE))
            await answer.content.readany()  # it has begun
            draining = asyncio.create_task(answer.content.read(), name="load")
            stack.push_async_callback(_cancelled, draining)
        yield


async def _cancelled(task: asyncio.Task[bytes]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
