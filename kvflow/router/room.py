"""How full the decode nodes are between one of their reports and the next, and how much must be given up for a leg."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from kvflow.connector.retention import Pool
from kvflow.types import Blocks, NodeState, Plan

FIRST_ANSWER = 128
"""Tokens that an answer is thought to have before any was seen."""
LONGEST_ANSWER = 32_768.0
"""Tokens; the average is never thought to be above."""
_NEWEST = 0.1
"""Weight of the newest answer in the average length."""


@dataclass(slots=True)
class _Use:
    """Of one node, in blocks."""

    running: int = 0
    """What the legs under way will take."""
    keeping: int = 0
    """Of that, what will be kept at their end."""
    freed: int = 0
    """What has been released or read since the node's last report."""


@dataclass(frozen=True, slots=True)
class Need:
    """Of one turn, in blocks: its prompt, and the whole of it with the answer."""

    prompt: int
    whole: int


class Room:
    """Estimates, all of them; the engine's own share is the second line, and each of its reports sets them right."""

    def __init__(self) -> None:
        self._uses: defaultdict[str, _Use] = defaultdict(_Use)
        self._answer = float(FIRST_ANSWER)

    def expected(self, node: NodeState, prompt_tokens: int, longest_answer: int | None) -> Need:
        """What a turn will take on `node`; nothing if the node has not said how large its blocks are."""
        if not node.block_size:
            return Need(0, 0)
        answer = int(self._answer) if longest_answer is None else min(int(self._answer), longest_answer)
        most = node.blocks.reserve if node.blocks and node.blocks.reserve else inf
        prompt, whole = (-(-tokens // node.block_size) for tokens in (prompt_tokens, prompt_tokens + answer))
        # No request takes more than one of the full length; a body that looks longer may hold an image.
        return Need(int(min(prompt, most)), int(min(whole, most)))

    def shortage(self, node: NodeState, plan: Plan, need: Need) -> int:
        """Blocks of kept turns that must be given up so that a leg can run, and can be kept."""
        if node.blocks is None:
            return 0
        use, pool = self._uses[node.name], node.blocks
        pinned = pool.pinned - use.freed
        short = pinned + use.running + need.whole - pool.total
        cap = _cap(pool, plan)
        if need.prompt <= cap:  # else nothing that is given up would help
            short = max(short, pinned + use.keeping + min(need.whole, cap) - cap)
        return max(0, short)

    @contextmanager
    def leg(self, node: str, need: Need, *, keeps: bool) -> Iterator[None]:
        """Count a leg's blocks as taken for as long as the context lasts."""
        use = self._uses[node]
        use.running += need.whole
        use.keeping += need.whole * keeps
        try:
            yield
        finally:
            use.running -= need.whole
            use.keeping -= need.whole * keeps

    def freed(self, node: str, blocks: int) -> None:
        """Kept turns of so many blocks have been released or read."""
        self._uses[node].freed += blocks

    def reported(self, node: str) -> None:
        """The node has just said itself what is pinned."""
        self._uses[node].freed = 0

    def answered(self, tokens: int) -> None:
        """A turn has ended with an answer of so many tokens."""
        self._answer += _NEWEST * (tokens - self._answer)

    def refused(self, node: NodeState, plan: Plan, prompt_tokens: int) -> None:
        """A turn was not kept for want of room. If its prompt would have fitted, its answer was longer than thought."""
        need = self.expected(node, prompt_tokens, None)
        if node.blocks and need.prompt <= _cap(node.blocks, plan):
            self._answer = min(LONGEST_ANSWER, self._answer * (1 + _NEWEST))


def _cap(blocks: Blocks, plan: Plan) -> int:
    """Blocks that kept turns may take together, by the engine's own rule; none for a turn that is not to be kept."""
    if not plan.retain_s:
        return -1
    return Pool(total=blocks.total, reserve=blocks.reserve).cap(plan.max_pinned_share)
