"""An engine that somebody else runs."""

import asyncio

from kvflow.nodes.base import NodeSpec


class ExternalNode:
    """All that kvflow has of it is the URL; whether it lives is seen there."""

    def __init__(self, spec: NodeSpec) -> None:
        self._spec = spec

    @property
    def spec(self) -> NodeSpec:
        return self._spec

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        return

    async def died(self) -> str:
        return await asyncio.Future()
