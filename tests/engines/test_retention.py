"""A small decode pool, caches on, engines that die: nothing stalls and nothing is left behind."""

import os
import re
import signal

import pytest

from kvflow.launchers import lifeline
from tests.engines.serving import Message, Serving, ask, ask_cold
from tests.net import get, until

pytestmark = pytest.mark.engine

SHARED = " ".join(f"Rule {i}: a {w} comes before number {i * 13 % 97}." for i, w in enumerate(["dog", "cat"] * 80))


def chat_of(i: int) -> list[Message]:
    return [{"role": "system", "content": SHARED}, {"role": "user", "content": f"Conversation number {i}. What now?"}]


def test_the_history_is_reused_from_whichever_cache_has_it(caching: Serving) -> None:
    chat = [{"role": "user", "content": f"Which cache? {SHARED}"}]
    first = ask(caching, chat)
    chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Go on."}]
    second = ask(caching, chat)
    assert second.cached >= len(caching.tokens(chat[:1])) // 128 * 128
    assert second.tokens == ask_cold(caching, chat).tokens


def test_a_decode_engine_that_dies_is_started_again_and_its_handles_are_dropped(caching: Serving) -> None:
    chat = [{"role": "user", "content": f"Before the crash. {SHARED[:2000]}"}]
    first = ask(caching, chat)
    old = caching.sessions["decode"]
    os.kill(old, signal.SIGKILL)
    until(lambda: not lifeline.members(old), 60, lambda: f"still running: {lifeline.members(old)}")
    until(lambda: not caching.ready(), 30)
    caching.wait_ready()
    assert caching.sessions["decode"] != old
    chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Go on."}]
    second = ask(caching, chat)
    assert (second.path, second.reason) == ("cold", "node-gone")
    assert second.tokens == ask_cold(caching, chat).tokens


def test_forty_conversations_in_a_pool_for_twenty_all_get_their_answer(caching: Serving) -> None:
    """The released engine stops at the 22nd, for as long as it keeps the others."""
    assert len(caching.tokens(chat_of(0))) > 1800
    for i in range(40):
        assert ask(caching, chat_of(i), max_tokens=4).text
    page = get(f"{caching.url}/metrics")[1].decode()
    assert 'kvflow_turns_kept_total{outcome="kept",tenant="default"}' in page
    given_up = re.search(r'^kvflow_handles_released_total{why="pressure"} (\S+)$', page, re.MULTILINE)
    assert given_up
    assert float(given_up[1]) >= 10
