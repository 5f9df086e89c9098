from typing import Any

import pytest

from kvflow.errors import ConfigError, NoNodeError
from kvflow.policies import Fixed, Policy, Threshold
from kvflow.types import Handle, NodeState, Path, Plan, Reason, View
from tests.policies.build import decode, handle, policy, prefill, turn, view


def test_a_usable_handle_is_pulled() -> None:
    plan = policy(Threshold(min_pull_tokens=64), Fixed(ttl_s=480, max_pinned_share=0.5)).plan(
        turn(handle=handle()), view()
    )
    assert plan == Plan(
        path=Path.PULL,
        prefill="prefill-0",
        decode="decode-0",
        min_pull_tokens=64,
        retain_s=480,
        max_pinned_share=0.5,
    )


def test_a_first_turn_is_cold_and_kept() -> None:
    plan = policy().plan(turn(), view())
    assert (plan.path, plan.reason, plan.retain_s) == (Path.COLD, Reason.NO_HANDLE, 480)


def test_an_unsplittable_turn_needs_only_a_decode_node_and_is_not_kept() -> None:
    plan = policy().plan(turn(splittable=False, handle=handle()), view(decode()))
    assert plan == Plan(path=Path.DIRECT, decode="decode-0", reason=Reason.UNSPLITTABLE)


@pytest.mark.parametrize("held", [None, handle()])
def test_without_reuse_nothing_is_pulled_and_nothing_kept(held: Handle | None) -> None:
    plan = policy(Threshold(enabled=False)).plan(turn(handle=held), view())
    assert (plan.path, plan.reason) == (Path.COLD, Reason.POLICY)
    assert (plan.retain_s, plan.max_pinned_share) == (0, 0)


@pytest.mark.parametrize(
    "holder",
    [
        decode("decode-1"),
        decode("decode-0", epoch="e2"),
        decode("decode-0", ready=False),
    ],
)
def test_a_handle_dies_with_its_engine(holder: NodeState) -> None:
    plan = policy().plan(turn(handle=handle()), view(prefill(), holder, decode("decode-2")))
    assert (plan.path, plan.reason) == (Path.COLD, Reason.NODE_GONE)


@pytest.mark.parametrize(("now", "path"), [(199.9, Path.PULL), (200.0, Path.COLD), (201.0, Path.COLD)])
def test_a_handle_ends_at_its_deadline(now: float, path: Path) -> None:
    plan = policy().plan(turn(handle=handle(deadline=200.0)), view(now=now))
    assert (plan.path, plan.reason) == (path, None if path is Path.PULL else Reason.EXPIRED)


def test_a_short_handle_is_not_worth_a_pull() -> None:
    plan = policy(Threshold(min_pull_tokens=64)).plan(turn(handle=handle(tokens=63)), view())
    assert (plan.path, plan.reason, plan.min_pull_tokens) == (Path.COLD, Reason.BELOW_THRESHOLD, 0)


@pytest.mark.parametrize(
    "nodes",
    [
        (prefill(bidirectional=False), decode()),
        (prefill(), decode(bidirectional=False), decode("decode-1")),
    ],
)
def test_a_stock_engine_is_served_one_way(nodes: tuple[NodeState, ...]) -> None:
    plan = policy().plan(turn(handle=handle()), view(*nodes))
    assert (plan.path, plan.reason) == (Path.COLD, Reason.ONE_WAY)


def test_a_pull_goes_to_a_prefill_node_that_can_even_if_it_is_busier() -> None:
    stock = prefill("stock", bidirectional=False)
    able = prefill("able", in_flight=9)
    assert policy().plan(turn(handle=handle()), view(stock, able, decode())).prefill == "able"
    assert policy().plan(turn(), view(stock, able, decode())).prefill == "stock"


def test_a_stock_decode_node_is_not_asked_to_keep_anything() -> None:
    plan = policy().plan(turn(), view(prefill(), decode(bidirectional=False)))
    assert (plan.retain_s, plan.max_pinned_share) == (0, 0)


@pytest.mark.parametrize("fields", [{"ttl_s": 0}, {"max_pinned_share": 0}])
def test_nothing_is_kept_without_time_or_share(fields: dict[str, Any]) -> None:
    plan = policy(retention=Fixed(**fields)).plan(turn(), view())
    assert (plan.retain_s, plan.max_pinned_share) == (0, 0)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((decode(),), "There is no prefill node."),
        ((prefill(),), "There is no decode node."),
        (
            (prefill(ready=False), prefill("prefill-1", ready=False), decode()),
            "No prefill node can take the request: none of 2 is among the ready nodes.",
        ),
        ((prefill(), decode(ready=False)), "No decode node can take the request: none of 1 is among the ready nodes."),
    ],
)
def test_without_a_node_the_turn_is_refused_and_told_why(nodes: tuple[NodeState, ...], message: str) -> None:
    with pytest.raises(NoNodeError) as e:
        policy().plan(turn(), view(*nodes))
    assert (str(e.value), e.value.status) == (message, 503)


