"""Whether nodes that run can do what a policy promises."""

from dataclasses import dataclass, replace

import pytest

from kvflow.policies import Threshold
from kvflow.policies.honour import obstacle
from kvflow.policies.routing.base import Nodes
from kvflow.types import NodeState, Turn, View
from tests.policies.broken import broken, raising
from tests.policies.build import decode, policy, prefill, route, view

OFF = Threshold(enabled=False)


@dataclass(frozen=True, slots=True)
class Only:
    name: str

    def keep(self, nodes: Nodes, turn: Turn) -> Nodes:  # noqa: ARG002
        return tuple(n for n in nodes if n.name == self.name)

    def describe(self) -> str:
        return f"only {self.name}"


def test_nodes_that_run_the_connector_honour_everything() -> None:
    assert obstacle(policy(), view()) is None
    assert obstacle(policy(OFF), view()) is None


@pytest.mark.parametrize(
    ("nodes", "role"),
    [((prefill(bidirectional=False), decode()), "prefill"), ((prefill(), decode(bidirectional=False)), "decode")],
)
def test_reuse_needs_the_connector_in_both_pools(nodes: tuple[NodeState, ...], role: str) -> None:
    why = obstacle(policy(), view(*nodes))
    assert why == f"reuses, and no {role} node runs kvflow's connector, so nothing could be pulled back"
    assert obstacle(policy(OFF), view(*nodes)) is None
    one_more = prefill("prefill-1") if role == "prefill" else decode("decode-1")
    assert obstacle(policy(), view(*nodes, one_more)) is None


def test_nobody_knows_before_engines_have_answered() -> None:
    silent = (prefill(ready=False, bidirectional=False), decode(ready=False, bidirectional=False))
    assert obstacle(policy(), view(*silent)) is None


def test_routing_that_leaves_no_node_and_policies_that_fail() -> None:
    whole = policy()
    nobody = replace(whole.routing, decode=replace(route(), filters=(Only("decode-7"),)))
    why = obstacle(replace(whole, routing=nobody), view())
    assert why is not None
    assert why.startswith("leaves no node that could serve a turn: ")
    assert (obstacle(raising(ValueError("no")), view()) or "").startswith("fails: ")


def test_what_goes_wrong_only_with_something_kept_is_found() -> None:
    def wrong(plan: object, turn: Turn, _: View) -> object:
        return plan if turn.handle is None else "nonsense"

    assert (obstacle(broken(wrong), view()) or "").startswith("fails: The policy answered with a str")
