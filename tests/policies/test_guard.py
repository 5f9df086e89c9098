"""Whatever a policy does, a turn gets a plan that can be carried out."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from kvflow.errors import NoNodeError
from kvflow.policies import Policy, decide, explained, fault
from kvflow.policies.cases import cases
from kvflow.types import NodeState, Path, Plan, Reason, Turn, View
from tests.policies.broken import broken, raising, refuses, with_fields
from tests.policies.build import decode, handle, policy, prefill, turn, view

TWO = view(prefill(), prefill("prefill-1"), decode(), decode("decode-1"))
HELD = turn(handle=handle())
COLD = Plan(path=Path.COLD, prefill="prefill-0", decode="decode-0", reason=Reason.POLICY)


def test_a_good_plan_passes_as_it_is() -> None:
    for asked in (turn(), HELD, turn(splittable=False), turn(bound_to="decode-1")):
        decision = decide(policy(), asked, TWO)
        assert decision.error is None
        assert decision.plan == policy().plan(asked, TWO)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("no\nsuch   thing"), "ValueError: no such thing"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (RecursionError("deep"), "RecursionError: deep"),
        (RuntimeError("x" * 1000), "RuntimeError: " + "x" * (200 - len("RuntimeError: "))),
    ],
)
def test_a_policy_that_raises_costs_no_request(error: Exception, sentence: str) -> None:
    decision = decide(raising(error), HELD, view(prefill(), decode()))
    assert decision.plan == COLD
    assert decision.error == sentence


def test_an_error_that_cannot_be_shown_costs_no_request_either() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert decide(raising(Mute()), HELD, TWO).error == "Mute: which cannot be shown"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_ends_the_process_is_not_held_up(error: BaseException) -> None:
    with pytest.raises(type(error)):
        decide(raising(error), HELD, TWO)


def test_to_leave_no_node_is_the_policy_s_decision() -> None:
    with pytest.raises(NoNodeError, match="Closed today"):
        decide(broken(refuses), HELD, TWO)


def test_without_nodes_the_plain_plan_is_none_either() -> None:
    with pytest.raises(NoNodeError, match="There is no prefill node"):
        decide(raising(ValueError()), HELD, view(decode()))


@pytest.mark.parametrize(
    ("fields", "asked", "sentence"),
    [
        ({"path": "cold"}, turn(), "Plan.path must be a Path, got str."),
        ({"decode": None}, turn(), "Plan.decode must be a node's name, got NoneType."),
        ({"decode": "decode-7"}, turn(), "Plan.decode is 'decode-7', and there is no decode node of that name."),
        ({"decode": "prefill-0"}, turn(), "Plan.decode is 'prefill-0', and there is no decode node of that name."),
        ({"prefill": None}, turn(), "Plan.prefill must be a node's name on path cold, got NoneType."),
        ({"prefill": "decode-0"}, turn(), "Plan.prefill is 'decode-0', and there is no prefill node of that name."),
        ({"path": Path.DIRECT}, turn(), "Plan.prefill must be None on path direct."),
        ({"path": Path.PULL}, turn(), "Plan.path is pull, but the turn has no handle."),
        (
            {"path": Path.PULL},
            turn(handle=handle(deadline=100.0)),
            "Plan.path is pull, but the handle cannot be used: expired.",
        ),
        (
            {"path": Path.PULL},
            turn(handle=handle(epoch="e0")),
            "Plan.path is pull, but the handle cannot be used: node-gone.",
        ),
        ({"min_pull_tokens": 1.5}, turn(), "Plan.min_pull_tokens must be a whole number from 0 on, got 1.5."),
        ({"min_pull_tokens": True}, turn(), "Plan.min_pull_tokens must be a whole number from 0 on, got bool."),
        ({"min_pull_tokens": -(10**400)}, turn(), "Plan.min_pull_tokens must be a whole number from 0 on, got a huge"),
        ({"min_pull_tokens": 10**5000}, turn(), "Plan.min_pull_tokens must be a whole number from 0 on, got a huge"),
        ({"retain_s": 10**5000}, turn(), "Plan.retain_s must be a number of seconds from 0 on, got a huge number."),
        ({"retain_s": nan}, turn(), "Plan.retain_s must be a number of seconds from 0 on, got nan."),
        ({"retain_s": inf}, turn(), "Plan.retain_s must be a number of seconds from 0 on, got inf."),
        ({"retain_s": "480"}, turn(), "Plan.retain_s must be a number of seconds from 0 on, got str."),
        ({"retain_s": 61.0}, turn(max_retain_s=60.0), "Plan.retain_s is 61, above the client's limit of 60."),
        ({"retain_s": 5.0}, turn(splittable=False), "Plan.retain_s must be 0 for a turn that cannot be split."),
        ({"max_pinned_share": 1.1}, turn(), "Plan.max_pinned_share must be from 0 to 1, got 1.1."),
        ({"reason": "policy"}, turn(), "Plan.reason must be a Reason or None, got str."),
        ({"decode": "decode-0"}, turn(bound_to="decode-1"), "Plan.decode is decode-0, but only decode-1 can answer"),
        (
            {"path": Path.COLD, "prefill": "prefill-0"},
            turn(splittable=False),
            "Plan.path is cold, but only one node on its own can serve the turn.",
        ),
        (
            {"path": Path.COLD, "prefill": "prefill-0"},
            turn(bound_to="decode-1"),
            "Plan.path is cold, but the turn is bound to decode-1.",
        ),
    ],
)
def test_nonsense_is_named_and_replaced(fields: dict[str, Any], asked: Turn, sentence: str) -> None:
    decision = decide(with_fields(**fields), asked, TWO)
    assert decision.error is not None
    assert decision.error.startswith(sentence)
    assert fault(decision.plan, asked, TWO) is None
    assert (decision.plan.retain_s, decision.plan.max_pinned_share) == (0, 0)
    alone = not asked.splittable or asked.bound_to is not None
    assert decision.plan.path is (Path.DIRECT if alone else Path.COLD)


@pytest.mark.parametrize(
    ("fields", "nodes", "asked", "sentence"),
    [
        (
            {"prefill": "prefill-1"},
            (prefill(), prefill("prefill-1", ready=False), decode()),
            turn(),
            "Plan.prefill is 'prefill-1', which is not ready, though others are.",
        ),
        (
            {"path": Path.PULL},
            (prefill(bidirectional=False), decode()),
            HELD,
            "Plan.path is pull, but prefill-0 runs without kvflow's connector.",
        ),
        (
            {"path": Path.PULL},
            (prefill(), decode(bidirectional=False)),
            HELD,
            "Plan.path is pull, but the handle cannot be used: one-way.",
        ),
        (
            {"retain_s": 480.0},
            (prefill(), decode(bidirectional=False)),
            turn(),
            "Plan.retain_s must be 0: decode-0 keeps nothing, it runs without kvflow's connector.",
        ),
    ],
)
def test_what_the_nodes_cannot_do(
    fields: dict[str, Any], nodes: tuple[NodeState, ...], asked: Turn, sentence: str
) -> None:
    assert decide(with_fields(**fields), asked, view(*nodes)).error == sentence


@pytest.mark.parametrize("answer", [None, "cold", {"path": "cold"}, 5])
def test_what_is_no_plan_is_none(answer: object) -> None:
    decision = decide(broken(lambda *_: answer), HELD, TWO)
    assert decision.error == f"The policy answered with a {type(answer).__name__}, not a Plan."
    assert decision.plan.path is Path.COLD


def test_the_plain_plan_leaves_out_what_fails_and_takes_the_least_loaded() -> None:
    nodes = view(
        prefill(in_flight=3),
        prefill("prefill-1"),
        decode(failures=5),
        decode("decode-1"),
        decode("decode-2", ready=False),
    )
    plan = decide(raising(ValueError()), HELD, nodes).plan
    assert (plan.prefill, plan.decode) == ("prefill-1", "decode-1")


def test_a_bound_turn_goes_to_its_node_even_if_that_fails() -> None:
    nodes = view(prefill(), decode(failures=9), decode("decode-1"))
    for p in (policy(), raising(ValueError())):
        assert decide(p, turn(bound_to="decode-0"), nodes).plan.decode == "decode-0"


def test_the_plain_plan_is_always_right() -> None:
    for case in cases():
        try:
            decision = decide(raising(ValueError()), case.turn, case.view)
        except NoNodeError:
            continue
        assert fault(decision.plan, case.turn, case.view) is None, case.name


# Explained


def test_a_broken_policy_is_explained_with_what_happens_instead() -> None:
    explanation = explained(with_fields(retain_s=-1.0), HELD, TWO)
    assert explanation.policy == "broken"
    assert explanation.error == "Plan.retain_s must be a number of seconds from 0 on, got -1."
    assert explanation.plan == decide(with_fields(retain_s=-1.0), HELD, TWO).plan


def test_a_policy_that_cannot_be_explained_still_says_what_it_plans() -> None:
    class Mute(Policy):
        def explain(self, turn: Turn, view: View) -> Any:  # noqa: ARG002
            raise ValueError("mute")

    good = policy()
    mute = Mute(name="mute", reuse=good.reuse, retention=good.retention, routing=good.routing)
    explanation = explained(mute, HELD, TWO)
    assert (explanation.plan, explanation.error) == (good.plan(HELD, TWO), "ValueError: mute")


def test_a_good_policy_is_explained_as_it_explains_itself() -> None:
    assert explained(policy(), HELD, TWO) == policy().explain(HELD, TWO)
    assert explained(policy(), turn(), view(decode())).why == "There is no prefill node."
    assert explained(raising(ValueError("x")), HELD, view(decode())).plan is None
    assert replace(explained(policy(), HELD, TWO), policy="x").policy == "x"
