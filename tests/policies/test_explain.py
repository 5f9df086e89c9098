"""An explanation says what the plan says, and with which numbers."""

import json
from dataclasses import replace

import pytest

from kvflow.errors import NoNodeError
from kvflow.policies import Explanation, Policy, forecast
from kvflow.policies.cases import cases
from kvflow.policies.explain import Candidate, Way
from kvflow.types import Cost, Path, Plan, Reason, Turn, View
from tests.cluster import shipped_policy
from tests.policies.broken import broken
from tests.policies.build import decode, handle, policy, prefill, turn, view

TWO = view(prefill(), prefill("prefill-1", in_flight=1), decode(), decode("decode-1"))
HELD = turn(handle=handle(), new_tokens=200)


def way(explanation: Explanation, path: Path) -> Way:
    return next(w for w in explanation.ways if w.path is path)


def node(candidates: tuple[Candidate, ...], name: str) -> Candidate:
    return next(c for c in candidates if c.node == name)


def answer(p: Policy, asked: Turn, nodes: View) -> tuple[Plan | None, str]:
    try:
        return p.plan(asked, nodes), ""
    except NoNodeError as e:
        return None, str(e)


@pytest.mark.parametrize("name", ["off", "balanced", "aggressive", "adaptive"])
def test_it_agrees_with_the_plan(name: str) -> None:
    p = shipped_policy(name)
    for case in cases(5):
        explanation = p.explain(case.turn, case.view)
        plan, refused = answer(p, case.turn, case.view)
        if plan is None:
            assert (explanation.plan, explanation.why) == (None, refused)
            assert not any(c.picked for c in (*explanation.prefill, *explanation.decode))
            continue
        assert explanation.plan == plan, case.name
        assert [w.path for w in explanation.ways if w.chosen] == [plan.path], case.name
        assert [c.node for c in explanation.decode if c.picked] == [plan.decode]
        assert [c.node for c in explanation.prefill if c.picked] == ([plan.prefill] if plan.prefill else [])


def test_every_node_of_both_pools_is_listed_in_order() -> None:
    explanation = policy().explain(HELD, TWO)
    assert [c.node for c in explanation.prefill] == ["prefill-0", "prefill-1"]
    assert [c.node for c in explanation.decode] == ["decode-0", "decode-1"]


def test_scores_weights_and_their_sum() -> None:
    holder = node(policy().explain(HELD, TWO).decode, "decode-0")
    assert holder.picked
    assert [(s.score, s.weight, s.weighted) for s in holder.scores] == [(1, 4, 4), (1, 1, 1), (1, 1, 1)]
    assert holder.sum == 6
    assert holder.scores[0].scorer.startswith("the node that holds the conversation")
    other = node(policy().explain(HELD, TWO).decode, "decode-1")
    assert (other.sum, other.picked) == (2, False)


def test_the_filter_that_left_a_node_out_is_named() -> None:
    nodes = view(prefill(ready=False), prefill("prefill-1", failures=3), prefill("prefill-2"), decode())
    down, failing, good = policy().explain(turn(), nodes).prefill
    assert (down.left_out_by, down.scores, down.sum) == ("ready nodes", (), None)
    assert failing.left_out_by == "if possible nodes with fewer than 3 failures in a row"
    assert (good.left_out_by, good.picked) == (None, True)


def test_a_stock_node_is_left_out_where_another_can_pull() -> None:
    nodes = view(prefill(bidirectional=False), prefill("prefill-1"), decode())
    assert node(policy().explain(HELD, nodes).prefill, "prefill-0").left_out_by == "nodes that can pull"
    assert node(policy().explain(turn(), nodes).prefill, "prefill-0").left_out_by is None


def test_each_way_has_its_forecast_and_tokens() -> None:
    p = policy()
    explanation = p.explain(HELD, TWO)
    for option in p.options(HELD, TWO.decode[0], TWO):
        found = way(explanation, option.path)
        assert (found.computed_tokens, found.pulled_tokens) == (option.computed_tokens, option.pulled_tokens)
        assert found.forecast == forecast(option, HELD, TWO)
    assert explanation.why == (
        "Path pull; predicted times to the first token: cold 0.258 s, pull 0.0752 s, direct 0.042 s."
    )


