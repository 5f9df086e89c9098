"""The comparison itself: what it lets pass, and that it lets nothing else pass. Starts nothing."""

import json
from typing import Any

import pytest

from tests.engines.differential.compare import LOGPROB_TOLERANCE, Rules, differences
from tests.engines.differential.exchange import Response


def whole(**changes: Any) -> Response:
    logprob = changes.pop("logprob", -1.0)
    choice = {"index": 0, "text": "a lamp", "logprobs": {"token_logprobs": [logprob]}, "finish_reason": "stop"}
    body = {
        "id": "cmpl-0123456789abcdef",
        "created": 1,
        "choices": [choice],
        "usage": {"cached_tokens": 128},
        **changes,
    }
    return Response(200, {"content-type": "application/json"}, json.dumps(body).encode())


def stream(*pieces: str, done: bool = True, finish: str = "stop") -> Response:
    """The last piece comes with the finish reason."""
    events = [{"choices": [{"index": 0, "text": p, "finish_reason": None}]} for p in pieces]
    events[-1]["choices"][0]["finish_reason"] = finish
    data = [*map(json.dumps, events), *(["[DONE]"] if done else [])]
    raw = "".join(f"data: {d}\n\n" for d in data).encode()
    return Response(200, {"content-type": "text/event-stream; charset=utf-8"}, raw)


@pytest.mark.parametrize(
    "other",
    [
        whole(),
        whole(id="cmpl-fedcba9876543210"),
        whole(created=2),
        whole(logprob=-1.0 + LOGPROB_TOLERANCE / 2),
    ],
)
def test_what_two_engines_never_have_in_common_may_differ(other: Response) -> None:
    assert not differences(whole(), other, Rules())


@pytest.mark.parametrize(
    "other",
    [
        whole(id="chatcmpl-0123456789abcdef"),
        whole(created="1"),
        whole(more=None),
        whole(logprob=-1.0 + LOGPROB_TOLERANCE * 2),
        whole(logprob=None),
        whole(choices=[]),
        whole(usage={"cached_tokens": 256}),
        Response(404, {"content-type": "application/json"}, whole().raw),
        Response(200, {"content-type": "text/plain"}, whole().raw),
        Response(200, {"content-type": "application/json", "vary": "Origin"}, whole().raw),
    ],
)
def test_everything_else_is_a_difference(other: Response) -> None:
    assert differences(whole(), other, Rules())


@pytest.mark.parametrize(("cached", "equal"), [(256, True), (128, True), (127, False)])
def test_a_second_turn_may_find_more_of_its_prompt(cached: int, equal: bool) -> None:
    found = differences(whole(), whole(usage={"cached_tokens": cached}), Rules(at_least_as_much_cached=True))
    assert (not found) == equal


@pytest.mark.parametrize("pieces", [("a", " ", "lamp"), ("a lamp",), ("a ", "lamp")])
def test_a_stream_may_be_cut_anywhere(pieces: tuple[str, ...]) -> None:
    assert not differences(stream("a", " lamp"), stream(*pieces), Rules())


@pytest.mark.parametrize(
    "other",
    [
        stream("a", " map"),
        stream("a", " lamp", done=False),
        stream("a", " lamp", finish="length"),
        Response(200, {"content-type": "text/event-stream; charset=utf-8"}, b"event: kvflow\n" + stream("a lamp").raw),
        whole(),
    ],
)
def test_but_must_say_the_same_in_the_same_frames(other: Response) -> None:
    assert differences(stream("a", " lamp"), other, Rules())
