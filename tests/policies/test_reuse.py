from typing import Any

import pytest

from kvflow.errors import ConfigError
from kvflow.policies import Threshold
from kvflow.types import Reason
from tests.policies.build import handle


@pytest.mark.parametrize(("tokens", "expected"), [(63, Reason.BELOW_THRESHOLD), (64, None), (65, None)])
def test_threshold_pulls_from_its_number_on(tokens: int, expected: Reason | None) -> None:
    assert Threshold(min_pull_tokens=64).refuse(handle(tokens=tokens)) is expected


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
