"""Bodies that are no request at all, sent to every endpoint that takes one."""

from collections.abc import Mapping

from tests.engines.differential.exchange import JSON
from tests.engines.differential.row import Row

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
BODIES: Mapping[str, bytes] = {
    "nothing": b"",
    "half an object": b'{"model": "tiny", ',
    "a trailing comma": b'{"model": "tiny",}',
    "two objects": b"{}{}",
    "an empty object": b"{}",
    "a list": b"[1, 2]",
    "an empty list": b"[]",
    "a text": b'"hi"',
    "a number": b"5",
    "true": b"true",
    "null": b"null",
    "not JSON": b"hello",
    "not UTF-8": b'{"model": "\xff"}',
    "not a number": b'{"model": NaN}',
    "nested too deep": b"[" * 100_000,
    "single quotes": b"{'model': 'tiny'}",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"model": "tiny"}'.encode("utf-16"),
    "a form": b"model=tiny&prompt=hi",
}
CONTENT_TYPES: Mapping[str, Mapping[str, str]] = {
    "no content type": {},
    "text/plain": {"content-type": "text/plain"},
    "a form's type": {"content-type": "application/x-www-form-urlencoded"},
    "a type of its own": {"content-type": "application/vnd.api+json"},
    "capitals": {"content-type": "Application/JSON"},
    "a charset": {"content-type": "application/json; charset=utf-8"},
}

REFUSED: tuple[Row, ...] = (
    *(Row(name, path, body, refused=True, headers=JSON) for path in PATHS for name, body in BODIES.items()),
    *(Row(name, path, b"{}", refused=True, headers=kind) for path in PATHS for name, kind in CONTENT_TYPES.items()),
)
