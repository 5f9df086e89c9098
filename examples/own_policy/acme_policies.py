"""A reuse part of one's own: how long a turn must be for its history to be worth a pull depends on the prefill pool.

    PYTHONPATH=examples/own_policy KVFLOW_POLICY_MODULES=acme_policies \
        kvflow plan --config-dir examples/own_policy policy=steady
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvflow.policies import Choice, Option, Threshold, check
from kvflow.types import Path, Reason, Turn, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady(Threshold):
    """As `Threshold`; but while a prefill node has nothing to do, histories below `idle_min_pull_tokens` are computed.

    Its own compute costs nobody anything then, and what a decode node keeps stays there for a busier moment.
    """

    idle_min_pull_tokens: int

    def __post_init__(self) -> None:
        # Not super(): in a dataclass with slots it does not find its class.
        Threshold.__post_init__(self)
        check.whole("policy.reuse.idle_min_pull_tokens", self.idle_min_pull_tokens)

    def choose(self, turn: Turn, options: Sequence[Option], view: View) -> Choice:
        choice = Threshold.choose(self, turn, options, view)
        pull = choice.option
        if pull.path is not Path.PULL or pull.prefill is None or pull.pulled_tokens >= self.idle_min_pull_tokens:
            return choice
        cold = next((o for o in options if o.path is Path.COLD), None)
        if cold is None or pull.prefill.in_flight > 0:
            return choice
        return Choice(option=cold, reason=Reason.BELOW_THRESHOLD)

    def describe(self) -> str:
        words = Threshold.describe(self).rstrip(".")
        return f"{words}; from {self.idle_min_pull_tokens} on where the prefill node has nothing to do."
