"""What is learned from measurements, alone: no clock, no nodes."""

import random
from math import inf, nan

import pytest

from kvflow.router.estimates import Estimates
from kvflow.router.fit import Fit
from kvflow.types import COMPUTE_GUESS, OVERHEAD_GUESS, TRANSFER_GUESS, Cost, Role, View

GPU = Cost(fixed_s=0.02, token_s=20e-6, pair_s=1e-9)
CPU = Cost(fixed_s=0.1, token_s=3e-3)
QUADRATIC = Cost(fixed_s=0.005, token_s=1e-4, pair_s=1e-7)
SLOW = Cost(fixed_s=0.05, token_s=50e-6)
ROLES = {f"{role}-{i}": role for role in Role for i in range(3)}


def times(cost: Cost, factor: float) -> Cost:
    return Cost(fixed_s=cost.fixed_s * factor, token_s=cost.token_s * factor, pair_s=cost.pair_s * factor)


def measure(
    fit: Fit, cost: Cost, count: int, *, noise: float = 0.1, seed: int = 0, spikes: tuple[int, ...] = ()
) -> Fit:
    """Prompts of 10 to 4,000 tokens, half of them behind a context; a spike takes ten times as long."""
    rng = random.Random(seed)
    for i in range(count):
        tokens, context = int(10 ** rng.uniform(1, 3.6)), rng.choice([0, int(10 ** rng.uniform(2, 3.6))])
        seconds = cost.seconds(tokens, context) * rng.lognormvariate(0, noise)
        fit.learn(tokens, context, seconds * (10 if i in spikes else 1))
    return fit


def error(found: Cost, true: Cost) -> float:
    """The largest relative error over short and long prompts."""
    shapes = [(t, c) for t in (16, 128, 1024, 4000) for c in (0, 4000)]
    return max(abs(found.seconds(*s) / true.seconds(*s) - 1) for s in shapes)


def compute() -> Fit:
    return Fit(COMPUTE_GUESS, pairs=True)


class TestOneCost:
    @pytest.mark.parametrize("true", [GPU, CPU, QUADRATIC, times(GPU, 0.01), times(CPU, 10)])
    def test_it_comes_out_for_short_and_long_prompts(self, true: Cost) -> None:
        assert error(measure(compute(), true, 100).cost, true) < 0.25

    def test_without_noise_it_comes_out_exactly(self) -> None:
        assert error(measure(compute(), GPU, 200, noise=0).cost, GPU) < 0.05

    @pytest.mark.parametrize("seed", range(5))
    def test_a_few_measurements_outweigh_the_guess(self, seed: int) -> None:
        fit = compute()
        for i in range(5):
            fit.learn(500 + 10 * i + seed, 0, CPU.seconds(500 + 10 * i + seed))
        assert fit.cost.seconds(500) == pytest.approx(CPU.seconds(500), rel=0.1)

    def test_prompts_of_one_length_leave_the_shape_to_the_guess(self) -> None:
        fit = Fit(COMPUTE_GUESS, pairs=True)
        for _ in range(40):
            fit.learn(100, 0, COMPUTE_GUESS.seconds(100) * 2)
        assert fit.cost.seconds(1000) == pytest.approx(COMPUTE_GUESS.seconds(1000) * 2, rel=0.2)

    @pytest.mark.parametrize("after", [1, 3, 60])
    def test_one_spike_changes_nothing(self, after: int) -> None:
        fit = measure(compute(), COMPUTE_GUESS, after)
        before = fit.cost
        assert not fit.learn(500, 0, COMPUTE_GUESS.seconds(500) * 10)
        assert fit.cost is before

    def test_a_first_call_that_compiles_does_not_last(self) -> None:
        fit = compute()
        fit.learn(100, 0, 60.0)
        assert fit.cost == COMPUTE_GUESS
        assert error(measure(fit, COMPUTE_GUESS, 20).cost, COMPUTE_GUESS) < 0.25

    @pytest.mark.parametrize("every", [10, 15])
    def test_spikes_now_and_then_are_never_believed(self, every: int) -> None:
        spikes = tuple(range(7, 200, every))
        assert error(measure(compute(), GPU, 200, spikes=spikes).cost, GPU) < 0.5

    @pytest.mark.parametrize("factor", [0.1, 0.5, 2, 10])
    @pytest.mark.parametrize("seed", range(3))
    def test_another_speed_is_learned_within_twenty(self, factor: float, seed: int) -> None:
        fit, true = measure(compute(), GPU, 100, seed=seed), times(GPU, factor)
        measure(fit, true, 20, seed=seed + 10)
        usual = [abs(fit.cost.seconds(t, c) / true.seconds(t, c) - 1) for t in (100, 400, 1600) for c in (0, 1000)]
        assert max(usual) < 0.4

    @pytest.mark.parametrize("seed", range(20))
    def test_no_coefficient_is_ever_negative(self, seed: int) -> None:
        rng, fit = random.Random(seed), compute()
        for _ in range(200):
            fit.learn(rng.randrange(1, 5000), rng.randrange(5000), 10 ** rng.uniform(-7, 3))
            assert min(fit.cost.fixed_s, fit.cost.token_s, fit.cost.pair_s) >= 0
            assert fit.cost.seconds(5000, 5000) < inf

    @pytest.mark.parametrize(
        ("tokens", "context", "seconds"),
        [
            (0, 0, 1.0),
            (-5, 0, 1.0),
            (10**400, 0, 1.0),
            (10, -1, 1.0),
            (10, 10**400, 1.0),
            (10, 0, -1.0),
            (10, 0, nan),
            (10, 0, inf),
            (10, 0, 1e9),
            (10, 0, 10**400),
        ],
    )
    def test_nonsense_is_passed_over(self, tokens: int, context: int, seconds: float) -> None:
        fit = measure(compute(), GPU, 50)
        before = fit.cost
        for _ in range(20):
            assert not fit.learn(tokens, context, seconds)
        assert fit.cost is before

    def test_what_takes_no_time_costs_next_to_nothing(self) -> None:
        fit = compute()
        for _ in range(10):
            fit.learn(100, 0, 0)
        assert fit.cost.seconds(100) < 1e-5

    def test_after_a_restart_a_few_measurements_outweigh_all_before(self) -> None:
        fit = measure(compute(), GPU, 100)
        before = fit.cost
        fit.restart()
        assert fit.cost is before
        measure(fit, times(GPU, 2), 10, noise=0)
        assert fit.cost.seconds(500) == pytest.approx(2 * GPU.seconds(500), rel=0.25)


