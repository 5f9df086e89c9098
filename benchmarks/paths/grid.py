"""What is played: cells of the grid, policies, and texts of a given length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

Message = dict[str, Any]


class Load(StrEnum):
    IDLE = "idle"
    PREFILL = "prefill"
    """Another prompt is being computed by the prefill node."""
    DECODE = "decode"
    """The decode node is giving other answers."""


class Contender(StrEnum):
    """A tenant of the benchmark, and the policy that it has."""

    OFF = "off"
    PULL = "pull"
    DIRECT = "direct"
    ADAPTIVE = "adaptive"


FIXED = (Contender.OFF, Contender.PULL, Contender.DIRECT)

_FOREVER = 1_000_000_000
OVERRIDES = {
    Contender.OFF: ("+policy@tenants.off.policy=off",),
    Contender.PULL: ("+policy@tenants.pull.policy=balanced", "tenants.pull.policy.reuse.min_pull_tokens=0"),
    Contender.DIRECT: (
        "+policy@tenants.direct.policy=balanced",
        "tenants.direct.policy.reuse.min_pull_tokens=0",
        f"tenants.direct.policy.reuse.direct_below_tokens={_FOREVER}",
    ),
    Contender.ADAPTIVE: ("+policy@tenants.adaptive.policy=adaptive",),
}
"""For `kvflow serve`."""


@dataclass(frozen=True, slots=True)
class Cell:
    history: int
    """Tokens, about."""
    new: int
    load: Load


def cells(histories: Sequence[int], new: Sequence[int], loads: Sequence[Load]) -> list[Cell]:
    return [Cell(h, n, load) for h in histories for n in new for load in loads]


def rotated(contenders: Sequence[Contender], by: int) -> Iterator[Contender]:
    """Each is first, second and so on equally often, so that what the machine does meanwhile favours none."""
    by %= len(contenders)
    yield from (*contenders[by:], *contenders[:by])


_WORDS = ("river", "stone", "green", "north", "seven", "table", "forest", "circle", "music", "winter", "corner")


def words(count: int, seed: object) -> str:
    """`count` words, most of them one token each for models of English."""
    random = Random(repr(seed))
    return " ".join(random.choice(_WORDS) for _ in range(count))


def history(tokens: int, seed: object) -> list[Message]:
    return [{"role": "user", "content": f"Remember this list of words: {words(tokens, ('history', seed))}"}]


def question(tokens: int, seed: object) -> Message:
    return {"role": "user", "content": f"And these: {words(max(1, tokens - 8), ('new', seed))}"}
