"""One turn over HTTP, and what its answer says about tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvflow.connector.wire import NODE_PATH, NodeReport
from kvflow.errors import KvflowError
from kvflow.nodes.simulated.language import END, render, token_id, tokenize

TIMEOUT_S = 1800.0


class PlayError(KvflowError):
    """A turn that could not be played."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    prompt: tuple[int, ...]
    """Token ids of the prompt, as the engine made them of the messages."""
    tokens: tuple[int, ...]
    """Token ids of the answer, the one that ends it included."""
    cached: int
    """Tokens of the prompt that no engine computed for this turn: `usage.prompt_tokens_details.cached_tokens`."""
    pulled: int
    path: str
    reason: str
    """Empty where there is nothing to say."""


class Client:
    """Asks one router, or one engine on its own."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def ask(self, body: Mapping[str, Any]) -> Answer:
        """Raises `PlayError` for everything but an answer."""
        sent = {**body, "return_token_ids": True}
        try:
            async with self._session.post(f"{self._url}/v1/chat/completions", json=sent) as response:
                if response.status != 200:
                    raise PlayError(f"a turn was answered with {response.status}: {(await response.text())[:500]}")
                return read(body, await response.json(), response.headers)
        except (aiohttp.ClientError, TimeoutError) as e:
            raise PlayError(f"a turn got no answer from {self._url}: {e!r}") from None


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def block_size(http: aiohttp.ClientSession, engine: str) -> int:
    """Tokens in a block, as an engine with kvflow's connector says."""
    async with http.get(engine + NODE_PATH) as response:
        return NodeReport.from_wire(await response.json()).block_size


def read(sent: Mapping[str, Any], body: Mapping[str, Any], headers: Mapping[str, str]) -> Answer:
    choice, details = body["choices"][0], body["usage"].get("prompt_tokens_details") or {}
    text = choice["message"]["content"] or ""
    prompt, tokens = body.get("prompt_token_ids"), choice.get("token_ids")
    if prompt is None or tokens is None:
        prompt, tokens = _simulated(sent, text, choice["finish_reason"])
    _check(body["usage"], prompt, tokens)
    return Answer(
        text=text,
        prompt=tuple(prompt),
        tokens=tuple(tokens),
        cached=details.get("cached_tokens") or 0,
        pulled=int(headers.get("x-kvflow-pulled-tokens", 0)),
        path=headers.get("x-kvflow-path", ""),
        reason=headers.get("x-kvflow-reason", ""),
    )


def _simulated(sent: Mapping[str, Any], text: str, finish: str) -> tuple[list[int], list[int]]:
    """The token ids that a simulated engine does not return."""
    end = [token_id(END)] if finish == "stop" else []
    return tokenize(render(sent["messages"], sent.get("tools"))), tokenize(text) + end


def _check(usage: Mapping[str, Any], prompt: list[int], tokens: list[int]) -> None:
    """Every figure rests on these ids, so they must be the engine's."""
    counted = (usage["prompt_tokens"], usage["completion_tokens"])
    if counted != (len(prompt), len(tokens)):
        raise PlayError(
            f"the engine counts {counted[0]} and {counted[1]} tokens of a prompt and its answer, but names "
            f"{len(prompt)} and {len(tokens)}: it must return token ids, or be a simulated one"
        )
