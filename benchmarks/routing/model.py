"""The model of the pools: what a turn takes on nodes, and what they keep."""

import random
from collections import OrderedDict
from dataclasses import dataclass, field

from kvflow.types import Blocks, Cost, Handle, NodeState, Role, View, Worked

BLOCK = 16
DECODE_BLOCKS = 24_000
CACHE_TOKENS = 300_000
"""Of a prefill node's prefix cache."""
COMPUTE = Cost(fixed_s=2e-3, token_s=100e-6)
TRANSFER = Cost(fixed_s=12.5e-3, token_s=5e-6)
TOKEN_S = 0.01
"""Of an answer, from a decode node with nothing else to do; twice that at `SLOW_AT` legs."""
SLOW_AT = 32
MAX_TOKENS = 16_000
SYSTEM_TOKENS = 1500


@dataclass(slots=True)
class Conversation:
    number: int
    group: int
    life: int = 0
    """A conversation that has got too long is followed by a new one of the same user."""
    ends: list[int] = field(default_factory=list)
    """Tokens at the end of each of its prompts and answers, in turn."""
    busy: bool = False
    handle: Handle | None = None

    def tokens(self) -> int:
        return self.ends[-1] if self.ends else SYSTEM_TOKENS

    def restart(self) -> None:
        self.life += 1
        self.ends = []
        self.handle = None

    def names(self) -> list[tuple[str, int]]:
        """Of the prompt's beginnings, shortest first, with their tokens."""
        own = [(f"{self.number}/{self.life}/{i}", tokens) for i, tokens in enumerate(self.ends) if i % 2 == 0]
        return [(f"group {self.group}", SYSTEM_TOKENS), *own]


@dataclass(slots=True)
class Node:
    name: str
    role: Role
    in_flight: int = 0
    queued_tokens: int = 0
    free_at: float = 0.0
    load_s: float = 0.0
    worked: Worked = field(default_factory=Worked)
    cache: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Beginnings of prompts, with the tokens that each adds to the one before it."""
    held: int = 0
    """Tokens in `cache`."""
    pinned: int = 0
    """Blocks."""

    def state(self) -> NodeState:
        blocks = Blocks(free=DECODE_BLOCKS - self.pinned, pinned=self.pinned, total=DECODE_BLOCKS)
        return NodeState(
            name=self.name,
            role=self.role,
            epoch="e",
            in_flight=self.in_flight,
            queued_tokens=self.queued_tokens,
            blocks=blocks if self.role is Role.DECODE else None,
            block_size=BLOCK,
            compute=COMPUTE,
            free_at=self.free_at,
            worked=self.worked,
        )

    def work(self, seconds: float, now: float) -> None:
        self.load_s += seconds
        self.worked = self.worked.plus(seconds, now)

    def begin(self, tokens: int) -> None:
        self.in_flight += 1
        self.queued_tokens += tokens

    def end(self, tokens: int) -> None:
        self.in_flight -= 1
        self.queued_tokens -= tokens

    def cached(self, names: list[tuple[str, int]]) -> int:
        """Tokens of a prompt's beginning that the prefix cache has."""
        found = 0
        for name, tokens in names:
            if name not in self.cache:
                break
            self.cache.move_to_end(name)
            found = tokens
        return found

    def fill(self, names: list[tuple[str, int]]) -> None:
        """A prompt has been computed: all its beginnings are cached, and what was used least lately goes."""
        before = 0
        for name, tokens in names:
            self.held += tokens - before - self.cache.pop(name, 0)
            self.cache[name] = tokens - before
            before = tokens
        while self.held > CACHE_TOKENS:
            self.held -= self.cache.popitem(last=False)[1]


def view(now: float, nodes: dict[str, Node]) -> View:
    states = [n.state() for n in nodes.values()]
    transfers = {(a.name, b.name): TRANSFER for a in states for b in states if a.role is not b.role}
    return View(
        now=now,
        prefill=tuple(s for s in states if s.role is Role.PREFILL),
        decode=tuple(s for s in states if s.role is Role.DECODE),
        transfers=transfers,
    )


def conversations(rng: random.Random, count: int, groups: int) -> list[Conversation]:
    weights = zipf(groups)
    return [Conversation(i, rng.choices(range(groups), weights)[0]) for i in range(count)]


def zipf(count: int, exponent: float = 1.0) -> list[float]:
    return [1 / (i + 1) ** exponent for i in range(count)]
