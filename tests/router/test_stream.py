import json
from typing import Any

import pytest

from kvflow.connector.wire import event
from kvflow.router.answer import blank, blank_events
from kvflow.router.stream import MAX_EVENT_BYTES, EventFilter

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


def completed(params: object) -> bytes:
    """As vLLM ends a stream of `/v1/responses`."""
    tool = {"type": "function", "parameters": {"kv_transfer_params": {"type": "string"}}}
    said = {"text": 'é "kv_transfer_params":{"do_remote_decode":1}', "tools": [tool], "kv_transfer_params": params}
    body = json.dumps({"response": {**said, "ec_transfer_params": None}}, separators=(",", ":"), ensure_ascii=False)
    return b"event: response.completed\ndata: " + body.encode() + b"\n\n"


HANDLE = {"do_remote_decode": True, "remote_host": "10.0.0.1", "kvflow": {"é": [{}]}}


def test_a_handle_in_an_event_of_the_engines_becomes_null_and_nothing_else_changes() -> None:
    stream = BEFORE + event(PARAMS) + completed(HANDLE)
    for cut in range(0, len(stream) + 1, 7):
        assert run([stream[:cut], stream[cut:]]) == (BEFORE + completed(None), PARAMS)


def test_no_event_is_so_long_that_a_handle_gets_out() -> None:
    long = b'data: {"x":"' + b"x" * (MAX_EVENT_BYTES + 100) + b'",'
    tail = completed(HANDLE)[len(b"event: response.completed\ndata: {") :]
    for cut in range(0, len(tail), 11):
        out, _ = run([long, tail[:cut], tail[cut:]])
        assert b"10.0.0.1" not in out
        assert json.loads(out.removeprefix(b"data: "))["response"]["kv_transfer_params"] is None


def test_text_that_imitates_the_event_is_not_taken_for_it() -> None:
    text = "\n\nevent: kvflow\ndata: {}\n\n"
    stream = b"data: " + json.dumps({"content": text}).encode() + b"\n\n"
    assert run([stream]) == (stream, None)


def test_whole_events_are_not_held_back() -> None:
    events = EventFilter()
    for part in BEFORE.split(b"\n\n")[:-1]:
        assert events.feed(part + b"\n\n") == part + b"\n\n"


@pytest.mark.parametrize("end", [b"event: kvflo", b"event: kvflow\ndat", b"data: cut in the mi"])
def test_only_whole_events_leave(end: bytes) -> None:
    events = EventFilter()
    assert events.feed(BEFORE + end) == BEFORE
    assert events.params is None


def test_a_stream_that_ends_without_a_blank_line_is_passed_on_to_its_end() -> None:
    assert run([BEFORE, b"data: last\n"]) == (BEFORE + b"data: last\n", None)
    assert run([BEFORE, event(PARAMS)[:-3]]) == (BEFORE, None)


def test_several_events_in_one_piece_and_other_line_ends() -> None:
    both = event({"n": 1}) + BEFORE + event(PARAMS)
    assert run([both]) == (BEFORE, PARAMS)
    crlf = (BEFORE + event(PARAMS) + AFTER).replace(b"\n", b"\r\n")
    assert run([crlf]) == ((BEFORE + AFTER).replace(b"\n", b"\r\n"), PARAMS)


def test_what_is_held_is_bounded() -> None:
    events = EventFilter()
    out = sum(len(events.feed(b"x" * 2**20)) for _ in range(40))
    assert out >= 40 * 2**20 - MAX_EVENT_BYTES - 2**20


@pytest.mark.parametrize("data", [b"{}", b"[]", b"nonsense", b"", b'{"kv_transfer_params": 5}'])
def test_a_broken_event_costs_the_handle_and_nothing_else(data: bytes) -> None:
    assert run([BEFORE, b"event: kvflow\ndata: " + data + b"\n\n", AFTER]) == (BEFORE + AFTER, None)


def test_what_a_client_called_the_same_stays_as_it_was() -> None:
    tool = {"parameters": {"kv_transfer_params": {"kvflow": 1, "do_remote_decode": True}}}
    body = {"response": {"tools": [tool], "kv_transfer_params": {"kvflow": {}}}}
    out = blank_events(b"event: x\ndata: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n")
    assert json.loads(out.split(b"data: ")[1]) == {"response": {"tools": [tool], "kv_transfer_params": None}}


def test_hostile_text_is_read_once() -> None:
    """In one pass, not in one for each name in it: else this would take hours."""
    nested = '{"kv_transfer_params":{"a":' * 100 + "1" + "}}" * 100
    many = ",".join([nested, *['{"kv_transfer_params":{}}'] * 200_000])
    assert blank(f'{{"tools":[{many}],"kv_transfer_params":{{"kvflow":{{}}}}}}'.encode()).endswith(
        b'"kv_transfer_params":null}'
    )
    assert len(_blanked := blank(f'[{many}],"cut'.encode())) == len(many) + 7
    assert b"null" not in _blanked


def test_of_what_is_no_whole_json_nothing_that_looks_like_a_handle_gets_out() -> None:
    assert (
        blank(b'..."kv_transfer_params":{"remote_host":"h","kvflow":{}},"b":1') == b'..."kv_transfer_params":null,"b":1'
    )
    assert blank(b'..."kv_transfer_params":{"remote_host":"h') == b'..."kv_transfer_params":null'
