"""For any request, the response through kvflow equals the response of one stock engine given the same request."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.engines.differential import malformed_rows, tables
from tests.engines.differential.exchange import Response
from tests.engines.differential.row import Row
from tests.engines.differential.servers import Pair
from tests.engines.differential.turns import first_turn, second_turn

pytestmark = pytest.mark.engine


def one_way_each(rows: Sequence[Row]) -> list[Any]:
    """Streamed and not streamed in turn: both ways for all rows would take minutes."""
    ways = [(row, i % 2 == 1) for i, row in enumerate(rows)]
    return [pytest.param(row, stream, id=f"{row}-{'stream' if stream else 'whole'}") for row, stream in ways]


either = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@either
@pytest.mark.parametrize("row", tables.ANSWERED, ids=str)
def test_a_first_turn(servers: Pair, row: Row, stream: bool) -> None:
    found, stock, kvflow = first_turn(servers, row, stream)
    assert not found
    assert stock.status == 200 or row.either_refused
    assert went(kvflow, row) in (None, "direct" if row.alone else "cold")


@pytest.mark.parametrize(("row", "stream"), one_way_each([row for row in tables.ANSWERED if not row.first_turn_only]))
def test_a_second_turn(servers: Pair, row: Row, stream: bool) -> None:
    found, _, kvflow = second_turn(servers, row, stream)
    assert not found
    assert went(kvflow, row) in (None, "direct" if row.alone else "pull")


@pytest.mark.parametrize("row", malformed_rows.REFUSED, ids=str)
def test_what_is_no_request(servers: Pair, row: Row) -> None:
    found, stock, _ = first_turn(servers, row, stream=False)
    assert not found
    assert stock.status >= 400


@either
@pytest.mark.parametrize("row", tables.REFUSED, ids=str)
def test_a_refusal(servers: Pair, row: Row, stream: bool) -> None:
    """Of a stream, some faults are found only after it has begun; some of those the engine only breaks off."""
    found, stock, _ = first_turn(servers, row, stream)
    assert not found
    assert stock.status >= 400 or stock.broken_off or b'"error"' in stock.raw


def went(kvflow: Response, row: Row) -> str | None:
    """The path of an answered turn."""
    if kvflow.status != 200 or row.path not in tables.TURNS:
        return None
    return kvflow.headers["x-kvflow-path"]
