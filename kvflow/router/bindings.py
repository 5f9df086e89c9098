"""Which engine stored which answer: vLLM keeps them in the memory of the one API server that made them."""

import json
from collections import OrderedDict
from hashlib import blake2b


def binding(tenant: str, response: str) -> bytes:
    """Under what the answer with the id `response` is bound."""
    return blake2b(json.dumps([tenant, response]).encode(), digest_size=16).digest()


class Bindings:
    """The last `max_count` of them. One event loop owns an instance."""

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self._nodes: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def bind(self, key: bytes, node: str) -> None:
        self._nodes[key] = node
        self._nodes.move_to_end(key)
        if len(self._nodes) > self._max_count:
            self._nodes.popitem(last=False)

    def node(self, key: bytes) -> str | None:
        return self._nodes.get(key)
