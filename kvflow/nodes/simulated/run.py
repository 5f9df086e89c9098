"""One request inside a simulated engine: its tokens, its blocks, and the KV in them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvflow.nodes.simulated.blocks import Block
from kvflow.nodes.simulated.language import attend, kv


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is asked of an engine, after tokenising."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    cache_salt: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    """`kv_transfer_params`; empty where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an engine puts out at once. The last one has `finish`, and `params` where a connector answered."""

    text: str
    token: int
    prompt_tokens: int
    cached_tokens: int
    finish: str | None = None
    stop_reason: int | str | None = None
    params: dict[str, Any] | None = None


class Run:
    """KV is kept and read in the blocks alone, so that wrong blocks mean a wrong answer."""

    def __init__(self, job: Job, block_size: int) -> None:
        self.job = job
        self.block_size = block_size
        self.tokens = list(job.prompt)
        self.blocks: list[Block] = []
        self.keys = _chain(_seed(job.cache_salt), job.prompt)
        """What the prefix cache files each position under; a salt keeps prompts apart."""
        self.local = 0
        """Tokens found in the prefix cache."""
        self.finished = False

    @property
    def prompt_length(self) -> int:
        return len(self.job.prompt)

    @property
    def held(self) -> int:
        """Tokens whose KV exists; the last generated one has been chosen but not read."""
        return max(self.prompt_length, len(self.tokens) - 1)

    def block_keys(self, tokens: int) -> list[int]:
        """Keys of the full blocks among the first `tokens`."""
        return self.keys[self.block_size - 1 : tokens : self.block_size]

    def write_blocks(self, first: int, contents: Iterable[Sequence[int]]) -> None:
        """Put transferred KV into the blocks from number `first` on."""
        for block, values in zip(self.blocks[first:], contents, strict=False):
            block.kv[:] = values

    def compute(self, start: int) -> None:
        """Compute the prompt's KV from position `start` on, behind whatever is in the blocks before it."""
        for position in range(start, self.prompt_length):
            self._write(position)

    def read_prompt(self) -> int:
        return attend(0, (self._at(p) for p in range(self.prompt_length)))

    def append(self, token: int) -> None:
        self.tokens.append(token)

    def read_last(self, state: int) -> int:
        """Compute the KV of the last generated token and read it."""
        position = len(self.tokens) - 1
        self.keys.append(kv(self.keys[-1], self.tokens[position]))
        self._write(position)
        return attend(state, (self._at(position),))

    def _write(self, position: int) -> None:
        before = self._at(position - 1) if position else 0
        block = self.blocks[position // self.block_size]
        block.kv[position % self.block_size] = kv(before, self.tokens[position])

    def _at(self, position: int) -> int:
        return self.blocks[position // self.block_size].kv[position % self.block_size]


def _seed(salt: str | None) -> int:
    return attend(0, salt.encode()) if salt else 0


def _chain(seed: int, tokens: Iterable[int]) -> list[int]:
    out: list[int] = []
    for token in tokens:
        seed = kv(seed, token)
        out.append(seed)
    return out
