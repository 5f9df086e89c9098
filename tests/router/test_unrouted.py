"""That kvflow knows every endpoint of the vLLM that is installed: it routes it, or says that it does not."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvflow.router.unrouted import ROUTED, UNROUTED
from tests.cluster import cluster

_ROUTES = re.compile(
    r"@\w*router\.(?:get|post|put|delete|websocket)\(\s*\"(/[^\"]*)\"|router\.add_api_route\(\s*\"(/[^\"]*)\""
)
SAME_IN_BOTH = {"/health", "/version"}


def vllms() -> set[str]:
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    files = (Path(spec.submodule_search_locations[0]) / "entrypoints").rglob("*.py")
    return {a or b for file in files for a, b in _ROUTES.findall(file.read_text())}


def test_nothing_of_vllm_is_forgotten_and_nothing_made_up() -> None:
    found = vllms()
    answers = {path for path in found if path.startswith("/v1/responses/{")}
    assert len(answers) == 2
    assert found - answers - SAME_IN_BOTH == {*ROUTED, *UNROUTED}
    assert not UNROUTED & {*ROUTED}


async def test_what_is_said_to_be_routed_is() -> None:
    async with cluster() as c:
        for path in ROUTED:
            reply = await (c.get(path) if path == "/v1/models" else c.post(path, {}))
            assert reply.status in (200, 400)
        for path in ("/v1/responses/render", "/v1/embeddings"):
            reply = await c.post(path, {})
            assert reply.status == 404
            assert "/v1/messages" in reply.json["error"]["message"]
