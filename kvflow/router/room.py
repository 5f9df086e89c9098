"""How full the decode nodes are between one of their reports and the next, and how much must be given up for a leg."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvflow.connector.retention import Pool
from kvflow.types import NodeState, Plan

FIRST_ANSWER = 128
"""Tokens that an answer is thought to have before any was seen."""
LONGEST_ANSWER = 32_768.0
"""Tokens; the average is never thought to be above."""
_NEWEST = 0.1
"""Weight of the newest answer in the average length."""
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(slots=True)
class _Use:
    """Of one node, in blocks."""

    running: int = 0
    """What the legs under way will take."""
    keeping: int = 0
    """Of that, what will be kept at their end."""
    freed: int = 0
    """What has been released or read since the node's last report."""


class Room:
    """Estimates, all of them; the engine's own share is the second line, and each of its reports sets them right."""

    def __init__(self) -> None:
        self._uses: defaultdict[str, _Use] = defaultdict(_Use)
        self._answer = float(FIRST_ANSWER)

    def expected(self, node: NodeState, prompt_tokens: int, body: Mapping[str, Any]) -> int:
        """Blocks that a turn will take on `node`; 0 if the node has not said how large its blocks are."""
        if not node.block_size:
            return 0
        limits = [v for k in _LIMITS if isinstance(v := body.get(k), int)]
        tokens = prompt_tokens + min([int(self._answer), *limits])
        return -(-tokens // node.block_size)

    def shortage(self, node: NodeState, plan: Plan, blocks: int) -> int:
        """Blocks of kept turns that must be given up so that a leg of `blocks` can run, and can be kept."""
        if node.blocks is None:
            return 0
        use, pool = self._uses[node.name], node.blocks
        blocks = min(blocks, pool.reserve or blocks)  # more than a request of the full length no request takes
        pinned = pool.pinned - use.freed
        short = pinned + use.running + blocks - pool.total
        if plan.retain_s:
            cap = Pool(total=pool.total, reserve=pool.reserve).cap(plan.max_pinned_share)
            if blocks <= cap:  # else nothing that is given up would help
                short = max(short, pinned + use.keeping + blocks - cap)
        return max(0, short)

    @contextmanager
    def leg(self, node: str, blocks: int, *, keeps: bool) -> Iterator[None]:
        """Count a leg's blocks as taken for as long as the context lasts."""
        use = self._uses[node]
        use.running += blocks
        use.keeping += blocks * keeps
        try:
            yield
        finally:
            use.running -= blocks
            use.keeping -= blocks * keeps

    def freed(self, node: str, blocks: int) -> None:
        """Kept turns of so many blocks have been released or read."""
        self._uses[node].freed += blocks

    def reported(self, node: str) -> None:
        """The node has just said itself what is pinned."""
        self._uses[node].freed = 0

    def answered(self, tokens: int) -> None:
        """A turn has ended with an answer of so many tokens."""
        self._answer += _NEWEST * (tokens - self._answer)

    def refused(self) -> None:
        """A turn took more than was thought, and was not kept for it."""
        self._answer = min(LONGEST_ANSWER, self._answer * (1 + _NEWEST))
