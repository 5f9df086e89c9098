"""A row of a table: one request, in as few words as it takes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.engines.differential.exchange import JSON, Request
from tests.engines.differential.servers import NAME

TEXT = "@text"
"""Stands in a row for a text of a few hundred tokens that no other request begins with."""
IDS = "@ids"
"""The same in token ids: stands for a prompt, a list of them."""
MORE = "And what came after that, in which room, and why?"

Body = Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    path: str
    body: Body | bytes
    alone: bool = False
    """Two nodes cannot answer it; one does, at once."""
    refused: bool = False
    """The engine answers with an error."""
    either_refused: bool = False
    """The engine refuses it streamed, or not streamed."""
    first_turn_only: bool = False
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)

    def __str__(self) -> str:
        return f"{self.path.rpartition('/v1/')[2].replace('/', '-')}: {self.name}"

    def request(self, *, stream: bool = False) -> Request:
        if not isinstance(self.body, dict):
            assert isinstance(self.body, bytes)
            return Request(self.path, self.body, self.headers)
        body = with_text(self.body, text(f"{self}, {stream}"))
        return Request(self.path, {**body, "stream": stream} if stream else body, self.headers)


PLAIN = {"model": NAME, "temperature": 0, "max_tokens": 8}


def chat(name: str, /, **fields: Any) -> Row:
    return row_of(name, "/v1/chat/completions", {"messages": [user(TEXT)], **fields})


def completion(name: str, /, **fields: Any) -> Row:
    return row_of(name, "/v1/completions", {"prompt": TEXT, **fields})


def row_of(name: str, path: str, fields: dict[str, Any]) -> Row:
    """Words that describe the row are told from fields of the request by their capital letters."""
    about = {k.lower(): fields.pop(k) for k in ("ALONE", "REFUSED", "EITHER_REFUSED", "FIRST_TURN_ONLY") if k in fields}
    return Row(name, path, {k: v for k, v in {**PLAIN, **fields}.items() if v is not LEFT_OUT}, **about)


def refusals(make: Callable[..., Row], wrong: Mapping[str, Mapping[str, Any]]) -> tuple[Row, ...]:
    """Rows that the engine refuses for one wrong field each."""
    return tuple(make(name, **fields, REFUSED=True) for name, fields in wrong.items())


LEFT_OUT = object()
"""As a value: without this field, which rows have by default."""


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def text(about: str) -> str:
    things = ("lamp", "map", "key", "bell", "rope")
    return f"{about}. " + " ".join(f"Item {i}: the {things[i % 5]} is in room {i * 7 % 31}." for i in range(24))


def with_text(value: Any, words: str) -> Any:
    """The same with all `TEXT` and `IDS` replaced."""
    if value == IDS:
        return [1000 + byte for byte in words[:300].encode()]
    if isinstance(value, str):
        return value.replace(TEXT, words)
    if isinstance(value, Mapping):
        return {k: with_text(v, words) for k, v in value.items()}
    return (
        [with_text(v, words) for v in value] if isinstance(value, Sequence) and not isinstance(value, bytes) else value
    )