class TestNodesAndPairs:
    def test_at_first_all_is_guessed(self) -> None:
        estimates = Estimates(ROLES)
        assert {estimates.compute(n) for n in ROLES} == {COMPUTE_GUESS}
        assert {estimates.overhead(n) for n in ROLES} == {OVERHEAD_GUESS}
        assert estimates.transfers()["decode-0", "prefill-2"] == TRANSFER_GUESS
        assert not list(estimates.transfers())

    def test_a_node_without_measurements_has_those_of_its_role(self) -> None:
        estimates = Estimates(ROLES)
        for i in range(30):
            estimates.computed("prefill-0", 100 + i * 30, 0, CPU.seconds(100 + i * 30))
            estimates.took("prefill-0", 100 + i * 30, 0.1)
        other = estimates.compute("prefill-1")
        assert other.seconds(500) == pytest.approx(CPU.seconds(500), rel=0.1)
        assert other.samples > 0
        assert estimates.overhead("prefill-1").seconds(500) == pytest.approx(0.1, rel=0.1)
        assert estimates.overhead("decode-1") == OVERHEAD_GUESS

    def test_a_decode_node_computes_as_prefill_nodes_do_until_it_is_measured(self) -> None:
        estimates = Estimates(ROLES)
        for i in range(30):
            estimates.computed("prefill-0", 100 + i * 30, 0, CPU.seconds(100 + i * 30))
        assert estimates.compute("decode-1") == estimates.compute("prefill-1")
        for i in range(30):
            estimates.computed("decode-0", 100 + i * 30, 0, GPU.seconds(100 + i * 30))
        assert estimates.compute("decode-1").seconds(500) == pytest.approx(GPU.seconds(500), rel=0.2)
        assert estimates.compute("prefill-1").seconds(500) == pytest.approx(CPU.seconds(500), rel=0.1)

    def test_a_decode_node_that_computed_last_tokens_only_has_the_prefill_nodes_slope(self) -> None:
        estimates, rng = Estimates(ROLES), random.Random(1)
        for _ in range(100):
            tokens = rng.randrange(100, 3000)
            estimates.computed("prefill-0", tokens, 0, CPU.seconds(tokens))
            estimates.computed("decode-0", 1, tokens, 0.2)
        cost = estimates.compute("decode-0")
        assert cost.seconds(1, 1000) == pytest.approx(0.2, rel=0.1)
        for tokens in (200, 1000):
            assert cost.seconds(tokens) - 0.2 == pytest.approx(CPU.token_s * tokens, rel=0.3)
        assert estimates.compute("decode-1").seconds(1, 1000) == pytest.approx(0.2, rel=0.1)

    def test_a_slow_decode_node_is_known_after_a_few_prompts_among_many_last_tokens(self) -> None:
        estimates, rng = Estimates({"p": Role.PREFILL, "d": Role.DECODE}), random.Random(1)

        def cold() -> None:
            tokens = rng.choice((300, 1000, 4000))
            estimates.computed("p", tokens, 0, 0.01 + tokens * 1e-4)
            estimates.computed("d", 1, tokens, 0.011)

        for _ in range(40):
            cold()
        for _ in range(6):
            estimates.computed("d", 512, 2048, 0.01 + 512e-3)
            for _ in range(5):
                cold()
        assert estimates.compute("d").seconds(512, 2048) == pytest.approx(0.522, rel=0.2)

    def test_each_node_and_pair_has_its_own(self) -> None:
        estimates = Estimates(ROLES)
        for i in range(60):
            tokens = 100 + i * 30
            estimates.computed("prefill-0", tokens, 0, GPU.seconds(tokens))
            estimates.computed("prefill-1", tokens, 0, GPU.seconds(tokens) * 2)
            estimates.moved("decode-0", "prefill-0", tokens, SLOW.seconds(tokens))
            estimates.moved("decode-1", "prefill-0", tokens, SLOW.seconds(tokens) * 2)
        fast, slow = estimates.compute("prefill-0"), estimates.compute("prefill-1")
        assert slow.seconds(500) == pytest.approx(2 * fast.seconds(500), rel=0.1)
        transfers = estimates.transfers()
        near, far = transfers["decode-0", "prefill-0"], transfers["decode-1", "prefill-0"]
        assert far.seconds(500) == pytest.approx(2 * near.seconds(500), rel=0.1)
        assert set(transfers) == {("decode-0", "prefill-0"), ("decode-1", "prefill-0")}

    def test_a_pair_without_measurements_has_those_of_its_direction(self) -> None:
        estimates = Estimates(ROLES)
        for i in range(30):
            estimates.moved("decode-0", "prefill-0", 100 + i * 30, SLOW.seconds(100 + i * 30))
        view = View(now=0, prefill=(), decode=(), transfers=estimates.transfers())
        assert view.transfer("decode-2", "prefill-2").seconds(500) == pytest.approx(SLOW.seconds(500), rel=0.1)
        assert view.transfer("prefill-0", "decode-0") == TRANSFER_GUESS
        assert view.transfer("nobody", "prefill-0") == TRANSFER_GUESS

    def test_a_view_keeps_the_transfers_that_it_was_made_with(self) -> None:
        estimates = Estimates(ROLES)
        before = estimates.transfers()
        estimates.moved("decode-0", "prefill-0", 100, TRANSFER_GUESS.seconds(100))
        assert not list(before)
        assert list(estimates.transfers()) == [("decode-0", "prefill-0")]

    def test_a_node_that_is_not_known_teaches_nothing(self) -> None:
        estimates = Estimates(ROLES)
        estimates.moved("gone", "prefill-0", 100, 1.0)
        assert not list(estimates.transfers())

    def test_another_process_begins_with_what_the_last_one_taught(self) -> None:
        estimates = Estimates(ROLES)
        for i in range(60):
            estimates.computed("prefill-0", 100 + i * 30, 0, CPU.seconds(100 + i * 30))
        before = estimates.compute("prefill-0")
        estimates.restarted("prefill-0")
        assert estimates.compute("prefill-0") == before
        for i in range(8):
            estimates.computed("prefill-0", 100 + i * 90, 0, 2 * CPU.seconds(100 + i * 90))
        assert estimates.compute("prefill-0").seconds(500) == pytest.approx(2 * CPU.seconds(500), rel=0.25)
