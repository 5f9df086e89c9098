"""Which prefill nodes are believed to have the beginning of a prompt."""

from typing import Any

from kvflow.nodes.simulated import Settings
from kvflow.router.endpoints import CHAT, COMPLETIONS
from kvflow.router.find import Prefix, Scope, find_keys
from kvflow.router.prefixes import Prefixes
from kvflow.types import NodeState, Role
from tests.cluster import BLOCK, cluster, say, text

ACME = Scope("acme", "m", "")
A = NodeState(name="prefill-0", role=Role.PREFILL, epoch="a")
B = NodeState(name="prefill-1", role=Role.PREFILL, epoch="b")


def prefixes(body: dict[str, Any], scope: Scope = ACME) -> tuple[Prefix, ...]:
    return find_keys(COMPLETIONS if "prompt" in body else CHAT, body, {}, scope, 1000).prefixes


def chat(*said: str, **fields: Any) -> tuple[Prefix, ...]:
    scope = fields.pop("scope", ACME)
    return prefixes({"messages": say(*said, system="Be brief."), **fields}, scope)


def test_the_next_turn_finds_the_whole_of_the_one_before() -> None:
    known = Prefixes()
    known.computed(chat("hello"), A)
    assert known.find(chat("hello", "hi", "and then?"), (A, B)) == {A.name: chat("hello")[-1].length}


def test_the_longest_counts_and_each_node_has_its_own() -> None:
    known = Prefixes()
    known.computed(chat("hello"), A)
    known.computed(chat("other"), B)
    found = known.find(chat("hello", "hi", "more"), (A, B))
    assert found == {A.name: chat("hello")[-1].length, B.name: chat("hello")[0].length}, "B has the system prompt"


def test_conversations_with_ids_of_their_own_share_a_system_prompt() -> None:
    known = Prefixes()
    known.computed(chat("hello", conversation_id="c1"), A)
    assert known.find(chat("other", conversation_id="c2"), (A,)) == {A.name: chat("other")[0].length}


def test_another_answer_tenant_model_salt_or_other_tools_is_another_prompt() -> None:
    known = Prefixes()
    known.computed(chat("hello", "hi", "more"), A)
    assert known.find(chat("hello", "ho", "more"), (A,)) == {A.name: chat("hello")[-1].length}
    for scope in (Scope("other", "m", ""), Scope("acme", "n", ""), Scope("acme", "m", "s")):
        assert known.find(chat("hello", "hi", "more", scope=scope), (A,)) == {}
    assert known.find(chat("hello", "hi", "more", tools=[{"type": "function"}]), (A,)) == {}


def test_an_engine_that_has_restarted_has_nothing() -> None:
    known = Prefixes()
    known.computed(chat("hello"), A)
    assert known.find(chat("hello"), (NodeState(name=A.name, role=Role.PREFILL, epoch="new"),)) == {}


def test_an_engine_without_a_prefix_cache_has_nothing() -> None:
    known = Prefixes()
    off = NodeState(name=A.name, role=Role.PREFILL, epoch="a", prefix_caching=False)
    known.computed(chat("hello"), off)
    assert len(known) == 0
    known.computed(chat("hello"), A)
    assert known.find(chat("hello"), (off,)) == {}


def test_what_was_used_least_lately_is_forgotten_first() -> None:
    one, two, three = (prefixes({"prompt": letter * 300}) for letter in "abc")
    known = Prefixes(max_keys=2)
    known.computed(one, A)
    known.computed(two, A)
    known.find(one, (A,))
    known.computed(three, A)
    assert [bool(known.find(p, (A,))) for p in (one, two, three)] == [True, False, True]
    assert len(known) == 2


def test_a_long_prompt_has_few_prefixes_and_keeps_fewer() -> None:
    long = prefixes({"prompt": "x" * 256 * 4096})
    assert len(long) <= 30
    assert sum(p.kept for p in long) == 13
    assert long[-1].length == 256 * 4096


async def test_the_next_turn_goes_where_the_one_before_was_computed() -> None:
    first = say(text(200))
    with_caches = Settings(block_size=BLOCK, prefix_caching=True)
    async with cluster(prefill=3, policy="off", settings=lambda _: with_caches) as c:
        answer = await c.chat(first)
        told = await c.chat([*first, {"role": "assistant", "content": answer.text}, *say("more")])
        assert told.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 150
