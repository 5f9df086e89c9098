"""The tables have every field of the engine's own request classes, as the engine itself publishes them."""

import json
from collections.abc import Mapping, Set

import pytest

from tests.engines.differential import tables
from tests.engines.differential.servers import Pair
from tests.net import get

pytestmark = pytest.mark.engine

ROUTER = "between router and engine; what a client says there is dropped (tests/router/test_turns.py)"
NOT_APPLICABLE: Mapping[str, str] = {"kv_transfer_params": ROUTER, "ec_transfer_params": ROUTER}
"""Fields that no row has, and why."""


@pytest.mark.parametrize("path", tables.ENDPOINTS)
def test_every_field_has_a_row(servers: Pair, path: str) -> None:
    rows = [row for row in (*tables.ANSWERED, *tables.REFUSED) if row.path == path]
    said = {name for row in rows if isinstance(row.body, Mapping) for name in row.body}
    missing = fields_of(servers, path) - said - {"stream"} - set(NOT_APPLICABLE)
    assert not missing


def fields_of(servers: Pair, path: str) -> Set[str]:
    """Of the class, or of each of the classes, that the endpoint takes."""
    published = json.loads(get(f"{servers.stock.url}/openapi.json")[1])
    body = published["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    names = [one["$ref"].rpartition("/")[2] for one in body.get("anyOf", [body])]
    return {name for schema in names for name in published["components"]["schemas"][schema]["properties"]}
