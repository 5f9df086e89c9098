"""Decisions by measured costs: which path, from how many tokens on, and how little trying things out costs."""

from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest

from kvflow.errors import ConfigError
from kvflow.nodes.simulated import Settings, Speed
from kvflow.policies import Adaptive, Choice, Option, Policy, forecast
from kvflow.policies.adaptive import break_even
from kvflow.types import Cost, Path, Plan, Reason, Turn, View
from tests.cluster import BLOCK, cluster, say, shipped_policy, text
from tests.policies.build import decode, handle, prefill, turn, view

FAST = Cost(fixed_s=0.0, token_s=1e-5, samples=500)
SLOW = Cost(fixed_s=0.0, token_s=1e-3, samples=500)
LINK = Cost(fixed_s=0.01, token_s=1e-6, samples=500)
BAD_LINK = Cost(fixed_s=5.0, token_s=1e-3, samples=500)


@pytest.fixture(scope="module")
def adaptive() -> Policy:
    return shipped_policy("adaptive")


def world(link: Cost = LINK, computes: Cost = SLOW, on_decode: Cost | None = None, **decode_fields: Any) -> View:
    p = prefill(compute=computes, overhead=replace(LINK, token_s=0.0))
    d = decode(compute=on_decode or computes, overhead=replace(LINK, token_s=0.0), **decode_fields)
    pairs = {(p.name, d.name): link, (d.name, p.name): link}
    return replace(view(p, d), transfers=pairs)


def held(tokens: int, new: int, pin: str = "p") -> Turn:
    return turn(prompt_tokens=tokens + new, handle=handle(tokens=tokens, pin=pin), new_tokens=new)


def planned(policy: Policy, asked: Turn, nodes: View) -> tuple[Path, Reason | None]:
    plan = policy.plan(asked, nodes)
    return plan.path, plan.reason


def test_a_long_history_on_an_idle_decode_node_stays_there(adaptive: Policy) -> None:
    assert planned(adaptive, held(4000, 50), world()) == (Path.DIRECT, None)


def test_many_new_tokens_are_not_computed_between_many_streams(adaptive: Policy) -> None:
    busy = world(in_flight=8)
    assert planned(adaptive, held(4000, 1000), busy) == (Path.PULL, None)
    assert planned(adaptive, held(4000, 1), busy) == (Path.DIRECT, None)


def test_a_decode_node_that_computes_slowly_is_left_alone(adaptive: Policy) -> None:
    slow = world(computes=FAST, on_decode=SLOW)
    assert planned(adaptive, held(40_000, 500), slow) == (Path.PULL, None)


def test_a_slow_link_means_computing_again(adaptive: Policy) -> None:
    links = {("decode-0", "prefill-0"): BAD_LINK, ("prefill-0", "decode-0"): LINK}
    nodes = replace(world(computes=FAST, on_decode=SLOW), transfers=links)
    assert planned(adaptive, held(4000, 500), nodes) == (Path.COLD, Reason.BELOW_THRESHOLD)


def test_guesses_do_not_outweigh_what_was_measured(adaptive: Policy) -> None:
    """Of this pair only the way there is measured, and slow; of the way back there is but the guess."""
    nodes = replace(world(computes=FAST, prefix_caching=False), transfers={("prefill-0", "decode-0"): BAD_LINK})
    assert planned(adaptive, held(4000, 500), nodes) == (Path.COLD, Reason.BELOW_THRESHOLD)


def test_a_busy_prefill_node_sends_turns_to_the_decode_node(adaptive: Policy) -> None:
    nodes = world(in_flight=2)
    asked = held(4000, 400)
    assert planned(adaptive, asked, nodes)[0] is Path.PULL
    waiting = tuple(replace(n, free_at=nodes.now + 2.0) for n in nodes.prefill)
    assert planned(adaptive, asked, replace(nodes, prefill=waiting))[0] is Path.DIRECT


@pytest.mark.parametrize(("weight", "path"), [(0.0, Path.DIRECT), (0.1, Path.PULL)])
def test_delaying_others_has_its_price(weight: float, path: Path) -> None:
    policy = shipped_policy("adaptive", f"policy.reuse.stream_delay_weight={weight}")
    assert policy.plan(held(4000, 400), world(in_flight=5)).path is path


