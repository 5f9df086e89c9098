"""No policy costs a request: what it raises or answers wrongly is replaced by a plan that is always right."""

from dataclasses import dataclass, replace

from kvflow.errors import NoNodeError
from kvflow.policies.explain import Explanation
from kvflow.policies.handles import obstacle
from kvflow.policies.policy import Policy
from kvflow.policies.retention import Fixed
from kvflow.policies.reuse import Threshold
from kvflow.policies.routing import LeastLoaded, NotFailing, Ready, Route, Routing, Weighted
from kvflow.types import NodeState, Path, Plan, Reason, Turn, View

LONGEST_ERROR = 200
"""Characters."""
_MOST = 2**53
"""Numbers of a plan are below: they travel as JSON, where larger ones cannot be written, or are not read alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    plan: Plan
    error: str | None = None
    """What was wrong with the policy, in one sentence; then `plan` is not the policy's."""


def decide(policy: Policy, turn: Turn, view: View) -> Decision:
    """The policy's plan, if it is one that can be carried out; else a plain one, which reuses and keeps nothing.

    Raises `NoNodeError` where the policy does: to leave no node is a decision that a filter may take.
    """
    try:
        plan = policy.plan(turn, view)
        error = fault(plan, turn, view)
    except NoNodeError:
        raise
    except Exception as e:
        error = _raised(e)
    if error is None:
        return Decision(plan=plan)
    return Decision(plan=_PLAIN.plan(turn, view), error=error[:LONGEST_ERROR])


def explained(policy: Policy, turn: Turn, view: View) -> Explanation:
    """What `decide` would answer, and why. Raises nothing that a policy raises."""
    plan, why = None, ""
    try:
        decision = decide(policy, turn, view)
        if decision.error is not None:
            return replace(_PLAIN.explain(turn, view), policy=policy.name, error=decision.error)
        plan, why = decision.plan, f"Path {decision.plan.path}; the policy cannot say why."
    except NoNodeError as e:
        why = str(e)
    try:
        return policy.explain(turn, view)
    except Exception as e:
        return Explanation(policy=policy.name, plan=plan, why=why, error=_raised(e)[:LONGEST_ERROR])


def fault(plan: object, turn: Turn, view: View) -> str | None:
    """What is wrong with a policy's answer, in one sentence that names the field; None if nothing is."""
    if not isinstance(plan, Plan):
        return f"The policy answered with a {type(plan).__name__}, not a Plan."
    return _path(plan) or _numbers(plan, turn) or _nodes(plan, turn, view)


def _path(plan: Plan) -> str | None:
    """Of the path by itself: types, and whether the nodes are named that it takes."""
    if not isinstance(plan.path, Path):
        return f"Plan.path must be a Path, got {type(plan.path).__name__}."
    if not isinstance(plan.decode, str):
        return f"Plan.decode must be a node's name, got {type(plan.decode).__name__}."
    if plan.path is Path.DIRECT:
        if plan.prefill is not None:
            return "Plan.prefill must be None on path direct."
    elif not isinstance(plan.prefill, str):
        return f"Plan.prefill must be a node's name on path {plan.path}, got {type(plan.prefill).__name__}."
    if plan.reason is not None and not isinstance(plan.reason, Reason):
        return f"Plan.reason must be a Reason or None, got {type(plan.reason).__name__}."
    return None


def _numbers(plan: Plan, turn: Turn) -> str | None:
    if not isinstance(plan.min_pull_tokens, int) or isinstance(plan.min_pull_tokens, bool):
        return f"Plan.min_pull_tokens must be a whole number from 0 on{_got(plan.min_pull_tokens)}."
    if not 0 <= plan.min_pull_tokens < _MOST:
        return f"Plan.min_pull_tokens must be a whole number from 0 on{_got(plan.min_pull_tokens)}."
    if not _within(plan.retain_s, _MOST):
        return f"Plan.retain_s must be a number of seconds from 0 on{_got(plan.retain_s)}."
    if not _within(plan.max_pinned_share, 1):
        return f"Plan.max_pinned_share must be from 0 to 1{_got(plan.max_pinned_share)}."
    if turn.max_retain_s is not None and plan.retain_s > turn.max_retain_s:
        return f"Plan.retain_s is {plan.retain_s:g}, above the client's limit of {turn.max_retain_s:g}."
    if plan.retain_s and not turn.splittable:
        return "Plan.retain_s must be 0 for a turn that cannot be split."
    return None


def _nodes(plan: Plan, turn: Turn, view: View) -> str | None:
    """Of the path in this view."""
    if wrong := _node("decode", plan.decode, view.decode):
        return wrong
    if plan.retain_s and not _named(plan.decode, view.decode).bidirectional:
        return f"Plan.retain_s must be 0: {plan.decode} keeps nothing, it runs without kvflow's connector."
    if plan.prefill is None:
        return _bound(plan, turn, view)
    if not turn.splittable:
        return f"Plan.path is {plan.path}, but only one node on its own can serve the turn."
    if turn.bound_to is not None:
        return f"Plan.path is {plan.path}, but the turn is bound to {turn.bound_to}."
    if wrong := _node("prefill", plan.prefill, view.prefill):
        return wrong
    if plan.path is not Path.PULL:
        return None
    if turn.handle is None:
        return "Plan.path is pull, but the turn has no handle."
    if why := obstacle(turn.handle, view):
        return f"Plan.path is pull, but the handle cannot be used: {why}."
    if not _named(plan.prefill, view.prefill).bidirectional:
        return f"Plan.path is pull, but {plan.prefill} runs without kvflow's connector."
    return None


def _node(role: str, name: str, pool: tuple[NodeState, ...]) -> str | None:
    for node in pool:
        if node.name == name:
            if node.ready or not any(n.ready for n in pool):
                return None
            return f"Plan.{role} is {_short(name)}, which is not ready, though others are."
    return f"Plan.{role} is {_short(name)}, and there is no {role} node of that name."


def _bound(plan: Plan, turn: Turn, view: View) -> str | None:
    if turn.bound_to is not None and plan.decode != turn.bound_to:
        for node in view.decode:
            if node.name == turn.bound_to and node.ready:
                return f"Plan.decode is {plan.decode}, but only {turn.bound_to} can answer the turn."
    return None


def _named(name: str, pool: tuple[NodeState, ...]) -> NodeState:
    return next(n for n in pool if n.name == name)


def _within(value: object, high: float) -> bool:
    """False for what is no number too; a comparison with one that is not a number is never true."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= high


def _got(value: object) -> str:
    """Only numbers are shown: what else a policy returns may be long, or cannot be shown."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f", got {value:g}" if isinstance(value, float) or abs(value) < 2**53 else ", got a huge number"
    return f", got {type(value).__name__}"


def _short(name: str) -> str:
    return repr(name if len(name) <= 64 else name[:64] + "...")


def _raised(error: Exception) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "which cannot be shown"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _plain_route() -> Route:
    return Route(filters=(Ready(), NotFailing()), scorers=(Weighted(scorer=LeastLoaded()),))


_PLAIN = Policy(
    name="plain",
    reuse=Threshold(enabled=False),
    retention=Fixed(ttl_s=0.0),
    routing=Routing(prefill=_plain_route(), decode=_plain_route()),
)
"""What serves a turn whose policy is broken."""
