"""What may differ between two responses, and everything that does differ beyond that."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.engines.differential.events import comparable, same_frames
from tests.engines.differential.exchange import Response
from tests.engines.serving import BLOCK

LOGPROB_TOLERANCE = 2e-3
"""The same sums in another order differ by less than 1e-4; one other token, however far away, by more than 1e-1."""

_TIMES = frozenset({"created", "created_at", "completed_at"})
_HEADERS_OF_THE_SERVER = ("date", "server", "content-length", "transfer-encoding", "connection")
_CACHED = frozenset({"cached_tokens", "cache_read_input_tokens"})
_ADDED = frozenset({"created_cache_tokens", "cache_write_tokens", "cache_creation_input_tokens"})
"""Tokens that were not in a cache and now are."""
_RANDOM = re.compile(r"[0-9a-f]{16,}|(?<=-)[0-9a-f]{8}\b|(?<=msg_)\d+")


@dataclass(frozen=True, slots=True)
class Rules:
    at_least_as_much_cached: bool = False
    """After a first turn, kvflow may have found more of the prompt than whole blocks of one engine's prefix cache."""


def differences(stock: Response, kvflow: Response, rules: Rules) -> list[str]:
    """In words; empty where kvflow answered as the stock engine did."""
    found = list(_unequal("status", stock.status, kvflow.status, rules))
    found += _unequal("headers", _headers(stock), _headers(kvflow), rules)
    if stock.streamed and kvflow.streamed:
        found += _unequal_streams(stock, kvflow, rules)
    elif stock.headers.get("content-type") == "application/json":
        found += _unequal("body", stock.json, kvflow.json, rules)
    elif stock.raw != kvflow.raw:
        found.append(f"raw: {stock.raw!r} != {kvflow.raw!r}")
    return found


def _unequal_streams(stock: Response, kvflow: Response, rules: Rules) -> Iterator[str]:
    """Where an engine breaks off its stream, which is a fault of its own, kvflow says so in one event more."""
    events = kvflow.events[:-1] if stock.broken_off else kvflow.events
    ours, theirs = comparable(events), comparable(stock.events)
    pairs = zip(theirs.pop("frames"), ours.pop("frames"), strict=False)
    yield from (f"frames: {a} != {b}" for a, b in pairs if not same_frames(a, b))
    yield from _unequal("stream", theirs, ours, rules)


def _headers(response: Response) -> dict[str, str]:
    """Without those of the HTTP server. Some refusals of vLLM do not pass what adds `vary`."""
    left_out = {*_HEADERS_OF_THE_SERVER, "vary"} if response.status >= 400 else _HEADERS_OF_THE_SERVER
    return {k: v for k, v in response.headers.items() if k not in left_out and not k.startswith("x-kvflow-")}


def _unequal(at: str, stock: Any, kvflow: Any, rules: Rules) -> Iterator[str]:
    match stock, kvflow:
        case dict(), dict():
            yield from _unequal_objects(at, stock, kvflow, rules)
        case list(), list():
            if len(stock) != len(kvflow):
                yield f"{at}: {len(stock)} items, {len(kvflow)} from kvflow: {stock!r:.1500} != {kvflow!r:.1500}"
            for i, (a, b) in enumerate(zip(stock, kvflow, strict=False)):
                yield from _unequal(f"{at}[{i}]", a, b, rules)
        case float(), float() if abs(stock - kvflow) <= LOGPROB_TOLERANCE:
            return
        case str(), str() if _RANDOM.sub("#", stock) == _RANDOM.sub("#", kvflow):
            return
        case _:
            if type(stock) is not type(kvflow) or stock != kvflow:
                yield f"{at}: {stock!r:.1500} != {kvflow!r:.1500}"


def _with_total(usage: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's `input_tokens` are those that are neither cached nor added, so that only their sum must be equal."""
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    if "cache_read_input_tokens" not in usage:
        return usage
    return {**usage, "input_tokens": sum(usage.get(part) or 0 for part in parts)}


def _as_much_cached(key: str, stock: Any, kvflow: Any) -> bool:
    """Null is none. One engine finds whole blocks, so a block is the most that kvflow can have found beyond."""
    if key not in _CACHED | _ADDED:
        return False
    more = int((kvflow or 0) - (stock or 0))
    return 0 <= (more if key in _CACHED else -more) <= BLOCK


def _unequal_objects(at: str, stock: dict[str, Any], kvflow: dict[str, Any], rules: Rules) -> Iterator[str]:
    if list(stock) != list(kvflow):
        yield f"{at}: {list(stock)} != {list(kvflow)}"
    stock, kvflow = _with_total(stock), _with_total(kvflow)
    for key in stock.keys() & kvflow.keys():
        a, b = stock[key], kvflow[key]
        if key in _TIMES and type(a) is type(b):
            continue
        if rules.at_least_as_much_cached and _as_much_cached(key, a, b):
            continue
        yield from _unequal(f"{at}.{key}", a, b, rules)
