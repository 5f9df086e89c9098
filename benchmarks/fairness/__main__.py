"""Command line of the benchmark; `benchmarks.fairness` says what it measures."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles

from rich.console import Console
from rich.table import Table

from benchmarks.fairness import __doc__ as manual
from benchmarks.fairness.play import FLOODER, VICTIM, Mix, Times, play
from benchmarks.serving import serve
from kvflow.errors import KvflowError
from kvflow.tenants.keys import hash_of, new_key

Figures = dict[str, float | int]


def main(words: Sequence[str] | None = None) -> int:
    """0 if the flood raises the victim's 99th percentile by no more than `--at-most`."""
    args = _parser().parse_args(words)
    mix = Mix(users=args.users, clients=args.clients, phases=args.phases, phase_s=args.phase_s)
    keys = {name: new_key() for name in (VICTIM, FLOODER)}
    env = {"KVFLOW_KEYS": ",".join(f"{name} {hash_of(key)}" for name, key in keys.items())}
    try:
        with serve(_overrides(args), env) as serving:
            times = asyncio.run(play(serving.url, mix, keys))
    except (KvflowError, ExceptionGroup) as error:
        print(f"benchmarks.fairness: {error}", file=sys.stderr)
        return 1
    figures = _figures(times)
    _show(figures)
    if args.json:
        args.json.write_text(json.dumps({"max_turns": args.max_turns, **figures}, indent=1) + "\n")
    return int(figures["p99"] > args.at_most)


def _overrides(args: argparse.Namespace) -> list[str]:
    limits = [f"tenants.{FLOODER}.max_turns={args.max_turns}", f"tenants.{FLOODER}.max_waiting=4"]
    return [
        "cluster=simulated",
        "cluster.prefill.replicas=4",
        "cluster.decode.replicas=8",
        *(f"+policy@tenants.{name}.policy=balanced" for name in (VICTIM, FLOODER)),
        *(limits if args.max_turns else []),
        *args.overrides,
    ]


def _figures(times: Times) -> Figures:
    quiet, flooded = _percentiles(times.quiet), _percentiles(times.flooded)
    return {
        "quiet_turns": len(times.quiet),
        "quiet_p50_s": quiet[49],
        "quiet_p99_s": quiet[98],
        "flooded_turns": len(times.flooded),
        "flooded_p50_s": flooded[49],
        "flooded_p99_s": flooded[98],
        "p50": flooded[49] / quiet[49],
        "p99": flooded[98] / quiet[98],
        "flood_answered": times.flood_answered,
        "flood_refused": times.flood_refused,
    }


def _percentiles(times: Sequence[float]) -> list[float]:
    return quantiles(times, n=100, method="inclusive")


def _show(f: Figures) -> None:
    table = Table("victim's turns", "p50", "p99")
    for kind in ("quiet", "flooded"):
        table.add_row(f"{f[f'{kind}_turns']} {kind}", f"{f[f'{kind}_p50_s']:.3f} s", f"{f[f'{kind}_p99_s']:.3f} s")
    table.add_row("flooded / quiet", f"{f['p50']:.2f}", f"{f['p99']:.2f}")
    console = Console()
    console.print(table)
    console.print(f"turns of the flood: {f['flood_answered']} answered, {f['flood_refused']} refused", highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fairness", description=manual, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--max-turns", type=int, default=2, metavar="N", help="of the flooder; 0: no limit; default: %(default)s")
    add("--users", type=int, default=4, metavar="N", help="of the victim; default: %(default)s")
    add("--clients", type=int, default=24, metavar="N", help="of the flooder; default: %(default)s")
    add("--phases", type=int, default=4, metavar="N", help="with the flood, and as many without; default: %(default)s")
    add("--phase-s", type=float, default=10.0, metavar="SECONDS", help="length of each; default: %(default)s")
    add("--at-most", type=float, default=1.2, metavar="RATIO", help="of the p99s; default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("overrides", nargs="*", metavar="key=value", help="for kvflow serve")
    return parser


if __name__ == "__main__":
    sys.exit(main())
