"""A row on both servers, as a first turn and as the second one of a conversation."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.engines.differential.compare import Rules, differences
from tests.engines.differential.exchange import Request, Response, send
from tests.engines.differential.row import MORE, Row, text, user, with_text
from tests.engines.differential.servers import Pair

OF_THE_PROMPT = frozenset(
    {
        "add_special_tokens",
        "cache_salt",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "input",
        "instructions",
        "messages",
        "model",
        "output_config",
        "prompt",
        "reasoning",
        "reasoning_effort",
        "session_id",
        "system",
        "tools",
    }
)
"""Fields of a row that its first turn must share, or its second turn would not go on with it."""

LIMIT = {"/v1/responses": "max_output_tokens"}


def both(pair: Pair, request: Request) -> tuple[Response, Response]:
    """At the same time: they have nothing in common."""
    with ThreadPoolExecutor() as pool:
        stock, kvflow = pool.map(lambda url: send(url, request), (pair.stock.url, pair.kvflow.url))
    return stock, kvflow


def first_turn(pair: Pair, row: Row, stream: bool) -> tuple[list[str], Response, Response]:
    stock, kvflow = both(pair, row.request(stream=stream))
    return differences(stock, kvflow, Rules()), stock, kvflow


def second_turn(pair: Pair, row: Row, stream: bool) -> tuple[list[str], Response, Response]:
    """A plain turn about the same, then one with the row's parameters that goes on with it."""
    assert isinstance(row.body, Mapping)
    body = with_text(row.body, text(f"{row}, then {stream}"))
    begin = {k: v for k, v in body.items() if k in OF_THE_PROMPT}
    begin |= {LIMIT.get(row.path, "max_tokens"): 8, "temperature": 0}
    stock, kvflow = both(pair, Request(row.path, begin, row.headers))
    assert (stock.status, kvflow.status) == (200, 200), (stock.raw, kvflow.raw)
    went_on = {**body, **_gone_on(body, stock.json, kvflow.json)}
    stock, kvflow = both(pair, Request(row.path, {**went_on, "stream": stream} if stream else went_on, row.headers))
    return differences(stock, kvflow, Rules(at_least_as_much_cached=True)), stock, kvflow


def _gone_on(body: Mapping[str, Any], *answers: Any) -> dict[str, Any]:
    """The conversation with its answer, on which both must agree, and what comes next."""
    said, as_kvflow_says = map(_said, answers)
    assert said == as_kvflow_says
    for field in ("messages", "input"):
        before = body.get(field)
        if isinstance(before, str):
            before = [user(before)]
        if before:
            last = before[-1]
            unfinished = [last] if last.get("role") == "assistant" else []
            return {field: [*before, {"role": "assistant", "content": said}, user(MORE), *unfinished]}
    prompt = body["prompt"]
    if isinstance(prompt, str):
        return {"prompt": prompt + said + MORE}
    if type(prompt[0]) is int:
        return {"prompt": [*prompt, *range(500, 560)]}
    return {}


def _said(answer: Any) -> str:
    """The text of an answer of any endpoint."""
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"] or "")
    parts = (
        [c for item in answer["output"] for c in item.get("content") or []] if "output" in answer else answer["content"]
    )
    return "".join(part.get("text") or "" for part in parts)