def test_a_first_turn_is_cold(adaptive: Policy) -> None:
    assert planned(adaptive, turn(), world()) == (Path.COLD, Reason.NO_HANDLE)


def test_without_a_prefill_node_the_holder_does_it_alone() -> None:
    direct = Option(path=Path.DIRECT, decode=decode(), computed_tokens=5000)
    reuse = Adaptive(direct_below_tokens=10)
    assert reuse.choose(held(1000, 5000), (direct,), world()) == Choice(option=direct)


# From how many tokens on


@pytest.mark.parametrize(
    ("transfer", "compute", "tokens"),
    [
        (Cost(fixed_s=0.01, token_s=0.0), Cost(fixed_s=0.0, token_s=1e-4), 100),
        (Cost(fixed_s=12.5e-3, token_s=5e-6), Cost(fixed_s=0.0, token_s=200e-6), 64.1),
        (Cost(fixed_s=0.01, token_s=1e-4), Cost(fixed_s=0.0, token_s=1e-4), inf),
        (Cost(fixed_s=0.01, token_s=2e-4), Cost(fixed_s=0.0, token_s=1e-4), inf),
        (Cost(fixed_s=0.02, token_s=0.0), Cost(fixed_s=0.0, token_s=0.0, pair_s=1e-6), 200),
        (Cost(fixed_s=0.0, token_s=0.0), Cost(fixed_s=0.0, token_s=1e-4), 0),
    ],
)
def test_break_even_is_where_moving_costs_what_computing_does(transfer: Cost, compute: Cost, tokens: float) -> None:
    found = break_even(transfer, compute)
    assert found == pytest.approx(tokens, rel=1e-3)
    if 0 < found < inf:
        computing = found * (compute.token_s + compute.pair_s * found / 2)
        assert transfer.fixed_s + found * transfer.token_s == pytest.approx(computing)


def test_the_engine_is_told_from_how_many_tokens_a_pull_pays() -> None:
    policy = shipped_policy("adaptive", "policy.reuse.direct_below_tokens=0")
    assert policy.plan(held(4000, 50), world()).min_pull_tokens == 11  # 10 ms of link at 999 us saved a token
    slower = world(link=Cost(fixed_s=1.0, token_s=1e-6, samples=500))
    assert policy.plan(held(4000, 50), slower).min_pull_tokens == 1002


def test_what_the_prefill_node_is_believed_to_have_is_pulled_if_it_has_not() -> None:
    policy = shipped_policy("adaptive", "policy.reuse.direct_below_tokens=0")
    asked = replace(held(4000, 50), cached={"prefill-0": 4048})
    plan = policy.plan(asked, world())
    assert (plan.path, plan.min_pull_tokens) == (Path.PULL, 11)
    never = world(link=Cost(fixed_s=0.01, token_s=1.0, samples=500))
    assert planned(policy, asked, never) == (Path.COLD, Reason.BELOW_THRESHOLD)


# Bounds


def test_bounds_hold_whatever_is_predicted() -> None:
    def path(asked: Turn, *overrides: str) -> Path:
        return shipped_policy("adaptive", *(f"policy.reuse.{o}" for o in overrides)).plan(asked, world()).path

    asked = held(4000, 50)
    assert path(asked) is Path.DIRECT
    assert path(asked, "direct_below_tokens=50") is Path.PULL
    assert path(asked, "direct_below_tokens=51") is Path.DIRECT
    assert path(asked, "direct_below_tokens=0", "min_pull_tokens=4000") is Path.PULL
    assert path(asked, "direct_below_tokens=0", "min_pull_tokens=4001") is Path.COLD
    assert path(asked, "enabled=false") is Path.COLD


def test_a_bound_on_pulls_reaches_the_engine() -> None:
    policy = shipped_policy("adaptive", "policy.reuse.direct_below_tokens=0", "policy.reuse.min_pull_tokens=300")
    assert policy.plan(held(4000, 50), world()).min_pull_tokens == 300


# Trying out


def costs(policy: Policy, asked: Turn, nodes: View, plan: Plan) -> float:
    decode_node = nodes.node(plan.decode)
    assert decode_node is not None
    options = {o.path: o for o in policy.options(asked, decode_node, nodes)}
    return forecast(options[plan.path], asked, nodes).first_token_s


