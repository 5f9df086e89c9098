from typing import Any

import pytest

from kvflow.errors import ConfigError
from kvflow.policies import Fixed, Keep
from tests.policies.build import decode, turn


@pytest.mark.parametrize("ttl_s", [0, 10, 480.0])
def test_fixed_keeps_every_turn_alike(ttl_s: float) -> None:
    retention = Fixed(ttl_s=ttl_s, max_pinned_share=0.5)
    assert retention.keep(turn(), decode()) == Keep(seconds=ttl_s, max_pinned_share=0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ttl_s": -5}, "policy.retention.ttl_s must be 0 or at least 10 seconds, got -5"),
        ({"ttl_s": 9.9}, "policy.retention.ttl_s must be 0 or at least 10 seconds, got 9.9"),
        ({"ttl_s": float("nan")}, "policy.retention.ttl_s must be a number, got nan"),
        ({"ttl_s": "480"}, "policy.retention.ttl_s must be a number, got '480'"),
        ({"max_pinned_share": 1.1}, "policy.retention.max_pinned_share must be from 0 to 1, got 1.1"),
        ({"max_pinned_share": -0.1}, "policy.retention.max_pinned_share must be from 0 to 1, got -0.1"),
    ],
)
def test_bad_values_are_refused_by_key(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        Fixed(**fields)
    assert str(e.value) == message


def test_description_has_the_numbers() -> None:
    words = Fixed(ttl_s=480, max_pinned_share=0.25).describe()
    assert "480 s" in words
    assert "25%" in words


@pytest.mark.parametrize("fields", [{"ttl_s": 0}, {"max_pinned_share": 0}])
def test_description_says_when_nothing_is_kept(fields: dict[str, Any]) -> None:
    assert "nothing is kept" in Fixed(**fields).describe()
