"""What a handle covers, in hashes: the decode node writes it down, the prefill node checks the next prompt against it.

A digest covers a span of `stride` blocks and, being chained, everything before it. Equal digests therefore mean equal
prefixes: the same tokens, under the same identity, with the same multimodal items in the same places.
"""

import base64
import binascii
import hashlib
import json
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvflow.errors import WireError

DIGEST_SIZE = 16
MAX_DIGESTS = 512
_MAX_DIGESTS_READ = 4096
_MAX_TOKENS = 2**31
_PERSON = b"kvflow-1"


@dataclass(frozen=True, slots=True)
class Item:
    """A multimodal item: the engine's hash of its content, and the tokens of the prompt that it fills."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything besides the token ids that a prompt's KV depends on, and that two requests to one model may differ in.

    The cache salt changes no KV, but whoever sets it asks not to share any.
    """

    cache_salt: str | None = None
    lora: tuple[str, str] | None = None
    """Name and path of the adapter."""
    items: tuple[Item, ...] = ()
    """By ascending offset."""

    def root(self) -> bytes:
        name, path = self.lora or (None, None)
        text = json.dumps([self.cache_salt or None, name, path])
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_SIZE, person=_PERSON).digest()

    def marks(self, start: int, end: int) -> bytes:
        """The items that overlap the tokens `start` to `end`, placed relative to `start`."""
        found = [[i.identifier, i.offset - start, i.length] for i in self.items if _overlaps(i, start, end)]
        return json.dumps(found).encode() if found else b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    block_size: int
    """Tokens per KV block."""
    stride: int
    """Blocks per digest."""
    tokens: int
    digests: tuple[bytes, ...]
    """One per whole span."""
    tail: bytes | None = None
    """Of the tokens behind the last whole span; None where there are none."""

    @classmethod
    def of(
        cls, tokens: Sequence[int], block_size: int, identity: Identity, max_digests: int = MAX_DIGESTS
    ) -> Self | None:
        """None where the ids are none that KV could be told by: below 0, or wider than 32 bits."""
        packed = _pack(tokens)
        if packed is None:
            return None
        blocks = len(tokens) // block_size
        stride = max(1, -(-blocks // max_digests))
        whole = len(tokens) // (stride * block_size)
        chain = list(_chain(packed, identity, stride * block_size))
        return cls(
            block_size=block_size,
            stride=stride,
            tokens=len(tokens),
            digests=tuple(chain[:whole]),
            tail=chain[whole] if len(chain) > whole else None,
        )

    def common_prefix(self, tokens: Sequence[int], identity: Identity) -> int:
        """How many tokens at the start of a prompt are proven to be those of the fingerprint.

        All of `self.tokens` if the prompt begins with them; else a multiple of the span, at most one span short.
        """
        packed = _pack(tokens[: self.tokens])
        if packed is None:
            return 0
        verified = 0
        # A prompt that ends inside a span hashes to something else there, because a digest covers its own length.
        for end, theirs, ours in zip(
            self._ends(), self._expected(), _chain(packed, identity, self._span), strict=False
        ):
            if theirs != ours:
                break
            verified = end
        return verified

    def provable(self, length: int) -> int:
        """What `common_prefix` is for a prompt of `length` tokens that differs nowhere."""
        return self.tokens if length >= self.tokens else length - length % self._span

    def to_wire(self) -> dict[str, Any]:
        out: dict[str, Any] = {"block_size": self.block_size, "stride": self.stride, "tokens": self.tokens}
        return {**out, "digests": base64.b64encode(b"".join(self._expected())).decode()}

    @classmethod
    def from_wire(cls, data: object) -> Self:
        """Raises `WireError`."""
        if not isinstance(data, Mapping):
            raise WireError(f"fingerprint: expected an object, got {type(data).__name__}")
        block_size, stride, tokens = (_natural(data, key) for key in ("block_size", "stride", "tokens"))
        digests = _digests(data.get("digests"))
        whole, rest = divmod(tokens, block_size * stride)
        if len(digests) != whole + (rest > 0):
            raise WireError(f"fingerprint: {len(digests)} digests do not cover {tokens} tokens")
        return cls(
            block_size=block_size,
            stride=stride,
            tokens=tokens,
            digests=tuple(digests[:whole]),
            tail=digests[whole] if rest else None,
        )

    @property
    def _span(self) -> int:
        return self.stride * self.block_size

    def _ends(self) -> Iterator[int]:
        yield from range(self._span, self.tokens, self._span)
        yield self.tokens

    def _expected(self) -> tuple[bytes, ...]:
        return self.digests if self.tail is None else (*self.digests, self.tail)


def prompt_digest(tokens: Sequence[int], identity: Identity) -> str | None:
    """Of a whole prompt: equal on two nodes if and only if they would compute the same KV. None as in `of`."""
    packed = _pack(tokens)
    return None if not packed else next(_chain(packed, identity, len(packed))).hex()


def _overlaps(item: Item, start: int, end: int) -> bool:
    return item.offset < end and item.offset + item.length > start


def _pack(tokens: Sequence[int]) -> "array[int] | None":
    """Little-endian 32-bit words: nodes of different machines must agree, and hashing words one by one is slow."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError):
        return None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def _chain(packed: "array[int]", identity: Identity, span: int) -> Iterator[bytes]:
    view, digest = memoryview(packed), identity.root()
    for start in range(0, len(packed), span):
        chunk = view[start : start + span]
        digest = _link(digest, chunk, identity.marks(start, start + len(chunk)))
        yield digest


def _link(previous: bytes, chunk: memoryview, marks: bytes) -> bytes:
    h = hashlib.blake2b(previous, digest_size=DIGEST_SIZE, person=_PERSON)
    h.update(struct.pack("<II", len(chunk), len(marks)))
    h.update(chunk)
    h.update(marks)
    return h.digest()


def _natural(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if type(value) is not int or not 0 < value <= _MAX_TOKENS:
        raise WireError(f"fingerprint: {key} must be a positive whole number")
    return value


def _digests(text: object) -> list[bytes]:
    if not isinstance(text, str) or len(text) > 2 * DIGEST_SIZE * _MAX_DIGESTS_READ:
        raise WireError("fingerprint: digests must be a string of bounded length")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise WireError("fingerprint: digests are not base64") from None
    if len(data) % DIGEST_SIZE:
        raise WireError(f"fingerprint: digests are not a multiple of {DIGEST_SIZE} bytes")
    return [data[i : i + DIGEST_SIZE] for i in range(0, len(data), DIGEST_SIZE)]
