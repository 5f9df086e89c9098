"""For any request, the response through kvflow equals the response of one stock engine given the same request."""

import pytest

from tests.engines.differential import tables
from tests.engines.differential.exchange import Response
from tests.engines.differential.row import Row
from tests.engines.differential.servers import Pair
from tests.engines.differential.turns import first_turn, second_turn

pytestmark = pytest.mark.engine

either = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@either
@pytest.mark.parametrize("row", tables.ANSWERED, ids=str)
def test_a_first_turn(servers: Pair, row: Row, stream: bool) -> None:
    found, stock, kvflow = first_turn(servers, row, stream)
    assert not found
    assert stock.status == 200 or row.either_refused
    assert went(kvflow, row) in (None, "direct" if row.alone else "cold")


@either
@pytest.mark.parametrize("row", [row for row in tables.ANSWERED if not row.first_turn_only], ids=str)
def test_a_second_turn(servers: Pair, row: Row, stream: bool) -> None:
    found, _, kvflow = second_turn(servers, row, stream)
    assert not found
    assert went(kvflow, row) in (None, "direct" if row.alone else "pull")


@either
@pytest.mark.parametrize("row", tables.REFUSED, ids=str)
def test_a_refusal(servers: Pair, row: Row, stream: bool) -> None:
    """Of a stream, some faults are found only after it has begun."""
    found, stock, _ = first_turn(servers, row, stream)
    assert not found
    assert stock.status >= 400 or (stock.streamed and b'"error"' in stock.raw)


def went(kvflow: Response, row: Row) -> str | None:
    """The path of an answered turn."""
    if kvflow.status != 200 or row.path not in tables.TURNS:
        return None
    return kvflow.headers["x-kvflow-path"]
