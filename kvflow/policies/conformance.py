"""The rules that every policy keeps, played through on turns and views that are the same every time.

from kvflow.policies.conformance import faults

def test_my_policy() -> None:
    assert faults(my_policy) == []
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from kvflow.errors import NoNodeError
from kvflow.policies.cases import Case, cases
from kvflow.policies.guard import fault
from kvflow.policies.policy import Policy
from kvflow.types import Path, Plan, Turn, View


@dataclass(frozen=True, slots=True)
class _Refused:
    """In place of a plan: no node is left."""

    why: str


Answer = Plan | _Refused


def faults(policy: Policy, *, seed: int = 0) -> list[str]:
    """Each rule that `policy` breaks, in one sentence with the first case that shows it; empty if it keeps them all.

    Another `seed` makes other turns and views.
    """
    if not isinstance(policy, Policy):
        return [f"It is a {type(policy).__name__}, not a Policy."]
    found: dict[str, str] = {}
    answers: list[Answer] = []
    played = [case for case in cases(seed) if not _played(policy, case, found, answers)]
    # Backwards: what remembers the turns before answers otherwise.
    for case, before in zip(reversed(played), reversed(answers), strict=True):
        _again(policy, case, before, found)
    if answers and all(isinstance(a, _Refused) for a in answers):
        found["refuses"] = "It refuses every turn, also with all nodes ready."
    found.update(_words(policy))
    return list(found.values())


def _played(policy: Policy, case: Case, found: dict[str, str], answers: list[Answer]) -> bool:
    """Play one case; true if the policy broke under it, so that there is nothing to play again."""
    turn, view = deepcopy(case.turn), deepcopy(case.view)
    try:
        answer: Answer = _answer(policy, turn, view)
    except Exception as e:
        found.setdefault("raises", f"It raises {type(e).__name__} ({_text(e)}) {case.name}; only NoNodeError may be.")
        return True
    answers.append(answer)
    for rule, sentence in _broken(policy, answer, turn, view, case):
        found.setdefault(rule, sentence)
    return False


def _broken(policy: Policy, answer: Answer, turn: Turn, view: View, case: Case) -> Iterator[tuple[str, str]]:
    if (turn, view) != (case.turn, case.view):
        yield "changes", f"It changes the turn or the view that it is shown, {case.name}."
    if not isinstance(answer, _Refused):
        if wrong := fault(answer, case.turn, case.view):
            yield f"plan {wrong.split()[0]}", f"{wrong.rstrip('.')}; {case.name}."
            return
        if not policy.reuse.enabled and (answer.retain_s or answer.path is Path.PULL):
            yield "off", f"It pulls or keeps something although its reuse is off, {case.name}."
    yield from _explained(policy, answer, turn, view, case)


def _explained(policy: Policy, answer: Answer, turn: Turn, view: View, case: Case) -> Iterator[tuple[str, str]]:
    try:
        explanation = policy.explain(turn, view)
        json.dumps(explanation.to_json(), allow_nan=False)
    except Exception as e:
        yield "explain", f"It cannot be explained, {case.name}: {type(e).__name__} ({_text(e)})."
        return
    if explanation.plan != (None if isinstance(answer, _Refused) else answer):
        yield "explain", f"What explains it is another plan than it makes, {case.name}."
    elif not explanation.why:
        yield "explain", f"It is explained without a reason, {case.name}."


def _again(policy: Policy, case: Case, before: Answer, found: dict[str, str]) -> None:
    try:
        answer: object = _answer(policy, deepcopy(case.turn), deepcopy(case.view))
    except Exception as e:
        answer = e
    if answer != before:
        found.setdefault("pure", f"The same turn and view do not always give the same plan, {case.name}.")


def _answer(policy: Policy, turn: Turn, view: View) -> Answer:
    try:
        return policy.plan(turn, view)
    except NoNodeError as e:
        return _Refused(str(e))


def _words(policy: Policy) -> Iterator[tuple[str, str]]:
    rule = "Its describe() must be a list of sentences"
    try:
        words: Any = policy.describe()
    except Exception as e:
        yield "describe", f"{rule}, and raises {type(e).__name__} ({_text(e)})."
        return
    if not isinstance(words, list) or not words or not all(isinstance(w, str) and w.strip() for w in words):
        yield "describe", f"{rule}, none of them empty."


def _text(error: Exception) -> str:
    return " ".join(str(error).split())[:100]
