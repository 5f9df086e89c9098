"""Command line of the benchmark; `benchmarks.reuse` says what it measures."""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.reuse import __doc__ as manual
from benchmarks.reuse.corpus import Kind
from benchmarks.reuse.report import Run, show
from benchmarks.reuse.run import Case, Settings, run_all
from kvflow.errors import KvflowError

INTERRUPTED = 130


def main(words: Sequence[str] | None = None) -> int:
    """0 if no token is wrong and no share is below `--at-least`."""
    parser = _parser()
    args = parser.parse_args(words)
    if _is_url(args.nodes) and (args.block_size is None or args.overrides):
        parser.error("with a URL as --nodes, --block-size must be given, and there is no kvflow serve to override")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    told = Console(stderr=True)
    try:
        runs = asyncio.run(run_all(_settings(args), _cases(args), told))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseExceptionGroup as group:
        return _failed(group, told)
    except KvflowError as error:
        return _failed(BaseExceptionGroup("", [error]), told)
    show(runs, Console())
    if args.json:
        args.json.write_text(json.dumps(_to_json(args, runs), indent=1) + "\n")
    return int(any(run.total.wrong or run.total.share < args.at_least for run in runs))


def _failed(group: BaseExceptionGroup[BaseException], told: Console) -> int:
    """Several users may have met the same error; anything but ours is a bug and goes on its way."""
    ours, others = group.split(KvflowError)
    if others or not ours:
        raise group
    told.print(f"benchmarks.reuse: {next(_leaves(ours))}", style="red", markup=False, highlight=False)
    return 1


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        yield from _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(
        seed=args.seed,
        each=args.each,
        kinds=args.kinds,
        open_at_once=args.open,
        users=args.users,
        simulated=args.nodes == "simulated",
        overrides=args.overrides,
        url=args.nodes.rstrip("/").removesuffix("/v1") if _is_url(args.nodes) else None,
        block_size=args.block_size,
    )


def _cases(args: argparse.Namespace) -> list[Case]:
    if _is_url(args.nodes):
        return [Case(policy=args.nodes)]
    return [Case(policy=p, prefix_caching=caching) for caching in args.prefix_caching for p in args.policy]


def _to_json(args: argparse.Namespace, runs: Sequence[Run]) -> dict[str, object]:
    head = {"seed": args.seed, "each": args.each, "users": args.users, "nodes": args.nodes}
    return {**head, "runs": [run.to_json() for run in runs]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reuse", description=manual, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--policy", type=_names, default=_names("off,balanced,aggressive"), metavar="NAME,…", help="one run for each")
    add("--nodes", type=_nodes, default="simulated", metavar="simulated|real|URL", help="default: simulated")
    add("--prefix-caching", type=_switches, default=[True], metavar="on,off", help="of both roles; default: on")
    add("--kinds", type=_kinds, default=list(Kind), metavar="KIND,…", help=f"of {', '.join(Kind)}; default: all")
    add("--each", type=_natural, default=12, metavar="N", help="conversations of each kind; default: %(default)s")
    add("--open", type=_natural, default=8, metavar="N", help="conversations that take turns; default: %(default)s")
    add("--users", type=_natural, default=1, metavar="N", help="turns at a time; default: 1, which is reproducible")
    add("--seed", type=int, default=0, metavar="N", help="of corpus and order; default: %(default)s")
    add("--block-size", type=_natural, metavar="N", help="tokens in a block of the engines; needed with a URL only")
    add("--at-least", type=float, default=0.0, metavar="SHARE", help="exit with 1 where less is reused")
    add("--json", type=Path, metavar="FILE", help="write all figures there, turn by turn")
    add("overrides", nargs="*", metavar="key=value", help="for kvflow serve")
    return parser


def _is_url(nodes: str) -> bool:
    return nodes not in ("simulated", "real")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _nodes(text: str) -> str:
    if _is_url(text) and not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is neither simulated, real, nor a URL")
    return text


def _switches(text: str) -> list[bool]:
    if unknown := [word for word in _names(text) if word not in ("on", "off")]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is neither on nor off")
    return [word == "on" for word in _names(text)]


def _kinds(text: str) -> list[Kind]:
    if unknown := [word for word in _names(text) if word not in list(Kind)]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(Kind)}")
    return [Kind(word) for word in _names(text)]


def _natural(text: str) -> int:
    if not text.isdigit() or text == "0":
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
