"""Which conversation a request belongs to, found without being told.

A conversation is filed under the hash of the messages of each of its requests, leaving out what the model said: the
next request begins with the same ones however the client sends the answers back. A wrong guess costs speed and nothing
else, because the prefill node verifies token by token before it pulls.
"""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar
from urllib.parse import unquote

from kvflow.errors import RequestError
from kvflow.router.endpoints import Endpoint
from kvflow.router.history import Message, by_model, settled

TEXT_CHUNK = 256
"""Characters of a plain prompt that are hashed together; less than that is not worth keeping."""
TOKEN_CHUNK = 64
"""The same for prompts that are sent as token ids."""
BYTES_PER_TOKEN = 4
"""Of text in a request, about."""
MAX_LINKS = 8192
"""Messages or chunks that are looked at; what follows them is the same conversation."""
MAX_ID_LENGTH = 256
LAST_PREFIXES = 8
"""Ends of the last messages or chunks at which a prompt's beginning is looked for in prefix caches."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt's beginning, up to the end of a message or chunk, as prefix caches may have it."""

    key: bytes
    length: int
    """In bytes of the request."""
    kept: bool
    """Worth remembering: the first, those that are twice as far on, and the last. The others are only looked for."""


@dataclass(frozen=True, slots=True)
class Keys:
    """How to look a conversation up (best match first), and under what to file its next handle (completest first)."""

    lookup: tuple[bytes, ...]
    filing: tuple[bytes, ...]
    beyond: tuple[int, ...] = ()
    """For each of `lookup`: bytes of the prompt that come after it, without an answer that follows it directly."""
    conversation: str | None = None
    """The id that the client gave, if it gave one."""
    whole: int = 1
    """How many of `filing` stand for the whole of it: who finds it there goes on with the conversation."""
    prefixes: tuple[Prefix, ...] = ()
    """Shortest first. Unlike the others, these are the same in every conversation that begins alike."""

    def tokens_beyond(self, key: bytes) -> int:
        """Of the prompt, those that come after `key`, one of `lookup`; estimated."""
        return self.beyond[self.lookup.index(key)] // BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True)
class Scope:
    """What two requests must have in common before their KV may be shared at all."""

    tenant: str
    model: str
    cache_salt: str


def new_conversation() -> str:
    """A name for a conversation whose client did not give one; sending it back as an id finds the conversation."""
    return f"c-{secrets.token_hex(8)}"


def find_keys(
    endpoint: Endpoint, body: Mapping[str, Any], headers: Mapping[str, str], scope: Scope, length: int
) -> Keys:
    """`length` is that of the whole body, in bytes. Raises `RequestError` for a conversation id that is no id."""
    given = _explicit_id(body, headers)
    messages = endpoint.messages(body) if endpoint.messages else None
    found = _earlier_answer(endpoint, body, scope, length)
    found = found or _content_keys(messages, body, _root(scope, given or ""), _beginning(body, scope))
    filing = found.filing
    whole = 1
    if endpoint.stores and isinstance(own := body.get("request_id"), str):
        filing = (*filing[:1], _answer_key(own, scope), *filing[1:])
        whole = min(2, len(filing))
    if given is None:
        return replace(found, filing=filing if endpoint.keepable(body) else (), whole=whole)
    # Where one id is used for several conversations, such as that of a whole session, the messages tell them apart,
    # and one that only begins must not take the handle of another.
    last = id_key(given, scope)
    filing = (*filing, last) if endpoint.keepable(body) else ()
    if messages is not None and not any(map(by_model, messages)):
        return replace(found, filing=filing, conversation=given, whole=whole)
    return Keys((*found.lookup, last), filing, (*found.beyond, length), given, whole, found.prefixes)


def id_key(conversation: str, scope: Scope) -> bytes:
    return _link(_root(scope, conversation), b"id")


def closing_key(conversation: str, tenant: str) -> bytes:
    """Under what all of a conversation is found, whatever its model and cache salt."""
    return _link(b"", json.dumps([tenant, conversation]).encode())


def _earlier_answer(endpoint: Endpoint, body: Mapping[str, Any], scope: Scope, length: int) -> Keys | None:
    """A request that names the answer it follows carries only what is new."""
    earlier = body.get("previous_response_id") if endpoint.stores else None
    return Keys((_answer_key(earlier, scope),), (), (length,)) if isinstance(earlier, str) else None


def _answer_key(response: str, scope: Scope) -> bytes:
    return _link(_root(scope, response), b"response")


def _content_keys(messages: Sequence[Message] | None, body: Mapping[str, Any], root: bytes, start: bytes) -> Keys:
    """`root` is of the conversation, `start` of all prompts that may begin alike."""
    return _prompt_keys(body.get("prompt"), root, start) if messages is None else _message_keys(messages, root, start)


def _beginning(body: Mapping[str, Any], scope: Scope) -> bytes:
    """What comes before the first message: in chat templates, the tools."""
    tools = body.get("tools")
    return _link(_root(scope, ""), b"prefix" if not tools else _packed(tools))