@pytest.mark.parametrize(
    ("asked", "nodes", "pull", "direct"),
    [
        (turn(), TWO, "nothing is kept for this conversation", "nothing is kept for this conversation"),
        (
            turn(handle=handle(epoch="e0")),
            TWO,
            "the engine that kept the conversation has gone or restarted",
            "the engine that kept the conversation has gone or restarted",
        ),
        (HELD, view(prefill(bidirectional=False), decode()), "a node without kvflow's connector would take part", None),
        (HELD, view(decode()), "no prefill node can take the request", None),
        (HELD, view(prefill(), decode(prefix_caching=False)), None, "decode-0 has no prefix cache, so it would not"),
        (
            HELD,
            view(prefill(), decode(in_flight=90), decode("decode-1")),
            None,
            "decode-1 does not hold the conversation",
        ),
        (turn(splittable=False), TWO, "only one node on its own can serve the request", None),
        (turn(bound_to="decode-1"), TWO, "only decode-1 can answer: it holds the response that the request", None),
    ],
)
def test_what_is_impossible_says_why(asked: Turn, nodes: View, pull: str | None, direct: str | None) -> None:
    explanation = policy().explain(asked, nodes)
    for path, sentence in ((Path.PULL, pull), (Path.DIRECT, direct)):
        found = way(explanation, path)
        if sentence is None:
            assert found.impossible is None
            assert found.forecast is not None
        else:
            assert found.impossible is not None
            assert found.impossible.startswith(sentence)
            assert (found.forecast, found.chosen) == (None, False)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (turn(), "Path cold, because nothing is kept for this conversation."),
        (turn(splittable=False), "Only one node on its own can serve the request, so decode-0 does everything."),
        (
            turn(bound_to="decode-1"),
            "decode-1 is asked alone: the turn is bound to decode-1, which holds what it refers to.",
        ),
        (
            turn(handle=handle(tokens=30), new_tokens=1170),
            "Path cold, because less could be pulled than is worth it to the policy; predicted times",
        ),
    ],
)
def test_one_sentence_says_why(asked: Turn, why: str) -> None:
    assert policy().explain(asked, view(prefill(), decode(), decode("decode-1", in_flight=1))).why.startswith(why)


def test_a_turn_for_one_node_has_no_prefill_candidates() -> None:
    explanation = policy().explain(turn(bound_to="decode-1"), TWO)
    assert all(c.left_out_by and c.left_out_by.startswith("no prefill leg") for c in explanation.prefill)
    assert node(explanation.decode, "decode-0").left_out_by == "bound to decode-1, which alone can answer"


def test_no_node_is_an_explanation_too() -> None:
    explanation = policy().explain(turn(), view(prefill(ready=False), decode()))
    assert explanation.why == "No prefill node can take the request: none of 1 is among the ready nodes."
    assert explanation.prefill[0].left_out_by == "ready nodes"
    assert explanation.decode[0].scores
    nobody = policy().explain(turn(), view(prefill()))
    assert (nobody.why, nobody.decode) == ("There is no decode node.", ())
    assert all(w.impossible == "There is no decode node." for w in nobody.ways)


def test_json_has_everything_and_nothing_else() -> None:
    shown = json.loads(json.dumps(shipped_policy("adaptive").explain(HELD, TWO).to_json(), allow_nan=False))
    assert set(shown) == {"policy", "why", "error", "plan", "ways", "prefill", "decode"}
    assert (shown["policy"], shown["plan"]["path"], shown["error"]) == ("adaptive", "direct", None)
    assert set(shown["ways"][0]) == {
        *("path", "chosen", "impossible", "prefill", "decode", "computed_tokens", "pulled_tokens", "forecast"),
    }
    assert shown["ways"][0]["forecast"]["first_token_s"] > 0
    assert set(shown["decode"][0]) == {"node", "left_out_by", "scores", "sum", "picked"}
    assert set(shown["decode"][0]["scores"][0]) == {"scorer", "score", "weight", "weighted"}


def test_json_has_reasons_as_words_and_no_infinite_number() -> None:
    shown = policy().explain(turn(), TWO).to_json()
    assert shown["plan"]["reason"] == Reason.NO_HANDLE.value
    odd = Explanation(policy="p", plan=None, why="w", decode=(Candidate(node="n", sum=float("inf")),))
    assert odd.to_json()["decode"][0]["sum"] is None


def test_a_policy_with_a_plan_of_its_own_is_shown_as_it_plans() -> None:
    alone = broken(lambda plan, _turn, _view: replace(plan, path=Path.DIRECT, prefill=None, decode="decode-1"))
    explanation = alone.explain(turn(), TWO)
    assert [(w.path, w.decode) for w in explanation.ways if w.chosen] == [(Path.DIRECT, "decode-1")]
    assert [c.node for c in explanation.decode if c.picked] == ["decode-1"]
    assert not any(c.picked for c in explanation.prefill)


def test_explaining_takes_nothing_into_account_that_planning_does_not() -> None:
    """Same view, one cost different: the forecast of the way it belongs to differs, and no other."""
    p: Policy = policy()
    slow = replace(TWO, transfers={("decode-0", "prefill-0"): Cost(fixed_s=9.0, token_s=0.0, samples=1)})
    before, after = p.explain(HELD, TWO), p.explain(HELD, slow)
    assert way(before, Path.DIRECT) == way(after, Path.DIRECT)
    assert way(before, Path.PULL).forecast != way(after, Path.PULL).forecast
