"""What is kept for a tenant on a decode node stays within its share of the node's blocks.

Engines know nothing of tenants, so the router gives up a tenant's own least valuable handles: before a leg, those that
make room for what the turn is thought to leave; after it, what was longer than thought.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvflow.conversations import Conversations
from kvflow.router.room import Need
from kvflow.tenants import Tenant
from kvflow.types import Handle, NodeState


class Shares:
    """One event loop owns an instance."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._coming: Counter[tuple[str, str]] = Counter()
        """Blocks that legs under way are thought to leave, by tenant and node."""

    def fits(self, tenant: Tenant, node: NodeState, need: Need) -> bool:
        """Whether a turn could be kept beside what is under way, were everything else of the tenant's given up."""
        cap = _cap(tenant, node)
        if cap is None:
            return True
        coming = self._coming[tenant.name, node.name]
        return need.prompt <= cap and coming + min(need.whole, cap) <= cap

    def make_room(self, tenant: Tenant, node: NodeState, need: Need) -> list[Handle]:
        """Handles that are given up for a turn that is to be kept."""
        cap = _cap(tenant, node)
        if cap is None:
            return []
        held = self._conversations.blocks_of(tenant.name, node.name)
        over = held + self._coming[tenant.name, node.name] + min(need.whole, cap) - cap
        return self._conversations.give_up(node.name, over, tenant=tenant.name)

    @contextmanager
    def leg(self, tenant: Tenant, node: NodeState, need: Need, *, keeps: bool) -> Iterator[None]:
        """Count what a leg will leave for as long as the context lasts."""
        key = (tenant.name, node.name)
        blocks = need.whole if keeps and tenant.limits.max_pinned_share is not None else 0
        self._coming[key] += blocks
        try:
            yield
        finally:
            self._coming[key] -= blocks
            if not self._coming[key]:
                del self._coming[key]

    def excess(self, tenant: Tenant, node: NodeState) -> list[Handle]:
        """Handles that are given up because more is kept than the share allows."""
        cap = _cap(tenant, node)
        if cap is None:
            return []
        over = self._conversations.blocks_of(tenant.name, node.name) - cap
        return self._conversations.give_up(node.name, over, tenant=tenant.name)


def _cap(tenant: Tenant, node: NodeState) -> int | None:
    """Blocks; None where there is no share, or nobody knows yet how many blocks the node has."""
    share = tenant.limits.max_pinned_share
    return None if share is None or node.blocks is None else int(share * node.blocks.total)
