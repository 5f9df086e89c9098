"""Which conversation a request belongs to, found without being told.

A conversation is filed under the hash of the messages of each of its requests, leaving out what the model said: the
next request begins with the same ones however the client sends the answers back. A wrong guess costs speed and nothing
else, because the prefill node verifies token by token before it pulls.
"""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

from kvflow.errors import RequestError

TEXT_CHUNK = 256
"""Characters of a plain prompt that are hashed together; less than that is not worth keeping."""
TOKEN_CHUNK = 64
"""The same for prompts that are sent as token ids."""
MAX_ID_LENGTH = 256

_ID_HEADERS = ("x-conversation-id", "x-session-id")
_ID_FIELDS = ("conversation_id", "session_id")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Keys:
    """How to look a conversation up (best match first), and under what to file its next handle."""

    lookup: tuple[bytes, ...]
    filing: tuple[bytes, ...]
    conversation: str | None = None
    """The id that the client gave, if it gave one."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What two requests must have in common before their KV may be shared at all."""

    tenant: str
    model: str
    cache_salt: str

    def key(self, kind: str, data: bytes) -> bytes:
        parts = [_bytes(p) for p in (self.tenant, self.model, self.cache_salt, kind)]
        h = blake2b(digest_size=16)
        for part in (*parts, data):
            h.update(len(part).to_bytes(8, "big"))
            h.update(part)
        return h.digest()


def new_conversation() -> str:
    """A name for a conversation whose client did not give one; sending it back as an id finds the conversation."""
    return f"c-{secrets.token_hex(8)}"


def find_keys(body: Mapping[str, Any], headers: Mapping[str, str], scope: Scope) -> Keys:
    """Raises `RequestError` for a conversation id that is no id."""
    if (given := _explicit_id(body, headers)) is not None:
        key = id_key(given, scope)
        return Keys((key,), (key,), given)
    if isinstance(messages := body.get("messages"), list):
        return _message_keys(messages, scope)
    return _prompt_keys(body.get("prompt"), scope)


def id_key(conversation: str, scope: Scope) -> bytes:
    return scope.key("id", conversation.encode())


def _explicit_id(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    for name in _ID_FIELDS:
        if (value := body.get(name)) is not None:
            return _checked(value, name)
    metadata = body.get("metadata")
    if isinstance(metadata, Mapping) and (value := metadata.get("conversation_id")) is not None:
        return _checked(value, "metadata.conversation_id")
    for name in _ID_HEADERS:
        if (value := headers.get(name)) is not None:
            return _checked(value, name)
    return None


def _checked(value: object, name: str) -> str:
    if isinstance(value, str) and 0 < len(value) <= MAX_ID_LENGTH and value.isprintable():
        return value
    raise RequestError(f"{name} must be a string of 1 to {MAX_ID_LENGTH} printable characters", param=name)


def _message_keys(messages: Sequence[Any], scope: Scope) -> Keys:
    """Every prefix can find a conversation; it is filed under those at which a request of it ended."""
    chain: list[bytes] = []
    ends: list[int] = []
    for i, message in enumerate(messages):
        if _role(message) == "assistant":
            continue
        chain.append(_canonical(message))
        if i + 1 == len(messages) or _role(messages[i + 1]) == "assistant":
            ends.append(len(chain) - 1)
    keys = list(_chained(chain, "chat", scope))
    return Keys(tuple(reversed(keys)), tuple(keys[end] for end in _spread(ends)))


def _prompt_keys(prompt: object, scope: Scope) -> Keys:
    """The same over chunks of text, filed no lower than half of it: a shared preamble is no conversation."""
    if isinstance(prompt, str):
        chunks = [_bytes(prompt[i : i + TEXT_CHUNK]) for i in range(0, len(prompt) - TEXT_CHUNK + 1, TEXT_CHUNK)]
    elif isinstance(prompt, list) and prompt and all(isinstance(t, int) for t in prompt):
        ids = range(0, len(prompt) - TOKEN_CHUNK + 1, TOKEN_CHUNK)
        chunks = [repr(prompt[i : i + TOKEN_CHUNK]).encode() for i in ids]
    else:
        return Keys((), ())
    keys = list(_chained(chunks, "text", scope))
    return Keys(tuple(reversed(keys)), tuple(_spread(keys[len(keys) // 2 :])))


def _chained(parts: Iterable[bytes], kind: str, scope: Scope) -> Iterator[bytes]:
    link = b""
    for part in parts:
        link = scope.key(kind, link + part)
        yield link


def _spread(items: Sequence[T]) -> Iterator[T]:
    """The last item, then those 1, 2, 4, 8 … before it: few keys, and an edit anywhere still finds a near one."""
    step = 0
    while step < len(items):
        yield items[-1 - step]
        step = step * 2 or 1


def _bytes(text: str) -> bytes:
    """JSON can carry half a surrogate pair, which strict UTF-8 cannot."""
    return text.encode(errors="surrogatepass")


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, Mapping) else None


def _canonical(message: object) -> bytes:
    return json.dumps(message, sort_keys=True, separators=(",", ":")).encode()
