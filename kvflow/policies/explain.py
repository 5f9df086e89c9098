"""A plan, and everything that led to it: what each filter, scorer and forecast said of each node and path."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from kvflow.errors import NoNodeError
from kvflow.policies.forecast import Forecast, forecast
from kvflow.policies.handles import holds
from kvflow.policies.reuse import Option
from kvflow.policies.routing import Route
from kvflow.policies.routing.base import Nodes
from kvflow.types import NodeState, Path, Plan, Reason, Turn, View

if TYPE_CHECKING:
    from kvflow.policies.policy import Policy

_WORDS = {
    Reason.NO_HANDLE: "nothing is kept for this conversation",
    Reason.BELOW_THRESHOLD: "less could be pulled than is worth it to the policy",
    Reason.EXPIRED: "the time of what was kept is up",
    Reason.NODE_GONE: "the engine that kept the conversation has gone or restarted",
    Reason.POLICY: "the policy does not reuse",
    Reason.UNSPLITTABLE: "only one node on its own can serve the request",
    Reason.ONE_WAY: "a node without kvflow's connector would take part",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    scorer: str
    """In the scorer's own words."""
    score: float
    weight: float

    @property
    def weighted(self) -> float:
        return self.score * self.weight

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "weighted": self.weighted}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One node of a pool."""

    node: str
    left_out_by: str | None = None
    """The words of the filter that it did not pass, or of what else stood in its way; None for a candidate."""
    scores: tuple[Score, ...] = ()
    """Of a candidate, one for each scorer."""
    sum: float | None = None
    """Of its weighted scores; what the picker goes by."""
    picked: bool = False

    def to_json(self) -> dict[str, Any]:
        own = {"node": self.node, "picked": self.picked, "left_out_by": self.left_out_by, "sum": self.sum}
        return {**own, "scores": [s.to_json() for s in self.scores]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One path, and what it would be like."""

    path: Path
    chosen: bool = False
    impossible: str | None = None
    """Why the turn cannot take it; then there are no numbers."""
    prefill: str | None = None
    decode: str | None = None
    computed_tokens: int | None = None
    pulled_tokens: int | None = None
    forecast: Forecast | None = None

    def to_json(self) -> dict[str, Any]:
        predicted = self.forecast.to_json() if self.forecast else None
        own = {name: getattr(self, name) for name in ("chosen", "impossible", "prefill", "decode")}
        tokens = {"computed_tokens": self.computed_tokens, "pulled_tokens": self.pulled_tokens}
        return {"path": self.path.value, **own, **tokens, "forecast": predicted}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    policy: str
    """Its name."""
    plan: Plan | None
    """What `Policy.plan` answers; None if no node is left that could take the turn."""
    why: str
    """One sentence."""
    error: str | None = None
    """What was wrong with the policy, whose plan was then replaced."""
    prefill: tuple[Candidate, ...] = ()
    decode: tuple[Candidate, ...] = ()
    ways: tuple[Way, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Only what JSON has: an estimate that is no finite number is null."""
        plan = None if self.plan is None else {k: getattr(v, "value", v) for k, v in asdict(self.plan).items()}
        out: dict[str, Any] = {"policy": self.policy, "why": self.why, "error": self.error, "plan": plan}
        for name in ("ways", "prefill", "decode"):
            out[name] = [item.to_json() for item in getattr(self, name)]
        plain: dict[str, Any] = _plain(out)
        return plain


def explain(policy: "Policy", turn: Turn, view: View) -> Explanation:
    """Asks the policy's own parts again, in the order in which `Policy.plan` does."""
    refused, plan = "", None
    try:
        plan = policy.plan(turn, view)
    except NoNodeError as e:
        refused = str(e)
    ways = _ways(policy, turn, view, plan)
    return Explanation(
        policy=policy.name,
        plan=plan,
        why=refused if plan is None else _why(plan, turn, ways),
        prefill=_prefill(policy, turn, view, plan),
        decode=_decode(policy, turn, view, plan),
        ways=ways,
    )


def _decode(policy: "Policy", turn: Turn, view: View, plan: Plan | None) -> tuple[Candidate, ...]:
    picked = plan.decode if plan else None
    if turn.bound_to is not None and picked == turn.bound_to:
        others = {n.name: f"bound to {turn.bound_to}, which alone can answer" for n in view.decode}
        del others[turn.bound_to]
        return _candidates(policy.routing.decode, view.decode, others, turn, view, picked)
    left_out = policy.routing.decode.left_out(view.decode, turn)
    return _candidates(policy.routing.decode, view.decode, left_out, turn, view, picked)


def _prefill(policy: "Policy", turn: Turn, view: View, plan: Plan | None) -> tuple[Candidate, ...]:
    route = policy.routing.prefill
    if not turn.splittable or turn.bound_to is not None:
        left_out = {n.name: "no prefill leg: one decode node serves the turn alone" for n in view.prefill}
        return _candidates(route, view.prefill, left_out, turn, view, None)
    left_out = route.left_out(view.prefill, turn)
    if len(left_out) < len(view.prefill):
        able, _ = policy.prefill_candidates(turn, policy.obstacle(turn.handle, view), view)
        names = {n.name for n in able}
        for n in view.prefill:
            if n.name not in names:
                left_out.setdefault(n.name, "nodes that can pull")
    return _candidates(route, view.prefill, left_out, turn, view, plan.prefill if plan else None)


def _candidates(
    route: Route, pool: Nodes, left_out: dict[str, str], turn: Turn, view: View, picked: str | None
) -> tuple[Candidate, ...]:
    rated = tuple(n for n in pool if n.name not in left_out)
    found = _rated(route, rated, turn, view, picked) if rated else {}
    return tuple(
        found.get(n.name) or Candidate(node=n.name, left_out_by=left_out[n.name], picked=n.name == picked) for n in pool
    )


def _rated(route: Route, nodes: Nodes, turn: Turn, view: View, picked: str | None) -> dict[str, Candidate]:
    rated, words = route.rate(nodes, turn, view), [w.scorer.describe() for w in route.scorers]
    out = {}
    for i, node in enumerate(rated.nodes):
        scores = tuple(
            Score(scorer=text, score=column[i], weight=w.weight)
            for text, w, column in zip(words, route.scorers, rated.scores, strict=True)
        )
        out[node.name] = Candidate(node=node.name, scores=scores, sum=rated.sums[i], picked=node.name == picked)
    return out


def _ways(policy: "Policy", turn: Turn, view: View, plan: Plan | None) -> tuple[Way, ...]:
    options, why_none = _options(policy, turn, view)
    by_path = {o.path: o for o in options}
    ways = []
    for path in Path:
        if option := by_path.get(path):
            ways.append(_way(option, turn, view, plan))
        else:
            why = why_none or _impossible(path, options, policy, turn, view)
            ways.append(Way(path=path, impossible=why))
    if plan is not None and not any(w.chosen for w in ways):
        # A policy with a `plan` of its own may go another way than its parts would.
        own = Way(path=plan.path, chosen=True, prefill=plan.prefill, decode=plan.decode)
        ways = [own if w.path is plan.path else w for w in ways]
    return tuple(ways)


def _options(policy: "Policy", turn: Turn, view: View) -> tuple[Sequence[Option], str]:
    """What is possible; if nothing is, why."""
    try:
        # Raises as `plan` does where no decode node is left.
        decode = policy.decode_node(turn, view)
        if turn.splittable and turn.bound_to is None:
            return policy.options(turn, decode, view), ""
    except NoNodeError as e:
        return (), str(e)
    alone = Option(path=Path.DIRECT, decode=decode, computed_tokens=turn.prompt_tokens)
    return (alone,), ""


def _way(option: Option, turn: Turn, view: View, plan: Plan | None) -> Way:
    prefill = option.prefill.name if option.prefill else None
    nodes = (option.path, prefill, option.decode.name)
    return Way(
        path=option.path,
        chosen=plan is not None and (plan.path, plan.prefill, plan.decode) == nodes,
        prefill=prefill,
        decode=option.decode.name,
        computed_tokens=option.computed_tokens,
        pulled_tokens=option.pulled_tokens,
        forecast=forecast(option, turn, view),
    )


def _impossible(path: Path, options: Sequence[Option], policy: "Policy", turn: Turn, view: View) -> str:
    if not turn.splittable:
        return _WORDS[Reason.UNSPLITTABLE]
    if turn.bound_to is not None:
        return f"only {turn.bound_to} can answer: it holds the response that the request refers to"
    cold = next((o for o in options if o.path is Path.COLD), None)
    if path is not Path.DIRECT and cold is None:
        return "no prefill node can take the request"
    obstacle = policy.obstacle(turn.handle, view)
    if path is Path.PULL and cold is not None:
        obstacle = cold.reason
    if obstacle is not None:
        return _WORDS.get(obstacle, obstacle.value)
    return _not_direct(options[0].decode, turn)


def _not_direct(decode: NodeState, turn: Turn) -> str:
    if not holds(decode, turn):
        return f"{decode.name} does not hold the conversation"
    return f"{decode.name} has no prefix cache, so it would not find what it holds"


def _why(plan: Plan, turn: Turn, ways: Sequence[Way]) -> str:
    if not turn.splittable:
        return f"Only one node on its own can serve the request, so {plan.decode} does everything."
    if turn.bound_to is not None:
        return f"{plan.decode} is asked alone: the turn is bound to {turn.bound_to}, which holds what it refers to."
    because = f", because {_WORDS.get(plan.reason, plan.reason.value)}" if plan.reason else ""
    times = [f"{w.path} {w.forecast.first_token_s:.3g} s" for w in ways if w.forecast]
    if len(times) < 2:
        return f"Path {plan.path}{because}."
    return f"Path {plan.path}{because}; predicted times to the first token: {', '.join(times)}."


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not isfinite(value) else value
