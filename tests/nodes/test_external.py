import asyncio

from kvflow.nodes.base import Node, NodeSpec
from kvflow.nodes.external import ExternalNode
from kvflow.types import Role


async def test_its_life_is_not_ours() -> None:
    spec = NodeSpec(name="decode-0", role=Role.DECODE, url="http://10.0.0.2:8000")
    node: Node = ExternalNode(spec)
    death = asyncio.create_task(node.died())
    await node.start()
    await node.stop()
    await node.stop()
    await asyncio.sleep(0)
    assert not death.done()
    assert node.spec is spec
    death.cancel()
