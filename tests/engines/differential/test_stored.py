"""Answers that an engine has stored, and what it says of its models."""

from typing import Any

import pytest

from tests.engines.differential.compare import Rules, differences
from tests.engines.differential.exchange import JSON, Request, Response, send
from tests.engines.differential.row import MORE, text
from tests.engines.differential.servers import NAME, Pair
from tests.engines.differential.turns import both

pytestmark = pytest.mark.engine

PATH = "/v1/responses"


def respond(servers: Pair, before: tuple[str, str] | None, **body: Any) -> tuple[Response, Response]:
    """On each server, after its own answer of that id."""
    answers = []
    for i, url in enumerate((servers.stock.url, servers.kvflow.url)):
        after = {} if before is None else {"previous_response_id": before[i]}
        whole = {"model": NAME, "max_output_tokens": 8, "temperature": 0, **body, **after}
        answers.append(send(url, Request(PATH, whole, JSON)))
    return answers[0], answers[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_goes_on_with_another(servers: Pair, stream: bool) -> None:
    first = respond(servers, None, input=text(f"Stored, {stream}"))
    assert not differences(*first, Rules())
    ids = (first[0].json["id"], first[1].json["id"])
    second = respond(servers, ids, input=MORE, stream=stream)
    assert not differences(*second, Rules(at_least_as_much_cached=True))
    stored = [send(url, Request(f"{PATH}/{i}", None, {})) for url, i in zip(urls(servers), ids, strict=True)]
    assert stored[0].status == 200
    assert not differences(stored[0], stored[1], Rules())


def urls(servers: Pair) -> tuple[str, str]:
    return servers.stock.url, servers.kvflow.url


@pytest.mark.parametrize("path", ["/v1/models", f"{PATH}/resp_of_nobody", f"{PATH}/nonsense"])
def test_what_is_asked_without_a_body(servers: Pair, path: str) -> None:
    assert not differences(*both(servers, Request(path, None, {})), Rules())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize", "/v1/messages"])
def test_a_method_that_is_not_taken(servers: Pair, path: str) -> None:
    assert not differences(*both(servers, Request(path, None, {})), Rules())
