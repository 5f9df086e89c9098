"""A whole kvflow in one event loop: simulated nodes, the router in front of them, and a client."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvicorn
import yarl

from kvflow.config import compose, load
from kvflow.graph import build
from kvflow.nodes.base import NodeSpec
from kvflow.nodes.simulated import Clock, Fabric, ManualClock, RealClock, Settings, SimulatedNode
from kvflow.nodes.simulated.language import render, tokenize
from kvflow.policies import Policy
from kvflow.router import Router
from kvflow.router import Settings as RouterSettings
from kvflow.router.admin import Control
from kvflow.tenants import Tenants
from kvflow.types import Role
from tests.net import free_ports

BLOCK = 16
Message = dict[str, Any]


def say(user: str, *rest: str, system: str | None = None) -> list[Message]:
    """Messages by user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate((user, *rest))]
    return [{"role": "system", "content": system}, *messages] if system else messages


def text(words: int, seed: str = "word") -> str:
    """About `words` tokens, different for every seed."""
    return " ".join(f"{seed}{i % 89}" for i in range(words))


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> dict[str, Any]:
        body = json.loads(self.raw)
        assert isinstance(body, dict)
        return body

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = [e.removeprefix(b"data: ") for e in self.raw.split(b"\n\n") if e]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def text(self) -> str:
        assert self.status == 200, self.raw
        if not self.headers["content-type"].startswith("text/event-stream"):
            choice = self.json["choices"][0]
            return str(choice["message"]["content"] if "message" in choice else choice["text"])
        choices = [c for e in self.events for c in e.get("choices", [])]
        return "".join((c["delta"].get("content") or "") if "delta" in c else c["text"] for c in choices)

    @property
    def path(self) -> str:
        return self.headers["x-kvflow-path"]

    @property
    def reason(self) -> str | None:
        return self.headers.get("x-kvflow-reason")

    @property
    def pulled(self) -> int:
        return int(self.headers["x-kvflow-pulled-tokens"])


async def _reply(response: aiohttp.ClientResponse) -> Reply:
    return Reply(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())


@dataclass(slots=True)
class Cluster:
    router: Router
    nodes: dict[str, SimulatedNode]
    reference: SimulatedNode
    """An engine that nobody else talks to: what it answers is right."""
    url: str
    session: aiohttp.ClientSession
    clock: Clock = field(default_factory=RealClock)

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None, url: str = "") -> Reply:
        async with self.session.post((url or self.url) + path, json=body, headers=headers) as response:
            return await _reply(response)

    async def chat(self, messages: Sequence[Message], headers: dict[str, str] | None = None, **body: Any) -> Reply:
        return await self.post("/v1/chat/completions", {"messages": list(messages), **body}, headers)

    async def delete(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        async with self.session.delete(yarl.URL(self.url + path, encoded=True), headers=headers) as response:
            return await _reply(response)

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        async with self.session.get(self.url + path, headers=headers) as response:
            return await _reply(response)

    async def right(self, messages: Sequence[Message], **body: Any) -> str:
        """The answer of one engine on its own."""
        url = self.reference.spec.url
        return (await self.post("/v1/chat/completions", {"messages": list(messages), **body}, url=url)).text

    async def probe(self) -> None:
        for name in self.nodes:
            await self.router.fleet.probe(name)

    def advance(self, seconds: float) -> None:
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(seconds)

    def check(self) -> None:
        """Nothing runs, and every block of every engine is accounted for."""
        for node in self.nodes.values():
            occupancy = node.engine.occupancy()
            assert node.engine.check() == []
            assert (occupancy.running, occupancy.waiting) == (0, 0)


@asynccontextmanager
async def cluster(
    *,
    prefill: int = 1,
    decode: int = 1,
    policy: str | Policy = "balanced",
    tenants: Tenants | None = None,
    settings: Callable[[Role], Settings] = lambda _: Settings(block_size=BLOCK, prefix_caching=False),
    clock: Clock | None = None,
    router_settings: RouterSettings | None = None,
    control: Control | None = None,
) -> AsyncIterator[Cluster]:
    """Prefix caching is off unless asked for, so that what is reused was pulled. `tenants` in place of one policy."""
    clock = clock or RealClock()
    fabric = Fabric()
    specs = [NodeSpec(name=f"{Role.PREFILL}-{i}", role=Role.PREFILL, url=_free_url()) for i in range(prefill)]
    specs += [NodeSpec(name=f"{Role.DECODE}-{i}", role=Role.DECODE, url=_free_url()) for i in range(decode)]
    reference_spec = NodeSpec(name="reference", role=Role.DECODE, url=_free_url())
    nodes = {s.name: SimulatedNode(s, settings(s.role), fabric, clock=clock) for s in specs}
    reference = SimulatedNode(reference_spec, settings(Role.DECODE), Fabric())
    chosen = policy if isinstance(policy, Policy) else shipped_policy(policy)
    slow_probes = router_settings or RouterSettings(probe_interval_s=3600)
    router = Router(specs, tenants or Tenants.single(chosen), slow_probes, control=control, clock=clock.now)
    async with AsyncExitStack() as stack:
        for node in (*nodes.values(), reference):
            await node.start()
            stack.push_async_callback(node.stop)
        url = await stack.enter_async_context(_served(router))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        running = Cluster(router, nodes, reference, url, session, clock)
        await running.probe()
        yield running


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nothing announces."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def shipped_policy(name: str, *overrides: str) -> Policy:
    return build(load(compose("serve", [f"policy={name}", "cluster=simulated", *overrides]))).policy


def common_prefix(held: Sequence[Message], prompt: Sequence[Message]) -> int:
    """Tokens of `prompt` that a node holding the chat `held` (its answer last) can give: whole blocks, or all it has.

    The last token of an answer has been sampled and not read, so its KV does not exist.
    """
    *history, answer = held
    kept, wanted = tokenize(render(history) + answer["content"]), tokenize(render(prompt))
    differ = (i for i, (a, b) in enumerate(zip(kept, wanted, strict=False)) if a != b)
    return next(differ, min(len(kept), len(wanted)))


@asynccontextmanager
async def _served(router: Router) -> AsyncIterator[str]:
    config = uvicorn.Config(router.app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=5)
    server = _Server(config)
    # With the protocol named, asyncio sends what is written at once.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        serving = asyncio.create_task(server.serve([listener]))
        await until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _free_url() -> str:
    return f"http://127.0.0.1:{free_ports(1)[0]}"
