"""All rows, and the endpoints that they are about."""

from tests.engines.differential import (
    chat_rows,
    completion_rows,
    messages_rows,
    responses_rows,
    token_rows,
)
from tests.engines.differential.row import Row

TABLES = (chat_rows, completion_rows, responses_rows, messages_rows, token_rows)
ANSWERED: tuple[Row, ...] = tuple(row for table in TABLES for row in table.ANSWERED)
REFUSED: tuple[Row, ...] = tuple(row for table in TABLES for row in table.REFUSED)
TURNS = tuple(dict.fromkeys(row.path for row in ANSWERED if not row.first_turn_only))
ENDPOINTS = tuple(dict.fromkeys(row.path for row in ANSWERED))
"""Those that take a body."""
