"""What reaches a policy, and what a broken one costs: nothing but speed."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvflow.nodes.simulated import Settings
from kvflow.policies import Choice, Option, Policy
from kvflow.policies.routing.base import Nodes
from kvflow.tenants import Tenants
from kvflow.types import Path, Turn, View
from tests.cluster import BLOCK, cluster, say, shipped_policy, text


@dataclass(slots=True, kw_only=True)
class Asked:
    """A reuse part that notes the turns that it is asked about."""

    turns: list[Turn]
    enabled: bool = True

    def choose(self, turn: Turn, options: Sequence[Option], view: View) -> Choice:  # noqa: ARG002
        self.turns.append(turn)
        return Choice(option=options[0])

    def describe(self) -> str:
        return "Reuse: none."


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    error: Exception | None = None
    answer: Any = None
    enabled: bool = True

    def choose(self, turn: Turn, options: Sequence[Option], view: View) -> Choice:  # noqa: ARG002
        if self.error is not None:
            raise self.error
        return self.answer  # type: ignore[no-any-return]

    def describe(self) -> str:
        return "Reuse: broken."


def policy(reuse: Any) -> Policy:
    return replace(shipped_policy("balanced"), name="mine", reuse=reuse)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (Broken(error=ZeroDivisionError("division by zero")), "ZeroDivisionError: division by zero"),
        (Broken(error=RecursionError()), "RecursionError"),
        (Broken(answer="cold"), "AttributeError"),
        (Broken(answer=None), "AttributeError"),
    ],
)
async def test_a_policy_that_fails_costs_no_request(
    broken: Broken, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(policy=policy(broken)) as c:
        messages = say(text(100))
        with caplog.at_level(logging.ERROR, "kvflow.router"):
            answer = await c.chat(messages)
        assert (answer.status, answer.path, answer.text) == (200, "cold", await c.right(messages))
        assert "policy mine of tenant default failed" in caplog.text
        assert said in caplog.text
        assert 'kvflow_policy_errors_total{policy="mine"} 1.0' in (await c.get("/metrics")).raw.decode()
        c.check()


async def test_a_policy_that_writes_into_what_it_is_shown_costs_no_request() -> None:
    @dataclass(frozen=True, slots=True)
    class Scribbles(Broken):
        def choose(self, turn: Turn, options: Sequence[Option], view: View) -> Choice:
            turn.cached.update({n.name: "all of it" for n in view.prefill})  # type: ignore[attr-defined]
            return Choice(option=options[0])

    async with cluster(policy=policy(Scribbles())) as c:
        messages = say(text(100))
        answer = await c.chat(messages)
        assert (answer.status, answer.path, answer.text) == (200, "cold", await c.right(messages))
        c.check()


async def test_a_conversation_goes_on_after_its_policy_failed() -> None:
    """The handle that the failed plan left alone is not lost to a plan that succeeds."""
    good, bad = shipped_policy("balanced"), policy(Broken(error=ValueError()))
    async with cluster(tenants=Tenants.single(good, {"mine": bad})) as c:
        first = await c.chat(say("one", system=text(200)))
        messages = say("one", first.text, "two", system=text(200))
        c.router.tenants.swap("default", "mine")
        assert (await c.chat(messages, {"x-kvflow-retain": "no"})).path == "cold"
        c.router.tenants.swap("default", "balanced")
        assert (await c.chat(messages)).path == "pull"


async def test_a_filter_that_leaves_no_node_has_decided() -> None:
    @dataclass(frozen=True, slots=True)
    class Nobody:
        def keep(self, nodes: Nodes, turn: Turn) -> Nodes:  # noqa: ARG002
            return ()

        def describe(self) -> str:
            return "nodes of nobody"

    whole = shipped_policy("balanced")
    decode = replace(whole.routing.decode, filters=(Nobody(),))
    async with cluster(policy=replace(whole, routing=replace(whole.routing, decode=decode))) as c:
        answer = await c.chat(say("hello"))
        assert (answer.status, "nodes of nobody" in answer.json["error"]["message"]) == (503, True)
        assert 'kvflow_policy_errors_total{policy="balanced"}' not in (await c.get("/metrics")).raw.decode()


async def test_lengths_of_prompts_are_those_that_engines_counted() -> None:
    """Escaped text has many bytes for each token, by which a policy must not be misled."""
    asked: list[Turn] = []
    async with cluster(policy=policy(Asked(turns=asked))) as c:
        for i in range(30):
            answer = await c.chat(say("ж" * 12 + f" {i}", *["да", "ж" * 40] * 4))
            counted = answer.json["usage"]["prompt_tokens"]
        assert asked[0].prompt_tokens > 2 * counted
        assert asked[-1].prompt_tokens == pytest.approx(counted, rel=0.1)
        assert asked[-1].new_tokens <= asked[-1].prompt_tokens


async def test_a_direct_turn_is_right_where_a_policy_takes_that_path() -> None:
    @dataclass(frozen=True, slots=True)
    class Direct:
        enabled: bool = True

        def choose(self, turn: Turn, options: Sequence[Option], view: View) -> Choice:  # noqa: ARG002
            return Choice(option=next((o for o in options if o.path is Path.DIRECT), options[0]))

        def describe(self) -> str:
            return "Reuse: direct."

    async with cluster(policy=policy(Direct()), settings=lambda _: Settings(block_size=BLOCK)) as c:
        first = await c.chat(say("one", system=text(200)))
        messages = say("one", first.text, "two", system=text(200))
        second = await c.chat(messages)
        assert (first.path, second.path, second.text) == ("cold", "direct", await c.right(messages))
