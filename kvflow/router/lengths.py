"""How many tokens there are in so many bytes of a request, learned from what engines counted.

The router does not tokenise. English prose has about four bytes a token, other scripts fewer or more, and JSON escapes
make one character six bytes; a tenant mostly sends more of what it sent before.
"""

from collections import OrderedDict
from math import exp, log

MAX_TENANTS = 1024
_NEWEST = 0.2
"""Weight of the newest request in the average."""
_MOST = 1.5
"""One request, which may hold an image, moves the average by no more than this factor's share."""
_RANGE = 8.0
"""No tenant's text is thought to have more, or less, tokens than `BYTES_PER_TOKEN` says by more than this factor."""


class Lengths:
    """One event loop owns an instance."""

    def __init__(self) -> None:
        self._factors: OrderedDict[str, float] = OrderedDict()
        """Logarithms of tokens counted ÷ tokens that `BYTES_PER_TOKEN` says, by tenant."""

    def tokens(self, tenant: str, estimated: int) -> int:
        """What a tenant's prompt of `estimated` tokens, by `BYTES_PER_TOKEN`, is likely to have."""
        return round(estimated * exp(self._factors.get(tenant, 0.0)))

    def counted(self, tenant: str, estimated: int, tokens: int) -> None:
        """An engine has counted `tokens` in a prompt of `estimated`."""
        if estimated < 1 or tokens < 1:
            return
        before = self._factors.get(tenant, 0.0)
        step = max(-log(_MOST), min(log(_MOST), log(tokens / estimated) - before))
        self._factors[tenant] = max(-log(_RANGE), min(log(_RANGE), before + _NEWEST * step))
        self._factors.move_to_end(tenant)
        if len(self._factors) > MAX_TENANTS:
            self._factors.popitem(last=False)