@pytest.mark.parametrize("samples", [0, 3, 40])
def test_trying_out_costs_less_than_five_percent(adaptive: Policy, samples: int) -> None:
    link = Cost(fixed_s=0.4, token_s=1e-6, samples=samples)
    nodes = replace(world(computes=FAST, on_decode=replace(SLOW, samples=samples)), transfers={})
    nodes = replace(nodes, transfers={("decode-0", "prefill-0"): link, ("prefill-0", "decode-0"): LINK})
    random, taken, spent, least = Random(1), dict.fromkeys(Path, 0), 0.0, 0.0
    for _ in range(3000):
        asked = held(8000, 100, pin=f"{random.getrandbits(64):x}")
        plan = adaptive.plan(asked, nodes)
        taken[plan.path] += 1
        spent += costs(adaptive, asked, nodes, plan)
        least += min(costs(adaptive, asked, nodes, replace(plan, path=path)) for path in Path)
    assert least <= spent < 1.05 * least
    assert sum(1 for n in taken.values() if n) >= 2  # something else is tried at times
    assert max(taken.values()) > 2850


def test_what_is_well_known_is_tried_less(adaptive: Policy) -> None:
    def tried(samples: int) -> int:
        nodes = world(computes=FAST, on_decode=replace(SLOW, samples=samples))
        random = Random(2)
        turns = (held(8000, 100, pin=f"{random.getrandbits(64):x}") for _ in range(3000))
        return sum(adaptive.plan(t, nodes).path is Path.DIRECT for t in turns)

    assert tried(0) > 3 * tried(100)


def test_a_pull_that_is_tried_is_not_held_up_by_its_threshold(adaptive: Policy) -> None:
    nodes = replace(
        world(computes=FAST, on_decode=SLOW),
        transfers={("decode-0", "prefill-0"): Cost(fixed_s=0.1, token_s=1e-4), ("prefill-0", "decode-0"): LINK},
    )
    nodes = replace(nodes, transfers={**nodes.transfers, ("decode-0", "prefill-0"): replace(LINK, fixed_s=0.09)})
    plans = [adaptive.plan(held(8000, 100, pin=str(i)), nodes) for i in range(4000)]
    pulls = [p for p in plans if p.path is Path.PULL]
    assert 0 < len(pulls) < 100
    assert {p.min_pull_tokens for p in pulls} == {1}


# Served


async def test_whichever_way_it_takes_the_answer_is_right() -> None:
    settings = Settings(block_size=BLOCK, speed=Speed(prefill=20_000, transfer=200_000, transfer_s=0.002))
    async with cluster(policy="adaptive", prefill=2, decode=2, settings=lambda _: settings) as c:
        chat, paths = say(text(300)), []
        for new in (5, 300, 20, 600, 1):
            reply = await c.chat(chat)
            assert reply.text == await c.right(chat)
            paths.append(reply.path)
            chat = [*chat, {"role": "assistant", "content": reply.text}, *say(text(new, f"more{new}x"))]
        assert paths[0] == "cold"
        assert {"pull", "direct"} & set(paths)


# Values


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"enabled": 1}, "policy.reuse.enabled must be true or false, got 1"),
        ({"min_pull_tokens": -1}, "policy.reuse.min_pull_tokens must be at least 0, got -1"),
        ({"min_pull_tokens": None}, "policy.reuse.min_pull_tokens must be a whole number, got None"),
        ({"direct_below_tokens": 0.5}, "policy.reuse.direct_below_tokens must be a whole number, got 0.5"),
        ({"stream_delay_weight": -0.1}, "policy.reuse.stream_delay_weight must be at least 0, got -0.1"),
        ({"stream_delay_weight": "x"}, "policy.reuse.stream_delay_weight must be a number, got 'x'"),
    ],
)
def test_bad_values_are_refused_by_key(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        Adaptive(**fields)
    assert str(e.value) == message


def test_description_has_the_numbers() -> None:
    words = Adaptive(min_pull_tokens=77, direct_below_tokens=33, stream_delay_weight=0.25).describe()
    assert all(number in words for number in ("77 tokens", "33 tokens", "0.25 s"))
    assert "never" in Adaptive(enabled=False).describe()
