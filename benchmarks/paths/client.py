"""One streamed turn over HTTP, and when its first token came."""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from benchmarks.paths.grid import Message
from kvflow.errors import KvflowError

TIMEOUT_S = 600.0
_NONE: Mapping[str, str] = {}


class TurnError(KvflowError):
    """A turn that was not answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    first_s: float
    """From sending the request to the first event of the answer."""
    path: str
    pulled: int


class Client:
    """Asks as one tenant."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session = session
        self._url = f"{url}/v1/chat/completions"
        self._headers = {"authorization": f"Bearer {key}"}

    async def ask(self, messages: Sequence[Message], *, tokens: int, headers: Mapping[str, str] = _NONE) -> Answer:
        """A greedy turn of exactly `tokens` tokens. Raises `TurnError`."""
        began, first, text = time.perf_counter(), 0.0, ""
        async with self.stream(messages, tokens=tokens, headers=headers) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - began
                    text += _text(line)
            said = response.headers
        return Answer(
            text=text, first_s=first, path=said["x-kvflow-path"], pulled=int(said.get("x-kvflow-pulled-tokens", 0))
        )

    @asynccontextmanager
    async def stream(
        self, messages: Sequence[Message], *, tokens: int, headers: Mapping[str, str] = _NONE
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        limits = {"max_tokens": tokens, "min_tokens": tokens, "temperature": 0}
        body = {"messages": list(messages), "stream": True, **limits}
        try:
            sent = {**self._headers, **headers}
            async with self._session.post(self._url, json=body, headers=sent) as response:
                if response.status != 200:
                    raise TurnError(f"a turn was answered with {response.status}: {(await response.text())[:500]}")
                yield response
        except (TimeoutError, aiohttp.ClientError) as e:
            raise TurnError(f"a turn got no answer: {e!r}") from None


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


def _text(line: bytes) -> str:
    choices = json.loads(line[6:]).get("choices") or [{}]
    return str((choices[0].get("delta") or {}).get("content") or "")
