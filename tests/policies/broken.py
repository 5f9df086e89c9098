"""Policies with one thing wrong each."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvflow.errors import NoNodeError
from kvflow.policies import Policy
from kvflow.types import Path, Plan, Turn, View
from tests.policies.build import policy

Wrong = Callable[[Plan, Turn, View], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken(Policy):
    """An ordinary policy whose plans `wrong` makes something else of."""

    wrong: Wrong

    def plan(self, turn: Turn, view: View) -> Plan:
        plan: Plan = self.wrong(Policy.plan(self, turn, view), turn, view)
        return plan


def broken(wrong: Wrong) -> Policy:
    good = policy()
    return Broken(name="broken", reuse=good.reuse, retention=good.retention, routing=good.routing, wrong=wrong)


def with_fields(**fields: Any) -> Policy:
    return broken(lambda plan, _turn, _view: replace(plan, **fields))


def raising(error: BaseException) -> Policy:
    def fail(*_: object) -> Plan:
        raise error

    return broken(fail)


def forgets_the_deadline(plan: Plan, turn: Turn, _: View) -> Plan:
    if turn.handle is None or plan.path is not Path.COLD:
        return plan
    return replace(plan, path=Path.PULL, reason=None)


def counts() -> Wrong:
    seen: list[Plan] = []

    def count(plan: Plan, *_: object) -> Plan:
        seen.append(plan)
        return replace(plan, min_pull_tokens=len(seen))

    return count


def scribbles(plan: Plan, turn: Turn, _: View) -> Plan:
    if isinstance(turn.cached, dict):
        turn.cached["prefill-0"] = 0
    return plan


def refuses(*_: object) -> Plan:
    raise NoNodeError("Closed today.")
