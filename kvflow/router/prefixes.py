"""Which prefill nodes are believed to have the beginning of a prompt in their prefix caches.

A belief, not knowledge: engines evict without telling. A wrong one costs speed and nothing else.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from kvflow.router.find import Prefix
from kvflow.types import NodeState

MAX_KEYS = 32768
"""About 10 MB, and prompts of some 3000 conversations."""


class Prefixes:
    """Bounded; what was neither computed nor looked for the longest is forgotten first. One event loop owns it."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._nodes: OrderedDict[bytes, dict[str, str]] = OrderedDict()
        """For each prefix, the epochs of the engines that have computed it, by node."""

    def __len__(self) -> int:
        return len(self._nodes)

    def computed(self, prefixes: Sequence[Prefix], node: NodeState) -> None:
        """A prompt that begins with all of `prefixes` has been computed on `node`."""
        if not (node.ready and node.prefix_caching):
            return
        for prefix in prefixes:
            if prefix.kept:
                self._nodes.setdefault(prefix.key, {})[node.name] = node.epoch
                self._nodes.move_to_end(prefix.key)
        while len(self._nodes) > self._max_keys:
            self._nodes.popitem(last=False)

    def find(self, prefixes: Sequence[Prefix], nodes: Sequence[NodeState]) -> Mapping[str, int]:
        """Bytes of the longest prefix that each of `nodes` is believed to have; nodes that have none are left out."""
        epochs = {n.name: n.epoch for n in nodes if n.prefix_caching}
        found: dict[str, int] = {}
        for prefix in reversed(prefixes):
            known = self._nodes.get(prefix.key)
            if known is None:
                continue
            self._nodes.move_to_end(prefix.key)
            for name, epoch in known.items():
                if name not in found and epochs.get(name) == epoch:
                    found[name] = prefix.length
            if len(found) == len(epochs):
                break
        return found
