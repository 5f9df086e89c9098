"""A toy tokenizer and a toy model whose answers depend on every KV value they read, as real ones do.

A KV value stands for what attention would find at one position: it depends on the token there and, through the value
before it, on all earlier tokens. The next word is a hash of all values read. KV of other tokens, or of the right tokens
behind other ones, therefore gives another answer, just as with a real model.
"""

import re
from binascii import crc32
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from json import dumps
from typing import Any

END = "<|im_end|>"
_START = "<|im_start|>"
_PIECE = re.compile(r"<\|\w+\|>| ?\w{1,8}|.", re.DOTALL)
_MASK = 2**64 - 1
_WORDS = tuple(
    """
amber anchor apple arrow autumn basin beacon birch blue bridge bright brook candle canyon carry cedar circle clay
cloud coast copper coral cotton crystal dawn delta desert distant drift early earth east echo ember evening fern
field flint forest frost garden gentle glass golden granite grove harbor hazel hidden hollow island ivory jade
juniper kettle lantern larch ledge light linen lunar maple marble meadow mellow mirror mist moon morning moss
mountain narrow nectar north oak oasis ocean olive onyx opal orchard pebble pine plain quartz quiet rain raven reed
ridge river rose rust saffron sand shadow shore silver sky slate slow snow south sparrow spring star still stone
storm summer sun thistle thunder tide timber valley velvet violet walnut water west wheat wild willow wind winter
""".split()  # noqa: SIM905 - a list literal would have a line for each
)


def tokenize(text: str) -> list[int]:
    """One id below 2**31 a piece: a special token, up to eight letters with the space before them, or one character."""
    return [token_id(piece) for piece in _PIECE.findall(text)]


def token_id(piece: str) -> int:
    return crc32(piece.encode(errors="surrogatepass")) & 0x7FFFFFFF


def render(messages: Sequence[Mapping[str, Any]], tools: object = None, *, open_answer: bool = True) -> str:
    """The prompt of a chat: a marker, the role and the text of each message."""
    parts = [f"{_START}tools\n{dumps(tools)}{END}\n"] if tools else []
    parts += [f"{_START}{m.get('role', 'user')}\n{_text(m)}{END}\n" for m in messages]
    return "".join(parts) + (f"{_START}assistant\n" if open_answer else "")


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    calls = message.get("tool_calls")
    return content + (dumps(calls) if calls else "")


def kv(before: int, token: int) -> int:
    """The KV value of `token` behind the value `before`; 0 stands before the first token."""
    return ((before ^ token) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _MASK


def attend(state: int, values: Iterable[int]) -> int:
    """Read KV values, in order, into what the model knows."""
    for value in values:
        state = ((state ^ value) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
    return state


def word(state: int) -> str:
    """The greedy continuation."""
    return _WORDS[_draw(state, b"word") % len(_WORDS)]


def answer_length(state: int, least: int, most: int) -> int:
    """Words after which the model ends its answer, given what it knew before the first."""
    return least + _draw(state, b"length") % (most - least + 1)


def _draw(state: int, purpose: bytes) -> int:
    return int.from_bytes(blake2b(state.to_bytes(8), digest_size=8, person=purpose).digest())
