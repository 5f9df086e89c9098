import json
from typing import Any

import pytest

from kvflow.connector.wire import event
from kvflow.router.stream import EventFilter

PARAMS = {"remote_block_ids": [[1, 2, 3]], "kvflow": {"retained": True}}
BEFORE = b'data: {"a": "event: kvflow"}\n\ndata: {"b": "\\nevent: kvflow\\n"}\n\n'
AFTER = b'data: {"c": 1}\n\ndata: [DONE]\n\n'


def run(chunks: list[bytes]) -> tuple[bytes, dict[str, Any] | None]:
    events, out = EventFilter(), b""
    for chunk in chunks:
        out += events.feed(chunk)
    return out + events.rest(), events.params


@pytest.mark.parametrize("before", [b"", BEFORE], ids=["first", "later"])
@pytest.mark.parametrize("after", [b"", AFTER], ids=["last", "followed"])
def test_the_event_is_taken_out_wherever_the_network_cuts(before: bytes, after: bytes) -> None:
    stream = before + event(PARAMS) + after
    for cut in range(len(stream) + 1):
        assert run([stream[:cut], stream[cut:]]) == (before + after, PARAMS)
    assert run([bytes([b]) for b in stream]) == (before + after, PARAMS)


def test_a_stream_without_the_event_is_passed_on_unchanged() -> None:
    for cut in range(len(BEFORE + AFTER)):
        assert run([(BEFORE + AFTER)[:cut], (BEFORE + AFTER)[cut:]]) == (BEFORE + AFTER, None)


def test_text_that_imitates_the_event_is_not_taken_for_it() -> None:
    text = "\n\nevent: kvflow\ndata: {}\n\n"
    stream = b"data: " + json.dumps({"content": text}).encode() + b"\n\n"
    assert run([stream]) == (stream, None)


def test_whole_events_are_not_held_back() -> None:
    events = EventFilter()
    for part in BEFORE.split(b"\n\n")[:-1]:
        assert events.feed(part + b"\n\n") == part + b"\n\n"


@pytest.mark.parametrize("end", [b"event: kvflo", b"event: kvflow\ndat", b"data: cut in the mi"])
def test_a_stream_that_breaks_off_owes_nothing_of_ours(end: bytes) -> None:
    out, params = run([BEFORE, end])
    assert params is None
    assert out in (BEFORE + end, BEFORE)
    assert b"event: kvflow\ndat" not in out


@pytest.mark.parametrize("data", [b"{}", b"[]", b"nonsense", b"", b'{"kv_transfer_params": 5}'])
def test_a_broken_event_costs_the_handle_and_nothing_else(data: bytes) -> None:
    assert run([BEFORE, b"event: kvflow\ndata: " + data + b"\n\n", AFTER]) == (BEFORE + AFTER, None)
