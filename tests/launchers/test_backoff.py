from kvflow.launchers.backoff import Backoff


def test_short_lives_double_the_wait_up_to_a_limit() -> None:
    backoff = Backoff(first_s=1, max_s=5, healthy_s=100)
    assert [backoff.after(0) for _ in range(5)] == [1, 2, 4, 5, 5]


def test_a_healthy_life_starts_over() -> None:
    backoff = Backoff(first_s=1, max_s=60, healthy_s=100)
    assert [backoff.after(lived_s) for lived_s in (0, 99, 100, 0, 0, 1000)] == [1, 2, 1, 2, 4, 1]
