"""The all-knowing cache: what of a prompt could have been reused, if everything ever computed were still there."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """A run of tokens that all who begin alike have in common, and who goes on from there.

    Sequences come in order of time, so what is true of the first of them is true from then on.
    """

    label: tuple[int, ...]
    since: int
    """Number of the first sequence that has these tokens."""
    ends: int | None = None
    """Number of the first sequence whose last token is the last one here."""
    next: dict[int, "_Node"] = field(default_factory=dict)


class AllKnowing:
    """Holds the KV of every turn that has ended. `block_size` is in tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._root = _Node((), 0)
        self._count = 0

    def __len__(self) -> int:
        """Turns that it holds. The number of the moment between two of them, too."""
        return self._count

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """A turn that has ended. The last token of an answer was chosen and never read, so it has no KV."""
        tokens, node = (*prompt, *answer[:-1]), self._root
        number, self._count = self._count, self._count + 1
        while tokens:
            below = node.next.get(tokens[0])
            if below is None:
                below = node.next[tokens[0]] = _Node(tokens, number)
            common = _common(below.label, tokens)
            if common < len(below.label):
                below = node.next[tokens[0]] = _split(below, common)
            node, tokens = below, tokens[common:]
        if node.ends is None:
            node.ends = number

    def reusable(self, prompt: Sequence[int], before: int | None = None) -> int:
        """Tokens at the start of `prompt` that need not be computed, given the first `before` turns (or all).

        The longest of: whole blocks of what the prompt has in common with any turn; all of a turn that the prompt
        begins with, for a pull may end inside a block where what is held ends. The last token of the prompt is always
        computed, because the answer begins from it.
        """
        before = self._count if before is None else before
        node, rest, length, whole = self._root, tuple(prompt), 0, 0
        while rest and (below := node.next.get(rest[0])) and below.since < before:
            common = _common(below.label, rest)
            length, rest = length + common, rest[common:]
            if common < len(below.label):
                break
            node = below
            if node.ends is not None and node.ends < before:
                whole = length
        blocks = length // self._block_size * self._block_size
        return min(max(blocks, whole), len(prompt) - 1)


def _split(node: _Node, at: int) -> _Node:
    upper = _Node(node.label[:at], node.since)
    upper.next[node.label[at]] = node
    node.label = node.label[at:]
    return upper


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
