from typing import Any

import pytest

from kvflow.errors import ConfigError
from kvflow.policies import Option, Threshold
from kvflow.types import Path, Reason
from tests.policies.build import decode, handle, prefill, turn, view

COLD = Option(path=Path.COLD, decode=decode(), prefill=prefill(), computed_tokens=1200, reason=None)
PULL = Option(path=Path.PULL, decode=decode(), prefill=prefill(), computed_tokens=200, pulled_tokens=1000)
DIRECT = Option(path=Path.DIRECT, decode=decode(), computed_tokens=208)


@pytest.mark.parametrize(
    ("tokens", "path", "reason"),
    [(63, Path.COLD, Reason.BELOW_THRESHOLD), (64, Path.PULL, None), (65, Path.PULL, None)],
)
def test_threshold_pulls_from_its_number_on(tokens: int, path: Path, reason: Reason | None) -> None:
    asked = turn(handle=handle(tokens=tokens))
    choice = Threshold(min_pull_tokens=64).choose(asked, (COLD, PULL, DIRECT), view())
    assert (choice.option.path, choice.reason, choice.min_pull_tokens) == (path, reason, 64 * (path is Path.PULL))


@pytest.mark.parametrize(("limit", "path"), [(208, Path.PULL), (209, Path.DIRECT)])
def test_little_to_compute_stays_with_the_holder(limit: int, path: Path) -> None:
    reuse = Threshold(direct_below_tokens=limit)
    assert reuse.choose(turn(handle=handle()), (COLD, PULL, DIRECT), view()).option.path is path


def test_without_a_prefill_node_the_holder_does_it_alone() -> None:
    assert Threshold().choose(turn(handle=handle(tokens=1)), (DIRECT,), view()).option is DIRECT


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_pull_tokens": -1}, "policy.reuse.min_pull_tokens must be at least 0, got -1"),
        ({"min_pull_tokens": 1.5}, "policy.reuse.min_pull_tokens must be a whole number, got 1.5"),
        ({"min_pull_tokens": True}, "policy.reuse.min_pull_tokens must be a whole number, got True"),
        ({"direct_below_tokens": -1}, "policy.reuse.direct_below_tokens must be at least 0, got -1"),
        ({"enabled": "yes"}, "policy.reuse.enabled must be true or false, got 'yes'"),
    ],
)
def test_bad_values_are_refused_by_key(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        Threshold(**fields)
    assert str(e.value) == message


def test_description_has_the_number() -> None:
    assert "64 tokens" in Threshold(min_pull_tokens=64).describe()
    assert "fewer than 32 to compute" in Threshold(direct_below_tokens=32).describe()
    assert "never" in Threshold(enabled=False).describe()
