"""Command line of the benchmark; `benchmarks.routing` says what it measures."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.routing import __doc__ as manual
from benchmarks.routing.play import Mix, play
from benchmarks.routing.variants import Variant, varied
from kvflow.config import compose, load
from kvflow.errors import KvflowError
from kvflow.graph import build
from kvflow.policies import Policy

Row = dict[str, str | int | float]


def main(words: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(words)
    try:
        policies = {name: shipped(name) for name in args.policy}
    except KvflowError as error:
        Console(stderr=True).print(f"benchmarks.routing: {error}", style="red", markup=False, highlight=False)
        return 1
    rows: list[Row] = []
    for name, policy in policies.items():
        for turns in args.load:
            mix = Mix(prefill=args.prefill, decode=args.decode, load=turns, turns=args.turns, seed=args.seed)
            for variant in Variant:
                result = play(varied(policy, variant), mix)
                rows.append({"policy": name, "load": turns, "variant": variant.value, **result.to_json()})
    _show(rows)
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, "turns": args.turns, "runs": rows}, indent=1) + "\n")
    return 0


def shipped(name: str) -> Policy:
    """Raises `ConfigError`."""
    return build(load(compose("serve", [f"policy={name}", "cluster=simulated"]))).policy


def _show(rows: Sequence[Row]) -> None:
    table = Table("policy", "turns at a time", "variant")
    for title in ("prefill max/mean", "decode max/mean", "kept together", "prefix hits", "reused", "TTFT p50", "p99"):
        table.add_column(title, justify="right")
    for r in rows:
        shares = [f"{r[key]:.0%}" for key in ("together", "prefix_hits", "reused")]
        times = [f"{r[key]:.3f} s" for key in ("ttft_p50_s", "ttft_p99_s")]
        names = [str(r[key]) for key in ("policy", "load", "variant")]
        table.add_row(*names, f"{r['prefill']:.2f}", f"{r['decode']:.2f}", *shares, *times)
    Console(width=140).print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing", description=manual, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--policy", type=lambda s: s.split(","), default=["balanced", "adaptive"], metavar="NAME,…")
    add("--load", type=_numbers, default=[8, 32, 96], metavar="N,…", help="turns at a time; default: 8,32,96")
    add("--prefill", type=_number, default=4, metavar="N", help="nodes; default: %(default)s")
    add("--decode", type=_number, default=8, metavar="N", help="nodes; default: %(default)s")
    add("--turns", type=_number, default=4000, metavar="N", help="of each run; default: %(default)s")
    add("--seed", type=int, default=0, metavar="N")
    add("--json", type=Path, metavar="FILE", help="write the figures here as well")
    return parser


def _number(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_number(word) for word in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
