"""Plays a corpus against a running kvflow and keeps, of every turn, what was reused and what could have been."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from benchmarks.reuse.client import Answer, Client
from benchmarks.reuse.corpus import Conversation, Kind
from benchmarks.reuse.ideal import AllKnowing

Body = dict[str, Any]
Told = Callable[[], None]
"""Called after each turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Lengths are in tokens."""

    conversation: int
    request: int
    kind: Kind
    body: Body
    answer: Answer
    reusable: int
    """By a cache that knows everything computed before this turn began."""

    @property
    def reused(self) -> int:
        """An engine that finds all of a prompt computes its last token nevertheless."""
        return min(self.answer.cached, len(self.answer.prompt) - 1)


class Player:
    """One run over a corpus, at `users` turns at a time. With one user everything is reproducible."""

    def __init__(
        self, client: Client, conversations: Sequence[Conversation], *, block_size: int, extra: Body, told: Told
    ) -> None:
        self._client = client
        self._conversations = conversations
        # Whatever the engines know of an earlier run is of another salt.
        self._extra = {**extra, "cache_salt": uuid4().hex}
        self._told = told
        self._all = AllKnowing(block_size)
        self._answers: list[list[str]] = [[] for _ in conversations]
        self._ended = [asyncio.Condition() for _ in conversations]
        self._turns: list[Turn] = []

    async def play(self, order: Sequence[tuple[int, int]], users: int) -> list[Turn]:
        """The turns, in the order in which they ended."""
        left = iter(order)
        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(self._user(left))
        return self._turns

    async def _user(self, left: Iterator[tuple[int, int]]) -> None:
        for conversation, request in left:
            answers, ended = self._answers[conversation], self._ended[conversation]
            async with ended:
                await ended.wait_for(lambda: len(answers) == request)  # noqa: B023 - awaited within the iteration
            await self._turn(conversation, request)
            async with ended:
                ended.notify_all()
            self._told()

    async def _turn(self, conversation: int, request: int) -> None:
        script, answers, before = self._conversations[conversation], self._answers[conversation], len(self._all)
        body = {**script.requests[request].body(answers), **self._extra}
        answer = await self._client.ask(body)
        self._turns.append(
            Turn(
                conversation=conversation,
                request=request,
                kind=script.kind,
                body=body,
                answer=answer,
                reusable=self._all.reusable(answer.prompt, before),
            )
        )
        answers.append(answer.text)
        self._all.add(answer.prompt, answer.tokens)


class References:
    """What one engine answers that has never seen anything. Each request is asked once, whatever run it is of."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    async def wrong_tokens(self, turns: Sequence[Turn], client: Client, told: Told) -> list[int]:
        """For each turn, the tokens of its answer that differ from the cold one's, missing and extra ones included."""
        found = []
        for turn in turns:
            key = (turn.body["max_tokens"], *turn.answer.prompt)
            if key not in self._known:
                self._known[key] = await _cold(client, turn.body)
            found.append(_differences(self._known[key], turn.answer.tokens))
            told()
        return found


async def _cold(client: Client, body: Body) -> tuple[int, ...]:
    unique = f"cold-{uuid4().hex}"
    answer = await client.ask({**body, "cache_salt": unique})
    assert answer.cached == 0, "nothing has this salt"
    return answer.tokens


def _differences(right: Sequence[int], given: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(right, given, strict=False)) + abs(len(right) - len(given))
