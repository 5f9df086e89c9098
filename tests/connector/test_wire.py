"""What is no message of the contract is refused where it arrives."""

import pytest

from kvflow.connector.wire import DecodeOrder, PrefillReport
from kvflow.errors import WireError


@pytest.mark.parametrize("number", [-1, 1.5, True, 2**63, 10**400])
def test_a_count_that_cannot_be_one_is_refused(number: object) -> None:
    with pytest.raises(WireError, match="PrefillReport: prompt_tokens cannot be"):
        PrefillReport.from_wire({"prompt_tokens": number})


@pytest.mark.parametrize("seconds", [-1, True, float("nan"), float("inf"), 10**400])
def test_seconds_that_cannot_be_any_are_refused(seconds: object) -> None:
    with pytest.raises(WireError, match="DecodeOrder: retain_s cannot be"):
        DecodeOrder.from_wire({"retain_s": seconds})


def test_blocks_that_nobody_can_count_are_refused() -> None:
    with pytest.raises(WireError, match="blocks cannot be"):
        PrefillReport.from_wire({"prompt_tokens": 1, "blocks": {"free": 10**400, "pinned": 0, "total": 1}})
