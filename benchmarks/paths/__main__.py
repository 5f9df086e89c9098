"""Command line of the benchmark; `benchmarks.paths` says what it measures."""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.paths import __doc__ as manual
from benchmarks.paths.grid import Cell, Contender, Load, cells
from benchmarks.paths.report import differing, markdown, rows, samples_json, show
from benchmarks.paths.run import Sample, Settings, run
from kvflow.errors import KvflowError

INTERRUPTED = 130


def main(words: Sequence[str] | None = None) -> int:
    """0 if the adaptive policy is within the limits in every cell and all answers are those of the cold path."""
    args = _parser().parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = Settings(rounds=args.rounds, warm_up=args.warm_up, seed=args.seed, overrides=args.overrides)
    grid = cells(args.history, args.new, args.load)
    try:
        samples = _played(settings, grid)
    except KeyboardInterrupt:
        return INTERRUPTED
    except KvflowError as error:
        print(f"benchmarks.paths: {error}", file=sys.stderr)
        return 1
    found = rows(samples)
    show(found, Console())
    print(f"{differing(samples)} of {len(samples)} answers differ from that of the cold path")
    if args.json:
        result = {"rows": [row.to_json() for row in found], "samples": samples_json(samples)}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(markdown(found) + "\n")
    slow = any(row.to_best > args.at_most or row.to_off > args.at_most_off for row in found)
    return int(slow or differing(samples) > 0)


def _played(settings: Settings, grid: Sequence[Cell]) -> list[Sample]:
    turns = len(Contender) * (len({c.history for c in grid}) + len(grid) * (settings.rounds + settings.warm_up))
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        task = progress.add_task("starting engines", total=turns)

        def told(what: str) -> None:
            progress.update(task, description=what, advance=1)
            if not console.is_terminal:  # where a bar would be shown at its end only
                console.print(f"{progress.tasks[task].completed:.0f}/{turns} {what}", highlight=False)

        return asyncio.run(run(settings, grid, told))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paths", description=manual, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--history", type=_naturals, default=[500, 2000], metavar="N,…", help="tokens, about; default: 500,2000")
    add("--new", type=_naturals, default=[16, 128, 512], metavar="N,…", help="new tokens; default: 16,128,512")
    add("--load", type=_loads, default=list(Load), metavar="LOAD,…", help=f"of {', '.join(Load)}; default: all")
    add("--rounds", type=int, default=7, metavar="N", help="turns of each policy in each cell; default: %(default)s")
    add("--warm-up", type=int, default=1, metavar="N", help="rounds that do not count; default: %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="of all texts; default: %(default)s")
    add("--at-most", type=float, default=1.1, metavar="RATIO", help="to the best fixed path; default: %(default)s")
    add("--at-most-off", type=float, default=1.05, metavar="RATIO", help="to the policy off; default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="write medians and every sample there")
    add("--markdown", type=Path, metavar="FILE", help="write the table there")
    add("overrides", nargs="*", metavar="key=value", help="for kvflow serve")
    return parser


def _naturals(text: str) -> list[int]:
    numbers = text.split(",")
    if bad := [n for n in numbers if not n.isdigit() or int(n) == 0]:
        raise argparse.ArgumentTypeError(f"{bad[0]!r} is no whole number above 0")
    return [int(n) for n in numbers]


def _loads(text: str) -> list[Load]:
    if bad := [w for w in text.split(",") if w not in list(Load)]:
        raise argparse.ArgumentTypeError(f"{bad[0]!r} is none of {', '.join(Load)}")
    return [Load(w) for w in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
