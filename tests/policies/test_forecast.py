"""Predicted times, part by part, on costs that are easy to reckon with: a token computed is 1 ms, one moved 10 us."""

from math import inf, isfinite, nan
from typing import Any

import pytest

from kvflow.policies import Forecast, Option, forecast
from kvflow.types import Cost, NodeState, Path, Turn, View
from tests.policies.build import decode, handle, prefill, turn, view

COMPUTE = Cost(fixed_s=0.0, token_s=1e-3, samples=5)
OVERHEAD = Cost(fixed_s=0.01, token_s=0.0, samples=5)
MOVE = Cost(fixed_s=0.1, token_s=1e-5, samples=5)
HELD = turn(handle=handle(tokens=1000), new_tokens=200)


def node(build: Any, **fields: Any) -> NodeState:
    made: NodeState = build(**{"compute": COMPUTE, "overhead": OVERHEAD, **fields})
    return made


def world(prefill_node: NodeState, decode_node: NodeState, **transfers: Cost) -> View:
    both = {"there": ("prefill-0", "decode-0"), "back": ("decode-0", "prefill-0")}
    pairs = {both[name]: cost for name, cost in transfers.items()}
    nodes = view(prefill_node, decode_node)
    return View(now=nodes.now, prefill=nodes.prefill, decode=nodes.decode, transfers=pairs)


def predicted(path: Path, asked: Turn = HELD, p: NodeState | None = None, d: NodeState | None = None) -> Forecast:
    p, d = p or node(prefill), d or node(decode)
    computed, pulled = {Path.COLD: (1200, 0), Path.PULL: (200, 1000), Path.DIRECT: (200, 0)}[path]
    option = Option(
        path=path,
        decode=d,
        prefill=None if path is Path.DIRECT else p,
        computed_tokens=computed,
        pulled_tokens=pulled,
    )
    return forecast(option, asked, world(p, d, there=MOVE, back=MOVE))


def test_cold_computes_everything_and_moves_it() -> None:
    parts = predicted(Path.COLD, turn())
    assert (parts.wait_s, parts.overhead_s, parts.pull_s, parts.disturbs_s) == (0, 0.02, 0, 0)
    assert parts.compute_s == pytest.approx(1.2 + 0.001)  # and the step on the decode node
    assert parts.transfer_s == pytest.approx(0.1 + 0.012)
    assert parts.first_token_s == pytest.approx(0.02 + 1.201 + 0.112)


def test_a_pull_moves_the_history_there_and_only_the_rest_back() -> None:
    parts = predicted(Path.PULL)
    assert parts.pull_s == pytest.approx(0.1 + 0.01)
    assert parts.compute_s == pytest.approx(0.2 + 0.001)
    assert parts.transfer_s == pytest.approx(0.1 + 0.002)


def test_direct_moves_nothing_and_disturbs_each_stream() -> None:
    parts = predicted(Path.DIRECT, d=node(decode, in_flight=3))
    assert (parts.pull_s, parts.transfer_s, parts.overhead_s) == (0, 0, 0.01)
    assert parts.compute_s == pytest.approx(0.2)
    assert parts.disturbs_s == pytest.approx(3 * 0.2)
    assert parts.first_token_s == pytest.approx(0.21)


@pytest.mark.parametrize(
    ("fields", "moved"),
    [
        ({"block_size": 64}, 1200 - 960),  # whole blocks only
        ({"prefix_caching": False}, 1200),
        ({"epoch": "e2"}, 1200),
        ({"name": "decode-1"}, 1200),
    ],
)
def test_a_decode_node_asks_for_what_it_does_not_find_itself(fields: dict[str, Any], moved: int) -> None:
    d = node(decode, **fields)
    p = node(prefill)
    option = Option(path=Path.COLD, decode=d, prefill=p, computed_tokens=1200)
    moves = {("prefill-0", d.name): MOVE}
    nodes = View(now=100.0, prefill=(p,), decode=(d,), transfers=moves)
    assert forecast(option, HELD, nodes).transfer_s == pytest.approx(0.1 + moved * 1e-5)


def test_what_has_diverged_is_not_found() -> None:
    assert predicted(Path.COLD, turn(handle=handle(tokens=1000), new_tokens=1100)).transfer_s == pytest.approx(0.111)


def test_what_has_expired_is_not_counted_on() -> None:
    expired = turn(handle=handle(tokens=1000, deadline=100.0), new_tokens=200)
    assert predicted(Path.COLD, expired).transfer_s == pytest.approx(0.112)


def test_a_turn_waits_for_the_prompts_before_it() -> None:
    assert predicted(Path.COLD, p=node(prefill, free_at=103.0)).wait_s == 3.0
    assert predicted(Path.DIRECT, d=node(decode, free_at=102.0)).wait_s == 2.0
    assert predicted(Path.COLD, p=node(prefill, free_at=99.0)).wait_s == 0.0


def test_the_decode_node_works_off_its_own_prompts_meanwhile() -> None:
    idle = predicted(Path.PULL).first_token_s
    busy = predicted(Path.PULL, d=node(decode, free_at=100.1))  # done before the prompt arrives
    assert busy.wait_s == 0.0
    later = predicted(Path.PULL, d=node(decode, free_at=110.0))
    assert later.wait_s == pytest.approx(10.0 - (idle - 0.001))
    assert later.first_token_s == pytest.approx(10.0 + 0.001)


def test_tokens_attend_to_those_before_them() -> None:
    attends = Cost(fixed_s=0.0, token_s=0.0, pair_s=1e-6, samples=5)
    d = node(decode, compute=attends)
    assert predicted(Path.DIRECT, d=d).compute_s == pytest.approx(1e-6 * 200 * (1000 + 100))


def test_a_transfer_nobody_has_measured_is_like_the_one_the_other_way() -> None:
    p, d = node(prefill), node(decode)
    option = Option(path=Path.PULL, decode=d, prefill=p, computed_tokens=200, pulled_tokens=1000)
    assert forecast(option, HELD, world(p, d, there=MOVE)).pull_s == pytest.approx(0.11)
    slow = Cost(fixed_s=5.0, token_s=0.0, samples=1)
    assert forecast(option, HELD, world(p, d, there=MOVE, back=slow)).pull_s == 5.0
    assert forecast(option, HELD, world(p, d)).pull_s == pytest.approx(12.5e-3 + 1000 * 5e-6)


@pytest.mark.parametrize("bad", [nan, inf, -inf, -1.0, 1e308])
@pytest.mark.parametrize("path", Path)
def test_nonsense_in_the_estimates_ends_in_numbers(path: Path, bad: float) -> None:
    cost = Cost(fixed_s=bad, token_s=bad, pair_s=bad, samples=1)
    nodes = {b: node(b, compute=cost, overhead=cost, free_at=bad, in_flight=-1) for b in (prefill, decode)}
    parts = predicted(path, p=nodes[prefill], d=nodes[decode])
    assert all(isfinite(v) and v >= 0 for v in parts.to_json().values())
    assert parts.compute_s < 1  # the guess


def test_as_json_the_sum_comes_along() -> None:
    numbers = predicted(Path.PULL).to_json()
    parts = ("wait_s", "overhead_s", "pull_s", "compute_s", "transfer_s")
    assert numbers["first_token_s"] == pytest.approx(sum(numbers[p] for p in parts))
    assert set(numbers) == {"first_token_s", "disturbs_s", *parts}