def test_decode_stays_with_the_conversation() -> None:
    nodes = [prefill(), *(decode(f"decode-{i}") for i in range(4))]
    for holder in ("decode-0", "decode-1", "decode-2", "decode-3"):
        assert policy().plan(turn(handle=handle(node=holder)), view(*nodes)).decode == holder


def test_decode_leaves_an_overloaded_node_and_still_pulls_from_it() -> None:
    busy = decode("decode-0", in_flight=5)
    plan = policy().plan(turn(handle=handle()), view(prefill(), busy, decode("decode-1")))
    assert (plan.path, plan.decode) == (Path.PULL, "decode-1")


def test_planning_changes_nothing_and_repeats() -> None:
    p, v, t = policy(), view(prefill(), prefill("prefill-1"), decode()), turn(handle=handle())
    assert len({repr(p.plan(t, v)) for _ in range(5)}) == 1


def test_description_has_one_sentence_a_part() -> None:
    words = policy(Threshold(min_pull_tokens=77), Fixed(ttl_s=33, max_pinned_share=0.25)).describe()
    assert [w.split(":")[0] for w in words] == ["Reuse", "Retention", "Prefill", "Decode"]
    assert all(w.endswith(".") for w in words)
    for number, sentence in zip(("77", "33 s", "2048", "4 legs"), words, strict=True):
        assert number in sentence


def test_description_does_not_promise_retention_without_reuse() -> None:
    assert "nothing is kept" in policy(Threshold(enabled=False)).describe()[1]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "", "policy.name must be a non-empty string, got ''"),
        ("reuse", "threshold", "policy.reuse must be a Reuse, got str"),
        ("retention", {}, "policy.retention must be a Retention, got dict"),
        ("routing", None, "policy.routing must be a Routing, got NoneType"),
    ],
)
def test_bad_parts_are_refused_by_key(field: str, value: object, message: str) -> None:
    good = policy()
    parts: dict[str, Any] = {k: getattr(good, k) for k in ("name", "reuse", "retention", "routing")}
    with pytest.raises(ConfigError) as e:
        Policy(**{**parts, field: value})
    assert str(e.value) == message


HELD = handle(tokens=1000)


def direct_below(tokens: int) -> Policy:
    return policy(Threshold(direct_below_tokens=tokens))


@pytest.mark.parametrize(("new", "path"), [(63, Path.DIRECT), (64, Path.PULL), (1000, Path.PULL)])
def test_a_turn_with_little_to_compute_stays_where_its_conversation_is(new: int, path: Path) -> None:
    plan = direct_below(64).plan(turn(handle=HELD, new_tokens=new), view())
    assert (plan.path, plan.reason, plan.decode) == (path, None, "decode-0")
    assert (plan.prefill is None) is (path is Path.DIRECT)
    assert (plan.retain_s, plan.max_pinned_share) == (480, 0.5)


@pytest.mark.parametrize(("new", "path"), [(23, Path.DIRECT), (24, Path.PULL)])
def test_what_its_prefix_cache_cannot_find_counts_too(new: int, path: Path) -> None:
    nodes = view(prefill(), decode(block_size=64))  # of 1,000 tokens held, 40 are in no whole block
    assert direct_below(64).plan(turn(handle=HELD, new_tokens=new), nodes).path is path


@pytest.mark.parametrize(
    ("held", "nodes"),
    [
        (None, view()),
        (HELD, view(prefill(), decode(prefix_caching=False))),
        (HELD, view(prefill(), decode(epoch="e2"))),
        (HELD, view(prefill(), decode(bidirectional=False))),
        (HELD, view(now=200.0)),
        (handle(node="decode-7"), view()),
    ],
)
def test_a_node_that_cannot_find_the_conversation_is_left_no_turn_alone(held: Handle | None, nodes: View) -> None:
    assert direct_below(64).plan(turn(handle=held, new_tokens=1), nodes).path is not Path.DIRECT


def test_a_turn_that_overload_sends_away_is_not_direct() -> None:
    nodes = view(prefill(), decode(in_flight=100), decode("decode-1", epoch="e2"))
    plan = direct_below(64).plan(turn(handle=HELD, new_tokens=1), nodes)
    assert (plan.path, plan.decode) == (Path.PULL, "decode-1")


@pytest.mark.parametrize("name", ["decode-0", "decode-1"])
def test_a_bound_turn_goes_to_its_node_and_is_kept(name: str) -> None:
    nodes = view(prefill(), decode(), decode("decode-1", in_flight=100))
    plan = policy().plan(turn(bound_to=name, handle=HELD), nodes)
    assert plan == Plan(path=Path.DIRECT, decode=name, retain_s=480, max_pinned_share=0.5)


def test_a_turn_that_is_bound_to_a_node_that_is_gone_goes_to_one_that_can_say_so() -> None:
    assert policy().plan(turn(bound_to="decode-9"), view()).path is Path.DIRECT


@pytest.mark.parametrize(("limit", "seconds"), [(None, 480), (60.0, 60.0), (9999.0, 480), (0.0, 0.0)])
def test_a_client_can_shorten_the_time_and_not_lengthen_it(limit: float | None, seconds: float) -> None:
    assert policy().plan(turn(max_retain_s=limit), view()).retain_s == seconds
