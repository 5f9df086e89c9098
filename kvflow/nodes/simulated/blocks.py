"""The KV block pool of a simulated engine: what is in which block, who uses it, what the prefix cache still knows."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Block:
    """`kv` keeps what was last written, also after the block was freed: whoever reads it then reads that."""

    __slots__ = ("id", "key", "kv", "users")

    def __init__(self, number: int, size: int) -> None:
        self.id = number
        self.kv = [0] * size
        self.key: int | None = None
        self.users = 0


class BlockPool:
    """Blocks without users are free, in the order in which they will be taken; those of the prefix cache stay findable
    until then.
    """

    def __init__(self, *, total: int, block_size: int, prefix_caching: bool) -> None:
        self.total = total
        self.block_size = block_size
        self._caching = prefix_caching
        self._blocks: list[Block] = []
        """Those that were ever taken; a large pool of which little is used costs little."""
        self._free: OrderedDict[int, Block] = OrderedDict()
        self._cache: dict[int, Block] = {}

    @property
    def free(self) -> int:
        """Blocks that can be taken, those that only the prefix cache knows included."""
        return len(self._free) + self.total - len(self._blocks)

    @property
    def cached(self) -> int:
        """Of the free blocks, those that the prefix cache can still find."""
        return sum(1 for b in self._free.values() if b.key is not None)

    def find(self, keys: Iterable[int]) -> list[Block]:
        """The cached blocks of the longest prefix of `keys`."""
        found: list[Block] = []
        for key in keys:
            if key not in self._cache:
                break
            found.append(self._cache[key])
        return found

    def fits(self, found: Sequence[Block], new: int) -> bool:
        """Whether `found` blocks can be shared and `new` ones taken beside them."""
        return new <= self.free - sum(1 for b in found if not b.users)

    def take(self, count: int) -> list[Block]:
        """Blocks for new KV: those never used, then the least recently freed."""
        taken = [self._take() for _ in range(count)]
        for block in taken:
            block.users = 1
        return taken

    def share(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.users += 1
            self._free.pop(block.id, None)

    def release(self, blocks: Sequence[Block]) -> None:
        """The end of a prefix is worth less than its beginning, and so is taken first."""
        for block in reversed(blocks):
            block.users -= 1
            if block.users == 0:
                self._free[block.id] = block

    def remember(self, block: Block, key: int) -> None:
        """Let the prefix cache find a full block; a second block of the same tokens stays unknown to it."""
        if self._caching and block.key is None and key not in self._cache:
            block.key = key
            self._cache[key] = block

    def read(self, numbers: Iterable[int]) -> list[tuple[int, ...]]:
        """What is in the blocks now, whoever wrote it. Raises `IndexError` for a block that does not exist."""
        return [self._read(n) for n in numbers]

    def users(self) -> int:
        return sum(b.users for b in self._blocks)

    def faults(self) -> list[str]:
        """What is wrong with the pool's books; nothing if all is well."""
        found = [f"block {b.id} has {b.users} users" for b in self._blocks if b.users < 0]
        found += [f"block {b.id} is free and used" for b in self._free.values() if b.users]
        found += [f"block {b.id} is lost" for b in self._blocks if not b.users and b.id not in self._free]
        found += [f"block {b.id} is not cached under its key" for k, b in self._cache.items() if b.key != k]
        return found

    def _take(self) -> Block:
        if len(self._blocks) < self.total:
            self._blocks.append(Block(len(self._blocks), self.block_size))
            return self._blocks[-1]
        block = self._free.popitem(last=False)[1]
        if block.key is not None:
            del self._cache[block.key]
            block.key = None
        return block

    def _read(self, number: int) -> tuple[int, ...]:
        if not 0 <= number < self.total:
            raise IndexError(number)
        return tuple(self._blocks[number].kv) if number < len(self._blocks) else (0,) * self.block_size
