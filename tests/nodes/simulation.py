"""Two simulated engines and what a router would say to them, without HTTP."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from kvflow.connector.wire import KEY, DecodeOrder, DecodeReport, PrefillOrder, PrefillReport
from kvflow.nodes.simulated import Engine, Fabric, ManualClock, Settings
from kvflow.nodes.simulated.language import render, tokenize
from kvflow.nodes.simulated.run import Job, Step
from kvflow.types import Role

SMALL = Settings(block_size=4, blocks=256, max_model_len=512, prefix_caching=False)
COLD: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
DIRECT: dict[str, Any] = {"do_remote_decode": False, "do_remote_prefill": False}

_numbers = count()


class EagerClock(ManualClock):
    """Time passes as soon as somebody waits for it; `slept` is the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.slept = 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.advance(seconds)
        await asyncio.sleep(0)


@dataclass(frozen=True)
class Answer:
    text: str
    last: Step
    tokens: int

    @property
    def handle(self) -> dict[str, Any]:
        assert self.last.params is not None
        return self.last.params

    @property
    def prefill(self) -> PrefillReport:
        return PrefillReport.from_wire(self.handle[KEY])

    @property
    def decode(self) -> DecodeReport:
        return DecodeReport.from_wire(self.handle[KEY])


def job(prompt: str, params: Mapping[str, Any] | None = None, **fields: Any) -> Job:
    defaults: dict[str, Any] = {"request_id": f"r{next(_numbers)}", "max_tokens": 100, "params": dict(params or {})}
    return Job(prompt=tuple(tokenize(prompt)), **{**defaults, **fields})


async def ask(engine: Engine, work: Job) -> Answer:
    async with aclosing(engine.generate(work)) as steps:
        answer = [step async for step in steps]
    assert [s.finish for s in answer[:-1]] == [None] * (len(answer) - 1)
    return Answer("".join(s.text for s in answer), answer[-1], len(answer))


async def alone(prompt: str, settings: Settings = SMALL, **fields: Any) -> str:
    """What a single engine that never saw anything else answers."""
    engine = Engine(role=Role.DECODE, fabric=Fabric(), settings=replace(settings, stock=True))
    return (await ask(engine, job(prompt, **fields))).text


class Pair:
    def __init__(self, prefill: Settings = SMALL, decode: Settings = SMALL, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.fabric = Fabric()
        self.prefill = Engine(role=Role.PREFILL, fabric=self.fabric, settings=prefill, clock=self.clock)
        self.decode = Engine(role=Role.DECODE, fabric=self.fabric, settings=decode, clock=self.clock)
        for engine in (self.prefill, self.decode):
            engine.join()

    async def prefill_leg(
        self, prompt: str, handle: Mapping[str, Any] | None = None, min_pull_tokens: int = 0, **fields: Any
    ) -> Answer:
        order = PrefillOrder(
            min_pull_tokens=min_pull_tokens, fingerprint=(handle or {}).get(KEY, {}).get("fingerprint")
        )
        params = {**(handle or {}), **COLD, KEY: order.to_wire()}
        return await ask(self.prefill, job(prompt, params, **{**fields, "max_tokens": 1}))

    async def decode_leg(
        self, prompt: str, prefilled: Mapping[str, Any], retain_s: float = 480.0, share: float = 0.5, **fields: Any
    ) -> Answer:
        order = DecodeOrder(retain_s=retain_s, max_pinned_share=share)
        return await ask(self.decode, job(prompt, {**prefilled, KEY: order.to_wire()}, **fields))

    async def turn(
        self,
        prompt: str,
        handle: Mapping[str, Any] | None = None,
        retain_s: float = 480.0,
        share: float = 0.5,
        **fields: Any,
    ) -> tuple[Answer, Answer]:
        """What the two legs answered."""
        first = await self.prefill_leg(prompt, handle, **fields)
        return first, await self.decode_leg(prompt, first.handle, retain_s, share, **fields)

    def check(self) -> None:
        assert self.prefill.check() == []
        assert self.decode.check() == []


def chat(*texts: str) -> str:
    """The prompt of a conversation: user, assistant, user, ..."""
    return render([{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)])


def common(a: str, b: str) -> int:
    """Tokens that two prompts have in common at their beginning."""
    pairs = zip(tokenize(a), tokenize(b), strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(tokenize(a)), len(tokenize(b))))


async def settle() -> None:
    """Let everything run that can run without time passing."""
    for _ in range(50):
        await asyncio.sleep(0)
