"""Which engine stored which answer: vLLM keeps them in the memory of the one API server that made them."""

import json
from collections import OrderedDict
from hashlib import blake2b


def binding(tenant: str, response: str) -> bytes:
    """Under what the answer with the id `response` is bound."""
    return blake2b(json.dumps([tenant, response]).encode(), digest_size=16).digest()


class Bindings:
    """The last `max_count` of them; beyond, those of the tenant that has most give way. One event loop owns it."""

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self._nodes: dict[bytes, str] = {}
        self._by_tenant: dict[str, OrderedDict[bytes, None]] = {}
        """The oldest first."""

    def __len__(self) -> int:
        return len(self._nodes)

    def bind(self, key: bytes, node: str, *, tenant: str = "") -> None:
        self._nodes[key] = node
        own = self._by_tenant.setdefault(tenant, OrderedDict())
        own[key] = None
        own.move_to_end(key)
        if len(self._nodes) > self._max_count:
            oldest, _ = max(self._by_tenant.values(), key=len).popitem(last=False)
            del self._nodes[oldest]

    def node(self, key: bytes) -> str | None:
        return self._nodes.get(key)