def _explicit_id(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """Ids that are kvflow's own to define are checked; those that others define are taken as they are."""
    metadata = body.get("metadata")
    if (value := body.get("conversation_id")) is not None:
        return _checked(value, "conversation_id")
    if isinstance(session := body.get("session_id"), str) and session:
        return session
    if isinstance(metadata, Mapping) and (value := metadata.get("conversation_id")) is not None:
        return _checked(value, "metadata.conversation_id")
    if (value := headers.get("x-conversation-id")) is not None:
        return _checked(unquote(_decoded(value)), "x-conversation-id")
    return _decoded(headers.get("x-session-id", "")) or None


def _checked(value: object, name: str) -> str:
    if isinstance(value, str) and 0 < len(value) <= MAX_ID_LENGTH and value.isprintable():
        return value
    raise RequestError(f"{name} must be a string of 1 to {MAX_ID_LENGTH} printable characters", param=name)


def _decoded(header: str) -> str:
    """ASGI servers read headers as Latin-1; most clients that send more than ASCII send UTF-8."""
    try:
        return header.encode("latin-1").decode()
    except UnicodeError:
        return header


def _message_keys(messages: Sequence[Mapping[str, Any]], root: bytes, start: bytes) -> Keys:
    """Every prefix can find a conversation; it is filed under those at which a request of it ended."""
    parts = [_packed(settled(message)) for message in messages[:MAX_LINKS]]
    left = sum(map(len, parts)) + (len(_packed(messages[MAX_LINKS:])) if len(messages) > MAX_LINKS else 0)
    chain: list[bytes] = []
    beyond: list[int] = []
    ends: list[int] = []
    for i, part in enumerate(parts):
        left -= len(part)
        if not by_model(messages[i]):
            chain.append(part)
            beyond.append(left)
            if i + 1 == len(messages) or by_model(messages[i + 1]):
                ends.append(len(chain) - 1)
        elif beyond:
            beyond[-1] = left
    keys = list(_chained(chain, root))
    filing = tuple(keys[end] for end in _spread(ends))
    return Keys(tuple(reversed(keys)), filing, tuple(reversed(beyond)), prefixes=_prefixes(parts, start))


def _prompt_keys(prompt: object, root: bytes, start: bytes) -> Keys:
    """The same over chunks of text."""
    size = TEXT_CHUNK
    if isinstance(prompt, str):
        starts = range(0, len(prompt) - TEXT_CHUNK + 1, TEXT_CHUNK)[:MAX_LINKS]
        chunks = [_bytes(prompt[i : i + TEXT_CHUNK]) for i in starts]
        beyond = [len(prompt) - i - TEXT_CHUNK for i in starts]
    elif isinstance(prompt, list) and prompt and type(prompt[0]) is int:
        size = TOKEN_CHUNK * BYTES_PER_TOKEN
        starts = range(0, len(prompt) - TOKEN_CHUNK + 1, TOKEN_CHUNK)[:MAX_LINKS]
        chunks = [repr(prompt[i : i + TOKEN_CHUNK]).encode() for i in starts]
        beyond = [(len(prompt) - i - TOKEN_CHUNK) * BYTES_PER_TOKEN for i in starts]
    else:
        return Keys((), ())
    keys = list(_chained(chunks, root))
    prefixes = _prefixes(chunks, start, size)
    return Keys(tuple(reversed(keys)), tuple(_spread(keys)), tuple(reversed(beyond)), prefixes=prefixes)


def _prefixes(parts: Sequence[bytes], start: bytes, size: int | None = None) -> tuple[Prefix, ...]:
    """Of all that is said, answers included. `size` is what a part counts, in bytes; None for its own length.

    A bounded number: what follows the newest answers in the next turn still finds the end of this one.
    """
    out: list[Prefix] = []
    state, length, last = blake2b(start, digest_size=16), 0, len(parts)
    for i, part in enumerate(parts, 1):
        state.update(part)
        length += len(part) if size is None else size
        doubled = i & (i - 1) == 0
        if doubled or i > last - LAST_PREFIXES:
            out.append(Prefix(state.copy().digest(), length, kept=doubled or i == last))
    return tuple(out)


def _spread(items: Sequence[T]) -> Iterator[T]:
    """The last item, then those 1, 2, 4, 8 … before it, down to the middle.

    Few keys, and an edit in the later half still finds a near one. What lies before the middle is left out because many
    conversations begin alike, and a short one should not take the handle of a long one.
    """
    step = 0
    while step <= len(items) // 2 and step < len(items):
        yield items[-1 - step]
        step = step * 2 or 1


def _root(scope: Scope, conversation: str) -> bytes:
    return _link(b"", json.dumps([scope.tenant, scope.model, scope.cache_salt, conversation]).encode())


def _chained(parts: Iterable[bytes], link: bytes) -> Iterator[bytes]:
    for part in parts:
        link = _link(link, part)
        yield link


def _link(before: bytes, data: bytes) -> bytes:
    return blake2b(data, digest_size=16, key=before).digest()


def _packed(message: object) -> bytes:
    return _bytes(json.dumps(message, sort_keys=True, separators=(",", ":"), ensure_ascii=False))


def _bytes(text: str) -> bytes:
    """JSON can carry half a surrogate pair, which strict UTF-8 cannot."""
    return text.encode(errors="surrogatepass")
