"""Streams that were cut into events at other places, made comparable.

How many tokens an event carries depends on how fast the server takes them from the engine. So of the events of each
choice what they say is joined, and how they say it is listed: the frames, which are events without their text.
"""

import json
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

from tests.engines.differential.exchange import Event

_PAYLOAD = ("delta", "text", "logprobs", "token_ids")
"""Of a choice: what depends on how many tokens an event carries."""
_APPENDED = frozenset({"content", "reasoning", "text", "arguments", "delta", "partial_json", "thinking"})
"""Fields whose text comes piece by piece."""
_INDEXED = ("choices", "tool_calls")
_OF_TYPED = frozenset({"sequence_number"})

Frames = list[Any]


def comparable(events: Sequence[Event]) -> dict[str, Any]:
    """`said` and `frames` by choice, in the order in which choices begin; `others` are events of no choice."""
    choices: dict[int, list[Any]] = {}
    others: list[Event] = []
    for event in events:
        choice = _choice(event)
        if choice is None:
            others.append(event)
        else:
            choices.setdefault(choice, []).append(event.data)
    numbers = sorted(choices)
    return {
        "choices": numbers,
        "said": [_sorted(reduce(_joined, choices[n], {})) for n in numbers],
        "frames": [_once(map(_frame, choices[n])) for n in numbers],
        "others": _runs(others),
    }


def same_frames(a: Frames, b: Frames) -> bool:
    """Whether they differ at most by frames that one of them skips because it said the same in fewer events."""
    shorter, longer = sorted((a, b), key=len)
    rest = iter(longer)
    return all(frame in rest for frame in shorter) and a[-1:] == b[-1:]


def _choice(event: Event) -> int | None:
    choices = event.data.get("choices") if isinstance(event.data, dict) else None
    return choices[0]["index"] if choices and not event.name else None


def _frame(chunk: dict[str, Any]) -> Any:
    return [
        _shape({k: v for k, v in chunk.items() if k != "choices"}),
        _shape({k: v for k, v in chunk["choices"][0].items() if k not in _PAYLOAD}),
        chunk["choices"][0].get("finish_reason"),
    ]


def _shape(data: Any) -> Any:
    if isinstance(data, dict):
        return [[k, _shape(v)] for k, v in data.items()]
    return type(data).__name__


def _once(frames: Iterable[Any]) -> Frames:
    out: Frames = []
    for frame in frames:
        if frame not in out[-1:]:
            out.append(frame)
    return out


def _runs(events: Sequence[Event]) -> list[Any]:
    """Events with a type of their own (of Responses and Messages), those of one type joined that follow one another."""
    out: list[list[Any]] = []
    for event in events:
        data = (
            {k: v for k, v in event.data.items() if k not in _OF_TYPED} if isinstance(event.data, dict) else event.data
        )
        if event.name and out and out[-1][0] == event.name:
            out[-1][1] = _joined(out[-1][1], data)
        else:
            out.append([event.name, data])
    return out


def _joined(a: Any, b: Any, key: str = "") -> Any:
    """What two events say together. Null says nothing."""
    match a, b:
        case dict(), dict():
            return {k: _joined(a.get(k), b.get(k), k) for k in {**a, **b}}
        case ((None | list()), list()) if key in _INDEXED:
            return _by_index([*(a or []), *b])
        case list(), list():
            return a + b
        case str(), str() if key in _APPENDED:
            return a + b
    return a if b is None else b


def _by_index(pieces: Sequence[dict[str, Any]]) -> list[Any]:
    """Pieces of choices or tool calls, of which one event may carry several."""
    found: dict[int, Any] = {}
    for piece in pieces:
        found[piece["index"]] = _joined(found.get(piece["index"], {}), piece)
    return list(found.values())


def _sorted(data: Any) -> Any:
    return json.loads(json.dumps(data, sort_keys=True))
