"""Shipped policies keep the rules; a policy that breaks one is told which."""

import pytest

from kvflow.config import conf_dir
from kvflow.errors import NoNodeError
from kvflow.policies import Policy
from kvflow.policies.cases import cases
from kvflow.policies.conformance import faults
from kvflow.types import Path
from tests.cluster import shipped_policy
from tests.policies.broken import broken, counts, forgets_the_deadline, raising, refuses, scribbles, with_fields
from tests.policies.build import policy

SHIPPED = sorted(f.stem for f in (conf_dir() / "policy").glob("*.yaml"))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_policies_keep_every_rule(name: str, seed: int) -> None:
    assert faults(shipped_policy(name), seed=seed) == []


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (raising(KeyError("x")), "It raises KeyError ('x') on a first turn; only NoNodeError may be."),
        (broken(refuses), "It refuses every turn, also with all nodes ready."),
        (broken(lambda *_: None), "The policy answered with a NoneType, not a Plan; on a first turn."),
        (
            broken(forgets_the_deadline),
            "Plan.path is pull, but the handle cannot be used: expired; with an expired handle.",
        ),
        (with_fields(retain_s=30.0), "Plan.retain_s must be 0 for a turn that cannot be split"),
        (with_fields(decode="decode-0"), "Plan.decode is "),
        (with_fields(max_pinned_share=2), "Plan.max_pinned_share must be from 0 to 1, got 2; on a first turn."),
        (broken(counts()), "The same turn and view do not always give the same plan, "),
        (broken(counts()), "What explains it is another plan than it makes, on a first turn."),
        (broken(scribbles), "It changes the turn or the view that it is shown, "),
    ],
)
def test_what_is_broken_is_named(wrong: Policy, sentence: str) -> None:
    found = faults(wrong)
    assert any(f.startswith(sentence) for f in found), found


class Silent(Policy):
    def describe(self) -> list[str]:
        return ["Reuse: some.", " "]


class Wordless(Policy):
    def describe(self) -> list[str]:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("kind", "end"), [(Silent, ", none of them empty."), (Wordless, ", and raises ValueError (no words).")]
)
def test_descriptions_are_checked(kind: type[Policy], end: str) -> None:
    good = policy()
    wordless = kind(name="w", reuse=good.reuse, retention=good.retention, routing=good.routing)
    assert faults(wordless) == [f"Its describe() must be a list of sentences{end}"]


def test_nothing_is_kept_where_reuse_is_off() -> None:
    off = policy(shipped_policy("off").reuse)  # type: ignore[arg-type]
    assert faults(off) == []
    keeps = with_fields(retain_s=20.0)
    object.__setattr__(keeps, "reuse", off.reuse)
    assert any(f.startswith("It pulls or keeps something although its reuse is off, ") for f in faults(keeps))


def test_a_part_is_no_policy() -> None:
    assert faults(policy().reuse) == ["It is a Threshold, not a Policy."]  # type: ignore[arg-type]


def test_each_rule_is_reported_once() -> None:
    assert len(faults(with_fields(max_pinned_share=2))) == 1


def test_the_same_seed_plays_the_same_cases() -> None:
    assert list(cases(3)) == list(cases(3))
    assert list(cases(3)) != list(cases(4))


def test_the_cases_lead_along_every_path() -> None:
    """A suite that never reaches a path would pass whatever a policy did there."""
    paths = set()
    adaptive = shipped_policy("adaptive")
    for case in cases():
        try:
            paths.add((adaptive.plan(case.turn, case.view).path, case.turn.splittable))
        except NoNodeError:
            continue
    assert {(p, True) for p in Path} | {(Path.DIRECT, False)} == paths
