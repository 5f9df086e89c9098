import pytest

from kvflow.router.lengths import MAX_TENANTS, Lengths


def test_before_anything_was_counted_the_estimate_stands() -> None:
    assert Lengths().tokens("acme", 1000) == 1000


def test_what_engines_count_is_learned_tenant_by_tenant() -> None:
    lengths = Lengths()
    for _ in range(40):
        lengths.counted("acme", 1000, 1700)
        lengths.counted("other", 1000, 300)
    assert lengths.tokens("acme", 500) == pytest.approx(850, rel=0.01)
    assert lengths.tokens("other", 500) == pytest.approx(150, rel=0.01)
    assert lengths.tokens("third", 500) == 500


@pytest.mark.parametrize("tokens", [1, 1_000_000])
def test_one_request_that_is_unlike_all_others_moves_little(tokens: int) -> None:
    lengths = Lengths()
    for _ in range(40):
        lengths.counted("acme", 1000, 1000)
    lengths.counted("acme", 1000, tokens)
    assert lengths.tokens("acme", 1000) == pytest.approx(1000, rel=0.1)


def test_however_strange_the_requests_the_estimate_stays_within_bounds() -> None:
    lengths = Lengths()
    for _ in range(200):
        lengths.counted("images", 1_000_000, 1)
    assert lengths.tokens("images", 8000) == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize(("estimated", "tokens"), [(0, 5), (5, 0), (-1, -1)])
def test_nonsense_teaches_nothing(estimated: int, tokens: int) -> None:
    lengths = Lengths()
    lengths.counted("acme", estimated, tokens)
    assert lengths.tokens("acme", 1000) == 1000


def test_tenants_that_have_not_been_seen_for_long_are_forgotten() -> None:
    lengths = Lengths()
    lengths.counted("first", 1000, 4000)
    for i in range(MAX_TENANTS):
        lengths.counted(f"tenant-{i}", 1000, 1000)
    assert lengths.tokens("first", 1000) == 1000
