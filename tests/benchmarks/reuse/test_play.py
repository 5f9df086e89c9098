"""The benchmark against a kvflow in this process."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from benchmarks.reuse.client import Client, PlayError, block_size, session
from benchmarks.reuse.corpus import Kind, corpus, interleaved
from benchmarks.reuse.play import Player, References, Turn
from benchmarks.reuse.report import judge, sum_of
from kvflow.nodes.simulated import Settings
from kvflow.types import Role
from tests.cluster import BLOCK, Cluster, cluster

SEED = 4


def with_caches(_: Role) -> Settings:
    return Settings(block_size=BLOCK)


async def played(
    c: Cluster, *kinds: Kind, each: int = 2, users: int = 1, told: Callable[[], None] = lambda: None
) -> list[Turn]:
    conversations = corpus(SEED, each=each, kinds=kinds)
    async with session() as http:
        player = Player(Client(http, c.url), conversations, block_size=BLOCK, extra={}, told=told)
        return await player.play(interleaved(conversations, SEED, open_at_once=3), users)


async def wrong_tokens(c: Cluster, turns: Sequence[Turn]) -> list[int]:
    async with session() as http:
        return await References().wrong_tokens(turns, Client(http, c.reference.spec.url), lambda: None)


async def test_a_growing_conversation_pulls_all_there_is() -> None:
    async with cluster(policy="aggressive") as c:
        turns = await played(c, Kind.GROWING, each=1)
        total = sum_of(judge(turns, await wrong_tokens(c, turns)))
    assert total.reusable > 1000
    assert (total.reused, total.pulled, total.missed, total.wrong) == (total.reusable, total.reusable, 0, 0)


async def test_without_reuse_everything_is_missed() -> None:
    async with cluster(policy="off") as c:
        turns = await played(c, Kind.GROWING, each=1)
        total = sum_of(judge(turns, await wrong_tokens(c, turns)))
    assert (total.reused, total.share) == (0, 0)
    assert total.missed == total.reusable > 1000


@pytest.mark.parametrize("settings", [with_caches, lambda _: Settings(block_size=BLOCK, prefix_caching=False)])
async def test_nothing_is_reused_that_is_not_reusable(settings: Callable[[Role], Settings]) -> None:
    async with cluster(policy="aggressive", settings=settings) as c:
        turns = await played(c, *Kind, each=1, users=3)
        wrong = await wrong_tokens(c, turns)
    assert sum(wrong) == 0
    assert {t.kind for t in turns} == set(Kind)
    for turn in turns:
        assert 0 <= turn.reused <= turn.reusable


async def test_what_others_began_with_is_reusable_too() -> None:
    async with cluster(policy="aggressive", settings=with_caches) as c:
        turns = await played(c, Kind.GROWING, each=4)
    first = [t for t in turns if t.request == 0]
    assert first[0].reusable == 0
    assert any(t.reusable >= BLOCK and t.reused == t.reusable for t in first)


async def test_an_earlier_run_does_not_count() -> None:
    """With a policy whose paths do not depend on lengths of prompts, which kvflow learns to estimate."""
    async with cluster(policy="balanced", settings=with_caches) as c:
        first, second = [await played(c, Kind.EDITED) for _ in range(2)]
    figures = [[(t.reusable, t.reused, t.answer.tokens) for t in turns] for turns in (first, second)]
    assert figures[0] == figures[1]


async def test_wrong_tokens_are_counted() -> None:
    async with cluster() as c:
        turns = await played(c, Kind.GROWING, each=1)
        a, b, *rest = turns
        tokens = (a.answer.tokens[0] + 1, *a.answer.tokens[1:], 7)
        a = replace(a, answer=replace(a.answer, tokens=tokens))
        b = replace(b, answer=replace(b.answer, tokens=b.answer.tokens[:-3]))
        assert await wrong_tokens(c, [a, b, *rest]) == [2, 3, *(0 for _ in rest)]


async def test_each_request_is_asked_cold_once() -> None:
    async with cluster() as c, session() as http:
        turns = await played(c, Kind.REGENERATED, each=1)
        c.reference.app.received.clear()
        references, client = References(), Client(http, c.reference.spec.url)
        for _ in range(2):
            await references.wrong_tokens(turns, client, lambda: None)
        assert len(c.reference.app.received) == len({t.answer.prompt for t in turns}) < len(turns)


async def test_progress_is_told_turn_by_turn() -> None:
    count = []
    async with cluster() as c:
        turns = await played(c, Kind.TOOLS, told=lambda: count.append(1))
    assert len(count) == len(turns)


async def test_an_answer_that_is_none_ends_the_run() -> None:
    async with cluster() as c, session() as http:
        with pytest.raises(PlayError, match="404"):
            await Client(http, c.url).ask({"model": "other", "messages": []})


async def test_the_size_of_a_block_is_the_engines() -> None:
    async with cluster() as c, session() as http:
        assert await block_size(http, c.nodes["decode-0"].spec.url) == BLOCK
